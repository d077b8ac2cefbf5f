"""Kinds of values from outside, by which it is decided how a read of them is guarded.

No code of the user runs.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import io
import operator
import os
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside.edges import constant, is_same, look
from thunder_fn.capture.outside.frames import is_library, is_machinery, is_user_file, is_watched
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    CONTAINERS,
    HEAP_TYPE,
    PLAIN,
    content_of,
    fields_of,
    module_of,
)
from thunder_fn.capture.supported import EscapedValue
from thunder_fn.errors import UnsupportedCall, kind_of
from thunder_fn.ir.sources import Source

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
OF_TRACE = (internals.Tracer, EscapedValue, *SYMBOLIC)
_NO_READS = frozenset(
    ("torch", "thunder_fn", "functools", "logging", "warnings", "time", "typing", "abc")
)
"""Modules whose functions look at no attributes of an object that they are given, or call its
methods, whose frames are seen.
"""
_HARMLESS = frozenset(
    map(
        id,
        (
            len,
            isinstance,
            issubclass,
            id,
            type,
            callable,
            print,
            hash,
            repr,
            getattr,
            hasattr,
            setattr,
            iter,
            str,
            dict.get,
            dict.setdefault,
        ),
    )
)
_SETTLED = frozenset(
    (
        "torch",
        "thunder_fn",
        "numpy",
        "datetime",
        "decimal",
        "re",
        "_thread",
        "_io",
        "contextvars",
        "_contextvars",
        "weakref",
    )
)
"""Modules whose objects without attributes never change, or are guarded elsewhere."""
NO_FIELDS = (type, types.ModuleType, torch.nn.Module, torch.Tensor, *PLAIN)
"""Classes whose objects have no attributes that unseen code reads, or are guarded elsewhere."""
FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    torch.nn.Module,
)
"""Classes of objects that are called."""
_CALLED = frozenset((types.FunctionType, types.MethodType, types.GeneratorType, functools.partial))
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
"""Views of dicts."""
EXACT = frozenset((list, tuple, dict, set, frozenset, collections.deque))
"""Containers whose class is Python's own."""


@dataclass(frozen=True, slots=True, eq=False)
class Super:
    """The object that `super(cls, of)` gives."""

    cls: type
    of: Any

    @property
    def kind(self) -> type:
        """The class whose bases it looks through."""
        return self.of if is_a(self.of, type) else type(self.of)

    def bases(self) -> tuple[type, ...]:
        """The classes after its own."""
        order = self.kind.__mro__
        return order[order.index(self.cls) + 1 :]


ITEM_METHODS: dict[str, Any] = {"get": dict.get, "setdefault": dict.setdefault}
"""Methods of dicts that look at one item."""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """A new object of a class, of which nothing else is known."""

    cls: type


def members_of_enum(value: Any) -> list[Any]:
    """The members of an enumeration; none of any other value."""
    return list(value.__dict__["_member_map_"].values()) if is_a(value, enum.EnumMeta) else []


def reference_to(value: Any) -> Any:
    """A weak reference, since a guard keeps no object alive; None if the object allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def is_lasting(value: Any) -> bool:
    """Test for a class or function of a module, which was not made by the traced function."""
    return is_a(value, (type, types.FunctionType)) and "<locals>" not in value.__qualname__


def parts_in(value: Any) -> list[Any]:
    """The items of a container; keys and values of a dict."""
    items = content_of(value)
    return [part for pair in items for part in pair] if is_a(value, dict) else items


def default_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value of a context variable where nobody has set one; None if it has none."""
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return None


def tensors_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers in modules themselves."""
    sections = (vars(one).get(kind, {}) for one in modules for kind in ("_parameters", "_buffers"))
    return [one for section in sections for one in section.values() if one is not None]


def live_in(value: Any) -> list[Any]:
    """The objects that a container with weak references holds."""
    if is_a(value, weakref.WeakSet):
        return list(value)
    return [part for pair in value.items() for part in pair]


def classes_in(values: Any) -> Iterator[type]:
    """The classes in the second argument of `isinstance`: one, a tuple, or a union."""
    for value in values:
        if is_a(value, type):
            yield value
        elif is_a(value, (tuple, types.UnionType)):
            yield from classes_in(getattr(value, "__args__", value))


def answers_of(function: Any, kept: dict[Any, Any]) -> list[Any]:
    """The answers of a cached function."""
    return [answer for _, answer in entries_of(function, kept)]


def entries_of(function: Any, kept: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The keys and answers of a cached function. One of bounded size keeps links, which serve other
    keys later. The collector visits the key, the answer and the class of each.

    While a function is traced, a key may hold symbolic numbers, which have no hash here.
    """
    if function.cache_info().maxsize is None:
        return list(kept.items())
    found, keys = gc.get_referents(function), set(map(id, kept))
    classes = {id(type(link)) for link in kept.values()}
    links = zip(found, found[1:], found[2:], strict=False)
    return [(key, answer) for key, answer, cls in links if id(key) in keys and id(cls) in classes]


