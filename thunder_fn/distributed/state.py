"""Parameters that ranks have shares of, as DTensors: what `torch.distributed.checkpoint` saves and
loads.

A parameter is cut once for each step that splits it, by tensor_parallel first and its share by fsdp
then. A DTensor of placements `[Shard(1), Shard(0)]` says so over the dims of one mesh in this
order. Codes and adapters are parts, which are cut as parameters are; they are saved as they are
stored, under their own names.

Ranks of tensor parallelism round their own shares, so their codes are no shares of one tensor. They
stand beside each other along a dim of their own, the first, and can be loaded by as many ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.collectives import collectives
from thunder_fn.distributed.groups import Group
from thunder_fn.distributed.heartbeat import watched
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.ddp import Ddp
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.quantize.step import Quantize
from thunder_fn.interpreters.rewriting.prepared import Layout, layout_of_types
from thunder_fn.interpreters.rewriting.representation import Representation, Step
from thunder_fn.interpreters.rewriting.rewrite import Rewrite
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.interpreters.tensor_parallel.step import TensorParallel
from thunder_fn.ir.trace import TensorType, static_shape

Types = Mapping[str, TensorType]


@dataclass(frozen=True)
class Stored:
    """The step of tensor_parallel on stored parameters. Parameters that are stored as they are have
    shares; of codes, each rank has those that it rounded.

    Args:
        by: the step.
        codes: parts that encode weights; these are not split.
        own: those of them that each rank has its own of, and their types.
    """

    by: TensorParallel
    codes: frozenset[str]
    own: tuple[tuple[str, TensorType], ...]

    @property
    def group(self) -> Group:
        """The group of ranks."""
        return self.by.group

    def split_dim(self, name: str, type: TensorType) -> int | None:
        """The dim of which each rank has a share, or one place; None if every rank has the
        whole.
        """
        if name in self.codes:
            return 0 if name in dict(self.own) else None
        return self.by.split_dim(name, type)

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        if name not in self.codes:
            return self.by(name, type)
        own = dict(self.own).get(name)
        if own is None:
            return None
        taken = traced(
            lambda every: every[self.group.rank].reshape(static_shape(own)).clone(), type
        )
        gather = lambda part: collectives.all_gather_into_tensor(
            part.reshape(1, -1), self.group.size, self.group.name
        )
        beside = traced(
            lambda part: collectives.wait_tensor(gather(part)).reshape(static_shape(type)), own
        )
        return Representation("own", type, ("",), taken, beside)


def split_of(layout: Layout) -> Layout:
    """The split of sharded values: the parameters, or the parts that other steps store them in."""
    stored, local = _without(layout, TensorParallel, Fsdp, Ddp), _without(layout, Fsdp, Ddp)
    whole = _types(_without(layout, TensorParallel, Quantize, Fsdp, Ddp))
    codes = {name: type for name, type in _types(local).items() if name in local.codes}
    types = {
        name: type for name, type in _types(stored).items() if name not in stored.codes
    } | codes
    steps = list[Step]()
    for step in layout.steps:
        if isinstance(step, TensorParallel):
            own = {name: type for name, type in codes.items() if _is_of_share(name, step, whole)}
            types |= {
                name: replace(type, shape=_beside(step.group, type)) for name, type in own.items()
            }
            steps.append(Stored(step, frozenset(codes), tuple(own.items())))
        elif isinstance(step, Fsdp):
            steps.append(step)
    return layout_of_types(types, tuple(steps))


def _without(layout: Layout, *kinds: type) -> Rewrite:
    """The parameters as they are stored without steps of some kinds."""
    return replace(
        layout, steps=tuple(step for step in layout.steps if not isinstance(step, kinds))
    ).rewrite


def _types(rewrite: Rewrite) -> dict[str, TensorType]:
    named = zip(rewrite.names, rewrite.prepare.output_types, strict=True)
    return {name: type for name, type in named if isinstance(type, TensorType)}


def _is_of_share(code: str, step: TensorParallel, whole: Types) -> bool:
    """Test whether a part encodes a rank's share of a weight, which is the longest of the names
    that it begins with.
    """
    weight = max((name for name in whole if code == name or code.startswith(f"{name}.")), key=len)
    return step.split_dim(weight, whole[weight]) is not None


def _beside(group: Group, type: TensorType) -> tuple[int, ...]:
    """The shape of the parts of all ranks; a number is a row."""
    return (group.size, *(static_shape(type) or (1,)))


def sharded_state(layout: Layout, parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The parameters, or their parts, as DTensors in the memory of the parts, without their
    padding.

    Raises:
        RewriteError: they are not sharded, or no DTensor lies as a part does.
    """
    split = split_of(layout)
    splits = [step for step in split.steps if isinstance(step, Stored | Fsdp)]
    dims = [step.group.dim for step in splits if step.group.dim is not None]
    if not splits or len(dims) < len(splits):
        raise _refused(
            "the parameters are no DTensors: no mesh has shares of them",
            "Use `state_dict`, which has whole parameters.",
        )
    mesh = internals.joint_mesh(dims)
    if mesh is None:
        names = " and ".join(
            type(step).__name__ for step in layout.steps if isinstance(step, TensorParallel | Fsdp)
        )
        raise _refused(
            f"the meshes of {names} are not dims of one DeviceMesh",
            'Make one, `mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))`, and'
            ' pass `mesh["tp"]`.',
        )
    types = zip(split.names, split.types, strict=True)
    return {name: _dtensor(name, type, parts[name].detach(), splits, mesh) for name, type in types}


