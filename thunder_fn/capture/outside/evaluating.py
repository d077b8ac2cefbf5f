"""Evaluation of the expressions in a frame's code: each has the values that it may have, and
crosses the edges to them.
"""

from __future__ import annotations

import abc
import builtins
import contextvars
import functools
import inspect
import itertools
import os
import random
import sys
import types
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.objects import ABSENT, is_a
from thunder_fn.capture.outside.anew import known_as
from thunder_fn.capture.outside.answers import ASKED_AGAIN, OfTensors, Registered, members_of
from thunder_fn.capture.outside.attributes import Attributes, results_of
from thunder_fn.capture.outside.code_frames import Done, Frame, Memo, Settled, callers
from thunder_fn.capture.outside.edges import Constant, Edge, constant, look, place_of
from thunder_fn.capture.outside.effects import is_effect
from thunder_fn.capture.outside.expressions import (
    TAGGED,
    Source,
    gives_others,
    has_not_run,
    is_of_python,
    parts_of,
    pattern_of,
    text,
)
from thunder_fn.capture.outside.frames import Irreversible
from thunder_fn.capture.outside.kinds import (
    EXACT,
    FUNCTIONS,
    ITEM_METHODS,
    Made,
    Super,
    answers_of,
    classes_in,
    drawn_error,
    is_iterator,
    is_lasting,
    is_library_module,
    is_of_library,
    is_ours,
    is_python,
    is_seen,
    is_shown_by_c,
    is_unseen,
    members_of_enum,
    name_of_method,
    parts_in,
    tensors_of,
)
from thunder_fn.capture.outside.lists import is_taken, parts_through
from thunder_fn.capture.outside.reached import MANY
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    CONTAINERS,
    HOLDERS,
    LONG,
    PLAIN,
    SEQUENCES,
    fields_of,
    length_of,
    met,
    module_of,
)
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.lookasides import CACHED
from thunder_fn.ir.text import escaped

_BUILTINS = frozenset(vars(builtins))
"""Names of Python's own. One edge looks for a name in a module and in Python."""
_KEYS = (str, int, float, bytes, type(None), tuple, torch.dtype, torch.device)
"""Classes of keys that are plain data."""
_RUNNING: list[Any] = []
"""Stand-in for the values of an expression that is being evaluated."""
_SHOW = frozenset(map(id, (str, repr, format)))
_FRAMES = frozenset(map(id, (sys._getframe, inspect.currentframe)))  # pyright: ignore[reportPrivateUsage]
_METHODS = {"+=": "extend", "|=": "update"}
"""Methods that change a container as these operators do."""
_PASSES = 64
"""The number of times that a frame is looked at again where a local leads to itself, as along a
linked list.
"""
_SEEDED_ANEW = frozenset(
    map(id, (random.Random, numpy.random.default_rng, numpy.random.RandomState, numpy.random.PCG64))
)
"""Generators that begin anywhere if they are given no seed."""


