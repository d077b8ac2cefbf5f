"""Claiming: who runs which part of a trace.

The walk goes from the outermost composite inwards and asks the executors in order. A composite that
nobody takes is unfolded, down to ATen leaves and structured ops, which the torch executor runs. The
result is a trace again. Everything that an executor other than torch runs is one composite in it,
so `evaluate` specifies it.

    myex::multimul                  an equation that an executor computes
    inductor::inductor_fusion_0     a region

A call of a jitted function that was given executors of its own is claimed by those, and nobody else
sees inside. A large composite that occurs more than once is claimed on its own. So the regions in
it are equal wherever it occurs, and are compiled once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.distributed.schedule import awaited_late
from thunder_fn.errors import ExecutorError, kind_of
from thunder_fn.executors.base import (
    NOT_REGISTERED,
    Answer,
    Executor,
    Fuse,
    FusionExecutor,
    Instead,
    Refused,
    Run,
    RunFunction,
)
from thunder_fn.executors.decisions import IN_ITSELF, INSTEAD, TOO_SMALL, Decision, how
from thunder_fn.executors.eligibility import (
    TORCH,
    called,
    device_of,
    frozen,
    is_final,
    own_executors,
    shared_bodies,
)
from thunder_fn.executors.lists import with_lists
from thunder_fn.executors.notes import Note, Part
from thunder_fn.executors.pruning import drop_dead, prune
from thunder_fn.executors.regions import bodies_of, grouped, partition
from thunder_fn.executors.reuse import drop_copies
from thunder_fn.executors.side_by_side import joined
from thunder_fn.executors.unrolling import with_blocks
from thunder_fn.executors.updates import IN_PLACE, Written, updates, written_by
from thunder_fn.executors.whole_linears import whole_linear
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import close_symbols
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import Atom, Equation, Expr, Op, Source, Trace, TraceBuilder
from thunder_fn.ir.walking import inline_into, put, walk

REGION = "region"


@dataclass(frozen=True, slots=True)
class Claim:
    """A part that an executor runs: an equation, by a function, or a region, which it compiles."""

    executor: Executor
    name: str
    run: RunFunction | None
    region: Trace | None = None

    @property
    def closed_region(self) -> Trace | None:
        """The region with an input for each symbol that it takes from around it."""
        return close_symbols(self.region)[0] if self.region is not None else None

    @property
    def numbers(self) -> tuple[Expr, ...]:
        """The symbols of the claim."""
        return close_symbols(self.region)[1] if self.region is not None else ()


@dataclass(frozen=True, slots=True)
class Claimed:
    """A trace of leaves, structured ops and claimed composites; who runs those; which composites
    began where.

    Regions have names of their own, and are found by these. `asked` are those that are asked about
    bodies too.
    """

    trace: Trace
    notes: dict[int, tuple[str, ...]]
    claims: dict[Trace | Op, Claim]
    log: tuple[Decision, ...] = ()
    executors: dict[str, Executor] = field(default_factory=dict[str, "Executor"])
    asked: tuple[Executor, ...] = ()

    @property
    def replaced(self) -> tuple[Decision, ...]:
        """Equations that an executor computes by the name's own meaning."""
        return tuple(decision for decision in self.log if decision.how == INSTEAD)

    def claim_of(self, equation: Equation) -> Claim:
        """The claim of a composite."""
        return self.claims.get(equation.op) or self.claims[alone(equation)]

    def region_of(self, equation: Equation) -> Trace | None:
        """The body of a region of an executor that says where its results lie."""
        claim = self.claim_of(equation) if equation.op.kind == "composite" else None
        if (
            claim is None
            or not isinstance(claim.executor, FusionExecutor)
            or not claim.executor.allocates
        ):
            return None
        return claim.region


def claim(
    trace: Trace,
    executors: Sequence[Executor] = (),
    writes: Sequence[int | None] = (),
    *,
    below_autograd: bool = False,
) -> Claimed:
    """Decide who runs what.

    Law: ``evaluate(claim(t, executors).trace, xs)`` is bitwise ``evaluate(t, xs)``.

    Args:
        executors: in order of priority. The torch executor runs the rest.
        writes: one for each of the last outputs: the input, by position, that it will be written
            to, or None. An equation that overwrites some elements of such an input is no part of a
            region.
        below_autograd: the results need no gradient.

    Raises:
        ExecutorError: two executors have the same name, or a checker or a transform of an executor
            raises.
    """
    return _Claiming(frozen(executors), below_autograd).program(trace, written_by(trace, writes))


