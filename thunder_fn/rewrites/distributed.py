"""Parameters over many ranks: sharded (fsdp) or replicated (ddp), as rewrites.

Every rank runs the same trace. Collectives are leaf ops of it, PyTorch's functional ones. So `grad` of an all-gather
is a reduce-scatter by PyTorch's own formula, and the trace shows the order of all communication. A block of a model
is a composite, and where its parameters meet they are gathered together, in one collective (`units.py`).

Sources: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).

Gradients are divided by a `custom_vjp`, so tangents of forward mode are not divided. One bucket is gathered ahead by
default: many steps follow the longer first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from thunder_fn import torch_internals as internals
from thunder_fn.derive import is_differentiable
from thunder_fn.errors import RewriteError, kind_of, located
from thunder_fn.interpreters.heartbeat import join
from thunder_fn.interpreters.representation import Representation
from thunder_fn.rewrites.steps import ADAPTERS
from thunder_fn.rewrites.tracing import traced
from thunder_fn.rewrites.units import Bucket, Company, InUnits
from thunder_fn.rules import memo
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.trace import TensorType, static_shape

collectives = torch.ops._c10d_functional
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SENT = frozenset((*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8))
"""The dtypes that gloo knows; numbers of other dtypes are sent as bytes."""


@dataclass(frozen=True)
class Group:
    """A group of ranks, and the place of this one among them.

    Args:
        name: of the process group, as `torch.distributed` registers it.
        size: how many ranks there are.
        rank: of this process, from 0.
        dim: of the DeviceMesh that it comes from, None where ranks are simulated.
    """

    name: str
    size: int
    rank: int
    dim: internals.MeshDim | None = field(default=None, compare=False, repr=False)

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
    """Check that the ranks of all steps are there, to talk to.

    Raises:
        RewriteError: those of one are simulated.
    """
    for step in steps:
        group = getattr(step, "group", None)
        if isinstance(group, Group) and group.name.startswith(SIMULATED):
            why = f"{what}: the {group.size} ranks of {type(step).__name__.lower()} are simulated and cannot answer"
            trace = "restore" if what == "restore" else "compute"
            raise RewriteError(located(why, fix=f"Run `rewrite(params, ...).{trace}` with `evaluate_ranks`."))


def check_groups(steps: Sequence[Any], step: Any) -> None:
    """Check that the ranks of a step are those of no step before it.

    Raises:
        RewriteError: what one rank has, another has not: sharing it once more would mix up the ranks' parameters.
    """
    own = getattr(step, "group", None)
    for other in steps:
        if own is not None and getattr(other, "group", None) == own:
            one, before = type(step).__name__.lower(), type(other).__name__.lower()
            what = f"{one}: the {own.size} ranks of this mesh hold the parameters by {before} already"
            raise RewriteError(
                located(what, fix='Pass each its own dim of one mesh, such as `mesh["dp"]` and `mesh["tp"]`.')
            )


def group_of(mesh: Any) -> Group:
    """The group of a one-dimensional DeviceMesh, or a `Group` itself."""
    if isinstance(mesh, Group):
        return mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
            what = f"expected a mesh of one dim, given one of {mesh.ndim}: {', '.join(map(str, names))}"
            raise RewriteError(located(what, fix=f"Pass the dim to shard over, such as `mesh[{names[0]!r}]`."))
        if mesh.get_coordinate() is None:
            own, ranks = torch.distributed.get_rank(), ", ".join(map(str, mesh.mesh.flatten().tolist()))
            what = f"this process, rank {own}, is not in the mesh, which has {ranks}"
            raise RewriteError(located(what, fix="Only the ranks of a mesh call what uses it."))
        join()
        return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), internals.MeshDim.of(mesh))
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
    frozen: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def in_flight(self) -> int | None:
        """The number of gathers that may be in flight; None where each is awaited where it is sent."""
        ahead = 0 if self.prefetch is None and isinstance(self.bucket, int) else self.prefetch
        return None if ahead is None else ahead + 1

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        return sharded(replace(self, frozen=frozenset()), type, company_of(name, self.frozen))


def company_of(name: str, frozen: frozenset[str]) -> Company:
    """The company of a parameter in a bucket: adapters travel with adapters, trained parameters with trained ones."""
    return name.endswith(ADAPTERS), name in frozen


def apart(steps: Sequence[Any], frozen: Iterable[str]) -> tuple[Any, ...]:
    """The steps, which let frozen parameters travel apart from others: nobody computes or sends gradients of them."""
    names = frozenset(frozen)
    return tuple(replace(step, frozen=names) if isinstance(step, Fsdp | Ddp) else step for step in steps)


@memo(4096)
def sharded(step: Fsdp, type: TensorType, company: Company) -> Representation:
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
    return Representation("fsdp", type, ("",), encoded, decoded, rule=InUnits(step, gathered, company))


def gathered(step: Fsdp, types: Sequence[TensorType], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Whole parameters from shards of the same dtype, in one collective."""
    size, widths = step.group.size, [shard.numel() for shard in shards]
    flat = torch.cat([shard.reshape(-1) for shard in shards]) if len(shards) > 1 else shards[0].reshape(-1)
    flat = flat.to(types[0].device)  # from where it was offloaded to
    precision = step.precision if flat.dtype.is_floating_point and flat.dtype.itemsize > 1 else None
    before, after = _divisors(size, precision or flat.dtype) if step.reduction == "mean" else (1, 1)
    flat = divided_gradient(flat, after)
    whole = divided_gradient(all_gathered(flat.to(precision or flat.dtype), step.group), before)
    columns = whole.reshape(size, sum(widths)).split(widths, 1)
    return [_unpadded(column, type, size).to(type.dtype) for column, type in zip(columns, types, strict=True)]