class Evaluator(Attributes):
    """Evaluation of frames, one after the other."""

    def __init__(self, own: frozenset[int]) -> None:
        super().__init__(own)
        self.searched: list[str] = []
        """Dicts and sets with tensors for keys that were searched for an argument, as written."""
        self.done: dict[Any, Done] = {}
        """Frames that have been looked at, by their names' values."""
        self.settled: dict[tuple[int, int], Settled] = {}
        self.written: set[int] = set()
        """Holders that the function writes to: what was found there before may have changed."""
        self.methods: set[tuple[type, types.CodeType]] = set()
        self.inner: dict[int, tuple[types.CodeType, dict[str, types.CellType]]] = {}
        """Code objects that are made by a frame, and the cells that they share with it."""
        self.lost: dict[int, list[Frame]] = {}
        """Frames whose function is not known, by their code."""
        self.over: dict[int, tuple[Source, Frame]] = {}
        """The iterable of a comprehension, by its code, and the frame around it."""
        self.unknown: set[Any] = set()
        """Attributes of what is not known, which may be anything from outside that has them."""
        self.missing: set[str] = set()
        """Modules that were not there when a frame that imports them began."""
        self.cycles = False
        """Set where an expression leads to itself."""
        self.previous: Memo = {}
        """The values when the frame was last looked at."""

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
            and known.touched.isdisjoint(self.written)
        ):
            frame.take(known)  # a frame like one that has been looked at
            return
        before, self.touched = self.touched, frame.touched
        if len(frame.locals) == 1:
            self.method(frame)
            self.functions_of(frame)
            frame.cells = self.cells_of(frame)
            known = frame.reading.comprehensions  # those of equal code, which may be another object
            for code in frame.code.co_consts if known else ():
                if is_a(code, types.CodeType) and code in known:
                    self.over[id(code)] = known[code], frame
        settled = self.settled_values(frame)
        now, later = self.expressions(frame, is_moving=is_moving)
        memo: Memo = {}
        for _ in range(_PASSES):
            self.previous, memo = memo, settled.copy()
            count = sum(map(len, frame.stored.values()))
            self.cycles = False
            for source, line in now.items():
                frame.line = line
                self.value(source, frame, memo)
            for source, line in later.items():
                frame.line = line
                with self.until_end(source, frame):
                    self.value(source, frame, memo)
            if not self.cycles or sum(map(len, frame.stored.values())) == count:
                break
        self.touched = before
        if key is not None:
            pending = () if frame.is_over else tuple(frame.pending)
            self.done[key] = Done(frame.touched, frame.waits, pending, frame.found)

    def expressions(
        self, frame: Frame, *, is_moving: bool
    ) -> tuple[dict[Source, int], dict[Source, int]]:
        """The open expressions of a frame, with their lines: those that may have run, and those
        that can run later alone. At the end of the frame the latter are none.
        """
        names = frozenset(
            name
            for given in frame.locals
            for name, value in given.items()
            if not self.is_data(value)
        ) | self.tagged(frame)
        uses = frame.reading.live(names, gives=bool(frame.returned), is_moving=is_moving)
        is_lost = frame.has_ended and not frame.is_over  # its end is not known any more
        waiting = frozenset[Source]() if is_lost else frame.reading.waiting(frame.unbound)
        now = {source: line for source, line in uses.items() if source not in waiting}
        return now, {} if frame.is_over else {one: uses[one] for one in uses if one in waiting}

    def tagged(self, frame: Frame) -> set[str]:
        """The locals with tensors whose attributes the code asks for, and those that may have had
        some.
        """
        return {
            TAGGED + name
            for name in frame.reading.tagged
            if name in frame.reading.passing
            or any(is_a(given.get(name), torch.Tensor) for given in frame.locals)
        }

    def settled_values(self, frame: Frame) -> Memo:
        """The values of what depends on globals alone: once for a code object, if the function
        does not write there.
        """
        key = id(frame.code), id(frame.globals)
        known = self.settled.get(key)
        if known is None or not known.touched.isdisjoint(self.written):
            before, waits, frame.waits = self.touched, frame.waits, False
            known = Settled(frame.globals, {}, set())
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
                    if name in frame.reading.tagged and is_a(value, torch.Tensor):
                        return None
                    if name in frame.reading.keys and is_a(value, (str, int)):
                        found.add((name, value))
                elif self.is_outside(value) or is_lasting(value):
                    found.add((name, id(value)))
                else:
                    return None
        for value, _ in frame.returned.values():
            if not self.is_outside(value) and not is_lasting(value):
                return None
            found.add(("", id(value)))
        return id(frame.code), frame.unbound, frozenset(found)

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
        self.methods.add((cls, frame.code))
        if not self.is_outside(value) and not self.is_open(cls):
            return
        for owner in cls.__mro__:
            name = name_of_method(owner, frame.code)
            if name is not None:
                # `super()` passes the first one over
                of = cls if look("class", cls, name) is owner.__dict__[name] else owner
                self.edge("class", of, name, f"{of.__name__}.{name}")
                return

    def functions_of(self, frame: Frame) -> None:
        """Guard the code and the defaults of the methods that the frame may run."""
        for function in self.functions.get(id(frame.code), ()):
            if id(function) not in self.outside:
                self.outside[id(function)] = function, function.__name__
                self.code_and_defaults(function, function.__name__, 2)

    def value(self, source: Source, frame: Frame, memo: Memo) -> Sequence[Any]:
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
        elif found is _RUNNING:  # it leads to itself
            self.cycles = True
            if source[0] == "local":
                return list(frame.stored.get(source[1], {}).values())
            return self.previous.get(source, ())
        return found

    def cell_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The values in a closure."""
        name = source[1]
        cell = frame.cells.get(name)
        if cell is not None:
            return (self.reach(self.edge("cell", cell, None, name), name),)
        return [given[name] for given in frame.locals if name in given]

    def any_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """One of several."""
        return [value for part in source[1] for value in self.value(part, frame, memo)]

    def built_items(self, source: Source, frame: Frame, memo: Memo) -> Sequence[Any]:
        """The items of a container that the expression builds; none of any other."""
        match source:
            case ("built", parts):
                return [value for part in parts for value in self.value(part, frame, memo)]
            case ("any", parts):
                return [item for part in parts for item in self.built_items(part, frame, memo)]
            case ("local", name):
                assigned = frame.reading.assigned.get(name, ())
                filled = frame.reading.filled.get(name, ())
                built = (one for one in (*assigned, *filled) if one and one[0] == "built")
                return [item for one in built for item in self.built_items(one, frame, memo)]
            case _:
                return ()

    def same_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The values of another expression."""
        return self.value(source[1], frame, memo)

    def unless_constant(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """Reads in the argument of a call that is not `constant`."""
        if not any(callee is constant for callee in self.value(source[1], frame, memo)):
            self.value(source[2], frame, memo)
        return ()

    def whole_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """All of an expression's value counts."""
        for value in self.value(source[1], frame, memo):
            if not self.is_data(value):
                self.whole(value, text(source[1]))
        return ()

    def given_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """An argument of a call. Code that is not seen may read all of it; functions of the user's
        have frames.
        """
        _, target, of = source
        values = [value for value in self.value(of, frame, memo) if not self.is_data(value)]
        callees = self.value(target, frame, memo) if values else ()
        if not callees or not all(map(is_seen, callees)):
            for value in values:
                self.whole(value, text(of))
                if is_a(value, types.BuiltinFunctionType) and is_effect(value):
                    self.effects.found.append(value.__name__)  # C may call it: `map(print, ...)`
        if not callees and target is not None and target[0] == "call":  # attrgetter("k")(value)
            makers = self.value(target[1], frame, memo)
            callees = [one for one in makers if one is not functools.partial]
        for value in filter(self.is_outside, values):
            if is_of_library(value):  # `len` runs its methods
                self.fields(value, self.path(value, text(of)))
            is_of_data = self.is_of_data(target, frame, memo)
            if is_of_data:
                self.shown(value, self.path(value, text(of)), frame)
            is_of_torch = look("class", type(value), "__torch_function__") is not ABSENT
            if is_of_data or is_of_torch or any(map(is_unseen, callees)):
                self.unseen(value, self.path(value, text(of)), frame)
        return ()

    def is_of_data(self, target: Source, frame: Frame, memo: Memo) -> bool:
        """Test for a method of plain data, such as `"{0.lr}".format`."""
        if target is None or target[0] != "attr":
            return False
        return any(is_a(value, (str, bytes)) for value in self.value(target[1], frame, memo))

    def imported_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The module of an import statement, which other code may exchange."""
        _, name, level, is_whole = source
        package = frame.globals.get("__package__") or ""
        path = ".".join([*package.split(".")[: 1 - level or None], name]) if level else name
        path = path if is_whole else path.partition(".")[0]
        module = sys.modules.get(path, ABSENT)
        if module is ABSENT:
            self.missing.add(path)
            return ()
        if is_a(module, types.ModuleType) and is_library_module(module):
            return (module,)
        return (self.reach(self.edge("key", sys.modules, path, f"the module {path}"), path),)

    def field_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The values in the attributes of an object."""
        values = self.value(source[1], frame, memo)
        return [field for value in values for field in (fields_of(value) or {}).copy().values()]

    def super_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """Stand-ins for the results of `super()`, for each class and object."""
        _, cls, of = source
        values = [value for value in self.value(of, frame, memo) if not self.is_data(value)]
        return [
            frame.stand_in(Super, owner, value)
            for owner in self.value(cls, frame, memo)
            for value in values
            if is_a(owner, type) and owner in (value if is_a(value, type) else type(value)).__mro__
        ]

    def each_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The values that a loop over a value gives."""
        of, path = source[1], f"{text(source[1])}[...]"
        found = list(self.built_items(of, frame, memo))
        for value in self.value(of, frame, memo):
            found += value if is_a(value, str) else self.items(value, path)
        return found

    def drawn_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """Refuse a draw from an iterator from outside before it happens: it cannot be undone. One
        after a branch may never happen.

        Raises:
            UnsupportedCall: an item is to be drawn from one.
        """
        _, of, is_later = source
        if self.irreversible <= (Irreversible.CERTAIN_REFUSED if is_later else Irreversible.TAKEN):
            return ()
        uses = (*frame.reading.settled, *frame.reading.open)
        is_written = any(one[0] in ("before", "counted") and one[1] is of for one in uses if one)
        for value in () if is_written else self.value(of, frame, memo):
            is_same = is_a(value, itertools.repeat)  # each item is the same
            if not self.is_made(value) and is_iterator(value) and not is_same:
                raise drawn_error(frame.code.co_name, self.path(value, text(of)), value)
        return ()

    def attribute_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """An attribute, by any of its names."""
        _, of, key = source
        values = self.value(of, frame, memo)
        is_vague = source in frame.reading.vague  # it may be in other objects, too
        if is_vague and key is not None and key[0] == "const":
            self.unknown.add(key[1])
        found = [*self.attribute_of_unknown(key, of, values, frame, memo)]
        for value in values:
            if self.is_data(value) and not is_a(value, torch.Tensor):
                continue
            names = self.keys(key, frame, memo)
            if names is None:
                found += self.some_attributes(value, pattern_of(key), of, frame)
            for name in names or ():
                if is_a(value, torch.Tensor):
                    found += self.tensor_attribute(value, name, of)
                elif is_a(name, str):
                    found += self.attribute(value, name, of, frame)
        return found

    def attribute_of_unknown(
        self, key: Source, of: Source, values: Sequence[Any], frame: Frame, memo: Memo
    ) -> Sequence[Any]:
        """An attribute of what an expression may give besides the values that are known."""
        if key is None or key[0] != "const" or not is_of_python(key):
            return ()
        if not values or any(part is not None and part[0] == "built" for part in parts_of(of)):
            self.unknown.add(key[1])
        if not self.is_any_tensor(of, values, frame, memo):
            return ()
        return self.attribute_of_tensors(key[1], f"{text(of)}.{escaped(str(key[1]))}")

    def tensor_attribute(self, value: torch.Tensor, name: Any, of: Source) -> Sequence[Any]:
        """An attribute that Python gave a tensor from outside, or did not. Its class has others."""
        held, path = internals.attributes(value), f"{text(of)}.{escaped(str(name))}"
        is_tracer = internals.is_tracer(value)
        cls = value.__class__ if is_tracer else type(value)
        if name == "__dict__":
            return () if is_tracer else (self.reach(held, path),)
        if not is_of_python(("const", name)):
            return ()
        found = look("class", cls, name)
        self.reach(self.edge("class", cls, name, path), path)
        if is_tracer:
            return ()
        own = self.edge("key", held, name, path)
        return (self.reach(found if own is ABSENT else own, path),)

    def is_any_tensor(self, of: Source, values: Sequence[Any], frame: Frame, memo: Memo) -> bool:
        """Test whether an expression stands for tensors of which not all are known, such as those
        that a loop over parameters gives.
        """
        tensors = [one for one in values if is_a(one, torch.Tensor)]
        if of is None or of[0] != "local":
            return False
        if of[1] in frame.reading.passing:
            return bool(tensors) or not values
        if all(map(internals.is_tracer, tensors)):
            return False
        sources = frame.reading.assigned.get(of[1], ())
        found = (self.value(one, frame, memo) for one in sources)
        return not all(any(is_a(one, torch.Tensor) for one in given) for given in found)

    def attributes_of_tensors(self) -> list[dict[str, Any]]:
        """The attributes that Python gave the tensors in modules and containers from outside."""
        outside = [one for one, _ in self.outside.values()]
        modules = [one for one in outside if is_a(one, torch.nn.Module)]
        parts = (part for one in outside if is_a(one, CONTAINERS) for part in parts_in(one))
        tensors = (one for one in parts if is_a(one, torch.Tensor) and not internals.is_tracer(one))
        found = {id(one): one for one in (*tensors_of(modules), *tensors)}
        return [internals.attributes(one) for one in found.values()]

    def attribute_of_tensors(self, name: str, path: str) -> list[Any]:
        """An attribute of all tensors in modules and containers from outside."""
        place = "answer", id(torch.Tensor), name
        if place not in self.edges:
            self.ask(place, OfTensors(name, self.attributes_of_tensors()), path)
        return [self.reach(one, path) for one in self.edges[place].holder.values]

    def item_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """An item, by any of its keys."""
        _, of, key = source
        found = list(self.built_items(of, frame, memo))
        for value in self.value(of, frame, memo):
            if not self.is_data(value):
                keys = None if is_a(value, contextvars.ContextVar) else self.keys(key, frame, memo)
                found += self.item_by(value, keys, source, frame, memo)
        return found

    def contained_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A question whether something is in a container: in a sequence, all items count."""
        _, of, key = source
        for value in self.value(of, frame, memo):
            if not self.is_data(value):
                keys = None if is_a(value, SEQUENCES) else self.keys(key, frame, memo)
                self.item_by(value, keys, source, frame, memo)
        return ()

    def item_by(
        self, value: Any, keys: Sequence[Any] | None, source: Any, frame: Frame, memo: Memo
    ) -> Sequence[Any]:
        """An item, or the question for one, by a key that may become known while the frame runs.
        Until the end of the frame it is noted that all items may count.
        """
        _, of, key = source
        path, is_sure = self.path(value, text(of)), source in frame.reading.sure
        if is_a(value, _BY_HASH) and (
            (_is_argument(key, frame) and _has_given_keys(value))
            or (_is_identity(key, frame) and self.is_outside(value))
        ):
            self.searched.append(path)
        keys = None if source in frame.reading.vague else keys
        if has_not_run(key, frame.unbound):
            is_open = not frame.has_ended and is_a(value, CONTAINERS) and self.is_outside(value)
            if is_open and (is_sure or keys is None):  # it may be known at the end of the frame
                with self.until_end(source, frame, kinds=("content",)):
                    found = self.item(value, None, path, frame)
                return found if keys is None else self.item(value, keys, path, frame)
        elif is_sure and frame.is_over and is_a(value, dict):
            is_found = keys is not None and self.are_all(value, source, frame, memo)
            frame.found[source] = frame.found.get(source, True) and is_found
            for name in keys or () if is_found else ():
                place = "key", id(value), name
                old, written = self.first("key", value, name), f"{path}[{name!r}]"
                self.edges.setdefault(place, Edge("key", value, name, old, written))
        return self.item(value, keys, path, frame)

    @contextmanager
    def until_end(self, source: Source, frame: Frame, kinds: Sequence[str] = ()) -> Generator[None]:
        """Keep the edges that are crossed inside, of these kinds, for the end of a frame: they
        count if the expression has run. What is reached for the first time counts anyway.
        """
        count, firm = len(self.edges), self.firm
        self.firm = set() if firm is None else firm
        yield
        pending = {
            place: edge
            for place, edge in itertools.islice(
                reversed(self.edges.items()), len(self.edges) - count
            )
            if place not in self.firm and (not kinds or edge.kind in kinds)
        }
        for place in pending:
            del self.edges[place]
        if pending:
            frame.pending.append((source, bool(kinds), pending))
        self.firm = firm

    def settle(self, frame: Frame) -> None:
        """Cross the edges that a frame has kept, of the expressions that have run. Of an item,
        all content counts unless its keys are known.
        """
        unbound = frame.unbound if frame.is_over else frozenset[str]()
        for source, is_content, edges in frame.pending:
            has_run = not has_not_run(source, unbound)
            is_needed = has_run and not (is_content and frame.found.get(source, False))
            for place, edge in edges.items():
                if is_needed or place in self.edges:
                    self.edges[place] = edge  # as it was first
        frame.pending.clear()

    def are_all(self, value: Any, source: Any, frame: Frame, memo: Memo) -> bool:
        """Test whether the values that a key has now are all that it had in a frame, if its code
        leads to all of them: nothing on the way has been written, and each step leads on.
        """
        written = {**self.before, **self.counted}
        reading, names = frame.reading, {place[2] for place in written}
        if ("content", id(value), None) in written or id(value) not in self.contents:
            return False
        parts = list(parts_through(source[2], reading.assigned, reading.filled))
        called = {id(part[1]) for part in parts if part[0] == "call"}
        return all(
            id(part) in called or self.leads_on(part, names, frame, memo) for part in parts
        ) and all(map(_is_key, self.value(source[2], frame, memo)))

    def leads_on(self, part: Any, names: set[Any], frame: Frame, memo: Memo) -> bool:
        """Test whether all values of an expression are known, if those in it are."""
        match part:
            case ("global", name):
                return name not in names
            case ("cell", _):
                return None not in names
            case ("attr", _, ("const", name)):
                values = self.value(part[1], frame, memo)
                found = (self.attribute(one, name, part[1], frame) for one in values)
                return name not in names and all(found) and not any(map(self.is_data, values))
            case ("each", ("global" | "cell", _)):
                values = self.value(part[1], frame, memo)
                return all(type(one) in EXACT and self.is_same_content(one) for one in values)
            case ("call", ("attr", _, ("const", "__subclasses__")), ()):
                callees = self.value(part[1], frame, memo)
                return bool(callees) and all(id(one) in ASKED_AGAIN for one in callees)
            case _:
                return True

    def is_same_content(self, value: Any) -> bool:
        """Test whether a container holds what it held before the function ran, and not much."""
        one = self.contents.get(id(value))
        return length_of(value) <= MANY and (one is None or one.is_unchanged)

    def note_before(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A place is written in this frame: an edge to it is read before that."""
        for kind, holder, key in self.places(source[1], frame, memo):
            self.written.add(id(type) if kind == "class" else id(holder))
            self.before.setdefault((kind, id(holder), key), (holder, self.first(kind, holder, key)))
        return ()

    def places(self, place: Any, frame: Frame, memo: Memo) -> list[tuple[str, Any, Any]]:
        """The places outside that a write may mean: the kind of each, its holder and its key."""
        found: list[tuple[str, Any, Any]] = []
        match place:
            case ("global", name):
                found.append(("key", frame.globals, name))
            case ("cell", name) if name in frame.cells:
                found.append(("cell", frame.cells[name], None))
            case ("attr" | "item" as how, of, key):
                for holder in filter(self.is_outside, self.value(of, frame, memo)):
                    setter = look("class", type(holder), "__setitem__")
                    if how == "item" and (setter is ABSENT or is_seen(setter)):
                        continue  # it has no items, or frames of its own
                    names = self.keys(key, frame, memo) or ()
                    if how == "attr":
                        found += [place_of(holder, one) for one in names if is_a(one, str)]
                    else:
                        found.append(("content", holder, None))
                        self.reach_held(holder)
                        kind = "key" if is_a(holder, dict) else "index"
                        found += [(kind, holder, one) for one in names]
            case _:
                pass
        return found

    def note_write(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A place is written whose old value counts for nothing: a trace does not repeat that."""
        place = source[1]
        found = self.places(place, frame, memo)
        for kind, holder, key in found:
            self.counted.setdefault(
                (kind, id(holder), key), (holder, self.first(kind, holder, key))
            )
        if place[0] in ("attr", "item") and place[1] is None:
            self.effects.found.append("a write")
        return ()

    def note_augmented(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A place is written by `+=` or another such operator. A program adds to integers, as to a
        counter. Of anything else but a container the old value counts.
        """
        _, place, operator = source
        found = [one for one in self.places(place, frame, memo) if one[0] != "content"]
        old = [look(*one) for one in found]
        if found and operator in ("+=", "-=") and all(type(value) is int for value in old):
            self.added.update((kind, id(holder), key) for kind, holder, key in found)
        elif found and operator in _METHODS and all(is_a(value, HOLDERS) for value in old):
            for value in self.value(place, frame, memo):
                self.changing.setdefault(id(value), set()).add(_METHODS[operator])
        elif found:
            self.note_before(("before", place), frame, memo)
            values = self.value(place, frame, memo)
            for value in values:
                if is_a(value, set):  # it depends on the items whether there is anything to do
                    self.content(value, self.path(value, text(place)))
            return values
        return self.note_write(("counted", place), frame, memo)

    def note_dropped(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """An item is taken away, and nobody looks at it. In a list of tensors it does not count."""
        _, of, method = source
        values = self.value(of, frame, memo)
        if any(type(one) not in EXACT or not is_a(one, SEQUENCES) for one in values):
            return self.value(method, frame, memo)
        for value in filter(self.is_outside, values):
            if not all(is_a(item, torch.Tensor) for item in value):
                return self.value(method, frame, memo)
            self.changing.setdefault(id(value), set()).add("pop")
            self.effects.found.append("a write")
        return ()

    def note_mutation(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A local is changed in place, as by `+=`: a container from outside is then another."""
        for value in filter(self.is_outside, self.value(source[1], frame, memo)):
            if is_a(value, CONTAINERS) and not is_a(value, (tuple, frozenset)):
                self.effects.found.append("a write")
            if is_a(value, (dict, set)):
                self.changing.setdefault(id(value), set()).add("update")
        return ()

    def global_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A global, or a builtin."""
        name = source[1]
        if name not in frame.globals:
            found: Any = frame.globals.get("__builtins__")
            held: dict[str, Any] = (
                found if is_a(found, dict) else vars(found) if found is not None else {}
            )
            if name in _BUILTINS:
                if not frame.is_library:
                    self.edge("builtin", frame.globals, name, name)
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

    def local_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The values of a local at the start and at the end, and those of its sources."""
        name = source[1]
        if frame.is_over and name in frame.unbound:
            return ()
        found, is_tagged = frame.stored.setdefault(name, {}), name in frame.reading.tagged
        if name == ".0" and frame.over is not None:
            over, outer = frame.over
            found.update((id(value), value) for value in self.value(over, outer, {}))
        for given in frame.locals:
            value = given.get(name)
            if not self.is_data(value) or (is_tagged and is_a(value, torch.Tensor)):
                found.setdefault(id(value), value)
        for assigned in frame.reading.assigned.get(name, ()):
            for value in self.value(assigned, frame, memo):
                if not self.is_data(value) or (is_tagged and is_a(value, torch.Tensor)):
                    found.setdefault(id(value), value)
        return list(found.values())

    def kind_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A question for the class of a value: other classes may be registered with an abstract
        one, and a protocol asks for attributes.
        """
        _, classes, of = source
        for cls in classes_in(self.value(classes, frame, memo)):
            place = "answer", id(cls), "registered"
            if is_a(cls, abc.ABCMeta) and place not in self.edges:
                self.ask(place, Registered(cls), f"what is registered with {cls.__name__}")
            for name in members_of(cls):
                for value in filter(self.is_outside, self.value(of, frame, memo)):
                    self.attribute(value, name, of, frame)
        return ()

    def call_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """The possible results of a call: those of this frame's Python callees. A new object of a
        class is not outside.
        """
        target = source[1]
        callees = self.value(target, frame, memo)
        found = results_of(frame, callees) if frame.returned else []
        for callee in callees:
            if (
                is_a(callee, types.MethodType)
                and self.is_outside(callee.__self__)
                and is_unseen(callee)
            ):
                self.unseen(callee.__self__, self.path(callee.__self__, text(target)), frame)
            found += self.asked_again(callee, source, frame, memo)
            if not source[2] and id(callee) in _SEEDED_ANEW:
                self.constants.setdefault(
                    f"{text(target)}()",
                    Constant(f"{text(target)}()", frame.code.co_filename, frame.line),
                )
            if id(callee) in _SHOW:
                for one in source[2]:
                    self.shown_values(("shown", one), frame, memo)
            found += self.given_by(callee, text(target), frame)
            if source[1][0] != "attr":
                found += self.by_method(callee, source, frame, memo)
            if is_a(callee, FUNCTIONS) or not self.is_outside(callee):
                continue
            self.call_of_class(callee)
            if is_of_library(callee) and is_python(look("class", type(callee), "__call__")):
                self.edge("content", callee, None, self.path(callee, text(target)))
        return found

    def by_method(
        self, callee: Any, source: tuple[Any, ...], frame: Frame, memo: Memo
    ) -> Sequence[Any]:
        """The item that a method of a dict gives, where it is not called by its name."""
        function = callee.__func__ if is_a(callee, types.MethodType) else callee
        if not is_a(function, (types.BuiltinFunctionType, types.MethodDescriptorType)):
            return ()
        of = getattr(callee, "__self__", None)
        if function.__name__ not in ITEM_METHODS or not is_a(of, dict):
            return ()
        keys = self.keys(next(iter(source[2]), None), frame, memo)
        return self.item(of, keys, self.path(of, text(source[1])), frame)

    def given_by(self, callee: Any, path: str, frame: Frame) -> list[Any]:
        """The results of a class, of `globals`, or of another callee that has no frame."""
        if is_a(callee, type) and self.is_open(callee):
            for name in ("__init__", "__new__"):
                self.edge("class", callee, name, f"{callee.__name__}.{name}")
            return members_of_enum(callee) or [frame.stand_in(Made, callee)]
        if type(callee) is CACHED and id(callee) in self.answers:
            known = answers_of(callee, self.answers[id(callee)][2])
            return [self.reach(one, path) for one in known] if len(known) <= LONG else []
        if callee is locals:
            return list(frame.locals)
        if id(callee) in _FRAMES:
            return [*callers(frame)]
        if callee is globals:
            return [self.reach(frame.globals, "globals()")]
        if is_a(callee, weakref.ref) and not self.is_outside(callee):
            return [callee()]
        if is_a(callee, weakref.ref) and self.edge("alive", callee, None, f"{path}()"):
            return [self.reach(callee(), f"{path}()")]
        return []

    def shown_values(self, source: tuple[Any, ...], frame: Frame, memo: Memo) -> Sequence[Any]:
        """A value whose text becomes a part of a string."""
        for value in self.value(source[1], frame, memo):
            if not self.is_data(value):
                self.shown(value, self.path(value, text(source[1])), frame)
        return ()

    def shown(self, value: Any, path: str, frame: Frame) -> None:
        """The text of an array depends on NumPy's options, that of an object of C on all that it
        holds.
        """
        if any(is_a(part, ARRAYS) for part, _ in met(value)):
            self.answer(numpy.get_printoptions, (), "the print options of NumPy")
        if self.is_outside(value) and is_shown_by_c(value):
            self.unseen(value, path, frame)

    def asked_again(
        self, callee: Any, source: tuple[Any, ...], frame: Frame, memo: Memo
    ) -> Sequence[Any]:
        """The answers to a question about the process, for each of its possible arguments."""
        _, target, arguments = source
        if callee is os.getenv:
            return self.environment_item(self.keys(next(iter(arguments), None), frame, memo))
        if (function := ASKED_AGAIN.get(id(callee))) is None:
            return ()
        keys = [self.keys(one, frame, memo) for one in arguments]
        if is_a(callee, types.MethodDescriptorType) and target[0] == "attr":
            owners = self.value(target[1], frame, memo)
            keys.insert(0, [one for one in owners if is_a(one, callee.__objclass__)])
        path = f"the answer of {text(target)}"
        recorder = current()
        around = {} if recorder is None else recorder.call.answers
        name = function.__name__.removeprefix("_")
        if name in around and function() != around[name]:
            place = frame.code.co_filename, frame.line
            self.constants.setdefault(
                path, Constant(f"{path}, which is that of a capture,", *place)
            )
            return ()
        found = [
            self.answer(function, given, path) for given in itertools.product(*filter(None, keys))
        ]
        if None in keys or ABSENT in found:
            self.constants.setdefault(path, Constant(path, frame.code.co_filename, frame.line))
        return [self.reach(one, path) for one in found if one is not ABSENT]

    def call_of_class(self, callee: Any) -> None:
        """Note the `__call__` that an object has from its class."""
        cls = type(callee)
        if is_a(look("class", cls, "__call__"), types.FunctionType) and not is_ours(module_of(cls)):
            self.edge("class", cls, "__call__", f"{cls.__name__}.__call__")

    def whole(self, value: Any, path: str, depth: int = 2) -> None:
        """Take a value whole, because its use is not known. Of a method, that is its dict."""
        self.hear(known_as(value))
        if is_a(value, types.MethodType):
            if is_a(value.__self__, dict):
                self.whole(value.__self__, path, depth)
        elif self.is_outside(value):
            path = self.path(value, path)
            self.iterator(value, path, is_used=True)
            if is_a(value, types.SimpleNamespace):  # C compares its attributes
                self.fields(value, path)
            else:
                self.content(value, path)
        elif depth and type(value) in EXACT and len(value) <= LONG:
            for item in parts_in(value):
                if not is_a(item, PLAIN):
                    self.whole(item, path, depth - 1)

    def keys(self, source: Source, frame: Frame, memo: Memo) -> Sequence[Any] | None:
        """The possible keys: a constant, plain data from outside, or an argument; None if they
        are not known.
        """
        if source is None or source[0] == "built" or gives_others(source):
            return None
        if source[0] == "any" and not is_taken(source):
            given = [
                self.keys(one, frame, memo)
                for one in source[1]
                if not has_not_run(one, frame.unbound)
            ]
            return None if None in given else [key for keys in given for key in keys or ()] or None
        if source[0] == "const":
            return source[1:] if is_a(source[1], _KEYS) else None
        if source[0] == "local":
            name = source[1]
            if any(map(gives_others, frame.reading.keys.get(name, (None,)))):
                return None
            given = [self.value(one, frame, memo) for one in frame.reading.keys[name]]
            given += [(frame.locals[0][name],)] if name in frame.locals[0] else []
            if not all(given):
                return None
            found: Sequence[Any] = [key for values in given for key in values]
        else:
            found = self.value(source, frame, memo)
        return list(filter(_is_key, found)) or None


_BY_HASH = (dict, set, frozenset)


def _is_argument(key: Source, frame: Frame) -> bool:
    """Test for a local that is a tensor argument of the traced function."""
    if (recorder := current()) is None or key is None or key[0] != "local":
        return False
    values = [given.get(key[1]) for given in frame.locals]
    variables = [recorder.var_of(one) for one in values if is_a(one, internals.Tracer)]
    return any(variable in recorder.inputs for variable in variables if variable is not None)


def _is_identity(key: Source, frame: Frame) -> bool:
    """Test for `id(x)` of a tensor argument, or a local that is this."""
    match key:
        case ("call", ("global", "id" | "hash"), arguments):
            return any(_is_argument(one, frame) for one in arguments)
        case ("local", name):
            assigned = frame.reading.assigned.get(name, ())
            return any(one and one[0] == "call" and _is_identity(one, frame) for one in assigned)
        case _:
            return False


def _has_given_keys(value: Any) -> bool:
    return any(is_a(key, torch.Tensor) and not internals.is_tracer(key) for key in value)


def _is_key(value: Any) -> bool:
    """Test for plain data that a dict may have as a key."""
    return all(map(_is_key, value)) if is_a(value, tuple) else is_a(value, _KEYS)


RULES: dict[str, Callable[..., Sequence[Any]]] = {
    "kinds": Evaluator.kind_values,
    "code": lambda *_: (),
    "global": Evaluator.global_values,
    "cell": Evaluator.cell_values,
    "local": Evaluator.local_values,
    "any": Evaluator.any_values,
    "built": Evaluator.any_values,
    "inplace": Evaluator.same_values,
    "call": Evaluator.call_values,
    "before": Evaluator.note_before,
    "counted": Evaluator.note_write,
    "augmented": Evaluator.note_augmented,
    "mutated": Evaluator.note_mutation,
    "dropped": Evaluator.note_dropped,
    "unless": Evaluator.unless_constant,
    "whole": Evaluator.whole_values,
    "given": Evaluator.given_values,
    "fields": Evaluator.field_values,
    "import": Evaluator.imported_values,
    "super": Evaluator.super_values,
    "shown": Evaluator.shown_values,
    "joined": lambda *_: (),
    "each": Evaluator.each_values,
    "drawn": Evaluator.drawn_values,
    "attr": Evaluator.attribute_values,
    "item": Evaluator.item_values,
    "in": Evaluator.contained_values,
}
"""The evaluation of each kind of expression."""
