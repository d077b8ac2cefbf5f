"""Who is there: when a collective fails, which rank is it that died or stays away?

PyTorch's error names an address at best, and a time-out nobody. So each process that runs a collective has a thread that
writes to the group's store, once a second, a number that grows and where its process is. A collective that fails looks at
these: a rank whose number stands still is gone; one whose number grows but who is elsewhere keeps the others waiting.

PyTorch ends a wait, at the latest after the process group's time-out; so nothing hangs, and each rank raises on its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from thunder_fn import torch_internals as internals
from thunder_fn.errors import DistributedError, located
from thunder_fn.trace import Equation

SECONDS = 0.5
PATIENCE = 4
"""A rank is gone whose number stands still for so many beats."""
COMPUTING = "computing"


class _Heart:
    """The thread of this process, and where the process is."""

    def __init__(self) -> None:
        self.where, self.lock = COMPUTING, threading.Lock()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self.beat, name="thunder_fn heartbeat", daemon=True)
                self.thread.start()

    def beat(self) -> None:
        count = 0
        try:
            while dist.is_initialized():
                count += 1
                internals.default_store().set(_key(dist.get_rank()), f"{count} {self.where}")
                time.sleep(SECONDS)
        except (RuntimeError, ValueError):  # the store went first, as it does at the end of a process
            return


_heart = _Heart()


def _key(rank: int) -> str:
    return f"thunder_fn heartbeat {rank}"


def run_collective(run: Callable[..., Any], equation: Equation, text: str, *args: Any, **kwargs: Any) -> Any:
    """Run a collective.

    Raises:
        DistributedError: it failed; names the equation, the user's line, and the ranks that are gone or elsewhere.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return run(*args, **kwargs)
    _heart.start()
    _heart.where = equation.op.name
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        raise DistributedError(
            located(
                f"{equation.op}: {_absent(equation.op.name)}",
                equation=text,
                source=equation.source,
                fix="The group cannot be used any more: end this process, and start all ranks again from a checkpoint.",
            )
        ) from error
    finally:
        _heart.where = COMPUTING


def _absent(collective: str) -> str:
    """Which ranks are not there, in words."""
    size = dist.get_world_size()
    if size == 1:
        return "the collective failed on the only rank"
    before = [_seen(rank) for rank in range(size)]
    time.sleep(SECONDS * PATIENCE)
    after = [_seen(rank) for rank in range(size)]
    others = [rank for rank in range(size) if rank != dist.get_rank()]
    gone = [rank for rank in others if after[rank] is None or before[rank] == after[rank]]
    if gone:
        return f"{_ranks(gone)} of {size} cannot be reached: the process ended, or its machine is cut off"
    away = [rank for rank in others if not str(after[rank]).endswith(collective)]
    if away:
        return f"{_ranks(away)} of {size} did not take part in time; the process is alive, {COMPUTING} or waiting elsewhere"
    return f"the collective failed on rank {dist.get_rank()} of {size}, and all others are alive and take part"


def _seen(rank: int) -> str | None:
    """What a rank wrote last; None if nothing, or if the store is gone, with the rank that keeps it."""
    try:
        store = internals.default_store()
        return store.get(_key(rank)).decode() if store.check([_key(rank)]) else None
    except RuntimeError:
        return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
