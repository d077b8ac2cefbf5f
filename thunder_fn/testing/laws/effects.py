"""The law of effects: a program calls Python on the same values in the same order.

The values are noted by a callback (`thunder_fn.debug`), as a user's `print` would show them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from thunder_fn import debug
from thunder_fn.capture import capture
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Arg, Op, Trace, every_equation
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Transform,
    close,
    holds,
    law_of,
    run,
    tolerance,
)

EFFECT = "thunder_fn.debug.default"
"""The op that calls Python."""

_noted: ContextVar[list[torch.Tensor] | None] = ContextVar("noted", default=None)


def note(value: torch.Tensor) -> None:
    """Add a value to those that this run has shown."""
    seen = _noted.get()
    if seen is not None:
        seen.append(value.clone())


@contextmanager
def noting() -> Generator[list[torch.Tensor]]:
    """The values that are shown inside of this, in order."""
    with setting(_noted, seen := []):
        yield seen


@cache
def effect() -> tuple[Op, Arg]:
    """The op that notes a value, and its first argument."""
    made = capture(lambda x: debug.callback(note, x), (torch.ones(2),)).trace
    (equation,) = [one for one in made.equations if one.op.name == EFFECT]
    return equation.op, equation.args[0]


def has_effects(trace: Trace) -> bool:
    """Test whether a trace, or a body in it, calls Python."""
    return any(equation.op.name == EFFECT for equation in every_equation(trace))


@law_of
def keeps_effects(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Call Python on the same values in the same order: drop, merge, repeat, move no effect."""
    if not has_effects(trace):
        return False
    new = transform(trace)
    with noting() as want:
        run(trace, inputs)
    with noting() as have:
        run(new, inputs)
    what = f"Python is called {len(have)} times, and was called {len(want)} times"
    holds(len(have) == len(want), what, trace=trace, made=new)
    what = "Python is called on other values, or in another order:"
    close(have, want, tolerance(trace), what, trace=trace, made=new)
    return bool(want)
