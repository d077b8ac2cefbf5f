"""What the rules of while_loop and carry_at share: literals, parts of operands, and bodies made of a body."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from thunder_fn.interpreters.simplify import inline_into
from thunder_fn.interpreters.vjp import zeros
from thunder_fn.rules import JvpRule, Mask
from thunder_fn.structured.bodies import body_activity, expand, tensor_type
from thunder_fn.structured.fixpoint import carry_fixpoint
from thunder_fn.trace import Atom, Dim, Equation, Literal, Op, Source, TensorType, Trace, TraceBuilder, Type, Var

T = TypeVar("T")
WHILE = Op("structured", "while_loop")
BOOL = TensorType(torch.bool, ())
COUNT = TensorType(torch.int64, ())
"""The type of step counters: they are on the CPU, where a loop's condition costs nothing."""


@dataclass(frozen=True, slots=True)
class While:
    """The literals of a while_loop: how many operands are consts, and after how many steps it ends in any case."""

    num_consts: int
    max_steps: int | None = None

    @staticmethod
    def of(equation: Equation) -> While:
        """The literals of an equation."""
        return While(**{key: arg.value for key, arg in equation.kwargs if isinstance(arg, Literal)})

    def parts(self, operands: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Operands, or what is known of each, as those of the consts and of the carries."""
        return tuple(operands[: self.num_consts]), tuple(operands[self.num_consts :])


def add_while(
    builder: TraceBuilder,
    bodies: tuple[Trace, Trace],
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    max_steps: int | None,
    source: Source | None,
) -> tuple[Var, ...]:
    """Append a while_loop of a condition and a body."""
    kwargs = (("num_consts", Literal(len(consts))), ("max_steps", Literal(max_steps)))
    types = bodies[1].output_types
    return builder.add(WHILE, (*consts, *carry), types, kwargs=kwargs, bodies=bodies, source=source)


def active_carry(loop: While, body: Trace, active: Mask) -> Mask:
    """Which carries are active in some step, if these operands are."""
    consts, carry = loop.parts(active)
    return carry_fixpoint(lambda mask: body_activity(body, (*consts, *mask)), carry)


def operands_with_tangents(
    builder: TraceBuilder, loop: While, primals: Sequence[Var], active: Mask, carry: Mask
) -> tuple[tuple[Atom, ...], tuple[Atom, ...]]:
    """Consts and carries of a loop of jvps: the primals, then new inputs for the tangents of the active operands.

    A carry that becomes active on the way starts with a tangent of zeros.
    """
    given = {i: builder.input(primals[i].type) for i, flag in enumerate(active) if flag}
    consts, own_carry = loop.parts(primals)
    const_tangents = [given[i] for i in range(len(consts)) if i in given]
    carry_tangents = [
        given[i] if i in given else zeros(builder, tensor_type(var.type))
        for i, (var, flag) in enumerate(zip(own_carry, carry, strict=True), len(consts))
        if flag
    ]
    return (*consts, *const_tangents), (*own_carry, *carry_tangents)


def inputs_with_tangents(
    builder: TraceBuilder, types: tuple[tuple[Type, ...], ...], flags: tuple[Mask, ...]
) -> tuple[list[Atom], list[Atom]]:
    """New inputs, tangents behind primals part by part: the primals, and the tangents."""
    primals: list[Atom] = []
    tangents: list[Atom] = []
    for part, active in zip(types, flags, strict=True):
        primals += [builder.input(type) for type in part]
        tangents += [builder.input(type) for type, flag in zip(part, active, strict=True) if flag]
    return primals, tangents


def jvp_body(loop: While, rule: JvpRule, consts: Mask, carry: Mask) -> Trace:
    """The body's jvp as a body: tangents stand behind their primals, among the consts and among the carries."""
    builder = TraceBuilder(rule.trace.name)
    types = loop.parts(rule.trace.input_types[: len(consts) + len(carry)])
    primals, tangents = inputs_with_tangents(builder, types, (consts, carry))
    results = inline_into(builder, rule.trace, (*primals, *tangents))
    found = iter(results[len(carry) :])
    moved = [next(found) if flag else None for flag in rule.active_outputs]
    new = tuple(
        zeros(builder, tensor_type(type)) if tangent is None else tangent
        for type, tangent, flag in zip(types[1], moved, carry, strict=True)
        if flag
    )
    return builder.build((*results[: len(carry)], *new))


def expanded_carry(body: Trace, own: Mask, wanted: Mask, size: Dim) -> Trace:
    """The batched body, every batched carry of which stays so."""
    builder = TraceBuilder(body.name)
    results = inline_into(builder, body, tuple(builder.input(type) for type in body.input_types))
    return builder.build(
        tuple(
            expand(builder, value, size) if flag and not had else value
            for value, had, flag in zip(results, own, wanted, strict=True)
        )
    )
