"""The objects outside of a traced function that it can reach, and the edges that it crosses."""

from __future__ import annotations

import contextvars
import functools
import gc
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside.anew import is_heard, known_as
from thunder_fn.capture.outside.answers import Question, rests_on
from thunder_fn.capture.outside.code_frames import Frame
from thunder_fn.capture.outside.edges import Constant, Edge, look, place_of
from thunder_fn.capture.outside.effects import Effects
from thunder_fn.capture.outside.frames import Irreversible, is_library, is_machinery, is_user_file
from thunder_fn.capture.outside.kinds import (
    NO_FIELDS,
    VIEWS,
    drawn_error,
    is_code,
    is_iterator,
    is_lasting,
    is_namespace,
    is_of_library,
    is_open,
    is_ours,
    is_record,
    parts_in,
    progress_of,
)
from thunder_fn.capture.outside.moments import Moment
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    CONTAINERS,
    DEPTH,
    HOLDERS,
    PLAIN,
    fields_of,
    has_objects,
    length_of,
    met,
    module_of,
    nbytes_of,
)
from thunder_fn.capture.places import Snapshot, is_changeable, snapshot
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.lookasides import CACHED, is_diverted
from thunder_fn.capture.stored import is_record_of_trace
from thunder_fn.capture.unread import held_in
from thunder_fn.errors import callable_name
from thunder_fn.ir.text import escaped

MAX_ARRAY_BYTES = 4096
"""Arrays of NumPy are guarded by content up to this size, and refused beyond."""

MANY, LARGE = 10_000, 1 << 26
"""Items of longer containers are not looked into, bytes of larger buffers not kept."""
_DEEP = 6
"""The number of steps from a value to what it leads to."""
_OF_WHOLE = ("content", "entries", "names")
"""The kinds of edges to a value as a whole."""
_ANY = frozenset(("any",))
"""The methods that change a container, where none is known."""


