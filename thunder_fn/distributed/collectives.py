"""Collectives as PyTorch's functional ops, and how gradients pass through them."""

from __future__ import annotations

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.groups import Group
from thunder_fn.structured.custom_vjp import custom_vjp

collectives = internals.functional_collectives()


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


SENT = frozenset((*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8))
"""The dtypes that gloo knows; numbers of other dtypes are sent as bytes."""


def all_gathered(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The values of all ranks, one after the other."""
    if not flat.numel():
        return flat.repeat(group.size)
    if flat.is_complex():
        return torch.view_as_complex(
            all_gathered(torch.view_as_real(flat).reshape(-1), group).reshape(-1, 2)
        )
    sent = flat if flat.dtype in SENT else flat.view(torch.uint8)
    whole = collectives.wait_tensor(
        collectives.all_gather_into_tensor(sent, group.size, group.name)
    )
    return whole if flat.dtype in SENT else whole.view(flat.dtype)


def added_up(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks."""
    if not flat.numel():
        return flat
    if flat.is_complex():
        return torch.view_as_complex(added_up(torch.view_as_real(flat), group))
    return collectives.wait_tensor(collectives.all_reduce(flat, "sum", group.name))


def reduce_scattered(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of the sum over ranks."""
    if not flat.numel():
        return flat
    if flat.is_complex():
        parts = reduce_scattered(torch.view_as_real(flat).reshape(-1), group)
        return torch.view_as_complex(parts.reshape(-1, 2))
    return collectives.wait_tensor(
        collectives.reduce_scatter_tensor(flat, "sum", group.size, group.name)
    )


def divided_gradient(x: torch.Tensor, size: float) -> torch.Tensor:
    """x, with gradients divided by the number of ranks that add theirs."""
    if size == 1 or not internals.is_inexact(x):
        return x

    @custom_vjp
    def divide_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    divide_gradient.defvjp(lambda x: (x.view_as(x), None), lambda _, ct: (ct / size,))
    return divide_gradient(x)
