"""Groups of ranks: those of a DeviceMesh, and simulated ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.heartbeat import SIMULATED as SIMULATED, join
from thunder_fn.errors import RewriteError, is_int, kind_of


@dataclass(frozen=True)
class Group:
    """A group of ranks, and the place of this one among them.

    Args:
        name: of the process group, as `torch.distributed` registers it.
        size: how many ranks there are.
        rank: of this process, from 0.
        dim: of the DeviceMesh that it comes from, None where ranks are simulated.

    Example:
        >>> from thunder_fn.parameters import simulated
        >>> simulated(2)[1].rank
        1
    """

    name: str
    size: int
    rank: int
    dim: internals.MeshDim | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise RewriteError(
                f"a rank lies between 0 and the number of ranks, given {self.rank} of {self.size}"
            )


def simulated_mesh(
    **sizes: int,
) -> tuple[tuple[dict[str, Group], ...], dict[str, tuple[tuple[int, ...], ...]]]:
    """Simulated ranks of a mesh: for each rank its group along each dim. For `evaluate_ranks`,
    they say which ranks the groups of each name are. The last dim is the one whose ranks lie
    side by side.

    Law: along each dim, each rank is in exactly one group.

    Raises:
        RewriteError: a size is not an int from 1 on.

    Example:
        >>> from thunder_fn.parameters import simulated_mesh
        >>> groups, partitions = simulated_mesh(data=2, tensor=2)
        >>> [(group["data"].rank, group["tensor"].rank) for group in groups]
        [(0, 0), (0, 1), (1, 0), (1, 1)]
        >>> list(partitions.values())
        [((0, 2), (1, 3)), ((0, 1), (2, 3))]
    """
    for name, size in sizes.items():
        _check_size(f"simulated_mesh: {name}", size)
    shape = tuple(sizes.values())
    grid = torch.arange(math.prod(shape)).reshape(shape)
    partitions = {
        f"{SIMULATED} {name}": tuple(
            map(tuple, grid.movedim(dim, -1).reshape(-1, shape[dim]).tolist())
        )
        for dim, name in enumerate(sizes)
    }
    places = [
        [int(place) for place in (grid == rank).nonzero()[0]] for rank in range(math.prod(shape))
    ]
    groups = tuple(
        {
            name: Group(f"{SIMULATED} {name}", size, at)
            for (name, size), at in zip(sizes.items(), place, strict=True)
        }
        for place in places
    )
    return groups, partitions


def simulated(size: int) -> tuple[Group, ...]:
    """Ranks that are not there, for `evaluate_ranks`.

    Law: on them `evaluate_ranks` computes what as many processes compute.

    Raises:
        RewriteError: the size is not an int from 1 on.

    Example:
        >>> [group.rank for group in simulated(2)]
        [0, 1]
    """
    _check_size("simulated", size)
    return tuple(Group(SIMULATED, size, rank) for rank in range(size))


def _check_size(what: str, size: int) -> None:
    if not is_int(size, 1):
        raise RewriteError(f"{what}: the number of ranks is an int from 1 on, given {size!r}")


def check_there(steps: Sequence[Any], what: str = "restore") -> None:
    """Check that the ranks of all steps are there, to talk to.

    Raises:
        RewriteError: those of one are simulated.
    """
    for step in steps:
        group = getattr(step, "group", None)
        if isinstance(group, Group) and group.name.startswith(SIMULATED):
            why = (
                f"{what}: the {group.size} ranks of {type(step).__name__.lower()} are simulated and"
                " cannot answer"
            )
            trace = "restore" if what == "restore" else "compute"
            raise RewriteError(
                why, fix=f"Run `rewrite(params, ...).{trace}` with `evaluate_ranks`."
            )


def check_groups(steps: Sequence[Any], step: Any) -> None:
    """Check that the ranks of a step are those of no step before it.

    Raises:
        RewriteError: what one rank has, another has not: sharing it once more would mix up the
            ranks' parameters.
    """
    own = getattr(step, "group", None)
    for other in steps:
        if own is not None and getattr(other, "group", None) == own:
            one, before = type(step).__name__.lower(), type(other).__name__.lower()
            what = (
                f"{one}: the {own.size} ranks of this mesh hold the parameters by {before} already"
            )
            raise RewriteError(
                what,
                fix='Pass each its own dim of one mesh, such as `mesh["dp"]` and `mesh["tp"]`.',
            )


def group_of(mesh: Any) -> Group:
    """The group of a one-dimensional DeviceMesh, or a `Group` itself."""
    if isinstance(mesh, Group):
        return mesh
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
            what = (
                f"expected a mesh of one dim, given one of {mesh.ndim}:"
                f" {', '.join(map(str, names))}"
            )
            raise RewriteError(
                what, fix=f"Pass the dim to shard over, such as `mesh[{names[0]!r}]`."
            )
        if mesh.get_coordinate() is None:
            own = torch.distributed.get_rank()
            ranks = ", ".join(map(str, mesh.mesh.flatten().tolist()))
            what = f"this process, rank {own}, is not in the mesh, which has {ranks}"
            raise RewriteError(what, fix="Only the ranks of a mesh call what uses it.")
        join()
        return Group(
            mesh.get_group().group_name,
            mesh.size(),
            mesh.get_local_rank(),
            internals.MeshDim.of(mesh),
        )
    raise RewriteError(
        f"expected a DeviceMesh, given {kind_of(mesh)}",
        fix=(
            'Write `torch.distributed.device_mesh.init_device_mesh("cpu", (size,))` under torchrun.'
        ),
    )


def groups_of(mesh: Any) -> tuple[Group, ...]:
    """The groups of a DeviceMesh of one dim or of two."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        names = mesh.mesh_dim_names
        if names is None:
            what = "fsdp: a mesh of two dims needs names for them"
            raise RewriteError(what, fix='Make it with `mesh_dim_names=("replicate", "shard")`.')
        return tuple(group_of(mesh[name]) for name in names)
    return (group_of(mesh),)
