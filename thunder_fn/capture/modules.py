"""Changes that the traced function makes to the modules that it calls.

A module is watched from its first call in a capture. A buffer that is bound to a new tensor, as by
`self.count = self.count + 1`, becomes a write. Any other attribute that would hold a tracer when
the trace is done is an error, since nobody would ever compute its value. In both cases, and
whenever the capture fails, the module gets back what it held before.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.outside.reads import (
    ABSENT,
    OF_BUFFERS,
    Attribute,
    is_counter,
    value_read,
)
from thunder_fn.capture.places import Change, Entry, Snapshot, snapshot
from thunder_fn.capture.renewed import parts_of
from thunder_fn.errors import EscapedTracer, with_article
from thunder_fn.ir.trace import Source, type_of_value

_SECTIONS = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(torch.nn.Module().__dict__)  # `training`, hooks and the sections themselves
_CONTAINERS = (list, dict, set, deque, OrderedDict)


TRACING = threading.RLock()
"""Held while modules hold tracers. Code that reads modules to pass their tensors on takes it
too.
"""


@dataclass(frozen=True, slots=True)
class Rebound:
    """A buffer that was bound to a new tensor: the old one and the tracer in its place."""

    tensor: torch.Tensor
    tracer: torch.Tensor


@dataclass(frozen=True, slots=True)
class Assigned:
    """An attribute of a module, and its new value: tensors, plain values, or a tree of them."""

    module: torch.nn.Module
    section: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a module: all that it holds, by section and name, and the contents of its plain
    containers, by name.
    """

    module: torch.nn.Module
    path: str
    entries: dict[tuple[str, str], Any]
    contents: dict[str, Snapshot]


