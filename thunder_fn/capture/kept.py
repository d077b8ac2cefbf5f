"""Objects of PyTorch from outside that keep state in Python: optimizers and gradient scalers.

A traced step runs the object's own code. It is watched from its first use in a capture. Afterwards
it holds again what it held before, and every change is an `Effect`: an entry of a dict or list with
its new value, which the program's epilogue stores in each call. A number that the function changes,
or that a schedule changes between calls, is a `Feed`: an input of the trace that the program reads
from its place in each call. Tensors are closed over and changed in place, as any others.

Of other objects, dicts, lists and cells from outside only the places count to which the function
writes tensors (`Kept.stored`). One that it also reads is a `Feed`.

`KeptState` holds everything else that the trace depends on. A program is guarded by it.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.reads import ABSENT
from thunder_fn.capture.supported import EscapedValue
from thunder_fn.errors import UnsupportedCall, kind_of, with_article
from thunder_fn.ir.rules import chosen
from thunder_fn.ir.symbols import Symbol, number_symbol
from thunder_fn.ir.text import program_text, run_text
from thunder_fn.ir.trace import Expr, Literal, as_dim

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Place = tuple[int, Any]
"""A container by identity, and a key of it."""

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = (*_DICTS, list, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FIXED = (
    *_PLAIN,
    enum.Enum,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    type,
)
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
_DEEP = 4
"""Containers in containers that are looked into for tensors of a trace."""
_FIRST = 1000
"""The number of the first symbol of a feed. Those of arguments come before."""


APPENDED: Any = type("Appended", (), {"__repr__": lambda self: "APPENDED"})()
"""The key of what is appended to a list."""
GRAD: Any = "grad"


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """A place outside whose value is an input of the trace, read in each call.

    `holder` is a dict or list with an entry, or a tensor with its `.grad`: an input of the
        trace by index, or one that is closed over. `symbol` is that of a number, which may be an
        item of a tuple, by index. If it `is_item`, the entry is a tensor, and the number is its
        value.
    """

    holder: Any
    key: Any
    symbol: Symbol | None = None
    index: int | None = None
    is_item: bool = False

    def read(self, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """The value now, for a call with these tensors."""
        if not isinstance(self.holder, (int, torch.Tensor)):
            value = self.holder[self.key]
            if self.is_item:
                return value.item()
            return value if self.index is None else value[self.index]
        return (tensors[self.holder] if isinstance(self.holder, int) else self.holder).grad


@dataclass(frozen=True, slots=True, eq=False)
class Effect:
    """A place outside and its new value, as a tree: some leaves are outputs of the trace, which
    `is_output` marks. If it `is_conditional`, its first output says whether to leave the place as
    it is.

    `holder` is as that of a `Feed`. Without a tree the entry is removed.
    """

    holder: Any
    key: Any
    spec: pytree.PyTreeSpec | None
    leaves: tuple[Any, ...] = ()
    is_output: tuple[bool, ...] = ()
    is_conditional: bool = False

    @property
    def count(self) -> int:
        """The number of outputs in it."""
        return sum(self.is_output) + self.is_conditional

    def apply(self, outputs: Sequence[Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Store the value, for a call with these tensors."""
        given = iter(outputs)
        if self.is_conditional and bool(next(given)):
            return
        leaves = [
            next(given) if flag else leaf
            for leaf, flag in zip(self.leaves, self.is_output, strict=True)
        ]
        value = ABSENT if self.spec is None else pytree.unflatten(self.spec, leaves)
        holder = tensors[self.holder] if isinstance(self.holder, int) else self.holder
        put(holder, self.key, value)


def put(holder: Any, key: Any, value: Any) -> None:
    """Store a value in an entry of a container, in all of it, or in the `.grad` of a tensor."""
    if isinstance(holder, torch.Tensor):
        holder.grad = None if value is ABSENT else value
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif key is APPENDED:
        holder.extend(value)
    elif key is None:
        _refill(holder, value)
    elif value is ABSENT:
        holder.pop(key, None)
    else:
        holder[key] = value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.update if isinstance(container, dict) else container.extend)(content)


@dataclass(frozen=True, slots=True)
class Item:
    """The key of the number in a tensor that is the entry under `key`."""

    key: Any


