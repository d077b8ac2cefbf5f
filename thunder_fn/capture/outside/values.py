"""The values from outside of its arguments that a traced function reads, found while it is traced.

`frames` shows the frames that run, `expressions` reads their code. Here the expressions are
evaluated on a frame's globals, cells and locals, at its start and at its end. No code of the user
runs. Each read is an edge:

    (kind, holder, key) -> value

If all edges that a trace crossed give the same values, the function reaches the same objects again,
by induction. So a guard checks edges, and paths such as `cfg.lr` are kept for messages only. An
edge's value is the one before the function itself wrote there.

Objects that the function makes are looked through, and are no holders of edges.
"""

from __future__ import annotations

import _thread
import abc
import builtins
import collections
import contextvars
import datetime
import functools
import gc
import inspect
import io
import itertools
import logging
import operator
import os
import pathlib
import random
import secrets
import sys
import threading
import time
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy
import torch
from torch.distributions.utils import lazy_property

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.generators import STATE_METHODS
from thunder_fn.capture.numbers.types_asked import type_error
from thunder_fn.capture.outside.answers import (
    ASKED_AGAIN,
    Question,
    Registered,
    levels_of,
    members_of,
    rests_on,
)
from thunder_fn.capture.outside.effects import Effects, is_stateful
from thunder_fn.capture.outside.expressions import Reading, Source, reading, text
from thunder_fn.capture.outside.frames import (
    is_import,
    is_library,
    is_machinery,
    is_user_file,
    is_watched,
)
from thunder_fn.capture.outside.reads import (
    ABSENT,
    ARRAYS,
    CONTAINERS,
    HEAP_TYPE,
    LONG,
    PLAIN,
    content_of,
    dict_of,
    fields_of,
    is_a,
    length_of,
    seen,
)
from thunder_fn.capture.places import Snapshot, snapshot
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.lookasides import is_diverted
from thunder_fn.capture.supported import EscapedValue
from thunder_fn.errors import UnsupportedCall, callable_name
from thunder_fn.garbage import referrers
from thunder_fn.ir.text import escaped

MAX_ARRAY_BYTES = 4096
"""Arrays of NumPy are guarded by content up to this size, and refused beyond."""

MAX_ANSWERS = 1000
"""So many answers of a cached function are guarded, and no more."""

_LRU = type(functools.lru_cache(lambda: None))
_TRACED = (internals.Tracer, torch.SymInt, torch.SymFloat, torch.SymBool)

_WRITES = frozenset(("append", "add", "extend", "appendleft", "get", "clear"))
"""Methods of containers that do not look at the content, and `get`, which is an item."""

_WRITERS = frozenset(
    ("__setattr__", "__delattr__", "__setitem__", "__delitem__", "__iadd__", "__ior__", "__set__")
)
"""Methods that write to their object, and that no hook sees where they are of C."""

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
        ),
    )
)
_FILLS_CACHE = lazy_property.__get__.__code__
_DEEP = 6
_Memo: TypeAlias = dict[Source, Sequence[Any]]


@dataclass(slots=True, eq=False)
class Edge:
    """A read: its kind, the question, the value, and a user's way to write it."""

    kind: str
    holder: Any
    key: Any
    value: Any
    path: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is read in a way that cannot be guarded: the expression, and where."""

    text: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} in {os.path.basename(self.file)}:{self.line}"


def constant(value: Any) -> Any:
    """Bake a value into the program of the traced function in which this is called.

    A jitted function is traced again when a value that it reads from outside changes. A value in
    `constant(...)` is not looked at: the function keeps the value of the trace. It may be what
    cannot be guarded, such as a large NumPy array.

    Law: ``constant(value) is value``.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> settings = {"scale": 2.0}
        >>> f = tfn.jit(lambda x: x * tfn.constant(settings["scale"]))
        >>> f(torch.ones(()))
        tensor(2.)
        >>> settings["scale"] = 3.0
        >>> f(torch.ones(()))
        tensor(2.)
    """
    return value


# ---- reading an edge ----


def look(kind: str, holder: Any, key: Any) -> Any:  # noqa: C901 - a branch for each kind of edge
    """Read an edge now. No code of the user runs, but for the hash and equality of keys."""
    try:
        match kind:
            case "key":
                return holder.get(key, ABSENT)
            case "index":
                return holder[key]
            case "cell":
                return holder.cell_contents
            case "attr":
                return getattr(holder, key)
            case "class":
                return next(
                    (base.__dict__[key] for base in holder.__mro__ if key in base.__dict__), ABSENT
                )
            case "context":
                return holder.get(ABSENT)
            case "answer":
                return holder.ask()
            case "type":
                return type(holder())
            case "alive":
                return holder() is not None
            case _:
                return seen(holder)
    except (LookupError, ValueError, AttributeError, TypeError):
        return ABSENT


def is_same(now: Any, then: Any, kind: str = "") -> bool:
    """Test whether an edge's value is the old one: an object by identity, plain data by value
    and type.
    """
    if now is then:
        return True
    if kind == "content":
        return now == then
    if type(now) is not type(then) or not is_a(then, (*PLAIN, tuple, frozenset)):
        return False
    return seen(now) == seen(then)


# ---- what a frame is evaluated on ----


class Frame:
    """A frame of the user's code: its names, what callees gave it, and the frame that called it."""

    __slots__ = (
        "back",
        "cells",
        "code",
        "globals",
        "is_library",
        "line",
        "locals",
        "over",
        "reading",
        "returned",
        "stored",
        "touched",
        "waits",
    )

    def __init__(self, frame: types.FrameType, back: Frame | None, known: Reading) -> None:
        self.code, self.globals, self.back, self.reading = (
            frame.f_code,
            frame.f_globals,
            back,
            known,
        )
        self.locals: list[dict[str, Any]] = [dict(frame.f_locals)]
        self.returned: dict[int, tuple[Any, types.CodeType]] = {}
        self.cells: dict[str, types.CellType] = {}
        self.is_library, self.line = (
            is_library(frame.f_code.co_filename),
            frame.f_code.co_firstlineno,
        )
        self.over: tuple[Source, Frame] | None = None
        self.stored: dict[str, dict[int, Any]] = {}
        self.touched: set[int] = set()
        """The holders that were looked at for it."""
        self.waits = False
        """Set where an attribute or item is the result of a callee."""


@dataclass(slots=True, eq=False)
class _Settled:
    """The values of a code object's expressions that depend on its globals alone, and the
    holders that were looked at.
    """

    names: dict[str, Any]
    memo: _Memo
    touched: set[int]


