"""One rank of a world that is not there: process groups without processes, attention without
values.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional as F

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.lookasides import Lookaside
from thunder_fn.errors import DistributedError, InspectError, is_int


@contextmanager
def fake_world(size: int) -> Generator[None]:
    """Make process groups and meshes as rank 0 of so many ranks, in one process.

    Inside, `init_device_mesh` gives a mesh of `size` ranks, whose collectives take meta tensors
    and do nothing. Where a world is there already, it has to be of this size.

    Law: afterwards the process is in the world that it was in before.

    Raises:
        InspectError: size is no number of ranks.
        DistributedError: the process is in a world of another size.

    Example:
        >>> import torch
        >>> from thunder_fn.planning import fake_world
        >>> with fake_world(1024):
        ...     torch.distributed.get_world_size()
        1024
    """
    check_size(size)
    if dist.is_initialized():
        if dist.get_world_size() != size:
            what = f"plan: asked for {size} ranks in a process group of {dist.get_world_size()}"
            fix = "Leave `world` out, or destroy the process group before."
            raise DistributedError(what, fix=fix)
        yield
        return
    dist.init_process_group("fake", store=internals.fake_store(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_size(size: object) -> None:
    """Check a number of ranks.

    Raises:
        InspectError: it is none.
    """
    if not is_int(size, 1):
        raise InspectError(f"plan: world is a number of ranks from 1 on, given {size!r}")


def _attention(  # noqa: PLR0913 - the signature of PyTorch's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention by a fused kernel, which keeps no scores; PyTorch's for CPUs has the fewest results
    beside its own. Elsewhere than on the meta device, PyTorch chooses.
    """
    if not query.is_meta:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


FUSED_ATTENTION = Lookaside(F.scaled_dot_product_attention, _attention)
"""PyTorch takes attention apart on the meta device, where no kernel is; GPUs do not."""