class _Claiming:
    """One claiming: the decisions so far."""

    def __init__(self, executors: tuple[Executor, ...], below_autograd: bool) -> None:
        self.executors = tuple(executor for executor in executors if executor.claims)
        self.below_autograd = below_autograd
        self.fusions = tuple(
            executor for executor in executors if isinstance(executor, FusionExecutor)
        )
        self.min_shared = min((executor.min_shared for executor in self.fusions), default=None)
        self.claims: dict[Trace | Op, Claim] = {}
        self.log: dict[Decision, int] = {}
        self.parts: dict[tuple[Trace, tuple[Executor, ...] | None, Written], Part] = {}
        self.by_name: dict[str, Executor] = {}
        self.know(executors)

    def know(self, executors: tuple[Executor, ...]) -> None:
        for executor in executors:
            if self.by_name.setdefault(executor.name, executor).identity is not executor.identity:
                raise ExecutorError(
                    f"two executors are called {executor.name!r}",
                    fix="Give each executor of a program a name of its own.",
                )

    def program(self, trace: Trace, written: Written) -> Claimed:
        part = self.part(trace, written)
        named = self.named(part.trace)
        log = tuple(replace(decision, times=count) for decision, count in self.log.items() if count)
        notes = {position: tuple(map(str, found)) for position, found in part.notes.items()}
        return Claimed(named, notes, self.claims, log, self.by_name, self.executors)

    def part(self, trace: Trace, written: Written) -> Part:
        """A trace, claimed; its shared composites are parts of their own."""
        shared = (
            shared_bodies(trace, self.min_shared)
            if self.min_shared is not None
            else frozenset[Trace]()
        )
        walk = _Walk(self, shared, TraceBuilder(trace.name), {})
        outputs = walk.run(trace, walk.builder.take(trace.input_types))
        part = Part(walk.builder.build(outputs), walk.notes)
        part = part.without(*drop_dead(part.trace))
        part = part.without(*drop_copies(part.trace))
        part = part.without(*prune(part.trace, below_autograd=self.below_autograd))
        part = part.without(*drop_dead(part.trace))
        part = part.reordered(*awaited_late(part.trace))
        for fusion in self.fusions:
            part = self.fused(part, fusion, written)
        part = self.unfolded(part, shared, written)
        part = part.reordered(*awaited_late(part.trace))
        for fusion in self.fusions:
            part = part.reordered(*joined(part.trace, fusion, f"{fusion.name}::{REGION}"))
        return part

    def fused(self, part: Part, fusion: FusionExecutor, written: Written) -> Part:
        """Fuse what is on each device. Numbers of the CPU beside a GPU's ops stay with torch."""
        found = dict.fromkeys(map(device_of, part.trace.equations))
        has_gpu = any(device is not None and device.type != "cpu" for device in found)
        is_mixed = has_gpu and len(found) > 1
        for device in filter(None, found) if is_mixed else [None]:
            part = self.fused_on(device, part, fusion, written)
        return part

    def fused_on(
        self, device: torch.device | None, part: Part, fusion: FusionExecutor, written: Written
    ) -> Part:
        """Fuse what is on a device; everything, if there is only one."""
        fusible = [
            (device is None or device_of(equation) == device) and self.is_fusible(equation, fusion)
            for equation in part.trace.equations
        ]
        for position in filter(fusible.__getitem__, updates(part.trace, written).equations):
            fusible[position] = False
            self.give_up([part.trace.equations[position]], fusion, IN_PLACE)
        groups = [
            group
            for group in fusion.apart(part.trace)
            if all(fusible[position] for position in group)
        ]
        apart, small = {position for group in groups for position in group}, list[Equation]()
        found = partition(
            part.trace, [flag and place not in apart for place, flag in enumerate(fusible)]
        )
        for group, body in zip(found, bodies_of(part.trace, found, REGION), strict=True):
            if fusion.is_worth(body):
                groups.append(group)
            else:
                small += [part.trace.equations[position] for position in group]
        self.give_up(small, fusion, TOO_SMALL)
        return (
            part.reordered(*grouped(part.trace, groups, f"{fusion.name}::{REGION}"))
            if groups
            else part
        )

    def is_fusible(self, equation: Equation, fusion: FusionExecutor) -> bool:
        if ops.is_operator(equation.op) or (
            is_symbolic(alone(equation)) and not fusion.takes_symbols
        ):
            return False
        return isinstance(fusion.answer(equation), Fuse)

    def is_unclaimed(self, equation: Equation) -> bool:
        """Test that no executor takes the equation as it is."""
        return all(isinstance(one.answer(equation), Refused) for one in self.executors)

    def unfolded(self, part: Part, shared: frozenset[Trace], written: Written) -> Part:
        """The part with its shared composites as the parts that they are, and composites that no
        region took unfolded.
        """
        if all(is_final(equation) for equation in part.trace.equations):
            return part
        walk = _Walk(self, frozenset(), TraceBuilder(part.trace.name), {}, part.notes)
        arguments = walk.builder.take(part.trace.input_types)
        outputs = walk.expand(part.trace, arguments, shared, written)
        return Part(walk.builder.build(outputs), walk.notes)

    def part_of(self, equation: Equation, body: Trace, written: Written) -> Part:
        """The body of a shared composite, or of a call that brings its own executors, as a part."""
        key = body, (own := own_executors(equation)), written
        if key not in self.parts:
            claiming = self if own is None else self.with_executors(own)
            self.parts[key] = claiming.part(body, written)
        return self.parts[key]

    def with_executors(self, executors: tuple[Executor, ...]) -> _Claiming:
        """Claim with other executors."""
        self.know(executors)
        inner = _Claiming(executors, self.below_autograd)
        inner.claims, inner.log, inner.by_name = self.claims, self.log, self.by_name
        return inner

    def ask(
        self, equation: Equation, busy: frozenset[object], depth: int, *, fuse: bool
    ) -> tuple[Executor, Answer]:
        """The first executor that does not refuse, and its answer; a refusal if all do."""
        refusals: list[tuple[str, str]] = []
        for executor in self.executors:
            answer = self.answered(executor, equation)
            if isinstance(answer, Instead) and answer.rule in busy:
                answer = Refused(IN_ITSELF)
            if isinstance(answer, Fuse) and not fuse:
                answer = Refused(TOO_SMALL)
            if not isinstance(answer, Refused):
                self.note(equation, executor.name, how(answer), refusals, depth)
                return executor, answer
            refusals.append((executor.name, answer.reason))
        self.note(equation, None if lowered(equation) is not None else "torch", "", refusals, depth)
        return TORCH, NOT_REGISTERED

    def answered(self, executor: Executor, equation: Equation) -> Answer:
        """Ask an executor about an equation.

        Raises:
            ExecutorError: it is no answer.
        """
        answer: object = executor.answer(equation)
        if isinstance(answer, (Run, Instead, Fuse, Refused)):
            return answer
        what = f"the executor {executor.name}: `answer` must return a Run, an Instead, a Fuse or"
        what += f" a Refused, given {kind_of(answer)}"
        raise ExecutorError(what, source=equation.source)

    def note(
        self,
        equation: Equation,
        taken_by: str | None,
        how: str,
        refusals: list[tuple[str, str]],
        depth: int,
    ) -> None:
        if not self.executors:
            return
        source = str(equation.source) if equation.source else ""
        decision = Decision(equation.op.name, depth, source, taken_by, how, tuple(refusals))
        self.log[decision] = self.log.get(decision, 0) + 1

    def give_up(self, equations: Sequence[Equation], fusion: FusionExecutor, reason: str) -> None:
        """Correct the log: these equations are not in a region after all."""
        taken: dict[tuple[str, str], list[Decision]] = {}
        for decision in self.log:
            if decision.taken_by == fusion.name:
                taken.setdefault((decision.op, decision.place), []).append(decision)
        for equation in equations:
            place = equation.source.place if equation.source else ""
            decision = next(
                (one for one in taken.get((equation.op.name, place), ()) if self.log[one]), None
            )
            if decision is not None:
                refusals = (*decision.refusals, (fusion.name, reason))
                given_up = replace(decision, taken_by="torch", how="", refusals=refusals)
                self.log[decision] -= 1
                self.log[given_up] = self.log.get(given_up, 0) + 1

    def named(self, trace: Trace) -> Trace:
        """Regions numbered in the order in which they first run; equal ones have one name."""
        known: dict[tuple[str, Trace], tuple[Op, Trace]] = {}
        counts = Counter[str]()
        equations: list[Equation] = []
        for equation in trace.equations:
            owner, _, kind = equation.op.name.partition("::")
            if kind == REGION and ops.is_operator(equation.op):
                key = (owner, equation.body)
                if key not in known:
                    name = f"{owner}_fusion_{counts[owner]}"
                    op, body = known[key] = (
                        ops.composite(f"{owner}::{name}"),
                        equation.body.renamed(name),
                    )
                    self.claims[op] = Claim(self.by_name[owner], name, None, body)
                    counts[owner] += 1
                op, body = known[key]
                equation = replace(equation, op=op, bodies=(body,))
            equations.append(equation)
        return replace(trace, equations=tuple(equations))


