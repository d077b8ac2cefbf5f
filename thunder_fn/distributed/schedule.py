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

Source: PyTorch FSDP, section 3.3 (arXiv:2304.11277).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from thunder_fn.distributed.ranks import GATHER, REDUCE, SCATTER, WAIT
from thunder_fn.ir import ops
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


def reordered(trace: Trace, order: tuple[int, ...]) -> Trace:
    """The trace with its equations in another order, in which each comes after those that it
    reads.
    """
    return cut(trace, equations=(trace.equations[at] for at in order))
