"""Arithmetic, comparisons and `math` on symbolic numbers, as Python has them.

Errors of Python are raised, and their absence is a decision: `a // b` asks whether `b == 0`, and
`math.sqrt(a)` whether `a < 0`. Floats are computed step by step (`thunder_fn.ir.floats`). No
algebra is known of infinities, NaN and the negative zero, so the symbols beside such an operand
stand for their numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import sympy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.ir.floats import STEPS, IntDivision

Sym = (torch.SymInt, torch.SymFloat)
ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, f"{name}_" if name in ("and", "or") else name)
    for name in (*ARITHMETIC, *COMPARISONS)
}
_DIVISIONS = ("truediv", "floordiv", "mod")
_OTHER = (complex, Decimal, np.generic, np.ndarray)
"""Numbers beside which a symbol stands for its number."""

_EXPONENT = 1000.0
"""Powers of two up to this one are floats."""


def arithmetic(name: str, a: Any, b: Any) -> Any:
    """Compute `a + b` and its like, if one of them is symbolic. Return NotImplemented if an operand
    is no number of Python's.
    """
    if isinstance(a, _OTHER) or isinstance(b, _OTHER):
        return _PYTHON[name](concrete(a), concrete(b))
    a, b = _number(a), _number(b)
    if a is None or b is None:
        return NotImplemented
    if not isinstance(a, Sym) and not isinstance(b, Sym):
        return _PYTHON[name](a, b)
    if _is_singular(a) or _is_singular(b):
        return _PYTHON[name](concrete(a), concrete(b))
    if name in _DIVISIONS and _holds(b, lambda: b == 0):
        return _PYTHON[name](type(concrete(a))(1), concrete(b))  # raises
    if name in ("lshift", "rshift") and _holds(b, lambda: b < 0):
        return _PYTHON[name](1, -1)
    if (
        name == "truediv"
        and not _is_float(a)
        and not _is_float(b)
        and not (_is_natural(a) and _is_natural(b))
    ):
        return _computed(IntDivision(_exact(a), _exact(b)), name, a, b)
    if not _is_float(a) and not _is_float(b) and not (name == "pow" and _holds(b, lambda: b < 0)):
        return _of_torch(name, a, b)
    return _of_floats(name, a, b)


def _of_torch(name: str, a: Any, b: Any) -> Any:
    """Apply an operator as PyTorch has it."""
    if isinstance(a, Sym):
        return getattr(_class(a), f"__{name}__")(a, b)
    return getattr(_class(b), f"__r{name}__")(b, a)


def _class(value: Any) -> type:
    return torch.SymInt if isinstance(value, torch.SymInt) else torch.SymFloat


def _of_floats(name: str, a: Any, b: Any) -> Any:
    """Apply one step of float arithmetic. A symbol is replaced by its number if the step could
    leave the floats.
    """
    if name not in STEPS:
        return _PYTHON[name](concrete(a), concrete(b))  # raises
    if name == "pow":
        a, b = _power_operands(a, b)
        if not isinstance(a, Sym) and not isinstance(b, Sym):
            return a**b
    hints = [_hint(value) for value in (a, b)]
    if None not in hints and not math.isfinite(_PYTHON[name](*hints)):
        return _PYTHON[name](concrete(a), concrete(b))
    return _computed(STEPS[name](_as_float(a), _as_float(b)), name, a, b)


def _computed(expr: Any, name: str, a: Any, b: Any) -> Any:
    """The float of an expression, which is an operator on two numbers."""
    numbers = next(value.node.shape_env for value in (a, b) if isinstance(value, Sym))
    hints = [_hint(value) for value in (a, b)]
    return numbers.computed(expr, None if None in hints else _PYTHON[name](*hints))


def _is_natural(value: Any) -> bool:
    """Test for an int that is known not to be negative, as sizes are."""
    return bool(value.node.expr.is_nonnegative) if isinstance(value, Sym) else value >= 0


def _exact(value: Any) -> Any:
    return value.node.expr if isinstance(value, Sym) else sympy.Integer(value)


def _power_operands(a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands of a power of floats; as numbers, unless decisions say that the power is
    a finite float.
    """
    if isinstance(a, Sym) and isinstance(b, Sym):
        if _is_between(a, 0.0, 1.0) and _is_between(b, -1.0, None):
            return a, b
        b = concrete(b)
    if isinstance(b, Sym):
        growth = math.log2(a) if a > 0 else math.inf
        limit = _EXPONENT / growth if growth else 0.0
        is_safe = growth == 0 or (  # a power near zero is a float
            growth < math.inf
            and (_is_between(b, None, limit) if growth > 0 else _is_between(b, limit, None))
        )
        return (a, b) if is_safe else (a, concrete(b))
    is_whole = b >= 0 and b == int(b)
    if isinstance(a, torch.SymInt):
        is_safe = abs(b) <= _EXPONENT / 62 and (is_whole or _is_between(a, 0, None))
    else:
        limit = 2.0 ** min(_EXPONENT / abs(b) if b else _EXPONENT, _EXPONENT)
        is_safe = _is_between(a, -limit if is_whole else 1 / limit, limit)
    return (a, b) if is_safe else (concrete(a), b)