@dataclass(slots=True)
class WatchedModules:
    """The modules of one capture.

    If it `is_exclusive`, no other thread captures modules from the first one until the `release`.
    `stored` are attributes of modules, and buffers of another type, that the function gives a
    tensor; `replaced` are submodules that it replaces. `seen` are the states of all modules before
    the capture.
    """

    is_exclusive: bool = False
    is_holding: bool = False
    states: dict[int, _State] = dataclasses.field(default_factory=dict)
    stored: list[Change] = dataclasses.field(default_factory=list[Change])
    replaced: list[Change] = dataclasses.field(default_factory=list[Change])
    seen: list[_State] = dataclasses.field(default_factory=list[_State])

    def places(self) -> Iterator[tuple[Any, Any, Any]]:
        """The places of values before the capture, each with its value: attributes, and those in
        containers.
        """
        for state in self.seen:
            for (section, name), value in state.entries.items():
                yield _section(state.module, section), name, value
                yield from parts_of(value).places

    def given(self) -> Iterator[Any]:
        """The values that the function has put into attributes."""
        for state in self.seen:
            for section, name, value in _current(state.module):
                if value is not state.entries.get((section, name), ABSENT):
                    yield value

    def watch(self, module: torch.nn.Module, path: str = "") -> None:
        """Note what the module holds, at its first call."""
        if id(module) in self.states:
            return
        if self.is_exclusive and not self.is_holding:
            TRACING.acquire()
            self.is_holding = True
        self.states[id(module)] = _state(module, path)

    def rebound(self, is_kept: Callable[[Any], bool], *, keeps: bool = False) -> list[Rebound]:
        """Return the buffers that were bound to new tensors, and restore modules, except the
        attributes that are `stored`. `is_kept` tells whether a container of a module may hold
        tracers. Where the program `keeps` state in Python, buffers are attributes like others.

        Raises:
            EscapedTracer: a tracer is left in a parameter, or in another container.
        """
        found: list[Rebound] = []
        escaped: list[tuple[_State, str]] = []
        own = {id(state.module.__dict__): state for state in self.states.values()}
        self.seen = [*own.values()]  # a module and its jitted one have the attributes in common
        for state in self.states.values():
            for section, name, value, before in _given_tensors(state):
                if not keeps and _is_rebound(before, section, value):
                    found.append(Rebound(before, value))
                elif section == "_parameters":
                    escaped.append((state, name))
                elif not _is_recomputed(state.module, name):
                    is_read = _is_read(state.module, section, name, before)
                    holder = _section(state.module, section)
                    self.stored.append(Change(holder, name, before, value, is_read))
            for name, one in state.contents.items():
                is_new = _has_new_tracer(one) and not is_kept(one.container)
                if is_new and not _is_recomputed(state.module, name):
                    escaped.append((state, name))
        self.replaced += self._replaced()
        self.restore(tracers_only=not escaped)
        if escaped:
            raise _escaped_error(*escaped[0])
        return found

    def take_assigned(
        self, modules: Collection[int], written: Collection[Attribute], *, keeps: bool = False
    ) -> tuple[set[Attribute], list[Assigned]]:
        """Return the attributes of these modules (by identity) that were bound, buffers among them.
        Each gets its old value back, but for those that come first: containers of tensors, where
        the program `keeps` state in Python.

        `written` are those that were set, maybe to their old values.
        """
        found, left = list[Assigned](), set[Attribute]()
        for state in (state for module, state in self.states.items() if module in modules):
            for section, name, value in list(_current(state.module)):
                before = state.entries.get((section, name), ABSENT)
                place = Attribute(state.module, name)
                is_same = value is before and place not in written
                if is_same or section not in ("", "_buffers", "_modules"):
                    continue
                if isinstance(value, torch.nn.Module) and id(value) not in modules:
                    continue
                if _is_recomputed(state.module, name) or is_counter(state.module, name):
                    continue
                parts = parts_of(value) if keeps and section == "" else None
                if parts is not None and parts.containers and parts.tensors:
                    left.add(place)
                elif _is_assignable(value):
                    found.append(Assigned(state.module, section, name, value))
                    _put(state.module, section, name, before)
        return left, found

    def _replaced(self) -> Iterator[Change]:
        """Find the submodules that the function has taken away, or put in place of others."""
        for state in self.states.values():
            held = _section(state.module, "_modules")
            if not isinstance(held, dict):  # of TorchScript
                continue
            before = {name: one for (at, name), one in state.entries.items() if at == "_modules"}
            for name in {**before, **held}:
                old, now = before.get(name, ABSENT), held.get(name, ABSENT)
                if now is not old:
                    yield Change(held, name, old, now)

    def restore(self, *, tracers_only: bool = False) -> None:
        """Give modules back what they held; with `tracers_only`, other values that were assigned
        stay.
        """
        if not self.states:
            return
        try:
            stored = {one.entry for one in self.stored}
            for state in self.states.values():
                _restore(state, tracers_only, stored)
        finally:
            self.states.clear()

    def release(self) -> None:
        """Let go of tracers, and let other threads capture modules."""
        self.stored.clear()
        self.seen.clear()
        self.replaced.clear()
        if self.is_holding:
            self.is_holding = False
            TRACING.release()


def modules_of(f: Any, leaves: list[Any]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Find modules that the function can reach: its own, its arguments, and those that it closes
    over; with their paths.
    """
    roots = [
        *leaves,
        f,
        getattr(f, "__self__", None),
        getattr(f, "func", None),
        *getattr(f, "args", ()),
    ]
    for cell in getattr(f, "__closure__", None) or ():
        with suppress(ValueError):  # the cell is empty
            roots.append(cell.cell_contents)
    for root in roots:
        if isinstance(root, torch.nn.Module):
            yield from ((module, path) for path, module in root.named_modules())


def _state(module: torch.nn.Module, path: str) -> _State:
    entries = {(section, name): value for section, name, value in _current(module)}
    contents = {
        name: snapshot(value)
        for (section, name), value in entries.items()
        if section == "" and type(value) in _CONTAINERS
    }
    return _State(module, path, entries, contents)


def _given_tensors(state: _State) -> Iterator[tuple[str, str, Any, Any]]:
    """Find what the function gave a tensor, as (section, name, value, value before): a tracer, or
    as a plain attribute any tensor or container of tensors.
    """
    for section, name, value in _current(state.module):
        before = state.entries.get((section, name), ABSENT)
        if value is before or holds_tracer(before):
            continue
        if holds_tracer(value) or (section == "" and parts_of(value).tensors):
            yield section, name, value, before


def _is_read(module: torch.nn.Module, section: str, name: str, before: Any) -> bool | None:
    """Test whether the function asks a module for what an attribute held before; None if nothing
    tells.
    """
    if section not in ("", "_buffers") or name.startswith("__"):
        return None
    if section == OF_BUFFERS and value_read(Attribute(module, OF_BUFFERS)) is not ABSENT:
        return True  # all of them were gone through
    return value_read(Attribute(module, name)) is before


def _current(module: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(section, name, value) of all that a module holds; the section of a plain attribute is
    empty.
    """
    attributes = module.__dict__
    for section in _SECTIONS:
        for name, value in attributes.get(section, {}).items():
            yield section, name, value
    for name, value in attributes.items():
        if name not in _OWN:
            yield "", name, value


def holds_tracer(value: Any) -> bool:
    """Test whether the value is a tracer or a pytree with one among its leaves."""
    if value is None or isinstance(value, (str, int, float, torch.nn.Module)):
        return False
    return any(
        internals.is_tracer(leaf)
        for leaf in ([value] if isinstance(value, torch.Tensor) else pytree.flatten(value)[0])
    )


PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.SymInt,
    torch.SymFloat,
)
"""Types of attribute values that every call may bind again."""