def all_gathered(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The values of all ranks, one after the other."""
    if not flat.numel():
        return flat.repeat(group.size)
    if flat.is_complex():
        return torch.view_as_complex(all_gathered(torch.view_as_real(flat).reshape(-1), group).reshape(-1, 2))
    sent = flat if flat.dtype in SENT else flat.view(torch.uint8)
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(sent, group.size, group.name))
    return whole if flat.dtype in SENT else whole.view(flat.dtype)


def _divisors(size: int, dtype: torch.dtype) -> tuple[float, float]:
    """The divisors of gradients before and after they are added up. Sums of float16 would overflow; these are
    FSDP2's.
    """
    before = 1
    while dtype == torch.float16 and size % before == 0 and size > before * before:
        before *= 2
    return before, size / before


def divided_gradient(x: torch.Tensor, size: float) -> torch.Tensor:
    """x, with gradients divided by the number of ranks that add theirs."""
    if size == 1 or not (x.is_floating_point() or x.is_complex()):
        return x

    @custom_vjp
    def divide_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    divide_gradient.defvjp(lambda x: (x.view_as(x), None), lambda _, ct: (ct / size,))
    return divide_gradient(x)


def _unpadded(column: torch.Tensor, type: TensorType, size: int) -> torch.Tensor:
    shape = static_shape(type)
    return column.reshape(size * rows_of(type, size), *shape[1:])[: shape[0] if shape else 1].reshape(shape)


# ---- replication ----


@dataclass(frozen=True)
class Ddp:
    """The step of `ddp`: every rank keeps the parameters; their gradients are reduced."""

    group: Group
    bucket: Bucket
    reduction: str
    frozen: frozenset[str] = field(default=frozenset(), repr=False)
    zero: ClassVar[int] = 0
    in_flight: ClassVar[int | None] = None

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        if not is_differentiable(type):
            return None
        return replicated(replace(self, frozen=frozenset()), type, company_of(name, self.frozen))


@memo(4096)
def replicated(step: Ddp, type: TensorType, company: Company) -> Representation:
    """A parameter of this type that every rank keeps, its gradient the reduction of all ranks'."""
    same = traced(lambda w: w, type)
    decoded = traced(lambda w: reduced(step, (type,), (w,))[0], type)
    return Representation("ddp", type, ("",), same, decoded, restore=same, rule=InUnits(step, reduced, company))


def reduced(step: Ddp, types: Sequence[TensorType], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, with gradients that are reduced over the ranks in one collective."""
    group, widths = step.group, [math.prod(static_shape(type)) for type in types]

    @custom_vjp
    def reduce_gradients(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    def backward(_: Any, cotangents: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        flat = torch.cat([ct.reshape(-1) for ct in cotangents])
        if step.reduction == "mean" and group.size > 1:
            flat = flat * (1 / group.size)  # before they are added up, as DDP does
        whole = added_up(flat, group)
        return tuple(column.reshape(ct.shape) for column, ct in zip(whole.split(widths), cotangents, strict=True))

    reduce_gradients.defvjp(lambda *xs: (tuple(x.view_as(x) for x in xs), None), backward)
    return list(reduce_gradients(*params))


def added_up(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks."""
    if not flat.numel():
        return flat
    if flat.is_complex():
        return torch.view_as_complex(added_up(torch.view_as_real(flat), group))
    return collectives.wait_tensor(collectives.all_reduce(flat, "sum", group.name))
