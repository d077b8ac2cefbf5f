"""Watchers, which learn of every trace as a capture or a called transform makes it. The
inspector is one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TypeAlias

from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Trace

Watcher: TypeAlias = Callable[[str, Trace, Trace | None], None]
"""A function of the maker of a trace ("capture" or a transform's name), the trace, and the trace
that it was made of.
"""

_watcher: ContextVar[Watcher | None] = ContextVar("thunder_fn_watcher", default=None)


def watched_by(watcher: Watcher) -> AbstractContextManager[None]:
    """Call `watcher` for each trace that is captured or transformed inside, in this thread."""
    return setting(_watcher, watcher)


def made(how: str, trace: Trace, of: Trace | None = None) -> None:
    """Tell who watches."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(how, trace, of)
