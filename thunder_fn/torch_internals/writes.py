"""The writes of a function to tensors that were there before it, seen below autograd."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.torch_internals.functional import traits_of

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_STATISTICS = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
"""Ops that change arguments, if they train (argument 5), and do not say so."""


class Writes(TorchDispatchMode):
    """A note of the first write to a tensor whose memory the code inside did not make.

    `found` is that tensor and what `where` answers then.
    """

    def __init__(self, where: Callable[[], Any]) -> None:
        super().__init__()
        self.where, self.found = where, None
        self._made = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.found is None:
            for tensor in _written(func, args, kwargs):
                if _storage(tensor) not in self._made:
                    self.found: Any = tensor, self.where()
                    break
        result = func(*args, **kwargs)
        if self.found is None:
            given = set() if func is _LIFT_FRESH else set(map(_storage, _tensors((args, kwargs))))
            self._made |= set(map(_storage, _tensors(result))) - given
        return result


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
