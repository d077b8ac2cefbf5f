"""Frames of the user's code, as their expressions are evaluated."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from thunder_fn.capture.outside.expressions import Reading, Source
from thunder_fn.capture.outside.frames import is_library

Memo: TypeAlias = dict[Source, Sequence[Any]]
"""The values of the expressions that have been evaluated."""


class Frame:
    """A frame of the user's code: its names, what callees gave it, and the frame that called it."""

    __slots__ = (
        "back",
        "cells",
        "code",
        "globals",
        "is_library",
        "line",
        "locals",
        "over",
        "reading",
        "returned",
        "stand_ins",
        "stored",
        "touched",
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
        self.waits = False
        """Set where an attribute or item is the result of a callee."""

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
class Settled:
    """The values of a code object's expressions that depend on its globals alone, and the
    holders that were looked at.
    """

    names: dict[str, Any]
    memo: Memo
    touched: set[int]
