"""Units: places where sharded parameters meet, which are made whole together.

A unit is a block of a model or a call of a torch function. Buckets of so many bytes are made of the
parameters of the whole function, in the order of their first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn.distributed.ranks import GATHER
from thunder_fn.distributed.schedule import InFlight, overlapped
from thunder_fn.interpreters.checkpoint.policies import AllBut
from thunder_fn.interpreters.rewriting.filters import ADAPTERS
from thunder_fn.interpreters.rewriting.representation import Representation, Step
from thunder_fn.interpreters.rewriting.rewrite import Rewrite
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    static_shape,
)
from thunder_fn.ir.walking import inline_into, put, walk
from thunder_fn.structured.checkpoint import alone

REGATHER = AllBut(frozenset((GATHER,)))
FUNCTION = ops.composite("function")

Bucket = str | int
"""The content of one collective: the parameters of a "block", those of "each" use, or so many
bytes of any.
"""

Company = tuple[bool, bool]
"""Parameters are made whole together that are adapters or not, and frozen or not: a collective
has gradients for all or none.
"""

Together = Callable[[Any, Sequence[TensorType], Sequence[torch.Tensor]], list[torch.Tensor]]


def then(rewrite: Rewrite, step: Step) -> Rewrite:
    """A rewrite, and then a step on it. If a step makes buckets of bytes, the whole function is the
    unit.

    The function is one composite then, and the step's rule is asked about that.
    """
    in_bytes = isinstance(getattr(step, "bucket", None), int)
    return (replace(rewrite, compute=_called(rewrite.compute)) if in_bytes else rewrite).then(step)


def _called(trace: Trace) -> Trace:
    builder = TraceBuilder(trace.name)
    inputs = builder.take(trace.input_types)
    return builder.build(builder.add(FUNCTION, inputs, trace.output_types, bodies=(trace,)))


def scheduled(compute: Trace, steps: Sequence[Step]) -> Trace:
    """Compute a function on shards, with its collectives where the steps say. With `zero=3` it is
    one checkpoint, whose backward gathers in the order in which it computes.

    Law: as `overlapped`; gradients are those of the trace.
    """
    step: Any = next((step for step in steps if getattr(step, "in_flight", None) is not None), None)
    if step is None:
        return compute
    ahead = overlapped(compute, step.in_flight)
    return (
        alone(ahead, replace(REGATHER, arrange=InFlight(step.in_flight)))
        if step.zero == 3
        else ahead
    )


@dataclass(frozen=True)
class InUnits:
    """The rule: a block of a model, or a torch function outside of blocks, has its parameters
    gathered together.

    With `zero=3` they are gathered again for the backward: the block is a checkpoint that keeps
    everything else, if not the whole function is (`scheduled`).
    """

    step: Any
    together: Together
    company: Company = (False, False)

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Trace | None:
        if equation.op.kind != "composite":
            return None
        if equation.op == FUNCTION and isinstance(self.step.bucket, int):
            return self.in_buckets(equation.body, kept)
        is_unit = ops.is_call(equation.op) or equation.op.name == "fsdp_decode"
        is_unit = is_unit or (self.step.bucket == "block" and is_block(equation))
        if not is_unit:
            return None
        body = self.whole(equation, kept)
        return (
            alone(body, REGATHER) if self.step.zero == 3 and self.step.in_flight is None else body
        )

    def whole(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Trace:
        """The equation on shards: its parameters are made whole, then it runs."""
        builder = TraceBuilder(equation.body.name)
        given = _given(builder, equation.operands, kept)
        inside = equation.source and equation.source.within(equation.source.module)
        for positions in _companies(kept):
            self.decode(builder, given, kept, positions, inside)
        return builder.build(inline_into(builder, equation.body, tuple(given), inside))

    def in_buckets(self, body: Trace, kept: tuple[Representation | None, ...]) -> Trace:
        """A function on shards: a bucket is made whole before the first equation that reads a
        parameter in it.
        """
        builder = TraceBuilder(body.name)
        given = _given(builder, body.inputs, kept)
        left = _buckets(body, kept, self.step.bucket)

        def read(atom: Atom, value: Atom) -> Atom:
            """The value of a variable; an input may have been made whole by now."""
            if isinstance(atom, Var) and atom.index < len(given):
                return given[atom.index]
            return value

        def ready(operands: Sequence[Var], source: Source | None) -> None:
            read_here = {var.index for var in operands}
            for positions in [positions for positions in left if read_here & set(positions)]:
                left.remove(positions)
                self.decode(builder, given, kept, positions, source)

        def step(equation: Equation, operands: tuple[Atom, ...]) -> tuple[Var, ...]:
            ready(equation.operands, equation.source)
            return put(builder, equation, list(map(read, equation.operands, operands)))

        outputs = walk(builder, body, tuple(given), step)
        ready([atom for atom in body.outputs if isinstance(atom, Var)], None)
        return builder.build(tuple(map(read, body.outputs, outputs)))

    def decode(
        self,
        builder: TraceBuilder,
        given: list[Atom],
        kept: tuple[Representation | None, ...],
        positions: list[int],
        source: Source | None,
    ) -> None:
        """Parameters, made whole together, in their places."""
        atoms = tuple(given[position] for position in positions)
        types = tuple(one.type for position in positions if (one := kept[position]) is not None)
        parts = tuple(
            one.part_types[0] for position in positions if (one := kept[position]) is not None
        )
        body = _joined(self, types, tuple(part for part in parts if isinstance(part, TensorType)))
        op = ops.composite(f"{type(self.step).__name__.lower()}_decode")
        whole = builder.add(op, atoms, body.output_types, bodies=(body,), source=source)
        for position, value in zip(positions, whole, strict=True):
            given[position] = value


def _given(
    builder: TraceBuilder, operands: Sequence[Var], kept: Sequence[Representation | None]
) -> list[Atom]:
    """The inputs of a trace on shards."""
    pairs = zip(operands, kept, strict=True)
    return [builder.input(one.part_types[0] if one is not None else var.type) for var, one in pairs]


def _companies(kept: Sequence[Representation | None]) -> list[list[int]]:
    """The positions of shards, those together that are of one dtype and in one company."""
    meeting: dict[tuple[torch.dtype, Company], list[int]] = {}
    for position, one in enumerate(kept):
        if one is not None:
            assert isinstance(one.rule, InUnits), "parameters are shared over ranks once"
            meeting.setdefault((one.type.dtype, one.rule.company), []).append(position)
    return list(meeting.values())


def _buckets(
    body: Trace, kept: Sequence[Representation | None], most_bytes: int
) -> list[list[int]]:
    """The positions of shards that go together, in the order of first use, until whole they have
    more than so many bytes. Parameters that nothing reads stay where they are, and have no
    gradient.
    """
    first: dict[int, int] = {}
    for at, equation in enumerate(body.equations):
        for var in equation.operands:
            first.setdefault(var.index, at)
    for atom in body.outputs:
        if isinstance(atom, Var):
            first.setdefault(atom.index, len(body.equations))
    found: list[list[int]] = []
    for positions in _companies(kept):
        bucket, held = list[int](), 0
        for position in sorted(
            (position for position in positions if position in first), key=first.__getitem__
        ):
            one = kept[position]
            assert one is not None, "it is a shard"
            size = math.prod(static_shape(one.type)) * one.type.dtype.itemsize
            if bucket and held + size > most_bytes:
                found.append(bucket)
                bucket, held = [], 0
            bucket, held = [*bucket, position], held + size
        found += [bucket] if bucket else []
    return found


@memo(4096)
def _joined(rule: InUnits, types: tuple[TensorType, ...], parts: tuple[TensorType, ...]) -> Trace:
    return traced(lambda *shards: tuple(rule.together(rule.step, types, shards)), *parts)


def is_block(equation: Equation) -> bool:
    """Test for a module in a list of modules, such as `layers.3`."""
    path = equation.source.module if equation.source else ""
    return path.rpartition(".")[2].isdigit()


def company_of(name: str, frozen: frozenset[str]) -> Company:
    """The company of a parameter in a bucket: adapters travel with adapters, trained parameters
    with trained ones.
    """
    return name.endswith(ADAPTERS), name in frozen
