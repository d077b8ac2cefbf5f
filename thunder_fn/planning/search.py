"""The best way to cut a training step, by enumeration: mesh, checkpoint and micro-batches.

Each way is a plan of its own: the loss is rewritten by `tensor_parallel`, `context_parallel`,
`checkpoint`, `fsdp` and `pipeline`, and captured on its mesh. Ways that cannot be are left out: a
mesh that the world does not have, a batch that does not divide.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from thunder_fn.api import grad
from thunder_fn.api.checkpoint import checkpoint
from thunder_fn.errors import InspectError, ThunderError
from thunder_fn.inspect.tables import bytes_text, plain, seconds_text
from thunder_fn.interpreters.checkpoint.policies import matmuls_saveable
from thunder_fn.ir.notebook import Shown
from thunder_fn.parameters import context_parallel, fsdp, pipeline, tensor_parallel
from thunder_fn.planning.plans import Plan, planned
from thunder_fn.planning.rates import Hardware
from thunder_fn.planning.worlds import fake_world

POLICIES: Mapping[str, Any] = {"none": None, "matmuls": matmuls_saveable, "all": None}
"""The values that a block keeps for its backward; with "all" it is no checkpoint."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut a step.

    Attributes:
        data, tensor, context, stages: the ranks of the mesh's dims, for fsdp, tensor_parallel,
            context_parallel (whose ranks share parameters with those of fsdp) and pipeline.
        keeps: the values that are kept for the backward: "all", "matmuls" or "none".
        micro: the number of parts of a rank's batch, which run one after the other; those of a
            pipeline run in the order of 1F1B.

    Example:
        >>> from thunder_fn.planning import Way
        >>> print(Way(data=8, tensor=4, keeps="matmuls", micro=2))
        fsdp 8 x tp 4, keeps matmuls, 2 micro
    """

    data: int
    tensor: int
    keeps: str
    micro: int
    context: int = 1
    stages: int = 1

    def __str__(self) -> str:
        others = {"cp": self.context, "pp": self.stages}
        more = "".join(f" x {name} {ranks}" for name, ranks in others.items() if ranks > 1)
        return f"fsdp {self.data} x tp {self.tensor}{more}, keeps {self.keeps}, {self.micro} micro"

    @property
    def together(self) -> int:
        """The ranks that work on one batch together."""
        return self.tensor * self.context * self.stages

    @property
    def times(self) -> int:
        """The runs of the planned program in a step: a pipeline's has all micro-batches."""
        return self.micro if self.stages == 1 else 1


@dataclass(frozen=True, repr=False)
class Search(Shown):
    """The ways that were tried, best first.

    Attributes:
        found: each way that is possible, with its plan of one micro-batch and the seconds of a
            whole step. Those that fit in memory come first.
        refused: ways that are not possible, and why.

    Example:
        >>> import torch
        >>> from thunder_fn.planning import plan
        >>> w, x = torch.empty(64, 64, device="meta"), torch.empty(16, 64, device="meta")
        >>> loss = lambda params, x: (x @ params["w"]).square().sum()
        >>> found = plan(loss, ({"w": w}, x), "h100", 8, search={"micro": (1, 2)})
        >>> print(found.best)
        fsdp 8 x tp 1, keeps all, 1 micro
    """

    found: tuple[tuple[Way, Plan, float], ...]
    refused: tuple[tuple[Way, str], ...] = field(repr=False)

    @property
    def best(self) -> Way:
        """The fastest way that fits, or the smallest where none does."""
        return self.found[0][0]

    @property
    def plan(self) -> Plan:
        """The plan of the best way."""
        return self.found[0][1]

    def why(self) -> str:
        """Say in one sentence what the runner-up has less of."""
        if len(self.found) < 2:
            return "There is no other way."
        (one, first, took), (other, second, longer) = self.found[:2]
        if not first.fits:
            return f"No way fits: {one} needs least, {bytes_text(first.peak_bytes)}."
        if not second.fits:
            return f"{one} alone fits: {other} needs {bytes_text(second.peak_bytes)}."
        parts = {
            "computing": second.timeline.computing * other.times
            - first.timeline.computing * one.times,
            "waiting for others": second.timeline.exposed * other.times
            - first.timeline.exposed * one.times,
        }
        cause = max(parts, key=parts.__getitem__)
        more = seconds_text(parts[cause]) if parts[cause] > 0 else "no more"
        return (
            f"{other} takes {seconds_text(longer)} where {one} takes {seconds_text(took)}:"
            f" {more} of it {cause}."
        )

    def __str__(self) -> str:
        rows = [
            (
                str(way),
                seconds_text(took),
                f"{found.mfu:.1%}",
                bytes_text(found.peak_bytes),
                "yes" if found.fits else "no",
            )
            for way, found, took in self.found[:12]
        ]
        refused = f"{len(self.refused)} ways are not possible" if self.refused else ""
        table = plain(("way", "step", "MFU", "peak", "fits"), rows)
        return "\n".join(part for part in (table, self.why(), refused) if part)


