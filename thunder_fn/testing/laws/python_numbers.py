"""Law of symbolic numbers: arithmetic on them is Python's, bit for bit, and so is what it
raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fn.jitted import jit
from thunder_fn.testing.laws.comparing import holds

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "eq")
    },
    "min": min,
    "max": max,
    "atan2": math.atan2,
    "copysign": math.copysign,
    "divmod": lambda a, b: divmod(a, b)[1],
    "square": lambda a, b: a**2,
    "root": lambda a, b: a**0.5 if a >= 0 else a,
    "inverse": lambda a, b: a**-1,
    "power": lambda a, b: 2.0**b,
    "scaled": lambda a, b: a * 0.1 + b,
    "shift": lambda a, b: int(a) << int(b) if abs(a) < 9 and abs(b) < 9 else a,
}
UNARY: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda a, name=name: getattr(math, name)(a)
        for name in ("sqrt", "log", "exp", "sin", "asin", "cosh", "tanh", "floor", "ceil")
    },
    **{
        f"{f.__name__} of a third": lambda a, f=f: f(a / 3)
        for f in (math.trunc, math.floor, math.ceil)
    },
    "tens": lambda a: round(a, -1),
    "tenths": lambda a: round(a, 1),
    "power modulo": lambda a: pow(a, 2, 7) if isinstance(a, int) else a,
    "quotient and rest": lambda a: divmod(17, a)[0],
    "parts": lambda a: a.real + a.imag,
    "complement": lambda a: ~a if isinstance(a, int) else a,
    "imaginary": lambda a: (a * 1j).imag,
    "neg": operator.neg,
    "abs": abs,
    "round": round,
    "float": float,
    "int": int,
    "bool": bool,
    "text": lambda a: f"{a}",
    "kind": lambda a: isinstance(a, int) + 2 * isinstance(a, bool),
}
NUMBER_STEPS = {**BINARY, **{name: lambda a, b, f=f: f(a) for name, f in UNARY.items()}}
NumberStep = tuple[str, int, int]
"""A step on two earlier numbers, by position."""


@dataclass(frozen=True)
class NumberCalls:
    """A program of numbers, and pairs of numbers to call it with."""

    steps: tuple[NumberStep, ...]
    calls: tuple[tuple[Any, Any], ...]


def number_program(steps: Sequence[NumberStep]) -> Callable[[Any, Any], Any]:
    """A function of two numbers that applies the steps to earlier results, and goes on where one
    raises.
    """

    def f(a: Any, b: Any) -> Any:
        numbers: list[Any] = [a, b]
        results: list[Any] = []
        for name, i, j in steps:
            try:
                result = NUMBER_STEPS[name](numbers[i % len(numbers)], numbers[j % len(numbers)])
            except (ArithmeticError, ValueError) as error:
                result = type(error).__name__
            results.append(result)
            if not isinstance(result, str):
                numbers.append(result)
        return results

    return f


def law_numbers_are_pythons(case: NumberCalls) -> None:
    """A jitted function of numbers gives what it gives in Python, whatever numbers it was traced
    for.
    """
    f = number_program(case.steps)
    g = jit(f, cache="symbolic values")
    for call in case.calls:
        mine, its = ([(type(value), repr(value)) for value in run(*call)] for run in (g, f))
        holds(mine == its, f"{case.steps} of {call} gives {mine}, in Python {its}")


NUMBERS = (
    NumberCalls((("floordiv", 0, 1),), ((-1, 0), (5, 3), (0, 0))),
    NumberCalls((("sqrt", 0, 0),), ((2.0, 0), (-2.0, 0), (-1.0, 0), (4.0, 0))),
    NumberCalls((("copysign", 1, 0),), ((0.0, 1), (-0.0, 1))),
    NumberCalls((("add", 0, 1), ("sub", 2, 1)), ((1e-20, 1.0), (2.3, 1e17))),
    NumberCalls((("trunc of a third", 0, 0), ("tens", 0, 0)), ((5, 0), (-1, 0), (16, 0))),
)
"""Numbers on which planted bugs are looked for."""
