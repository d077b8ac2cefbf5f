"""Parameters that ranks have shares of, as DTensors: what `torch.distributed.checkpoint` saves and loads.

A parameter is cut once for each step that splits it, by tensor_parallel first and its share by fsdp then. That is what a
DTensor of placements `[Shard(1), Shard(0)]` says over the dims of one mesh in this order. Codes and adapters are parts, which are
cut as parameters are; they are saved as they are stored, under their own names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import RewriteError, located
from thunder_fn.interpreters.rewrite import Step
from thunder_fn.rewrites.distributed import Ddp, Fsdp, Group
from thunder_fn.rewrites.prepared import Layout, layout_of_types
from thunder_fn.rewrites.steps import Quantize
from thunder_fn.rewrites.tensor_parallel import TensorParallel
from thunder_fn.trace import TensorType, static_shape


def split_of(layout: Layout) -> Layout:
    """How what ranks have shares of is split: the parameters, or the parts that other steps store them in."""
    stored = replace(
        layout, steps=tuple(step for step in layout.steps if not isinstance(step, TensorParallel | Fsdp | Ddp))
    )
    named = dict(zip(stored.rewrite.names, stored.rewrite.prepare.output_types, strict=True))
    types = {name: type for name, type in named.items() if isinstance(type, TensorType)}
    return layout_of_types(types, tuple(step for step in layout.steps if isinstance(step, TensorParallel | Fsdp)))


def sharded_state(layout: Layout, parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters, or what they are stored in, as DTensors in the memory of the parts, without their padding.

    Raises:
        RewriteError: they are not sharded, or each rank rounds its own share, or no DTensor lies as a part does.
    """
    split = split_of(layout)
    splits = [step for step in split.steps if isinstance(step, TensorParallel | Fsdp)]
    if not splits or any(step.group.mesh is None for step in splits):
        raise _refused(
            "the parameters are no DTensors: no mesh has shares of them",
            "Use `state_dict`, which has whole parameters.",
        )
    check_rounding(layout, "sharded_state_dict")
    mesh = internals.joint_mesh([step.group.mesh for step in splits])
    if mesh is None:
        names = " and ".join(type(step).__name__ for step in splits)
        raise _refused(
            f"the meshes of {names} are not dims of one DeviceMesh",
            'Make one, `mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))`, and pass `mesh["tp"]`.',
        )
    types = zip(split.names, split.types, strict=True)
    return {name: _dtensor(name, type, parts[name].detach(), splits, mesh) for name, type in types}


def check_rounding(layout: Layout, what: str) -> None:
    """Codes are those of whole weights, not of each rank's share.

    Raises:
        RewriteError: tensor_parallel splits weights that are quantised: other ranks would have other codes.
    """
    kinds = {type(step) for step in layout.steps}
    if TensorParallel in kinds and any(isinstance(step, Quantize) and not step.training for step in layout.steps):
        why = "tensor_parallel has each rank round its own share, so their codes are no shares of one weight's"
        raise RewriteError(located(f"{what}: {why}", fix="Use `state_dict`, which has whole parameters."))


def _dtensor(name: str, type: TensorType, part: torch.Tensor, splits: Sequence[Any], mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    shape = static_shape(type) or (1,)  # a number is a row
    part = part.reshape(part.shape or (1,))
    dims = [_dim(step, name, type) for step in splits]
    for dim in range(len(shape)):
        cuts = [step.group for step, own in zip(splits, dims, strict=True) if own == dim]
        length = _length(shape[dim], cuts)
        if length is None:
            raise _refused(
                f"no DTensor lies as {name!r} does: dim {dim} of {shape[dim]} is split by "
                f"{' and then '.join(str(group.size) for group in cuts)} ranks, which do not divide it",
                "Use `state_dict`, which has whole parameters, or sizes that the ranks divide.",
            )
        part = part.narrow(dim, 0, length)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, shape=torch.Size(shape), stride=stride)


def _dim(step: Step, name: str, type: TensorType) -> int | None:
    """The dim of a parameter that a step splits; None if all its ranks have the whole."""
    return step.split_dim(name, type) if isinstance(step, TensorParallel) else 0


def _length(size: int, groups: Sequence[Group]) -> int | None:
    """What of a dim this rank has; None where DTensors would be cut elsewhere on some rank."""
    sizes = tuple(group.size for group in groups)
    if not _is_cut_alike(size, sizes):
        return None
    return _cut(size, sizes, tuple(group.rank for group in groups))[0]


@cache
def _is_cut_alike(size: int, sizes: tuple[int, ...]) -> bool:
    """Shares that are padded begin where those of DTensors do, which cut what is there, on all ranks."""
    every = (_cut(size, sizes, ranks) for ranks in itertools.product(*map(range, sizes)))
    return all(own == theirs for own, theirs in every)


def _cut(size: int, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, int]:
    """How much of a dim is a rank's: cut with padding, as we do, and as DTensors are."""
    padded = own = theirs = size
    for count, rank in zip(sizes, ranks, strict=True):
        padded = math.ceil(padded / count)
        own = min(padded, max(0, own - rank * padded))
        each = math.ceil(theirs / count)
        theirs = min(each, max(0, theirs - rank * each))
    return own, theirs


def _refused(what: str, fix: str) -> RewriteError:
    return RewriteError(located(f"sharded_state_dict: {what}", fix=fix))