def _is_assignable(value: Any) -> bool:
    """Test for plain values, and tensors of the trace, alone or in a tree with plain values
    only.
    """
    if isinstance(value, (torch.nn.Module, *PLAIN)):
        return True
    if not holds_tracer(value):
        return False
    leaves = [value] if isinstance(value, torch.Tensor) else pytree.flatten(value)[0]
    return all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves)


def _is_rebound(before: Any, section: str, value: Any) -> TypeGuard[torch.Tensor]:
    if section != "_buffers" or not isinstance(before, torch.Tensor):
        return False
    with internals.no_torch_function():
        return type_of_value(before) == type_of_value(value)


def _is_recomputed(module: torch.nn.Module, name: str) -> bool:
    """Test whether the attribute is computed anew in each call. A hook that holds its name does so
    (`weight_norm`, `torch.nn.utils.prune`), and an RNN does from its parameters.
    """
    return name.startswith("_flat_weight") or any(
        isinstance(value, str) and value == name
        for hook in internals.forward_pre_hooks(module)
        for value in getattr(hook, "__dict__", {}).values()
    )


def _has_new_tracer(one: Snapshot) -> bool:
    now, before = (
        list(held) if isinstance(held, set) else held for held in (one.container, one.before)
    )
    return holds_tracer(now) and not holds_tracer(before)


def _escaped_error(state: _State, name: str) -> EscapedTracer:
    cls = type(state.module)
    code = cls.forward.__code__ if hasattr(cls.forward, "__code__") else None
    source = (
        Source(code.co_filename, code.co_firstlineno, f"{cls.__name__}.forward", state.path)
        if code
        else None
    )
    return EscapedTracer(
        f"a traced tensor was stored in the parameter or container `{name}` of"
        f" {with_article(cls.__name__)}, where it would outlive the trace",
        source=source,
        fix="Return it, or store it in an attribute.",
    )


def _restore(state: _State, tracers_only: bool, stored: Container[Entry]) -> None:
    for section, name, value in list(_current(state.module)):
        before = state.entries.get((section, name), ABSENT)
        if value is before or holds_tracer(before) or (tracers_only and not holds_tracer(value)):
            continue
        if tracers_only and (id(_section(state.module, section)), name) in stored:
            continue
        _put(state.module, section, name, before)
    if tracers_only:
        return
    for (section, name), value in state.entries.items():
        held = _section(state.module, section)
        if name not in held and not holds_tracer(value):
            held[name] = value
    for one in state.contents.values():
        if not holds_tracer(list(one.before)):
            one.restore()


def _section(module: torch.nn.Module, section: str) -> dict[str, Any]:
    """The dict that holds what is in a section of a module."""
    return module.__dict__.get(section, {}) if section else module.__dict__


def _put(module: torch.nn.Module, section: str, name: str, value: Any) -> None:
    held = _section(module, section)
    if value is ABSENT:
        del held[name]
    else:
        held[name] = value
