"""Frames of the user's code, as their expressions are evaluated."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from thunder_fn.capture.outside.edges import Edge
from thunder_fn.capture.outside.expressions import Reading, Source
from thunder_fn.capture.outside.frames import is_library

Memo: TypeAlias = dict[Source, Sequence[Any]]
"""The values of the expressions that have been evaluated."""


Pending: TypeAlias = tuple[Source, bool, dict[tuple[str, int, Any], Edge]]
"""An expression that may not run, whether these are the edges to the content of a container that it
looks into, and the edges.
"""


class Frame:
    """A frame of the user's code: its names, what callees gave it, and the frame that called it."""

    __slots__ = (
        "back",
        "cells",
        "code",
        "found",
        "globals",
        "has_ended",
        "is_library",
        "line",
        "locals",
        "over",
        "pending",
        "places",
        "reading",
        "returned",
        "stand_ins",
        "stored",
        "touched",
        "unbound",
        "waits",
    )

    def __init__(self, frame: types.FrameType, back: Frame | None, known: Reading) -> None:
        self.code, self.globals, self.back, self.reading = (
            frame.f_code,
            frame.f_globals,
            back,
            known,
        )
        self.locals: list[dict[str, Any]] = [locals_of(frame)]
        self.returned: dict[int, tuple[Any, types.CodeType]] = {}
        self.cells: dict[str, types.CellType] = {}
        self.is_library, self.line = (
            is_library(frame.f_code.co_filename),
            frame.f_code.co_firstlineno,
        )
        self.over: tuple[Source, Frame] | None = None
        self.stored: dict[str, dict[int, Any]] = {}
        self.stand_ins: dict[tuple[int, ...], Any] = {}
        self.touched: set[int] = set()
        """The holders that were looked at for it."""
        self.unbound = known.kept.difference(self.locals[0])
        """The locals that have no value, neither at the start nor at the end."""
        self.pending: list[Pending] = []
        """The edges of expressions that may not run."""
        self.found: dict[Source, bool] = {}
        """Tests, for each item whose key became known, whether all of its keys are."""
        self.has_ended = False
        self.places: dict[tuple[str, int, Any], Any] | None = None
        """The content of places outside when it began; None unless a cache keeps its answer."""
        self.waits = False
        """Set where an attribute or item is the result of a callee."""

    @property
    def is_over(self) -> bool:
        """Test whether the locals at the end of the frame are known."""
        return len(self.locals) > 1

    def end(self, frame: types.FrameType) -> None:
        """Note the locals at the end of the frame."""
        self.locals.append(locals_of(frame))
        self.unbound = self.unbound.difference(self.locals[-1])

    def take(self, done: Done) -> None:
        """Take the findings for a frame of the same code with the same values."""
        self.touched |= done.touched
        self.waits = self.waits or done.waits
        self.pending += done.pending
        self.found |= done.found

    def stand_in(self, kind: type, *parts: Any) -> Any:
        """The one object of a kind for these parts, such as a method and what it is bound to: a
        frame that is looked at again has the same values.
        """
        key = tuple(map(id, (kind, *parts)))
        if key not in self.stand_ins:
            self.stand_ins[key] = kind(*parts)
        return self.stand_ins[key]


def callers(frame: Frame | None) -> Iterator[Frame]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.back


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The locals of a frame now, and what is in its cells. The body of a class does not show the
    variables of the functions around it: the frame in which it is run has them.
    """
    found, names = dict(frame.f_locals), frame.f_code.co_freevars
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED or not names or frame.f_back is None:
        return found
    around = locals_of(frame.f_back)
    return {name: around[name] for name in names if name in around} | found


@dataclass(slots=True, eq=False)
class Done:
    """The findings for a frame: the holders that were looked at, whether it waits for callees,
    and what its end decides.
    """

    touched: set[int]
    waits: bool
    pending: tuple[Pending, ...]
    found: dict[Source, bool]


@dataclass(slots=True, eq=False)
class Settled:
    """The values of a code object's expressions that depend on its globals alone, and the
    holders that were looked at.
    """

    names: dict[str, Any]
    memo: Memo
    touched: set[int]
