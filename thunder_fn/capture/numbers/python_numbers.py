"""Symbols as the numbers that user code takes them for.

PyTorch's symbolic numbers are no ints to Python. `isinstance(n, int)` is false, `f"{n}"` is the
name of a symbol, and a dict does not take them as keys. Code that asks such things would silently
do something else than it does with the number. `Int`, `Float` and `Bool` answer as ints, floats and
bools do. If only a number can answer, such as for a hash, they stand for it from then on. That is a
decision of the trace like any other. PyTorch's own code sees what it knows. Their arithmetic is in
`arithmetic.py`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arithmetic import (
    ARITHMETIC,
    COMPARISONS,
    arithmetic,
    compare,
    concrete,
    math_function,
    math_power,
)
from thunder_fn.capture.numbers.membership import hash_in_table
from thunder_fn.ir.trace import Dim, Expr, TensorType
from thunder_fn.lines import OWN_FILES
from thunder_fn.version import FOLDER

_TORCH = torch.__file__.rsplit("/", 1)[0]
_OURS = (_TORCH, FOLDER)
_OUTER = (*OWN_FILES, f"{_TORCH}/optim/")  # steps and schedules are Python on Python's numbers


@lru_cache(maxsize=4096)
def _knows_symbols(file: str) -> bool:
    return file.startswith(_OURS) and not file.startswith(_OUTER)


def _asked_by_user() -> bool:
    """Test whether the user's code asks, not PyTorch's or ours."""
    return not _knows_symbols(sys._getframe(2).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]


class _Kind(type):
    """The metaclass of classes that stand for Python's numbers. To user code, such a class equals
    the number's, as in `type(n) == int` and `table[type(n)]`.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or (other is _NUMBERS[cls.__base__] and _asked_by_user())

    def __hash__(cls) -> int:
        return hash(_NUMBERS[cls.__base__])


