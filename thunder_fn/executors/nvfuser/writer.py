"""Writing an nvFuser definition, one equation at a time.

An emitter is a function of a Writer, the type of the result, and the op's own arguments. Each
tensor among these is an `Operand`. It calls nvFuser's ops and returns what they give:

    @emits("aten.sub.Tensor", "aten.sub.Scalar")
    def _sub(w, out, a, b, *, alpha=1):
        return w.ops.sub(...)

An emitter refuses ops that nvFuser cannot do, or does otherwise than PyTorch, with `Refused`. To
find out whether an equation can be translated, its emitter runs on a writer that writes nothing. So
there is one function for each op, and no second one that says when it holds.

nvFuser's treatment of dtypes is not relied upon. Operands are cast to the dtype that PyTorch
computes in (float32 for half precision), results to the dtype of the trace. Nor is its
broadcasting: operands get the result's shape.

Sizes and numbers that are symbols are PyTorch's symbolic numbers to an emitter. So its decisions
about them are known, as those of PyTorch's own kernels are. One that reaches nvFuser is the size of
an input, or a scalar input that is computed in Python: nvFuser does no arithmetic on sizes.

Source: NVIDIA/Fuser 0.2.36, `python/python_direct/ops.cpp`, `csrc/type_promotion.cpp`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thunder_fn.errors import kind_of
from thunder_fn.extend.regions import NOT_REGISTERED
from thunder_fn.ir.trace import (
    Dim,
    Equation,
    Expr,
    Literal,
    NoneType,
    TensorType,
    Type,
    Var,
    as_dim,
)
from thunder_fn.torch_internals import Numbers

DTYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
"""The names in nvFuser's Python module of the dtypes that regions may have. It has no integers
of 8 or 16 bits.
"""

HALF = (torch.float16, torch.bfloat16)
Symbolic = torch.SymInt | torch.SymFloat
Number = bool | int | float | Symbolic


UNKNOWN = NOT_REGISTERED.reason


class Library(Protocol):
    """The parts of the module `nvfuser_direct` that are used."""

    FusionDefinition: Any
    DataType: Any
    compute_tensor_descriptor: Any


class Refused(Exception):
    """nvFuser cannot compute an equation as PyTorch does: why."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor: what the definition calls it, its type in the trace, and its sizes as numbers to
    compute with.
    """

    val: Any
    type: TensorType
    shape: tuple[Any, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the trace."""
        return self.type.dtype

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.type.shape)


Emitter = Callable[..., Any]
EMITTERS: dict[str, Emitter] = {}
"""The emitter of each op, by its name."""


def emits(*names: str) -> Callable[[Emitter], Emitter]:
    """Enter the emitter of ops."""

    def register(emitter: Emitter) -> Emitter:
        EMITTERS.update(dict.fromkeys(names, emitter))
        return emitter

    return register


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype that PyTorch's kernels compute in for results of this one."""
    return torch.float32 if dtype in HALF else dtype


