"""The values of attributes and items of objects that frames use, and the edges to them."""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import STATE_METHODS
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside.answers import levels_of
from thunder_fn.capture.outside.code_frames import Frame
from thunder_fn.capture.outside.edges import Constant, comes_first, look
from thunder_fn.capture.outside.effects import CHANGES
from thunder_fn.capture.outside.expressions import Source, text
from thunder_fn.capture.outside.frames import is_machinery
from thunder_fn.capture.outside.kinds import (
    EXACT,
    ITEM_METHODS,
    Made,
    Super,
    code_of,
    default_of,
    environment,
    is_library_module,
    is_namespace,
    is_of_library,
    is_opaque,
    is_open,
    is_ours,
    is_python,
    is_seen,
    live_in,
    members_of_enum,
    own_attribute,
    parts_in,
    reference_to,
)
from thunder_fn.capture.outside.reached import MANY, Reached
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    CONTAINERS,
    HEAP_TYPE,
    LONG,
    SEQUENCES,
    fields_of,
    length_of,
    module_of,
)
from thunder_fn.capture.replaced import host_random
from thunder_fn.ir.text import escaped

_WRITES = frozenset(
    [
        "append",
        "appendleft",
        "extend",
        "extendleft",
        "insert",
        "add",
        "update",
        "clear",
        "__setitem__",
    ]
)
"""Methods of containers that do not look at the content."""
_WRITERS = frozenset(
    ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__", "__ior__", "__set__")
)
"""Methods that write to their object, and that no hook sees where they are of C."""
_STATES = frozenset(("__getstate__", "__reduce__", "__reduce_ex__"))
"""Methods of C that read all attributes of their object."""
_GENERATOR = inspect.CO_GENERATOR
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_DRAWING = (
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
)
"""Generators of random numbers other than PyTorch's."""
_OF_FUNCTIONS = ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__")
"""Attributes of functions that are read as they are."""
_OF_TYPES = ("__name__", "__qualname__", "__mro__", "__bases__", "__base__")
"""Attributes of classes that are read as they are."""
_PARTS_OF_FUNCTIONS = ("__globals__", "__closure__", "__code__", "__defaults__", "__kwdefaults__")
"""Attributes of functions that lead to what they read."""


