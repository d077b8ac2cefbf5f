"""The captures that transforms keep between eager calls.

`grad(f)(x)` in a Python loop captures f once. A later call takes the trace, if it is a call of the
same function with arguments of the same kind, and nothing that f read from outside has changed. A
function whose run does more than its trace says, such as one that prints, is captured each time.

Two functions are the same if they have one code and close over the same: plain data and containers
by value, other functions likewise, tensors by their kind, anything else by identity. So a function
that a training step defines anew each time is captured once too. Tensors from outside are inputs of
the kept trace.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.calling import Transformed
from thunder_fn.capture import Captured, capture, current, pytree
from thunder_fn.capture.apply import close_over
from thunder_fn.capture.outside.properties import Read
from thunder_fn.capture.outside.reads import CONTAINERS, LONG, PLAIN, is_a
from thunder_fn.capture.outside.values import Watch
from thunder_fn.capture.replaced import host_random
from thunder_fn.ir.memos import clears
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted.outside import ModuleCheck, Outside, observing, reads_of
from thunder_fn.jitted.program import reads_guard

LIVING, ORPHANS = 64, 16
"""The number of captures that are kept: of functions that live, and of those that are gone."""
STATES = 4
"""The number of captures of one call, for states of what the function reads."""
MISSES = 32
"""A function that was captured so often is watched no more."""

_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


class _Unknown(Exception):
    """Raised for a call that has no key."""


class _Same:
    """An object that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@dataclass(frozen=True, slots=True)
class _Equal:
    """An object that is compared by value."""

    value: Hashable


