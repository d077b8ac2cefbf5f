"""The step of a rank, as a `Way` cuts it: mesh, rewrites, checkpoints and micro-batches.

`plan(..., search=)` plans it on tensors without values, and `compile` runs it: the recipe of a
`Search` is a `CutStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_fn.api import grad_and_value
from thunder_fn.api.autocast import autocast
from thunder_fn.api.checkpoint import checkpoint
from thunder_fn.capture import pytree
from thunder_fn.errors import InspectError, RecipeError, kind_of
from thunder_fn.interpreters.checkpoint.policies import checkpoint_policies
from thunder_fn.interpreters.rewriting.prepared import Prepared, layout_of
from thunder_fn.ir.trace import TensorType, static_shape
from thunder_fn.jitted.transforms import Transform
from thunder_fn.parameters import (
    Rewritten,
    context_parallel,
    fsdp,
    pipeline,
    positions,
    tensor_parallel,
)
from thunder_fn.recipes import Recipe

Loss: TypeAlias = Callable[..., torch.Tensor]

POLICIES: Mapping[str, Any] = {"none": None, "matmuls": checkpoint_policies.matmuls_saveable}
"""The values that a block keeps for its backward; with "all" it is no checkpoint."""


ORDER = ("pipe", "shards", "tensor")
"""The dims of a mesh: shards have the ranks of data and, inside, of context."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut a step.

    Attributes:
        data, tensor, context, stages: the ranks of the mesh's dims, for fsdp, tensor_parallel,
            context_parallel (whose ranks share parameters with those of fsdp) and pipeline.
        keeps: the values that are kept for the backward: "all", "matmuls" or "none"; or a number of
            bytes, of each block.
        micro: the number of parts of a rank's batch, which run one after the other; those of a
            pipeline run as its schedule says.
        precision: the dtype in which is computed (autocast) and in which parameters and gradients
            travel; None for that of the parameters.
        offload: whether shards lie in the CPU's memory.
        schedule: of a pipeline; an interleaved one has two stages on each rank.
        order: the dims of the mesh, outermost first. Ranks of the last one are neighbours in a
            node; "shards" has the ranks of data and, inside, of context.

    Example:
        >>> from thunder_fn.planning import Way
        >>> print(Way(data=8, tensor=4, keeps="matmuls", micro=2))
        fsdp 8 x tp 4, keeps matmuls, 2 micro
    """

    data: int
    tensor: int
    keeps: str | int
    micro: int
    context: int = 1
    stages: int = 1
    precision: torch.dtype | None = None
    offload: bool = False
    schedule: str = "1f1b"
    order: tuple[str, ...] = ORDER

    def __str__(self) -> str:
        others = {"cp": self.context, "pp": self.stages}
        more = "".join(f" x {name} {ranks}" for name, ranks in others.items() if ranks > 1)
        kept = self.keeps if isinstance(self.keeps, str) else f"{self.keeps:,} B a block"
        text = f"fsdp {self.data} x tp {self.tensor}{more}, keeps {kept}, {self.micro} micro"
        text += "" if self.precision is None else f", {str(self.precision).removeprefix('torch.')}"
        text += "" if self.schedule == "1f1b" else f", {self.schedule}"
        text += "" if self.order == ORDER else f", mesh of {', '.join(self.order)}"
        return f"{text}, offloaded" if self.offload else text

    @property
    def sizes(self) -> dict[str, int]:
        """The ranks of the mesh's dims, in their order."""
        ranks = self.stages, self.data * self.context, self.tensor
        known: dict[str, int] = dict(zip(ORDER, ranks, strict=True))
        return {name: known[name] for name in self.order}

    @property
    def together(self) -> int:
        """The ranks that work on one batch together."""
        return self.tensor * self.context * self.stages

    @property
    def world(self) -> int:
        """The ranks of all dims."""
        return self.data * self.together

    @property
    def times(self) -> int:
        """The runs of the planned program in a step: a pipeline's has all micro-batches."""
        return self.micro if self.stages == 1 else 1


