"""Objects of PyTorch from outside that keep state in Python: optimizers and gradient scalers.

A traced step runs the object's own code. It is watched from its first use in a capture. Afterwards
it holds again what it held before, and every change is an `Effect`: an entry of a dict or list with
its new value, which the program's epilogue stores in each call. A number that the function changes,
or that a schedule changes between calls, is a `Feed`: an input of the trace that the program reads
from its place in each call. Tensors are closed over and changed in place, as any others.

`KeptState` holds everything else that the trace depends on. A program is guarded by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.comparisons import entries_of, is_like, is_numeric
from thunder_fn.capture.elsewhere import CONTAINERS, DICTS, Elsewhere, check_keys
from thunder_fn.capture.fed import Fed, MustFeed, is_scalar
from thunder_fn.capture.kept_state import KeptState
from thunder_fn.capture.made import made_anew
from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside import frames
from thunder_fn.capture.outside.edges import store
from thunder_fn.capture.places import Change, Effect, Entry, Item, Snapshot, Update, snapshot
from thunder_fn.capture.renewed import parts_of
from thunder_fn.capture.storable import FIXED, Storable
from thunder_fn.capture.stored import alive, in_order, reordered, take_back, with_objects
from thunder_fn.capture.unread import Unread
from thunder_fn.ir.rules import chosen
from thunder_fn.ir.trace import Expr, as_dim

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

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


@dataclass(slots=True, eq=False)
class Kept:
    """The kept objects of one capture.

    Args:
        met: the objects that the function can reach, from captures before this one.
        elsewhere: what the function stores outside of them.
    """

    recorder: Recorder
    fed: Fed
    storable: Storable
    elsewhere: Elsewhere
    contents: dict[int, Snapshot]
    objects: dict[int, tuple[Any, str]] = field(default_factory=dict)
    met: dict[int, tuple[Any, str]] = field(default_factory=dict)
    lists: dict[Entry, Any] = field(default_factory=dict)
    counts: dict[int, Any] = field(default_factory=dict)
    skips: list[tuple[set[int], torch.Tensor]] = field(default_factory=list)
    updates: list[tuple[Update, Any]] = field(default_factory=list[tuple[Update, Any]])
    """Updates of places outside by each call, and their values before."""
    plain: list[Change] = field(default_factory=list[Change])
    """Plain data that each call stores outside."""
    nodes: list[tuple[Effect, list[tuple[int, Any]]]] = field(default_factory=list[Any])
    """The nodes of each value that is stored and may be changed, by number."""
    moved: list[Snapshot] = field(default_factory=list[Snapshot])
    """Dicts in which each call moves entries."""
    is_over: bool = False

    @classmethod
    def beginning(
        cls,
        recorder: Recorder,
        wanted: frozenset[Entry],
        met: dict[int, tuple[Any, str]],
        places: dict[Entry, tuple[Any, Any]],
    ) -> Kept:
        """Begin with what captures before this one have found: the places of numbers that have to
        be fed, objects of PyTorch that the function can reach, and places of others that it reads
        and writes tensors to.
        """
        fed, contents = Fed(recorder, wanted), dict[int, Snapshot]()
        storable = Storable(recorder, fed)
        elsewhere = Elsewhere(recorder, fed, storable, contents, places)
        return cls(recorder, fed, storable, elsewhere, contents, met=met)

    def begin(self, value: Any, *, is_step: bool = True) -> None:
        """Begin a step of an optimizer, or a method that leaves its state alone. What they read is
        guarded here.
        """
        self.met.setdefault(id(value), (value, type(value).__name__))
        if not self.recorder.symbolic:
            raise MustFeed(self.fed.wanted)
        self.take(*self.met[id(value)])
        if is_step:
            self._look(vars(value))
        self.recorder.begin_step()

    def take(self, value: Any, path: str) -> None:
        """Watch an object from now on, until the function has run."""
        if id(value) in self.objects or self.is_over:
            return
        self.objects[id(value)] = value, path
        self.storable.stepped = self.storable.stepped or type(value).__name__
        known, held = len(self.contents), vars(value)
        state = held.get("state")
        if isinstance(value, torch.optim.Optimizer) and type(state) in DICTS:
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
                raise MustFeed(self.fed.wanted)
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
                if is_lr or (id(container), key) in self.fed.wanted:
                    self.fed.feed(container, key, item)
                if (id(container), Item(key)) in self.fed.wanted and is_scalar(item):
                    self.fed.feed_item(container, key, item)

    def meet(self, value: Any, path: str) -> None:
        """Watch an object that the function can reach. Its first step asks for symbols."""
        if issubclass(type(value), KINDS):
            self.met[id(value)] = value, path
            self.take(value, path)

    def take_all(self) -> None:
        """Watch the objects that an earlier capture of the function has met."""
        for value, path in tuple(self.met.values()):
            self.take(value, path)
        self.elsewhere.take()

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
        elif type(item) in CONTAINERS:
            self._note(item)

    def ask_for_items(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin again with the numbers in these tensors as inputs, and those under the same keys
        elsewhere, if kept objects hold all of them.

        Python asks for such numbers to decide how to go on, as steps of RAdam do.
        """
        held = [
            (one.container, key, item)
            for one in self.contents.values()
            for key, item in entries_of(one.before)
            if is_scalar(item)
        ]
        keys = {id(item): key for _, key, item in held}
        if not tensors or not all(id(tensor) in keys for tensor in tensors):
            return
        wanted = {keys[id(tensor)] for tensor in tensors}
        places = {(id(container), Item(key)) for container, key, _ in held if key in wanted}
        if not places <= self.fed.wanted:
            raise MustFeed(self.fed.wanted | places)

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
        fed, now = self.fed.given.get(change.entry, change.before), change.now
        if type(fed) in DICTS and type(now) is type(fed) and not now:
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
            raise MustFeed(self.fed.wanted | frozenset(moving))
        found += [*self.elsewhere.moved_tensors(), *self.elsewhere.renumbered()]
        self.plain = list(self.elsewhere.stored_plainly())
        check_keys([*found, *self.plain])
        for one in (*found, *self.plain):
            self.recorder.texts.check(one.now, "the function stores")
        whole = {id(one.holder) for one in (*found, *self.plain) if one.key is None}
        updates = [pair for pair in self.elsewhere.updated() if id(pair[0].holder) not in whole]
        self.updates = [
            (one, old) for one, old in updates if not self.storable.holds_given(one.value)
        ]
        given = [(one, old) for one, old in updates if self.storable.holds_given(one.value)]
        self.plain += [Change(one.holder, one.key, old, one.value) for one, old in given]
        self.elsewhere.check_unstorable()
        found, self.moved = reordered([*found, *self.plain], _before())
        changes = [self._effect(one) for one in in_order(found)]
        return [*changes, *((one, list[Any]()) for one, _ in self.updates)]

    def _is_touched(self) -> bool:
        """Test for a method that changes containers, even one that found nothing to change."""
        watch = frames.observer()
        return watch is not None and not self.contents.keys().isdisjoint(watch.changing)

    def _is_moving(self, change: Change) -> bool:
        """Test for a number or tensor of a kept object that may be another one in each call."""
        if change.key is None or change.entry in self.fed.given or change.entry in self.fed.wanted:
            return False
        if isinstance(change.now, torch.Tensor):
            return isinstance(change.before, torch.Tensor)
        return is_numeric(change.before) and is_numeric(change.now)

    def _effect(self, change: Change) -> tuple[Effect, list[Any]]:
        holder, key, value = change.holder, change.key, change.now
        if value is ABSENT:
            return self._conditional(Effect(holder, key, None), [])
        storable = self.storable
        value = with_objects(value, storable.was_there)
        leaves, spec = pytree.flatten_but(value, storable.was_there)
        leaves = [*map(alive, leaves)]
        dims = [leaf if isinstance(leaf, torch.Tensor) else as_dim(leaf) for leaf in leaves]
        flags = tuple(
            (isinstance(leaf, torch.Tensor) and not self.storable.is_fixed(leaf))
            or isinstance(leaf, Expr)
            for leaf in dims
        )
        for leaf, flag in zip(dims, flags, strict=True):
            is_fixed = isinstance(leaf, (torch.Tensor, *FIXED)) or storable.is_storable(leaf)
            if not flag and not is_fixed and not self.is_old(leaf):
                raise storable.refused(holder, key, leaf)
            if is_fixed:
                storable.check_reach(holder, key, leaf)
        outputs = list(chosen(leaves, flags))
        fixed = tuple(None if flag else leaf for leaf, flag in zip(dims, flags, strict=True))
        effect = Effect(holder, key, spec, fixed, flags, anew=made_anew(fixed))
        effect, outputs = self._conditional(effect, outputs)
        self.nodes.append((effect, pytree.changeable(value, spec, storable.was_there)))
        return effect, outputs

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

    def is_old(self, value: Any) -> bool:
        """Test whether the value is a kept object, or some kept object held it before, or a dict
        in which each call moves it.
        """
        held = *self.contents.values(), *self.moved
        return id(value) in self.objects or any(
            value is item for one in held for _, item in entries_of(one.before)
        )

    def state(self) -> tuple[KeptState, ...]:
        """Return the guard of the objects: all that they held before, except the feeds."""
        is_whole, elsewhere = bool(self.objects) and self.recorder.symbolic, self.elsewhere
        if not (is_whole or elsewhere.places or elsewhere.exact or self.recorder.modules.stored):
            return ()
        name = ", ".join(path for _, path in self.objects.values()) or "what it stores in Python"
        contents = (*(self.contents.values() if is_whole else ()), *elsewhere.exact)
        forms = {place: parts_of(value).form() for place, value in self.fed.given.items()}
        state = KeptState(name, contents, forms, tuple(self.fed.numbers))
        state.wanted = self.fed.wanted
        feeds = (feed for feed, _ in self.fed.tensors)
        with_tensors = {(id(feed.holder), feed.key): (feed.holder, feed.key) for feed in feeds}
        state.places = tuple(
            (*held, forms.get(place))
            for place, held in {**with_tensors, **elsewhere.places}.items()
        )
        state.within, state.apart = elsewhere.within(), elsewhere.apart()
        state.stored = elsewhere.unread()
        return (state,)

    def restore(self) -> None:
        """Give the objects back all that they held before."""
        self.recorder.give_up_steps()
        for one, old in self.updates:
            store(one.kind, one.holder, one.key, old)
        for one in self.plain:
            take_back(one)
        for one in tuple(self.elsewhere.stored()):
            take_back(one)
        for (container, key), item in self.lists.items():
            self.contents[container].before[key] = item
        for one in self.contents.values():
            one.restore()
        self.elsewhere.restore()
        for one in self.moved:
            one.restore()
        self.objects.clear()
        self.contents.clear()
        self.is_over = True


def _before() -> dict[int, Snapshot]:
    """The content of containers and objects from outside before the function ran."""
    watch = frames.observer()
    if watch is None:
        return {}
    fields = {of: Snapshot(held, before) for of, (held, before) in watch.dicts.items()}
    return {**fields, **watch.contents}


def _containers(root: Any) -> Iterator[Any]:
    """A container and those in it."""
    yield root
    for _, item in entries_of(root):
        if type(item) in CONTAINERS:
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
