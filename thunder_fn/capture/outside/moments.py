"""Moments of a traced function: what places outside hold at a point of it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from thunder_fn.capture.objects import ABSENT
from thunder_fn.capture.outside.edges import look, store
from thunder_fn.capture.outside.frames import observer
from thunder_fn.capture.outside.kinds import is_of_trace
from thunder_fn.capture.places import Snapshot, snapshot

Place = tuple[str, int, Any]
Places = Mapping[Place, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """A moment of a traced function: the first one, or that of `values` and `held`.

    Args:
        counted, before, contents: the places to which the function writes, as an observer has them.
            Those that it finds later held then what they held at first.
        others: what the function may change and a program does not: buffers of numbers, and the
            hooks and parts of modules.

    Values of the trace are not given back, but for those of this moment.
    """

    counted: Places
    before: Places
    contents: Mapping[int, Snapshot]
    others: Mapping[int, Snapshot]
    values: Mapping[Place, Any] = field(default_factory=dict[Place, Any])
    held: Mapping[int, Snapshot] = field(default_factory=dict[int, Snapshot])

    def now(self) -> Moment:
        """Make the present moment."""
        values = {place: look(place[0], on, place[2]) for place, on, _ in self._known()}
        held = {of: snapshot(one.container) for of, one in self._held().items()}
        return replace(self, values=values, held=held)

    def __call__(self) -> None:
        """Give the places back what they held at this moment."""
        self._restore(None)

    def _restore(self, other: Moment | None) -> None:
        """Restore all, or the places that held something else at another moment."""
        for place, holder, old in self._known():
            kind, _, key = place
            value = self.values.get(place, old)
            is_kept = place in self.values or not is_of_trace(old)
            is_asked = other is None or other.values.get(place, old) is not value
            now = look(kind, holder, key)
            is_gone = kind == "index" and now is ABSENT  # the list is restored as a whole
            if is_kept and is_asked and now is not value and not is_gone:
                store(kind, holder, key, value)
        for of, first in self._held().items():
            one = self.held.get(of, first)
            is_imports = one.container is sys.modules  # what is imported stays imported
            is_kept = of in self.held or not is_of_trace(one.before)
            is_asked = other is None or not one.has_same(other.held.get(of, first))
            if is_kept and is_asked and not is_imports:
                one.restore()

    @property
    def is_running(self) -> bool:
        """Test whether the function is being captured still."""
        watch = observer()
        while watch is not None and watch.contents is not self.contents:
            watch = watch.around
        return watch is not None

    @contextmanager
    def visited(self) -> Generator[None]:
        """Let the places hold inside what they held at this moment, and afterwards what they hold
        now.
        """
        now = self.now()
        self()
        try:
            yield
        finally:
            now()

    @contextmanager
    def again(self) -> Generator[None]:
        """Let the places hold inside what they held at this moment. After the capture, what the
        function had not changed then is as it is. Of what is changed inside, that stays so which
        nothing has changed since this moment: the other changes have been made before.
        """
        now = self.now()
        self._restore(None if self.is_running else replace(self, values={}, held={}))
        try:
            yield
        finally:
            now._restore(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Moment):
            return NotImplemented
        if other.contents is not self.contents:  # of another capture, whose traces may be equal
            return True
        return all(
            self.values.get(place, old) is other.values.get(place, old)
            for place, _, old in self._known()
        ) and all(
            self.held.get(of, first).has_same(other.held.get(of, first))
            for of, first in self.contents.items()
        )

    def __hash__(self) -> int:
        return hash(Moment)

    def _held(self) -> Mapping[int, Snapshot]:
        return {**self.contents, **self.others}

    def _known(self) -> list[tuple[Place, Any, Any]]:
        known = {**self.counted, **self.before}
        return [(place, on, old) for place, (on, old) in known.items()]
