"""Places outside of a function that a capture watches, and their values before and after.

A place is an entry of a container: of a dict, a list, or the dict of an object. While a function
is traced, what it stores there are tracers. So a capture notes what a container held (`Snapshot`),
finds what the function stored (`Change`), and puts the old content back. A program does the same
to its places in each call: it reads a `Feed` and applies an `Effect` or an `Update`.
"""

from __future__ import annotations

import array
import copy
import operator
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy
import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.objects import ABSENT, held_by, is_a
from thunder_fn.capture.outside.edges import look, store
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    HOLDERS,
    builtin_of,
    content_of,
    copy_of,
    drop,
    fill,
    seen,
)
from thunder_fn.capture.unread import held_in
from thunder_fn.ir.rules import chosen
from thunder_fn.ir.symbols import Symbol

Entry = tuple[int, Any]
"""A place: the identity of a container, and a key of it."""


@dataclass(frozen=True, slots=True)
class Step:
    """The way to an item of a container, or to an attribute of an object."""

    key: Any
    is_attribute: bool = False

    def __call__(self, value: Any) -> Any:
        """Take the step."""
        return held_by(value, self.key) if self.is_attribute else value[self.key]


Path = tuple[Step, ...]

APPENDED: Any = type("Appended", (), {"__repr__": lambda self: "APPENDED"})()
"""The key of what is appended to a list or deque, or added to a set."""
PREPENDED: Any = type("Prepended", (), {"__repr__": lambda self: "PREPENDED"})()
"""The key of what is put in front of a list or deque."""


@dataclass(frozen=True, slots=True)
class Stays:
    """An item of a list that was there before, under this index, in the new content of it."""

    index: int


GRAD: Any = "grad"
REQUIRES_GRAD: Any = "requires_grad"


