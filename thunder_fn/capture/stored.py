"""Tensors that a traced function stores in places outside: in dicts, lists, cells and objects."""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.comparisons import PLAIN
from thunder_fn.capture.objects import ABSENT, dict_of, is_a
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import is_named, look
from thunder_fn.capture.outside.kinds import is_plain_class, is_record
from thunder_fn.capture.outside.reads import (
    CONTAINERS,
    HOLDERS,
    SEQUENCES,
    content_of,
    fields_of,
    module_of,
)
from thunder_fn.capture.places import APPENDED, PREPENDED, Change, Effect, Snapshot, put, snapshot
from thunder_fn.capture.supported import EscapedValue
from thunder_fn.ir.rules import chosen

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DEEP = 4
"""Containers in containers that are looked into for tensors of a trace."""
_AT_THE_END = frozenset(("append", "extend"))
_MANY = 256
"""Values that a function closes over, directly or not, which are looked into."""
_OTHERS = (torch.Tensor, types.ModuleType, type, *PLAIN)
_CLOSED = (type, types.ModuleType, types.FrameType, types.TracebackType)
"""Types of objects of which nobody asks what they lead to."""
_MOST = 10_000
"""Objects behind one that are looked at for a tensor of the trace."""


def stored_outside(recorder: Recorder, but: Container[int]) -> Iterator[Change]:
    """Find tensors of a trace in places outside of the traced function. The containers `but`, by
    identity, do not count.
    """
    if (watch := frames.observer()) is not None:
        watch.note_late()
    places, contents = ({}, {}) if watch is None else (watch.before, watch.contents)
    done = {one.entry for one in recorder.modules.stored}
    for (kind, identity, key), (holder, old) in tuple(places.items()):
        now = look(kind, holder, key) if is_named(kind, holder) else ABSENT
        is_other = identity not in but and identity not in contents
        known = contents.get(id(now))  # what was there is itself stored, and changes by itself
        is_other = is_other and (known is None or (now is not old and has_tracers(known.before)))
        if is_other and (identity, key) not in done and has_tracers(now):
            done.add((identity, None if kind == "cell" else key))
            yield Change(holder, key, old, now)
    around = (one for one in recorder.around if id(one.container) not in contents)
    for one in (*changed(contents.values()), *around):
        is_cell = type(one.container) is types.CellType
        held = look("cell", one.container, None) if is_cell else one.container
        if id(one.container) not in but and has_tracers(held):
            stored = _items_stored(one) or stored_in(one)
            yield from (found for found in stored if found.entry not in done)
    yield from recorder.modules.stored


def stored_inside(recorder: Recorder) -> Iterator[tuple[Effect, list[Any]]]:
    """Find the places in which the function of a transform stores tensors of its own, with these
    tensors. The places have their old values until the transform has run.
    """
    watch, outermost = frames.observer(), recorder
    while outermost.outer is not None:
        outermost = outermost.outer
    kept = {} if outermost.kept is None else outermost.kept.contents
    is_mine = lambda one: any(map(recorder.has_made, leaves_in(one.now)))
    found = [*filter(is_mine, stored_outside(recorder, kept))]
    found = in_order([*found, *_entries_after(found)])
    for one in found:
        take_back(one)
        if watch is not None and one in recorder.modules.stored:
            watch.before.setdefault(("key", *one.entry), (one.holder, one.before))
    for one in found:
        leaves, spec = pytree.flatten(with_objects(one.now))
        leaves = [*map(alive, leaves)]
        flags = tuple(map(recorder.has_made, leaves))
        yield Effect(one.holder, one.key, spec, tuple(leaves), flags), [*chosen(leaves, flags)]


def changed(contents: Iterable[Snapshot]) -> list[Snapshot]:
    """The containers that hold other objects than before, or the same ones in another order."""
    return [one for one in contents if not one.is_unchanged]


