"""Random numbers of Python and NumPy, drawn by code while it is traced: a trace has them as
constants.
"""

from __future__ import annotations

import pickle
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


def state_of(generator: Any) -> Any:
    """The state of a generator of the user's; None for one without, as `random.SystemRandom`."""
    try:
        if isinstance(generator, random.Random):
            return generator.getstate()
        return _bits_of(generator).state
    except (AttributeError, NotImplementedError):
        return None


def has_drawn(generator: Any, before: Any) -> bool:
    """Test whether a generator of the user's has moved since it was in this state."""
    return pickle.dumps(state_of(generator)) != pickle.dumps(before)


def put_back(generator: Any, before: Any) -> None:
    """Set a generator of the user's back."""
    if isinstance(generator, random.Random):
        generator.setstate(before)
    else:
        _bits_of(generator).state = before


def _bits_of(generator: Any) -> Any:
    """The part of a generator of NumPy's that has the state."""
    if isinstance(generator, numpy.random.RandomState):
        return generator._bit_generator  # pyright: ignore[reportAttributeAccessIssue]
    return generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator


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
