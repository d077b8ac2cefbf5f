"""Places of other objects, dicts, lists and cells outside to which a function writes.

Only those count to which it writes tensors (`Elsewhere.moved_tensors`) or plain data (`updated`,
`stored_plainly`). One with a tensor that it also reads is a `Feed`. Plain data that it reads is
guarded elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import types
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.comparisons import PLAIN, entries_of, has_keys_of, is_like, is_numeric
from thunder_fn.capture.fed import Fed, MustFeed
from thunder_fn.capture.made import is_made_anew
from thunder_fn.capture.objects import ABSENT, is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import PLACES, is_named, look, store
from thunder_fn.capture.outside.effects import APPEND, PREPEND
from thunder_fn.capture.outside.reads import HOLDERS, SEQUENCES, Changed, builtin_of, content_of
from thunder_fn.capture.places import (
    APPENDED,
    PREPENDED,
    Change,
    Entry,
    Part,
    Snapshot,
    Stays,
    Update,
    held_at,
    put,
)
from thunder_fn.capture.renewed import Parts, parts_of, state_in
from thunder_fn.capture.storable import Storable
from thunder_fn.capture.stored import (
    changed,
    has_tracers,
    holds_numbers,
    indices_written,
    leaves_in,
    stored_in,
    stored_outside,
)
from thunder_fn.errors import UnsupportedCall

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
CONTAINERS = (*DICTS, list, collections.deque)
"""Types of containers whose content is compared with what it was."""


@dataclass(slots=True, eq=False)
class Elsewhere:
    """The stores of a function outside, but for objects of PyTorch whose state is kept as a whole.

    Args:
        kept: the containers of those, by identity.
        places: places that the function reads and writes tensors to, from captures before this one.
    """

    recorder: Recorder
    fed: Fed
    storable: Storable
    kept: dict[int, Snapshot]
    places: dict[Entry, tuple[Any, Any]] = field(default_factory=dict[Entry, tuple[Any, Any]])
    placed: dict[Entry, Any] = field(default_factory=dict[Entry, Any])
    """Their values before the capture, for which symbols may stand now."""
    exact: list[Snapshot] = field(default_factory=list[Snapshot])
    """Containers, with the content that they have to have before each call."""
    returned: set[int] = field(default_factory=set[int])
    """The containers from outside that are in the result, by identity."""
    renewed: list[tuple[dict[str, Any], str]] = field(default_factory=list[Any])
    """The attributes of a jitted module that the function reads, and in which it puts containers of
    tensors.
    """

    def take(self) -> None:
        """Make inputs of what these places hold."""
        for place, (holder, key) in self.places.items():
            self.placed[place] = value = held_at(holder, key)
            self.fed.feed(holder, key, value)

    def restore(self) -> None:
        """Give the places back what symbols stand for."""
        for place, (holder, key) in self.places.items():
            if not isinstance(old := self.placed.get(place), torch.Tensor) and place in self.placed:
                put(holder, key, old)

    def within(self) -> frozenset[int]:
        """Find the identities of the containers that were in places that are fed."""
        states = self.fed.states
        seen = *states.values(), *(parts_of(self.placed[place]) for place in states)
        return frozenset[int]().union(*(one.within for one in seen))

    def apart(self) -> frozenset[int]:
        """Find the identities of what the function has found elsewhere: no place that is fed may
        hold any of it.
        """
        if not self.fed.tensors:
            return frozenset()
        held = self.within().union(id(one.container) for one in self.exact)
        here = {id(tensor) for _, tensor in self.fed.tensors}
        is_other = lambda place: place[0] not in held and place not in self.fed.given
        return frozenset(
            value
            for value, places in self._reached().items()
            if value not in here and any(map(is_other, places))
        )

    def unread(self) -> frozenset[Entry]:
        """Find the places in modules to which the function writes, and whose values do not count
        for their checks.
        """
        modules = self.recorder.modules.stored
        used = {id(tensor) for tensor, _, _ in self.recorder.lifted()}
        free = {one.entry for one in modules if one.is_read is False and id(one.before) not in used}
        return frozenset(free | (self.places.keys() & {one.entry for one in modules}))

    def updated(self) -> Iterator[tuple[Update, Any]]:
        """Find the integers outside of kept objects to which the function has added, and the items
        of lists, and slots of containers, in which it has stored plain data.
        """
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None:
            return
        for place in watch.added - watch.before.keys():  # else its old value counts
            kind, identity, key = place
            holder, old = watch.counted[place]
            now = look(kind, holder, key)
            if identity not in self.kept and type(now) is int and now != old:
                yield Update(kind, holder, key, now - old, is_added=True), old
        for (kind, identity, key), (holder, old) in watch.before.items():
            if identity in self.kept or kind not in PLACES or is_named(kind, holder):
                continue
            now = look(kind, holder, key)
            is_there = now is not ABSENT and old is not ABSENT
            fed = self.fed.given.get((identity, key), old)
            is_new = now is not fed and (is_there or kind != "index")
            is_made = is_a(now, HOLDERS) and not self.storable.was_there(now)
            if is_new and not is_made and (now is ABSENT or self.storable.is_storable(now)):
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
            holder, key = one.holder, one.key
            is_whole = key is None and not isinstance(holder, types.CellType)
            if is_whole and any(a is b for a in one.before for b in one.now):
                found[place] = self._moved_items(one)
            if is_a(holder, SEQUENCES) and isinstance(key, int):
                _check_item(one)
            state = None if id(holder) in whole else self._next_state(one, reached, used)
            if state is not None:
                self.places.setdefault(one.entry, (holder, key))
                wanted |= self._numbers_wanted(one, state)
            if key in (APPENDED, PREPENDED) and not one.before:  # it may be emptied before
                self.exact.append(Snapshot(holder, []))
        self.places.update(self._wanted_elsewhere())
        if len(self.places) > before or wanted:
            raise MustFeed(self.fed.wanted | wanted)
        for held, name in self.renewed:
            if watch is not None and (id(held), name) not in self.places:
                watch.value_before(("key", id(held), name), held, Changed(name))
        return found

    def _next_state(
        self, one: Change, reached: Mapping[int, set[Entry]], used: Set[int]
    ) -> Parts | None:
        """Take apart what a place held, if the function reads it and stores the like of it for the
        next call, and if nothing in it can be reached in another way.
        """
        state, watch = self._renewed(one, reached), frames.observer()
        if state is None and isinstance(one.now, torch.Tensor) and _is_plain(one.before):
            state = parts_of(one.before)
        if state is None:
            return None
        parts = {id(part) for part in state.tensors}
        is_read = one.is_read or (watch is not None and ("key", *one.entry) in watch.edges)
        within = state.within | parts_of(one.now).within
        held = parts.union(map(id, state.containers))  # a tuple elsewhere leads to its tensors
        is_alone = not any(_is_elsewhere(part, one.entry, reached, within) for part in held)
        return state if is_alone and (is_read or not used.isdisjoint(parts)) else None

    def _numbers_wanted(self, one: Change, state: Parts) -> set[Entry]:
        """The numbers in a container of tensors that the function changes, and that are not fed."""
        paths = state.numbers_changed(parts_of(one.now))
        return {(id(one.holder), Part(one.key, path)) for path in paths} - self.fed.wanted

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
        if watch is None or self.recorder.outer is not None or not self.fed.wanted:
            return
        for (kind, identity, key), (holder, old) in {**watch.counted, **watch.before}.items():
            place = identity, key
            is_other = identity in self.kept or (kind == "attr" and is_a(holder, HOLDERS))
            is_value = is_numeric(old) and type(old) is not list  # a list has an identity
            if kind in PLACES and place in self.fed.wanted and is_value and not is_other:
                yield place, (holder, key)

    def renumbered(self) -> Iterator[Change]:
        """Find the fed numbers outside of kept objects that the function has changed."""
        for place, (holder, key) in self.places.items():
            old, now = self.fed.given.get(place), held_at(holder, key)
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
            yield from stored_outside(self.recorder, self.kept)

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
            is_place = is_named(kind, holder) and identity not in self.kept
            is_place = is_place and not has_tracers(old)  # as in `functional_call`: not from before
            is_new = now is not self.fed.given.get((identity, key), old)
            if is_place and is_new and (now is ABSENT or self.storable.is_storable(now)):
                done.add((identity, key))
                yield Change(holder, key, old, now)
        for one in self.recorder.modules.replaced:
            if one.now is ABSENT or self.storable.is_storable(one.now):
                yield one
        for one in watch.contents.values():
            by = watch.changing.get(id(one.container), set[str]())
            is_old = one.is_unchanged and by <= APPEND
            if (
                is_old
                or id(one.container) in self.kept
                or (not by and id(one.container) in items and _is_by_index(one))
            ):
                continue
            for change in _plain_changes(one, by):
                if self.storable.is_storable(change.now) and change.entry not in done:
                    yield change
                    self.exact += [one] if change.key is None else []

    def check_unstorable(self) -> None:
        """Look for objects of the function's own in places, which a program cannot make anew. Let
        no later call use the trace: the function runs again, and makes another one.

        Raises:
            UnsupportedCall: such an object leads to tensors of the trace.
        """
        if (watch := frames.observer()) is None:
            return
        for place, (holder, old) in watch.before.items():
            now = look(place[0], holder, place[2])
            if place[0] in PLACES and now is not old and now is not ABSENT:
                self._check_value(watch, place, holder, place[2], now)
        for one in changed(watch.contents.values()):
            if id(one.container) in self.kept:
                continue
            known = {id(item) for _, item in entries_of(one.before)}
            new = [(key, item) for key, item in entries_of(one.container) if id(item) not in known]
            for key, item in new:
                place = "content", id(one.container), None
                self._check_value(watch, place, one.container, key, item)

    def _check_value(
        self, watch: frames.Observer, place: tuple[str, int, Any], holder: Any, key: Any, value: Any
    ) -> None:
        """Let no later call use the trace if a place holds an object that no program stores."""
        if has_tracers(value):
            return
        self.storable.check_reach(holder, key, value)
        if not self.storable.is_storable(value) and not holds_numbers(value):
            watch.value_before(place, holder, None)
            watch.edges[place].value = Changed(str(place[2]))


def _is_elsewhere(
    value: int, place: Entry, reached: Mapping[int, set[Entry]], within: Container[int]
) -> bool:
    """Test whether a value, by identity, can be reached in another way than by this place, and the
    containers `within` that were or are there.
    """
    return any(one != place and one[0] not in within for one in reached.get(value, ()))


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
    if type(now) not in CONTAINERS or len(now) != len(before) or has_tracers(before):
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
    """Refuse a tensor of the trace in a slot of a container from outside, which gets its old value
    back.
    """
    for (kind, _, key), (holder, old) in tuple(before.items()):
        is_place = kind == "attr" and is_a(holder, HOLDERS) and not is_made(holder)
        if is_place and has_tracers(look(kind, holder, key)):
            store(kind, holder, key, old)
            raise UnsupportedCall(
                f"the function stores a tensor in `{type(holder).__name__}.{key}`, a slot of a"
                " container from outside",
                source=None,
                fix="Return it, and store it outside of the jitted function.",
            )


def check_keys(changes: Sequence[Change]) -> None:
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
