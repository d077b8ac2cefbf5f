"""Which attributes of modules a capture reads.

A program depends on the plain attributes that the traced code asked for (`training`, `self.p`, `self.config`), and on no
others: a counter that a training loop keeps on its model is not a reason to trace again.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.trace import Literal

Reads = dict[tuple[torch.nn.Module, str], Any]
"""What was found, by module and name, as `seen` describes it."""

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()

_OWN = frozenset(torch.nn.Module().__dict__) - {"training"}  # hooks and sections, which are no plain attributes
_reads: ContextVar[dict[tuple[torch.nn.Module, str], Any] | None] = ContextVar("thunder_fn_reads", default=None)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), enum.Enum, range, slice, type(Ellipsis))
_TORCH_SCALARS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_DEPTH, _LONG = 3, 256


def attribute(module: torch.nn.Module, name: str) -> Any:
    """What a module itself holds under a name."""
    return module.__dict__.get(name, ABSENT)


@contextmanager
def tracked() -> Generator[Reads]:
    """The attributes that are read inside, in this thread, other than tensors. Filled in at the end.

    What the code inside changed itself is left out: it happened when the function was traced, as all of Python does.
    """
    found: dict[tuple[torch.nn.Module, str], Any] = {}
    reads: Reads = {}
    token = _reads.set(found)
    try:
        with _patch.applied():
            yield reads
    finally:
        _reads.reset(token)
        kept = {key: value for key, value in found.items() if not isinstance(value, torch.Tensor)}
        reads.update({key: seen(value) for key, value in kept.items() if attribute(*key) is value})


def _tracking(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def __getattribute__(self: torch.nn.Module, name: str) -> Any:
        found = _reads.get()
        if found is not None and name not in _OWN and not name.startswith("__"):
            key = (self, name)
            if key not in found:
                found[key] = original(self, "__dict__").get(name, ABSENT)
        return original(self, name)

    return __getattribute__


_patch = internals.Patch((torch.nn.Module, "__getattribute__", _tracking))


# ---- values as a later call compares them ----


@dataclass(frozen=True, slots=True, eq=False)
class Same:
    """Equal to itself only: a value that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def seen(value: Any, depth: int = _DEPTH) -> Any:
    """A value as a program may depend on it: numbers by value and type, containers by content, objects by identity and
    by the plain values that they hold."""
    if isinstance(value, (*_SCALARS, *_TORCH_SCALARS)):
        return type(value), Literal(value)
    if isinstance(value, (torch.Tensor, torch.nn.Module, *_FUNCTIONS)) or depth == 0:
        return Same(value)
    if isinstance(value, _CONTAINERS) and len(value) <= _LONG:
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(seen(item, depth - 1) for item in items)
    fields = getattr(value, "__dict__", None)
    if type(fields) is not dict or len(fields) > _LONG:
        return Same(value)
    plain = tuple((name, type(item), Literal(item)) for name, item in fields.items() if isinstance(item, _SCALARS))
    return Same(value), plain


def parts_of(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The containers that decide what `seen` says of a value."""
    if isinstance(value, (*_SCALARS, *_TORCH_SCALARS, *_FUNCTIONS, torch.Tensor, torch.nn.Module)) or depth == 0:
        return
    if isinstance(value, _CONTAINERS):
        if not isinstance(value, (tuple, frozenset)):
            yield value
        if len(value) <= _LONG:
            for item in value.values() if isinstance(value, dict) else value:
                yield from parts_of(item, depth - 1)
        return
    fields = getattr(value, "__dict__", None)
    if type(fields) is dict:
        yield fields
