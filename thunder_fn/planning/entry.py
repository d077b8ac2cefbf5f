"""`plan`: the function for users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal as Choice, overload

import torch

from thunder_fn.api.calling import call_arguments
from thunder_fn.planning.plans import Plan, planned
from thunder_fn.planning.rates import Hardware, hardware_named
from thunder_fn.planning.search import Search, read_choices, searched
from thunder_fn.planning.worlds import check_size


@overload
def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    hardware: Hardware | str | Path = "h100",
    world: int | None = None,
    *,
    search: Choice[False] = False,
    fused: bool | None = None,
    model_flops: float | None = None,
) -> Plan: ...
@overload
def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    hardware: Hardware | str | Path = "h100",
    world: int | None = None,
    *,
    search: Choice[True] | Mapping[str, Any],
    fused: bool | None = None,
    model_flops: float | None = None,
) -> Search: ...
def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    hardware: Hardware | str | Path = "h100",
    world: int | None = None,
    *,
    search: bool | Mapping[str, Any] = False,
    fused: bool | None = None,
    model_flops: float | None = None,
) -> Plan | Search:
    """Predict what a step costs on each rank of a world that need not be there. Nothing is run.

    The step is captured once, for rank 0. A rank's memory is that of the program that `jit` makes.
    Time is a roofline for each equation and latency plus bandwidth for each collective, on streams
    in the program's order.

    Law: the operations and bytes are those of the program that `jit` makes of the step.

    Args:
        step: any function that `jit` takes, on parameters that `fsdp`, `tensor_parallel`, ... have
            prepared.
        args: its arguments; tensors on the meta device take no memory.
        hardware: of each rank; the name of a file of the package, a path, or a `Hardware`.
        world: the number of ranks. Meshes are made inside `fake_world(world)`. By default
            the process group's size, or 1.
        fused: whether neighbouring pointwise ops are one kernel. By default they are if the step is
            jitted with an executor that fuses.
        search: try ways to cut the step, and return a `Search` of them, best first. Then `step` is
            a loss of `(params, *batch)`, which is neither differentiated nor sharded yet. A mapping
            has choices: `split`, the plan of `tensor_parallel`, `blocks`, modules to checkpoint,
            and sequences `tensor`, `context`, `stages`, `schedule`, `order`, `keeps`, `micro`,
            `precision` and `offload`; see `Way`. `compile(step, recipe=found.recipe)` is the best
            step.
        model_flops: operations that count for the MFU, without recomputation. By default those
            of the program, recomputation included.

    Raises:
        InspectError: there is no such hardware or choice, or a size depends on data.
        DistributedError: the process is in a world of another size, or ranks are simulated.

    Example:
        >>> import torch
        >>> x = torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)
        >>> found = plan(lambda x: x @ x, (x,), "h100")
        >>> found.timeline.flops == 2 * 4096**3, found.peak_bytes == 2 * x.nbytes, found.fits
        (True, True, True)

    Source: Williams et al., Roofline (2009); Thakur et al., Optimization of Collective
    Communication Operations in MPICH (2005); NCCL, src/graph/tuning.cc.
    """
    known = hardware if isinstance(hardware, Hardware) else hardware_named(hardware)
    if search is False:
        return planned(step, args, known, world, fused=fused, model_flops=model_flops)
    choices, args = read_choices(search), call_arguments("plan", args)
    return searched(step, args, known, _ranks(world), choices, fused=fused)


def _ranks(world: int | None) -> int:
    if world is None:
        is_there = torch.distributed.is_initialized()
        return torch.distributed.get_world_size() if is_there else 1
    check_size(world)
    return world