class Attributes(Reached):
    """The objects that a function can reach, and what it finds in them."""

    def __init__(self, own: frozenset[int]) -> None:
        super().__init__(own)
        self.states: dict[str, str] = {}
        """Methods that look at or set the state of a generator of random numbers, by how the
        generator is written.
        """
        self.generators: dict[int, tuple[Any, Any]] = {}
        """Generators of random numbers from outside, and their states when they were met."""
        self.late: list[tuple[Any, str, str]] = []
        """Values that cached properties compute while the function runs."""

    def item(
        self, value: Any, keys: Sequence[Any] | None, path: str, frame: Frame
    ) -> Sequence[Any]:
        """The values of an item, and the edges to them; `keys` is None if they are not known."""
        if is_a(value, contextvars.ContextVar):
            held = self.edge("context", value, None, path)
            return tuple(self.reach(one, path) for one in (held, default_of(value)))
        if value is os.environ or value is os:
            return self.environment_item(keys)
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if members := members_of_enum(value):
            return members
        if not self.is_outside(value):
            return self.items(value, path) if type(value) in EXACT else ()
        if not is_a(value, (*SEQUENCES, dict, types.MappingProxyType)) or keys is None:
            return self.unknown_item(value, path, frame)
        is_sequence = is_a(value, SEQUENCES)
        found: list[Any] = []
        for name in keys:
            if not is_sequence or is_a(name, int):
                written = f"{path}[{name!r}]"
                item = self.edge("index" if is_sequence else "key", value, name, written)
                found.append(self.reach(item, written))
        return found

    def environment_item(self, keys: Sequence[Any] | None) -> Sequence[Any]:
        """Cross the edges to variables of the environment; to all of them if keys are unknown."""
        held = environment()
        if keys is None:
            self.edge("content", held, None, "os.environ")
        for name in keys or ():
            if is_a(name, str):
                key = os.environ.encodekey(name)  # type: ignore[attr-defined]
                self.edge("key", held, key, f"os.environ[{name!r}]")
        return ()

    def unknown_item(self, value: Any, path: str, frame: Frame) -> Sequence[Any]:
        """The values of an item of an unknown key, or of an object with a `__getitem__`."""
        if is_namespace(value):
            return self.names_in(value, path, frame)
        self.content(value, path)
        if is_a(value, CONTAINERS):
            return self.items(value, path)
        if is_seen(method := look("class", type(value), "__getitem__")):
            return self.waited(frame, method)
        if is_a(value, _WEAK):
            return self.items(value, path)
        self.unseen(value, path, frame)
        return ()

    def names_in(self, value: dict[str, Any], path: str, frame: Frame) -> Sequence[Any]:
        """The values of a module's names, each by an edge; of very many, those of now."""
        if len(value) > LONG:
            path = f"a name in {path}"
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))
            return [self.reach(item, path) for item in value.values()]
        return self.item(value, [*value], path, frame)

    def waited(self, frame: Frame, callee: Any) -> Sequence[Any]:
        """The results of the callee behind an attribute or item, which are known at the end of the
        frame.
        """
        frame.waits = True
        return results_of(frame, [callee])

    def attribute(self, value: Any, name: str, of: Source, frame: Frame) -> Sequence[Any]:
        """The value of an attribute, and the edge to it."""
        path = f"{self.path(value, '') or text(of)}.{escaped(name)}"
        if name in _WRITERS and self.was_there(value.of if is_a(value, Super) else value):
            self.effects.found.append(name)
        if name == "__class__" and not is_a(value, Super):
            return self.class_of(value, path)
        if is_a(value, torch.nn.Module):
            return self.module_attribute(value, name, path, frame)
        if is_a(value, Super):
            return self.attribute_of_super(value, name, frame)
        if not self.is_outside(value):
            return self.attribute_of_new(value, name, path)
        return self.attribute_of_known(value, name, path, frame)

    def was_there(self, value: Any) -> bool:
        """Test for a value that was there before the function, or a class, whose methods are given
        their object.
        """
        return is_a(value, type) or self.is_outside(value)

    def attribute_of_known(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:
        """An attribute of an object from outside."""
        if is_a(value, ARRAYS):
            self.array(value, path)
            return ()
        if is_a(value, threading.local):
            return (self.reach(self.edge("attr", value, name, path), path),)
        if name == "__dict__" and is_a(held := dict_of(value), dict):
            self.own_dict(value, path)
            return (self.reach(held, path),)
        if is_a(value, types.ModuleType):
            return self.global_attribute(value, name, path, frame)
        if is_a(value, type):
            return self.attribute_of_type(value, name, path)
        return self.object_attribute(value, name, path, frame)

    def some_attributes(self, value: Any, pattern: str, of: Source, frame: Frame) -> list[Any]:
        """The values of the attributes whose names match a pattern, of an object and its classes,
        and an edge to all of them.
        """
        path = self.path(value, "") or text(of)
        if is_a(value, Super) or (is_a(value, types.ModuleType) and is_library_module(value)):
            return []
        own, match, found = dict_of(value), re.compile(pattern, re.DOTALL).fullmatch, list[Any]()
        if is_a(value, torch.nn.Module) and self.is_outside(value):
            self.edge("names", own, None, path, is_by_value=True)
        if is_a(own, dict) and not is_a(value, type) and not internals.is_tracer(value):
            is_known = is_a(value, torch.Tensor) or self.is_outside(value)
            if is_known and not is_a(value, torch.nn.Module):
                self.own_dict(value, path)
                self.edge("entries", own, pattern, path, is_by_value=True)
            items = [item for name, item in tuple(own.items()) if match(name)]
            found += (self.reach(item, path) if is_known else item for item in items)
        kind: type = value if is_a(value, type) else type(value)
        for cls in kind.__mro__:
            (held,) = gc.get_referents(cls.__dict__)
            if not self.is_open(cls):
                is_new = is_open(cls)
                found += (item for name, item in held.copy().items() if is_new and match(name))
                continue
            self.edge("entries", held, pattern, cls.__name__, is_by_value=True)
            for name, item in tuple(held.items()):
                if match(name) and is_a(item, types.MemberDescriptorType):
                    found.append(self.edge("attr", value, name, f"{path}.{escaped(name)}"))
                elif match(name):
                    self.reach(getattr(item, "__func__", item), f"{cls.__name__}.{escaped(name)}")
                    found += self.bound(item, value, frame)
        return found

    def class_of(self, value: Any, path: str) -> Sequence[Any]:
        """The class of an object, and the edge to it if it is one of the user's: others are not
        exchanged. A module's is guarded with its state.
        """
        cls: type = value.cls if is_a(value, Made) else type(value)
        is_outside, is_open = self.is_outside(value), self.is_open(cls)
        if is_outside and is_open and not is_a(value, torch.nn.Module):
            self.edge("attr", value, "__class__", path, is_by_value=True)
        return (self.reach(cls, cls.__name__),) if is_outside or is_open else ()

    def attribute_of_type(self, value: type, name: str, path: str) -> Sequence[Any]:
        """An attribute of a class, or of its metaclass."""
        if name == "__dict__":
            for held in gc.get_referents(value.__dict__) if self.is_open(value) else ():
                self.content(held, path)
            return (value.__dict__,)
        if name in _OF_TYPES:
            return (self.reach(self.edge("attr", value, name, path, is_by_value=True), path),)
        found = self.edge("class", value, name, path)
        if found is ABSENT and look("class", meta := type(value), name) is not ABSENT:
            self.asked(found := self.edge("class", meta, name, path), path)
        return (self.reach(getattr(found, "__func__", found), path),)

    def attribute_of_new(self, value: Any, name: str, path: str) -> Sequence[Any]:
        """An attribute of an object that the function made, of its own or of its class."""
        if is_a(value, Frame):  # what `sys._getframe` gives
            return (self.reach(value.globals, path),) if name == "f_globals" else ()
        cls, own = type(value), own_attribute(value, name)
        if is_a(value, Made):
            cls, own = value.cls, ABSENT
        held = dict_of(value)
        if (type(held) is dict and name in held) or not self.is_open(cls):
            return () if own is ABSENT else (own,)
        found = self.edge("class", cls, name, path)
        if found is ABSENT:
            self.edge("class", cls, "__getattr__", path)
        elif not hasattr(found, "__get__"):
            own = self.reach(found, path)
        return () if own is ABSENT else (own,)

    def attribute_of_super(self, value: Super, name: str, frame: Frame) -> Sequence[Any]:
        """An attribute of one of the classes after another."""
        path = f"super().{escaped(name)}"
        self.bases(value.kind, path)
        for base in value.bases():
            if not is_open(base):
                return ()
            found = base.__dict__.get(name, ABSENT)
            self.edge("class", base, name, path)
            if found is not ABSENT:
                self.reach(getattr(found, "__func__", found), path)
                return self.bound(found, value.of, frame)
        return ()

    def bound(self, found: Any, value: Any, frame: Frame) -> Sequence[Any]:
        """An attribute of a class as an object has it."""
        if is_a(found, types.FunctionType):
            return (frame.stand_in(types.MethodType, found, value),)
        return self.waited(frame, code_of(found)) if hasattr(found, "__get__") else (found,)

    def object_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:  # noqa: C901 - a branch for each kind of holder
        """An attribute of an object, of its own or of its class."""
        of_class, held = look("class", type(value), name), dict_of(value)
        if is_a(value, Enum) and name in ("name", "value"):
            return (self.reach(self.edge("key", held, f"_{name}_", path), path),)
        self.asked(of_class, path)
        self.state_behind(value, name, path, frame)
        is_own = held is not None and (name in held or is_python(of_class))
        is_own = is_own or is_a(of_class, types.MemberDescriptorType)
        if is_a(value, CONTAINERS) and not is_own:
            return self.container_attribute(value, name, path, frame)
        self.iterator(value, path.rpartition(".")[0], is_used=True)
        is_slot = is_a(of_class, (types.MemberDescriptorType, types.GetSetDescriptorType))
        is_slot = is_slot or module_of(type(of_class)) == "_ctypes"
        if is_a(value, types.FunctionType) and name in _OF_FUNCTIONS:
            self.content(found := self.edge("attr", value, name, path, is_by_value=True), path)
            return (found,)
        is_part = is_a(value, types.FunctionType) and name in _PARTS_OF_FUNCTIONS
        cls: Any = type(value)
        is_builtin = callable(value) and not cls.__flags__ & HEAP_TYPE
        if is_part or (is_slot and not is_builtin):
            return (self.reach(self.edge("attr", value, name, path, is_by_value=True), path),)
        if not is_a(held, dict):
            if is_a(value, torch.Generator) and name in STATE_METHODS:
                self.states.setdefault(path.rpartition(".")[0], name)
            elif is_a(of_class, types.MethodDescriptorType):
                self.unseen(value, path.rpartition(".")[0], frame)
            return ()
        found = held.get(name, ABSENT)
        if found is ABSENT and is_a(of_class, functools.cached_property):
            self.late.append((value, name, path))
            self.touched.add(id(held))
        elif module_of(type(value)) == "logging" or not is_ours(module_of(type(value))):
            found = self.own_attribute(value, name, path)
        if found is not ABSENT:
            return (self.reach(found, path),)
        if of_class is ABSENT:
            for missing in (name, "__getattr__") if cls.__flags__ & HEAP_TYPE else ():
                self.edge("class", cls, missing, path)
            return self.waited(frame, look("class", type(value), "__getattr__"))
        return self.class_attribute(value, name, path, frame)

    def own_attribute(self, value: Any, name: str, path: str) -> Any:
        """Cross the edge to an entry of an object's `__dict__`, which may become another dict."""
        is_hidden = comes_first(look("class", type(value), name))
        owner = None if is_hidden else value
        return self.edge("key", dict_of(value), name, path, owner=owner)

    def attribute_of_object(self, value: Any, name: str, path: str) -> None:
        """Cross the edge to an attribute of an object's own, in its `__dict__` or in a slot."""
        if name in (dict_of(value) or ()):
            self.reach(self.own_attribute(value, name, path), path)
        else:
            self.reach(self.edge("attr", value, name, path, is_by_value=True), path)

    def own_dict(self, value: Any, path: str) -> None:
        """Cross the edge to the `__dict__` of an object."""
        if (reference := reference_to(value)) is not None:
            self.edge("dict", reference, None, path, is_by_value=True)

    def state_behind(self, value: Any, name: str, path: str, frame: Frame) -> None:
        """Note that a method draws random numbers, asks for the level of a logger, or, as a method
        of C, for all attributes.
        """
        if name in _STATES and not is_python(look("class", type(value), name)):
            self.fields(value, path.rpartition(".")[0])
        if is_a(value, _DRAWING) and not name.startswith("__"):
            numbers = f"the random numbers of {path.rpartition('.')[0]}"
            if self.is_outside(value) and id(value) not in self.generators:
                self.generators[id(value)] = value, host_random.state_of(value)
            self.constants.setdefault(
                numbers, Constant(numbers, frame.code.co_filename, frame.line)
            )
        if is_a(value, logging.Logger) and name in (
            "isEnabledFor",
            "getEffectiveLevel",
            "hasHandlers",
        ):
            self.answer(levels_of, (value,), f"the level of {path.rpartition('.')[0]}")

    def moved_generator(self) -> str | None:
        """The class of a generator that has drawn numbers since it was met, if one has."""
        pairs = self.generators.values()
        moved = (value for value, before in pairs if host_random.has_drawn(value, before))
        return next((f"{type(value).__module__}.{type(value).__name__}" for value in moved), None)

    def draw_again(self) -> None:
        """Set generators back to where they were when they were met."""
        for value, before in self.generators.values():
            if before is not None:
                host_random.put_back(value, before)

    def container_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:
        """An attribute of a container, which most often is a method that reads its content. One
        that looks at an item counts where it is called.
        """
        if is_a(value, tuple) and name in getattr(type(value), "_fields", ()):
            return (self.reach(getattr(value, name, None), path),)
        if type(value).__flags__ & HEAP_TYPE:
            if is_a(dict_of(value), dict):
                self.own_attribute(value, name, path)
            self.edge("class", type(value), name, path)
        if name in CHANGES:
            self.changing.setdefault(id(value), set()).add(name)
        if name in ITEM_METHODS and is_a(value, dict):
            return (frame.stand_in(types.MethodType, ITEM_METHODS[name], value),)
        if name not in _WRITES:
            self.content(value, path.rpartition(".")[0])
        return ()

    def class_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:
        """An attribute that an object has from its class."""
        of_class = look("class", type(value), name)
        is_fixed = is_a(value, Enum) or is_ours(module_of(type(value)))
        if not is_fixed and (reference := reference_to(value)):
            self.edge("type", reference, None, f"the class of {path}")
        self.edge("class", type(value), name, path)
        self.reach(of_class, path)
        if is_a(of_class, property) and (is_of_library(value) or not is_seen(of_class.fget)):
            self.fields(value, path.rpartition(".")[0])
            if fields_of(value) is None:
                self.edge("attr", value, name, path, is_by_value=True)
        return self.bound(of_class, value, frame)

    def module_attribute(
        self, value: torch.nn.Module, name: str, path: str, frame: Frame
    ) -> Sequence[Any]:
        """The state of a module is guarded as a whole; an attribute of its class is an edge."""
        held = value.__dict__
        self.touched.add(id(held))
        if name == "__dict__":
            is_known = id(value) in self.own or self.is_outside(value)
            return (self.reach(held, path) if is_known else held,)
        kinds = ("_parameters", "_buffers", "_modules")  # none before `Module.__init__` has run
        for section in (held, *(held[kind] for kind in kinds if kind in held)):
            if name in section:
                is_held = section is held and not is_a(section[name], torch.nn.Module)
                is_followed = (is_held or id(value) not in self.own) and self.is_outside(value)
                return (self.reach(section[name], path) if is_followed else section[name],)
        found = look("class", type(value), name)
        if found is ABSENT or is_ours(module_of(type(value))):
            return ()
        self.edge("class", type(value), name, path)
        self.reach(found, path)
        return self.bound(found, value, frame)

    def global_attribute(
        self, module: types.ModuleType, name: str, path: str, frame: Frame
    ) -> Sequence[Any]:
        """The value of a module's global. Those of libraries are constants but for flags, and for
        functions and classes that the user's code names.
        """
        held = vars(module)
        if name in held:
            value = held[name]
            is_flag = is_a(value, (bool, int, float, str, type(None)))
            self.touched.add(id(held))
            if is_flag or not is_library_module(module) or module is sys:
                self.edge("key", held, name, path)
            elif not frame.is_library and callable(value) and internals.unpatched(value) is value:
                self.edge("key", held, name, path)  # as long as captures do not replace it
            return (self.reach(value, path),)
        if not is_library_module(module):
            self.edge("key", held, name, path)
            return self.waited(frame, held.get("__getattr__"))
        if type(module) is types.ModuleType:
            self.late.append((module, name, path))  # a `__getattr__` may import it
        if type(module) is not types.ModuleType and is_machinery(module.__name__):
            self.edge(
                "attr", module, name, path, is_by_value=True
            )  # such as torch.backends.cudnn.enabled
        return ()

    def items(self, value: Any, path: str) -> Sequence[Any]:
        """The items that a loop over a value gives."""
        self.touched.add(id(value))
        if value is os.environ:
            self.edge("content", environment(), None, "os.environ")
            return ()
        if is_a(value, _WEAK):
            self.fields(value, path)
            return [self.reach(item, path) for item in live_in(value)]
        if is_a(value, CONTAINERS):
            items = parts_in(value) if length_of(value) <= MANY else []
            return [self.reach(item, path) for item in items] if self.is_outside(value) else items
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if members := members_of_enum(value):
            return members
        if self.is_outside(value):
            self.iterator(value, self.path(value, path), is_used=True)
        return (value,)

    def unseen(self, value: Any, path: str, frame: Frame) -> None:
        """Reach an object that unseen code reads. One that has no attributes for Python to see is
        taken as a constant.
        """
        self.fields(value, path)
        if is_a(value, types.MappingProxyType):
            self.content(value, path)
        if is_opaque(value):
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))


def results_of(frame: Frame, callees: Sequence[Any]) -> list[Any]:
    """The results of a frame's Python callees; only those that are meant, where all of them are
    known.
    """
    codes = [callee if is_a(callee, types.CodeType) else code_of(callee) for callee in callees]
    is_any = not codes or None in codes
    return [
        value
        for value, code in frame.returned.values()
        if is_any or code in codes or code.co_flags & _GENERATOR
    ]