def _entries_after(found: Sequence[Change]) -> Iterator[Change]:
    """Find the entries of dicts that come after new ones, to keep their order."""
    known, new = {one.entry for one in found}, [one for one in found if one.before is ABSENT]
    for holder in {id(one.holder): one.holder for one in new if is_a(one.holder, dict)}.values():
        first = {one.key for one in new if one.holder is holder}
        rest = itertools.dropwhile(lambda pair: pair[0] not in first, content_of(holder))
        for key, value in rest:
            if (id(holder), key) not in known:
                yield Change(holder, key, ABSENT, value)


def around(f: Any) -> Iterator[Snapshot]:
    """Note what the containers, cells and objects hold that a function closes over. Those that
    the function around it has made are no places outside, as long as that one is traced.
    """
    for value in reached(f):
        if type(value) is types.CellType:
            yield Snapshot(value, look("cell", value, None))
        if is_a(value, HOLDERS):
            yield snapshot(value)


def reached(f: Any) -> Iterator[Any]:
    """The values that a value holds or closes over, directly or not, and itself."""
    waiting, met = deque[Any]([f]), dict[int, Any]()
    while waiting and len(met) < _MANY:
        value = waiting.popleft()
        if id(value) in met or is_a(value, _OTHERS):
            continue
        met[id(value)] = value
        yield value
        waiting += _parts_of(value)


def _parts_of(value: Any) -> Iterable[Any]:
    """The values that a value of some kind holds. No code of the user's classes runs."""
    if (of := _PARTS.get(type(value))) is not None:
        return of(value)
    if is_a(value, CONTAINERS):
        items = content_of(value)
        return (item for _, item in items) if is_a(value, dict) else items
    if module_of(type(value)).startswith("thunder_fn."):
        return (getattr(value, "fn", None),)
    return (fields,) if type(fields := dict_of(value)) is dict else ()


_PARTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    types.CellType: lambda cell: (look("cell", cell, None),),
    types.FunctionType: lambda f: (*(f.__closure__ or ()), *(f.__defaults__ or ())),
    types.MethodType: lambda method: (method.__func__, method.__self__),
    functools.partial: lambda partial: (partial.func, partial.args, partial.keywords),
}


def in_order(changes: Sequence[Change]) -> list[Change]:
    """Sort the changes of each dict by its keys: new entries come in this order."""
    first = {id(one.holder): place for place, one in reversed([*enumerate(changes)])}
    held = {id(one.holder): one.holder for one in changes if isinstance(one.holder, dict)}
    places = {
        (of, key): place
        for of, one in held.items()
        for place, (key, _) in enumerate(content_of(one))
    }
    return sorted(changes, key=lambda one: (first[id(one.holder)], places.get(one.entry, -1)))


def reordered(
    changes: Sequence[Change], before: Mapping[int, Snapshot]
) -> tuple[list[Change], list[Snapshot]]:
    """The changes, with entries of dicts that are taken out and put in again where the function
    has moved them; and these dicts with what they held before.
    """
    found, moved = [*changes], list[Snapshot]()
    for holder in {id(one.holder): one.holder for one in changes}.values():
        keys = {one.key for one in changes if one.holder is holder}
        if id(holder) not in before or not is_a(holder, dict) or None in keys:
            continue
        old = before[id(holder)].before
        last = [(key, item) for key, item in _behind(holder, [*old]) if key in old]
        if last:
            moved.append(before[id(holder)])
        found = [
            *(Change(holder, key, old[key], ABSENT) for key, _ in last),
            *found,
            *(Change(holder, key, old[key], item) for key, item in last if key not in keys),
        ]
    return found, moved


