"""Python's limit of nested calls, and programs that are nested deeper than it allows.

A walk over a trace calls itself for each body, and capture calls itself for each module, composite
and structured op inside another one. Python allows 1,000 calls inside each other, which is 25 to
100 such levels. So whoever makes a level asks for room for it. The limit rises and never falls: a
trace is walked wherever it goes, also by `==`, `print` and `pickle`.

The limit is the process's. Other threads notice nothing but that an endless recursion ends later.
"""

from __future__ import annotations

import sys

CALLS = 40
"""Calls that the deepest of our walks makes for each level."""
FIRST = 16
"""Levels for which Python's own limit is enough."""
MOST = 10_000
"""The limit never becomes more: the stack of a thread, usually 8 MB, holds as many calls."""


def make_room(level: int) -> None:
    """Raise the recursion limit for a walk over this number of levels."""
    if level > FIRST:
        wanted = min(MOST, 1000 + CALLS * level)
        if sys.getrecursionlimit() < wanted:
            sys.setrecursionlimit(wanted)
