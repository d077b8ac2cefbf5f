"""Stages: the trace of a loss, cut at modules or by cost, and the halves of each stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from thunder_fn.derived.activity import activity
from thunder_fn.distributed.ranks import WAIT
from thunder_fn.distributed.schedule import reordered
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.checkpoint.cost import bytes_of, cost_of, live_bytes
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, last_uses, needed, operands_in
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask, Split
from thunder_fn.ir.splitting import split
from thunder_fn.ir.trace import (
    Equation,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
    is_differentiable,
)
from thunder_fn.ir.walking import inline_into, unfolded

SLACK = 0.2
"""A cut by cost is at most this part of a stage away from where stages cost the same."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a step.

    Attributes:
        trace: the inputs that it reads, then what it receives -> what it hands on; the loss and
            the other results of the step, if it is the last.
        reads: the places of those inputs among the step's.
        wanted: the inputs of `trace` that have gradients here.
        halves: forward and backward; its cotangents are those of `handed`.
        handed: the outputs that have cotangents.
    """

    trace: Trace
    reads: tuple[int, ...]
    wanted: Mask
    halves: Split
    handed: Mask

    @property
    def has_foreign(self) -> bool:
        """Test whether its halves come from rules that run functions of the user's."""
        return self.trace.has_foreign

    @property
    def received(self) -> tuple[bool, ...]:
        """For each received value, whether the stage returns a gradient of it."""
        places = self.halves.places(self.wanted)[len(self.reads) :]
        return tuple(place is not None for place in places)


@memo(64)
def stages_of(
    trace: Trace,
    cuts: tuple[str, ...] | int,
    wanted_inputs: Mask,
    *,
    params: int = 0,
    fused: bool = False,
) -> tuple[Stage, ...]:
    """Cut a step into stages and each stage into its forward and its backward.

    Law: the forwards of all stages, each on what those before hand on, compute the trace. The
        backwards, in reverse, compute `grad` of output 0.

    Args:
        trace: closed and checked; its first output is the loss.
        cuts: the modules with which later stages begin, or the number of stages.
        wanted_inputs: one per input; True where a gradient is wanted.
        params: the number of inputs that are parameters. Gathers of shards that are sent ahead of
            their use are in the stage of that, as all is that follows from parameters alone.

    Raises:
        RewriteError: there is no such module, or no such number of stages; or a number goes from
            one stage to another.
    """
    if len(trace.equations) == 1 and trace.equations[0].op.kind == "structured":
        what = f"pipeline: the whole loss is one {trace.equations[0].op}, which has no stages"
        fix = "Checkpoint blocks of the model; write `fsdp(..., zero=2)` or `prefetch=None` inside."
        raise RewriteError(what, source=trace.equations[0].source, fix=fix)
    if isinstance(cuts, tuple):
        whole, places = _in_stages(*_at_modules(trace, cuts, params))
    else:
        whole, places = _in_stages(*_by_cost(trace, cuts, params))
    active = activity(whole, wanted_inputs)
    found: list[Stage] = []
    handed: Mask = (True,) + (False,) * (len(whole.outputs) - 1)
    for stage, reads, received in reversed(_pieces(whole, places)):
        flags = [wanted_inputs[place] for place in reads]
        flags += [active[var.index] and is_differentiable(var.type) for var in received]
        halves = forward_backward(stage, tuple(flags), handed, fused=fused)
        found.append(Stage(stage, reads, tuple(flags), halves, handed))
        handed = found[-1].received
    return tuple(reversed(found))


# ---- where to cut ----


Cuts: TypeAlias = tuple[Trace, tuple[int, ...], list[int]]
"""A trace, its equations in the order of their use, and the places in that order where stages
begin.
"""


def _by_use(trace: Trace, params: int) -> tuple[int, ...]:
    """The equations with those that follow from parameters alone, and collectives, as late as can
    be: before the first one that is neither and needs them.
    """
    makers = {var.index: at for at, one in enumerate(trace.equations) for var in one.outputs}
    early = {var.index for var in trace.inputs[:params]}
    waits = dict[int, list[int]]()  # equations that may be late, and those of them they need
    order = list[int]()

    def use(needs: Iterable[int]) -> None:
        found, left = set[int](), list(needs)
        while left:
            at = left.pop()
            if at in waits:
                found.add(at)
                left += waits.pop(at)
        order.extend(sorted(found))

    for at, one in enumerate(trace.equations):
        needs = [makers[var.index] for var in one.operands if var.index in makers]
        is_early = bool(one.operands) and all(var.index in early for var in one.operands)
        if ops.is_collective(one.op) or (is_early and not ops.has_side_effect(one)):
            waits[at] = needs
            early.update(var.index for var in one.outputs if is_early)
        else:
            use(needs)
            order.append(at)
    use(list(waits))
    return tuple(order)


