"""The schedule of collectives: overlap, and a limit on the number in flight.

A collective is two equations, one that sends and one that waits. A trace says nothing about time,
so both may move. Gathers are sent in the order in which their results are used. Each goes before
the first wait at which fewer than so many are in flight. A wait comes right before the first
equation that reads it. So does what follows from collectives alone, such as a weight cut out of a
bucket. A reduction is awaited before so many later ones are sent. Everything else stays in its
order. All ranks schedule one trace in one way, so collectives meet.

The backward of a ZeRO-3 block gathers again. If it is scheduled, the whole function is one
checkpoint, whose backward is one body with all gathers in it. Its policy arranges that body by
`InFlight`.

Every program awaits late (`awaited_late`), whether or not it is scheduled. So a backward hides its
reductions, of shards or of whole gradients, behind the blocks that it still has to compute.

Sources: PyTorch FSDP, section 3.3 (arXiv:2304.11277); PyTorch Distributed, section 3.2
(arXiv:2006.15704).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thunder_fn.distributed.ranks import GATHER, REDUCE, SCATTER, WAIT
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import made_at
from thunder_fn.ir.trace import Equation, Trace, cut
from thunder_fn.ir.walking import unfolded


def overlapped(trace: Trace, in_flight: int) -> Trace:
    """The trace with gathers sent early and awaited late.

    Law: it computes what the trace computes, by the same equations; no more than `in_flight`
        gathers, and as many reductions, are sent and not yet awaited, unless one equation reads the
        results of more.

    Args:
        trace: closed and checked. Composites that hold collectives are unfolded.
        in_flight: at least 1. With 2, one block's parameters travel while another's are waited for
            or computed with. Where blocks follow each other, no more than 2 are whole.
    """
    flat = with_collectives_unfolded(trace)
    return reordered(flat, tuple(_Schedule(flat, in_flight).order()))


@dataclass(frozen=True, slots=True)
class InFlight:
    """The arrangement by a checkpoint's policy of a backward's body: `overlapped`, with this
    limit.
    """

    limit: int

    def __call__(self, trace: Trace) -> Trace:
        return overlapped(trace, self.limit)


def with_collectives_unfolded(trace: Trace) -> Trace:
    """The trace without composites that hold collectives."""
    while any(map(_holds, trace.equations)):
        trace = unfolded(trace, _holds)
    return trace


def _holds(equation: Equation) -> bool:
    return (
        equation.op.kind == "composite"
        and not ops.is_operator(equation.op)
        and ops.communicates(equation)
    )


class _Schedule:
    """Positions of a trace's equations in a new order."""

    def __init__(self, trace: Trace, in_flight: int) -> None:
        self.equations, self.in_flight = trace.equations, in_flight
        self.made = made_at(trace.equations)
        self.needs = [
            sorted({self.made[var.index] for var in equation.operands if var.index in self.made})
            for equation in trace.equations
        ]
        self.waits = {
            need: at
            for at, equation in enumerate(trace.equations)
            if equation.op.name == WAIT
            for need in self.needs[at]
        }
        self.sources = self.follow()
        self.gathers = self.by_use()
        self.done: set[int] = set()
        self.gathering, self.reducing = list[int](), list[int]()

    def follow(self) -> dict[int, frozenset[int]]:
        """Find the equations that depend on results of collectives alone, and on which."""
        found: dict[int, frozenset[int]] = {}
        for at, equation in enumerate(self.equations):
            needs = self.needs[at]
            if equation.op.name == WAIT and any(need in self.waits for need in needs):
                found[at] = frozenset(needs)
            elif (
                needs
                and all(self.made.get(var.index) in found for var in equation.operands)
                and not self.stays(at)
            ):
                found[at] = frozenset[int]().union(*(found[need] for need in needs))
        return found

    def stays(self, at: int) -> bool:
        """Test for a collective, or an equation that draws random numbers or has an effect."""
        equation = self.equations[at]
        return ops.is_collective(equation.op) or ops.has_side_effect(equation)

    def by_use(self) -> list[int]:
        """The gathers, in the order in which anything else reads what follows from them."""
        first: dict[int, float] = {}
        for at in range(len(self.equations)):
            if at not in self.sources:
                for need in self.needs[at]:
                    for sent in self.sources.get(need, ()):
                        first.setdefault(sent, at)
        gathers = [at for at, equation in enumerate(self.equations) if equation.op.name == GATHER]
        return sorted(gathers, key=lambda at: (first.get(at, math.inf), at))

    def order(self) -> Iterator[int]:
        yield from self.send()
        for at, equation in enumerate(self.equations):
            if equation.op.name != WAIT and equation.op.name != GATHER and at not in self.sources:
                yield from self.emit(at)
        for at in range(len(self.equations)):
            yield from self.emit(at)

    def emit(self, at: int) -> Iterator[int]:
        """An equation, after its operands."""
        if at in self.done:
            return
        for need in self.needs[at]:
            yield from self.emit(need)
        name = self.equations[at].op.name
        if name == WAIT:
            yield from self.send()
        if name in (REDUCE, SCATTER) and at in self.waits:
            if len(self.reducing) >= self.in_flight:
                yield from self.emit(self.waits[self.reducing[0]])
            self.reducing.append(at)
        if name == GATHER and at in self.waits:
            self.gathering.append(at)
        self.done.add(at)
        yield at
        for sent in self.needs[at] if name == WAIT else ():
            if sent in self.reducing:
                self.reducing.remove(sent)
            if sent in self.gathering:
                self.gathering.remove(sent)

    def send(self) -> Iterator[int]:
        """The next gathers, while there is room and they need nothing that is still to be waited
        for.
        """
        for at in self.gathers:
            if len(self.gathering) >= self.in_flight:
                return
            if at not in self.done:
                if not self.is_ready(at):
                    return
                yield from self.emit(at)

    def is_ready(self, at: int) -> bool:
        """Test that all missing operands may move, and so may their operands."""
        return all(
            need in self.done or (not self.stays(need) and self.is_ready(need))
            for need in self.needs[at]
        )


