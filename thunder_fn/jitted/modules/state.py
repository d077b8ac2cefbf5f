"""The state of a jitted module at a call: its tensors, and whatever else a program may depend on.

A `Reading` is a walk over the module. It is good until somebody changes one of the dicts that it
came from, which PyTorch tells in nanoseconds; then the module is read again. Programs are kept for
each `Variant` of a module, such as train and eval. A variant is the layout of its tensors,
submodules and hooks, and the attributes that were read while it was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import parametrize

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.reads import Reads, attribute, of_class, seen

Tensor = torch.Tensor
_OWN = operator.attrgetter("__dict__")


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a module's tensors, by number, and its submodules, their classes and hooks."""

    modules: tuple[Any, ...]
    classes: tuple[type, ...]
    places: tuple[tuple[str, int | None], ...]
    hooks: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A module as it is now: its layout, its distinct tensors, and the dicts that say so:
    sections, and `__dict__`s.
    """

    layout: Layout
    tensors: tuple[Tensor, ...]
    dicts: tuple[dict[Any, Any], ...]
    attributes: tuple[dict[str, Any], ...]

    @property
    def is_borrowed(self) -> bool:
        """Test whether other tensors stand in for its parameters, as in `functional_call`. They
        are not to be kept.
        """
        sections = (module.__dict__["_parameters"].values() for module in self.layout.modules)
        found = (value for section in sections for value in section if value is not None)
        return not all(isinstance(value, torch.nn.Parameter) for value in found)

    @property
    def is_parametrized(self) -> bool:
        """Test whether some tensors are computed where they are read, which `parametrize.cached`
        does once for many calls.
        """
        return any(issubclass(cls, parametrize.ParametrizationList) for cls in self.layout.classes)

    @property
    def is_ready(self) -> bool:
        """Test whether no lazy module waits for its first call."""
        return not any(map(internals.is_uninitialized, self.tensors))


def read(module: torch.nn.Module, but: Container[tuple[int, str]] = ()) -> Reading:
    """Walk over a module and its submodules. Tensors in the places `but` do not count, each a dict
    by identity and a name. TorchScript's modules are values from outside.
    """
    modules = tuple(one for one in module.modules() if not isinstance(one, torch.jit.ScriptModule))
    parts = {id(one): number for number, one in enumerate(modules)}
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    places: list[tuple[str, int | None]] = []
    hooks: list[Any] = [*_hooks(internals.GLOBAL_HOOKS)]
    dicts: list[dict[Any, Any]] = [*internals.GLOBAL_HOOKS]
    for child in modules:
        held = child.__dict__
        dicts += (held["_parameters"], held["_buffers"], held["_modules"])
        if child is not module:  # its own hooks run around the program
            own = [held[name] for name in internals.HOOKS]
            dicts += own
            hooks += _hooks(own)
        plain = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        for section in (held["_parameters"], held["_buffers"], plain):
            holder = held if section is plain else section
            for name, tensor in section.items():
                if but and (id(holder), name) in but:
                    continue
                if tensor is not None and id(tensor) not in numbers:
                    numbers[id(tensor)] = len(tensors)
                    tensors.append(tensor)
                places.append((name, None if tensor is None else numbers[id(tensor)]))
        places += [(name, parts.get(id(part))) for name, part in held["_modules"].items()]
    layout = Layout(modules, tuple(map(type, modules)), tuple(places), tuple(hooks))
    return Reading(layout, tuple(tensors), tuple(dicts), tuple(child.__dict__ for child in modules))


def _hooks(dicts: Sequence[dict[Any, Any]]) -> Iterator[Any]:
    for hooks in dicts:
        yield from hooks.values()
        yield None


def matches(reads: Reads) -> bool:
    """Test whether the attributes that were read hold what they held then."""
    return all(seen(attribute(place), 0) == value for place, value in reads.items())


def changed_attribute(module: torch.nn.Module, reads: Reads) -> str | None:
    """The path of the first attribute that does not hold what it held, such as `0.training`;
    None if all do.
    """
    paths = {id(part.__dict__): path for path, part in module.named_modules()}
    for place, value in reads.items():
        path = paths.get(id(place.module.__dict__))
        if path is not None and seen(attribute(place), 0) != value:
            return f"{path}.{place.name}" if path else place.name
    return None


def unchanged(reading: Reading, reads: Reads) -> Callable[[], bool]:
    """A quick check that the module is as it was read, and the attributes as they are now."""
    dicts = {id(value): value for value in reading.dicts}
    attributes = {id(value): value for value in reading.attributes if id(value) not in dicts}
    dicts_match = internals.dict_guard(tuple(dicts.values()), tuple(attributes.values()))
    if reading.is_parametrized:
        versions_match, dicts_match = (
            dicts_match,
            lambda: not internals.is_caching() and versions_match(),
        )
    modules, classes = reading.layout.modules, [*reading.layout.classes]
    pairs = {(type(one.module), one.name) for one in reads if one.name not in one.module.__dict__}
    of_classes = [
        (cls, name, value) for cls, name in pairs if (value := of_class(cls, name)) is not ABSENT
    ]
    own, same = reading.attributes, operator.is_

    def is_own() -> bool:
        return [*map(type, modules)] == classes and all(map(same, map(_OWN, modules), own))

    if not of_classes:
        return lambda: dicts_match() and is_own()

    def match() -> bool:
        return (
            dicts_match()
            and is_own()
            and all(getattr(cls, name, ABSENT) is value for cls, name, value in of_classes)
        )

    return match