class Watch:
    """The edges of one capture. `own` are modules whose state is guarded elsewhere, as those of
    a jitted module.
    """

    def __init__(
        self, f: Callable[..., Any], own: frozenset[int] = frozenset(), *, hears_calls: bool = False
    ) -> None:
        self.own, self.hears_calls, self.effects = own, hears_calls, Effects()
        self.edges: dict[tuple[str, int, Any], Edge] = {}
        self.outside: dict[int, tuple[Any, str]] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self.drawn: dict[int, tuple[Any, str, Any]] = {}
        """Iterators, how they are written, and how far they were."""
        self.arrays: dict[int, tuple[Any, str]] = {}
        """Arrays that are too large to be compared."""
        self.constants: dict[str, Constant] = {}
        self.states: dict[str, str] = {}
        """Methods that look at or set the state of a generator of random numbers, by how the
        generator is written.
        """
        self.functions: dict[int, list[types.FunctionType]] = {}
        self.readings: dict[int, tuple[types.CodeType, Reading]] = {}
        self.stack: list[Frame] = []
        self.importing: types.FrameType | None = None
        self.before: dict[tuple[str, int, Any], tuple[Any, Any]] = {}
        self.done: dict[Any, tuple[set[int], bool]] = {}
        """Frames that have been looked at, by their names' values: the holders, and whether they
        wait for callees.
        """
        self.settled: dict[tuple[int, int], _Settled] = {}
        self.written: set[int] = set()
        """Holders that the function writes to: what was found there before may have changed."""
        self.classes: dict[int, type] = {}
        """Classes whose methods are known by their code."""
        self.methods: set[tuple[type, types.CodeType]] = set()
        self.inner: dict[int, tuple[types.CodeType, dict[str, types.CellType]]] = {}
        """Code objects that are made by a frame, and the cells that they share with it."""
        self.lost, self.over = dict[int, list[Frame]](), dict[int, tuple[Source, Frame]]()
        self.data, self.late = dict[type, bool](), list[tuple[dict[str, Any], str, str]]()
        self.caches: list[tuple[dict[str, Any], str]] = []
        """Values that cached properties compute while the function runs; those of distributions."""
        self.answers = dict[int, tuple[Any, str, dict[Any, Any], Any]]()  # asked so often before
        self.cycles, self.touched, self.contents = False, set[int](), dict[int, Snapshot]()
        self.reach(f, getattr(f, "__name__", "f"))

    # ---- what the frames tell ----

    def started(self, frame: types.FrameType) -> None:
        """Look at what a frame can reach, before it changes anything. Code that an import runs is
        no part of the function.
        """
        code = frame.f_code
        if self.importing is None and is_import(frame):
            self.importing = frame
        if self.importing is not None:
            return
        if id(code) not in self.readings:
            self.readings[id(code)] = code, reading(code)
        mine = Frame(frame, self.stack[-1] if self.stack else None, self.readings[id(code)][1])
        mine.over = self.over.get(id(code))
        self.stack.append(mine)
        self.evaluate(mine)
        if code is _FILLS_CACHE and self.is_outside(of := frame.f_locals["instance"]):
            self.caches.append((vars(of), frame.f_locals["self"].wrapped.__name__))

    def ended(self, frame: types.FrameType, value: Any) -> None:
        """Look again, at the present values of its locals."""
        if self.importing is not None:
            self.importing = None if self.importing is frame else self.importing
            return
        if (recorder := current()) is not None:
            found = recorder.decisions.has_found
            recorder.late_error = type_error(frame, has_found=found) or recorder.late_error
        if not self.stack or self.stack[-1].code is not frame.f_code:
            return
        mine = self.stack.pop()
        is_data = all(map(self.is_data, value)) if type(value) is tuple else self.is_data(value)
        if mine.back is not None and not is_data:
            mine.back.returned[id(value)] = value, mine.code
        if not mine.returned and not mine.reading.moving:
            return
        mine.locals.append(frame.f_locals)
        is_new = bool(mine.returned) and (mine.waits or not mine.touched.isdisjoint(self.written))
        self.evaluate(mine, is_moving=not is_new)

    def thread_started(self, name: str) -> None:
        """Take the results of a thread as constants, since its reads are not seen."""
        if self.importing is None and self.stack and not self.stack[-1].is_library:
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while frame.f_back is not None and frame.f_code is not self.stack[-1].code:
                frame = frame.f_back
            written = f"the work of the thread {name!r}"
            self.constants.setdefault(
                written, Constant(written, frame.f_code.co_filename, frame.f_lineno)
            )

    def called(self, function: Any) -> None:
        """Note a call of C that a trace does not repeat."""
        if self.importing is None:
            self.effects.called(function)

    def stopped(self) -> None:
        """Let cached functions forget tracers. Each call of the program computes these answers.

        Raises:
            UnsupportedCall: an answer is random. Each call would draw it anew.
        """
        recorder, random_ones = current(), list[str]()
        for function, path, kept, _ in self.answers.values():
            leaves, _ = pytree.flatten(_answers_of(function, kept))
            traced = [leaf for leaf in leaves if is_a(leaf, _TRACED)]
            tensors = [leaf for leaf in traced if is_a(leaf, internals.Tracer)]
            if recorder is not None and recorder.draws_for(tensors):
                random_ones.append(path)
            if traced:
                function.cache_clear()
        if random_ones:
            raise UnsupportedCall(
                f"the cached function {random_ones[0]} draws random numbers for its first answer"
                " while it is traced",
                source=None,
                fix="Call it once before, or pass its answer as an argument.",
            )

    def called_library(self, module: str, name: str) -> None:
        """Note a call of a library that a trace does not repeat."""
        if self.importing is None and is_stateful(module, name):
            self.effects.found.append(f"{module}.{name}")

    @property
    def is_repeatable(self) -> bool:
        """Test whether the function did nothing that its trace would not do, as far as is known:
        no effect, no write to an object from outside, no read that cannot be guarded.
        """
        effects, changed = self.effects.found, self.effects.changed
        found = effects, self.written, self.drawn, self.arrays, self.constants, self.states
        return not any(found) and not any(map(self.is_outside, changed))

    # ---- what is outside ----

    def reach(self, value: Any, path: str, depth: int = _DEEP) -> Any:  # noqa: C901 - a branch for each kind of holder
        """A value is outside. Functions that it leads to are known by their code from now on."""
        if id(value) in self.outside or self.is_data(value) or is_a(value, types.ModuleType):
            return value
        self.outside[id(value)] = value, path
        if type(value) in (list, dict) and len(value) <= _MANY:
            self.contents[id(value)] = snapshot(value)
        self.asked(value, path)
        if (question := rests_on(value)) is not None:
            self.answer(question, (), f"the answer of {callable_name(question)}")
        self.meet(value, path)
        self.remember(value, path)
        self.iterator(value, path, is_used=False)
        if depth == 0:
            return value
        if is_a(value, torch.nn.Module):
            self.reach_module(value, path, depth)
        elif is_a(value, types.FunctionType):
            self.reach_function(value, path, depth)
        elif is_a(value, types.MethodType):
            self.reach(value.__func__, path, depth - 1)
            self.reach(value.__self__, path.rpartition(".")[0] or path, depth - 1)
        elif is_a(value, functools.partial):
            for name in ("func", "args", "keywords"):
                found = self.edge("attr", value, name, f"{path}.{name}", is_by_value=True)
                self.reach(found, f"{path}.{name}", depth - 1)
                self.content(found, f"{path}.{name}")
        elif is_a(value, type):
            self.reach_class(value)
        elif is_machinery(type(value).__module__):
            for item in () if is_a(value, CONTAINERS) else (fields_of(value) or {}).values():
                if callable(item):
                    self.reach(item, path, depth - 1)
            self.reach(getattr(value, "__wrapped__", None), path, depth - 1)
        elif not is_a(value, CONTAINERS):
            self.reach(type(value), type(value).__name__, depth - 1)
        return value

    def reach_module(self, module: torch.nn.Module, path: str, depth: int) -> None:
        """Reach a module, its parts, and the functions of their hooks."""
        if id(module) not in self.own:
            self.modules.setdefault(id(module), module)
        for name, part in module.named_modules():
            self.outside.setdefault(id(part), (part, f"{path}.{escaped(name)}"))
            for kind in internals.HOOKS[:2]:
                for hook in getattr(part, kind, {}).values():
                    self.reach(hook, getattr(hook, "__name__", "hook"), depth - 1)
            self.reach(type(part), type(part).__name__, depth - 1)

    def asked(self, function: Any, path: str) -> None:
        """Take the answer of a clock or of the file system as a constant."""
        if id(function) in _ANSWERS_ANEW and self.stack:
            file, line = self.stack[-1].code.co_filename, self.stack[-1].line
            answer = Constant(f"the answer of {path}", file, line)
            self.constants.setdefault(answer.text, answer)

    def answer(self, function: Callable[..., Any], arguments: tuple[Any, ...], path: str) -> Any:
        """Ask a question about the process, as every call will."""
        place = "answer", id(function), arguments
        if place not in self.edges:
            question = Question(function, arguments)
            self.edges[place] = Edge("answer", question, None, question.ask(), path)
        return self.edges[place].value

    def kind_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """A question for the class of a value: other classes may be registered with an abstract
        one, and a protocol asks for attributes.
        """
        _, classes, of = source
        for cls in _classes_in(self.value(classes, frame, memo)):
            place = "answer", id(cls), "registered"
            if is_a(cls, abc.ABCMeta) and place not in self.edges:
                asked = Registered(cls)
                path = f"what is registered with {cls.__name__}"
                self.edges[place] = Edge("answer", asked, None, asked.ask(), path)
            for name in members_of(cls):
                for value in filter(self.is_outside, self.value(of, frame, memo)):
                    self.attribute(value, name, of, frame)
        return ()

    def remember(self, function: Any, path: str) -> None:
        """Note the content of `functools.lru_cache`, and guard that of `functools.singledispatch`.

        Both are dicts that only the collector of garbage knows.
        """
        if type(function) is _LRU:
            parts = (one for one in gc.get_referents(function) if type(one) is dict)
            kept = next(one for one in parts if one is not function.__dict__)
            info = function.cache_info()[:2]
            self.answers.setdefault(id(function), (function, path, kept, info))
        elif is_a(function, types.FunctionType) and is_a(
            registry := vars(function).get("registry"), types.MappingProxyType
        ):
            for known in gc.get_referents(registry):
                self.content(known, f"{path}.registry")

    def meet(self, value: Any, path: str) -> None:
        """Leave the state of an optimizer to the capture, which guards it as a whole."""
        recorder = current()
        if recorder is not None and recorder.kept is not None:
            recorder.kept.meet(value, path)

    def reach_function(self, function: types.FunctionType, path: str, depth: int) -> None:
        """Reach a function, by its code and defaults; its cells count when it runs."""
        self.functions.setdefault(id(function.__code__), []).append(function)
        file = function.__code__.co_filename
        if is_user_file(file) and not is_library(file) and not is_diverted(function):
            self.edge("attr", function, "__code__", f"the code of {path}")
            for name in ("__defaults__", "__kwdefaults__"):
                found = self.edge("attr", function, name, f"{path}.{name}", is_by_value=True)
                for item in found.values() if is_a(found, dict) else found or ():
                    self.reach(item, f"{path}.{name}", depth - 1)
                if found:
                    self.content(found, f"{path}.{name}")
        for cell in function.__closure__ or ():
            inner = look("cell", cell, None)
            if not is_user_file(file) or is_a(
                inner, (types.FunctionType, functools.partial, types.MethodType)
            ):
                self.reach(inner, path, depth - 1)
        self.reach(getattr(function, "__wrapped__", None), path, depth - 1)

    def reach_class(self, cls: type) -> None:
        """Reach a class, whose methods are known by their code, and those of its metaclass."""
        meta: type = type(cls)
        for base in (*cls.__mro__[:-1], *meta.__mro__[:-2]):
            if id(base) in self.classes or str(base.__module__).startswith(("torch.", "builtins")):
                continue
            self.classes[id(base)] = base
            for item in tuple(base.__dict__.values()):
                item = getattr(item, "__func__", getattr(item, "fget", getattr(item, "func", item)))
                while is_a(item, types.FunctionType):
                    self.functions.setdefault(id(item.__code__), []).append(item)
                    item = getattr(item, "__wrapped__", None)

    def is_outside(self, value: Any) -> bool:
        """Test whether the value was not made by the traced function."""
        return id(value) in self.outside or issubclass(type(value), types.ModuleType)

    def path(self, value: Any, otherwise: str) -> str:
        """The text of a value's path, as it was reached."""
        return self.outside[id(value)][1] if id(value) in self.outside else otherwise

    def edge(
        self, kind: str, holder: Any, key: Any, path: str, *, is_by_value: bool = False
    ) -> Any:
        """Cross an edge, from a holder that is outside."""
        place, value = (kind, id(holder), key), look(kind, holder, key)
        is_open = kind == "class" and not is_machinery(str(holder.__module__))
        if is_open and ("attr", id(holder), "__mro__") not in self.edges:
            bases = Edge("attr", holder, "__mro__", holder.__mro__, f"the bases of {path}")
            self.edges["attr", id(holder), "__mro__"] = bases
        self.touched.add(id(type) if kind == "class" else id(holder))
        if place not in self.edges and not (
            is_a(value, torch.Tensor) and internals.is_tracer(value)
        ):
            self.edges[place] = Edge(
                kind, holder, key, self.before.get(place, (None, value))[1], path
            )
        if not is_by_value:
            self.array(value, path)
        return value

    def content(self, value: Any, path: str) -> None:
        """Take the whole content of a container from outside, because its use is not known."""
        if not is_a(value, CONTAINERS):
            self.array(value, path)
        elif type(value) is not dict or "__builtins__" not in value:
            if ("content", id(value), None) not in self.edges:
                self.edge("content", value, None, path)
            self.touched.add(id(value))
            for item in _items(value):
                if not is_a(item, PLAIN) and id(item) not in self.outside:
                    self.reach(item, path)
                    self.content(item, path)

    def fields(self, value: Any, path: str) -> None:
        """Reach the attributes of an object, any of which unseen code may read."""
        found = None if is_a(value, _NO_FIELDS) or callable(value) else fields_of(value)
        if found is None or _is_ours(type(value).__module__):
            return
        if ("content", id(value), None) not in self.edges:
            self.edge("content", value, None, path)
        self.touched.add(id(value))
        for item in found.values():
            self.reach(item, path)

    def array(self, value: Any, path: str) -> None:
        """Compare an array of NumPy by content, if it is small."""
        if is_a(value, ARRAYS):
            self.outside.setdefault(id(value), (value, path))
            if value.dtype.hasobject:
                for item in value.flat:
                    self.reach(item, path)
                    self.content(item, path)
            if value.nbytes <= MAX_ARRAY_BYTES:
                place = ("content", id(value), None)
                self.edges.setdefault(
                    place, Edge("content", value, None, look("content", value, None), path)
                )
            else:
                self.arrays.setdefault(id(value), (value, path))

    def iterator(self, value: Any, path: str, *, is_used: bool) -> None:
        """Note the position of an iterator from outside. One that does not tell it is drawn from
        where it is used.
        """
        if (
            not is_a(value, _NO_FIELDS)
            and (step := getattr(type(value), "__next__", None)) is not None
        ):
            if is_a(step, types.FunctionType) and is_watched(step.__code__, step.__module__):
                return  # its frames are seen
            if is_a(value, io.IOBase) and not value.closed and not value.readable():
                return  # a stream to write to, such as `sys.stdout`
            progress = progress_of(value)
            if progress is not None or is_used:
                self.drawn.setdefault(id(value), (value, path, progress))

    # ---- evaluating ----

    def evaluate(self, frame: Frame, *, is_moving: bool = False) -> None:
        """Cross all edges that the code of a frame can cross, with the present values of its
        locals.

        Args:
            is_moving: only those that may be others than they were at the start of the frame.
        """
        key = self.relevant(frame)
        if (
            key is not None
            and (known := self.done.get(key)) is not None
            and known[0].isdisjoint(self.written)
        ):
            frame.touched |= known[0]  # a frame like one that has been looked at
            frame.waits = frame.waits or known[1]
            return
        before, self.touched = self.touched, frame.touched
        if len(frame.locals) == 1:
            self.method(frame)
            frame.cells = self.cells_of(frame)
            for code, source in frame.reading.comprehensions.items():
                self.over[id(code)] = source, frame
        settled = self.settled_values(frame)
        names = frozenset(
            name
            for given in frame.locals
            for name, value in given.items()
            if not self.is_data(value)
        )
        uses = frame.reading.live(names, gives=bool(frame.returned), is_moving=is_moving)
        for _ in range(_PASSES):
            memo = settled.copy()
            count = sum(map(len, frame.stored.values()))
            self.cycles = False
            for source, line in uses.items():
                frame.line = line
                self.value(source, frame, memo)
            if not self.cycles or sum(map(len, frame.stored.values())) == count:
                break
        self.touched = before
        if key is not None:
            self.done[key] = frame.touched, frame.waits

    def settled_values(self, frame: Frame) -> _Memo:
        """The values of what depends on globals alone: once for a code object, if the function
        does not write there.
        """
        key = id(frame.code), id(frame.globals)
        known = self.settled.get(key)
        if known is None or not known.touched.isdisjoint(self.written):
            before, waits, frame.waits = self.touched, frame.waits, False
            known = _Settled(frame.globals, {}, set())
            self.touched = known.touched
            for source, line in frame.reading.settled.items():
                frame.line = line
                self.value(source, frame, known.memo)
            self.touched = before
            if not frame.waits:
                self.settled[key] = known
            frame.waits = frame.waits or waits
        frame.touched |= known.touched
        return known.memo

    def relevant(self, frame: Frame) -> Any:
        """The key of a frame's edges: its locals but for tensors, by identity, and the keys among
        them by value.

        None where there is an object that the function made: another one may have its identity
        later.
        """
        found: set[Any] = {frame.code.co_name}
        for given in frame.locals:
            for name, value in given.items():
                if self.is_data(value):
                    if name in frame.reading.keys and is_a(value, (str, int)):
                        found.add((name, value))
                elif self.is_outside(value) or _is_lasting(value):
                    found.add((name, id(value)))
                else:
                    return None
        for value, _ in frame.returned.values():
            if not self.is_outside(value) and not _is_lasting(value):
                return None
            found.add(("", id(value)))
        return id(frame.code), frozenset(found)

    def is_data(self, value: Any) -> bool:
        """Test for plain data or a tensor, which lead to nothing else."""
        cls = type(value)
        found = self.data.get(cls)
        if found is None:
            found = self.data[cls] = is_a(value, (*PLAIN, torch.Tensor))
        return found

    def cells_of(self, frame: Frame) -> dict[str, types.CellType]:
        """The cells of a frame, which does not know its function: those of a function of this
        code with such values.
        """
        code = frame.code
        found: dict[str, types.CellType] = {}
        if code.co_freevars:
            for function in self.functions.get(id(code), ()):
                cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
                if all(
                    look("cell", cell, None) is frame.locals[0].get(name, ABSENT)
                    for name, cell in cells.items()
                ):
                    found = cells
            if not found and id(code) in self.inner:
                found = self.inner[id(code)][1]
            elif not found:
                self.lost.setdefault(id(code), []).append(frame)
        for const in code.co_consts:
            if is_a(const, types.CodeType):
                self.inner[id(const)] = (
                    const,
                    {name: found[name] for name in const.co_freevars if name in found},
                )
        return found

    def method(self, frame: Frame) -> None:
        """Note that the frame runs a method of an object from outside, which its class has to
        keep.
        """
        names = frame.code.co_varnames
        if not frame.code.co_argcount or not names:
            return
        value: Any = frame.locals[0].get(names[0])
        cls = value if is_a(value, type) else type(value)
        if (
            (cls, frame.code) in self.methods
            or self.is_data(value)
            or is_a(value, types.ModuleType)
        ):
            return
        if not self.is_outside(value):
            return
        self.methods.add((cls, frame.code))
        for owner in cls.__mro__:
            name = _name_of_method(owner, frame.code)
            if name is not None:
                # `super()` passes the first one over
                of = cls if look("class", cls, name) is owner.__dict__[name] else owner
                self.edge("class", of, name, f"{of.__name__}.{name}")
                return

    def value(self, source: Source, frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The possible values of an expression, by the rule of its kind."""
        if source is None:
            return ()
        found = memo.get(source)
        if found is None:
            kind = source[0]
            if kind == "const":
                return source[1:]
            memo[source] = _RUNNING
            found = memo[source] = RULES[kind](self, source, frame, memo)
        elif found is _RUNNING and source[0] == "local":  # it leads to itself
            self.cycles = True
            return list(frame.stored.get(source[1], {}).values())
        return found

    def cell_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The values in a closure."""
        name = source[1]
        cell = frame.cells.get(name)
        if cell is not None:
            return (self.reach(self.edge("cell", cell, None, name), name),)
        return [given[name] for given in frame.locals if name in given]

    def any_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """One of several."""
        return [value for part in source[1] for value in self.value(part, frame, memo)]

    def same_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The values of another expression."""
        return self.value(source[1], frame, memo)

    def unless_constant(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """Reads in the argument of a call that is not `constant`."""
        if not any(callee is constant for callee in self.value(source[1], frame, memo)):
            self.value(source[2], frame, memo)
        return ()

    def whole_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """All of an expression's value counts."""
        for value in self.value(source[1], frame, memo):
            if not self.is_data(value):
                self.whole(value, text(source[1]))
        return ()

    def given_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """An argument of a call to code that is not seen."""
        _, target, of = source
        for value in filter(self.is_outside, self.value(of, frame, memo)):
            callees = self.value(target, frame, memo)
            if _is_of_library(value):  # `len` runs its methods
                self.fields(value, self.path(value, text(of)))
            if any(map(_is_unseen, callees)) or self.is_of_data(target, frame, memo):
                self.unseen(value, self.path(value, text(of)), frame)
        return ()

    def is_of_data(self, target: Source, frame: Frame, memo: _Memo) -> bool:
        """Test for a method of plain data, such as `"{0.lr}".format`."""
        if target is None or target[0] != "attr":
            return False
        return any(is_a(value, (str, bytes)) for value in self.value(target[1], frame, memo))

    def imported_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The module of an import statement, which other code may exchange."""
        _, name, level, is_whole = source
        package = frame.globals.get("__package__") or ""
        path = ".".join([*package.split(".")[: 1 - level or None], name]) if level else name
        path = path if is_whole else path.partition(".")[0]
        module = sys.modules.get(path)
        if not is_a(module, types.ModuleType):
            return ()
        if not _is_library_module(module):
            self.edge("key", sys.modules, path, f"the module {path}")
        return (module,)

    def field_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The values in the attributes of an object."""
        values = self.value(source[1], frame, memo)
        return [field for value in values for field in (fields_of(value) or {}).values()]

    def each_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The values that a loop over a value gives."""
        path = f"{text(source[1])}[...]"
        return [
            item for value in self.value(source[1], frame, memo) for item in self.items(value, path)
        ]

    def attribute_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """An attribute, by any of its names."""
        _, of, key = source
        found: list[Any] = []
        for value in self.value(of, frame, memo):
            if self.is_data(value) and not is_a(value, torch.Tensor):
                continue
            for name in self.keys(key, frame, memo) or ():
                if is_a(value, torch.Tensor):
                    self.tensor_attribute(value, name, of)
                elif is_a(name, str):
                    found += self.attribute(value, name, of, frame)
        return found

    def tensor_attribute(self, value: torch.Tensor, name: Any, of: Source) -> None:
        """An attribute that Python gave a tensor from outside, or did not. Its class has others."""
        if not internals.is_tracer(value) and look("class", type(value), name) is ABSENT:
            self.edge("key", internals.attributes(value), name, f"{text(of)}.{escaped(str(name))}")

    def item_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """An item, by any of its keys."""
        _, of, key = source
        found: list[Any] = []
        for value in self.value(of, frame, memo):
            if not self.is_data(value):
                found += self.item(value, key, self.path(value, text(of)), frame, memo)
        return found

    def note_before(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """A place is written in this frame: an edge to it is read before that."""
        place = source[1]
        found: list[tuple[str, Any, Any]] = []
        match place:
            case ("global", name):
                found.append(("key", frame.globals, name))
            case ("cell", name) if name in frame.cells:
                found.append(("cell", frame.cells[name], None))
            case ("attr" | "item" as how, of, key):
                for holder in filter(self.is_outside, self.value(of, frame, memo)):
                    if how == "attr":
                        is_class, held = is_a(holder, type), dict_of(holder)
                        kind = "class" if is_class else "key" if type(held) is dict else "attr"
                        holder = held if kind == "key" else holder
                    else:
                        kind = "key" if is_a(holder, dict) else "index"
                        found.append(("content", holder, None))
                    self.written.add(id(type) if kind == "class" else id(holder))
                    found += ((kind, holder, name) for name in self.keys(key, frame, memo) or ())
            case _:
                pass
        for kind, holder, key in found:
            self.written.add(id(type) if kind == "class" else id(holder))
            self.before.setdefault((kind, id(holder), key), (holder, look(kind, holder, key)))
        return ()

    def note_write(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """A place is written whose old value counts for nothing: a trace does not repeat that."""
        match source[1]:
            case ("global", *_):
                is_effect = True
            case ("cell", name):
                is_effect = name in frame.cells
            case (_, of, _):
                is_effect = of is None or any(map(self.is_outside, self.value(of, frame, memo)))
            case _:
                is_effect = False
        if is_effect:
            self.effects.found.append("a write")
        return ()

    def note_mutation(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """A local is changed in place, as by `+=`: a container from outside is then another."""
        for value in filter(self.is_outside, self.value(source[1], frame, memo)):
            if is_a(value, CONTAINERS) and not is_a(value, (tuple, frozenset)):
                self.effects.found.append("a write")
        return ()

    def global_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """A global, or a builtin."""
        name = source[1]
        if name not in frame.globals:
            found: Any = frame.globals.get("__builtins__")
            held: dict[str, Any] = (
                found if is_a(found, dict) else vars(found) if found is not None else {}
            )
            if name in _BUILTINS:
                self.asked(held.get(name), name)
                return (held[name],) if name in held else ()
            if not frame.is_library:
                self.edge("key", frame.globals, name, name)
                self.edge("key", held, name, f"builtins.{name}")
            return (self.reach(held[name], name),) if name in held else ()
        value = frame.globals[name]
        if not frame.is_library or is_a(value, (*PLAIN, *CONTAINERS)):
            self.edge("key", frame.globals, name, name)
        return (self.reach(value, name),)

    def local_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The values of a local at the start and at the end, and those of its sources."""
        name = source[1]
        found = frame.stored.setdefault(name, {})
        if name == ".0" and frame.over is not None:
            over, outer = frame.over
            found.update((id(value), value) for value in self.value(over, outer, {}))
        for given in frame.locals:
            value = given.get(name)
            if not self.is_data(value):
                found.setdefault(id(value), value)
        for assigned in frame.reading.assigned.get(name, ()):
            for value in self.value(assigned, frame, memo):
                if not self.is_data(value):
                    found.setdefault(id(value), value)
        return list(found.values())

    def call_values(self, source: tuple[Any, ...], frame: Frame, memo: _Memo) -> Sequence[Any]:
        """The possible results of a call: those of this frame's Python callees. A new object of a
        class is not outside.
        """
        target = source[1]
        callees = self.value(target, frame, memo)
        found = _given_back(frame, callees) if frame.returned else []
        for callee in callees:
            if (
                is_a(callee, types.MethodType)
                and self.is_outside(callee.__self__)
                and _is_unseen(callee)
            ):
                self.unseen(callee.__self__, self.path(callee.__self__, text(target)), frame)
            found += self.asked_again(callee, source, frame, memo)
            if not source[2] and id(callee) in _SEEDED_ANEW:
                self.constants.setdefault(
                    f"{text(target)}()",
                    Constant(f"{text(target)}()", frame.code.co_filename, frame.line),
                )
            if callee is globals:
                found.append(self.reach(frame.globals, "globals()"))
            if is_a(callee, weakref.ref) and self.edge("alive", callee, None, f"{text(target)}()"):
                found.append(self.reach(callee(), f"{text(target)}()"))
            if is_a(callee, _FUNCTIONS) or not self.is_outside(callee):
                continue
            self.attribute_of_class(callee, "__call__")
        return found

    def asked_again(
        self, callee: Any, source: tuple[Any, ...], frame: Frame, memo: _Memo
    ) -> Sequence[Any]:
        """The answers to a question about the process, for each of its possible arguments."""
        _, target, arguments = source
        if callee is os.getenv:
            return self.item(os.environ, next(iter(arguments), None), "os.environ", frame, memo)
        if (function := ASKED_AGAIN.get(id(callee))) is None:
            return ()
        keys = [self.keys(one, frame, memo) for one in arguments]
        path = f"the answer of {text(target)}"
        found = [
            self.answer(function, given, path) for given in itertools.product(*filter(None, keys))
        ]
        if None in keys or ABSENT in found:
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))
        return [self.reach(one, path) for one in found if one is not ABSENT]

    def attribute_of_class(self, value: Any, name: str) -> None:
        """Note a method that its class has for an operator."""
        cls = type(value)
        if is_a(look("class", cls, name), types.FunctionType) and not _is_ours(cls.__module__):
            self.edge("class", cls, name, f"{cls.__name__}.{name}")

    def unseen(self, value: Any, path: str, frame: Frame) -> None:
        """Reach an object that unseen code reads. One that has no attributes for Python to see is
        taken as a constant.
        """
        self.fields(value, path)
        if is_opaque(value):
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))

    def whole(self, value: Any, path: str, depth: int = 2) -> None:
        """Take a value whole, because its use is not known."""
        if self.is_outside(value):
            path = self.path(value, path)
            self.iterator(value, path, is_used=True)
            self.content(value, path)
        elif depth and type(value) in _EXACT and len(value) <= LONG:
            for item in _items(value):
                if not is_a(item, PLAIN):
                    self.whole(item, path, depth - 1)

    def items(self, value: Any, path: str) -> Sequence[Any]:
        """The items that a loop over a value gives."""
        self.touched.add(id(value))
        if value is os.environ:
            self.edge("content", _environment(), None, "os.environ")
            return ()
        if is_a(value, _WEAK):
            self.fields(value, path)
            return [self.reach(item, path) for item in _live_in(value)]
        if is_a(value, CONTAINERS):
            items = _items(value) if length_of(value) <= _MANY else []
            return [self.reach(item, path) for item in items] if self.is_outside(value) else items
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if self.is_outside(value):
            self.iterator(value, self.path(value, path), is_used=True)
        return (value,)

    # ---- attributes and items ----

    def keys(self, source: Source, frame: Frame, memo: _Memo) -> Sequence[Any] | None:
        """The possible keys: a constant, plain data from outside, or an argument; None if they
        are not known.
        """
        if source is None:
            return None
        if source[0] == "const":
            return source[1:] if is_a(source[1], _KEYS) else None
        if source[0] == "local":
            name = source[1]
            if name in frame.reading.assigned or name not in frame.locals[0]:
                return None
            found: Sequence[Any] = (frame.locals[0][name],)
        else:
            found = self.value(source, frame, memo)
        return [key for key in found if is_a(key, _KEYS)] or None

    def item(self, value: Any, key: Source, path: str, frame: Frame, memo: _Memo) -> Sequence[Any]:  # noqa: C901 - a branch for each kind of holder
        """The value of a key, and the edge to it."""
        if is_a(value, contextvars.ContextVar):
            held = self.edge("context", value, None, path)
            return tuple(self.reach(one, path) for one in (held, _default_of(value)))
        keys = self.keys(key, frame, memo)
        if value is os.environ or value is os:
            if keys is None:
                self.edge("content", _environment(), None, "os.environ")
            for name in keys or ():
                if is_a(name, str):
                    self.edge(
                        "key", _environment(), os.environ.encodekey(name), f"os.environ[{name!r}]"
                    )  # type: ignore[attr-defined]
            return ()
        if is_a(value, (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)):
            return list(value._modules.values())  # pyright: ignore[reportPrivateUsage]
        if not self.is_outside(value):
            return self.items(value, path) if type(value) in _EXACT else ()
        if not is_a(value, (dict, list, tuple, types.MappingProxyType)) or keys is None:
            self.content(value, path)
            if is_a(value, CONTAINERS):
                return self.items(value, path)
            if _is_seen(method := look("class", type(value), "__getitem__")):
                return self.waited(frame, [method])
            if is_a(value, _WEAK):
                return self.items(value, path)
            self.unseen(value, path, frame)
            return ()
        kind = "index" if is_a(value, (list, tuple)) else "key"
        found: list[Any] = []
        for name in keys:
            if kind == "key" or is_a(name, int):
                written = f"{path}[{name!r}]"
                found.append(self.reach(self.edge(kind, value, name, written), written))
        return found

    def waited(self, frame: Frame, callees: list[Any]) -> Sequence[Any]:
        """The results of the callees behind an attribute or item, which are known at the end of
        the frame.
        """
        frame.waits = True
        return _given_back(frame, callees)

    def attribute(self, value: Any, name: str, of: Source, frame: Frame) -> Sequence[Any]:
        """The value of an attribute, and the edge to it."""
        path = f"{self.path(value, '') or text(of)}.{escaped(name)}"
        if name in _WRITERS:
            self.effects.found.append(name)
        if is_a(value, torch.nn.Module):
            return self.module_attribute(value, name, path)
        if not self.is_outside(value):
            return (found,) if (found := _found(value, name)) is not ABSENT else ()
        if is_a(value, ARRAYS):
            self.array(value, path)
            return ()
        if name == "__dict__" and type(dict_of(value)) is dict:
            return (self.reach(value.__dict__, path),)
        if is_a(value, types.ModuleType):
            return self.global_attribute(value, name, path, frame)
        if is_a(value, threading.local):
            return (self.reach(self.edge("attr", value, name, path), path),)
        if is_a(value, type):
            return self.attribute_of_type(value, name, path)
        return self.object_attribute(value, name, path, frame)

    def attribute_of_type(self, value: type, name: str, path: str) -> Sequence[Any]:
        """An attribute of a class, or of its metaclass."""
        if name == "__dict__":
            for held in gc.get_referents(value.__dict__):
                self.content(held, path)
            return (value.__dict__,)
        found = self.edge("class", value, name, path)
        if found is ABSENT and look("class", meta := type(value), name) is not ABSENT:
            self.asked(found := self.edge("class", meta, name, path), path)
        return (self.reach(getattr(found, "__func__", found), path),)

    def object_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:  # noqa: C901 - a branch for each kind of holder
        """An attribute of an object, of its own or of its class."""
        of_class, held = look("class", type(value), name), dict_of(value)
        self.asked(of_class, path)
        self.state_of_process(value, name, path, frame)
        if is_a(value, CONTAINERS) and (
            held is None or (name not in held and not _is_python(of_class))
        ):
            return self.container_attribute(value, name, path, of_class)
        if name != "__class__":
            self.iterator(value, path.rpartition(".")[0], is_used=True)
        is_slot = is_a(of_class, (types.MemberDescriptorType, types.GetSetDescriptorType))
        if is_a(value, types.FunctionType) and name in _OF_FUNCTIONS:
            self.content(found := self.edge("attr", value, name, path, is_by_value=True), path)
            return (found,)
        if is_slot and not callable(value):
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
        elif type(value).__module__ == "logging" or not _is_ours(type(value).__module__):
            found = self.edge("key", held, name, path)
        if found is not ABSENT:
            return (self.reach(found, path),)
        if of_class is ABSENT:
            cls: Any = type(value)
            for missing in (name, "__getattr__") if cls.__flags__ & HEAP_TYPE else ():
                self.edge("class", cls, missing, path)
            return self.waited(frame, [look("class", type(value), "__getattr__")])
        return self.class_attribute(value, name, path, frame)

    def state_of_process(self, value: Any, name: str, path: str, frame: Frame) -> None:
        """Note that a method draws random numbers, or asks for the level of a logger."""
        if is_a(value, _DRAWING) and not name.startswith("__"):
            numbers = f"the random numbers of {path.rpartition('.')[0]}"
            self.constants.setdefault(
                numbers, Constant(numbers, frame.code.co_filename, frame.line)
            )
        if is_a(value, logging.Logger) and name in (
            "isEnabledFor",
            "getEffectiveLevel",
            "hasHandlers",
        ):
            self.answer(levels_of, (value,), f"the level of {path.rpartition('.')[0]}")

    def container_attribute(self, value: Any, name: str, path: str, of_class: Any) -> Sequence[Any]:
        """An attribute of a container, which most often is a method that reads its content."""
        if is_a(value, tuple) and hasattr(type(value), "_fields") and of_class is not ABSENT:
            return (self.reach(getattr(value, name, None), path),)
        if of_class is not ABSENT and type(value).__flags__ & HEAP_TYPE:
            self.edge("class", type(value), name, path)
        if name not in _WRITES:
            self.content(value, path.rpartition(".")[0])
        return ()

    def class_attribute(self, value: Any, name: str, path: str, frame: Frame) -> Sequence[Any]:
        """An attribute that an object has from its class."""
        of_class = look("class", type(value), name)
        if (reference := _reference_to(value)) and not _is_ours(type(value).__module__):
            self.edge("type", reference, None, f"the class of {path}")
        self.edge("class", type(value), name, path)
        self.reach(of_class, path)
        if is_a(of_class, types.FunctionType):
            return (types.MethodType(of_class, value),)
        if is_a(of_class, property) and _is_of_library(value):
            self.fields(value, path.rpartition(".")[0])
        return (
            self.waited(frame, [_code_of(of_class)])
            if hasattr(of_class, "__get__")
            else (of_class,)
        )

    def module_attribute(self, value: torch.nn.Module, name: str, path: str) -> Sequence[Any]:
        """The state of a module is guarded as a whole; an attribute of its class is an edge."""
        held = value.__dict__
        self.touched.add(id(held))
        if name == "__dict__":
            return (self.reach(held, path),)
        kinds = ("_parameters", "_buffers", "_modules")  # none before `Module.__init__` has run
        for section in (held, *(held[kind] for kind in kinds if kind in held)):
            if name in section:
                is_held = section is held and type(section[name]) in (list, dict)
                is_followed = (is_held or id(value) not in self.own) and self.is_outside(value)
                return (self.reach(section[name], path) if is_followed else section[name],)
        found = look("class", type(value), name)
        if found is ABSENT or name == "__class__" or _is_ours(type(value).__module__):
            return ()
        self.edge("class", type(value), name, path)
        return (self.reach(found, path),)

    def global_attribute(
        self, module: types.ModuleType, name: str, path: str, frame: Frame
    ) -> Sequence[Any]:
        """The value of a module's global. Those of libraries are constants but for flags."""
        held = vars(module)
        if name in held:
            is_flag = is_a(held[name], (bool, int, float, str, type(None)))
            is_settled = module.__name__ in _SETTLED_MODULES
            self.touched.add(id(held))
            if not _is_library_module(module) or module is sys or (is_flag and not is_settled):
                self.edge("key", held, name, path)
            return (self.reach(held[name], path),)
        if not _is_library_module(module):
            self.edge("key", held, name, path)
            return self.waited(frame, [held.get("__getattr__")])
        if type(module) is types.ModuleType and "__getattr__" not in held:
            self.edge("key", held, name, path)
        if type(module) is not types.ModuleType and is_machinery(module.__name__):
            self.edge(
                "attr", module, name, path, is_by_value=True
            )  # such as torch.backends.cudnn.enabled
        return ()

    # ---- the end ----

    def finish(self) -> None:
        """Look for the functions of frames whose cells no known path led to. Forget everything
        but the findings.
        """
        for held, name, path in self.late:
            self.edge("key", held, name, path)
        for held, name in self.caches:
            if is_a(held.get(name), (EscapedValue, internals.Tracer)):
                del held[name]  # each call computes it
        for function, path, kept, before in self.answers.values():
            self.answered(function, path, kept, before)
        lost = {key: frames for key, frames in self.lost.items() if key not in self.inner}
        codes = [
            frames[0].code for frames in lost.values() if any(map(self.has_values_in_cells, frames))
        ]
        for function in referrers(*codes) if codes else ():
            if is_a(function, types.FunctionType) and id(function.__code__) in lost:
                self.functions.setdefault(id(function.__code__), []).append(function)
        self.done.clear()
        for code in codes:
            for frame in tuple(
                lost[id(code)]
            ):  # a frame that stays without its function is appended again
                del frame.locals[1:]
                self.evaluate(frame)
        self.lost.clear()

    def answered(self, function: Any, path: str, kept: dict[Any, Any], before: Any) -> None:
        """Guard the answers that a cached function has, if it was called."""
        if function.cache_info()[:2] == before:
            return
        if len(kept) > MAX_ANSWERS:
            constant = Constant(f"one of many answers of {path}", *_place_of(function.__wrapped__))
            self.constants.setdefault(constant.text, constant)
            return
        for key in tuple(kept):
            self.edge("key", kept, key, f"the cached answer of {path}")
        for answer in _answers_of(function, kept):
            self.content(answer, f"a cached answer of {path}")

    def has_values_in_cells(self, frame: Frame) -> bool:
        """Test whether some free variable is bound to plain data or to an outside value: a cell
        that somebody may bind anew.
        """
        given = (frame.locals[0].get(name) for name in frame.code.co_freevars)
        return any(not is_a(value, (torch.Tensor, type(None), *_FUNCTIONS)) for value in given)