def awaited_late(trace: Trace, in_flight: int = 2) -> tuple[Trace, tuple[int, ...]]:
    """The trace with reductions sent as soon as their operand is there, and waits where results
    are read. Ops that only move or add up what arrives go with the waits.

    Law: the same values, bitwise, by the same equations; no more reductions of a group travel at a
        time than `in_flight`, or than did before.

    Returns:
        The trace, and the position in the given one of each of its equations.
    """
    if all(equation.op.name != WAIT for equation in trace.equations):
        return trace, tuple(range(len(trace.equations)))
    order = tuple(_Late(trace, in_flight).order())
    return reordered(trace, order), order


class _Late:
    """Equations in order, but for those that are put off (`held`) and reductions that are sent
    early, after the equations in `ready`.
    """

    def __init__(self, trace: Trace, in_flight: int) -> None:
        self.equations, made = trace.equations, made_at(trace.equations)
        self.needs = [
            [made[var.index] for var in equation.operands if var.index in made]
            for equation in trace.equations
        ]
        waits = (at for at, one in enumerate(trace.equations) if one.op.name == WAIT)
        self.waits = {need: at for at in waits for need in self.needs[at]}
        self.held, self.done = dict[int, None](), set[int]()
        self.travelling, self.room = defaultdict[str, list[int]](list), dict[str, int]()
        self.ready = defaultdict[int, list[list[int]]](list)
        effect = -1
        for at, equation in enumerate(trace.equations):
            effect = at if _is_effect(equation) else effect
            if equation.op.name in (REDUCE, SCATTER) and at in self.waits:
                last, chain = self.chain(at, effect)
                if last >= 0 and self.equations[last].op.name != WAIT:
                    self.ready[last].append(chain)
                group = self.group(at)
                sent = [*(one for one in self.travelling[group] if self.waits[one] > at), at]
                self.travelling[group] = sent
                self.room[group] = max(in_flight, self.room.get(group, 0), len(sent))
        self.travelling.clear()

    def group(self, at: int) -> str:
        """The group of ranks of a collective."""
        return str(self.equations[at].args[-1])

    def chain(self, at: int, effect: int) -> tuple[int, list[int]]:
        """The last equation that a reduction has to come after, and what stands between."""
        between, last, left = {at}, effect, [*self.needs[at]]
        while left:
            need = left.pop()
            if is_light(self.equations[need]) and need > effect:
                left += [] if need in between else self.needs[need]
                between.add(need)
            else:
                last = max(last, need)
        return last, sorted(between)

    def order(self) -> Iterator[int]:
        for at, equation in enumerate(self.equations):
            if at in self.done:
                continue
            is_late = is_light(equation) and any(need in self.held for need in self.needs[at])
            if equation.op.name == WAIT or is_late:
                self.held[at] = None
                continue
            yield from self.emit([*self.held] if _is_effect(equation) else [])
            yield from self.emit([at])
            for chain in self.ready.get(at, ()):
                yield from self.emit(chain)
        yield from self.emit([*self.held])

    def emit(self, wanted: Sequence[int]) -> Iterator[int]:
        """Equations that are not done, each after what it needs."""
        left = [*reversed(wanted)]
        while left:
            at = left[-1]
            missing = [need for need in self.needs[at] if need not in self.done]
            left += missing
            if not missing:
                left.pop()
            if not missing and at not in self.done:
                is_sent = self.equations[at].op.name in (REDUCE, SCATTER) and at in self.waits
                yield from self.make_room(at) if is_sent else ()
                self.done.add(at)
                self.held.pop(at, None)
                yield at
                yield from self.follow() if is_sent else ()

    def make_room(self, sent: int) -> Iterator[int]:
        """Before a reduction too many, the waits for the oldest ones."""
        group = self.group(sent)
        before = [at for at in self.travelling[group] if self.waits[at] not in self.done]
        self.travelling[group] = [*before, sent]
        count = max(0, len(before) + 1 - self.room[group])
        yield from self.emit([self.waits[at] for at in before[:count]])

    def follow(self) -> Iterator[int]:
        """After that, what was put off and needs nothing that still is."""
        for at in [*self.held]:
            if self.equations[at].op.name != WAIT and self.done.issuperset(self.needs[at]):
                yield from self.emit([at])


def _is_effect(equation: Equation) -> bool:
    """Test for an effect other than that on other ranks."""
    return ops.is_effectful(equation.op) and not ops.is_collective(equation.op)


def is_light(equation: Equation) -> bool:
    """Test for an op that moves elements, or computes each from those at its place."""
    op = equation.op
    return ops.is_view(op) or ops.is_pointwise(op) or op in facts.MOVES


def reordered(trace: Trace, order: tuple[int, ...]) -> Trace:
    """The trace with its equations in another order, in which each comes after those that it
    reads.
    """
    return cut(trace, equations=(trace.equations[at] for at in order))
