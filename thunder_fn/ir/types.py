"""The types of a trace's variables, and the expressions that their sizes and numbers may be.

Type ::= TensorType(dtype, shape, device) | NumberType(kind, Expr?) | NoneType
Dim  ::= int | Expr
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from thunder_fn.errors import InvalidTrace, TraceTypeError, kind_of

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True, slots=True)
class Expr:
    """An expression over the trace's symbols, such as `s0 + 1` or `s0 > 5`. The algebra is
    sympy's.
    """

    value: sympy.Basic

    @property
    def kind(self) -> type[bool] | type[int] | type[float]:
        """The kind of number that it computes."""
        if self.value.is_Boolean or self.value.is_Relational:
            return bool
        return int if self.value.is_integer else float

    def __str__(self) -> str:
        from thunder_fn.torch_internals import expression_text

        return expression_text(self.value)


Dim: TypeAlias = int | Expr


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a tensor: dtype, shape, device. Strides are not part of it.

    Example:
        >>> import torch
        >>> from thunder_fn.ir import TensorType
        >>> print(TensorType(torch.float32, (2, 3)))
        f32[2, 3]
    """

    dtype: torch.dtype
    shape: tuple[Dim, ...]
    device: torch.device = torch.device("cpu")

    def __post_init__(self) -> None:
        if (
            isinstance(self.dtype, torch.dtype)
            and isinstance(self.shape, tuple)
            and isinstance(self.device, torch.device)
        ):
            return
        given = ", ".join(map(kind_of, (self.dtype, self.shape, self.device)))
        raise TraceTypeError(
            f"TensorType: expected a dtype, a tuple and a device, given {given}",
            fix='Write `TensorType(torch.float32, (2, 3), torch.device("cpu"))`.',
        )

    def __str__(self) -> str:
        text = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        return text if self.device.type == "cpu" else f"{self.device} {text}"


@dataclass(frozen=True, slots=True)
class NumberType:
    """The type of a Python number: bool, int, float or complex, and which number it is, where
    symbols say that.
    """

    kind: type[bool] | type[int] | type[float] | type[complex]
    value: Expr | None = None

    def __str__(self) -> str:
        return self.kind.__name__ if self.value is None else f"{self.kind.__name__} {self.value}"


@dataclass(frozen=True, slots=True)
class NoneType:
    """The type of a result that an op does not compute, such as a gradient that was masked out."""

    def __str__(self) -> str:
        return "None"


Type: TypeAlias = TensorType | NumberType | NoneType


def as_dim(value: Any) -> Any:
    """A number of PyTorch's while it traces (`torch.SymInt` and its like) as an expression, or as
    the number that it is known to be.
    """
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr, kind = value.node.expr, value.node.pytype
        if expr.free_symbols:
            return Expr(expr)
        number, hint = kind(expr), value.node.hint if kind is float else None
        return hint if hint == number else number  # sympy has no zero with a sign
    return value


def symbols_of_type(type: Type) -> Iterator[sympy.Basic]:
    """The symbols in a type, with repeats."""
    if isinstance(type, TensorType):
        for size in type.shape:
            if not isinstance(size, int):
                yield from size.value.free_symbols
    elif isinstance(type, NumberType) and type.value is not None:
        yield from type.value.value.free_symbols


def short_dtype(dtype: torch.dtype) -> str:
    """`torch.float32` as `f32`, `torch.int64` as `i64`, `torch.bool` as `bool`."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (
        ("bfloat", "bf"),
        ("float8_", "f8_"),
        ("float", "f"),
        ("complex", "c"),
        ("uint", "u"),
        ("int", "i"),
    ):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def is_differentiable(type: Type) -> bool:
    """Test for a floating or complex tensor, which has derivatives."""
    return isinstance(type, TensorType) and (type.dtype.is_floating_point or type.dtype.is_complex)


def is_on(type: object, device: str) -> bool:
    """Test for the type of a tensor on a device of this kind: "cpu", "cuda"."""
    return isinstance(type, TensorType) and type.device.type == device


def is_scalar(type: object) -> bool:
    """Test for the type of a tensor without dims."""
    return isinstance(type, TensorType) and not type.shape


def static_shape(type: TensorType) -> tuple[int, ...]:
    """The shape of a type whose sizes are all numbers.

    Raises:
        InvalidTrace: a size is symbolic.
    """
    return tuple(map(_static_size, type.shape))


def _static_size(dim: Dim) -> int:
    if not isinstance(dim, int):
        raise InvalidTrace(f"the size {dim} is symbolic, where a number is needed")
    return dim
