"""Process groups and meshes."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false, reportUnusedImport=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

if torch.distributed.is_available():
    # imported later, its default arguments keep the process group that is there then
    import torch.distributed.nn.functional


def default_store() -> Any:
    """The store through which the ranks of the default process group found each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def fake_store() -> Any:
    """A store for the backend "fake", whose collectives do nothing: PyTorch has it for its own
    tests.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    return FakeStore()


@dataclass(frozen=True)
class MeshDim:
    """A dim of a DeviceMesh as a value: the data to make the mesh again, of the process groups that
    are registered under these names.

    It keeps no mesh, whose process groups would live as long as anything that remembers the dim.
    PyTorch aborts processes whose threads of a group are there when Python ends.
    """

    device_type: str
    shape: tuple[int, ...]
    """The shape of the whole mesh that the dim is of."""
    ranks: tuple[int, ...]
    names: tuple[str, ...] | None
    groups: tuple[str, ...]
    place: tuple[int, ...]
    """The place of this process in the whole mesh."""
    name: str | None

    @staticmethod
    def of(mesh: Any) -> MeshDim:
        """The dim that a DeviceMesh of one dim is."""
        root = mesh._get_root_mesh()
        if (
            root.mesh_dim_names is None or mesh.mesh_dim_names[0] not in root.mesh_dim_names
        ):  # flattened from several
            root = mesh
        return MeshDim(
            root.device_type,
            tuple(root.mesh.shape),
            tuple(root.mesh.flatten().tolist()),
            root.mesh_dim_names,
            tuple(group.group_name for group in root.get_all_groups()),
            tuple(root.get_coordinate()),
            mesh.mesh_dim_names and mesh.mesh_dim_names[0],
        )

    @property
    def root(self) -> tuple[Any, ...]:
        """The key in which two dims of one mesh agree."""
        return (self.device_type, self.shape, self.ranks, self.names, self.groups)

    def all_ranks(self) -> torch.Tensor:
        """The ranks of the whole mesh."""
        return torch.tensor(self.ranks).reshape(self.shape)

    def group(self) -> Any:
        """The process group."""
        return _named_group(
            self.groups[self.names.index(self.name) if self.names and self.name else 0]
        )

    def mesh(self) -> Any:
        """The DeviceMesh of this dim, equal to the one it is of."""
        from torch.distributed.device_mesh import DeviceMesh  # takes a while to import

        if len(self.groups) == 1:
            return DeviceMesh.from_group(self.group(), self.device_type, mesh_dim_names=self.names)
        groups = list(map(_named_group, self.groups))
        return DeviceMesh.from_group(
            groups, self.device_type, self.all_ranks(), mesh_dim_names=self.names
        )[self.name or ""]


def _named_group(name: str) -> Any:
    from torch.distributed import distributed_c10d

    resolve: Callable[[str], Any] = distributed_c10d._resolve_process_group  # type: ignore[assignment]  # a NewType of str
    return resolve(name)


def ranks_of_group(name: str) -> list[int]:
    """The ranks, of all processes, in the group that is registered under this name."""
    return torch.distributed.get_process_group_ranks(_named_group(name))


def is_fake_group(name: str) -> bool:
    """Test for a group that is registered under this name and has PyTorch's backend "fake"."""
    return torch.distributed.get_backend(_named_group(name)) == "fake"


def functional_collectives() -> Any:
    """The ops of PyTorch's functional collectives, whose types are known once they are imported."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def sent_to(x: torch.Tensor, to: int, tag: int, name: str) -> torch.Tensor:
    """Send x to a rank of a group; the handle for which `wait_tensor` waits.

    PyTorch's functional `isend` registers its work under x as well as under the handle, and what
    is waited for by one stays under the other: no x that was sent was ever freed.
    """
    handle = x.new_empty(0, dtype=torch.uint8)
    torch._C._distributed_c10d._register_work(handle, _named_group(name).send([x], to, tag))
    return handle


def receive_into(x: torch.Tensor, source: int, tag: int, name: str) -> None:
    """Fill x with what a rank of a group sends, when that is there."""
    _named_group(name).recv([x], source, tag).wait()


def unwaited_collectives() -> int:
    """The number of collectives and messages that were sent and not yet waited for."""
    return torch._C._distributed_c10d._get_work_registry_size()


def joint_mesh(dims: Sequence[MeshDim]) -> Any:
    """One DeviceMesh of several dims of one mesh, in this order and with their groups.

    None where they are not dims of one mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh  # takes a while to import

    first = dims[0]
    if len(dims) == 1:
        return first.mesh()
    names = [dim.name or "" for dim in dims]
    if first.names is None or any(dim.root != first.root for dim in dims):
        return None
    own = tuple(
        slice(None) if name in names else at
        for name, at in zip(first.names, first.place, strict=True)
    )
    left = [name for name in first.names if name in names]
    ranks = first.all_ranks()[own].permute(*map(left.index, names)).contiguous()
    return DeviceMesh.from_group(
        [dim.group() for dim in dims], first.device_type, ranks, mesh_dim_names=tuple(names)
    )
