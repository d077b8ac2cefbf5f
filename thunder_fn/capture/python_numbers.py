"""Symbols as the numbers that user code takes them for.

PyTorch's symbolic numbers are no ints to Python: `isinstance(n, int)` is false, `f"{n}"` is the name of a symbol, and a
dict does not take them as keys. Code that asks such things would silently do something else than it does with the
number. `Int`, `Float` and `Bool` answer as ints, floats and bools do; where only a number can answer, such as for a
hash, they stand for it from then on, which is a decision of the trace like any other. PyTorch's own code sees what it
knows. What they compute is in `number_arithmetic.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.number_arithmetic import ARITHMETIC, COMPARISONS, arithmetic, compare, math_function
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


class Bool(torch.SymBool):
    """A symbolic bool: what a comparison of symbolic numbers gives."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return bool if _asked_by_user() else Bool

    def __str__(self) -> str:
        return str(bool(self)) if _asked_by_user() else torch.SymBool.__str__(self)

    def __repr__(self) -> str:
        return repr(bool(self)) if _asked_by_user() else torch.SymBool.__repr__(self)

    def __format__(self, spec: str) -> str:
        return format(bool(self), spec) if _asked_by_user() else object.__format__(self, spec)

    def __hash__(self) -> int:
        return hash(bool(self)) if _asked_by_user() else torch.SymBool.__hash__(self)

    def __index__(self) -> int:
        return int(bool(self))


_UNARY = ("neg", "pos", "abs", "floor", "ceil", "trunc", "round", "invert")


def _unary(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: as_python(method(self, *args))


def _binary(
    compute: Callable[[str, Any, Any], Any], name: str, otherwise: Callable[..., Any] | None, *, is_mirrored: bool
) -> Callable[..., Any]:
    """An operator of a class; what other operands than numbers make of it is up to the class before it."""

    def operate(self: Any, other: Any, *rest: Any) -> Any:
        if rest:
            return pow(int(self), int(other), *rest)
        result = compute(name, other, self) if is_mirrored else compute(name, self, other)
        if result is NotImplemented and otherwise is not None:
            result = otherwise(self, other)
        return as_python(result)

    return operate


for _kind, _base in ((Int, torch.SymInt), (Float, torch.SymFloat), (Bool, torch.SymBool)):
    _kind.__name__ = _kind.__name__.lower()
    for _name in _UNARY:
        if hasattr(_base, f"__{_name}__"):
            setattr(_kind, f"__{_name}__", _unary(getattr(_base, f"__{_name}__")))
    for _compute, _names in ((arithmetic, ARITHMETIC), (compare, COMPARISONS)):
        for _name in _names:
            _before = getattr(_base, f"__{_name}__", None)
            if _kind is Bool and _name in ("and", "or"):
                setattr(_kind, f"__{_name}__", _unary(getattr(_base, f"__{_name}__")))
                continue
            setattr(_kind, f"__{_name}__", _binary(_compute, _name, _before, is_mirrored=False))
            if _compute is arithmetic:
                _before = getattr(_base, f"__r{_name}__", None)
                setattr(_kind, f"__r{_name}__", _binary(_compute, _name, _before, is_mirrored=True))


def as_python(value: Any) -> Any:
    """A symbolic number of PyTorch's, or a size, as user code takes it; anything else as it is."""
    match value:
        case torch.SymInt():
            return Int(value.node)
        case torch.SymFloat():
            return Float(value.node)
        case torch.SymBool():
            return Bool(value.node)
        case torch.Size():
            return torch.Size(tuple(map(as_python, value)))
        case tuple():
            return tuple(map(as_python, value))
        case list():
            return list(map(as_python, value))
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
        def function(*args: Any) -> Any:
            if len(args) == 1 and type(args[0]) in (Int, Float):
                return as_python(math_function(name, args[0]))
            return before(*args)

        return function

    return make


MATH = internals.Patch(*((math, name, _symbolic_math(name)) for name in internals.SYMBOLIC_MATH))
"""While it is applied, functions of Python's `math` give expressions for symbols."""
