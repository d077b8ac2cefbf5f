"""Parameters over many ranks: sharded (fsdp) or replicated (ddp), as rewrites.

Every rank runs the same trace. Collectives are leaf ops of it, PyTorch's functional ones, so `grad` of an all-gather is a
reduce-scatter by PyTorch's own formula, and what communicates when can be read in the trace. A block of a model is a
composite, and where its parameters meet they are gathered together, in one collective (`units.py`).

Sources: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from thunder_fn.errors import RewriteError, kind_of, located
from thunder_fn.interpreters.rewrite import Representation
from thunder_fn.rewrites.steps import traced
from thunder_fn.rewrites.units import Bucket, InUnits
from thunder_fn.rules import memo
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.trace import TensorType, static_shape

collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """Some ranks and the place of this one among them.

    Args:
        name: of the process group, as `torch.distributed` registers it.
        size: how many ranks there are.
        rank: of this process, from 0.
        mesh: the DeviceMesh that it comes from, None where ranks are simulated.
    """

    name: str
    size: int
    rank: int
    mesh: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise RewriteError(f"a rank lies between 0 and the number of ranks, given {self.rank} of {self.size}")


SIMULATED = "simulated"


def simulated_mesh(**sizes: int) -> tuple[tuple[dict[str, Group], ...], dict[str, tuple[tuple[int, ...], ...]]]:
    """Ranks of a mesh that are not there: for each rank its group along each dim; and, for `evaluate_ranks`, which ranks the
    groups of each name are. The last dim is the one whose ranks lie side by side."""
    shape = tuple(sizes.values())
    grid = torch.arange(math.prod(shape)).reshape(shape)
    partitions = {
        f"{SIMULATED} {name}": tuple(map(tuple, grid.movedim(dim, -1).reshape(-1, shape[dim]).tolist()))
        for dim, name in enumerate(sizes)
    }
    places = [[int(place) for place in (grid == rank).nonzero()[0]] for rank in range(math.prod(shape))]
    groups = tuple(
        {name: Group(f"{SIMULATED} {name}", size, at) for (name, size), at in zip(sizes.items(), place, strict=True)}
        for place in places
    )
    return groups, partitions


def simulated(size: int) -> tuple[Group, ...]:
    """Ranks that are not there, for `evaluate_ranks`."""
    return tuple(Group(SIMULATED, size, rank) for rank in range(size))


def check_there(steps: Sequence[Any], what: str = "restore") -> None:
    """The ranks of all steps are there, to talk to.

    Raises:
        RewriteError: those of one are simulated.
    """
    for step in steps:
        group = getattr(step, "group", None)
        if isinstance(group, Group) and group.name.startswith(SIMULATED):
            why = f"{what}: the {group.size} ranks of {type(step).__name__.lower()} are simulated, nobody answers"
            trace = "restore" if what == "restore" else "compute"
            raise RewriteError(located(why, fix=f"Run `rewrite(params, ...).{trace}` with `evaluate_ranks`."))


def group_of(mesh: Any) -> Group:
    """The group of a one-dimensional DeviceMesh, or a `Group` itself."""
    if isinstance(mesh, Group):
        return mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
            what = f"expected a mesh of one dim, given one of {mesh.ndim}: {', '.join(map(str, names))}"
            raise RewriteError(located(what, fix=f"Pass the dim to shard over, such as `mesh[{names[0]!r}]`."))
        return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), mesh)
    raise RewriteError(
        located(
            f"expected a DeviceMesh, given {kind_of(mesh)}",
            fix='Write `torch.distributed.device_mesh.init_device_mesh("cpu", (size,))` under torchrun.',
        )
    )


def groups_of(mesh: Any) -> tuple[Group, ...]:
    """The groups of a DeviceMesh of one dim or of two."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        names = mesh.mesh_dim_names
        if names is None:
            what = "fsdp: a mesh of two dims needs names for them"
            raise RewriteError(located(what, fix='Make it with `mesh_dim_names=("replicate", "shard")`.'))
        return tuple(group_of(mesh[name]) for name in names)
    return (group_of(mesh),)


# ---- sharding ----


def rows_of(type: TensorType, size: int) -> int:
    """The rows of a shard: dim 0 split evenly, the last shards padded."""
    shape = static_shape(type)
    return math.ceil((shape[0] if shape else 1) / size)


