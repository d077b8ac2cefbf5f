"""Allocations of a function, seen on tensors without values: each storage from the op that makes it
to its last tensor.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.torch_internals.fakes import only_mode
from thunder_fn.torch_internals.tracers import RecordingMode

Scratch = Callable[[str, tuple[Any, ...], Sequence[torch.Tensor]], int]
"""The bytes that a kernel needs while it runs, by its name, its arguments and its results."""


class _Footprint(TorchDispatchMode):
    """A count of the bytes of storages that are alive; those of `given` tensors are their
    owner's.
    """

    def __init__(self, given: Iterable[torch.Tensor], scratch: Scratch) -> None:
        super().__init__()
        self.given = {_storage(tensor) for tensor in given}
        self.scratch = scratch
        self.tensors, self.sizes = Counter[int](), dict[int, int]()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [
            one
            for one in (result if isinstance(result, tuple | list) else (result,))
            if _is_tensor(one)
        ]
        for tensor in found:
            self.note(tensor)
        self.peak = max(self.peak, self.live + self.scratch(str(func), tuple(args), found))
        return result

    def note(self, tensor: torch.Tensor) -> None:
        """Keep the tensor's storage alive until the tensor dies."""
        storage = _storage(tensor)
        if storage in self.given:
            return
        if not self.tensors[storage]:
            self.sizes[storage] = int(tensor.untyped_storage().nbytes())
            self.live += self.sizes[storage]
        self.tensors[storage] += 1
        weakref.finalize(tensor, self.release, storage)

    def release(self, storage: int) -> None:
        """Note that one of the storage's tensors is dead."""
        self.tensors[storage] -= 1
        if not self.tensors[storage]:
            self.live -= self.sizes.pop(storage)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def footprint(
    mode: RecordingMode, run: Callable[..., Any], inputs: Sequence[torch.Tensor], scratch: Scratch
) -> tuple[tuple[Any, ...], int]:
    """Run a function on fakes of the mode. Returns its results, and the most bytes that it holds
    at a time.
    """
    with only_mode(mode), torch.no_grad(), _Footprint(inputs, scratch) as found:
        return tuple(run(*inputs)), found.peak
