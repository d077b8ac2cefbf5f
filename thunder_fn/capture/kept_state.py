"""The guard of a program that steps objects from outside: their state is as it was in the capture.

Numbers that are inputs of the trace (`Feed`) may differ: only the decisions about them are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.capture.comparisons import entries_of, has_keys_of, is_like, is_numeric
from thunder_fn.capture.numbers.arguments import is_number
from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.reads import length_of
from thunder_fn.capture.places import Entry, Feed, Snapshot, held_at
from thunder_fn.capture.renewed import Form
from thunder_fn.ir.text import program_text, run_text
from thunder_fn.ir.trace import Expr


@dataclass(slots=True, eq=False)
class KeptState:
    """The guard of kept objects: the content of their containers, but for fed numbers, whose
    decisions it checks.
    """

    path: str
    contents: tuple[Snapshot, ...] = ()
    fed: dict[Entry, Form] = field(default_factory=dict[Entry, Form])
    feeds: tuple[Feed, ...] = ()
    decide: Callable[..., bool] | None = None
    wanted: frozenset[Entry] = frozenset()
    refused: frozenset[Entry] = frozenset()
    places: tuple[tuple[Any, Any, Form | None], ...] = ()
    """The places that are fed with tensors, and those elsewhere with numbers: containers, keys, and
    what they have to hold.
    """
    stored: frozenset[Entry] = frozenset()
    apart: frozenset[int] = frozenset()
    """The identities of tensors and containers that the function found elsewhere: a place that is
    fed held none of them.
    """
    within: frozenset[int] = frozenset()
    """The identities of the containers that were in places that are fed."""
    quick: Callable[[], bool] | None = None
    slow: tuple[Snapshot, ...] = ()

    def prepare(self) -> None:
        """Make the quick check of the dicts that a step leaves alone, once it has run."""
        numbered = {place for place, _ in self.fed}
        still = [
            one.container
            for one in self.contents
            if isinstance(one.container, dict) and id(one.container) not in numbered
        ]
        self.quick = internals.dict_guard(tuple(still))
        known = set(map(id, still))
        self.slow = tuple(one for one in self.contents if id(one.container) not in known)

    def __call__(self) -> bool:
        quick = self.quick is not None and self.quick()
        if not all(map(self._matches, self.slow if quick else self.contents)):
            return False
        if not quick:
            self.prepare()
        found = self._identities()
        if found is None or len(set(found)) < len(found) or not self.apart.isdisjoint(found):
            return False
        if self.decide is None:
            return True
        numbers = [feed.read() for feed in self.feeds]
        are_numbers = (
            is_number(one) for one, f in zip(numbers, self.feeds, strict=True) if f.is_item
        )
        return all(are_numbers) and self.decide(*numbers)

    def _identities(self) -> list[int] | None:
        """Find the tensors and containers of which each has to be in one place alone; None if some
        place holds another kind of value.
        """
        known = list[int]()
        for holder, key, form in self.places:
            if (found := _found(holder, key, form)) is None:
                return None
            known += found
        return known

    def _matches(self, one: Snapshot) -> bool:
        container, before = one.container, one.before
        if length_of(container) != len(before):
            return False
        if isinstance(container, dict) and not has_keys_of(container, before):
            return False
        pairs = zip(entries_of(container), entries_of(before), strict=True)
        return all(
            is_like(item, now) or self._is_fed(container, key, now)
            for (key, now), (_, item) in pairs
        )

    def _is_fed(self, container: Any, key: Any, now: Any) -> bool:
        form = self.fed.get((id(container), key))
        return form is not None and form.identities(now) is not None

    def moved(self) -> frozenset[Entry]:
        """The places of numbers that should be fed: those that were, and those that have changed
        since.
        """
        changed = {
            (id(one.container), key)
            for one in self.contents
            if isinstance(one.container, dict)
            for key, item in one.before.items()
            if is_numeric(item)
            and type(now := dict.get(one.container, key)) is type(item)
            and not is_like(item, now)
        }
        return (self.wanted | changed) - self.refused

    def change(self) -> str:
        """Describe the change; empty if nothing has changed."""
        changed = next((one for one in self.contents if not self._matches(one)), None)
        keys = [key for holder, key, form in self.places if _found(holder, key, form) is None]
        if changed is None and keys:
            return f"another kind of value is stored under {', '.join(map(repr, keys))}"
        if changed is None:
            return "" if self() else f"a decision about the numbers of {self.path} comes out anew"
        container = changed.container
        now, before = dict(entries_of(container)), dict(entries_of(changed.before))
        keys = [
            key
            for key in {**before, **now}
            if not is_like(before.get(key, ABSENT), now.get(key, ABSENT))
            and not self._is_fed(container, key, now.get(key))
        ]
        names = [repr(key) for key in keys if isinstance(key, str)]
        return f"the state of {self.path} has changed" + (f": {', '.join(names)}" if names else "")


def _found(holder: Any, key: Any, form: Form | None) -> list[int] | None:
    return None if form is None else form.identities(held_at(holder, key))


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
