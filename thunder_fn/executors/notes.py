"""Comments in programs: the places where composites began. A note names modules as the outermost
call knows them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from thunder_fn.ir.trace import Source, Trace


@dataclass(frozen=True, slots=True)
class Note:
    """A composite that begins: its name, its user's line if that is new, and its depth."""

    text: str
    source: Source | None
    depth: int

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.text}" + (
            f" ({self.source.module})" if self.source is not None else ""
        )

    def inside(self, call: Source | None) -> Note:
        """The note in a part that is unfolded in place of a call."""
        return Note(self.text, self.source and self.source.called_from(call), self.depth + 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A claimed trace, and which composites began before each of its equations."""

    trace: Trace
    notes: dict[int, tuple[Note, ...]]

    def without(self, trace: Trace, gone: tuple[int, ...]) -> Part:
        """The notes moved to where their equations are now that some are gone."""
        notes = dict[int, tuple[Note, ...]]()
        for position, found in self.notes.items():
            place = position - bisect_left(gone, position)
            notes[place] = (*notes.get(place, ()), *found)
        return Part(trace, notes)

    def reordered(self, trace: Trace, firsts: tuple[int, ...]) -> Part:
        """The notes of composites that begin with an equation that is still first; the others
        are inside regions.
        """
        places = {first: place for place, first in enumerate(firsts)}
        return Part(trace, {places[at]: found for at, found in self.notes.items() if at in places})
