"""Comparisons of what places outside hold now with what they held in the capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thunder_fn.capture.outside.reads import builtin_of, length_of
from thunder_fn.ir.trace import Literal, as_dim

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of plain data, which is compared by value."""


def entries_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a container, with their keys, by the methods of its builtin class."""
    kind = builtin_of(container)
    is_dict = issubclass(kind, dict)
    return iter(kind.items(container) if is_dict else enumerate(kind.__iter__(container)))


def has_keys_of(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Test whether a dict has the keys that it had, in the same order."""
    pairs = zip(entries_of(now), entries_of(before), strict=False)
    same = all(is_like(new, old) for (new, _), (old, _) in pairs)
    return same and length_of(now) == length_of(before)


def type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a trace depends on."""
    is_plain = not tensor.is_conj() and not tensor.is_neg()
    place = tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    return *place, tensor.requires_grad, type(tensor), is_plain


def is_numeric(value: Any) -> bool:
    """Test for a number, or a tuple or list of numbers."""
    parts = value if type(value) in (tuple, list) else (value,)
    return bool(parts) and all(type(part) in (int, float) for part in parts)


def is_like(before: Any, now: Any) -> bool:
    """Test whether a value is the old one: an object by identity, plain data by value and type."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if type(before) is tuple or (type(before) is list and before and not _is_holding(before)):
        return len(before) == len(now) and all(map(is_like, before, now))
    if isinstance(before, (torch.SymInt, torch.SymFloat)):
        return as_dim(before) == as_dim(now)
    return type(before) in PLAIN and Literal(before) == Literal(now)


def _is_holding(values: list[Any]) -> bool:
    """Test for a list whose entries are no numbers: it counts by identity."""
    return not all(isinstance(one, (int, float, torch.SymInt, torch.SymFloat)) for one in values)