class MustFeed(BaseException):
    """Signal of a capture that has to begin again with numbers of these places fed."""

    def __init__(self, places: frozenset[Place]) -> None:
        super().__init__(places)
        self.places = places


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
    wanted: frozenset[Place] = frozenset()
    objects: dict[int, tuple[Any, str]] = field(default_factory=dict)
    contents: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    given: dict[Place, Any] = field(default_factory=dict)
    met: dict[int, tuple[Any, str]] = field(default_factory=dict)
    places: dict[Place, tuple[Any, Any]] = field(default_factory=dict)
    empty: list[list[Any]] = field(default_factory=list[list[Any]])
    lists: dict[Place, Any] = field(default_factory=dict)
    tensors: list[tuple[Feed, torch.Tensor]] = field(default_factory=list)
    items: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    counts: dict[int, Any] = field(default_factory=dict)
    skips: list[tuple[set[int], torch.Tensor]] = field(default_factory=list)

    def begin(self, value: Any) -> None:
        """Begin a step, whose reads are guarded here."""
        self.met.setdefault(id(value), (value, type(value).__name__))
        if not self.recorder.symbolic:
            raise MustFeed(self.wanted)
        self.take(*self.met[id(value)])
        self.recorder.begin_step()

    def take(self, value: Any, path: str) -> None:
        """Watch an object from now on."""
        if id(value) in self.objects:
            return
        self.objects[id(value)] = value, path
        known = len(self.contents)
        self._note(vars(value))
        if not self.recorder.symbolic:
            return
        for container, before in tuple(self.contents.values())[known:]:
            for key, item in _entries(before):
                is_lr = key in _SCHEDULED and container is not vars(value).get("defaults")
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
        """Watch what a capture before this one has met."""
        for value, path in tuple(self.met.values()):
            self.take(value, path)
        for holder, key in self.places.values():
            self._feed(holder, key, holder[key])

    def _note(self, container: Any) -> None:
        """Remember the content of a container, and of those in it."""
        if id(container) in self.contents:
            return
        self.contents[id(container)] = container, container.copy()
        for key, item in tuple(_entries(container)):
            if type(item) is list and _is_numeric(item):  # a value, which is replaced by others
                self.lists[id(container), key] = item
                self.contents[id(container)][1][key] = list(item)
                container[key] = list(item)
            elif type(item) in _CONTAINERS:
                self._note(item)

    def _feed(self, container: Any, key: Any, value: Any) -> None:
        """Make a number, or the numbers of a tuple, inputs of the trace."""
        place = id(container), key
        if isinstance(value, torch.Tensor) and not self.feeds_tensor(value):
            self.tensors.append((Feed(container, key), value))
            self.given[place] = value
        if type(value) in (tuple, list) and all(map(is_number, value)):
            parts = enumerate(value)
            kind: Any = type(value)
            container[key] = kind(self._symbol(container, key, i, part) for i, part in parts)
            self.given[place] = kind(container[key])
            return
        if is_number(value):
            container[key] = self._symbol(container, key, None, value)
            self.given[place] = container[key]

    def feeds_tensor(self, value: Any) -> bool:
        """Test whether some entry is an input that has this tensor."""
        return any(tensor is value for _, tensor in self.tensors)

    def _symbol(
        self, container: Any, key: Any, index: int | None, value: Any, *, is_item: bool = False
    ) -> Any:
        symbol = number_symbol(_FIRST + len(self.feeds), value)
        self.feeds.append(Feed(container, key, symbol, index, is_item))
        return self.recorder.number(Expr(symbol))

    def _feed_item(self, container: Any, key: Any, tensor: torch.Tensor) -> None:
        """Make the number in a tensor an input of the trace."""
        with internals.isolated(), internals.no_torch_function():
            number = tensor.item()
        if is_number(number):
            symbol = self._symbol(container, key, None, number, is_item=True)
            self.items[id(tensor)] = tensor, symbol

    def item(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor that was there before the call, if it is fed; else None."""
        known = self.items.get(id(tensor))
        return None if known is None else known[1]

    def ask_for_items(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin again with the numbers in these tensors fed, and in others under their keys, if
        kept objects hold all of them.

        Python asks for such numbers to decide how to go on, as steps of RAdam do.
        """
        held = [
            (container, key, item)
            for container, before in self.contents.values()
            for key, item in _entries(before)
            if _is_scalar(item)
        ]
        keys = {id(item): key for _, key, item in held}
        if not tensors or not all(id(tensor) in keys for tensor in tensors):
            return
        wanted = {keys[id(tensor)] for tensor in tensors}
        places = {(id(container), Item(key)) for container, key, _ in held if key in wanted}
        if not places <= self.wanted:
            raise MustFeed(self.wanted | places)

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """The entries that hold other values than before: holder, key, and the new value."""
        held = [one for value, _ in self.objects.values() for one in _containers(vars(value))]
        reachable = set(map(id, held))
        for container, before in self.contents.values():
            if id(container) not in reachable:
                continue
            if isinstance(container, dict):
                for key, item in container.items():
                    if self._differs(container, key, before.get(key, ABSENT), item):
                        yield container, key, item
                yield from ((container, key, ABSENT) for key in before if key not in container)
            elif len(container) != len(before):
                yield container, None, list(container)
            else:
                for key, (old, new) in enumerate(zip(before, container, strict=True)):
                    if self._differs(container, key, old, new):
                        yield container, key, new

    def _differs(self, container: Any, key: Any, before: Any, now: Any) -> bool:
        fed = self.given.get((id(container), key), before)
        if type(fed) in _DICTS and type(now) is type(fed) and not now:
            return bool(self.contents[id(fed)][1])  # an empty dict for one that was empty
        return not is_like(fed, now)

    def effects(self, static: Callable[[Any], bool]) -> list[tuple[Effect, list[Any]]]:
        """The changes, each with the tensors and symbolic numbers in it.

        Args:
            static: tells whether a tensor is the program's by reference.

        Raises:
            MustFeed: a number was changed that is not fed, so that the trace has its value.
            UnsupportedCall: a value is neither a tensor nor plain.
        """
        found = list(self.changes())
        moving = [
            (id(holder), key)
            for holder, key, now in found
            if key is not None and self._is_moving(holder, key, now)
        ]
        if moving or (found and not self.recorder.symbolic):
            raise MustFeed(self.wanted | frozenset(moving))
        changed = [(holder, key, now) for holder, key, _, now in self.moved_tensors()]
        return [self._effect(holder, key, value, static) for holder, key, value in found + changed]

    def moved_tensors(self) -> list[tuple[Any, Any, Any, Any]]:
        """The places of other objects that the function writes tensors to: holder, key, the value
        before and now.

        Raises:
            MustFeed: it reads the tensor that was there, which is another one in the next call.
            UnsupportedCall: some items of a list are new, and others are not.
        """
        found, before = list(self.stored()), len(self.places)
        stored = self.recorder.modules.stored
        of_modules = {(id(one.holder), one.name) for one in stored if one.is_read}
        watch = frames.observer()
        for holder, key, old, now in found:
            if key is None and isinstance(holder, list) and any(a is b for a in old for b in now):
                what = "the function puts a tensor between the items of a list from outside"
                fix = "Append it, or store it in a dict or in an attribute."
                raise UnsupportedCall(what, source=None, fix=fix)
            place = id(holder), key
            is_read = place in of_modules or (watch and ("key", *place) in watch.edges)
            is_fed = is_read and isinstance(now, torch.Tensor) and _is_plain(old)
            if is_fed and not self._is_elsewhere(old, place):
                self.places.setdefault(place, (holder, key))
            if key is APPENDED and not old:  # it may be emptied before
                self.empty.append(holder)
        if len(self.places) > before:
            raise MustFeed(self.wanted)
        return found

    def _is_elsewhere(self, tensor: torch.Tensor, place: Place) -> bool:
        """Test whether the function can reach a tensor in another way than by this place."""
        modules, watch = self.recorder.modules, frames.observer()
        here = any((id(one.holder), one.name) == place for one in modules.stored)
        edges = () if watch is None else watch.edges.values()
        return modules.held[id(tensor)] > here or any(
            edge.value is tensor and (id(edge.holder), edge.key) != place for edge in edges
        )

    def stored(self) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Find tensors of the trace in places outside: holder, key, the value before and now."""
        watch = frames.observer()
        if watch is None or self.recorder.outer is not None:
            return
        for (kind, _, key), (holder, old) in tuple(watch.before.items()):
            if kind == "cell":
                now = ABSENT if _is_empty(holder) else holder.cell_contents
            else:
                now = holder.get(key, ABSENT) if kind == "key" else ABSENT
            is_other = id(holder) not in self.contents and id(holder) not in watch.contents
            if is_other and _has_tracers(now):
                yield holder, key, old, now
        for held, before in watch.contents.values():
            if id(held) not in self.contents and _has_tracers(held):
                yield from _stored_in(held, before)
        for one in self.recorder.modules.stored:
            yield one.holder, one.name, one.before, one.holder.get(one.name, ABSENT)

    def _is_moving(self, holder: Any, key: Any, now: Any) -> bool:
        before = self.contents[id(holder)][1]
        place = id(holder), key
        if place in self.given or place in self.wanted:
            return False
        if isinstance(holder, dict) and key not in before:
            return False
        if isinstance(now, torch.Tensor):
            return isinstance(before[key], torch.Tensor)
        return _is_numeric(before[key]) and _is_numeric(now)

    def _effect(
        self, holder: Any, key: Any, value: Any, static: Callable[[Any], bool]
    ) -> tuple[Effect, list[Any]]:
        if value is ABSENT:
            return self._conditional(Effect(holder, key, None), [])
        leaves, spec = pytree.flatten(value)
        dims = [leaf if isinstance(leaf, torch.Tensor) else as_dim(leaf) for leaf in leaves]
        flags = tuple(
            (isinstance(leaf, torch.Tensor) and not static(leaf)) or isinstance(leaf, Expr)
            for leaf in dims
        )
        for leaf, flag in zip(dims, flags, strict=True):
            if not flag and not isinstance(leaf, (torch.Tensor, *_FIXED)) and not self.is_old(leaf):
                raise self._refused(holder, key, leaf)
        outputs = list(chosen(leaves, flags))
        fixed = tuple(None if flag else leaf for leaf, flag in zip(dims, flags, strict=True))
        return self._conditional(Effect(holder, key, spec, fixed, flags), outputs)

    def _conditional(self, effect: Effect, outputs: list[Any]) -> tuple[Effect, list[Any]]:
        """The effect of a step that is skipped under a condition, which is its first output."""
        skipped = next((one for ids, one in self.skips if id(effect.holder) in ids), None)
        if skipped is None:
            return effect, outputs
        return dataclasses.replace(effect, is_conditional=True), [skipped, *outputs]

    def skip(self, value: Any, skipped: torch.Tensor, step: Callable[[], Any]) -> Any:
        """Step an optimizer unless a tensor is true: what it changes keeps its old value then."""
        self.take(value, type(value).__name__)
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

    def is_old(self, value: Any) -> bool:
        """Test whether the value is a kept object, or some kept object held it before."""
        return id(value) in self.objects or any(
            value is item for _, before in self.contents.values() for _, item in _entries(before)
        )

    def _refused(self, holder: Any, key: Any, value: Any) -> UnsupportedCall:
        owner = next((owner for owner, _ in self.objects.values()), None)
        who, fix = "the function", "Return it, and store it outside of the jitted function."
        if owner is not None:
            who = f"a step of {with_article(type(owner).__name__)} from outside"
            fix = "Call the step outside of the jitted function."
        what = (
            f"{who} stores {kind_of(value)} under {key!r}, which a program cannot make anew in each"
            " call"
        )
        return UnsupportedCall(what, source=None, fix=fix)

    def state(self) -> tuple[KeptState, ...]:
        """The guards of the objects: all that they held before, but for the feeds."""
        is_whole = bool(self.objects) and self.recorder.symbolic
        modules = self.recorder.modules.stored
        if not (is_whole or self.places or self.empty or modules):
            return ()
        used = {id(tensor) for tensor, _, _ in self.recorder.lifted()}
        unread = (one for one in modules if one.is_read is False and id(one.before) not in used)
        free = {(id(one.holder), one.name) for one in unread}
        name = ", ".join(path for _, path in self.objects.values()) or "what it stores tensors in"
        contents, fed = tuple(self.contents.values()) if is_whole else (), frozenset(self.given)
        contents += tuple((one, []) for one in self.empty)
        tensors = tuple((feed.holder, feed.key) for feed, _ in self.tensors)
        numbers = tuple(self.feeds)
        places = tuple((*one, self.given[place]) for place, one in self.places.items())
        options: dict[str, Any] = {"wanted": self.wanted, "tensors": tensors, "places": places}
        placed = self.places.keys() & {(id(one.holder), one.name) for one in modules}
        options["stored"] = frozenset(free | placed)
        return (KeptState(name, contents, fed, numbers, **options),)

    def restore(self) -> None:
        """Give the objects back what they held before."""
        self.recorder.give_up_steps()
        for holder, key, before, _ in tuple(self.stored()):
            if key is APPENDED:
                put(holder, None, before)
            elif isinstance(holder, types.CellType) and before is ABSENT:
                del holder.cell_contents
            else:
                put(holder, key, before)
        for container, before in self.contents.values():
            if isinstance(container, dict):
                for key in [key for key in container if key not in before]:
                    del container[key]
                for key, item in before.items():
                    old = self.lists.get((id(container), key), item)
                    if container.get(key, ABSENT) is not old:
                        container[key] = old
            elif len(container) != len(before) or any(
                a is not b for a, b in zip(container, before, strict=True)
            ):
                _refill(container, before)
        self.objects.clear()
        self.contents.clear()


def _containers(root: Any) -> Iterator[Any]:
    """A container and those in it."""
    yield root
    for _, item in _entries(root):
        if type(item) in _CONTAINERS:
            yield from _containers(item)


def _entries(container: Any) -> Iterator[tuple[Any, Any]]:
    return iter(container.items() if isinstance(container, dict) else enumerate(container))


def _type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a trace depends on."""
    is_plain = not tensor.is_conj() and not tensor.is_neg()
    place = tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    return *place, tensor.requires_grad, type(tensor), is_plain


def _stored_in(held: Any, before: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Find tensors of the trace that a list or dict did not hold before."""
    if isinstance(held, dict):
        for key, now in tuple(_entries(held)):
            if now is not before.get(key, ABSENT) and _has_tracers(now):
                yield held, key, before.get(key, ABSENT), now
    elif len(held) >= len(before) and all(a is b for a, b in zip(before, held, strict=False)):
        yield held, APPENDED, before, held[len(before) :]
    else:
        yield held, None, before, list(held)


def _has_tracers(value: Any) -> bool:
    """Test for tensors of the trace in a value. Those of a function inside it are lost, as under
    torch.func.
    """
    kinds = set(map(type, _leaves(value, _DEEP)))
    is_lost = any(issubclass(kind, EscapedValue) for kind in kinds)
    return not is_lost and any(issubclass(kind, internals.Tracer) for kind in kinds)


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """The leaves of a value; no code of the user's classes runs."""
    if not issubclass(type(value), (list, tuple, dict)) or not depth:
        yield value
        return
    for item in tuple(dict.values(value) if issubclass(type(value), dict) else value):
        yield from _leaves(item, depth - 1)


def _is_plain(value: Any) -> bool:
    """Test for a tensor that a program can be given instead of another one."""
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is ABSENT
    except ValueError:
        return True


def _is_scalar(value: Any) -> bool:
    """Test for a tensor whose number a symbol can stand for."""
    return isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex()


def _is_numeric(value: Any) -> bool:
    """Test for a number, or a tuple or list of numbers."""
    parts = value if type(value) in (tuple, list) else (value,)
    return bool(parts) and all(type(part) in (int, float) for part in parts)


def is_like(before: Any, now: Any) -> bool:
    """Test whether a value is the old one: an object by identity, plain data by value and type."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if type(before) is tuple or (type(before) is list and before and not _is_holding(before)):
        return len(before) == len(now) and all(map(is_like, before, now))
    if isinstance(before, (torch.SymInt, torch.SymFloat)):
        return as_dim(before) == as_dim(now)
    return type(before) in _PLAIN and Literal(before) == Literal(now)


def _is_holding(values: list[Any]) -> bool:
    """Test for a list whose entries are no numbers: it counts by identity."""
    return not all(isinstance(one, (int, float, torch.SymInt, torch.SymFloat)) for one in values)


# ---- the guard ----


@dataclass(slots=True, eq=False)
class KeptState:
    """The guard of kept objects: the content of their containers, but for fed numbers, whose
    decisions it checks.
    """

    path: str
    contents: tuple[tuple[Any, Any], ...]
    fed: frozenset[Place]
    feeds: tuple[Feed, ...]
    decide: Callable[..., bool] | None = None
    wanted: frozenset[Place] = frozenset()
    refused: frozenset[Place] = frozenset()
    tensors: tuple[tuple[Any, Any], ...] = ()
    places: tuple[tuple[Any, Any, torch.Tensor], ...] = ()
    stored: frozenset[Place] = frozenset()
    quick: Callable[[], bool] | None = None
    slow: tuple[tuple[Any, Any], ...] = ()

    def prepare(self) -> None:
        """Make the quick check of the dicts that a step leaves alone, once it has run."""
        numbered = {place for place, _ in self.fed}
        still = [
            container
            for container, _ in self.contents
            if isinstance(container, dict) and id(container) not in numbered
        ]
        self.quick = internals.dict_guard(tuple(still))
        known = set(map(id, still))
        self.slow = tuple(pair for pair in self.contents if id(pair[0]) not in known)

    def __call__(self) -> bool:
        quick = self.quick is not None and self.quick()
        if not all(map(self._matches, self.slow if quick else self.contents)):
            return False
        if not quick:
            self.prepare()
        if self._unfed():
            return False
        fed = [id(holder[key]) for holder, key in self.tensors]
        if len(set(fed)) < len(fed):
            return False
        if self.decide is None:
            return True
        numbers = [feed.read() for feed in self.feeds]
        are_numbers = (
            is_number(one) for one, f in zip(numbers, self.feeds, strict=True) if f.is_item
        )
        return all(are_numbers) and self.decide(*numbers)

    def _matches(self, pair: tuple[Any, Any]) -> bool:
        container, before = pair
        if len(container) != len(before):
            return False
        if isinstance(container, dict):
            return all(
                is_like(item, container.get(key, ABSENT))
                or self._is_fed(container, key, item, container.get(key, ABSENT))
                for key, item in before.items()
            )
        return all(
            is_like(item, now) or self._is_fed(container, key, item, now)
            for key, (item, now) in enumerate(zip(before, container, strict=True))
        )

    def _is_fed(self, container: Any, key: Any, before: Any, now: Any) -> bool:
        if (id(container), key) not in self.fed or type(now) is not type(before):
            return False
        if isinstance(now, torch.Tensor):
            return _type_of(now) == _type_of(before)
        if type(now) not in (tuple, list):
            return is_number(now)
        pairs = zip(now, before, strict=False)
        return len(now) == len(before) and all(
            type(a) is type(b) and is_number(a) for a, b in pairs
        )

    def _unfed(self) -> list[Any]:
        """The keys of places that no longer hold a tensor like the one of the trace."""
        return [
            key
            for holder, key, before in self.places
            if not self._is_fed(holder, key, before, holder.get(key, ABSENT))
        ]

    def moved(self) -> frozenset[Place]:
        """The places of numbers that should be fed: those that were, and those that have changed
        since.
        """
        changed = {
            (id(container), key)
            for container, before in self.contents
            if isinstance(container, dict)
            for key, item in before.items()
            if _is_numeric(item)
            and type(container.get(key)) is type(item)
            and not is_like(item, container[key])
        }
        return (self.wanted | changed) - self.refused

    def change(self) -> str:
        """Describe the change; empty if nothing has changed."""
        pair = next((pair for pair in self.contents if not self._matches(pair)), None)
        if pair is None and (keys := self._unfed()):
            return f"another kind of value is stored under {', '.join(map(repr, keys))}"
        if pair is None:
            return "" if self() else f"a decision about the numbers of {self.path} comes out anew"
        now, before = dict(_entries(pair[0])), dict(_entries(pair[1]))
        keys = [
            key
            for key in {**before, **now}
            if not is_like(before.get(key, ABSENT), now.get(key, ABSENT))
            and not self._is_fed(pair[0], key, before.get(key), now.get(key))
        ]
        names = [repr(key) for key in keys if isinstance(key, str)]
        return f"the state of {self.path} has changed" + (f": {', '.join(names)}" if names else "")


def decided_by(feeds: Sequence[Feed], relations: Sequence[Expr]) -> Callable[..., bool] | None:
    """A check of fed numbers by the relations that the trace demands of them."""
    if not relations:
        return None
    names = ", ".join(str(feed.symbol) for feed in feeds)
    text = " and ".join(f"({relation})" for relation in relations)
    context: dict[str, Any] = {"math": math}
    lines = [f"def decide({names}):", f"    return {text}", ""]
    run_text(program_text(lines), "decide", context)
    return context["decide"]