@dataclass(frozen=True)
class Cut:
    """A loss of `(params, *batch)`, cut in one way, as a rank of the process group computes it.

    Attributes:
        split: the plan of `tensor_parallel`.
        device: of the ranks.
    """

    loss: Loss
    way: Way
    split: Mapping[str, str]
    device: str = "cpu"

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The dims of the way."""
        way, sizes = self.way, dict[str, int]()
        for name, ranks in way.sizes.items():
            split = {"data": way.data, "context": way.context}
            sizes |= split if name == "shards" else {name: ranks}
        return init_device_mesh(self.device, (*sizes.values(),), mesh_dim_names=(*sizes,))

    @cached_property
    def split_loss(self) -> Any:
        """The loss on shares of weights."""
        way = self.way
        f = self.loss if way.precision is None else autocast(self.loss, way.precision)
        return tensor_parallel(f, self.mesh["tensor"], self.split) if way.tensor > 1 else f

    @cached_property
    def on_shards(self) -> Any:
        """The loss on shards and on a part of the positions."""
        way, f = self.way, self.split_loss
        if way.context > 1:  # around attention on heads of a rank
            f = context_parallel(f, self.mesh["context"], "all_to_all")
        sizes = (*way.sizes.values(),)  # the same ranks
        rows = init_device_mesh(self.device, sizes, mesh_dim_names=way.order)
        zero, dtype = 3 if way.stages == 1 else 2, way.precision
        return fsdp(f, rows["shards"], zero=zero, precision=dtype, offload=way.offload)

    @cached_property
    def step(self) -> Callable[..., Any]:
        """The loss and the gradients of one micro-batch, or of all of a pipeline's."""
        if self.way.stages > 1:
            way = self.way
            stages = way.stages * (2 if way.schedule == "interleaved" else 1)
            mesh, schedule = self.mesh["pipe"], way.schedule
            return pipeline(self.on_shards, mesh, stages=stages, micro=way.micro, schedule=schedule)
        return self.with_gradients

    def with_gradients(self, params: Prepared, *batch: Any) -> tuple[Any, Any]:
        """The loss, and gradients of what is trained."""
        chosen, others = params.partition(lambda name: params[name].is_floating_point())
        f = lambda chosen, others, *batch: self.on_shards(params.replaced(chosen, others), *batch)
        gradients, value = grad_and_value(f)(chosen, others, *batch)
        return value, gradients

    def prepare(self, params: Any) -> Prepared:
        """The parameters as this rank holds them, from those of the loss."""
        if self.way.tensor > 1 and self.way.context > 1:
            params = prepared(self.split_loss, params)
        return prepared(self.on_shards, params)


def prepared(f: Rewritten, params: Any) -> Prepared:
    """Prepare parameters, also such as have no values: offloaded ones take no memory either."""
    tensors = pytree.tensors_in(params)
    if not all(one.is_meta for one in tensors):
        return f.prepare(params)
    layout = layout_of(params, f.steps)
    types = [one for one in layout.rewrite.prepare.output_types if isinstance(one, TensorType)]
    empty = lambda one: torch.empty(static_shape(one), dtype=one.dtype, device=one.device)
    return Prepared(layout, [empty(one) for one in types])


@contextmanager
def checkpointed(blocks: Sequence[torch.nn.Module], forwards: Sequence[Any]) -> Generator[None]:
    """Give modules other forwards, until the block ends."""
    for block, forward in zip(blocks, forwards, strict=True):
        block.forward = forward
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def forwards_of(blocks: Sequence[torch.nn.Module], keeps: str | int) -> tuple[Any, ...]:
    """The forwards of modules, as checkpoints that keep some values."""
    policy = POLICIES[keeps] if isinstance(keeps, str) else checkpoint_policies.budget(keeps)
    return tuple(checkpoint(block.forward, policy) for block in blocks)


# ---- the recipe ----