def has_answers(function: Any, kept: dict[Any, Any], known: dict[Any, Any]) -> bool:
    """Test whether a cached function still has these answers."""
    now = dict(entries_of(function, kept))
    return all(is_same(now.get(key, ABSENT), answer) for key, answer in known.items())


def place_of(function: Any) -> tuple[str, int]:
    """The file and first line of a function."""
    code = getattr(function, "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


def name_of_method(owner: type, code: types.CodeType) -> str | None:
    """The name under which a class has a method of this code, be it decorated."""

    def is_it(found: Any) -> bool:
        while found is not None and code_of(found) is not code:
            found = getattr(getattr(found, "__func__", found), "__wrapped__", None)
        return found is not None

    held, name = owner.__dict__, code.co_name
    if is_it(held.get(name)):
        return name
    return next((name for name, found in held.items() if is_it(found)), None)


def is_ours(module: Any) -> bool:
    """Test for a class of PyTorch's or ours, whose objects are machinery."""
    return (
        is_a(module, str)
        and module.partition(".")[0] in ("thunder_fn", "torch", "logging")
        and is_machinery(module)
    )


def is_of_library(value: Any) -> bool:
    """Test for an object of a class that Python's own library has written in Python."""
    cls = type(value)
    return (
        bool(cls.__flags__ & HEAP_TYPE)
        and is_machinery(module_of(cls))
        and not is_ours(module_of(cls))
    )


def is_library_module(module: types.ModuleType) -> bool:
    """Test for a module that is machinery or lies in a library's folder."""
    file = vars(module).get("__file__")
    return is_machinery(module.__name__) or (file is not None and is_library(file))


def is_open(cls: Any) -> bool:
    """Test for a class of the user's, whose attributes somebody may bind anew."""
    name = module_of(cls)
    if not cls.__flags__ & HEAP_TYPE or is_machinery(name):
        return False
    module = sys.modules.get(name)
    return not (is_a(module, types.ModuleType) and is_library_module(module))


def is_code(value: Any) -> bool:
    """Test for a callable that has no attributes of the user's: not for an object of a class with a
    `__call__`.
    """
    cls = type(value)
    return callable(value) and not (is_open(cls) and is_python(look("class", cls, "__call__")))


def is_python(found: Any) -> bool:
    """Test for a function of Python or a property."""
    return is_a(found, (types.FunctionType, property))


def is_seen(found: Any) -> bool:
    """Test whether frames of a function or method are seen."""
    found = found.__func__ if is_a(found, types.MethodType) else found
    return is_a(found, types.FunctionType) and is_watched(
        found.__code__, found.__globals__.get("__name__")
    )


def may_run_users(value: Any) -> bool:
    """Test whether a function of C that is given a value may run frames of a user's code: it calls
    the value, or a method of its class.
    """
    cls = type(value)
    if cls in (list, tuple):
        return any(map(may_run_users, value))
    if cls is dict:
        return any(map(may_run_users, value.values()))
    if cls is slice:
        return any(map(may_run_users, (value.start, value.stop, value.step)))
    if not cls.__flags__ & HEAP_TYPE:
        return cls in _CALLED
    name = module_of(cls)
    return name == "builtins" or not is_machinery(name)  # the module of what `exec` makes


def code_of(found: Any) -> Any:
    """The code of a function, method or property; None if it has none."""
    if is_a(found, types.FunctionType):
        return found.__code__
    if is_a(found, (type, types.BuiltinFunctionType, types.MethodDescriptorType, types.ModuleType)):
        return None
    function = (
        getattr(found, "__func__", None)
        or getattr(found, "fget", None)
        or getattr(found, "func", None)
    )
    return getattr(function, "__code__", None)


def own_attribute(value: Any, name: str) -> Any:
    """An attribute of an object that the function made, without running code of the user."""
    if is_a(value, torch.nn.Module):
        return ABSENT
    held = dict_of(value)
    if type(held) is dict and name in held:
        return held[name]
    if type(value) in EXACT:
        return ABSENT
    found = look("class", value if is_a(value, type) else type(value), name)
    if is_a(found, types.MemberDescriptorType):
        return look("attr", value, name)
    return ABSENT if hasattr(found, "__get__") else found


def is_unseen(callee: Any) -> bool:
    """Test whether a call goes to code whose frames are not seen, and that may read its
    arguments.
    """
    while is_a(callee, (types.MethodType, functools.partial)):
        callee = getattr(callee, "func" if is_a(callee, functools.partial) else "__func__")
    if id(callee) in _HARMLESS or callee is constant:
        return False
    module: Any = getattr(callee, "__module__", None)
    if is_a(module, str) and module.partition(".")[0] in _NO_READS:
        return False
    if is_a(callee, types.FunctionType):
        return not is_watched(callee.__code__, callee.__globals__.get("__name__"))
    if is_a(callee, type):
        made = look("class", callee, "__init__")
        return not is_a(made, types.FunctionType) or not is_user_file(made.__code__.co_filename)
    return is_a(callee, (types.BuiltinFunctionType, types.MethodDescriptorType)) or (
        is_a(module, str) and is_machinery(module)
    )


def is_shown_by_c(value: Any) -> bool:
    """Test for an object whose text is written by C, or by code that is not seen."""
    shows = look("class", type(value), "__repr__")
    is_known = is_a(value, (*NO_FIELDS, *CONTAINERS, *FUNCTIONS)) or shows is object.__repr__
    return not is_known and not is_seen(shows)


def is_opaque(value: Any) -> bool:
    """Test whether an object may change, and has nothing that could be compared."""
    is_known = is_a(value, (*NO_FIELDS, *CONTAINERS, *ARRAYS, *VIEWS, types.MappingProxyType))
    if is_known or type(value) is object or is_code(value):
        return False
    module = module_of(type(value))
    if any(module_of(base) == "_ctypes" for base in type(value).__mro__):
        return True
    return not (
        module.partition(".")[0] in _SETTLED
        or hasattr(type(value), "__next__")
        or fields_of(value) is not None
    )


def is_iterator(value: Any) -> bool:
    """Test for an iterator whose steps are not seen: of C, of a library, or a stream to read."""
    if is_a(value, NO_FIELDS) or (step := getattr(type(value), "__next__", None)) is None:
        return False
    if is_a(step, types.FunctionType) and is_watched(step.__code__, step.__module__):
        return False  # its frames are seen
    return not is_a(value, io.IOBase) or value.closed or value.readable()  # such as `sys.stdout`


def drawn_error(name: str, path: str, value: Any, source: Source | None = None) -> UnsupportedCall:
    """Make the error for a function that draws from an iterator from outside."""
    return UnsupportedCall(
        f"{name} draws from {path}, {kind_of(value)} from outside, which gives something else in"
        " each call",
        source=source,
        fix="Draw from it outside of the function, and pass what it gives as an argument.",
    )


def progress_of(value: Any) -> Any:
    """The position of an iterator; None if it does not tell it."""
    if is_a(value, types.GeneratorType):
        return value.gi_frame.f_lasti if value.gi_frame is not None else -1
    if module_of(type(value)) == "_io":
        try:
            return value.tell()
        except (OSError, ValueError):
            return None
    if module_of(type(value)) == "itertools" and type(value).__name__ in ("count", "repeat"):
        return repr(value)
    found = operator.length_hint(value, -1) if module_of(type(value)) == "builtins" else -1
    return None if found < 0 else found


def environment() -> dict[Any, Any]:
    """The dict behind `os.environ`."""
    return os.environ._data  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType]


def is_record(cls: type) -> bool:
    """Test for a dataclass or a plain class."""
    return dataclasses.is_dataclass(cls) or is_plain_class(cls)


def is_namespace(value: Any) -> bool:
    """Test for the names of a module."""
    return type(value) is dict and "__builtins__" in value


def is_plain_class(cls: Any) -> bool:
    """Test for a class of Python whose objects are what their attributes are."""
    if issubclass(cls, types.SimpleNamespace):
        return True
    is_made_of_fields = cls.__flags__ & HEAP_TYPE and cls.__new__ is object.__new__
    return bool(is_made_of_fields) and not (
        issubclass(cls, torch.nn.Module) or hasattr(cls, "__del__") or is_machinery(module_of(cls))
    )


def is_of_trace(value: Any) -> bool:
    """Test whether a value is, or holds, tensors or numbers of a trace."""
    return any(is_a(leaf, OF_TRACE) for leaf in pytree.flatten(value)[0])
