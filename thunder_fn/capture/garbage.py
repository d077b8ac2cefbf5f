"""Python's garbage collector waits while a function is captured and a program is made.

Nearly all that is made then stays alive, and each collection goes through everything that PyTorch's modules hold.
Collections took a quarter of the time of tracing a training step.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class _Waiting:
    """The number of threads that make something now, and whether the collector was on before the first of them."""

    lock = threading.Lock()
    users = 0
    was_enabled = False


@contextmanager
def no_collections() -> Generator[None]:
    """Let no collection begin by itself inside. Afterwards the collector is as it was."""
    with _Waiting.lock:
        if _Waiting.users == 0:
            _Waiting.was_enabled = gc.isenabled()
            gc.disable()
        _Waiting.users += 1
    try:
        yield
    finally:
        with _Waiting.lock:
            _Waiting.users -= 1
            if _Waiting.users == 0 and _Waiting.was_enabled:
                gc.enable()


def referrers(*objects: Any) -> list[Any]:
    """The objects that refer to one of these, like `gc.get_referrers`, which does not look at frozen objects.

    Objects that a program has frozen by `gc.freeze` are frozen again afterwards, and so are those that it has made
    since.
    """
    if not gc.get_freeze_count():
        return gc.get_referrers(*objects)
    with no_collections():
        gc.unfreeze()
        try:
            return gc.get_referrers(*objects)
        finally:
            gc.collect()  # what is garbage now would be frozen for ever
            gc.freeze()