_NUMBERS: dict[Any, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""The class of Python's numbers for each class of symbolic ones."""


class Int(torch.SymInt, metaclass=_Kind):
    """A symbolic int."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return int if _asked_by_user() else Int

    def __round__(self, ndigits: int | None = None) -> Any:
        return self if ndigits is None or ndigits >= 0 else round(int(self), ndigits)

    def __invert__(self) -> Any:
        return -self - 1


class Float(torch.SymFloat, metaclass=_Kind):
    """A symbolic float."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return float if _asked_by_user() else Float

    def __round__(self, ndigits: Any = None) -> Any:
        rounded = super().__round__  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
        return as_python(rounded(None if ndigits is None else concrete(ndigits)))


class Bool(torch.SymBool, metaclass=_Kind):
    """A symbolic bool: the result of comparing symbolic numbers."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return bool if _asked_by_user() else Bool

    def __index__(self) -> int:
        return int(bool(self))


_UNARY = ("neg", "pos", "abs", "floor", "ceil", "trunc", "round")
_DECIDED = ("as_integer_ratio", "bit_count", "bit_length", "hex", "is_integer", "to_bytes")
"""Methods of Python's numbers that only a number can answer."""


def _answer(
    number: type, make: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """Answer the user's code by Python's number, other code as PyTorch does."""
    return lambda self, *args: (
        make(number(self), *args) if _asked_by_user() else otherwise(self, *args)
    )


def _answer_users(kind: Any, base: Any, number: type) -> None:
    """Let texts and hashes in the user's code be those of Python's number."""
    for make, otherwise in (
        *((make, getattr(base, f"__{make.__name__}__")) for make in (str, repr, hash)),
        (format, object.__format__),
    ):
        setattr(kind, f"__{make.__name__}__", _answer(number, make, otherwise))


def _hash(self: Any) -> int:
    """The hash of an int. A search of a table is a decision about its keys."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    if _knows_symbols(frame.f_code.co_filename):
        return torch.SymInt.__hash__(self)
    found = hash_in_table(self, frame)
    return hash(int(self)) if found is None else found


def _unary(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: as_python(method(self, *args))


def _binary(
    compute: Callable[[str, Any, Any], Any],
    name: str,
    otherwise: Callable[..., Any] | None,
    *,
    is_mirrored: bool,
) -> Callable[..., Any]:
    """Make an operator of a class. For operands that are no numbers, the operator of the base class
    is called.
    """

    def operate(self: Any, other: Any, *rest: Any) -> Any:
        if rest:
            return pow(concrete(self), concrete(other), *rest)
        result = compute(name, other, self) if is_mirrored else compute(name, self, other)
        if result is NotImplemented and otherwise is not None:
            result = otherwise(self, other)
        return as_python(result)

    return operate


def _of_flags(name: str) -> Callable[..., Any]:
    """Make `&` or its like. On two flags it gives a flag; on a flag and a number, a number."""

    def operate(self: Any, other: Any) -> Any:
        if name == "xor" or not isinstance(other, (bool, torch.SymBool)):
            return getattr(operator, name)(bool(self), concrete(other))
        return as_python(getattr(torch.SymBool, f"__{name.strip('_')}__")(self, other))

    return operate


def _divmod(self: Any, other: Any) -> tuple[Any, Any]:
    return self // other, self % other


def _rdivmod(self: Any, other: Any) -> tuple[Any, Any]:
    return other // self, other % self


def _decided(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(concrete(self), name)(*args, **kwargs)


def _part(name: str, number: type) -> Any:
    """Make a property such as `real`: the number itself, or the same constant for all."""
    value = getattr(number(1), name)
    own = name in ("real", "numerator")
    return property(
        lambda self: (int(bool(self)) if number is bool else self) if own else type(value)(value)
    )


def _on_arrays(self: Any, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
    """Let NumPy compute with the number."""
    return getattr(function, method)(*map(concrete, inputs), **options)


def _complete(kind: Any, base: Any, number: type) -> None:
    """Give the class that stands for a Python number all attributes of that number."""
    kind.__name__ = kind.__name__.lower()
    kind.__divmod__, kind.__rdivmod__, kind.__array_ufunc__ = _divmod, _rdivmod, _on_arrays
    kind.conjugate = lambda self: self.real
    for name in ("real", "imag", "numerator", "denominator"):
        if hasattr(number, name):
            setattr(kind, name, _part(name, number))
    for name in _DECIDED:
        if hasattr(number, name):
            setattr(kind, name, _decided(name))
    for name in _UNARY:
        if hasattr(base, f"__{name}__") and f"__{name}__" not in vars(kind):
            setattr(kind, f"__{name}__", _unary(getattr(base, f"__{name}__")))
    for compute, names in ((arithmetic, ARITHMETIC), (compare, COMPARISONS)):
        for name in names:
            before = getattr(base, f"__{name}__", None)
            setattr(kind, f"__{name}__", _binary(compute, name, before, is_mirrored=False))
            if compute is arithmetic:
                before = getattr(base, f"__r{name}__", None)
                setattr(kind, f"__r{name}__", _binary(compute, name, before, is_mirrored=True))


for _made in (
    (Int, torch.SymInt, int),
    (Float, torch.SymFloat, float),
    (Bool, torch.SymBool, bool),
):
    _complete(*_made)
    _answer_users(*_made)
Int.__hash__ = _hash  # type: ignore[assignment]
for _name in ("neg", "pos", "abs", "invert", "round", "floor", "ceil", "trunc"):
    setattr(
        Bool,
        f"__{_name}__",
        lambda self, *args, name=f"__{_name}__": getattr(int(bool(self)), name)(*args),
    )
for _name in ("and_", "or_", "xor"):
    _method = _of_flags(_name)
    setattr(Bool, f"__{_name.strip('_')}__", _method)
    setattr(Bool, f"__r{_name.strip('_')}__", _method)


def as_python(value: Any) -> Any:
    """Return a symbolic number of PyTorch, or a size, as user code takes it; anything else as it
    is.
    """
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


def class_of_numbers(value: Any) -> Any:
    """Return Python's class for a class of symbolic numbers; anything else as it is."""
    return _NUMBERS[value.__base__] if type(value) is _Kind else value


def running(size: Dim) -> Any:
    """Return a size, as user code takes it, in the capture that runs in this thread."""
    return as_python(internals.running_number(size)) if isinstance(size, Expr) else size


def running_shape(type: TensorType) -> tuple[Any, ...]:
    """The sizes of a type as user code takes them."""
    return tuple(map(running, type.shape))


def running_zeros(type: TensorType) -> torch.Tensor:
    """A tensor of zeros of a type."""
    return torch.zeros(running_shape(type), dtype=type.dtype, device=type.device)


def _symbolic_math(name: str) -> Callable[[Any], Callable[..., Any]]:
    def make(before: Any) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            if len(args) == 1 and type(args[0]) in (Int, Float):
                return as_python(math_function(name, args[0]))
            return before(*args)

        return function

    return make


def _symbolic_power(before: Any) -> Callable[..., Any]:
    def pow(*args: Any) -> Any:
        if len(args) == 2 and any(type(arg) in (Int, Float) for arg in args):
            return as_python(math_power(*args))
        return before(*args)

    return pow


MATH = internals.Patch(
    *((math, name, _symbolic_math(name)) for name in internals.SYMBOLIC_MATH),
    (math, "pow", _symbolic_power),
)
"""The patch by which functions of Python's `math` give expressions for symbols."""