class Reached:
    """The objects that a function can reach, by identity, and its edges.

    `own` are modules whose state is guarded elsewhere, as those of a jitted module.
    """

    firm: set[tuple[str, int, Any]] | None = None
    """The places of edges to what is reached first while an expression is evaluated that may never
    run; None while there is no such expression.
    """

    irreversible = Irreversible.TAKEN

    def __init__(self, own: frozenset[int]) -> None:
        self.own, self.effects = own, Effects()
        self.edges: dict[tuple[str, int, Any], Edge] = {}
        self.outside: dict[int, tuple[Any, str]] = {}
        """Objects from outside, and how they are written."""
        self.module_states: set[int] = set()
        """The `__dict__`s of modules, which a jitted module has in common with the given one."""
        self.far: set[int] = set()
        """Those that were too many steps away to see where they lead."""
        self.modules: dict[int, torch.nn.Module] = {}
        self.drawn, self.resumed = dict[int, tuple[Any, str, Any]](), set[int]()
        """Iterators, how they are written, and how far they were; the generators that have run."""
        self.arrays: dict[int, tuple[Any, str]] = {}
        """Arrays that are too large to be compared."""
        self.constants: dict[str, Constant] = {}
        self.heard: set[int] = set()
        """The functions that answer anew each time, and that were called."""
        self.named: dict[int, list[Constant]] = {}
        """Their answers, where code names them."""
        self.functions: dict[int, list[types.FunctionType]] = {}
        """The functions of a code object."""
        self.classes: dict[int, type] = {}
        """Classes whose methods are known by their code."""
        self.answers = dict[int, tuple[Any, str, dict[Any, Any], Any]]()
        """Cached functions, how they are written, their caches, how often they were asked, and what
        they knew.
        """
        self.before: dict[tuple[str, int, Any], tuple[Any, Any]] = {}
        self.counted: dict[tuple[str, int, Any], tuple[Any, Any]] = {}
        self.added: set[tuple[str, int, Any]] = set()
        self.changing: dict[int, set[str]] = {}
        """The places whose old value nothing else reads, as in `before`."""
        self.contents, self.others = dict[int, Snapshot](), dict[int, Snapshot]()
        self.dicts: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        """The `__dict__`s of objects, and what they held when they were met."""
        self.made, self.touched, self.built = set[int](), set[int](), dict[int, Any]()
        """Own records met outside; holders a frame looks at; objects that were initialized."""
        self.stack: list[Frame] = []
        self.data: dict[type, bool] = {type(ABSENT): True}
        self.open: dict[type, bool] = {}

    def reach(self, value: Any, path: str, depth: int = _DEEP) -> Any:
        """A value is outside. The edges to it count even if the expression never runs that led to
        it first: nothing crosses them again.
        """
        count = len(self.edges)
        found = self.reach_any(value, path, depth)
        if self.firm is not None and len(self.edges) > count:
            self.firm.update(islice(reversed(self.edges), len(self.edges) - count))
        return found

    def reach_any(self, value: Any, path: str, depth: int) -> Any:  # noqa: C901 - a branch for each kind of holder
        """A value is outside. Functions that it leads to are known by their code from now on. Of a
        weak proxy, that is the object behind it.
        """
        if is_a(value, weakref.ProxyTypes):
            value = self.behind(value, path)
        if id(value) not in self.outside:
            if self.is_data(value) or is_a(value, types.ModuleType) or self.is_built(value):
                return value
            self.met_first(value, path)
        elif depth == 0 or id(value) not in self.far:
            return value
        if depth == 0:
            self.far.add(id(value))
            return value
        self.far.discard(id(value))
        if is_a(value, torch.nn.Module):
            self.reach_module(value, path, depth)
        elif is_a(value, types.FunctionType):
            self.reach_function(value, path, depth)
        elif is_a(value, types.MethodType):
            self.reach(value.__func__, path, depth - 1)
            self.reach(value.__self__, path.rpartition(".")[0] or path, depth - 1)
        elif is_a(value, types.BuiltinFunctionType):
            self.reach(value.__self__, path.rpartition(".")[0] or path, depth - 1)
        elif is_a(value, (functools.partial, functools.partialmethod)):
            for name in ("func", "args", "keywords"):
                found = self.edge("attr", value, name, f"{path}.{name}", is_by_value=True)
                self.reach(found, f"{path}.{name}", depth - 1)
                self.content(found, f"{path}.{name}")
        elif is_a(value, type):
            self.reach_class(value)
        elif is_machinery(module_of(type(value))):
            for item in () if is_a(value, CONTAINERS) else (fields_of(value) or {}).copy().values():
                if callable(item):
                    self.reach(item, path, depth - 1)
            self.reach(getattr(value, "__wrapped__", None), path, depth - 1)
        elif not is_a(value, CONTAINERS):
            self.reach(type(value), type(value).__name__, depth - 1)
        return value

    def behind(self, proxy: Any, path: str) -> Any:
        """The object that a weak proxy stands for, while it lives; the proxy itself afterwards."""
        try:
            found = proxy.__init__.__self__
        except ReferenceError:
            return proxy
        self.edge("alive", weakref.ref(found), None, path)
        return found

    def met_first(self, value: Any, path: str) -> None:
        """Note an object from outside that is reached for the first time."""
        self.outside[id(value)] = value, path
        if is_a(value, HOLDERS) and length_of(value) <= MANY:
            self.contents[id(value)] = self.first_content(value)
        elif not is_a(value, NO_FIELDS) and type(held := dict_of(value)) is dict:
            self.dicts[id(held)] = held, held.copy()
        if is_record(type(value)) and is_record_of_trace(value):
            self.made.add(id(value))
        self.asked(value, path)
        if (question := rests_on(value)) is not None:
            self.answer(question, (), f"the answer of {callable_name(question)}")
        self.meet(value, path)
        self.remember(value, path)
        self.iterator(value, path, is_used=False)
        if is_a(value, contextvars.Context):
            self.ask(("answer", id(value), None), Question(dict, (value,)), path)
        if is_a(value, VIEWS):
            for held in gc.get_referents(value):
                self.content(held, path)

    def first_content(self, container: Any) -> Snapshot:
        """Note what a container held before the function ran. The `__dict__` of an object may be
        met when its attributes have been written.
        """
        if id(container) not in self.dicts and id(container) not in self.module_states:
            return snapshot(container)
        first = dict(self.dicts.get(id(container), (None, container))[1])
        for (kind, of, key), (_, old) in {**self.counted, **self.before}.items():
            if kind == "key" and of == id(container):
                first[key] = old
        return Snapshot(container, {k: held_in(v) for k, v in first.items() if v is not ABSENT})

    def reach_module(self, module: torch.nn.Module, path: str, depth: int) -> None:
        """Reach a module, its parts, and the functions of their hooks."""
        if id(module) not in self.own:
            self.modules.setdefault(id(module), module)
        for name, part in module.named_modules():
            self.outside.setdefault(id(part), (part, f"{path}.{escaped(name)}"))
            self.module_states.add(id(part.__dict__))
            for key, held in tuple(part.__dict__.items()):
                if key.startswith("_") and type(held) in (dict, OrderedDict, set):
                    self.others[id(held)] = snapshot(held)
            for kind in internals.HOOKS[:2]:
                for hook in getattr(part, kind, {}).values():
                    self.reach(hook, getattr(hook, "__name__", "hook"), depth - 1)
            self.reach(type(part), type(part).__name__, depth - 1)

    def asked(self, function: Any, path: str) -> None:
        """Take the answer of a clock or of the file system as a constant, once it is called."""
        if self.stack and (known := known_as(function)) is not None:
            file, line = self.stack[-1].code.co_filename, self.stack[-1].line
            answer = Constant(f"the answer of {path}", file, line)
            self.named.setdefault(id(known), []).append(answer)
            self.hear(known if id(known) in self.heard or not is_heard(known) else None)

    def hear(self, known: Any) -> None:
        """Note that a function that answers anew is called, or may be by code that is not seen."""
        if known is not None:
            self.heard.add(id(known))
            for answer in self.named.pop(id(known), ()):
                self.constants.setdefault(answer.text, answer)

    def answer(self, function: Callable[..., Any], arguments: tuple[Any, ...], path: str) -> Any:
        """Ask a question about the process, as every call will."""
        place = "answer", id(function), arguments
        if place not in self.edges:
            self.ask(place, Question(function, arguments), path)
        return self.edges[place].value

    def ask(self, place: tuple[str, int, Any], question: Any, path: str) -> None:
        """Ask a question, whose answer is an edge."""
        self.edges[place] = Edge("answer", question, None, question.ask(), path)

    def remember(self, function: Any, path: str) -> None:
        """Note the content of `functools.lru_cache`, and guard that of `functools.singledispatch`.

        Both are dicts that only the collector of garbage knows.
        """
        if type(function) is CACHED:
            parts = (one for one in gc.get_referents(function) if type(one) is dict)
            *_, kept = (one for one in parts if one is not function.__dict__)  # answers come first
            before = function.cache_info().hits, function.cache_info().misses, frozenset(kept)
            self.answers.setdefault(id(function), (function, path, kept, before))
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
        self.code_and_defaults(function, path, depth)
        for cell in function.__closure__ or ():
            inner = look("cell", cell, None)
            if not is_user_file(file) or is_a(
                inner, (types.FunctionType, functools.partial, types.MethodType)
            ):
                self.reach(inner, path, depth - 1)
        self.reach(getattr(function, "__wrapped__", None), path, depth - 1)

    def code_and_defaults(self, function: types.FunctionType, path: str, depth: int) -> None:
        """Guard the code and the defaults of a function of the user's."""
        file = function.__code__.co_filename
        if not is_user_file(file) or is_library(file) or is_diverted(function):
            return
        self.edge("attr", function, "__code__", f"the code of {path}")
        for name in ("__defaults__", "__kwdefaults__"):
            found = self.edge("attr", function, name, f"{path}.{name}", is_by_value=True)
            for item in found.values() if is_a(found, dict) else found or ():
                self.reach(item, f"{path}.{name}", depth - 1)
            if found:
                self.content(found, f"{path}.{name}")

    def reach_class(self, cls: type) -> None:
        """Reach a class, whose methods are known by their code, and those of its metaclass."""
        meta: type = type(cls)
        for base in (*cls.__mro__[:-1], *meta.__mro__[:-2]):
            if id(base) in self.classes or module_of(base).startswith(("torch.", "builtins")):
                continue
            self.classes[id(base)] = base
            for item in tuple(base.__dict__.values()):
                item = getattr(item, "__func__", getattr(item, "fget", getattr(item, "func", item)))
                while is_a(item, types.FunctionType):
                    self.functions.setdefault(id(item.__code__), []).append(item)
                    item = getattr(item, "__wrapped__", None)

    def is_outside(self, value: Any) -> bool:
        """Test whether the value was not made by the traced function."""
        is_known = id(value) in self.outside or id(dict_of(value)) in self.module_states
        return is_known or issubclass(type(value), (types.ModuleType, Enum))

    def is_made(self, value: Any) -> bool:
        """Test for an object of the traced function, which may be met where it has been stored."""
        return id(value) in self.made or not self.is_outside(value)

    def is_built(self, value: Any) -> bool:
        """Test for an object whose `__init__` has run in a frame of the traced function."""
        return id(value) in self.built

    def is_open(self, cls: type) -> bool:
        """Test for a class of the user's that was not made by the traced function."""
        found = self.open.get(cls)
        if found is None:
            found = self.open[cls] = is_open(cls) and (self.is_outside(cls) or is_lasting(cls))
        return found

    def path(self, value: Any, otherwise: str) -> str:
        """The text of a value's path, as it was reached."""
        return self.outside[id(value)][1] if id(value) in self.outside else otherwise

    def edge(
        self,
        kind: str,
        holder: Any,
        key: Any,
        path: str,
        *,
        is_by_value: bool = False,
        owner: Any = None,
    ) -> Any:
        """Cross an edge, from a holder that is outside."""
        place, value = (kind, id(holder), key), look(kind, holder, key)
        if kind == "class":
            self.bases(holder, path)
        self.touched.add(id(type) if kind == "class" else id(holder))
        if place not in self.edges and not (
            is_a(value, torch.Tensor) and internals.is_tracer(value)
        ):
            old = self.at_first(kind, holder, key, value)
            self.edges[place] = Edge(kind, holder, key, old, path, owner)
            if kind == "index" and self.has_moved(holder, key):
                self.content(holder, self.path(holder, path))
        if not is_by_value:
            self.array(value, path)
        return value

    def at_first(self, kind: str, holder: Any, key: Any, now: Any) -> Any:
        """Find what an edge gave before the function ran: it may have written there since."""
        if kind in _OF_WHOLE:
            if not self.has_changed(holder):
                return now
            with self.first_moment.visited():
                return look(kind, holder, key)
        place = kind, id(holder), key
        known = self.before.get(place) or self.counted.get(place)
        return self.first(kind, holder, key) if known is None else known[1]

    def first(self, kind: str, holder: Any, key: Any) -> Any:
        """Find what a place held before the function ran. A place may be known only at the end of
        a frame that has written to it.
        """
        if kind == "key" and id(holder) in self.dicts:
            return held_in(self.dicts[id(holder)][1].get(key, ABSENT))
        if kind in ("key", "index") and id(holder) in self.contents:
            return look(kind, self.contents[id(holder)].before, key)
        return look(kind, holder, key)

    def has_changed(self, value: Any, depth: int = DEPTH) -> bool:
        """Test whether a value, as deep as `seen` looks, holds something else than before the
        function ran.
        """
        return any(left and self.is_other(part) for part, left in met(value, depth))

    def has_moved(self, items: Any, index: Any) -> bool:
        """Test whether an item may have had another place before the function ran."""
        is_written = any(("content", id(items), None) in of for of in (self.before, self.counted))
        is_longer = not is_written and self.changing.get(id(items), _ANY) <= {"append", "extend"}
        return self.has_changed(items, 1) and not (is_longer and index >= 0)

    def is_other(self, value: Any) -> bool:
        """Test whether a container or object holds other objects than before the function ran."""
        if is_a(value, (*CONTAINERS, *ARRAYS)):
            one = self.contents.get(id(value)) or self.others.get(id(value))
            return one is not None and not one.is_unchanged
        now, old = self.dicts.get(id(dict_of(value)), ({}, {}))
        if now.keys() != old.keys() or any(now[name] is not old[name] for name in old):
            return True
        for kind, holder, key in (place_of(value, name) for name in fields_of(value) or ()):
            place = kind, id(holder), key
            known = self.before.get(place) or self.counted.get(place)
            if known is not None and known[1] is not look(kind, holder, key):
                return True
        return False

    @property
    def first_moment(self) -> Moment:
        """The moment before the function ran."""
        return Moment(self.counted, self.before, self.contents, self.others)

    def bases(self, cls: type, path: str) -> None:
        """Guard the bases of a class of the user's."""
        place = "attr", id(cls), "__mro__"
        if place not in self.edges and not is_machinery(module_of(cls)):
            self.edges[place] = Edge("attr", cls, "__mro__", cls.__mro__, f"the bases of {path}")

    def content(self, value: Any, path: str, *, is_part: bool = False) -> None:
        """Take the whole content of a container from outside, because its use is not known.

        Args:
            is_part: it is in another container whose content is taken.
        """
        if is_a(value, types.MappingProxyType):
            (value,) = gc.get_referents(value)
        if not is_a(value, CONTAINERS):
            self.array(value, path)
        elif not is_namespace(value):
            is_new = ("content", id(value), None) not in self.edges
            if is_new:
                self.edge("content", value, None, path)
            self.touched.add(id(value))
            for item in parts_in(value):
                if not is_a(item, PLAIN) and id(item) not in self.outside:
                    self.reach(item, path)
                    self.content(item, path, is_part=True)
            if is_new and not is_part:
                self.below(value, path)

    def fields(self, value: Any, path: str) -> None:
        """Reach the attributes of an object, any of which unseen code may read."""
        found = None if is_a(value, NO_FIELDS) or is_code(value) else fields_of(value)
        if found is None or is_ours(module_of(type(value))):
            return
        is_new = ("content", id(value), None) not in self.edges
        if is_new:
            self.edge("content", value, None, path)
        self.touched.add(id(value))
        for item in found.copy().values():
            self.reach(item, path)
        if is_new:
            self.below(value, path)

    def below(self, value: Any, path: str) -> None:
        """Take what lies deeper in a value than one edge looks."""
        for part, depth in met(value):
            if depth == 0 and ("content", id(part), None) not in self.edges:
                self.reach(part, path)
                if is_a(part, CONTAINERS):
                    self.content(part, path)
                else:
                    self.fields(part, path)

    def reach_held(self, value: Any) -> None:
        """Reach the containers in an object of Python's library, such as a `UserDict`."""
        if not is_of_library(value):
            return
        path = self.path(value, type(value).__name__)
        for item in (fields_of(value) or {}).copy().values():
            for held in (item, *(parts_in(item) if is_a(item, HOLDERS) else ())):
                if is_a(held, HOLDERS):
                    self.reach(held, path)

    def array(self, value: Any, path: str) -> None:
        """Compare an array of numbers by content, if it is small."""
        if is_a(value, ARRAYS):
            self.outside.setdefault(id(value), (value, path))
            if is_changeable(value) and id(value) not in self.others and nbytes_of(value) <= LARGE:
                self.others[id(value)] = snapshot(value)
            if has_objects(value):
                for item in value.flat:
                    self.reach(item, path)
                    self.content(item, path)
            if nbytes_of(value) <= MAX_ARRAY_BYTES:
                place = ("content", id(value), None)
                self.edges.setdefault(
                    place, Edge("content", value, None, look("content", value, None), path)
                )
            else:
                self.arrays.setdefault(id(value), (value, path))

    def iterator(self, value: Any, path: str, *, is_used: bool) -> None:
        """Note the position of an iterator from outside. One that does not tell it is drawn from
        where it is used.

        Raises:
            UnsupportedCall: code uses it that may draw from it, and must not draw twice.
        """
        if is_iterator(value):
            if is_used and self.irreversible is Irreversible.REFUSED:
                raise drawn_error("the function", path, value)
            progress = progress_of(value)
            if progress is not None or is_used:
                self.drawn.setdefault(id(value), (value, path, progress))

    def note_resumed(self, frame: types.FrameType) -> None:
        """Note that a frame runs, which may be that of a generator from outside."""
        if self.drawn and frame.f_code.co_flags & inspect.CO_GENERATOR:
            generators = (one for one, *_ in self.drawn.values() if is_a(one, types.GeneratorType))
            self.resumed.update(id(one) for one in generators if one.gi_frame is frame)

    def has_drawn(self, value: Any, progress: Any) -> bool:
        """Test whether an iterator from outside has moved on. A generator may wait at one place
        again and again.
        """
        return id(value) in self.resumed or progress_of(value) != progress

    def is_data(self, value: Any) -> bool:
        """Test for plain data or a tensor, which lead to nothing else. Those of a class of the
        user's may have attributes.
        """
        cls = type(value)
        found = self.data.get(cls)
        if found is None:
            is_settled = is_a(value, Enum) and is_machinery(module_of(cls))
            is_plain = is_a(value, PLAIN) and (is_settled or dict_of(value) is None)
            found = self.data[cls] = is_plain or is_a(value, torch.Tensor)
        return found
