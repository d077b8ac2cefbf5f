"""The cache of a jitted function: bounded, thread-safe, and holding only complete programs."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from thunder_fn.jitted.families import Families, beside

MAXSIZE = 256
"""The number of programs that a jitted function keeps."""

PATHS = 4
"""The number of call paths that are tried before a call is flattened and looked up."""

_PLAIN = frozenset((str, int, float, bool, bytes, type(None), torch.dtype, torch.device))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


def sketch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Describe a call so that most calls of a function are told apart at a glance: types, sizes,
    plain values.

    Calls with equal sketches may need different programs; whether one serves a call, its path says.
    """
    found: list[Any] = [
        arg.shape if (kind := type(arg)) in _TENSORS else arg if kind in _PLAIN else kind
        for arg in args
    ]
    found += map(type, args)
    if kwargs:
        found += kwargs
        found.append(sketch(tuple(kwargs.values()), {}))
    return tuple(found)


class CacheInfo(NamedTuple):
    """Calls that found a program, calls that had to build one, programs kept, and the most that
    are kept.
    """

    hits: int
    misses: int
    size: int
    maxsize: int


@dataclass(frozen=True, slots=True)
class CallPath:
    """A guarded way into a program: gives the result of a call, or MISS."""

    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    entry: Any


class Cache:
    """Programs by key, least recently looked up first, and their call paths: the latest ones, and
    all by `sketch`.

    Call paths are read without a lock: the tuple of them is replaced, never changed. Building
    happens outside the lock too; where two threads build the same program, the first one is kept.
    """

    def __init__(self, maxsize: int = MAXSIZE) -> None:
        self.maxsize = maxsize
        self.paths: tuple[CallPath, ...] = ()
        self.near: dict[Hashable, CallPath] = {}
        self.wanders = False
        """The last calls were served by one call path after another, so that the last one is not
        tried first.
        """
        self.families = Families()
        self.numbers: frozenset[Any] = frozenset()
        """Places of numbers in the state of optimizers that have changed between calls."""
        self.misses: deque[Any] = deque(maxlen=maxsize)
        self.count_hit = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, ...]] = OrderedDict()
        self._known_paths: OrderedDict[Hashable, CallPath] = OrderedDict()
        self._probes, self._misses = 0, 0
        self.generation = 0

    def get(self, key: Hashable) -> tuple[Any, ...]:
        """The programs for a key, one for each state of the function's reads from outside, the
        latest first.
        """
        with self._lock:
            entries = self._entries.get(key, ())
            if entries:
                self._entries.move_to_end(key)
            return entries

    def put(self, key: Hashable, entry: Any, *, known: tuple[Any, ...] = ()) -> Any:
        """Keep a program beside those that were known; the one that is kept, which is another
        thread's if that was faster.
        """
        with self._lock:
            self._misses += 1
            current = self._entries.get(key, ())
            if current and current is not known and current[0].is_inside():
                return current[0]
            self._entries[key] = beside(entry, known)
            self._entries.move_to_end(key)
            while len(self._entries) > self.maxsize:
                self._entries.popitem(last=False)
            return entry

    def count_miss(self) -> None:
        """Count a program that was built and is not kept."""
        with self._lock:
            self._misses += 1

    def get_path(self, key: Hashable) -> CallPath | None:
        """The call path that was made for calls of this kind."""
        with self._lock:
            return self._known_paths.get(key)

    def put_path(self, key: Hashable, path: CallPath) -> CallPath:
        """Keep a call path, so that functions called in many ways do not make it anew each time."""
        with self._lock:
            self._known_paths[key] = path
            while (
                len(self._known_paths) > self.maxsize + self.families.size
            ):  # each program with symbols has one
                self._known_paths.popitem(last=False)
            return path

    def turn_to(self, path: CallPath) -> None:
        """Try the path that a sketch led to first in later calls: it has served a call."""
        first, *others = self.paths
        self.wanders = path is not first
        self.paths = (path, *others)

    def prefer(self, path: CallPath, call: Hashable = None) -> None:
        """Try this call path first from now on, and for calls with the sketch that is given."""
        with self._lock:
            others = tuple(other for other in self.paths if other is not path)
            self.wanders = bool(self.paths) and path is not self.paths[0]
            self.paths = (path, *others[: PATHS - 1])
            if call is not None:
                self.near[call] = path
                while len(self.near) > max(self.maxsize, len(self._known_paths)):
                    del self.near[next(iter(self.near))]

    def clear(self) -> None:
        """Forget every program."""
        with self._lock:
            self._entries.clear()
            self._known_paths.clear()
            self.families.clear()
            self.near.clear()
            self.paths = ()
            self.generation += 1

    def info(self) -> CacheInfo:
        """Counts of the cache's use so far."""
        with self._lock:
            # a counter that counts without a lock can only be read by counting on
            self._probes += 1
            hits = self.count_hit() - self._probes
            size = sum(map(len, self._entries.values())) + self.families.size
            return CacheInfo(hits, self._misses, size, self.maxsize)
