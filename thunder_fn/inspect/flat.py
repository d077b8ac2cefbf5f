"""A trace with its composites unfolded: the equations in the order in which they run, and where
each one stands.

Values are numbered through all bodies: a composite's results are its body's, so nothing has two
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Op,
    Source,
    Trace,
    TraceBuilder,
    Type,
    Var,
)
from thunder_fn.ir.walking import put, rewritten, walk

Value = int | Literal
"""A value of a flat trace by number, or a literal that a body returns."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An equation of the flat trace.

    `operands` and `outputs` are values. `path` are the positions of the equations around it,
    outermost first, and its own; `within` are the names of those around it. `source` names modules
    as the outermost call knows them.
    """

    equation: Equation
    operands: tuple[Value, ...]
    outputs: tuple[int, ...]
    path: tuple[int, ...]
    within: tuple[Op, ...]
    source: Source | None

    @property
    def module(self) -> str:
        """The path of the module that was running."""
        return self.source.module if self.source is not None else ""


@dataclass(frozen=True, slots=True)
class Flat:
    """A trace, unfolded. `roots` are the values of its inputs and constants, `types` those of
    all values.
    """

    trace: Trace
    leaves: tuple[Leaf, ...]
    roots: tuple[int, ...]
    outputs: tuple[Value, ...]
    types: tuple[Type, ...]
    constants: dict[int, torch.Tensor]
    """The values that closed-over tensors are, those of bodies among them."""
    calls: dict[Trace, tuple[Value, ...]]
    """The operands of the first call of each body that was unfolded."""


def held(flat: Flat) -> dict[int, int]:
    """The value of each closed-over tensor, by the tensor's identity."""
    return {id(tensor): value for value, tensor in flat.constants.items()}


def unfolded(equation: Equation) -> Trace | None:
    """The trace for which an equation stands, over its operands; None for one that runs as it
    is.
    """
    return lowered(equation)


def only_leaves(trace: Trace) -> Trace:
    """Return the trace with what its equations stand for in their place.

    Law: its equations are the leaves of `flatten(trace)`, in their order.
    """
    return rewritten(trace, _put_leaves)


def _put_leaves(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
) -> Sequence[Atom]:
    body = unfolded(equation)
    if body is None:
        return put(builder, equation, operands)
    step = partial(_put_leaves, builder)
    return walk(builder, body, operands, step, call=equation.source)


def flatten(trace: Trace) -> Flat:
    """Unfold a trace.

    Law: its leaves, run in order, compute what `evaluate(trace)` does.
    """
    return _Flattening().flat(trace)


class _Flattening:
    """One unfolding: the leaves and types so far."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.types: list[Type] = []
        self.held: dict[int, int] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self.calls: dict[Trace, tuple[Value, ...]] = {}

    def flat(self, trace: Trace) -> Flat:
        inputs = tuple(self.fresh(var.type) for var in trace.inputs)
        env = self.bound(trace, inputs)
        roots = (*inputs, *(_number(env[constant.var.index]) for constant in trace.constants))
        self.walk(trace, env, (), (), None)
        outputs = tuple(
            env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs
        )
        return Flat(
            trace, tuple(self.leaves), roots, outputs, tuple(self.types), self.constants, self.calls
        )

    def fresh(self, type: Type) -> int:
        self.types.append(type)
        return len(self.types) - 1

    def bound(self, trace: Trace, inputs: Sequence[Value]) -> list[Value]:
        """Bind the inputs and constants of a body; the list grows as its equations bind
        variables.
        """
        env = list(inputs)
        for constant in trace.constants:
            known = self.held.get(id(constant.tensor))
            if known is None:
                known = self.held[id(constant.tensor)] = self.fresh(constant.var.type)
                self.constants[known] = constant.tensor
            env.append(known)
        return env

    def walk(
        self,
        trace: Trace,
        env: list[Value],
        path: tuple[int, ...],
        within: tuple[Op, ...],
        call: Source | None,
    ) -> None:
        for position, equation in enumerate(trace.equations):
            operands = tuple(env[var.index] for var in equation.operands)
            source = equation.source.called_from(call) if equation.source else call
            body = unfolded(equation)
            if body is None:
                outputs = tuple(self.fresh(var.type) for var in equation.outputs)
                self.leaves.append(
                    Leaf(equation, operands, outputs, (*path, position), within, source)
                )
                env.extend(outputs)
            else:
                self.calls.setdefault(body, operands)
                inner = self.bound(body, operands)
                self.walk(body, inner, (*path, position), (*within, equation.op), source)
                env.extend(
                    inner[atom.index] if isinstance(atom, Var) else atom for atom in body.outputs
                )


def _number(value: Value) -> int:
    assert isinstance(value, int), "constants are values"
    return value