@dataclass(slots=True, eq=False)
class _Call:
    """A call as its key is made.

    `tensors` are those of its arguments, then those that its function closes over, each once, by
    `places`. `closed` are the places of the latter. `holders` are the objects whose content the key
    compares, by their ids, in order.
    """

    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    places: dict[int, int] = field(default_factory=dict[int, int])
    closed: set[int] = field(default_factory=set[int])
    holders: dict[int, int] = field(default_factory=dict[int, int])

    def key(self, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The key of the call.

        Raises:
            _Unknown: a leaf is neither a plain tensor nor plain data.
        """
        leaves, spec = pytree.flatten((args, kwargs))
        found = tuple(map(self.key_of_leaf, leaves))
        return found, spec, pytree.orders_of((args, kwargs)), self.key_of(f)

    def key_of_leaf(self, leaf: Any) -> Hashable:
        """The key of a leaf of the arguments."""
        if type(leaf) in _TENSORS:
            return self.key_of_tensor(leaf)
        if is_a(leaf, PLAIN):
            return _plain(leaf)
        if is_a(leaf, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            return _Same(leaf)
        raise _Unknown

    def key_of_tensor(self, tensor: torch.Tensor) -> Hashable:
        """The kind of a tensor, or its place if it was met before."""
        place = self.places.setdefault(id(tensor), len(self.tensors))
        if place < len(self.tensors):
            return place
        self.tensors.append(tensor)
        if tensor.layout is not torch.strided:
            raise _Unknown
        return (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
            tensor.requires_grad,
            internals.bits_of(tensor),
        )

    def key_of(self, value: Any) -> Hashable:
        """The key of the function, or of a value that it closes over."""
        if type(value) in _TENSORS:
            key = self.key_of_tensor(value)
            self.closed.add(self.places[id(value)])
            return key
        if is_a(value, PLAIN):
            return _plain(value)
        if type(value) in (_Same, _Equal):
            return value
        parts = _parts_of(value)
        if parts is None:
            return _Same(value)
        place = self.holders.setdefault(id(value), len(self.holders))
        if place < len(self.holders) - 1:
            return "met", place
        return type(value), *map(self.key_of, parts)


@functools.cache
def _is_value(cls: type) -> bool:
    """Test for a frozen class of ours, such as that of a transformed function or a pullback."""
    known = getattr(cls, "__dataclass_params__", None)
    is_ours = cls.__module__.startswith("thunder_fn.") and cls not in (Trace, Captured)
    return is_ours and known is not None and known.frozen and known.eq


def _plain(value: Any) -> Hashable:
    """The key of plain data: `1`, `1.0` and `True` are apart, `0.0` and `-0.0` too."""
    is_number = is_a(value, (float, complex))
    return type(value), repr(value) if is_number else value


def _parts_of(value: Any) -> tuple[Any, ...] | None:  # noqa: C901 - a branch for each kind
    """The parts of a value that say all about it; None for a value that is itself only.

    Those of a function are its code and what it closes over, those of a kept capture its trace.
    """
    match value:
        case types.FunctionType():
            fixed = _Same(value.__globals__), value.__code__, value.__dict__ or None
            return *fixed, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())
        case types.CellType():
            try:
                return (value.cell_contents,)
            except ValueError:
                return None
        case types.MethodType():
            return value.__func__, value.__self__
        case functools.partial() if type(value) is functools.partial:
            return value.func, value.args, value.keywords
        case Captured() if value.is_kept:
            return value.trace, value.closed
        case pytree.PyTreeSpec():
            return (_Equal(value),)
        case _ if _is_value(type(value)):
            return tuple(getattr(value, one.name) for one in dataclasses.fields(value))
        case _ if type(value) in (list, tuple) and len(value) <= LONG:
            return tuple(value)
        case _ if type(value) is dict and len(value) <= LONG:
            return tuple(part for pair in value.items() for part in pair)
        case _:
            return None


@dataclass(slots=True, eq=False)
class _Kept:
    """A capture, and the conditions under which it serves a call. `sources` are the tensors for
    its last inputs: places among the tensors of the call, or tensors.
    """

    captured: Captured
    sources: tuple[int | torch.Tensor, ...]
    outside: Outside | None
    reads: Callable[..., bool] | None
    is_unchanged: Callable[[], bool] = lambda: True
    root: Callable[[], Any] = lambda: True

    def serves(self, tensors: list[torch.Tensor]) -> bool:
        """Test whether nothing has changed that the function read."""
        return (
            self.is_unchanged()
            and (self.outside is None or self.outside.matches())
            and (self.reads is None or self.reads(*tensors))
        )

    def of(self, tensors: list[torch.Tensor]) -> Captured:
        """The capture as if it were made in a call with these tensors."""
        if not self.sources:
            return self.captured
        found = tuple(tensors[one] if isinstance(one, int) else one for one in self.sources)
        return dataclasses.replace(self.captured, closed=found)


class _Captures:
    """The captures that a process keeps, by call; those of a call with the latest first. Threads
    share them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: OrderedDict[Hashable, tuple[_Kept, ...]] = OrderedDict()
        self.misses: weakref.WeakKeyDictionary[types.CodeType, int] = weakref.WeakKeyDictionary()

    def cache_clear(self) -> None:
        """Forget every capture."""
        with self.lock:
            self.kept.clear()
            self.misses.clear()

    def find(self, key: Hashable, tensors: list[torch.Tensor]) -> _Kept | None:
        """The capture that serves a call."""
        for one in self.kept.get(key, ()):
            if one.serves(tensors):
                return one
        return None

    def put(self, key: Hashable, new: _Kept) -> None:
        """Keep a capture, and let the oldest ones go."""
        with self.lock:
            self.kept[key] = new, *self.kept.pop(key, ())[: STATES - 1]
            living = [one for one, kept in self.kept.items() if kept[0].root() is not None]
            orphans = [one for one, kept in self.kept.items() if kept[0].root() is None]
            for gone in (*living[:-LIVING], *orphans[:-ORPHANS]):
                del self.kept[gone]

    def is_watched(self, root: Any) -> bool:
        """Test whether captures of functions like this one are likely to be met again."""
        code = getattr(root, "__code__", None)
        return not isinstance(code, types.CodeType) or self.misses.get(code, 0) < MISSES

    def count(self, root: Any, *, is_miss: bool) -> None:
        """Count the captures of functions like this one since a kept one was last used."""
        code = getattr(root, "__code__", None)
        if isinstance(code, types.CodeType) and (is_miss or code in self.misses):
            with self.lock:
                self.misses[code] = self.misses.get(code, 0) + 1 if is_miss else 0


_CAPTURES = clears(_Captures())


def captured_once(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    inside: str = "",
    differentiated: Collection[int] | None = None,
) -> Captured:
    """Capture a function for an eager call, or take the capture of an earlier one.

    Law: the trace computes what ``capture(f, args, kwargs)`` does. Tensors from outside are its
    last inputs, and `closed` holds them.
    """
    run = functools.partial(capture, f, args, kwargs, inside=inside, differentiated=differentiated)
    root = _root_of(f)
    if current() is not None or internals.is_intercepted() or not _CAPTURES.is_watched(root):
        return run()
    call = _Call()
    try:
        wanted = None if differentiated is None else tuple(differentiated)
        key = call.key(f, args, kwargs or {}), inside, wanted, internals.kinds_of_modes()
    except _Unknown:
        return run()
    found = _CAPTURES.find(key, call.tensors)
    _CAPTURES.count(root, is_miss=found is None)
    if found is not None:
        return found.of(call.tensors)
    is_unchanged, before = internals.global_state_guard(), host_random.state()
    watch = Watch(f, hears_calls=True)
    with observing(watch) as attributes:
        captured = run()
    watch.finish()
    if (
        not watch.is_repeatable
        or attributes.written
        or host_random.drawn_since(before)
        or not is_unchanged()
        or not _is_plain(captured)
    ):
        return captured
    outside = reads_of(watch, attributes, but=call.holders)
    kept = _kept(captured, call, outside, pytree.flatten((args, kwargs or {}))[0])
    if kept is None:
        return captured
    kept.is_unchanged, kept.root = is_unchanged, _weak(root)
    _CAPTURES.put(key, kept)
    return kept.of(call.tensors)


def _root_of(f: Any) -> Any:
    """The function behind transforms."""
    while isinstance(f, Transformed):
        f = f.fn
    return f


def _weak(value: Any) -> Callable[[], Any]:
    """A weak reference; to what has none, one that always has its answer."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: True


def _is_plain(captured: Captured) -> bool:
    """Test for a capture that is its trace and the arrangement of results, and nothing else."""
    more = (
        captured.writes,
        captured.decisions,
        captured.own_leaves,
        captured.grads,
        captured.retained,
        captured.follows,
        captured.feeds,
        captured.effects,
        captured.kept,
        captured.freed,
    )
    return not any(more)


def _kept(
    captured: Captured, call: _Call, outside: Outside | None, leaves: list[Any]
) -> _Kept | None:
    """The capture with tensors from outside as inputs. None where the function may reach one of
    them in two ways, of which a later call may change one.
    """
    trace, tensors = close_over(captured.trace)
    count = len(trace.inputs) - len(tensors)
    places = {id(tensor): count + i for i, tensor in enumerate(tensors)}
    sources: list[int | torch.Tensor] = []
    others = set(_tensors_of(outside))
    for tensor in tensors:
        place = call.places.get(id(tensor))
        if place in call.closed and id(tensor) in others:
            return None
        sources.append(tensor if place is None or place not in call.closed else place)
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found: dict[str, tuple[Any, ...]] = {"aliases": captured.aliases, "shared": captured.shared}
    for name, seen in found.items():
        if any(not isinstance(one.source, int) and id(one.source) not in places for one in seen):
            return None
        found[name] = tuple(
            one
            if isinstance(one.source, int)
            else dataclasses.replace(one, source=places[id(one.source)])
            for one in seen
        )
    reads: list[Read] = []
    for read in captured.reads:
        tensor = given[read.tensor] if isinstance(read.tensor, int) else read.tensor
        place = call.places.get(id(tensor))
        reads.append(read if place is None else dataclasses.replace(read, tensor=place))
    new = dataclasses.replace(captured, trace=trace, is_kept=True, reads=(), **found)
    return _Kept(new, tuple(sources), outside, reads_guard(reads) if reads else None)


def _tensors_of(outside: Outside | None) -> Iterator[int]:
    """The ids of tensors that reads from outside lead to."""
    if outside is None:
        return
    for edge in outside.edges:
        value = edge.holder if edge.kind == "content" else edge.value
        yield from (id(leaf) for leaf in _leaves(value))
    for module in outside.modules:
        if isinstance(module, ModuleCheck):
            yield from (id(tensor) for tensor in module.reading.tensors)


def _leaves(value: Any, depth: int = 4) -> Iterator[Any]:
    """The values in a container, and in those in it."""
    if depth and is_a(value, CONTAINERS):
        parts = (*value, *value.values()) if is_a(value, dict) else tuple(value)
        for part in parts:
            yield from _leaves(part, depth - 1)
    else:
        yield value