@dataclass(frozen=True)
class Fsdp:
    """The step of `fsdp`: each rank keeps a shard of the rows of each parameter."""

    group: Group
    zero: int
    bucket: Bucket
    reduction: str
    precision: torch.dtype | None = None
    offload: bool = False
    prefetch: int | None = None

    @property
    def in_flight(self) -> int | None:
        """How many gathers may be in flight; None where each is awaited where it is sent."""
        ahead = 0 if self.prefetch is None and isinstance(self.bucket, int) else self.prefetch
        return None if ahead is None else ahead + 1

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return sharded(self, type)


@memo(4096)
def sharded(step: Fsdp, type: TensorType) -> Representation:
    """A parameter of this type of which every rank keeps some rows."""
    size, rank, rows, shape = step.group.size, step.group.rank, rows_of(type, step.group.size), static_shape(type)

    def encode(w: torch.Tensor) -> torch.Tensor:
        w = w.reshape(shape or (1,))
        padding = w.new_zeros((size * rows - w.shape[0], *w.shape[1:]))
        shard = torch.cat((w, padding)).reshape(size, rows, *w.shape[1:])[rank].clone()
        return shard.to("cpu") if step.offload else shard

    encoded = traced(encode, type)
    (part,) = (part for part in encoded.output_types if isinstance(part, TensorType))
    decoded = traced(lambda shard: gathered(step, (type,), (shard,))[0], part)
    return Representation("fsdp", type, ("",), encoded, decoded, rule=InUnits(step, gathered))


def gathered(step: Fsdp, types: Sequence[TensorType], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Whole parameters from shards of the same dtype, in one collective."""
    size, widths = step.group.size, [shard.numel() for shard in shards]
    flat = torch.cat([shard.reshape(-1) for shard in shards]) if len(shards) > 1 else shards[0].reshape(-1)
    flat = flat.to(types[0].device)  # from where it was offloaded to
    if step.reduction == "mean" and flat.dtype.is_floating_point:
        flat = divided_gradient(flat, size)
    if step.precision is not None and flat.dtype.is_floating_point and flat.dtype.itemsize > 1:
        flat = flat.to(step.precision)
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(flat, size, step.group.name))
    columns = whole.reshape(size, -1).split(widths, 1)
    return [_unpadded(column, type).to(type.dtype) for column, type in zip(columns, types, strict=True)]


def divided_gradient(x: torch.Tensor, size: int) -> torch.Tensor:
    """x, with gradients divided by the number of ranks that add theirs."""

    @custom_vjp
    def divide_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    divide_gradient.defvjp(lambda x: (x.view_as(x), None), lambda _, ct: (ct / size,))
    return divide_gradient(x)


def _unpadded(column: torch.Tensor, type: TensorType) -> torch.Tensor:
    shape = static_shape(type)
    return column.reshape(-1, *shape[1:])[: shape[0] if shape else 1].reshape(shape)


# ---- replication ----


@dataclass(frozen=True)
class Ddp:
    """The step of `ddp`: every rank keeps the parameters; their gradients are reduced."""

    group: Group
    bucket: Bucket
    reduction: str
    zero: ClassVar[int] = 0
    in_flight: ClassVar[int | None] = None

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return replicated(self, type) if type.dtype.is_floating_point else None


@memo(4096)
def replicated(step: Ddp, type: TensorType) -> Representation:
    """A parameter of this type that every rank keeps, its gradient the reduction of all ranks'."""
    same = traced(lambda w: w, type)
    decoded = traced(lambda w: reduced(step, (type,), (w,))[0], type)
    return Representation("ddp", type, ("",), same, decoded, restore=same, rule=InUnits(step, reduced))


def reduced(step: Ddp, types: Sequence[TensorType], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, with gradients that are reduced over the ranks in one collective."""
    group, widths = step.group, [math.prod(static_shape(type)) for type in types]

    @custom_vjp
    def reduce_gradients(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    def backward(_: Any, cotangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([ct.reshape(-1) for ct in cotangents])
        whole = collectives.wait_tensor(collectives.all_reduce(flat, "sum", group.name))
        whole = whole / group.size if step.reduction == "mean" else whole
        return tuple(column.reshape(ct.shape) for column, ct in zip(whole.split(widths), cotangents, strict=True))

    reduce_gradients.defvjp(lambda *xs: (tuple(x.view_as(x) for x in xs), None), backward)
    return list(reduce_gradients(*params))
