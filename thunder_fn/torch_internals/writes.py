"""The writes of a function to tensors that were there before it, seen below autograd."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.torch_internals.traits import traits_of

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
"""Ops that change arguments, if they train (argument 5), and do not say so."""


class Writes(TorchDispatchMode):
    """A note of the writes to memory that the code inside did not make.

    `before` is that memory, each with a copy as it was.
    """

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.where = where
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._first: dict[int, tuple[torch.Tensor, Any]] = {}
        self._followed, self._read, self._made = set[int](), set[int](), set[int]()

    @property
    def cannot_repeat(self) -> tuple[torch.Tensor, Any] | None:
        """A tensor whose write cannot be made again, and what `where` answered then. Autograd
        follows the write; or another op reads the memory, and may keep it for its backward.
        """
        found = (
            first
            for memory, first in self._first.items()
            if memory in self._followed or memory in self._read
        )
        return next(found, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = list(_written(func, args, kwargs))
        for tensor in written:
            self._note(tensor)
        given = set() if func is _LIFT_FRESH else set(map(_storage, _tensors((args, kwargs))))
        self._read |= given - set(map(_storage, written))
        result = func(*args, **kwargs)
        self._made |= set(map(_storage, _tensors(result))) - given
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        memory = _storage(tensor)
        if memory in self._made or memory in self._first:
            return
        self._first[memory] = tensor, self.where()
        is_followed = tensor.requires_grad and torch.is_grad_enabled()
        if is_followed or tensor.layout is not torch.strided or tensor.is_meta:
            self._followed.add(memory)
        else:
            storage = tensor.untyped_storage()
            self.before[memory] = storage, storage.clone()


@contextlib.contextmanager
def as_before(writes: Writes) -> Generator[None]:
    """Give memory the content of before the writes, which are made again inside. Afterwards it has
    what it has now. Autograd does not hear of it.
    """
    now = [(storage, storage.clone()) for storage, _ in writes.before.values()]
    for storage, old in writes.before.values():
        storage.copy_(old)
    try:
        yield
    finally:
        for storage, content in now:
            storage.copy_(content)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (one for one in torch_pytree.tree_leaves(tree) if isinstance(one, torch.Tensor))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    if func in _STATISTICS:
        return _tensors([args[i] for i in _STATISTICS[func]] if args[5] else [])
    keys = traits_of(func).written
    if not keys:
        return iter(())
    given = (*enumerate(args), *kwargs.items())
    return _tensors([value for key, value in given if key in keys])


def _storage(tensor: torch.Tensor) -> int:
    """The memory of a tensor; a sparse one has none, and stands for itself."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
