"""Symbols as the numbers that user code takes them for.

PyTorch's symbolic numbers are no ints to Python: `isinstance(n, int)` is false, `f"{n}"` is the name of a symbol, and a
dict does not take them as keys. Code that asks such things would silently do something else than it does with the
number. `Int` and `Float` answer as ints and floats do; where only a number can answer, such as for a hash, they stand
for it from then on, which is a decision of the trace like any other. PyTorch's own code sees what it knows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.trace import Dim, Expr, TensorType

_TORCH = torch.__file__.rsplit("/", 1)[0]
_HERE = __file__.rsplit("/", 2)[0]
_OURS = (_TORCH, _HERE)
_OUTER = tuple(f"{_HERE}/{part}" for part in ("demo", "benchmarks", "testing"))


@lru_cache(maxsize=4096)
def _knows_symbols(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_OUTER)


def _asked_by_user(depth: int = 2) -> bool:
    """The code that asks is neither PyTorch's nor ours."""
    return not _knows_symbols(sys._getframe(depth).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]


class Int(torch.SymInt):
    """A symbolic int."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int if _asked_by_user() else Int

    def __str__(self) -> str:
        return str(int(self)) if _asked_by_user() else torch.SymInt.__str__(self)

    def __repr__(self) -> str:
        return repr(int(self)) if _asked_by_user() else torch.SymInt.__repr__(self)

    def __format__(self, spec: str) -> str:
        return format(int(self), spec) if _asked_by_user() else object.__format__(self, spec)

    def __hash__(self) -> int:
        return hash(int(self)) if _asked_by_user() else torch.SymInt.__hash__(self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def bit_length(self) -> int:
        """As of an int."""
        return int(self).bit_length()


class Float(torch.SymFloat):
    """A symbolic float."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return float if _asked_by_user() else Float

    def __str__(self) -> str:
        return str(float(self)) if _asked_by_user() else torch.SymFloat.__str__(self)

    def __repr__(self) -> str:
        return repr(float(self)) if _asked_by_user() else torch.SymFloat.__repr__(self)

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if _asked_by_user() else object.__format__(self, spec)

    def __hash__(self) -> int:
        return hash(float(self)) if _asked_by_user() else torch.SymFloat.__hash__(self)


_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rand", "ror", "rxor", "rlshift", "rrshift"),
    *("neg", "pos", "abs", "floor", "ceil", "trunc", "round"),
)


def _operator(method: Callable[..., Any]) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        return as_python(method(self, *args))

    return operate


for _kind, _base in ((Int, torch.SymInt), (Float, torch.SymFloat)):
    _kind.__name__ = _kind.__name__.lower()
    for _name in _OPERATORS:
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _operator(getattr(_base, f"__{_name}__")))


def as_python(value: Any) -> Any:
    """A symbolic number of PyTorch's, or a size, as user code takes it; anything else as it is."""
    match value:
        case torch.SymInt():
            return Int(value.node)
        case torch.SymFloat():
            return Float(value.node)
        case torch.Size():
            return torch.Size(tuple(map(as_python, value)))
        case tuple():
            return tuple(map(as_python, value))
        case _:
            return value


def running(size: Dim) -> Any:
    """A size as user code takes it that runs in the capture of this thread."""
    return as_python(internals.running_number(size)) if isinstance(size, Expr) else size


def running_shape(type: TensorType) -> tuple[Any, ...]:
    """The sizes of a type as user code takes them."""
    return tuple(map(running, type.shape))


def _symbolic_math(name: str) -> Callable[[Any], Callable[..., Any]]:
    def make(before: Any) -> Callable[..., Any]:
        symbolic = internals.SYMBOLIC_MATH[name]

        def function(*args: Any) -> Any:
            if len(args) == 1 and type(args[0]) in (Int, Float):
                return as_python(symbolic(args[0]))
            return before(*args)

        return function

    return make


MATH = internals.Patch(*((math, name, _symbolic_math(name)) for name in internals.SYMBOLIC_MATH))
"""While it is applied, functions of Python's `math` give expressions for symbols."""
