"""The plan of a step: memory, time and communication on one rank of many."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from thunder_fn.api.calling import call_arguments
from thunder_fn.capture import pytree
from thunder_fn.capture.apply import without_values
from thunder_fn.capture.failures import raised_at
from thunder_fn.capture.replaced.autocast_regions import OFF, is_region
from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.errors import InspectError
from thunder_fn.executors import FusionExecutor
from thunder_fn.executors.torch_executor import lower
from thunder_fn.inspect.chains import Chain, Step, chain_of_programs
from thunder_fn.inspect.costs import unfolded_programs
from thunder_fn.inspect.machines import Machine
from thunder_fn.inspect.memory_use import Memory, memory_of
from thunder_fn.inspect.page import Page, page_of_runs
from thunder_fn.interpreters.pipeline.stages import Stage
from thunder_fn.ir.constraints import is_hinted
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.symbols import Expr
from thunder_fn.ir.trace import TensorType, Trace, every_equation
from thunder_fn.jitted import Jitted, Options, jit
from thunder_fn.jitted.program import transformed
from thunder_fn.parameters import Pipelined
from thunder_fn.planning.parts import Parts, in_parts, memory_in_parts
from thunder_fn.planning.rates import Hardware, hardware_named
from thunder_fn.planning.streams import Timeline, timeline, timelines
from thunder_fn.planning.worlds import FUSED_ATTENTION, fake_world


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The predicted cost of a step on one rank.

    Attributes:
        function: the step's name.
        world: the number of ranks.
        memory: the lifetimes of buffers; see `inspect.memory`. Of a deep model (`plan_layers`),
            those of a shallow one.
        held_bytes: of arguments.
        live_bytes: of all that lives beside them, at most.
        timeline: seconds, by op and by collective.
        model_flops: operations of a rank that count for the MFU.
        stages: of a pipeline, the plan of each rank; the plan itself is that of the rank with the
            highest peak.
        offloaded_bytes: in the CPU's memory, at most.
        make_chain: makes `chain`.

    Example:
        >>> import torch
        >>> from thunder_fn.planning import plan
        >>> x = torch.empty(64, 64, device="meta")
        >>> found = plan(torch.mm, (x, x), "h100")
        >>> found.world, found.fits, found.memory.peak
        (1, True, 16384)
    """

    function: str
    hardware: Hardware
    world: int
    memory: Memory = field(repr=False)
    timeline: Timeline = field(repr=False)
    held_bytes: int
    live_bytes: int
    model_flops: float
    make_chain: Callable[[], Chain] = field(repr=False, compare=False)
    stages: tuple[Plan, ...] = field(default=(), repr=False)
    offloaded_bytes: int = 0

    @cached_property
    def chain(self) -> Chain:
        """The captured step, and what became of it; of a deep model, that of a shallow one; of a
        rank of a pipeline, one micro-batch of its first stage.
        """
        return self.make_chain()

    @property
    def bubble(self) -> float:
        """The part of the time in which the ranks of a pipeline compute nothing."""
        if not self.stages:
            return 0.0
        busy = sum(one.timeline.computing for one in self.stages)
        return 1 - busy / (self.seconds * len(self.stages))

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.timeline.seconds

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds: arguments, and all that lives beside them."""
        return self.held_bytes + self.live_bytes

    @property
    def fits(self) -> bool:
        """Test that a rank has so much memory."""
        return self.peak_bytes <= self.hardware.memory_bytes

    @property
    def mfu(self) -> float:
        """The model's operations, as a part of the peak that a rank has for a step's time."""
        dtypes = sorted(self.timeline.flops_by_dtype, key=lambda item: item[1])
        peak = self.hardware.peak(dtypes[-1][0] if dtypes else torch.float32)
        return self.model_flops / (self.seconds * peak) if self.seconds else 0.0

    @property
    def exposed_communication(self) -> float:
        """The seconds in which a rank only waits for others."""
        return self.timeline.exposed

    @property
    def hidden_communication(self) -> float:
        """The seconds in which collectives run while the rank computes."""
        return max(0.0, self.timeline.communicating - self.timeline.exposed)

    def page(self) -> Page:
        """The inspector's page of the captured step, below this report. The roofline is that of the
        hardware; of a pipeline, the step is that of the rank with the highest peak.
        """
        dtypes = [torch.float32, *(dtype for dtype, _ in self.timeline.flops_by_dtype)]
        peak = max(map(self.hardware.peak, dtypes))
        machine = Machine(self.hardware.name, peak, self.hardware.memory_bytes_per_second)
        return page_of_runs(self.chain, machine=machine, report=str(self))

    def __str__(self) -> str:
        from thunder_fn.planning.report import text

        return text(self)


def planned(
    step: Callable[..., Any],
    args: Sequence[Any],
    hardware: Hardware | str | Path = "h100",
    world: int | None = None,
    *,
    fused: bool | None = None,
    model_flops: float | None = None,
) -> Plan:
    """Plan one step; see `plan`."""
    known = hardware if isinstance(hardware, Hardware) else hardware_named(hardware)
    args = call_arguments("plan", args)
    jitted: Any = step if isinstance(step, Jitted | torch.nn.Module) else jit(step)
    if fused is None:
        given: Any = getattr(getattr(jitted, "options", None), "executors", ())
        fused = any(isinstance(one, FusionExecutor) for one in given)
    with nullcontext() if world is None else fake_world(world):
        ranks = _ranks_of(jitted, args)
        for one in ranks:
            _check_precision(one.captured)
        programs = [one.programs for one in ranks]
        _check_sizes(programs)
        if len(ranks) > 1:
            times = timelines(programs, known, fused=fused)
        else:
            times = (timeline(programs[0], known, fused=fused),)
        size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    flops = sum(one.flops for one in times) / len(times) if model_flops is None else model_flops
    seconds = max(one.seconds for one in times)
    plans = list[Plan]()
    for one, spent in zip(ranks, times, strict=True):
        lives, took = one.memory, replace(spent, seconds=seconds)
        held = lives.input_bytes if one.held_bytes is None else one.held_bytes
        host = replace(lives, buffers=lives.elsewhere)
        away = host.input_bytes + host.peak
        name, peak = lives.function, lives.peak
        new = Plan(name, known, size, lives, took, held, peak, flops, one.make_chain)
        plans.append(replace(new, offloaded_bytes=away))
    largest = max(plans, key=lambda one: one.peak_bytes)
    return replace(largest, stages=tuple(plans)) if len(plans) > 1 else largest


@dataclass(frozen=True)
class _RankStep:
    """The step of a rank.

    Attributes:
        captured: before it became programs.
        held_bytes: of a pipeline's arguments, those that this rank holds; None if it holds all.
    """

    captured: Trace
    programs: tuple[Trace, ...]
    memory: Memory
    make_chain: Callable[[], Chain]
    held_bytes: int | None = None


def _ranks_of(jitted: Any, args: Sequence[Any]) -> list[_RankStep]:
    """The steps of all ranks of a pipeline; of another step, the step."""
    step = getattr(jitted, "fn", None)
    if isinstance(step, Pipelined):
        return _ranks_of_pipeline(step, jitted.options, args)
    found = _captured(jitted, args)
    programs = unfolded_programs(found)
    return [_RankStep(found.trace, programs, memory_of(found), lambda: found)]


def _ranks_of_pipeline(step: Pipelined, options: Options, args: Sequence[Any]) -> list[_RankStep]:
    params, *batch = without_values(args)
    with lookasides([*options.lookasides, FUSED_ATTENTION]), _casts_are_seen():
        stages, programs = step.programs(params, *batch)
    leaves, parts, found = pytree.flatten(params)[0], Parts(), list[_RankStep]()
    for rank, (trace, own) in enumerate(programs):
        captured = in_parts(transformed(trace, options)[-1])
        whole = parts.shared(captured)
        held = pytree.tensors_in(([leaves[at] for at in own], batch))
        memory = memory_in_parts(whole, parts, step.__name__)
        number = step.schedule.owners.index(rank)
        make = partial(_chain_of_stage, f"stage {number}, one micro-batch", stages[number])
        bytes_held = sum(leaf.nbytes for leaf in held)
        found.append(_RankStep(captured, (parts.lowered(whole),), memory, make, bytes_held))
    return found


def _chain_of_stage(name: str, stage: Stage) -> Chain:
    """The forward and the backward of a stage, on one micro-batch."""
    halves = stage.halves
    programs = [lower(half, below_autograd=True) for half in (halves.forward, halves.backward)]
    named = zip(("forward", "backward"), programs, strict=True)
    steps = tuple(Step(each, "program", one.trace, 0.0, program=one) for each, one in named)
    names = tuple(f"argument {at}" for at in range(len(stage.trace.inputs)))
    return Chain(name, steps, names, stage.trace, halves)


def _check_sizes(programs: Sequence[tuple[Trace, ...]]) -> None:
    """Check that no size depends on data, which a plan does not have.

    Raises:
        InspectError: one does; names the op and the user's line.
    """
    whole = (program for each in programs for program in each)
    for equation in (one for program in whole for one in every_equation(program)):
        shapes = (getattr(var.type, "shape", ()) for var in equation.outputs)
        if any(
            isinstance(size, Expr) and not is_hinted(size) for shape in shapes for size in shape
        ):
            what = f"plan: the size of {equation.op} depends on data, so its cost is unknown"
            fix = "Give it a size: `torch.where` for a mask, `capacity=` for experts."
            raise InspectError(what, source=equation.source, fix=fix)


def _check_precision(captured: Trace) -> None:
    """Check that PyTorch casts what it would cast on the planned device.

    Raises:
        InspectError: a region of `torch.autocast` computes on meta tensors; names the user's line.
    """
    for equation in every_equation(captured):
        types = (*equation.operand_types, *equation.output_types)
        on_meta = any(isinstance(one, TensorType) and one.device.type == "meta" for one in types)
        if is_region(equation.op) and OFF not in equation.op.name and on_meta:
            raise InspectError(_NO_CASTS, source=equation.source, fix=_CAST)


_NO_CASTS = "plan: `torch.autocast` casts nothing on meta tensors, so this is full precision"
_CAST = "Write `tfn.autocast(f)` around the model, which casts there as on a GPU."


def _captured(jitted: Any, args: Sequence[Any]) -> Chain:
    step = jit(jitted, executors=["torch"], lookasides=[FUSED_ATTENTION])
    with _casts_are_seen():
        return chain_of_programs(step, *args)


@contextmanager
def _casts_are_seen() -> Generator[None]:
    """Refuse autocast that PyTorch turns off, with a warning, where there is no GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*Disabling autocast", UserWarning)
        try:
            yield
        except UserWarning as error:
            raise InspectError(
                _NO_CASTS, source=raised_at(error.__cause__ or error), fix=_CAST
            ) from error
