"""Containers of tensors outside that a function replaces by new ones: a state between its calls.

`s.state = (h, c)` or `s.cache = {"k": k, "v": v}` leaves another container in each call. Its leaves
are read from the place in each call. The container itself does not count, as long as the function
neither changes it nor stores it elsewhere.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.comparisons import PLAIN, is_like, type_of
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.objects import dict_of
from thunder_fn.capture.outside.kinds import is_record
from thunder_fn.capture.outside.reads import fields_of
from thunder_fn.capture.places import Path, Step

_DICTS = (dict, collections.OrderedDict)
_DEEP, _MANY = 8, 1000
"""Containers in one another, and containers in all, that are taken apart."""


@dataclass(slots=True, eq=False)
class Parts:
    """A container taken apart: its leaves with their paths, and the class and keys of each
    container in it, parents first.
    """

    leaves: list[Any] = field(default_factory=list[Any])
    paths: list[Path] = field(default_factory=list[Path])
    kinds: list[Any] = field(default_factory=list[Any])
    containers: list[Any] = field(default_factory=list[Any])
    is_whole: bool = True
    """True unless some container lies too deep, or there are too many."""

    def take(self, value: Any, path: Path = ()) -> None:
        """Take a value apart, which is under a path."""
        steps = _steps_of(value)
        is_deep = steps is not None and (len(path) >= _DEEP or len(self.containers) >= _MANY)
        self.is_whole = self.is_whole and not is_deep
        if steps is None or is_deep:
            self.leaves.append(value)
            self.paths.append(path)
            return
        self.containers.append(value)
        keys = [step.key for step in steps]
        self.kinds.append((type(value), *keys, *map(type, keys)))
        for step in steps:
            self.take(step(value), (*path, step))

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        """The leaves, each with its path."""
        return zip(self.paths, self.leaves, strict=True)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [one for one in self.leaves if isinstance(one, torch.Tensor)]

    @property
    def places(self) -> Iterator[tuple[Any, Any, Any]]:
        """The items of the containers, each with its container and key."""
        for held in self.containers:
            for step in _steps_of(held) or ():
                yield held, step.key, step(held)

    @property
    def within(self) -> set[int]:
        """The identities of the containers, and of the dicts of objects."""
        return {id(one) for held in self.containers for one in (held, dict_of(held))} - {id(None)}

    @property
    def changeable(self) -> set[int]:
        """The identities of containers that can be changed, and of the dicts of objects."""
        return self.within - {id(one) for one in self.containers if isinstance(one, tuple)}

    def becomes(self, other: Parts) -> bool:
        """Test for a container of the same form in the place of this one: tensors for tensors,
        numbers for numbers, and the same plain data beside them.
        """
        return self.kinds == other.kinds and all(
            isinstance(now, torch.Tensor)
            if isinstance(old, torch.Tensor)
            else is_like(old, now) or (_is_countable(old) and _is_countable(now))
            for old, now in zip(self.leaves, other.leaves, strict=True)
        )

    def numbers_changed(self, other: Parts) -> list[Path]:
        """The paths of numbers that are others in a container of the same form."""
        known = zip(self.paths, self.leaves, other.leaves, strict=True)
        return [path for path, old, now in known if _is_countable(old) and not is_like(old, now)]

    def with_numbers(self, numbers: Mapping[Path, Any]) -> Any:
        """Make the container anew, with other numbers under some paths."""
        return _with_leaves(self.containers[0], numbers)

    def form(self) -> Form:
        """Note what a program depends on."""
        return Form(self.kinds, [*map(_seen, self.leaves)])


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The properties of a container, whose tensors are inputs, on which a program depends."""

    kinds: list[Any]
    leaves: list[Any]

    def identities(self, value: Any) -> list[int] | None:
        """Find what has to be in one place alone, in a value that the program serves: its tensors,
        and the containers that can be changed. None for any other value.
        """
        if not self.kinds:
            is_tensor = isinstance(value, torch.Tensor)
            return ([id(value)] if is_tensor else []) if _is_of(self.leaves[0], value) else None
        parts = parts_of(value)
        is_same = self.kinds == parts.kinds and all(map(_is_of, self.leaves, parts.leaves))
        return [*map(id, parts.tensors), *parts.changeable] if is_same else None


@dataclass(frozen=True, slots=True)
class _Type:
    """The properties of a tensor, or the class of a number."""

    of: tuple[Any, ...]

    def is_of(self, leaf: Any) -> bool:
        """Test for another leaf of this type."""
        is_tensor = isinstance(leaf, torch.Tensor)
        return self.of == (type_of(leaf) if is_tensor else (type(leaf),)) and (
            is_tensor or is_number(leaf)
        )


def parts_of(value: Any) -> Parts:
    """Take a container apart; any other value is one leaf."""
    parts = Parts()
    parts.take(value)
    return parts


def state_in(value: Any) -> Parts | None:
    """Take a container of tensors apart that a program can be given instead of another one; None
    for any other value.
    """
    parts = parts_of(value)
    tensors = [*map(id, parts.tensors)]
    held = [id(one) for one in parts.containers if not isinstance(one, tuple)]
    is_apart = len({*tensors, *held}) == len(tensors) + len(held)
    is_plain = not any(one.requires_grad for one in parts.tensors)
    is_state = parts.is_whole and parts.containers and tensors and is_apart and is_plain
    return parts if is_state else None


def _is_of(old: Any, now: Any) -> bool:
    """Test a leaf beside what a program depends on."""
    return old.is_of(now) if type(old) is _Type else is_like(old, now)


def _seen(leaf: Any) -> Any:
    if isinstance(leaf, (torch.SymInt, torch.SymFloat)):
        return _Type((int if isinstance(leaf, torch.SymInt) else float,))
    return _Type(type_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf


def _with_leaves(value: Any, leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    if path in leaves:
        return leaves[path]
    if not any(other[: len(path)] == path for other in leaves):
        return value
    steps, cls = _steps_of(value) or [], type(value)
    items = [_with_leaves(step(value), leaves, (*path, step)) for step in steps]
    if issubclass(cls, tuple):
        return tuple.__new__(cls, items)
    if cls is list:
        return items
    names = [step.key for step in steps]
    pairs = zip(names, items, strict=True)
    return cls(pairs) if cls in _DICTS else pytree.rebuild(cls, tuple(names), items)


def _is_countable(leaf: Any) -> bool:
    return is_number(leaf) or isinstance(leaf, (torch.SymInt, torch.SymFloat))


def _steps_of(value: Any) -> list[Step] | None:
    """The steps to the items of a container or the attributes of an object; None for others."""
    cls = type(value)
    if cls in (tuple, list) or (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return [Step(index) for index in range(len(value))]
    if cls in _DICTS:
        return [*map(Step, value)] if all(type(key) in PLAIN for key in value) else None
    is_leaf = cls in PLAIN or issubclass(cls, torch.Tensor)
    names = None if is_leaf or not is_record(cls) else fields_of(value)
    return None if names is None else [Step(name, is_attribute=True) for name in names]
