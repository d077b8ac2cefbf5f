"""Random numbers of Python and NumPy, drawn by code while it is traced: a trace has them as
constants.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy

from thunder_fn.errors import ThunderError, TracedFunctionError

State = tuple[Any, Any]


def state() -> State:
    """The state of the generators behind `random` and `numpy.random`."""
    return random.getstate(), numpy.random.get_state(legacy=True)


def drawn_since(before: State) -> str | None:
    """The module whose generator has moved since then, if one has."""
    python, (_, words, *rest) = before
    if random.getstate() != python:
        return "random"
    _, now, *others = numpy.random.get_state(legacy=True)
    return None if rest == others and (now == words).all() else "numpy.random"


@contextmanager
def untouched_by_refusals() -> Generator[None]:
    """Set the generators back if the code inside cannot be traced; if it raised itself, leave them
    where it left them.
    """
    before = state()
    try:
        yield
    except TracedFunctionError:
        raise
    except ThunderError:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        raise