class Writer:
    """The writer of an open definition.

    Args:
        definition: nvFuser's.
        dtypes: nvFuser's `DataType`.
        numbers: what knows of the symbols, and is told of what is decided about them.
    """

    def __init__(self, definition: Any, dtypes: Any, numbers: Numbers | None = None) -> None:
        self.definition, self.dtypes = definition, dtypes
        self.ops: Any = _Ops(self, definition.ops)
        self.scalars: list[Expr] = []
        """The symbolic numbers that are inputs behind the tensors, in order."""
        self._numbers, self._scalar_vals = numbers, dict[Expr, Any]()

    def dtype(self, dtype: torch.dtype) -> Any:
        """The name of a dtype in nvFuser."""
        if dtype not in DTYPES:
            raise Refused(f"nvFuser's Python module has no {str(dtype).removeprefix('torch.')}")
        return getattr(self.dtypes, DTYPES[dtype])

    def cast(self, val: Any, dtype: torch.dtype) -> Any:
        """Cast values to a dtype."""
        wanted = self.dtype(dtype)
        return val if val.dtype() == wanted else self.ops.cast(val, wanted)

    def value(self, x: Operand | Number, dtype: torch.dtype, out: TensorType | None = None) -> Any:
        """An operand in the dtype in which it is computed with, and in the shape of the result;
        numbers stay numbers.
        """
        if not isinstance(x, Operand):
            return number(x, dtype)
        val = self.cast(x.val, dtype)
        if out is None or x.type.shape == out.shape:
            return val
        rank = len(out.shape)
        return self.ops.broadcast_in_dim(
            val, list(self.shape(out)), list(range(rank - x.rank, rank))
        )

    # ---- sizes ----

    def shape(self, type: TensorType) -> tuple[Any, ...]:
        """The sizes of a type as numbers to compute with."""
        return tuple(map(self.size, type.shape))

    def size(self, dim: Dim) -> Any:
        """A size, or another number of the trace, to compute with."""
        if not isinstance(dim, Expr):
            return dim
        if self._numbers is None:
            self._numbers = Numbers()
        return self._numbers.number(dim)

    def know(self, dim: Dim, val: Any) -> None:
        """Note the definition's name for a size of an input."""
        if isinstance(dim, Expr):
            self._scalar_vals.setdefault(dim, val)

    def plain(self, arg: Any) -> Any:
        """An argument as nvFuser takes it: symbolic numbers are scalars of the definition."""
        if isinstance(arg, list):
            return [self.plain(item) for item in arg]
        expr = as_dim(arg)
        if not isinstance(expr, Expr):
            return expr
        if expr not in self._scalar_vals:
            dtype = self.dtypes.Int if expr.kind is int else self.dtypes.Double
            self._scalar_vals[expr] = self.definition.define_scalar(dtype=dtype)
            self.scalars.append(expr)
        return self._scalar_vals[expr]

    # ---- equations ----

    def operand(self, val: Any, type: TensorType) -> Operand:
        """A tensor of the definition with its type."""
        return Operand(val, type, self.shape(type))

    def equation(self, equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
        """Write an equation. Returns the names of its outputs, None for those that it does not
        compute.

        Raises:
            Refused: nvFuser cannot compute it as PyTorch does.
        """

        def argument(arg: Any) -> Any:
            match arg:
                case Var(type=NoneType()):
                    return None
                case Var(type=TensorType() as type):
                    return self.operand(read(arg), type)
                case Var():
                    raise Refused("regions take tensors only")
                case Literal():
                    return self.size(arg.value)
                case _:
                    return [argument(item) for item in arg]

        args = [argument(arg) for arg in equation.args]
        kwargs = {key: argument(arg) for key, arg in equation.kwargs}
        types = tuple(var.type for var in equation.outputs)
        emitter, out = emitter_of(equation), types[0] if len(types) == 1 else types
        try:
            inspect.signature(emitter).bind(self, out, *args, **kwargs)
        except TypeError as error:
            raise Refused(f"not in this form: {error}") from error
        found = emitter(self, out, *args, **kwargs)
        results = (found,) if len(types) == 1 else tuple(found)
        return tuple(self.result(val, type) for val, type in zip(results, types, strict=True))

    def result(self, val: Any, type: Type) -> Any:
        """A result in the dtype that it has in the trace."""
        return self.cast(val, type.dtype) if isinstance(type, TensorType) else None


def emitter_of(equation: Equation) -> Emitter:
    """The emitter that writes an equation.

    Raises:
        Refused: nothing does.
    """
    try:
        return EMITTERS[equation.op.name]
    except KeyError:
        raise Refused(UNKNOWN) from None


def number(x: Number, dtype: torch.dtype) -> Number:
    """A number of the kind that it is computed with as."""
    if isinstance(x, Symbolic):
        if dtype is torch.bool:
            raise Refused("whether a symbolic number is zero")
        return torch.sym_float(x) if dtype.is_floating_point else x
    if not isinstance(x, bool | int | float):
        raise Refused(f"{kind_of(x)} is no number for nvFuser")
    return float(x) if dtype.is_floating_point else bool(x) if dtype is torch.bool else int(x)


def dims_of(dims: Any, rank: int) -> list[int]:
    """The dims of a reduction as nvFuser takes them: each from zero; all of them where PyTorch
    is given none.
    """
    if isinstance(dims, int):
        dims = [dims]
    return sorted(dim % max(rank, 1) for dim in dims) if dims else list(range(rank))


def promoted(operands: Sequence[Operand | Number]) -> torch.dtype:
    """The dtype in which PyTorch compares two operands."""
    a, b = (_stand_in(x) for x in operands)
    return computed_in(torch.result_type(a, b))


def _stand_in(x: Operand | Number) -> Any:
    if isinstance(x, Operand):
        return torch.empty([1] * x.rank, dtype=x.dtype, device="meta")
    return x if not isinstance(x, Symbolic) else 0 if isinstance(x, torch.SymInt) else 0.0


class _Ops:
    """nvFuser's ops, given arguments as emitters have them."""

    def __init__(self, writer: Writer, ops: Any) -> None:
        self.writer, self.ops = writer, ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op, plain = getattr(self.ops, name), self.writer.plain
        return lambda *args: op(*map(plain, args))


class Blank:
    """A definition in which nothing is written: anything may be asked of it."""

    def __getattr__(self, name: str) -> Blank:
        return self

    def __call__(self, /, *args: Any, **kwargs: Any) -> Blank:
        return self

    def __iter__(self) -> Any:
        return iter((self, self))


def why_not(equation: Equation) -> str | None:
    """The reason why an equation cannot be written, None if it can."""
    blank = Blank()
    try:
        Writer(blank, blank).equation(equation, lambda var: blank)
    except Refused as refusal:
        return str(refusal)
    return None
