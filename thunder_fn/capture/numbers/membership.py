"""`n in table` for a symbolic int and a set or dict of a few plain keys: a decision about each int
in it. The number itself stays a symbol.

Python asks for a hash, and compares with keys of that hash alone. So whoever answers has to know
the keys: they are found where the code of the frame that asks has just loaded them.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter, OrderedDict, defaultdict
from typing import Any

from thunder_fn.capture.instructions import instructions

_TABLES = (set, frozenset, dict, Counter, OrderedDict, defaultdict)
_KEYS = (int, str, bytes, type(None))
_MOST = 16
"""The greatest number of keys that are asked about one by one."""
_NAMES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_GLOBAL", "LOAD_NAME")


def hash_in_table(number: Any, frame: types.FrameType) -> int | None:
    """The hash of the key that a number equals, or of none of the keys, if the frame searches a
    table for it; None if it does something else.
    """
    table = _searched(frame)
    if type(table) not in _TABLES or len(table) > _MOST:
        return None
    keys = [*table]
    if any(type(key) not in _KEYS for key in keys):
        return None
    for key in keys:
        if type(key) is int and number == key:
            return hash(key)
    taken = set(map(hash, keys))
    return next(value for value in range(len(taken) + 1) if value not in taken)


def _searched(frame: types.FrameType) -> Any:
    """The container of the `in` that a frame is at; None if it is at none, or if what it searches
    is no name, constant or attribute of one.
    """
    before: list[Any] = []
    for one in instructions(frame.f_code):
        if one.offset == frame.f_lasti:
            return _loaded(before, frame) if one.opname == "CONTAINS_OP" else None
        before.append(one)
    return None


def _loaded(steps: list[Any], frame: types.FrameType) -> Any:
    names: list[str] = []
    while steps and steps[-1].opname == "LOAD_ATTR":
        names.append(steps.pop().argval)
    value = _base(steps[-1], frame) if steps else None
    for name in reversed(names):
        value = inspect.getattr_static(value, name, None)
    return value


def _base(one: Any, frame: types.FrameType) -> Any:
    if one.opname == "LOAD_CONST":
        return one.argval
    if one.opname.startswith(_NAMES):
        return frame.f_locals.get(one.argval, frame.f_globals.get(one.argval))
    return None
