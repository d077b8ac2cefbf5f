"""Donated and mutated tensors: memory that a program may write to, and the fate of donated
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import DonatedTensorError
from thunder_fn.ir.trace import Trace


class DonatedTensor(torch.Tensor):
    """The class that a donated tensor gets: every use of it is an error."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise DonatedTensorError(
            "a tensor was used after it was donated to a jitted function; its memory belongs to"
            " the results now",
            fix="Use the function's result, or leave the argument out of donate_argnums.",
        )

    def __repr__(self, **kwargs: Any) -> str:
        return "<donated tensor>"


def give_away(*tensors: torch.Tensor) -> None:
    """Turn donated tensors into values that raise when used, and release their memory.

    Autograd learns of it through the version counter: a graph that saved the tensor raises when it
    is run.
    """
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
            tensor.data = _nothing(tensor.device)
        tensor.__class__ = DonatedTensor


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


def all_exclusive(*tensors: torch.Tensor) -> bool:
    """Test whether nobody else sees the memory of these tensors, so that it may be overwritten."""
    return all(map(internals.is_exclusive, tensors))


def extent(tensor: torch.Tensor) -> int:
    """The number of bytes between the first and the last element, both included."""
    return internals.extent(tensor.shape, tensor.stride()) * tensor.element_size()


def clash_check(
    trace: Trace,
    inputs: Sequence[torch.Tensor],
    targets: Sequence[int | torch.Tensor],
    *,
    symbolic: bool = False,
) -> Callable[..., bool]:
    """Make a check on tensors like these inputs: whether one that is written to shares memory with
    another, or with a constant.

    Targets are inputs, by position, or closed-over tensors. `symbolic` says that sizes differ from
    call to call.
    """
    read = (constant.tensor for constant in trace.constants if not constant.owned)
    written = {id(target) for target in targets}
    outside = tuple(
        {id(one): one for one in (*read, *targets) if isinstance(one, torch.Tensor)}.values()
    )
    marks = {target for target in targets if isinstance(target, int)}
    marks |= {len(inputs) + i for i, tensor in enumerate(outside) if id(tensor) in written}
    known = None if symbolic else tuple(map(extent, (*inputs, *outside)))

    def clash(*tensors: torch.Tensor) -> bool:
        tensors = tensors[: len(inputs)]
        sizes = known or tuple(map(extent, (*tensors, *outside)))
        starts = [tensor.data_ptr() for tensor in (*tensors, *outside)]
        spans = sorted(
            (start, start + size, i)
            for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if size
        )
        end, last = -1, -1
        for start, stop, index in spans:
            if start < end and (index in marks or last in marks):
                return True
            if stop > end:
                end, last = stop, index
        return False

    return clash