RULES: dict[str, Callable[..., Sequence[Any]]] = {
    "kinds": Watch.kind_values,
    "code": lambda *_: (),
    "global": Watch.global_values,
    "cell": Watch.cell_values,
    "local": Watch.local_values,
    "any": Watch.any_values,
    "inplace": Watch.same_values,
    "call": Watch.call_values,
    "before": Watch.note_before,
    "counted": Watch.note_write,
    "mutated": Watch.note_mutation,
    "unless": Watch.unless_constant,
    "whole": Watch.whole_values,
    "given": Watch.given_values,
    "fields": Watch.field_values,
    "import": Watch.imported_values,
    "each": Watch.each_values,
    "attr": Watch.attribute_values,
    "item": Watch.item_values,
}
"""The evaluation of each kind of expression."""

# ---- kinds of values ----

_NO_FIELDS = (type, types.ModuleType, torch.nn.Module, torch.Tensor, *PLAIN)
_FUNCTIONS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
    torch.nn.Module,
)
_BUILTINS = frozenset(vars(builtins))
"""Names of Python's own, which nobody binds anew."""
_ANSWERS_ANEW = frozenset(
    id(vars(of)[name])
    for of, names in (
        (builtins, "open"),
        (time, "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time"),
        (time, "localtime gmtime ctime strftime"),
        (datetime.datetime, "now today utcnow"),
        (datetime.date, "today"),
        (os, "getcwd listdir scandir stat access getpid urandom getloadavg"),
        (os.path, "exists isfile isdir getmtime getsize"),
        (pathlib.Path, "exists is_file is_dir stat read_text read_bytes iterdir glob open"),
        (uuid, "uuid1 uuid4"),
        (secrets, "token_bytes token_hex token_urlsafe randbelow randbits choice"),
        (random.SystemRandom, "random getrandbits"),
        (contextvars, "copy_context"),
        (threading, "enumerate"),
        (_thread.LockType, "locked"),
        (type, "__subclasses__"),
        (gc, "isenabled get_threshold get_count get_objects"),
        (io.StringIO, "getvalue"),
        (io.BytesIO, "getvalue getbuffer"),
    )
    for name in names.split()
    if name in vars(of)
)
"""Functions whose answers change by themselves."""
_EXACT = frozenset((list, tuple, dict, set, frozenset, collections.deque))
_KEYS = (str, int, float, bytes, type(None), tuple, torch.dtype, torch.device)
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
_SETTLED_MODULES = frozenset(("math", "cmath"))
"""Modules whose numbers never change."""
_WEAK = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_DRAWING = (
    random.Random,
    numpy.random.Generator,
    numpy.random.RandomState,
    numpy.random.BitGenerator,
)
"""Generators of random numbers other than PyTorch's."""
_SEEDED_ANEW = frozenset(
    map(id, (random.Random, numpy.random.default_rng, numpy.random.RandomState, numpy.random.PCG64))
)
"""Generators that begin anywhere if they are given no seed."""
_OF_FUNCTIONS = ("__doc__", "__name__", "__qualname__", "__module__", "__annotations__")
"""Attributes of functions that are read as they are."""
_MANY = 10_000
"""Items of longer containers are not looked into."""

