"""Python's garbage collector waits while a function is captured and a program is made, in a process
of one thread.

Nearly all that is made then stays alive, and each collection goes through everything that PyTorch's
modules hold. Collections took a quarter of the time of tracing a training step.
"""

from __future__ import annotations

import gc
import threading
import types
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_FROZEN_BY_PYTHON = 1000
"""Fewer frozen objects than these are Python's own: 3.12 begins with 375. A program that freezes
after its imports has ten thousands.
"""


class _Here(threading.local):
    collects = False


_here = _Here()


def _note(phase: str, info: dict[str, int]) -> None:
    """Tell this thread alone that a collection runs in it; other threads see nothing."""
    _here.collects = phase == "start"


gc.callbacks.insert(0, _note)


def is_collecting() -> bool:
    """Test whether the collector runs in this thread."""
    return _here.collects


def is_collectors(code: types.CodeType) -> bool:
    """Test for code that the collector calls in this thread: a callback of its own or of a weak
    reference, or a finalizer. It runs by chance, and belongs to no function that runs.
    """
    if _here.collects:
        return True
    return any(getattr(callback, "__code__", None) is code for callback in gc.callbacks)


@contextmanager
def no_collections() -> Generator[None]:
    """Let no collection begin by itself inside. Afterwards the collector is as it was.

    The collector is the process's: it goes on where there are other threads, which would see that
    it waits.
    """
    if threading.active_count() > 1 or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def referrers(*objects: Any) -> list[Any]:
    """The objects that refer to one of these, like `gc.get_referrers`, which does not look at
    frozen objects.

    Objects that a program has frozen by `gc.freeze` are frozen again afterwards, and so are those
    that it has made since.
    """
    if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
        return gc.get_referrers(*objects)
    with no_collections():
        gc.unfreeze()
        try:
            return gc.get_referrers(*objects)
        finally:
            gc.collect()  # what is garbage now would be frozen for ever
            gc.freeze()