@dataclass(frozen=True, eq=False)
class CutStep:
    """The compiled step of a rank: what `compile` makes of a loss with the recipe of a plan."""

    cut: Cut
    compiled: Callable[..., Any]
    blocks: Sequence[torch.nn.Module] = ()
    forwards: Sequence[Any] = field(default=(), repr=False)

    @property
    def way(self) -> Way:
        """The way that is cut."""
        return self.cut.way

    def prepare(self, params: Any, *batch: Any) -> Any:
        """The parameters that this rank holds, from whole ones, the same on all ranks.

        Args:
            batch: as for a call; the ranks of a pipeline keep what their stages read.
        """
        held = self.cut.prepare(params)
        step: Any = self.cut.step
        return step.prepare(held, *batch) if self.way.stages > 1 else held

    def part(self, *batch: Any) -> tuple[Any, ...]:
        """This rank's part of a whole batch: its rows, and of dim 1 its positions."""
        own = self.cut.mesh["data"].get_local_rank()
        found = list[Any]()
        for x in batch:
            if isinstance(x, torch.Tensor) and x.dim():
                if x.shape[0] % self.way.data:
                    what = f"{x.shape[0]} examples are no {self.way.data} equal parts"
                    raise InspectError(what, fix="Give a batch that the ranks of fsdp divide.")
                x = x.chunk(self.way.data)[own]
                if self.way.context > 1:
                    x = positions(self.cut.mesh["context"]).part(x, 1)
            found.append(x)
        return tuple(found)

    def __call__(self, params: Any, *batch: Any) -> tuple[torch.Tensor, Any]:
        """The mean loss of this rank's micro-batches, and the gradients of its parameters, means
        over all ranks that share them.
        """
        with checkpointed(self.blocks, self.forwards):
            if self.way.times == 1:
                return self.compiled(params, *batch)
            split = [_micro_batches(x, self.way.micro) for x in batch]
            total: Any = None
            for one in zip(*split, strict=True):
                found = self.compiled(params, *one)
                add = lambda x, y: x if x is None else x + y
                total = found if total is None else pytree.tree_map(add, total, found)
            return pytree.tree_map(lambda x: x / self.way.micro, total)


def _micro_batches(x: Any, micro: int) -> Sequence[Any]:
    if not isinstance(x, torch.Tensor) or not x.dim():
        return (x,) * micro
    if x.shape[0] % micro:
        what = f"{x.shape[0]} examples are no {micro} micro-batches"
        raise InspectError(what, fix="Give a batch that the number of micro-batches divides.")
    return x.chunk(micro)


class PlannedRecipe(Recipe):
    """A loss of `(params, *batch)` as the step that a plan has found. Made by `Search.recipe`.

    Args:
        way: of the ranks.
        split, blocks: as in `plan(..., search=)`.
    """

    frontend = "direct"

    def __init__(
        self, way: Way, split: Mapping[str, str] = {}, blocks: Sequence[torch.nn.Module] = ()
    ) -> None:
        self.way, self.split, self.blocks = way, dict(split), tuple(blocks)

    def validate(self, model: Any) -> None:
        """Check that this is a rank of the planned world, and the model a function."""
        if isinstance(model, torch.nn.Module):
            what = f"a plan cuts a loss of (params, *batch), given the module {kind_of(model)}"
            fix = "Compile the function that was planned, which calls `torch.func.functional_call`."
            raise RecipeError(what, fix=fix)
        here = dist.get_world_size() if dist.is_initialized() else 1
        if not dist.is_initialized() or here != self.way.world:
            ranks = f"{here} ranks" if dist.is_initialized() else "no process group"
            what = f"the plan is of {self.way.world} ranks ({self.way}), and there is {ranks}"
            fix = "Start under torchrun, or plan again for the ranks that there are."
            raise RecipeError(what, fix=fix)

    def setup_transforms(self) -> Sequence[Transform]:
        """Cut the loss; around what is compiled, run micro-batches and checkpoint blocks."""
        device = "cuda" if dist.is_initialized() and "nccl" in dist.get_backend() else "cpu"
        cuts = list[Cut]()

        def cut(loss: Loss) -> Callable[..., Any]:
            cuts.append(Cut(loss, self.way, self.split, device))
            return cuts[-1].step

        def around(compiled: Callable[..., Any]) -> CutStep:
            blocks = () if self.way.keeps == "all" else self.blocks
            forwards = forwards_of(blocks, self.way.keeps) if blocks else ()
            return CutStep(cuts[-1], compiled, blocks, forwards)

        return (
            Transform(cut, name="cut", numerics="reassociating", on="model"),
            Transform(around, name="micro_batches", after=("cut",), on="compiled"),
        )
