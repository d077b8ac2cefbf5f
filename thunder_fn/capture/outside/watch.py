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

import functools
import sys
import types
from collections.abc import Callable, Container, Iterator, Sequence, Set
from typing import Any

import torch
from torch.distributions.utils import lazy_property

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.numbers.types_asked import type_error
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside.anew import (
    asks_anew,
    is_baked,
    is_dropped,
    is_passed_over,
    known_as,
    library_called,
    name_of,
)
from thunder_fn.capture.outside.answers import OfTensors, Question
from thunder_fn.capture.outside.bytecode import reading
from thunder_fn.capture.outside.code_frames import Frame
from thunder_fn.capture.outside.edges import Constant, Edge, constant, look
from thunder_fn.capture.outside.effects import is_stateful
from thunder_fn.capture.outside.evaluating import Evaluator
from thunder_fn.capture.outside.expressions import Reading
from thunder_fn.capture.outside.frames import Irreversible, Observer, is_import, is_library
from thunder_fn.capture.outside.kinds import (
    FUNCTIONS,
    NO_FIELDS,
    OF_TRACE,
    SYMBOLIC,
    answers_of,
    entries_of,
    has_answers,
    is_code,
    is_of_trace,
    parts_in,
    place_of,
)
from thunder_fn.capture.outside.moments import Moment
from thunder_fn.capture.outside.reads import (
    ARRAYS,
    CONTAINERS,
    HOLDERS,
    PLAIN,
    SEQUENCES,
    Changed,
    content_of,
    fields_of,
    is_longer,
    length_of,
    section_of,
    seen,
    values_read,
)
from thunder_fn.capture.places import Snapshot
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.replaced.number_calls import is_copied
from thunder_fn.capture.supported import EscapedValue
from thunder_fn.errors import UnsupportedCall
from thunder_fn.garbage import is_collecting, is_collectors, referrers
from thunder_fn.ir import hooks, ops
from thunder_fn.ir.text import escaped
from thunder_fn.ir.trace import Op

MAX_ANSWERS = 1000
"""So many answers of a cached function are guarded, and no more."""
_MAY_KEEP = ("add", "update")
"""Methods that may leave a dict or set as it is, and yet put something there."""
_FILLS_CACHE = lazy_property.__get__.__code__


def _code_of_cached(function: Any) -> types.CodeType | None:
    """The code of what a cache wraps."""
    return getattr(getattr(function, "__wrapped__", None), "__code__", None)


def _is_open(recorder: Recorder, code: types.CodeType) -> bool:
    """Test whether any expression in some code may give a symbolic value. A copy answers itself
    what it asks of tensors by the name `type`.
    """
    return not is_library(code.co_filename) and (recorder.symbolic or not is_copied(code))