def _behind(held: dict[Any, Any], old: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The entries of a dict from the first one on that is new or has been moved."""
    places, items = {key: place for place, key in enumerate(old)}, content_of(held)
    last = -1
    for count, (key, _) in enumerate(items):
        if places.get(key, -1) <= last:
            return items[count:]
        last = places[key]
    return []


def take_back(one: Change) -> None:
    """Give a place the value that it had before."""
    if one.key in (APPENDED, PREPENDED):
        put(one.holder, None, one.before)
    elif isinstance(one.holder, types.CellType) and one.before is ABSENT:
        del one.holder.cell_contents
    else:
        put(one.holder, one.key, one.before)


def indices_written(held: Any) -> set[int]:
    """The indices under which the function writes to a list or deque, as far as its code says."""
    watch = frames.observer()
    places = () if watch is None else (*watch.before, *watch.added)
    keys = (key for kind, of, key in places if kind == "index" and of == id(held))
    return {key for key in keys if isinstance(key, int)}


def _items_stored(one: Snapshot) -> list[Change]:
    """Find the items of a list or deque that the function has replaced or appended; none where it
    has called other methods.

    Items that are replaced count by index, if they hold tensors or only the function knows the
    index.
    """
    watch, held = frames.observer(), one.container
    if watch is None or not is_a(held, SEQUENCES):
        return []
    now, old = content_of(held), content_of(one.before)
    by, written = watch.changing.get(id(held), set()), indices_written(held)
    is_apart = by <= _AT_THE_END and all(0 <= key < len(old) for key in written)
    is_appended = bool(by and written) and is_apart and getattr(held, "maxlen", None) is None
    if len(now) < len(old) or (not is_appended and (by or len(now) != len(old))):
        return []
    known = {key % len(now) for key in written}
    pairs = enumerate(zip(old, now, strict=False))
    changes = (Change(held, place, *pair) for place, pair in pairs if pair[0] is not pair[1])
    found = [one for one in changes if one.key not in known or has_tracers(one.now)]
    if any(one.key not in known and any(one.now is item for item in old) for one in found):
        return []  # items have moved
    if is_appended and len(now) > len(old):
        watch.length(held, max(written))
        found.append(Change(held, APPENDED, old, now[len(old) :]))
    return found


def stored_in(one: Snapshot) -> Iterator[Change]:
    """Find tensors of the trace that a list or dict did not hold before."""
    held, before = one.container, one.before
    if type(held) is types.CellType:
        now = look("cell", held, None)
        yield from (Change(held, None, before, now),) if now is not before else ()
        return
    if isinstance(held, dict):
        yield from _entries_stored(held, before)
        return
    now, old = content_of(held), content_of(before)
    if isinstance(held, set):
        added = [item for item in now if item not in before]
        key, now = (None, now) if len(added) + len(old) > len(now) else (APPENDED, added)
    elif indices_written(held):  # what it holds again may come from elsewhere
        key = None
    else:
        key, now = _at_the_ends(now, old, getattr(held, "maxlen", None))
    yield Change(held, key, old, now)


def _entries_stored(held: dict[Any, Any], before: dict[Any, Any]) -> Iterator[Change]:
    """Find the entries with new tensors, and plain ones that come after a new key, to keep their
    order.
    """
    is_after = False
    for key, now in content_of(held):
        old = before.get(key, ABSENT)
        if now is not old and has_tracers(now):
            is_after = is_after or old is ABSENT
        elif not (is_after and old is ABSENT and type(now) in PLAIN):
            continue
        yield Change(held, key, old, now)


def _at_the_ends(now: list[Any], old: list[Any], limit: int | None) -> tuple[Any, list[Any]]:
    """The key of what is new at one end of a list or deque, and that. A full deque has dropped
    items at the other end.
    """
    is_full = len(now) == limit
    for dropped in range(len(old) + 1 if is_full else 1):
        count = len(old) - dropped
        if count > len(now):
            continue
        if all(map(operator.is_, old[dropped:], now)):
            return APPENDED, now[count:]
        if all(map(operator.is_, old[:count], now[len(now) - count :])):
            return PREPENDED, now[: len(now) - count]
    return None, now


def has_tracers(value: Any, depth: int = _DEEP) -> bool:
    """Test for tensors of the trace in a value. Those of a function inside it do not count: they
    are lost, as under torch.func.
    """
    kinds = set(map(type, leaves_in(value, depth)))
    is_lost = any(issubclass(kind, EscapedValue) for kind in kinds)
    return not is_lost and any(issubclass(kind, internals.Tracer) for kind in kinds)


def holds_numbers(value: Any) -> bool:
    """Test for numbers of the trace in a value."""
    return any(issubclass(type(leaf), _NUMBERS) for leaf in leaves_in(value))


def leaves_in(value: Any, depth: int = _DEEP) -> Iterator[Any]:
    """The leaves of a value, keys of dicts too, and parts of records that the function has made.
    No code of the user's classes runs.
    """
    items = _items_of(value, depth) if depth else None
    if items is None:
        yield alive(value)
        return
    for item in itertools.chain(*items) if issubclass(type(value), dict) else items:
        if issubclass(type(item), CONTAINERS) or is_record(type(item)):
            yield from leaves_in(item, depth - 1)
        else:
            yield alive(item)


def _items_of(value: Any, depth: int) -> Sequence[Any] | None:
    """The items of a container, or the attributes of an object that the function has made of
    tensors of the trace; None for other values.
    """
    if issubclass(type(value), CONTAINERS):
        return content_of(value)
    fields = _fields_made(value, depth - 1) if is_record(type(value)) else None
    return None if fields is None else [*fields.values()]


def with_objects(tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return a tree with nodes in the place of objects that the function has made of tensors of the
    trace: a program makes them anew.
    """
    return pytree.with_objects(tree, _fields_of_plain, is_leaf)


def _fields_of_plain(value: Any) -> dict[str, Any] | None:
    return _fields_made(value, _DEEP) if is_plain_class(type(value)) else None


def _fields_made(value: Any, depth: int) -> dict[str, Any] | None:
    watch = frames.observer()
    is_made = watch is not None and watch.is_made(value) and is_record_of_trace(value, depth)
    return fields_of(value) if is_made else None


def is_record_of_trace(record: Any, depth: int = _DEEP) -> bool:
    """Test for an object with tensors of the trace in its attributes, which may lead to itself."""
    return any(has_tracers(part, depth) for part in (fields_of(record) or {}).values())


def alive(value: Any) -> Any:
    """The value itself, or what a wrapper of a torch.func transform held that has ended."""
    return internals.alive(value) if issubclass(type(value), torch.Tensor) else value


def reaches_tracer(leaf: Any) -> bool:
    """Test for a traced tensor behind a function or an object: in its cells, defaults and
    attributes, what it views or holds, and in theirs. At most so many objects are looked at, and
    none from outside: what the function stores in these is stored there in each call.
    """
    seen, todo, watch = dict[int, Any](), [leaf], frames.observer()
    while todo and len(seen) < _MOST:
        value = todo.pop()
        if id(value) in seen or issubclass(type(value), _CLOSED):
            continue
        is_known = isinstance(value, torch.nn.Module) if watch is None else watch.is_outside(value)
        if is_known or module_of(type(value)).startswith("thunder_fn."):
            continue
        seen[id(value)] = value
        if internals.is_tracer(value):
            return True
        if type(value) is types.FunctionType:
            todo += [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
        elif not issubclass(type(value), torch.Tensor):
            todo += [*gc.get_referents(value), *_properties_in_cpp(value)]
    return False


def _properties_in_cpp(value: Any) -> list[Any]:
    """The properties of an object of pybind's, such as `SDPAParams`, whose parts Python does not
    see.
    """
    cls = type(value)
    if type(cls).__name__ != "pybind11_type":
        return []
    names = (name for name, found in vars(cls).items() if isinstance(found, property))
    return [getattr(value, name) for name in names]