_GENERATOR = inspect.CO_GENERATOR
_RUNNING: list[Any] = []
"""Stand-in for the values of an expression that is being evaluated."""

_PASSES = 64
"""The number of times that a frame is looked at again where a local leads to itself, as along a
linked list.
"""


def _given_back(frame: Frame, callees: Sequence[Any]) -> list[Any]:
    """The results of a frame's Python callees; only those that are meant, where all of them are
    known.
    """
    codes = [callee if is_a(callee, types.CodeType) else _code_of(callee) for callee in callees]
    is_any = not codes or None in codes
    return [
        value
        for value, code in frame.returned.values()
        if is_any or code in codes or code.co_flags & _GENERATOR
    ]


def _reference_to(value: Any) -> Any:
    """A weak reference, since a guard keeps no object alive; None if the object allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _is_lasting(value: Any) -> bool:
    """Test for a class or function of a module, which was not made by the traced function."""
    return is_a(value, (type, types.FunctionType)) and "<locals>" not in value.__qualname__


def _items(value: Any) -> list[Any]:
    items = content_of(value)
    return [part for pair in items for part in pair] if is_a(value, dict) else items


def _default_of(variable: contextvars.ContextVar[Any]) -> Any:
    """The value of a context variable where nobody has set one; None if it has none."""
    try:
        return contextvars.Context().run(variable.get)
    except LookupError:
        return None


def _live_in(value: Any) -> list[Any]:
    """The objects that a container with weak references holds."""
    if is_a(value, weakref.WeakSet):
        return list(value)
    return [part for pair in value.items() for part in pair]


def _classes_in(values: Any) -> Iterator[type]:
    """The classes in the second argument of `isinstance`: one, a tuple, or a union."""
    for value in values:
        if is_a(value, type):
            yield value
        elif is_a(value, (tuple, types.UnionType)):
            yield from _classes_in(getattr(value, "__args__", value))


def _answers_of(function: Any, kept: dict[Any, Any]) -> list[Any]:
    """The answers of a cached function, and what else it refers to, but for its own dicts."""
    found = (*gc.get_referents(function), *kept, *kept.values())
    return [one for one in found if one is not kept and one is not vars(function)]


def _place_of(function: Any) -> tuple[str, int]:
    code = getattr(function, "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


def _name_of_method(owner: type, code: types.CodeType) -> str | None:
    """The name under which a class has a method of this code, be it decorated."""

    def is_it(found: Any) -> bool:
        while found is not None and _code_of(found) is not code:
            found = getattr(getattr(found, "__func__", found), "__wrapped__", None)
        return found is not None

    held, name = owner.__dict__, code.co_name
    if is_it(held.get(name)):
        return name
    return next((name for name, found in held.items() if is_it(found)), None)


def _is_ours(module: Any) -> bool:
    """Test for a class of PyTorch's or ours, whose objects are machinery."""
    return (
        is_a(module, str)
        and module.partition(".")[0] in ("thunder_fn", "torch", "logging")
        and is_machinery(module)
    )


