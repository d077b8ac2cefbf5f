"""Law of symbolic numbers: arithmetic on them is Python's, bit for bit, and so is what it raises."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from thunder_fn.jit import jit
from thunder_fn.testing.mutations import Mutation, planted

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXAMPLES = 1000 if THOROUGH else 25

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "eq")},
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
    "neg": operator.neg,
    "abs": abs,
    "round": round,
    "float": float,
    "int": int,
    "bool": bool,
    "text": lambda a: f"{a}",
    "kind": lambda a: isinstance(a, int) + 2 * isinstance(a, bool),
}
STEPS = {**BINARY, **{name: lambda a, b, f=f: f(a) for name, f in UNARY.items()}}
Step = tuple[str, int, int]


def program(steps: Sequence[Step]) -> Callable[[Any, Any], Any]:
    """A function of two numbers that applies the steps to earlier results, and goes on where one raises."""

    def f(a: Any, b: Any) -> Any:
        numbers: list[Any] = [a, b]
        results: list[Any] = []
        for name, i, j in steps:
            try:
                result = STEPS[name](numbers[i % len(numbers)], numbers[j % len(numbers)])
            except (ArithmeticError, ValueError) as error:
                result = type(error).__name__
            results.append(result)
            if not isinstance(result, str):
                numbers.append(result)
        return results

    return f


def check_law(steps: Sequence[Step], calls: Sequence[tuple[Any, Any]]) -> None:
    """A jitted function of numbers gives what it gives in Python, whatever numbers it was traced for."""
    f = program(steps)
    g = jit(f, cache="symbolic values")
    for call in calls:
        mine, its = g(*call), f(*call)
        assert [(type(value), repr(value)) for value in mine] == [(type(value), repr(value)) for value in its], call


ints = st.sampled_from([0, 1, 2, 3, 5, 7, -1, -2, -7, 40, 10**9, 2**62, 2**70])
floats = st.sampled_from([0.0, -0.0, 0.1, 0.7, 1.0, -2.5, 3.0, 1e-20, 1e17, 1e300, math.inf, -math.inf, math.nan])
steps = st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not THOROUGH, suppress_health_check=list(HealthCheck))
@given(
    st.lists(steps, min_size=1, max_size=5), st.lists(st.tuples(ints | floats, ints | floats), min_size=2, max_size=6)
)
@pytest.mark.filterwarnings("ignore::thunder_fn.jit.RetraceWarning")
def test_numbers_are_those_of_python(steps: list[Step], calls: list[tuple[Any, Any]]) -> None:
    check_law(steps, calls)


@pytest.mark.parametrize("name", STEPS)
def test_each_step(name: str) -> None:
    check_law([(name, 0, 1), (name, 1, 2)], [(5, 3), (0, 0), (-7, 2), (2.5, 0.1), (-0.0, 0.0), (1e300, 1e300), (3, -2)])


ARITHMETIC = "thunder_fn.capture.number_arithmetic"
PLANTED = (
    Mutation("divisors are not asked about", f"{ARITHMETIC}:_holds", "is None else", "is value or True else", "laws"),
    Mutation("roots are not asked about", f"{ARITHMETIC}:math_function", "math.isfinite(limit)", "False", "laws"),
    Mutation("-0.0 is 0.0", f"{ARITHMETIC}:is_plain", "(value != 0 or", "(True or", "laws"),
    Mutation("floats are reals", f"{ARITHMETIC}:_is_float", "return not ", "return value is Sym and ", "laws"),
)


def run_all() -> None:
    check_law([("floordiv", 0, 1)], [(-1, 0), (5, 3), (0, 0)])
    check_law([("sqrt", 0, 0)], [(2.0, 0), (-2.0, 0), (-1.0, 0), (4.0, 0)])
    check_law([("copysign", 1, 0)], [(0.0, 1), (-0.0, 1)])
    check_law([("add", 0, 1), ("sub", 2, 1)], [(1e-20, 1.0), (2.3, 1e17)])


def test_nothing_is_caught_without_a_bug() -> None:
    run_all()


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.bug)
def test_planted_bugs_are_caught(bug: Mutation) -> None:
    with planted(bug), pytest.raises(Exception):  # noqa: B017 - whatever it is that the bug breaks
        run_all()