class Watch(Evaluator):
    """The observer of one capture, which finds the edges of its frames."""

    around: Observer | None = None

    def __init__(
        self, f: Callable[..., Any], own: frozenset[int] = frozenset(), *, hears_calls: bool = False
    ) -> None:
        super().__init__(own)
        self.hears_calls = hears_calls
        self.readings: dict[int, tuple[types.CodeType, Reading]] = {}
        self.aside: types.FrameType | None = None
        self.itself = set[int]()
        """Tuples of which no equal one can take the place, by identity."""
        self.is_put: set[int] | None = None
        self.caches: list[tuple[dict[str, Any], str]] = []
        """Values that cached properties of distributions compute while the function runs."""
        self.unsettled: dict[tuple[str, int, Any], tuple[Any, UnsupportedCall]] = {}
        """Places in which bodies leave what depends on how often they run, each with the holder,
        and the error where the function reads it.
        """
        self.reach(f, getattr(f, "__name__", "f"))

    def started(self, frame: types.FrameType) -> None:
        """Look at what a frame can reach, before it changes anything. Code that an import or the
        collector runs is no part of the function.
        """
        code, self.is_put = frame.f_code, None
        if self.aside is None and (is_import(frame) or is_collectors(code)):
            self.aside = frame
        if self.aside is not None:
            return
        self.note_resumed(frame)
        if id(code) not in self.readings:
            self.readings[id(code)] = code, reading(code)
        mine = Frame(frame, self.stack[-1] if self.stack else None, self.readings[id(code)][1])
        mine.over = self.over.get(id(code))
        self.stack.append(mine)
        self.evaluate(mine)
        cached = (_code_of_cached(function) for function, *_ in self.answers.values())
        if self.irreversible and code in cached:
            mine.places = self.held_now()
        if code is _FILLS_CACHE and self.is_outside(of := frame.f_locals["instance"]):
            self.caches.append((vars(of), frame.f_locals["self"].wrapped.__name__))

    def ended(self, frame: types.FrameType, value: Any) -> None:
        """Look again, at the present values of its locals."""
        if self.aside is not None:
            self.aside = None if self.aside is frame else self.aside
            return
        is_known = bool(self.stack) and self.stack[-1].code is frame.f_code
        if (recorder := current()) is not None:
            is_open = functools.partial(_is_open, recorder, frame.f_code)
            error = type_error(frame, has_found=recorder.decisions.has_found, may_reach=is_open)
            if error is not None:
                recorder.late_error = error.and_before(recorder.late_error)
        if not is_known:
            return
        mine = self.stack.pop()
        mine.has_ended = True
        if mine.places is not None:
            self.refuse_writes_of_cached(mine)
        if mine.code.co_name == "__init__" and mine.code.co_argcount:
            value = mine.locals[0].get(mine.code.co_varnames[0])
            if not self.is_outside(value):
                self.built[id(value)] = value
        is_data = all(map(self.is_data, value)) if type(value) is tuple else self.is_data(value)
        is_tensor = is_a(value, torch.Tensor) and not is_a(value, internals.Tracer)
        if mine.back is not None and (is_tensor or not is_data):
            mine.back.returned[id(value)] = value, mine.code
        if not (mine.returned or mine.reading.moving or mine.pending):
            return
        mine.end(frame)
        is_new = bool(mine.returned) and (mine.waits or not mine.touched.isdisjoint(self.written))
        self.evaluate(mine, is_moving=not is_new)
        self.settle(mine)

    def thread_started(self, name: str) -> None:
        """Take the results of a thread as constants, since its reads are not seen.

        Raises:
            UnsupportedCall: it must not be started twice.
        """
        if self.aside is None and self.stack and not self.stack[-1].is_library:
            if self.irreversible is Irreversible.REFUSED:
                raise UnsupportedCall(
                    f"{self.stack[-1].code.co_name} starts the thread {name!r}, whose reads and"
                    " writes are not seen",
                    fix="Start it outside of the function.",
                )
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            while frame.f_back is not None and frame.f_code is not self.stack[-1].code:
                frame = frame.f_back
            written = f"the work of the thread {name!r}"
            self.constants.setdefault(
                written, Constant(written, frame.f_code.co_filename, frame.f_lineno)
            )

    @staticmethod
    def asks(of: Any, names: dict[str, Any]) -> bool:
        """Test for a function that answers anew, for its code, or for code that names one."""
        return known_as(of) is not None or (type(of) is types.CodeType and asks_anew(of, names))

    def asked_inside(self, frame: types.FrameType) -> None:
        """Take the answer of a library's function as a constant, which asks a clock or the file
        system, if it goes anywhere.
        """
        mine = self.stack[-1] if self.stack and self.aside is None else None
        if mine is None or is_collecting():
            return
        called = library_called(frame, mine.code)
        if called is None or (back := called.f_back) is None or is_dropped(back):
            return
        if is_passed_over(called.f_globals):
            return
        place = mine.code.co_filename, back.f_lineno
        spans = (
            at
            for target, at in mine.reading.constants
            if any(one is constant for one in self.value(target, mine, {}))
        )
        is_known = any((one.file, one.line) == place for one in self.constants.values())
        if not is_known and not is_baked(back, spans):
            answer = Constant(f"the answer of {name_of(called)}", *place)
            self.constants.setdefault(answer.text, answer)

    def called(self, function: Any, by: types.FrameType | None = None) -> None:
        """Note a call of C that a trace does not repeat, or of what answers anew."""
        if self.aside is not None or is_collecting():
            return
        known = known_as(function)
        if by is not None and known is not None:
            self.asked_inside(by)
        elif by is None:
            if self.hears_calls and is_a(function, types.BuiltinFunctionType):
                self.effects.called(function)
            self.hear(known)

    def stopped(self) -> None:
        """Let cached functions forget what is of the trace, in answers and keys. Each call of the
        program computes these answers.

        Raises:
            UnsupportedCall: an answer is random. Each call would draw it anew.
        """
        for one in self.contents.values():
            if not self.changing.get(id(one.container), set()).isdisjoint(_MAY_KEEP):
                self.unchanged(one)
        self.unwritten()
        recorder, random_ones = current(), list[str]()
        for function, path, kept, _ in self.answers.values():
            entries = entries_of(function, kept)
            leaves, _ = pytree.flatten([answer for _, answer in entries])
            traced = [leaf for leaf in leaves if is_a(leaf, OF_TRACE)]
            tensors = [leaf for leaf in traced if is_a(leaf, internals.Tracer)]
            if recorder is not None and recorder.draws_for(tensors):
                random_ones.append(path)
            if traced or any(has_symbols(key) for key, _ in entries):
                function.cache_clear()
        if random_ones:
            raise UnsupportedCall(
                f"the cached function {random_ones[0]} draws random numbers for its first answer"
                " while it is traced",
                source=None,
                fix="Call it once before, or pass its answer as an argument.",
            )

    def held_now(self) -> dict[tuple[str, int, Any], Any]:
        """Describe the places that the function may have written to."""
        found: dict[tuple[str, int, Any], Any] = {
            ("content", identity, None): seen(one.container)
            for identity, one in self.contents.items()
        }
        for place, (holder, _) in {**self.counted, **self.before}.items():
            found.setdefault(place, seen(look(place[0], holder, place[2])))
        return found

    def refuse_writes_of_cached(self, mine: Frame) -> None:
        """Refuse a cached function that writes to objects outside: it does so in its first call
        alone.

        Raises:
            UnsupportedCall: it has written to one.
        """
        assert mine.places is not None
        first = {("content", i, None): seen(one.before) for i, one in self.contents.items()}
        written = {**self.counted, **self.before}.items()
        first = {place: seen(old) for place, (_, old) in written} | first | mine.places
        if all(first[place] == value for place, value in self.held_now().items()):
            return
        for function, *_ in self.answers.values():
            if _code_of_cached(function) is mine.code:
                function.cache_clear()
        raise UnsupportedCall(
            f"the cached function {mine.code.co_name} changes an object outside when it is called"
            " for the first time, which a trace would repeat",
            fix="Call it once before, or pass its answer as an argument.",
        )

    def note_late(self) -> None:
        """Note the places that are known at the end alone. Those in which `functools.
        cached_property` keeps tensors of the trace held nothing before. An integer to which the
        function has added what is none is no counter: its old value counts.
        """
        for place in self.added - self.before.keys():
            kind, _, key = place
            holder, old = self.counted[place]
            if type(look(kind, holder, key)) is not int:
                self.before[place] = holder, old
                self.value_before(place, holder, old)
        for value, name, _ in self.late:
            held = dict_of(value)
            if is_of_trace(held.get(name)):
                self.before.setdefault(("key", id(held), name), (held, ABSENT))

    def unchanged(self, one: Snapshot) -> None:
        """Guard what a dict or set held before and holds still. Whether the function has put it
        there again is not known.
        """
        held, path = one.container, self.path(one.container, "a container")
        if is_a(held, set):
            self.answer(held.issuperset, (frozenset(one.before),), f"the content of {path}")
        if is_a(held, dict):
            before = {id(key): old for key, old in content_of(one.before)}
            for key, item in content_of(held):
                if before.get(id(key), ABSENT) is not item:
                    continue
                if is_a(item, torch.Tensor):
                    self.unwritten_tensor("key", held, key, f"{path}[{key!r}]")
                else:
                    self.edge("key", held, key, f"{path}[{key!r}]")

    def length(self, container: Any, beyond: int | None = None) -> None:
        """Guard the length of a list or deque outside, into which an index points, or that it goes
        beyond an index.
        """
        path = f"the length of {self.path(container, 'a list')}"
        first = self.contents[id(container)].before if id(container) in self.contents else container
        function: Any = length_of if beyond is None else is_longer
        more = () if beyond is None else (beyond,)
        ask = Question(function, (container, *more))
        place = "answer", id(function), (id(container), *more)
        self.edges.setdefault(place, Edge("answer", ask, None, function(first, *more), path))

    def unwritten(self) -> None:
        """Guard the places that the function may write to, and that hold still what they held. A
        jitted module sees to its own.
        """
        own = {id(vars(one)) for one, _ in self.outside.values() if id(one) in self.own}
        for place in self.added & self.before.keys():  # it is written in another way, too
            self.value_before(place, *self.before[place])
        counted = ((place, held) for place, held in self.counted.items() if held[1] is ABSENT)
        places = *self.before.items(), *counted, *self.any_items()
        for (kind, identity, key), (holder, old) in places:
            if kind == "content" or look(kind, holder, key) is not old:
                continue
            path = self.path(holder, "a place") + ("" if key is None else f"[{key!r}]")
            if is_a(old, torch.Tensor):
                self.unwritten_tensor(kind, holder, key, path)
            elif identity not in own:
                self.edge(kind, holder, key, path)
        for one in self.written_anywhere():
            if one.is_unchanged and is_a(one.container, SEQUENCES):
                self.length(one.container)

    def item_before(self, container: Any, index: int, value: Any) -> None:
        """Guard an item of a list or deque outside that held a value before."""
        self.value_before(("index", id(container), index), container, value)

    def value_before(self, place: tuple[str, int, Any], holder: Any, old: Any) -> None:
        """Guard a place by the value that it held before."""
        kind, _, key = place
        path = self.path(holder, "a place") + ("" if key is None else f"[{key!r}]")
        self.edges.setdefault(place, Edge(kind, holder, key, old, path))

    def any_items(self) -> Iterator[tuple[tuple[str, int, Any], tuple[Any, Any]]]:
        """The items of containers in which the function writes where nobody knows, with what they
        held before, as in `before`.
        """
        for one in self.written_anywhere():
            items, is_dict = content_of(one.before), is_a(one.before, dict)
            for key, item in items if is_dict else enumerate(items):
                place = "key" if is_dict else "index", id(one.container), key
                yield place, (one.container, item)

    def written_anywhere(self) -> Iterator[Snapshot]:
        """The containers with items in which the function writes where nobody knows: to a slice."""
        places = {**self.counted, **self.before}
        known = {identity for kind, identity, _ in places if kind in ("index", "key")}
        found = (self.contents.get(of) for kind, of, _ in places if kind == "content")
        for one in found:
            is_any = one is not None and id(one.container) not in known
            if one is not None and is_any and not is_a(one.before, set):
                yield one

    @property
    def own_dicts(self) -> dict[int, dict[str, Any]]:
        """The dicts of modules whose state is guarded elsewhere, by identity."""
        modules = [vars(one) for one, _ in self.outside.values() if id(one) in self.own]
        held = [one.get(name) for one in modules for name in ("_parameters", "_buffers")]
        return {id(one): one for one in (*modules, *held) if type(one) is dict}

    def unwritten_tensor(self, kind: str, holder: Any, key: Any, path: str) -> None:
        """Guard a place that may be written, and holds still the tensor that it held. Where it may
        have been put there again, that is guarded where it comes from, too.
        """
        tensor, own, entry = look(kind, holder, key), self.own_dicts, (id(holder), key)
        others = [
            (held, name, f"{path}, which is {name},")
            for held in own.values()
            for name, value in held.items()
            if value is tensor and (id(held), name) != entry
        ]
        is_elsewhere = bool(others) or any(
            edge.value is tensor and (id(edge.holder), edge.key) != entry
            for edge in self.edges.values()
        )
        if id(holder) in own and not is_elsewhere:
            return
        self.edge(kind, holder, key, path)
        for held, name, text in others:
            self.edge("key", held, name, text)
        kept = None if (recorder := current()) is None else recorder.kept
        if kept is not None and kept.fed.has_tensor(tensor):
            self.edges[kind, *entry].value = Changed(path)

    def writes_to(self, module: Any, name: str | None = None) -> None:
        """Watch a module from outside from now on, also if nobody calls it, and the attribute that
        is to be written or deleted, also if code of a library does it, such as `eval`.
        """
        recorder = current()
        if recorder is not None and self.is_outside(module):
            watching = hooks.pause()
            held = section_of(vars(module), name or "")
            place = "key", id(held), name
            if name is not None and place not in self.before:
                self.counted.setdefault(place, (held, held.get(name, ABSENT)))
            recorder.modules.watch(module, self.path(module, type(module).__name__))
            hooks.resume(watching)

    def called_custom_op(self, op: Op) -> None:
        """Guard the definition of a custom op."""
        self.edge("key", *ops.packet_place(op), f"torch.ops.{op}", is_by_value=True)

    def called_library(self, module: str, name: str) -> None:
        """Note a call of a library that a trace does not repeat."""
        if self.aside is None and not is_collecting() and is_stateful(module, name):
            self.effects.found.append(f"{module}.{name}")

    @property
    def is_repeatable(self) -> bool:
        """Test whether the function did nothing that its trace would not do, as far as is known:
        no effect, no change of an object from outside, no read that cannot be guarded.
        """
        effects, changed = self.effects.found, self.effects.changed
        found = effects, self.drawn, self.arrays, self.constants, self.states
        is_pure = not any(found) and not any(map(self.is_outside, changed))
        places = {**self.counted, **self.before}
        is_same = all(one.is_unchanged for one in self.contents.values())
        return is_pure and is_same and all(self.is_unwritten(*one) for one in places.items())

    def is_unwritten(self, place: tuple[str, int, Any], held: tuple[Any, Any]) -> bool:
        """Test whether a place that the code may write to holds what it held. That it does is
        guarded, so that a trace need not write it.
        """
        (kind, identity, key), (holder, old) = place, held
        if kind == "content":
            return identity in self.contents  # with all that it held
        now = look(kind, holder, key)
        if now is not old and is_a(old, (*PLAIN, tuple)) and seen(now) == seen(old):
            self.edge(kind, holder, key, f"{self.path(holder, 'a place')}[{key!r}]")
            return True
        return now is old

    def put_back(self) -> None:
        """Give places outside what they held before. What held numbers or tensors of the trace when
        it was met is an object of PyTorch's that the capture itself gives back, or new.
        """
        self.first_moment()

    def moment(self) -> Moment:
        """Note what places outside hold now: a function that is traced again begins as it did."""
        return self.first_moment.now()

    def was_outside(self, value: Any) -> bool:
        """Test for an object that was outside before the function ran: one that the function made
        may be met where it has been stored.
        """
        return not self.is_made(value) and id(value) not in self.put_outside

    @property
    def put_outside(self) -> Container[int]:
        """The objects that are in places outside now and were in none before, by identity."""
        if self.is_put is not None and not self.stack:
            return self.is_put
        places = ((look(*_place(at, held)), held[1]) for at, held in self.before.items())
        changed = (one for one in self.contents.values() if not one.is_unchanged)
        held = [([now], [old]) for now, old in places if now is not old]
        held += [(parts_in(one.container), parts_in(one.before)) for one in changed]
        held += [([*now.values()], [*old.values()]) for now, old in self.dicts.values()]
        new = {id(item) for now, _ in held for item in now}
        old = {id(item) for _, before in held for item in before}
        if new := new - old:
            unchanged = (one.before for one in self.contents.values() if one.is_unchanged)
            new -= {id(item) for before in unchanged for item in parts_in(before)}
            known = self.contents.keys() | self.dicts.keys()
            new -= {id(one.value) for one in self.edges.values() if id(one.holder) not in known}
            new -= set(map(id, values_read()))
        self.is_put = new
        return new

    # ---- the end ----

    def gives_itself(self, value: Any) -> None:
        """Note a part of the result that is the very object from outside."""
        if is_a(value, tuple):
            self.itself.add(id(value))

    def compare_exactly(self) -> None:
        """Compare tuples by identity that are in the result, or lead to what may be changed."""
        of_tuples = (one for one in self.edges.values() if is_a(one.holder, tuple))
        changeable = (*HOLDERS, *ARRAYS)
        self.itself |= {id(one.holder) for one in of_tuples if is_a(one.value, changeable)}
        waiting = [one for one in self.edges.values() if is_a(one.value, tuple)]
        while found := [one for one in waiting if id(one.value) in self.itself]:
            for one in found:
                one.is_exact = True
                self.itself.add(id(one.holder))
            waiting = [one for one in waiting if not one.is_exact]

    def gives(self, nodes: Sequence[Any]) -> None:
        """Cross the edges to all that objects from outside hold, which are nodes of the result."""
        for node in filter(self.is_outside, nodes):
            path = self.path(node, "out")
            if is_a(node, CONTAINERS):
                self.content(node, path)
            elif not is_a(node, NO_FIELDS):
                for name in fields_of(node) or {}:
                    inner = f"{path}.{escaped(name)}"
                    self.reach(self.edge("attr", node, name, inner), inner)

    def finish(self) -> None:
        """Look for the functions of frames whose cells no known path led to. Forget everything
        but the findings.

        Raises:
            UnsupportedCall: it reads a place in which a body of it leaves another value in each
                run.
        """
        self.find_late()
        self.compare_exactly()
        for place, (_, error) in self.unsettled.items():
            if place in self.edges or ("content", place[1], None) in self.edges:
                raise error
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
        self.built.clear()

    def knows(self, place: tuple[str, int, Any], holder: Any) -> bool:
        """Test for a place outside of the function, which it has reached."""
        is_place = place in self.before or place in self.counted or place in self.edges
        return is_place or place[1] in self.contents or self.is_outside(holder)

    def find_late(self) -> None:
        """Cross the edges that are known at the end alone."""
        for frame in self.stack:  # whose end nobody has seen
            self.settle(frame)
        for value, name, path in self.late:
            self.own_attribute(value, name, path)
        for of_tensors in (one.holder for one in self.edges.values()):
            if is_a(of_tensors, OfTensors):
                of_tensors.extend(self.attributes_of_tensors())
        if self.unknown:
            self.find_attributes(self.unknown)
        for name in self.missing - sys.modules.copy().keys():
            self.edge("key", sys.modules, name, f"the module {name}")

    def find_attributes(self, names: Set[Any]) -> None:
        """Cross the edges to attributes that were read of values that are not known: of tensors in
        modules, and of all objects and classes of the user's that have them.
        """
        for held in self.attributes_of_tensors():
            for name in held.keys() & names:
                self.edge("key", held, name, f"the attribute {escaped(name)} of a tensor")
        reached = tuple(self.outside.values())
        for value, path in reached:
            is_users = type(value) is types.SimpleNamespace or self.is_open(type(value))
            has_none = not is_users or is_a(value, NO_FIELDS) or is_code(value)
            fields: dict[str, Any] = {} if has_none else fields_of(value) or {}
            for name in names & fields.keys():
                if not is_a(fields[name], torch.Tensor):
                    self.attribute_of_object(value, name, f"{path}.{escaped(name)}")
        of_objects = (value if is_a(value, type) else type(value) for value, _ in reached)
        for cls in filter(self.is_open, {*of_objects, *self.classes.values()}):
            for name in names & {name for base in cls.__mro__[:-1] for name in base.__dict__}:
                self.edge("class", cls, name, f"{cls.__name__}.{escaped(name)}")

    def answered(self, function: Any, path: str, kept: dict[Any, Any], before: Any) -> None:
        """Guard the answers that a cached function has, if it was called."""
        info, (hits, misses, known) = function.cache_info(), before
        if (info.hits, info.misses) == (hits, misses):
            return
        if info.hits > hits and not known <= kept.keys():
            forgotten = Constant(f"an answer that {path} forgot", *place_of(function.__wrapped__))
            self.constants.setdefault(forgotten.text, forgotten)
        if len(kept) > MAX_ANSWERS:
            constant = Constant(f"one of many answers of {path}", *place_of(function.__wrapped__))
            self.constants.setdefault(constant.text, constant)
            return
        if info.maxsize is None:
            for key in tuple(kept):
                self.edge("key", kept, key, f"the cached answer of {path}")
        else:
            ask = Question(has_answers, (function, kept, dict(entries_of(function, kept))))
            self.ask(("answer", id(function), None), ask, f"the cached answers of {path}")
        for answer in answers_of(function, kept):
            self.content(answer, f"a cached answer of {path}")

    def has_values_in_cells(self, frame: Frame) -> bool:
        """Test whether some free variable is bound to plain data or to an outside value: a cell
        that somebody may bind anew.
        """
        given = (frame.locals[0].get(name) for name in frame.code.co_freevars)
        return any(not is_a(value, (torch.Tensor, type(None), *FUNCTIONS)) for value in given)


def _place(at: tuple[str, int, Any], held: tuple[Any, Any]) -> tuple[str, Any, Any]:
    """The kind, holder and key of a place in `before`."""
    return at[0], held[0], at[2]


def has_symbols(key: Any) -> bool:
    """Test whether a key is, or holds, symbolic numbers."""
    parts = key if is_a(key, (tuple, frozenset)) else ()
    return is_a(key, SYMBOLIC) or any(map(has_symbols, parts))