def searched(  # noqa: PLR0913 - options, by keyword
    loss: Callable[..., torch.Tensor],
    args: Sequence[Any],
    hardware: Hardware | str,
    world: int,
    *,
    split: Mapping[str, str] | None = None,
    blocks: Sequence[torch.nn.Module] = (),
    tensor: Sequence[int] = (1, 2, 4, 8),
    keeps: Sequence[str] = ("all", "matmuls", "none"),
    micro: Sequence[int] = (1, 2, 4),
    context: Sequence[int] = (1,),
    stages: Sequence[int] = (1,),
    fused: bool | None = None,
) -> Search:
    """Plan a training step in every way, and put the fastest that fits in memory first.

    Args:
        loss: a function of `(params, *batch)`.
        args: params, and the batch of a rank of fsdp. Ranks that work on one batch together have as
            many times more, so that all ways train on as much. Dim 1 of a batch has the positions.
        split: the plan of `tensor_parallel`; without it, tensor is 1.
        blocks: modules that loss calls, to checkpoint; without them, all values are kept.
        tensor, keeps, micro, context, stages: the choices; see `Way`.

    Raises:
        InspectError: no way is possible; says why the first is not.
    """
    found: list[tuple[Way, Plan, float]] = []
    refused: list[tuple[Way, str]] = []
    for size, positions, depth, kept, parts in product(
        tensor if split else (1,), context, stages, keeps if blocks else ("all",), micro
    ):
        together = size * positions * depth
        way = Way(world // together, size, kept, parts, positions, depth)
        if world % together:
            refused.append((way, f"{together} ranks do not divide {world}"))
            continue
        try:
            with fake_world(world), checkpointed(blocks, kept):
                one = _planned(way, *cut(loss, args, way, split or {}), hardware, fused=fused)
            found.append((way, one, one.seconds * way.times))
        except ThunderError as error:
            refused.append((way, str(error)))
    if not found:
        way, why = refused[0]
        what = f"search: no way is possible; {way}: {why}"
        raise InspectError(
            what, fix="Give other choices of tensor, context, stages, keeps or micro."
        )
    return Search(tuple(sorted(found, key=_order)), tuple(refused))


def _planned(
    way: Way, step: Callable[..., Any], args: Any, hardware: Hardware | str, *, fused: bool | None
) -> Plan:
    one = planned(step, args, hardware, fused=fused)
    kept_on = one.memory.output_bytes if way.times > 1 else 0  # gradients that add up
    return replace(one, live_bytes=one.live_bytes + kept_on)


@contextmanager
def checkpointed(blocks: Sequence[torch.nn.Module], keeps: str) -> Generator[None]:
    """Checkpoint the calls of some modules, until the block ends."""
    if keeps != "all":
        for block in blocks:
            block.forward = checkpoint(block.forward, POLICIES[keeps])
    try:
        yield
    finally:
        for block in blocks if keeps != "all" else ():
            del block.forward


def _order(one: tuple[Way, Plan, float]) -> tuple[bool, float]:
    _, found, seconds = one
    return not found.fits, seconds if found.fits else float(found.peak_bytes)


def cut(
    loss: Callable[..., torch.Tensor], args: Sequence[Any], way: Way, split: Mapping[str, str]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gradients of one micro-batch, cut in one way, and the arguments of a rank.

    Raises:
        InspectError: the batch does not divide.
    """
    params, *batch = args
    sizes = {"pipe": way.stages, "data": way.data, "context": way.context, "tensor": way.tensor}
    mesh = init_device_mesh("cpu", (*sizes.values(),), mesh_dim_names=(*sizes,))
    of_shards = (way.stages, way.data * way.context, way.tensor)  # the same ranks
    rows = init_device_mesh("cpu", of_shards, mesh_dim_names=("pipe", "shards", "tensor"))
    f: Any = loss
    if way.tensor > 1:
        f = tensor_parallel(f, mesh["tensor"], split)
    if way.context > 1:  # around attention on heads of a rank
        params = f.prepare(params) if way.tensor > 1 else params
        f = context_parallel(f, mesh["context"], "all_to_all")
    f = fsdp(f, rows["shards"], zero=3 if way.stages == 1 else 2)
    held, parts = f.prepare(params), [_part(x, way) for x in batch]
    if way.stages > 1:
        return pipeline(f, mesh["pipe"], stages=way.stages, micro=way.micro), (held, *parts)
    chosen, others = held.partition(lambda name: held[name].is_floating_point())
    step = grad(lambda chosen, others, *batch: f(held.replaced(chosen, others), *batch))
    return step, (chosen, others, *parts)


def _part(x: Any, way: Way) -> Any:
    """The part of a batch that a program of a rank is given: all micro-batches of a pipeline."""
    if not isinstance(x, torch.Tensor) or not x.dim():
        return x
    rows, shape = x.shape[0] * way.together, list(x.shape[1:])
    if rows % way.micro:
        what = f"{rows} examples are no {way.micro} micro-batches"
        raise InspectError(what, fix="Give a batch that the numbers in `micro` divide.")
    if way.context > 1 and (not shape or shape[0] % way.context):
        what = f"{tuple(x.shape)} has no dim 1 of positions that {way.context} ranks divide"
        raise InspectError(what, fix="Give other numbers in `context`, or pad the positions.")
    shape[:1] = [shape[0] // way.context] if shape else []
    return x.new_empty((rows // way.times, *shape))
