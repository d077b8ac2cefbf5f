"""Plain data that the traced function makes, and that each call of its program makes anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.capture.objects import is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.kinds import is_open
from thunder_fn.capture.outside.reads import (
    CONTAINERS,
    DEPTH,
    HOLDERS,
    PLAIN,
    content_of,
    fields_of,
    is_object,
)


def made_anew(leaves: Sequence[Any]) -> tuple[int, ...]:
    """The places of plain data that the function made and that a user may change, such as a set or
    an object of the user's with numbers in it: each call makes another one.
    """
    return tuple(place for place, leaf in enumerate(leaves) if is_made_anew(leaf))


def is_made_anew(leaf: Any) -> bool:
    """Test for such plain data."""
    watch = frames.observer()
    is_open_object = is_object(leaf) and is_open(type(leaf))
    is_changeable = is_a(leaf, (bytearray, *HOLDERS)) or is_open_object
    return watch is not None and is_changeable and _is_own(leaf, watch)


def _is_own(value: Any, watch: frames.Observer, depth: int = DEPTH) -> bool:
    """Test for plain data, and containers and objects of it that the function made. An object may
    come from outside by a way that nobody saw, so its `__init__` must have been seen.
    """
    if is_a(value, (*PLAIN, bytearray)):
        return not watch.is_outside(value)
    is_holder, fields = is_a(value, CONTAINERS), fields_of(value)
    is_made = not watch.is_outside(value) if is_holder else watch.is_built(value)
    parts = (*(content_of(value) if is_holder else ()), *(fields or {}).values())
    is_known = depth > 0 and is_made and not is_a(value, torch.nn.Module)
    return is_known and all(_is_own(item, watch, depth - 1) for item in parts)