def _in_stages(
    trace: Trace, order: Sequence[int], places: Sequence[int]
) -> tuple[Trace, list[int]]:
    """The trace with its equations by stage, as they came before within each."""
    rows = [sorted(order[a:b]) for a, b in pairwise((0, *places, len(order)))]
    return reordered(trace, tuple(at for row in rows for at in row)), [*places]


def _travelling(used: Trace) -> set[int]:
    """The places where a cut would hand on what other ranks still send."""
    sent, found = dict[int, int](), set[int]()
    for place, one in enumerate(used.equations):
        if one.op.name == WAIT:
            starts = [sent[var.index] for var in one.operands if var.index in sent]
            found.update(at for start in starts for at in range(start + 1, place + 1))
        elif ops.is_collective(one.op):
            sent.update((var.index, place) for var in one.outputs)
    return found


def _before(travelling: set[int], place: int) -> int:
    while place in travelling:
        place -= 1
    return place


def _at_modules(trace: Trace, paths: Sequence[str], params: int) -> Cuts:
    """The trace, unfolded as far as needed, and the first equation of each module."""
    for path in paths:
        trace = _unfolded_at(trace, path)
    order = _by_use(trace, params)
    used = reordered(trace, order)
    found = [_first_of(used, path) for path in paths]
    travelling = _travelling(used)
    places = [_before(travelling, place) for place in found if place is not None]
    if len(places) < len(paths) or sorted(set(places)) != places or 0 in places:
        named = ", ".join(dict.fromkeys(_modules(trace)))
        what = f"pipeline: stages begin with {', '.join(paths)}"
        fix = f"Name modules in the order in which they run. There are {named or 'no modules'}."
        raise RewriteError(what, fix=fix)
    return trace, order, places


def _modules(trace: Trace) -> list[str]:
    """The modules that run, outermost ones only."""
    found = list[str]()
    for one in trace.equations:
        module = one.source.module if one.source else ""
        is_open = not module and one.op.kind == "composite" and not ops.is_operator(one.op)
        found += _modules(_inside(one)) if is_open else [module] * bool(module)
    return found


def _first_of(trace: Trace, path: str) -> int | None:
    """The first equation that runs in a module."""
    places = (
        place for place, one in enumerate(trace.equations) if one.source and _is_in(one, path)
    )
    return next(places, None)


def _is_in(equation: Equation, path: str) -> bool:
    module = equation.source.module if equation.source else ""
    return module == path or module.startswith(f"{path}.")


def _unfolded_at(trace: Trace, path: str) -> Trace:
    """The trace without the composites in which a module begins."""
    while _first_of(trace, path) is None:
        around = next((one for one in trace.equations if _holds(one, path)), None)
        if around is None:
            return trace
        trace = unfolded(trace, lambda one: one is around)
    return trace


def _holds(equation: Equation, path: str) -> bool:
    """Test for the call of a module around this one."""
    if equation.op.kind != "composite" or ops.is_operator(equation.op):
        return False
    module = equation.source.module if equation.source else ""
    if module:
        return path.startswith(f"{module}.")
    inside = _inside(equation)
    is_there = _first_of(inside, path) is not None
    return is_there or any(_holds(one, path) for one in inside.equations)


def _inside(equation: Equation) -> Trace:
    """The body of a call, its modules named as seen from outside."""
    builder = TraceBuilder()
    inputs = builder.take(equation.operand_types)
    return builder.build(inline_into(builder, equation.body, inputs, equation.source))


def _by_cost(trace: Trace, count: int, params: int) -> Cuts:
    """The trace, unfolded as far as needed, and cuts between stages of about the same cost.

    Where costs allow, a cut is where few bytes cross it.
    """
    trace = _unfolded_by_cost(trace, count)
    order = _by_use(trace, params)
    used = reordered(trace, order)
    costs = [0, *accumulate(map(cost_of, used.equations))]
    bytes_crossing, travelling = _crossing_bytes(used), _travelling(used)
    places: list[int] = []
    for stage in range(1, count):
        ideal, room = stage * costs[-1] / count, SLACK * costs[-1] / count
        first = places[-1] + 1 if places else 1
        free = [
            place
            for place in range(first, len(order) - (count - stage) + 1)
            if place not in travelling
        ]
        near = [place for place in free if abs(costs[place] - ideal) <= room]
        if not free:
            what = f"pipeline: {count} stages of {len(trace.equations)} equations"
            raise RewriteError(what, fix="Ask for fewer stages.")
        places.append(
            min(
                near or free,
                key=lambda at: (bytes_crossing[at] if near else 0, abs(costs[at] - ideal)),
            )
        )
    return trace, order, places