def tensor_at(target: int | torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of a call that an index means; a closed-over tensor is itself."""
    return tensors[target] if isinstance(target, int) else target


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """A place outside whose value is an input of the trace, read in each call.

    `holder` is a dict or list with an entry, or a tensor with its `.grad`: an input of the
        trace by index, or one that is closed over. `path` leads from the value of the place to
        a part of it. `symbol` is that of a number. If it `is_item`, the entry is a tensor, and
        the number is its value.
    """

    holder: Any
    key: Any
    symbol: Symbol | None = None
    path: Path = ()
    is_item: bool = False

    def read(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """The value now, for a call with these tensors."""
        if not isinstance(self.holder, (int, torch.Tensor)):
            value = held_at(self.holder, self.key)
            for step in self.path:
                value = step(value)
            return value.item() if self.is_item else value
        return tensor_at(self.holder, tensors).grad


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """A place outside and its new value, as a tree: some leaves are outputs of the trace, which
    `is_output` marks. If it `is_conditional`, its first output says whether to leave the place as
    it is.

    `holder` is as that of a `Feed`. Without a tree the entry is removed.
    """

    holder: Any
    key: Any
    spec: pytree.PyTreeSpec | None
    leaves: tuple[Any, ...] = ()
    is_output: tuple[bool, ...] = ()
    is_conditional: bool = False
    anew: tuple[int, ...] = ()
    """The places of leaves of which each call stores a copy."""
    repeated: pytree.Repeated = ()
    """The nodes that are also in the result, or in another place."""

    @property
    def count(self) -> int:
        """The number of outputs in it."""
        return sum(self.is_output) + self.is_conditional

    @property
    def traced(self) -> Sequence[Any]:
        """The tracers that the capture of a transform's function left in the place of outputs."""
        return chosen(self.leaves, self.is_output)

    def apply(self, outputs: Sequence[Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Store the value, for a call with these tensors."""
        given = iter(outputs)
        if self.is_conditional and bool(next(given)):
            return
        leaves = [
            next(given) if flag else copy.deepcopy(leaf) if place in self.anew else leaf
            for place, (leaf, flag) in enumerate(zip(self.leaves, self.is_output, strict=True))
        ]
        value = ABSENT if self.spec is None else pytree.unflatten(self.spec, leaves, self.repeated)
        holder = tensors[self.holder] if isinstance(self.holder, int) else self.holder
        put(holder, self.key, value)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Plain data outside that each call changes: the value takes its place, or `is_added` to an
    integer, such as a counter of steps. `kind`, `holder` and `key` are those of an edge.
    """

    kind: str
    holder: Any
    key: Any
    value: Any
    is_added: bool = False
    is_anew: bool = False
    """True if each call stores a copy of the value."""
    count: ClassVar[int] = 0
    traced: ClassVar[Sequence[Any]] = ()

    def apply(self, outputs: Sequence[Any] = (), tensors: Sequence[torch.Tensor] = ()) -> None:
        """Store the value, or the sum of it and what the place has now."""
        place = self.kind, self.holder, self.key
        value = copy.deepcopy(self.value) if self.is_anew else self.value
        store(*place, operator.iadd(look(*place), value) if self.is_added else value)


def held_at(holder: Any, key: Any) -> Any:
    """Return an entry of a dict, list or deque, the content of a cell, or what a slot or a class
    holds; ABSENT if there is none.
    """
    if isinstance(holder, types.CellType):
        return look("cell", holder, key)
    if isinstance(holder, type):
        return look("class", holder, key)
    if not is_a(holder, HOLDERS):
        return look("attr", holder, key)
    return look("key" if isinstance(holder, dict) else "index", holder, key)


def put(holder: Any, key: Any, value: Any) -> None:
    """Store a value in a place: an entry of a container or all of it, a cell, a slot, or an
    attribute of a class. Of a tensor it is the `.grad` or `requires_grad`.
    """
    if isinstance(holder, torch.Tensor):
        if value is False and not holder.is_leaf:  # `detach_`
            holder.detach_()
        else:
            setattr(holder, key, None if value is ABSENT else value)
    elif isinstance(holder, types.CellType):
        store("cell", holder, key, value)
    elif key is APPENDED:
        fill(holder, value)
    elif key is PREPENDED:
        refill(holder, [*value, *content_of(holder)][: getattr(holder, "maxlen", None)])
    elif key is None:
        refill(holder, _with_old(holder, value))
    elif not is_a(holder, HOLDERS):
        store("attr", holder, key, value)
    elif value is ABSENT:
        drop(holder, key)
    else:
        builtin_of(holder).__setitem__(holder, key, value)


def _with_old(holder: Any, value: Any) -> Any:
    if isinstance(value, dict) or not any(type(item) is Stays for item in value):
        return value
    old = content_of(holder)
    return [old[item.index] if type(item) is Stays else item for item in value]


@dataclass(frozen=True, slots=True)
class Item:
    """The key of the number in a tensor that is the entry under `key`."""

    key: Any


@dataclass(frozen=True, slots=True)
class Part:
    """The key of a number in the container that is the entry under `key`."""

    key: Any
    path: Path


# ---- while a function is traced ----


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A place that the function stores to: the container, the key, and the values before and now.

    `is_read` tells whether the function asks a module for the value before; None if nothing tells.
    """

    holder: Any
    key: Any
    before: Any
    now: Any
    is_read: bool | None = None

    @property
    def entry(self) -> Entry:
        """The place."""
        return id(self.holder), self.key


def is_changeable(value: Any) -> bool:
    """Test for numbers in memory of their own, which a function may change in place."""
    if is_a(value, numpy.ndarray):
        return value.flags.writeable
    return is_a(value, (bytearray, array.array))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A container and a copy of it: what it held before."""

    container: Any
    before: Any

    @property
    def is_unchanged(self) -> bool:
        """Test whether the container holds the very objects that it held."""
        return _identities(self.container) == _identities(self.before)

    def has_same(self, other: Snapshot) -> bool:
        """Test whether another one holds the very objects that it holds."""
        return self is other or _identities(self.before) == _identities(other.before)

    def restore(self) -> None:
        """Make the container hold again what it held."""
        if not self.is_unchanged:
            refill(self.container, self.before)


def snapshot(container: Any) -> Snapshot:
    """Note what a container or a buffer holds."""
    if is_a(container, ARRAYS):
        return Snapshot(container, copy.copy(container))
    before = copy_of(container)
    if type(before) is dict and "state" in before:
        before["state"] = held_in(before["state"])
    return Snapshot(container, before)


def refill(container: Any, content: Any) -> None:
    """Replace the whole content of a list, deque, set, dict or buffer."""
    if is_a(container, ARRAYS):
        whole: Any = ... if is_a(container, numpy.ndarray) else slice(None)
        operator.setitem(cast("Any", container), whole, content)
        return
    builtin_of(container).clear(container)
    fill(container, content)


def _identities(container: Any) -> Any:
    if is_a(container, ARRAYS):
        return seen(container)
    if isinstance(container, dict):
        return [id(part) for pair in content_of(container) for part in pair]
    found = map(id, content_of(container))
    return set(found) if isinstance(container, set) else list(found)