def _is_of_library(value: Any) -> bool:
    """Test for an object of a class that Python's own library has written in Python."""
    cls = type(value)
    return (
        bool(cls.__flags__ & HEAP_TYPE)
        and is_machinery(cls.__module__)
        and not _is_ours(cls.__module__)
    )


def _is_library_module(module: types.ModuleType) -> bool:
    file = vars(module).get("__file__")
    return is_machinery(module.__name__) or (file is not None and is_library(file))


def _is_python(found: Any) -> bool:
    return is_a(found, (types.FunctionType, property))


def _is_seen(found: Any) -> bool:
    """Test whether frames of a method are seen."""
    return is_a(found, types.FunctionType) and is_watched(
        found.__code__, found.__globals__.get("__name__")
    )


def _code_of(found: Any) -> Any:
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


def _found(value: Any, name: str) -> Any:
    """An attribute of an object that the function made, without running code of the user."""
    if is_a(value, torch.nn.Module):
        return ABSENT
    held = dict_of(value)
    if type(held) is dict and name in held:
        return held[name]
    if type(value) in _EXACT:
        return ABSENT
    found = look("class", value if is_a(value, type) else type(value), name)
    if is_a(found, types.MemberDescriptorType):
        return look("attr", value, name)
    return ABSENT if hasattr(found, "__get__") else found


def _is_unseen(callee: Any) -> bool:
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


def is_opaque(value: Any) -> bool:
    """Test whether an object may change, and has nothing that could be compared."""
    if is_a(value, (*_NO_FIELDS, *CONTAINERS)) or type(value) is object or callable(value):
        return False
    module = type(value).__module__
    return not (
        module.partition(".")[0] in _SETTLED
        or hasattr(type(value), "__next__")
        or fields_of(value) is not None
    )


def progress_of(value: Any) -> Any:
    """The position of an iterator; None if it does not tell it."""
    if is_a(value, types.GeneratorType):
        return value.gi_frame.f_lasti if value.gi_frame is not None else -1
    if type(value).__module__ == "_io":
        try:
            return value.tell()
        except (OSError, ValueError):
            return None
    if type(value).__module__ == "itertools" and type(value).__name__ in ("count", "repeat"):
        return repr(value)
    found = operator.length_hint(value, -1) if type(value).__module__ == "builtins" else -1
    return None if found < 0 else found


def _environment() -> dict[Any, Any]:
    return os.environ._data  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType, reportUnknownMemberType]
