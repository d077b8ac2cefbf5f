"""The values of attributes and items of objects that frames use, and the edges to them."""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import threading
import types
from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.capture.generators import STATE_METHODS
from thunder_fn.capture.outside.code_frames import Frame
from thunder_fn.capture.outside.edges import Constant, look
from thunder_fn.capture.outside.expressions import Source, text
from thunder_fn.capture.outside.frames import is_machinery
from thunder_fn.capture.outside.kinds import (
    EXACT,
    code_of,
    environment,
    is_library_module,
    is_opaque,
    is_ours,
    is_python,
    is_seen,
    own_attribute,
    parts_in,
    reference_to,
)
from thunder_fn.capture.outside.reached import MANY, Reached
from thunder_fn.capture.outside.reads import (
    ABSENT,
    CONTAINERS,
    dict_of,
    is_a,
    length_of,
)
from thunder_fn.ir.text import escaped

_WRITES = frozenset(("append", "add", "extend", "appendleft", "get", "clear"))
"""Methods of containers that do not look at the content, and `get`, which is an item."""
_WRITERS = frozenset(
    ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__", "__ior__", "__set__")
)
"""Methods that write to their object, and that no hook sees where they are of C."""
_GENERATOR = inspect.CO_GENERATOR


class Attributes(Reached):
    """The objects that a function can reach, and what it finds in them."""

    def __init__(self, own: frozenset[int]) -> None:
        super().__init__(own)
        self.states: dict[str, str] = {}
        """Methods that look at or set the state of a generator of random numbers, by how the
        generator is written.
        """
        self.late: list[tuple[dict[str, Any], str, str]] = []
        """Values that cached properties compute while the function runs."""

    def item(
        self, value: Any, keys: Sequence[Any] | None, path: str, frame: Frame
    ) -> Sequence[Any]:
        """The values of an item, and the edges to them; `keys` is None if they are not known."""
        if is_a(value, contextvars.ContextVar):
            return (self.reach(self.edge("context", value, None, path), path),)
        if value is os.environ or value is os:
            self.environment_variables(keys)
            return ()
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if not self.is_outside(value):
            return self.items(value, path) if type(value) in EXACT else ()
        if not is_a(value, (dict, list, tuple, types.MappingProxyType)) or keys is None:
            return self.unknown_item(value, path, frame)
        kind = "index" if is_a(value, (list, tuple)) else "key"
        found: list[Any] = []
        for name in keys:
            if kind == "key" or is_a(name, int):
                written = f"{path}[{name!r}]"
                found.append(self.reach(self.edge(kind, value, name, written), written))
        return found

    def environment_variables(self, names: Sequence[Any] | None) -> None:
        """Cross the edges to variables of the environment, or to all of them."""
        if names is None:
            self.edge("content", environment(), None, "os.environ")
        for name in names or ():
            if is_a(name, str):
                key, path = os.environ.encodekey(name), f"os.environ[{name!r}]"  # type: ignore[attr-defined]
                self.edge("key", environment(), key, path)

    def unknown_item(self, value: Any, path: str, frame: Frame) -> Sequence[Any]:
        """The values of an item whose key is not known, or of an object that is no container."""
        self.content(value, path)
        if is_a(value, CONTAINERS):
            return self.items(value, path)
        if is_seen(method := look("class", type(value), "__getitem__")):
            return self.waited(frame, [method])
        self.unseen(value, path, frame)
        return ()

    def waited(self, frame: Frame, callees: list[Any]) -> Sequence[Any]:
        """Return the results of the callees behind an attribute or item. They are known at the end
        of the frame, so the frame is evaluated again then.
        """
        frame.waits = True
        return results_of(frame, callees)

    def attribute(self, value: Any, name: str, of: Source, frame: Frame) -> Sequence[Any]:
        """The value of an attribute, and the edge to it."""
        path = f"{self.path(value, '') or text(of)}.{escaped(name)}"
        if name in _WRITERS:
            self.effects.found.append(name)
        if is_a(value, torch.nn.Module):
            return self.module_attribute(value, name, path)
        if not self.is_outside(value):
            return (found,) if (found := own_attribute(value, name)) is not ABSENT else ()
        if type(value).__module__ == "numpy":
            self.array(value, path)
            return ()
        if name == "__dict__" and type(dict_of(value)) is dict:
            return (self.reach(value.__dict__, path),)
        if is_a(value, types.ModuleType):
            return self.global_attribute(value, name, path, frame)
        if is_a(value, threading.local):
            return (self.reach(self.edge("attr", value, name, path), path),)
        if is_a(value, type):
            found = self.edge("class", value, name, path)
            if found is ABSENT and look("class", meta := type(value), name) is not ABSENT:
                found = self.edge("class", meta, name, path)
            return (self.reach(getattr(found, "__func__", found), path),)
        return self.object_attribute(value, name, path, frame)

    def object_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:  # noqa: C901 - a branch for each kind of holder
        """An attribute of an object, of its own or of its class."""
        of_class, held = look("class", type(value), name), dict_of(value)
        self.asked(of_class, path)
        if is_a(value, CONTAINERS) and (
            held is None or (name not in held and not is_python(of_class))
        ):
            if is_a(value, tuple) and hasattr(type(value), "_fields") and of_class is not ABSENT:
                return (self.reach(getattr(value, name, None), path),)
            if name not in _WRITES:
                self.content(value, path.rpartition(".")[0])
            return ()
        self.iterator(value, path.rpartition(".")[0], is_used=True)
        if is_a(
            of_class, (types.MemberDescriptorType, types.GetSetDescriptorType)
        ) and not callable(value):
            return (self.reach(self.edge("attr", value, name, path, is_by_value=True), path),)
        if type(held) is not dict:
            if is_a(value, torch.Generator) and name in STATE_METHODS:
                self.states.setdefault(path.rpartition(".")[0], name)
            elif is_a(of_class, types.MethodDescriptorType):
                self.unseen(value, path.rpartition(".")[0], frame)
            return ()
        found = held.get(name, ABSENT)
        if found is ABSENT and is_a(of_class, functools.cached_property):
            self.late.append((held, name, path))
            self.touched.add(id(held))
        elif not is_ours(type(value).__module__):
            found = self.edge("key", held, name, path)
        if found is not ABSENT:
            return (self.reach(found, path),)
        if of_class is ABSENT:
            return self.waited(frame, [look("class", type(value), "__getattr__")])
        return self.class_attribute(value, name, path, frame)

    def class_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:
        """An attribute that an object has from its class."""
        of_class = look("class", type(value), name)
        if (reference := reference_to(value)) and not is_ours(type(value).__module__):
            self.edge("type", reference, None, f"the class of {path}")
        self.edge("class", type(value), name, path)
        self.reach(of_class, path)
        if is_a(of_class, types.FunctionType):
            return (types.MethodType(of_class, value),)
        return (
            self.waited(frame, [code_of(of_class)]) if hasattr(of_class, "__get__") else (of_class,)
        )

    def module_attribute(self, value: torch.nn.Module, name: str, path: str) -> Sequence[Any]:
        """Return an attribute of a module. The module's state is guarded as a whole; an attribute
        of its class is an edge.
        """
        held = value.__dict__
        self.touched.add(id(held))
        if name == "__dict__":
            return (self.reach(held, path),)
        kinds = ("_parameters", "_buffers", "_modules")  # none before `Module.__init__` has run
        for section in (held, *(held[kind] for kind in kinds if kind in held)):
            if name in section:
                is_followed = id(value) not in self.own and self.is_outside(value)
                return (self.reach(section[name], path) if is_followed else section[name],)
        found = look("class", type(value), name)
        if found is ABSENT or name == "__class__" or is_ours(type(value).__module__):
            return ()
        self.edge("class", type(value), name, path)
        return (self.reach(found, path),)

    def global_attribute(
        self, module: types.ModuleType, name: str, path: str, frame: Frame
    ) -> Sequence[Any]:
        """Return the value of a module's global. Globals of libraries are constants, except flags."""
        held = vars(module)
        if name in held:
            is_flag = is_a(held[name], (bool, int, float, str, type(None)))
            is_settled = is_machinery(module.__name__) and type(module) is types.ModuleType
            self.touched.add(id(held))
            if not is_library_module(module) or (is_flag and not is_settled):
                self.edge("key", held, name, path)
            return (self.reach(held[name], path),)
        if not is_library_module(module):
            self.edge("key", held, name, path)
            return self.waited(frame, [held.get("__getattr__")])
        if type(module) is not types.ModuleType and is_machinery(module.__name__):
            self.edge(
                "attr", module, name, path, is_by_value=True
            )  # such as torch.backends.cudnn.enabled
        return ()

    def items(self, value: Any, path: str) -> Sequence[Any]:
        """The items that a loop over a value gives."""
        self.touched.add(id(value))
        if is_a(value, CONTAINERS):
            items = parts_in(value) if length_of(value) <= MANY else []
            return [self.reach(item, path) for item in items] if self.is_outside(value) else items
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if self.is_outside(value):
            self.iterator(value, self.path(value, path), is_used=True)
        return (value,)

    def unseen(self, value: Any, path: str, frame: Frame) -> None:
        """Guard the attributes of an object that unseen code reads. One without attributes that
        Python can see is taken as a constant.
        """
        self.fields(value, path)
        if is_opaque(value):
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))


def results_of(frame: Frame, callees: Sequence[Any]) -> list[Any]:
    """The results of a frame's Python callees. If all callees are known, only theirs."""
    codes = [callee if is_a(callee, types.CodeType) else code_of(callee) for callee in callees]
    is_any = not codes or None in codes
    return [
        value
        for value, code in frame.returned.values()
        if is_any or code in codes or code.co_flags & _GENERATOR
    ]