def _is_between(value: Any, low: float | None, high: float | None) -> bool:
    """Decide that a number lies between two others. One that depends on data is assumed to."""
    return _hint(value) is None or (
        (low is None or bool(value > low)) and (high is None or bool(value < high))
    )


def compare(name: str, a: Any, b: Any) -> Any:
    """`a < b` and its like, one of which is symbolic."""
    if isinstance(a, _OTHER) or isinstance(b, _OTHER):
        return _PYTHON[name](concrete(a), concrete(b))
    a, b = _number(a), _number(b)
    if a is None or b is None:
        return NotImplemented
    is_known = not isinstance(a, Sym) and not isinstance(b, Sym)
    if is_known or _is_singular(a) or _is_singular(b) or _is_inexact(a, b) or _is_inexact(b, a):
        return _PYTHON[name](concrete(a), concrete(b))
    return _of_torch(name, a, b) if isinstance(a, Sym) else _of_torch(_MIRRORED[name], b, a)


_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


def _number(value: Any) -> Any:
    """Return an operand, a bool as an int; None if it is no real number."""
    if isinstance(value, (bool, torch.SymBool)):
        return int(bool(value))
    return value if isinstance(value, (int, float, *Sym)) else None


def _is_float(value: Any) -> bool:
    return not isinstance(value, (int, torch.SymInt))


def _is_singular(value: Any) -> bool:
    """Test for infinity, NaN and the like, for which no algebra holds."""
    return not isinstance(value, Sym) and isinstance(value, float) and not is_plain(value)


def is_plain(value: float) -> bool:
    """Test for a float that a symbol can stand for: finite, and not the zero with a sign, which
    equals the other one.
    """
    return math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0)


def _is_inexact(a: Any, b: Any) -> bool:
    """Test for an int beside a symbolic float that no float equals."""
    return (
        isinstance(b, torch.SymFloat)
        and not isinstance(a, Sym)
        and isinstance(a, int)
        and abs(a) >= 2**53
    )


def _hint(value: Any) -> Any:
    return value.node.hint if isinstance(value, Sym) else value


def is_found_in_data(value: Any) -> bool:
    """Test for a symbolic number or bool whose value only the program's data says."""
    return isinstance(value, (*Sym, torch.SymBool)) and value.node.hint is None


def _holds(value: Any, question: Callable[[], Any]) -> bool:
    """Answer a question. One about an unbacked number is False, and the program checks it."""
    return False if _hint(value) is None else bool(question())


def _as_float(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return internals.to_float(value.node.expr)
    return value.node.expr if isinstance(value, torch.SymFloat) else sympy.Float(float(value))


def concrete(value: Any) -> Any:
    """Return the number that a symbolic number stands for from now on; anything else as it is."""
    if isinstance(value, torch.SymBool):
        return bool(value)
    if not isinstance(value, Sym):
        return value
    return int(value) if isinstance(value, torch.SymInt) else float(value)


# ---- math ----

_DOMAINS: dict[str, tuple[float, float]] = {
    "sqrt": (0.0, math.inf),
    "asin": (-1.0, 1.0),
    "acos": (-1.0, 1.0),
    "sinh": (-710.0, 710.0),
    "cosh": (-710.0, 710.0),
}


def math_power(a: Any, b: Any) -> Any:
    """`math.pow(a, b)`, one of which is symbolic: the power of two floats."""
    if not isinstance(a, (int, float, *Sym)) or not isinstance(b, (int, float, *Sym)):
        return math.pow(concrete(a), concrete(b))  # raises
    if not _is_singular(a) and not _is_singular(b):
        a, b = _power_operands(a, b)
    hints = _hint(a), _hint(b)
    is_known = not isinstance(a, Sym) and not isinstance(b, Sym)
    if is_known or _is_singular(a) or _is_singular(b):
        return math.pow(concrete(a), concrete(b))
    numbers = next(value.node.shape_env for value in (a, b) if isinstance(value, Sym))
    power = STEPS["pow"](_as_float(a), _as_float(b))
    return numbers.computed(power, None if None in hints else math.pow(*hints))


def math_function(name: str, value: Any) -> Any:
    """`math.sqrt(n)` and its like."""
    low, high = _DOMAINS.get(name, (-math.inf, math.inf))
    for limit, is_beyond in ((low, operator.lt), (high, operator.gt)):
        if math.isfinite(limit) and _holds(value, lambda: is_beyond(value, limit)):
            return getattr(math, name)(concrete(value))
    return internals.SYMBOLIC_MATH[name](value)
