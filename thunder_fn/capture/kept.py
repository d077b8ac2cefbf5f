"""Objects of PyTorch from outside that keep state in Python: optimizers and gradient scalers.

A traced step runs the object's own code. It is watched from its first use in a capture. Afterwards
it holds again what it held before, and every change is an `Effect`: an entry of a dict or list with
its new value, which the program's epilogue stores in each call. A number that the function changes,
or that a schedule changes between calls, is a `Feed`: an input of the trace that the program reads
from its place in each call. Tensors are closed over and changed in place, as any others.

Of other objects, dicts, lists and cells from outside only the places count to which the function
writes tensors (`Kept.stored`) or plain data (`Kept.updated`, `Kept.stored_plainly`). One with a
tensor that it also reads is a `Feed`. Plain data that it reads is guarded elsewhere.

`KeptState` holds everything else that the trace depends on. A program is guarded by it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import operator
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.comparisons import PLAIN, entries_of, has_keys_of, is_like, is_numeric
from thunder_fn.capture.kept_state import KeptState
from thunder_fn.capture.made import is_made_anew, made_anew
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import PLACES, look, store
from thunder_fn.capture.outside.effects import APPEND, PREPEND
from thunder_fn.capture.outside.kinds import is_lasting
from thunder_fn.capture.outside.reads import (
    ABSENT,
    HOLDERS,
    SEQUENCES,
    Changed,
    builtin_of,
    content_of,
    is_a,
)
from thunder_fn.capture.places import (
    APPENDED,
    PREPENDED,
    Change,
    Effect,
    Entry,
    Feed,
    Item,
    Part,
    Path,
    Snapshot,
    Stays,
    Step,
    Update,
    held_at,
    put,
    snapshot,
)
from thunder_fn.capture.renewed import Parts, parts_of, state_in
from thunder_fn.capture.stored import (
    alive,
    changed,
    has_tracers,
    holds_numbers,
    in_order,
    indices_written,
    leaves_in,
    reaches_tracer,
    stored_in,
    stored_outside,
    take_back,
    with_objects,
)
from thunder_fn.capture.unread import Unread
from thunder_fn.errors import UnsupportedCall, kind_of, with_article
from thunder_fn.ir.rules import chosen
from thunder_fn.ir.symbols import number_symbol
from thunder_fn.ir.trace import Expr, as_dim

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = (*_DICTS, list, collections.deque)
_FIXED = (*PLAIN, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_VALUES = (numpy.generic, range, slice, Stays)
"""Types of plain values in addition to those of `PLAIN`."""
_SCHEDULED = ("lr", "last_epoch", "_step_count", "_last_lr")
"""Entries that are numbers of the trace from the first call on: options of a parameter group, and
counts of a scheduler.
"""
KINDS: tuple[type, ...] = (
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
"""Classes whose objects are kept."""
_FIRST = 1000
"""The number of the first symbol of a feed. Those of arguments come before."""


class MustFeed(BaseException):
    """Signal that a capture has to begin again, with the numbers of these places as inputs."""

    def __init__(self, places: frozenset[Entry]) -> None:
        super().__init__(places)
        self.found = {"places": places}


# ---- while a function is traced ----


@dataclass(slots=True, eq=False)
class Kept:
    """The kept objects of one capture.

    Args:
        wanted: places whose numbers have to be fed, from a capture before this one.
        met: the objects that the function can reach, from captures before this one.
        places: places of other objects that it reads and writes tensors to, from such captures.
    """

    recorder: Recorder
    wanted: frozenset[Entry] = frozenset()
    objects: dict[int, tuple[Any, str]] = field(default_factory=dict)
    contents: dict[int, Snapshot] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    given: dict[Entry, Any] = field(default_factory=dict)
    met: dict[int, tuple[Any, str]] = field(default_factory=dict)
    places: dict[Entry, tuple[Any, Any]] = field(default_factory=dict)
    placed: dict[Entry, Any] = field(default_factory=dict[Entry, Any])
    """Their values before the capture, for which symbols may stand now."""
    states: dict[Entry, Parts] = field(default_factory=dict[Entry, Parts])
    """The containers of tensors in such places."""
    exact: list[Snapshot] = field(default_factory=list[Snapshot])
    """Containers, with the content that they have to have before each call."""
    lists: dict[Entry, Any] = field(default_factory=dict)
    tensors: list[tuple[Feed, torch.Tensor]] = field(default_factory=list)
    items: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    counts: dict[int, Any] = field(default_factory=dict)
    skips: list[tuple[set[int], torch.Tensor]] = field(default_factory=list)
    returned: set[int] = field(default_factory=set[int])
    """The containers from outside that are in the result, by identity."""
    renewed: list[tuple[dict[str, Any], str]] = field(default_factory=list[Any])
    """The attributes of a jitted module that the function reads, and in which it puts containers of
    tensors.
    """
    updates: list[tuple[Update, Any]] = field(default_factory=list[tuple[Update, Any]])
    """Updates of places outside by each call, and their values before."""
    plain: list[Change] = field(default_factory=list[Change])
    """Plain data that each call stores outside."""
    is_over: bool = False

    def begin(self, value: Any, *, is_step: bool = True) -> None:
        """Begin a step of an optimizer, or a method that leaves its state alone. What they read is
        guarded here.
        """
        self.met.setdefault(id(value), (value, type(value).__name__))
        if not self.recorder.symbolic:
            raise MustFeed(self.wanted)
        self.take(*self.met[id(value)])
        if is_step:
            self._look(vars(value))
        self.recorder.begin_step()

    def take(self, value: Any, path: str) -> None:
        """Watch an object from now on, until the function has run."""
        if id(value) in self.objects or self.is_over:
            return
        self.objects[id(value)] = value, path
        known, held = len(self.contents), vars(value)
        state = held.get("state")
        if isinstance(value, torch.optim.Optimizer) and type(state) in _DICTS:
            self.contents[id(held)] = snapshot(held)
            held["state"] = Unread(state, partial(self._look, held))
            for key, item in tuple(entries_of(held)):
                self._note_entry(held, key, item)
        else:
            self._note(held)
        self._feed_since(known, held.get("defaults"))

    def _look(self, held: dict[str, Any]) -> dict[Any, Any]:
        """Return the state of an optimizer, on which the trace depends from now on."""
        if type(held["state"]) is Unread:
            if not self.recorder.symbolic:
                raise MustFeed(self.wanted)
            state, known = self.contents[id(held)].before["state"], len(self.contents)
            held["state"] = state
            self._note(state)
            self._feed_since(known, None)
        return held["state"]

    def _feed_since(self, known: int, defaults: Any) -> None:
        """Make inputs of the wanted numbers in all containers but those known before."""
        if not self.recorder.symbolic:
            return
        for one in tuple(self.contents.values())[known:]:
            container = one.container
            for key, item in entries_of(one.before):
                is_lr = key in _SCHEDULED and container is not defaults
                if is_lr or (id(container), key) in self.wanted:
                    self._feed(container, key, item)
                if (id(container), Item(key)) in self.wanted and _is_scalar(item):
                    self._feed_item(container, key, item)

    def meet(self, value: Any, path: str) -> None:
        """Watch an object that the function can reach. Its first step asks for symbols."""
        if issubclass(type(value), KINDS):
            self.met[id(value)] = value, path
            self.take(value, path)

    def take_all(self) -> None:
        """Watch the objects that an earlier capture of the function has met."""
        for value, path in tuple(self.met.values()):
            self.take(value, path)
        for place, (holder, key) in self.places.items():
            self.placed[place] = value = held_at(holder, key)
            self._feed(holder, key, value)

    def _note(self, container: Any) -> None:
        """Remember the content of a container, and of those in it."""
        if id(container) in self.contents:
            return
        self.contents[id(container)] = snapshot(container)
        for key, item in tuple(entries_of(container)):
            self._note_entry(container, key, item)

    def _note_entry(self, container: Any, key: Any, item: Any) -> None:
        if type(item) is list and is_numeric(item):  # a value, which is replaced by others
            self.lists[id(container), key] = item
            self.contents[id(container)].before[key] = list(item)
            container[key] = list(item)
        elif type(item) in _CONTAINERS:
            self._note(item)

    def _feed(self, container: Any, key: Any, value: Any) -> None:
        """Make a number, or the numbers of a tuple, inputs of the trace."""
        place = id(container), key
        if isinstance(value, torch.Tensor) and not self.feeds_tensor(value):
            self.tensors.append((Feed(container, key), value))
            self.given[place] = value
        state = state_in(value)
        if state is not None and not any(map(self.feeds_tensor, state.tensors.values())):
            parts = state.tensors.items()
            self.tensors += [(Feed(container, key, path=path), item) for path, item in parts]
            self._feed_state(container, key, state)
        if type(value) in (tuple, list) and all(map(is_number, value)):
            parts = enumerate(value)
            kind: Any = type(value)
            symbols = kind(self._symbol(container, key, (Step(i),), part) for i, part in parts)
            self.given[place] = kind(symbols)
            put(container, key, symbols)
        elif is_number(value):
            self.given[place] = symbol = self._symbol(container, key, (), value)
            put(container, key, symbol)

    def _feed_state(self, container: Any, key: Any, state: Parts) -> None:
        """Note a container whose parts are inputs of the trace. One with numbers that are, too, is
        another one while the function runs.
        """
        place, parts = (id(container), key), state.leaves.items()
        numbers = {
            path: self._symbol(container, key, path, leaf)
            for path, leaf in parts
            if (id(container), Part(key, path)) in self.wanted
        }
        if numbers:
            put(container, key, state.with_numbers(numbers))
        self.given[place] = held_at(container, key)
        self.states[place] = parts_of(self.given[place])

    def feeds_tensor(self, value: Any) -> bool:
        """Test whether a tensor is an input of the trace, read from its place in each call."""
        return any(tensor is value for _, tensor in self.tensors)

    def _symbol(
        self, container: Any, key: Any, path: Path, value: Any, *, is_item: bool = False
    ) -> Any:
        symbol = number_symbol(_FIRST + len(self.feeds), value)
        self.feeds.append(Feed(container, key, symbol, path, is_item))
        return self.recorder.number(Expr(symbol))

    def _feed_item(self, container: Any, key: Any, tensor: torch.Tensor) -> None:
        """Make the number in a tensor an input of the trace."""
        with internals.isolated(), internals.no_torch_function():
            number = tensor.item()
        if is_number(number):
            symbol = self._symbol(container, key, (), number, is_item=True)
            self.items[id(tensor)] = tensor, symbol

    def item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor that was there before the call, if it is fed; else None."""
        known = self.items.get(id(tensor))
        return None if known is None else known[1]

    def ask_for_items(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin again with the numbers in these tensors as inputs, and those under the same keys
        elsewhere, if kept objects hold all of them.

        Python asks for such numbers to decide how to go on, as steps of RAdam do.
        """
        held = [
            (one.container, key, item)
            for one in self.contents.values()
            for key, item in entries_of(one.before)
            if _is_scalar(item)
        ]
        keys = {id(item): key for _, key, item in held}
        if not tensors or not all(id(tensor) in keys for tensor in tensors):
            return
        wanted = {keys[id(tensor)] for tensor in tensors}
        places = {(id(container), Item(key)) for container, key, _ in held if key in wanted}
        if not places <= self.wanted:
            raise MustFeed(self.wanted | places)

    def changes(self) -> Iterator[Change]:
        """The entries of kept objects that hold other values than before."""
        held = [one for value, _ in self.objects.values() for one in _containers(vars(value))]
        reachable = set(map(id, held))
        for one in self.contents.values():
            if id(one.container) in reachable:
                yield from filter(self._differs, _entries_compared(one))

    def _differs(self, change: Change) -> bool:
        if type(change.now) is Unread:
            return False
        if change.key is None or change.now is ABSENT:
            return True
        fed, now = self.given.get(change.entry, change.before), change.now
        if type(fed) in _DICTS and type(now) is type(fed) and not now:
            return bool(self.contents[id(fed)].before)  # an empty dict for one that was empty
        return not is_like(fed, now)

    def effects(self) -> list[tuple[Effect | Update, list[Any]]]:
        """The changes, each with the tensors and symbolic numbers in it.

        Raises:
            MustFeed: a number was changed that is not fed, so that the trace has its value.
            UnsupportedCall: a value is neither a tensor nor plain.
        """
        found = list(self.changes())
        moving = [one.entry for one in found if self._is_moving(one)]
        if moving or (not self.recorder.symbolic and (found or self._is_touched())):
            raise MustFeed(self.wanted | frozenset(moving))
        found += [*self.moved_tensors(), *self._renumbered()]
        self.plain = list(self.stored_plainly())
        _check_keys([*found, *self.plain])
        whole = {id(one.holder) for one in (*found, *self.plain) if one.key is None}
        updates = [pair for pair in self.updated() if id(pair[0].holder) not in whole]
        self.updates = [(one, old) for one, old in updates if not self._holds_given(one.value)]
        given = [(one, old) for one, old in updates if self._holds_given(one.value)]
        self.plain += [Change(one.holder, one.key, old, one.value) for one, old in given]
        self._check_unstorable()
        changes = [self._effect(one) for one in in_order([*found, *self.plain])]
        return [*changes, *((one, list[Any]()) for one, _ in self.updates)]

    def _is_touched(self) -> bool:
        """Test for a method that changes containers, even one that found nothing to change."""
        watch = frames.observer()
        return watch is not None and not self.contents.keys().isdisjoint(watch.changing)

    def updated(self) -> Iterator[tuple[Update, Any]]:
        """Find the integers outside of kept objects to which the function has added, and the items
        of lists, slots, and attributes of classes in which it has stored plain data.
        """
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None:
            return
        for place in watch.added - watch.before.keys():  # else its old value counts
            kind, identity, key = place
            holder, old = watch.counted[place]
            now = look(kind, holder, key)
            if identity not in self.contents and type(now) is int and now != old:
                yield Update(kind, holder, key, now - old, is_added=True), old
        for (kind, identity, key), (holder, old) in watch.before.items():
            if kind not in ("attr", "class", "index") or identity in self.contents:
                continue
            now = look(kind, holder, key)
            is_there = now is not ABSENT and old is not ABSENT
            fed = self.given.get((identity, key), old)
            is_new = now is not fed and (is_there or kind != "index")
            is_new = is_new and (not is_a(now, HOLDERS) or self._was_there(now))  # not made anew
            if is_new and (now is ABSENT or self._is_storable(now)):
                yield Update(kind, holder, key, now, is_anew=is_made_anew(now)), old

    def moved_tensors(self) -> list[Change]:
        """The places of other objects that the function writes tensors to.

        Raises:
            MustFeed: it reads the tensor that was there, which is another one in the next call.
            UnsupportedCall: some items of a list are new, and others are not.
        """
        found, before, wanted = list(self.stored()), len(self.places), set[Entry]()
        used = {id(tensor) for tensor, _, _ in self.recorder.lifted()}
        watch = frames.observer()
        if watch is not None and self.recorder.outer is None:
            _check_slots(watch.before, watch.is_made)
        reached = self._anywhere() if found else {}
        self.exact += self._read_as_a_whole(found, reached)
        whole = {id(one.container) for one in self.exact}
        for place, one in enumerate(found):
            holder, key, old, now = one.holder, one.key, one.before, one.now
            is_whole = key is None and not isinstance(holder, types.CellType)
            if is_whole and any(a is b for a in old for b in now):
                found[place] = self._moved_items(one)
            if is_a(holder, SEQUENCES) and isinstance(key, int):
                _check_item(one)
            is_read = one.is_read or (watch and ("key", *one.entry) in watch.edges)
            state = self._renewed(one, reached)
            parts = [old] if state is None else [*state.tensors.values()]
            within = set[int]() if state is None else state.within | parts_of(now).within
            is_read = is_read or not used.isdisjoint(map(id, parts))
            is_fed = state is not None or (isinstance(now, torch.Tensor) and _is_plain(old))
            if (
                is_read
                and is_fed
                and id(holder) not in whole
                and not any(_is_elsewhere(id(part), one.entry, reached, within) for part in parts)
            ):
                self.places.setdefault(one.entry, (holder, key))
                wanted |= self._numbers_wanted(one, state)
            if key in (APPENDED, PREPENDED) and not old:  # it may be emptied before
                self.exact.append(Snapshot(holder, []))
        self.places.update(self._wanted_elsewhere())
        if len(self.places) > before or wanted:
            raise MustFeed(self.wanted | wanted)
        for held, name in self.renewed:
            if watch is not None and (id(held), name) not in self.places:
                watch.value_before(("key", id(held), name), held, Changed(name))
        return found

    def _numbers_wanted(self, one: Change, state: Parts | None) -> set[Entry]:
        """The numbers in a container of tensors that the function changes, and that are not fed."""
        if state is None:
            return set()
        paths = state.numbers_changed(parts_of(one.now))
        return {(id(one.holder), Part(one.key, path)) for path in paths} - self.wanted

    def _read_as_a_whole(
        self, found: Sequence[Change], reached: Mapping[int, set[Entry]]
    ) -> Iterator[Snapshot]:
        """Find the containers of tensors and plain data of which the function may read any item,
        and in which it replaces tensors. They are guarded by their keys, or length, and by what
        they hold, but for the tensors, which are fed.
        """
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None:
            return
        for identity, holder in {id(one.holder): one.holder for one in found}.items():
            one = watch.contents.get(identity)
            keys = [change.key for change in found if change.holder is holder]
            if one is None or not _has_same_keys(one) or not _is_any_read(one, keys):
                continue
            items = dict(entries_of(one.before))
            counts = Counter(map(id, items.values()))
            for key, item in items.items():
                is_here = all(of == identity for of, _ in reached.get(id(item), ()))
                if _is_plain(item) and is_here and counts[id(item)] == 1:
                    self.places.setdefault((identity, key), (holder, key))
            yield one

    def _moved_items(self, one: Change) -> Change:
        """The change of a list in which items stay and tensors are new, with the indices under
        which these items were before. One that the function reads is fed, or guarded.

        Raises:
            UnsupportedCall: an item may be what the function has found elsewhere.
        """
        holder, old, watch = one.holder, content_of(one.before), frames.observer()
        if watch is None or not is_a(holder, SEQUENCES):
            raise _between_items(holder)
        watch.length(holder)
        used = {id(tensor) for tensor, _, _ in self.recorder.lifted()}
        others = [edge.value for edge in watch.edges.values() if edge.holder is not holder]
        found = {
            *map(id, others),
            *(one for one, of in self._anywhere().items() if any(i != id(holder) for i, _ in of)),
        }
        is_read = any(kind == "index" and of == id(holder) for kind, of, _ in watch.edges)
        indices: dict[int, int] = {}
        for index, item in enumerate(old):
            is_plain = type(item) in PLAIN
            count = sum(other is item for other in one.now)
            if not is_plain and (count > 1 or id(item) in indices or id(item) in found):
                raise _between_items(holder)
            if not is_plain:
                indices[id(item)] = index
            if id(item) in used and _is_plain(item):
                self.places.setdefault((id(holder), index), (holder, index))
            elif is_plain or is_read or id(item) in used:
                watch.item_before(holder, index, item)
        now = [Stays(indices[id(item)]) if id(item) in indices else item for item in one.now]
        return dataclasses.replace(one, now=now)

    def _wanted_elsewhere(self) -> Iterator[tuple[Entry, tuple[Any, Any]]]:
        """Find the numbers outside of kept objects that the function changes, and that have to be
        fed.
        """
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None or not self.wanted:
            return
        for (kind, identity, key), (holder, old) in {**watch.counted, **watch.before}.items():
            place = identity, key
            is_other = identity in self.contents or (kind == "attr" and is_a(holder, HOLDERS))
            if kind in PLACES and place in self.wanted and is_numeric(old) and not is_other:
                yield place, (holder, key)

    def _renumbered(self) -> Iterator[Change]:
        """Find the fed numbers outside of kept objects that the function has changed."""
        for place, (holder, key) in self.places.items():
            old, now = self.given.get(place), held_at(holder, key)
            is_other = holds_numbers(now) and not has_tracers(now) and not is_like(old, now)
            if not isinstance(old, torch.Tensor) and is_other:
                yield Change(holder, key, old, now)

    def _renewed(self, one: Change, reached: Mapping[int, set[Entry]]) -> Parts | None:
        """Take a container of tensors apart, if the function puts another one of the same form in
        its place, and neither changes it nor stores it elsewhere.
        """
        old, watch = state_in(one.before), frames.observer()
        if old is None or watch is None or not old.becomes(parts_of(one.now)):
            return None
        if not (own := old.changeable):
            return old
        written = {identity for _, identity, _ in (*watch.before, *watch.counted)}
        is_changed = not own.isdisjoint(written | watch.changing.keys())
        now = [
            look(kind, holder, key) if kind in PLACES else holder
            for (kind, _, key), (holder, _) in watch.before.items()
        ]
        now += [one.container for one in changed(watch.contents.values())]
        now += self.recorder.modules.given()
        is_stored = any(
            not (parts.is_whole and own.isdisjoint(parts.changeable))
            for parts in map(parts_of, now)
        )
        is_elsewhere = any(_is_elsewhere(part, one.entry, reached, old.within) for part in own)
        is_kept = is_changed or is_stored or is_elsewhere or not own.isdisjoint(self.returned)
        return None if is_kept else old

    def _reached(self) -> dict[int, set[Entry]]:
        """Find the values in places that the function has reached, by identity, each with its
        places. The key is None where the whole content of a container counts.
        """
        watch, found = frames.observer(), dict[int, set[Entry]]()
        for one in () if watch is None else watch.edges.values():
            values: Iterable[Any] = (one.value,)
            if watch is not None and one.kind == "content":
                known = watch.contents.get(id(one.holder))
                held = one.holder if known is None else known.before
                values = *leaves_in(held), *parts_of(held).containers[1:]
            elif is_a(one.value, tuple):
                values = *leaves_in(one.value), *parts_of(one.value).containers
            for value in values:
                found.setdefault(id(value), set()).add((id(one.holder), one.key))
        return found

    def _anywhere(self) -> dict[int, set[Entry]]:
        """Find the values in places that the function has reached, or that modules hold."""
        found = self._reached()
        for holder, key, value in self.recorder.modules.places():
            found.setdefault(id(value), set()).add((id(holder), key))
        return found

    def stored(self) -> Iterator[Change]:
        """Find tensors of the trace in places outside of kept objects."""
        if self.recorder.outer is None:
            yield from stored_outside(self.recorder, self.contents)

    def stored_plainly(self) -> Iterator[Change]:
        """Find plain data that the function has stored outside of kept objects: entries, and what
        it has put at an end of a list. What it has added to is found elsewhere.
        """
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None:
            return
        done = {(identity, key) for _, identity, key in watch.added}
        items = {identity for kind, identity, _ in (*watch.added, *watch.before) if kind == "index"}
        for (kind, identity, key), (holder, old) in watch.before.items():
            now = look(kind, holder, key)
            is_place = kind in ("key", "cell") and identity not in self.contents
            is_place = is_place and not has_tracers(old)  # as in `functional_call`: not from before
            is_new = now is not self.given.get((identity, key), old)
            if is_place and is_new and (now is ABSENT or self._is_storable(now)):
                done.add((identity, key))
                yield Change(holder, key, old, now)
        for one in self.recorder.modules.replaced:
            if one.now is ABSENT or self._is_storable(one.now):
                yield one
        for one in watch.contents.values():
            by = watch.changing.get(id(one.container), set[str]())
            is_old = one.is_unchanged and by <= APPEND
            if (
                is_old
                or id(one.container) in self.contents
                or (not by and id(one.container) in items and _is_by_index(one))
            ):
                continue
            for change in _plain_changes(one, by):
                if self._is_storable(change.now) and change.entry not in done:
                    yield change
                    self.exact += [one] if change.key is None else []

    def _check_unstorable(self) -> None:
        """Look for objects of the function's own in places, which a program cannot make anew. Let
        no later call use the trace if the function has read the place.

        Raises:
            UnsupportedCall: such an object leads to tensors of the trace.
        """
        if (watch := frames.observer()) is None:
            return
        for place, (holder, old) in watch.before.items():
            now = look(place[0], holder, place[2])
            if place[0] not in PLACES or now is old or now is ABSENT or has_tracers(now):
                continue
            self._check_reach(holder, place[2], now)
            if place in watch.edges and not self._is_storable(now):
                watch.edges[place].value = Changed(str(place[2]))
        for one in changed(watch.contents.values()):
            known = {id(item) for _, item in entries_of(one.before)}
            for key, item in (
                entries_of(one.container) if id(one.container) not in self.contents else ()
            ):
                if id(item) not in known and not has_tracers(item):
                    self._check_reach(one.container, key, item)

    def _check_reach(self, holder: Any, key: Any, value: Any) -> None:
        """Refuse an object that leads to tensors of the trace, as a function that closes over
        them.
        """
        is_plain = type(value) in PLAIN or is_a(value, torch.Tensor)
        if not is_plain and not self._was_there(value) and reaches_tracer(value):
            raise self._refused(holder, key, value)

    def _is_moving(self, change: Change) -> bool:
        """Test for a number or tensor of a kept object that may be another one in each call."""
        if change.key is None or change.entry in self.given or change.entry in self.wanted:
            return False
        if isinstance(change.now, torch.Tensor):
            return isinstance(change.before, torch.Tensor)
        return is_numeric(change.before) and is_numeric(change.now)

    def _effect(self, change: Change) -> tuple[Effect, list[Any]]:
        holder, key, value = change.holder, change.key, change.now
        if value is ABSENT:
            return self._conditional(Effect(holder, key, None), [])
        value = with_objects(value, self._was_there)
        leaves, spec = pytree.flatten_but(value, self._was_there)
        leaves = [*map(alive, leaves)]
        dims = [leaf if isinstance(leaf, torch.Tensor) else as_dim(leaf) for leaf in leaves]
        flags = tuple(
            (isinstance(leaf, torch.Tensor) and not self._is_fixed(leaf)) or isinstance(leaf, Expr)
            for leaf in dims
        )
        for leaf, flag in zip(dims, flags, strict=True):
            is_fixed = isinstance(leaf, (torch.Tensor, *_FIXED)) or self._is_storable(leaf)
            if not flag and not is_fixed and not self.is_old(leaf):
                raise self._refused(holder, key, leaf)
            if is_fixed:
                self._check_reach(holder, key, leaf)
        outputs = list(chosen(leaves, flags))
        fixed = tuple(None if flag else leaf for leaf, flag in zip(dims, flags, strict=True))
        effect = Effect(holder, key, spec, fixed, flags, anew=made_anew(fixed))
        return self._conditional(effect, outputs)

    def _conditional(self, effect: Effect, outputs: list[Any]) -> tuple[Effect, list[Any]]:
        """Make an effect conditional if its step may be skipped: its first output says so."""
        skipped = next((one for ids, one in self.skips if id(effect.holder) in ids), None)
        if skipped is None:
            return effect, outputs
        return dataclasses.replace(effect, is_conditional=True), [skipped, *outputs]

    def skip(self, value: Any, skipped: torch.Tensor, step: Callable[[], Any]) -> Any:
        """Step an optimizer unless a tensor is true. If it is, all that the step changes keeps its
        old value.
        """
        self.take(value, type(value).__name__)
        self._look(vars(value))
        before = set(self.contents)
        mine = {id(container) for container in _containers(vars(value))}
        params = [one for group in value.param_groups for one in group["params"]]
        entries = (item for entry in value.state.values() for item in entry.values())
        held = [one for one in (*params, *entries) if isinstance(one, torch.Tensor)]
        with torch.no_grad():
            old = [one.detach().clone() for one in held]
            result = step()
            for one, last in zip(held, old, strict=True):
                one.copy_(torch.where(skipped, last, one))
        self.skips.append((mine & before, skipped))
        return result

    def _is_storable(self, value: Any) -> bool:
        """Test for what a program can store in each call: plain data, containers and objects of it
        that the function makes, and objects that were there before the call.
        """
        return self._was_there(value) or all(
            type(leaf) in PLAIN
            or is_a(leaf, _VALUES)
            or self._was_there(leaf)
            or is_made_anew(leaf)
            for leaf in leaves_in(value)
        )

    def _was_there(self, value: Any) -> bool:
        """Test for an object or tensor from outside, without anything of the trace in it."""
        if is_a(value, torch.Tensor):
            return not is_a(value, internals.Tracer) and self.recorder.is_from_outside(value)
        if has_tracers(value) or holds_numbers(value) or self._is_given(value):
            return False
        watch = frames.observer()
        if is_a(value, types.BuiltinFunctionType):
            return not reaches_tracer(value)
        return (watch is not None and watch.is_outside(value)) or is_lasting(value)

    def _is_given(self, value: Any) -> bool:
        """Test for a container that is another one in the next call: it was read from a place that
        is fed, or the function has made it of what is fed.
        """
        tensors = (leaf for leaf in leaves_in(value) if is_a(leaf, torch.Tensor))
        return self.is_fed(value) or any(map(self.feeds_tensor, tensors))

    def is_fed(self, value: Any) -> bool:
        """Test for a container that was read from a place that is fed."""
        return any(value is one for state in self.states.values() for one in state.containers)

    def _is_fixed(self, tensor: torch.Tensor) -> bool:
        """Test for a tensor from outside that is the same in each call of the program."""
        is_input = self.recorder.is_given(tensor) or self.feeds_tensor(tensor)
        return self.recorder.is_from_outside(tensor) and not is_input

    def _holds_given(self, value: Any) -> bool:
        """Test for a tensor in a value that may be another one in the next call."""
        tensors = (leaf for leaf in leaves_in(value) if is_a(leaf, torch.Tensor))
        return any(not self._is_fixed(one) for one in tensors)

    def is_old(self, value: Any) -> bool:
        """Test whether the value is a kept object, or some kept object held it before."""
        return id(value) in self.objects or any(
            value is item for one in self.contents.values() for _, item in entries_of(one.before)
        )

    def _refused(self, holder: Any, key: Any, value: Any) -> UnsupportedCall:
        owner = next((owner for owner, _ in self.objects.values()), None)
        who, fix = "the function", "Return it, and store it outside of the jitted function."
        if owner is not None:
            who = f"a step of {with_article(type(owner).__name__)} from outside"
            fix = "Call the step outside of the jitted function."
        where = f"under {key!r}" if type(key) in (str, int) else f"in {kind_of(holder)}"
        what = (
            f"{who} stores {kind_of(value)} {where}, which a program cannot make anew in each call"
        )
        return UnsupportedCall(what, source=None, fix=fix)

    def state(self) -> tuple[KeptState, ...]:
        """Return the guard of the objects: all that they held before, except the feeds."""
        is_whole = bool(self.objects) and self.recorder.symbolic
        modules = self.recorder.modules.stored
        if not (is_whole or self.places or self.exact or modules):
            return ()
        used = {id(tensor) for tensor, _, _ in self.recorder.lifted()}
        unread = (one for one in modules if one.is_read is False and id(one.before) not in used)
        free = {one.entry for one in unread}
        name = ", ".join(path for _, path in self.objects.values()) or "what it stores in Python"
        contents, fed = tuple(self.contents.values()) if is_whole else (), frozenset(self.given)
        contents += tuple(self.exact)
        tensors = tuple(feed for feed, _ in self.tensors)
        numbers = tuple(self.feeds)
        forms = {place: state.form() for place, state in self.states.items()}
        places = tuple(
            (*one, forms.get(place, self.placed[place])) for place, one in self.places.items()
        )
        options: dict[str, Any] = {"wanted": self.wanted, "tensors": tensors, "places": places}
        seen = *self.states.values(), *(parts_of(self.placed[place]) for place in self.states)
        within = options["within"] = frozenset[int]().union(*(one.within for one in seen))
        placed = self.places.keys() & {one.entry for one in modules}
        options["stored"] = frozenset(free | placed)
        if self.tensors:
            held = within.union(id(one.container) for one in self.exact)
            here = {id(tensor) for _, tensor in self.tensors}
            options["apart"] = frozenset(
                value
                for value, places in self._reached().items()
                if value not in here
                and any(one[0] not in held and one not in self.given for one in places)
            )
        return (KeptState(name, contents, fed, numbers, **options),)

    def restore(self) -> None:
        """Give the objects back all that they held before."""
        self.recorder.give_up_steps()
        for one, old in self.updates:
            store(one.kind, one.holder, one.key, old)
        for one in self.plain:
            take_back(one)
        for one in tuple(self.stored()):
            take_back(one)
        for (container, key), item in self.lists.items():
            self.contents[container].before[key] = item
        for one in self.contents.values():
            one.restore()
        for place, (holder, key) in self.places.items():
            if not isinstance(old := self.placed.get(place), torch.Tensor) and place in self.placed:
                put(holder, key, old)
        self.objects.clear()
        self.contents.clear()
        self.is_over = True


def _is_elsewhere(
    value: int, place: Entry, reached: Mapping[int, set[Entry]], within: Container[int]
) -> bool:
    """Test whether a value, by identity, can be reached in another way than by this place, and the
    containers `within` that were or are there.
    """
    return any(one != place and one[0] not in within for one in reached.get(value, ()))


def _containers(root: Any) -> Iterator[Any]:
    """A container and those in it."""
    yield root
    for _, item in entries_of(root):
        if type(item) in _CONTAINERS:
            yield from _containers(item)


def _entries_compared(one: Snapshot) -> Iterator[Change]:
    """The entries of a container as they were and are; all of a list at once, if its length
    differs.
    """
    now, before = one.container, one.before
    if isinstance(now, dict):
        for key, item in now.items():
            yield Change(now, key, before.get(key, ABSENT), item)
        yield from (Change(now, key, before[key], ABSENT) for key in before if key not in now)
    elif len(now) != len(before):
        yield Change(now, None, before, list(now))
    else:
        for key, (old, new) in enumerate(zip(before, now, strict=True)):
            yield Change(now, key, old, new)


def _plain_changes(one: Snapshot, by: set[str]) -> Iterator[Change]:
    """Find the entries of a dict that are others, or what these methods put at an end of a list.
    Of what is changed in other ways the whole content counts, before and after.
    """
    held, before = one.container, one.before
    if isinstance(held, dict) and by <= APPEND:
        was, is_now = ({id(key): item for key, item in content_of(one)} for one in (before, held))
        if was.keys() <= is_now.keys():
            pairs = ((key, was.get(id(key), ABSENT), now) for key, now in content_of(held))
            yield from (Change(held, key, old, now) for key, old, now in pairs if old is not now)
            return
    now, old = content_of(held), content_of(before)
    change, count = Change(held, None, old, now), len(now) - len(old)
    if by and by <= APPEND and not isinstance(held, dict):
        change = next((one for one in stored_in(one) if one.key is APPENDED), change)
    elif by and by <= PREPEND and count > 0 and all(map(operator.is_, old, now[count:])):
        change = Change(held, PREPENDED, old, now[:count])
    yield change


def _has_same_keys(one: Snapshot) -> bool:
    """Test for a container of tensors and plain data that was there before, and that has the keys
    that it had, or as many items.
    """
    now, before = one.container, one.before
    if type(now) not in _CONTAINERS or len(now) != len(before) or has_tracers(before):
        return False
    if isinstance(now, dict) and not has_keys_of(now, before):
        return False
    items = (item for _, item in entries_of(before))
    return all(type(item) in PLAIN or is_a(item, torch.Tensor) for item in items)


def _is_any_read(one: Snapshot, changed: Sequence[Any]) -> bool:
    """Test whether the function reads a container as a whole, or items of a list that move, or that
    it counts from the end.
    """
    if (watch := frames.observer()) is None:
        return False
    if ("content", id(one.container), None) in watch.edges:
        return True
    read = [key for kind, of, key in watch.edges if kind == "index" and of == id(one.container)]
    known = {id(item): key for key, item in entries_of(one.before)}
    has_moved = any(known.get(id(item), key) != key for key, item in entries_of(one.container))
    is_whole = not all(isinstance(key, int) for key in changed)
    return bool(read) and (has_moved or is_whole or min(read) < 0)


def _is_by_index(one: Snapshot) -> bool:
    """Test whether a list holds others only under indices to which the function writes."""
    now, old = content_of(one.container), content_of(one.before)
    known = {key % len(now) for key in indices_written(one.container) if now}
    places = (place for place, (a, b) in enumerate(zip(old, now, strict=False)) if a is not b)
    return len(now) == len(old) and known.issuperset(places)


def _check_slots(
    before: Mapping[tuple[str, int, Any], tuple[Any, Any]], is_made: Callable[[Any], bool]
) -> None:
    """Refuse a tensor of the trace in a slot of an object from outside, or in a class. It gets its
    old value back.
    """
    for (kind, _, key), (holder, old) in tuple(before.items()):
        is_place = kind in ("attr", "class") and not is_made(holder)
        if not is_place or not has_tracers(look(kind, holder, key)):
            continue
        (delattr(holder, key) if old is ABSENT else setattr(holder, key, old))
        of, what = (holder, "an attribute") if kind == "class" else (type(holder), "a slot")
        raise UnsupportedCall(
            f"the function stores a tensor in `{of.__name__}.{key}`, {what} from outside",
            source=None,
            fix="Return it, and store it outside of the jitted function.",
        )


def _check_keys(changes: Sequence[Change]) -> None:
    """Refuse an entry under a tensor of the trace, which is another tensor in each call."""
    for one in changes:
        if internals.is_tracer(one.key):
            raise UnsupportedCall(
                "the function stores a value in a dict from outside under a traced tensor",
                source=None,
                fix="Use a name or an index as the key, or store it outside of the function.",
            )


def _check_item(one: Change) -> None:
    """Guard the length of a list if an index that the function has found points into it. Refuse an
    item that has moved there from another index.
    """
    indices, watch = indices_written(one.holder), frames.observer()
    if not has_tracers(one.now) and type(one.now) not in PLAIN:
        raise _between_items(one.holder)
    if watch is not None and (one.key not in indices or min(indices) < 0):
        watch.length(one.holder)


def _between_items(holder: Any) -> UnsupportedCall:
    kind = builtin_of(holder).__name__
    what = f"the function puts a tensor between the items of a {kind} from outside"
    return UnsupportedCall(
        what, source=None, fix="Append it, or store it in a dict or in an attribute."
    )


def _is_plain(value: Any) -> bool:
    """Test for a tensor that a program can be given instead of another one."""
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_scalar(value: Any) -> bool:
    """Test for a tensor whose number a symbol can stand for."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()