def whole_tensor(value: Any) -> torch.Tensor:
    """A tensor; a DTensor gathered.

    Raises:
        DistributedError: a rank does not take part.
    """
    gather = getattr(value, "full_tensor", None)
    if gather is None:
        return value
    with watched(f"full_tensor of a DTensor of shape {tuple(value.shape)}"):
        return gather()


def _dtensor(
    name: str, type: TensorType, part: torch.Tensor, splits: Sequence[Stored | Fsdp], mesh: Any
) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    shape = static_shape(type) or (1,)  # a number is a row
    dims = _dims(splits, name, type)
    part = part.reshape((1,) * (len(shape) - max(part.dim(), 1)) + (part.shape or (1,)))
    for dim in range(len(shape)):
        cuts = [step.group for step, own in zip(splits, dims, strict=True) if own == dim]
        length = _length(shape[dim], cuts)
        if length is None:
            raise _refused(
                f"no DTensor lies as {name!r} does: dim {dim} of {shape[dim]} is split by"
                f" {' and then '.join(str(group.size) for group in cuts)} ranks, which do not"
                " divide it",
                "Use `state_dict`, which has whole parameters, or sizes that the ranks divide.",
            )
        part = part.narrow(dim, 0, length)
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, shape=torch.Size(shape), stride=stride)


def _dims(splits: Sequence[Stored | Fsdp], name: str, type: TensorType) -> list[int | None]:
    """The dim of a part that each step splits, fsdp the first that is the part's own; None if
    all ranks have the whole.
    """
    rows = sum(isinstance(step, Stored) and name in dict(step.own) for step in splits)
    return [step.split_dim(name, type) if isinstance(step, Stored) else rows for step in splits]


def _length(size: int, groups: Sequence[Group]) -> int | None:
    """The length of this rank's part of a dim; None where DTensors would be cut elsewhere on
    some rank.
    """
    sizes = tuple(group.size for group in groups)
    if not _is_cut_alike(size, sizes):
        return None
    return _cut(size, sizes, tuple(group.rank for group in groups))[0]


@cache
def _is_cut_alike(size: int, sizes: tuple[int, ...]) -> bool:
    """Test that padded shares begin where those of DTensors do, which cut what is there, on all
    ranks.
    """
    every = (_cut(size, sizes, ranks) for ranks in itertools.product(*map(range, sizes)))
    return all(own == theirs for own, theirs in every)


def _cut(size: int, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, int]:
    """The length of a rank's part of a dim: cut with padding, as we do, and as DTensors are."""
    padded = own = theirs = size
    for count, rank in zip(sizes, ranks, strict=True):
        padded = math.ceil(padded / count)
        own = min(padded, max(0, own - rank * padded))
        each = math.ceil(theirs / count)
        theirs = min(each, max(0, theirs - rank * each))
    return own, theirs


def _refused(what: str, fix: str) -> RewriteError:
    return RewriteError(f"sharded_state_dict: {what}", fix=fix)
