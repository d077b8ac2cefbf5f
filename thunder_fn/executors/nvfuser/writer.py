"""Writing an nvFuser definition, one equation at a time.

An emitter is a function of a Writer, the type of what the equation computes, and the op's own arguments, in which each
tensor is an `Operand`. It calls nvFuser's ops and returns what they give:

    @emits("aten.sub.Tensor", "aten.sub.Scalar")
    def _sub(w, out, a, b, *, alpha=1):
        return w.ops.sub(...)

An emitter refuses what nvFuser cannot do, or does otherwise than PyTorch, with `Refused`. Whether an equation can be
translated is found by running its emitter on a writer that writes nothing, so there is one function for each op and no
second one that says when it holds.

What nvFuser does with dtypes is not relied upon: operands are cast to the dtype that PyTorch computes in (float32 for
half precision), and results to the dtype of the trace. Nor is its broadcasting: operands get the result's shape.

Source: NVIDIA/Fuser 0.2.36, `python/python_direct/ops.cpp`, `csrc/type_promotion.cpp`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from thunder_fn.executors.base import NOT_REGISTERED
from thunder_fn.trace import Equation, NoneType, TensorType, Type, Var, python_arg, static_shape

DTYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Int",
    torch.int32: "Int32",
    torch.bool: "Bool",
}
"""What nvFuser's Python module calls the dtypes that regions may have. It has none of 8 or 16 bit integers."""

HALF = (torch.float16, torch.bfloat16)
Number = bool | int | float


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
    """A tensor: what the definition calls it, and its type in the trace."""

    val: Any
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes, which are numbers."""
        return static_shape(self.type)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the trace."""
        return self.type.dtype

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.type.shape)


Emitter = Callable[..., Any]
EMITTERS: dict[str, Emitter] = {}
"""What is known of each op, by its name."""


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
    """Writes a definition that is open."""

    def __init__(self, definition: Any, dtypes: Any) -> None:
        self.ops, self.dtypes = definition.ops, dtypes

    def dtype(self, dtype: torch.dtype) -> Any:
        """What nvFuser calls a dtype."""
        if dtype not in DTYPES:
            raise Refused(f"nvFuser's Python module has no {str(dtype).removeprefix('torch.')}")
        return getattr(self.dtypes, DTYPES[dtype])

    def cast(self, val: Any, dtype: torch.dtype) -> Any:
        """The same values in a dtype."""
        wanted = self.dtype(dtype)
        return val if val.dtype() == wanted else self.ops.cast(val, wanted)

    def value(self, x: Operand | Number, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Any:
        """An operand in the dtype in which it is computed with, and in the shape of the result; numbers stay numbers."""
        if not isinstance(x, Operand):
            return _number(x, dtype)
        val = self.cast(x.val, dtype)
        if shape is None or x.shape == shape:
            return val
        return self.ops.broadcast_in_dim(val, list(shape), list(range(len(shape) - x.rank, len(shape))))

    def equation(self, equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
        """Write an equation; what its outputs are called, None for those that it does not compute.

        Raises:
            Refused: nvFuser cannot compute it as PyTorch does.
        """

        def operand(var: Var) -> Any:
            if isinstance(var.type, NoneType):
                return None
            if not isinstance(var.type, TensorType):
                raise Refused("regions take tensors only")
            return Operand(read(var), var.type)

        args = [python_arg(arg, operand) for arg in equation.args]
        kwargs = {key: python_arg(arg, operand) for key, arg in equation.kwargs}
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
    """What writes an equation.

    Raises:
        Refused: nothing does.
    """
    try:
        return EMITTERS[equation.op.name]
    except KeyError:
        raise Refused(UNKNOWN) from None


def _number(x: Number, dtype: torch.dtype) -> Number:
    """A number of the kind that it is computed with as."""
    if not isinstance(x, bool | int | float):
        raise Refused(f"a {type(x).__name__} is no number for nvFuser")
    return float(x) if dtype.is_floating_point else bool(x) if dtype is torch.bool else int(x)


def dims_of(dims: Any, rank: int) -> list[int]:
    """The dims of a reduction as nvFuser takes them: each from zero; all of them where PyTorch is given none."""
    if isinstance(dims, int):
        dims = [dims]
    return sorted(dim % max(rank, 1) for dim in dims) if dims else list(range(rank))


def promoted(operands: Sequence[Operand | Number]) -> torch.dtype:
    """The dtype in which PyTorch compares two operands."""
    a, b = (_stand_in(x) for x in operands)
    return computed_in(torch.result_type(a, b))


def _stand_in(x: Operand | Number) -> Any:
    return torch.empty([1] * x.rank, dtype=x.dtype, device="meta") if isinstance(x, Operand) else x


class Blank:
    """A definition in which nothing is written: anything may be asked of it."""

    def __getattr__(self, name: str) -> Blank:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Blank:
        return self

    def __iter__(self) -> Any:
        return iter((self, self))


def why_not(equation: Equation) -> str | None:
    """Why an equation cannot be written, None if it can."""
    blank = Blank()
    try:
        Writer(blank, blank).equation(equation, lambda var: blank)
    except Refused as refusal:
        return str(refusal)
    return None