class _Walk:
    """Copies a trace, composites unfolded, as the executors say."""

    def __init__(
        self,
        claiming: _Claiming,
        shared: frozenset[Trace],
        builder: TraceBuilder,
        notes: dict[int, tuple[Note, ...]],
        known: dict[int, tuple[Note, ...]] | None = None,
    ) -> None:
        self.claiming, self.shared, self.builder, self.notes = claiming, shared, builder, notes
        self.known = known or {}

    def say(self, *notes: Note) -> None:
        position = len(self.builder.equations)
        if notes:
            self.notes[position] = (*self.notes.get(position, ()), *notes)

    def run(
        self,
        trace: Trace,
        inputs: tuple[Atom, ...],
        depth: int = 0,
        call: Source | None = None,
        busy: frozenset[object] = frozenset(),
        *,
        fuse: bool = True,
    ) -> tuple[Atom, ...]:
        step = partial(self.equation, depth, call, busy, fuse)
        if not self.claiming.fusions:
            trace = with_lists(trace, self.claiming.is_unclaimed)
        return walk(self.builder, trace, inputs, step, call=call)

    def equation(
        self,
        depth: int,
        call: Source | None,
        busy: frozenset[object],
        fuse: bool,
        equation: Equation,
        operands: tuple[Atom, ...],
    ) -> tuple[Atom, ...]:
        equation = with_blocks(equation, self.claiming.fusions)
        executor, answer = self.claiming.ask(equation, busy, depth, fuse=fuse)
        source = equation.source
        at = (
            source
            if source and source.module and source.module != (call.module if call else "")
            else None
        )
        match answer:
            case Run(name, run):
                return self.claimed(equation, operands, executor, name, run)
            case Instead(trace, rule):
                self.say(Note(f"{equation.op.name} as {executor.name} computes it", at, depth))
                return self.run(trace, operands, depth + 1, source, busy | {rule}, fuse=fuse)
            case Fuse():
                return put(self.builder, equation, operands)
            case Refused():
                body = lowered(equation)
                if body is None or body in self.shared or own_executors(equation) is not None:
                    return put(self.builder, equation, operands)
                self.say(Note(called(equation), at, depth))
                whole = None if self.claiming.fusions else whole_linear(equation)
                if whole is not None and all(map(self.claiming.is_unclaimed, body.equations)):
                    return put(self.builder, whole, operands)
                return self.run(body, operands, depth + 1, source, busy, fuse=fuse)

    def claimed(
        self,
        equation: Equation,
        operands: tuple[Atom, ...],
        executor: Executor,
        name: str,
        run: RunFunction,
    ) -> tuple[Atom, ...]:
        bodies = equation.bodies if equation.op.kind == "composite" else (alone(equation),)
        taken = replace(equation, op=ops.composite(f"{executor.name}::{name}"), bodies=bodies)
        results = put(self.builder, taken, operands)
        self.claiming.claims[alone(self.builder.equations[-1])] = Claim(executor, name, run)
        return results

    def expand(
        self, trace: Trace, inputs: tuple[Atom, ...], shared: frozenset[Trace], written: Written
    ) -> tuple[Atom, ...]:
        """Shared composites as the parts that they are; other composites that are left, without
        regions.
        """
        inside, positions = updates(trace, written).inside, itertools.count()

        def step(equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
            position = next(positions)
            self.say(*self.known.get(position, ()))
            body = None if is_final(equation) else lowered(equation)
            if body is None:
                return put(self.builder, equation, operands)
            source = equation.source if equation.source and equation.source.module else None
            self.say(Note(called(equation), source, 0))
            if body in shared or own_executors(equation) is not None:
                part = self.claiming.part_of(equation, body, inside.get(position, ()))
                return self.inlined(part, operands, equation.source)
            return self.run(body, operands, 1, equation.source, fuse=False)

        outputs = walk(self.builder, trace, inputs, step)
        self.say(*self.known.get(len(trace.equations), ()))
        return outputs

    def inlined(
        self, part: Part, operands: tuple[Atom, ...], call: Source | None
    ) -> tuple[Atom, ...]:
        start = len(self.builder.equations)
        for position, found in part.notes.items():
            known = self.notes.get(start + position, ())
            self.notes[start + position] = (*known, *(note.inside(call) for note in found))
        return inline_into(self.builder, part.trace, operands, call)
