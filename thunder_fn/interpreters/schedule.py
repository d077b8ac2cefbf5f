"""When collectives are sent and awaited: overlap, and a limit on how many gathers are in flight.

A gather is two equations, one that sends and one that waits. A trace says nothing about time, so both may move: a gather is sent
as soon as fewer than so many are in flight, each wait comes right before the first equation that reads its result, and everything
else stays in its order. All ranks schedule one trace in one way, so collectives meet.

Source: PyTorch FSDP, section 3.3 (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from thunder_fn import ops
from thunder_fn.interpreters.ranks import GATHER, WAIT, is_collective
from thunder_fn.interpreters.simplify import inline_into
from thunder_fn.trace import Atom, Equation, Trace, TraceBuilder, Var


def overlapped(trace: Trace, in_flight: int) -> Trace:
    """The trace with gathers sent early and awaited late.

    Law: it computes what the trace computes, by the same equations; no more than `in_flight` gathers are sent and not yet
    awaited, unless results of the trace's own order need them at once.

    Args:
        trace: closed and checked. Composites that hold collectives are unfolded.
        in_flight: at least 1; with 2, one block's parameters travel while another's are waited for or computed with.
    """
    flat = unfolded(trace)
    return reordered(flat, tuple(_Schedule(flat, in_flight).order()))


def unfolded(trace: Trace) -> Trace:
    """The trace without composites that hold collectives."""
    while any(_holds(equation) for equation in trace.equations):
        builder = TraceBuilder(trace.name)
        env: dict[int, Atom] = {var.index: builder.input(var.type) for var in trace.inputs}
        for constant in trace.constants:
            env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
        for equation in trace.equations:
            if _holds(equation):
                operands = tuple(env[var.index] for var in equation.operands)
                results = inline_into(builder, equation.body, operands, equation.source)
            else:
                results = builder.copy(equation, lambda var: env[var.index])
            env.update((var.index, atom) for var, atom in zip(equation.outputs, results, strict=True))
        trace = builder.build(tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs))
    return trace


def _holds(equation: Equation) -> bool:
    return equation.op.kind == "composite" and not ops.is_operator(equation.op) and is_collective(equation)


class _Schedule:
    """Positions of a trace's equations in a new order."""

    def __init__(self, trace: Trace, in_flight: int) -> None:
        self.equations, self.in_flight = trace.equations, in_flight
        made = {var.index: at for at, equation in enumerate(trace.equations) for var in equation.outputs}
        self.needs = [
            sorted({made[var.index] for var in equation.operands if var.index in made}) for equation in trace.equations
        ]
        self.gathers = [at for at, equation in enumerate(trace.equations) if equation.op.name == GATHER]
        self.done: set[int] = set()
        self.sent = self.awaited = 0

    def order(self) -> Iterator[int]:
        yield from self.send()
        for at, equation in enumerate(self.equations):
            if equation.op.name != WAIT:
                yield from self.emit(at)
        for at in range(len(self.equations)):
            yield from self.emit(at)

    def emit(self, at: int) -> Iterator[int]:
        """An equation, after what it needs."""
        if at in self.done:
            return
        for need in self.needs[at]:
            yield from self.emit(need)
        self.done.add(at)
        yield at
        if at in self.gathers:
            self.sent += 1
        if self.is_wait_of_gather(at):
            self.awaited += 1
            yield from self.send()

    def send(self) -> Iterator[int]:
        """The next gathers, while there is room and they need nothing that is still to be waited for."""
        for at in self.gathers:
            if self.sent - self.awaited >= self.in_flight:
                return
            if at not in self.done:
                if not self.is_ready(at):
                    return
                yield from self.emit(at)

    def is_ready(self, at: int) -> bool:
        """What it needs and is not done is neither a collective nor an op that must stay in its place."""
        for need in self.needs[at]:
            equation = self.equations[need]
            if need not in self.done and (
                equation.op.name.startswith(ops.COLLECTIVES)
                or ops.changes_the_world(equation)
                or not self.is_ready(need)
            ):
                return False
        return True

    def is_wait_of_gather(self, at: int) -> bool:
        return self.equations[at].op.name == WAIT and any(need in self.gathers for need in self.needs[at])


def reordered(trace: Trace, order: tuple[int, ...]) -> Trace:
    """The trace with its equations in another order, in which each comes after those that it reads."""
    builder = TraceBuilder(trace.name)
    env: dict[int, Atom] = {var.index: builder.input(var.type) for var in trace.inputs}
    for constant in trace.constants:
        env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
    for at in order:
        equation = trace.equations[at]
        results = builder.copy(equation, lambda var: env[var.index])
        env.update((var.index, atom) for var, atom in zip(equation.outputs, results, strict=True))
    outputs = tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)
    return replace(builder.build(outputs), name=trace.name)