def _unfolded_by_cost(trace: Trace, count: int) -> Trace:
    """The trace without composites that cost more than a cut may be away."""
    while True:
        total = sum(map(cost_of, trace.equations))
        large = lambda one: (
            one.op.kind == "composite"
            and not ops.is_operator(one.op)
            and cost_of(one) > SLACK * total / count
        )
        if not any(map(large, trace.equations)):
            return trace
        trace = unfolded(trace, large)


def _crossing_bytes(trace: Trace) -> list[int]:
    """For each place, the bytes that are made before it and read from it on."""
    last = last_uses(trace)
    spans = (
        (at + 1, max(last[var.index], at), bytes_of(var.type))
        for at, equation in enumerate(trace.equations)
        for var in equation.outputs
    )
    return live_bytes(spans, len(trace.equations) + 2)


# ---- cutting ----


def _pieces(
    trace: Trace, places: Sequence[int]
) -> list[tuple[Trace, tuple[int, ...], tuple[Var, ...]]]:
    """For each stage its trace, the places of the inputs that it reads, and what it receives."""
    inputs = {var.index: place for place, var in enumerate(trace.inputs)}
    known = {*inputs, *(constant.var.index for constant in trace.constants)}
    rows = [trace.equations[a:b] for a, b in pairwise((0, *places, len(trace.equations)))]
    results = {atom.index: atom for atom in trace.outputs if isinstance(atom, Var)}
    crossing = _crossing(rows, results, known)
    found = list[tuple[Trace, tuple[int, ...], tuple[Var, ...]]]()
    for stage, row in enumerate(rows):
        is_last = stage + 1 == len(rows)
        received = crossing[stage - 1] if stage else ()
        outputs = trace.outputs if is_last else crossing[stage]
        read = {var.index for var in operands_in(row)}
        read |= {atom.index for atom in trace.outputs if is_last and isinstance(atom, Var)}
        own = [var for var in trace.inputs if var.index in read]
        piece = cut(
            trace, inputs=(*own, *received), equations=row, outputs=outputs, name=f"stage_{stage}"
        )
        found.append((piece, tuple(inputs[var.index] for var in own), received))
    return found


def _crossing(
    rows: Sequence[Sequence[Equation]], results: dict[int, Var], known: set[int]
) -> list[tuple[Var, ...]]:
    """The values that cross each cut: made before, read after it. Inputs and constants do not."""
    later, found = results, list[tuple[Var, ...]]()
    for row in reversed(rows[1:]):
        own = {var.index for var in bound(row)}
        later = {i: var for i, var in later.items() if i not in own}
        later |= {var.index: var for var in operands_in(row) if var.index not in own | known}
        later = {i: var for i, var in later.items() if i not in known}
        crossing = tuple(later[i] for i in sorted(later))
        _check_tensors(crossing)
        found.append(crossing)
    return found[::-1]


def _check_tensors(crossing: Sequence[Var]) -> None:
    for var in crossing:
        if not isinstance(var.type, TensorType) or not all(
            isinstance(size, int) for size in var.type.shape
        ):
            what = f"pipeline: {var.type} would go from one stage to the next"
            raise RewriteError(what, fix="Cut elsewhere: only tensors of known sizes are sent.")


# ---- the backward in two ----


@memo(256)
def halved(stage: Stage) -> tuple[Split, tuple[int | None, ...]]:
    """The backward of a stage as gradients of what it receives, and then gradients of the rest.

    Returns:
        The split of the backward; and for each wanted input of the stage the place of its gradient
        among the outputs of the first half, then those of the second; None where it has none.
    """
    backward = inline(stage.halves.backward)
    count = sum(stage.wanted[: len(stage.reads)])
    first = [place for place in stage.halves.gradients[count:] if place is not None]
    second = [place for place in stage.halves.gradients[:count] if place is not None]
    outputs = (
        [backward.outputs[place] for place in first],
        [backward.outputs[place] for place in second],
    )
    wanted = {atom.index for atom in outputs[0] if isinstance(atom, Var)}
    kept = {id(one) for one in needed(backward.equations, wanted)}
    late = {var.index for one in backward.equations if id(one) not in kept for var in one.outputs}
    order = {place: at for at, place in enumerate((*first, *second))}
    places = tuple(None if one is None else order[one] for one in stage.halves.gradients)
    return split(backward, late, outputs), places
