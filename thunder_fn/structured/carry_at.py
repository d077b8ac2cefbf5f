"""carry_at: the carry of a loop after a number of steps, what the backward of an unbounded
while_loop asks for.

    carry... = carry_at(index, consts..., carry...)      body: consts, carry -> carry

With an index for each example (a vector as long as the first dim of every carry), each gets its own
carry.

While a while_loop runs, the carries that were computed for it are kept in a buffer that grows as
needed. A backward, which asks for the last step first, so takes time and memory in proportion to
the number of steps, and one more forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.capture import current
from thunder_fn.errors import TraceTypeError
from thunder_fn.interpreters.grad import forward_backward, full
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.interpreters.vmap import batch, batched_outputs, batched_types, expand_missing
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.pairs import COUNTS
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, VJP, VMAP, Mask, Split
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Literal,
    Op,
    Source,
    Trace,
    TraceBuilder,
    Type,
    Var,
    type_of,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.cond import where
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import reduced, tensor_type
from thunder_fn.structured.shared.fixpoint import carry_fixpoint
from thunder_fn.structured.shared.running import BodyFunction, body_function
from thunder_fn.structured.shared.while_parts import BOOL, COUNT, While, add_while

aten = torch.ops.aten
CARRY_AT = Op("structured", "carry_at")


def add_carry_at(
    builder: TraceBuilder,
    body: Trace,
    index: Atom,
    consts: Sequence[Atom],
    carry: Sequence[Atom],
    source: Source | None,
) -> tuple[Var, ...]:
    """Append the carry after `index` steps of the body."""
    kwargs = (("num_consts", Literal(len(consts))),)
    args = (index, *consts, *carry)
    return builder.add(
        CARRY_AT, args, body.output_types, kwargs=kwargs, bodies=(body,), source=source
    )


# ---- check ----


@CHECK.rule("carry_at")
def carry_at_check_rule(equation: Equation) -> None:
    """Check that the body takes consts and carry and gives the carry's types, and that the index is
    an int64, or one for each example.
    """
    index, *operands = equation.operands
    check_operands(equation, tuple(operands), equation.body)
    check_types(equation, equation.body.output_types, "the body gives")
    _, carry = While.of(equation).parts(operands)
    check_types(equation, tuple(var.type for var in carry), "the carry is")
    type = tensor_type(index.type)
    fits = all(tensor_type(var.type).shape[: len(type.shape)] == type.shape for var in carry)
    if type.dtype != torch.int64 or len(type.shape) > 1 or not fits:
        what = f"carry_at: the index is {type}, not an int64 or one for each example"
        raise TraceTypeError(what, source=equation.source)


# ---- evaluate ----


class History:
    """The carries of a loop on some operands, as far as they were asked for."""

    def __init__(self, operands: Sequence[Any], num_consts: int) -> None:
        self.operands = tuple(operands)
        self.consts = self.operands[:num_consts]
        self.carries = [self.operands[num_consts:]]

    def is_of(self, operands: Sequence[Any]) -> bool:
        """Test for the very operands."""
        pairs = zip(self.operands, operands, strict=False)
        return len(self.operands) == len(operands) and all(mine is other for mine, other in pairs)

    def at(self, index: int, run: BodyFunction) -> tuple[Any, ...]:
        """Return the carry after `index` steps."""
        while len(self.carries) <= index:
            self.carries.append(tuple(run(*self.consts, *self.carries[-1])))
        return self.carries[max(index, 0)]

    def forget_after(self, index: int) -> None:
        """Forget later carries: a backward asks for earlier ones from now on."""
        del self.carries[max(index, 0) + 1 :]


_histories: ContextVar[dict[Trace, History] | None] = ContextVar(
    "thunder_fn_histories", default=None
)


def histories() -> AbstractContextManager[None]:
    """Keep the carries that a loop asks for while it runs."""
    return setting(_histories, {})


@EVALUATE.rule("carry_at")
def carry_at_evaluate_rule(
    bodies: Sequence[Trace], index: Any, *operands: Any, num_consts: int
) -> tuple[Any, ...]:
    """Look the carry up, or run the body from the last one that is known; inside a capture,
    record the equation.
    """
    recorder, (body,) = current(), bodies
    if recorder is not None:
        values, types = (index, *operands), body.output_types
        return bind(recorder, CARRY_AT, values, (body,), types, num_consts=num_consts)
    known = _histories.get()
    history = known.get(body) if known is not None else None
    if history is None or not history.is_of(operands):
        history = History(operands, num_consts)
        if known is not None:
            known[body] = history
    run = body_function(body)
    if not index.ndim:
        found = history.at(int(index), run)
        history.forget_after(int(index))
        return found
    places = index.tolist()
    history.at(max(places, default=0), run)
    rows = [[value[i] for value in history.at(place, run)] for i, place in enumerate(places)]
    return tuple(map(torch.stack, zip(*rows, strict=True)))


# ---- split ----


@VJP.rule("carry_at")
def carry_at_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split the equation like the loop that it is."""
    return forward_backward(as_while(equation), wanted_inputs, wanted_outputs)


def as_while(equation: Equation) -> Trace:
    """The equation as a while_loop that counts its steps."""
    # Before: index, consts, carry -> carry       body: consts, carry -> carry
    # After:  a loop with consts (index, *consts) and carries (count, *carry)
    loop, body = While.of(equation), equation.body
    builder = TraceBuilder("counted")
    index, *operands = builder.take(equation.operand_types)
    consts, carry = loop.parts(operands)
    values = ((index, *consts), (full(builder, COUNT, 0), *carry))
    types = tuple(tuple(type_of(value) for value in part) for part in values)
    condition, inputs = _inputs("steps_left", types)
    last = inputs[0]
    if tensor_type(index.type).shape:
        last = ops.emit(condition, aten.amax.default, (last,), COUNT)
    left = ops.emit(condition, aten.lt.Tensor, (inputs[len(types[0])], last), BOOL)
    step, inputs = _inputs(body.name, types)
    count, own = inputs[len(types[0])], inputs[len(types[0]) + 1 :]
    results = inline_into(step, body, (*inputs[1 : len(types[0])], *own))
    if tensor_type(index.type).shape:
        mask = replace(tensor_type(index.type), dtype=torch.bool)
        goes_on = ops.emit(step, aten.lt.Tensor, (count, inputs[0]), mask)
        results = tuple(
            where(step, goes_on, new, old) for new, old in zip(results, own, strict=True)
        )
    next_count = ops.emit(step, aten.add.Scalar, (count, 1), COUNT)
    bodies = (condition.build((left,)), step.build((next_count, *results)))
    return builder.build(add_while(builder, bodies, *values, None, equation.source)[1:])


def _inputs(name: str, types: tuple[tuple[Type, ...], ...]) -> tuple[TraceBuilder, list[Var]]:
    builder = TraceBuilder(name)
    return builder, list(builder.take(type for part in types for type in part))


# ---- vmap ----


@VMAP.rule("carry_at")
def carry_at_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """The carry of the batched loop; with an index for each example, each takes its own."""
    index_is_batched, *rest = batched
    if index_is_batched and tensor_type(equation.operands[0].type).shape:
        return batch(as_while(equation), batched, size, randomness)
    loop = While.of(equation)
    consts, given = loop.parts(tuple(rest))
    carry = carry_fixpoint(
        lambda mask: batch(equation.body, (*consts, *mask), size, randomness)[1], given
    )
    if index_is_batched:
        carry = (True,) * len(carry)
    body = batched_outputs(*batch(equation.body, (*consts, *carry), size, randomness), carry, size)
    builder = TraceBuilder("vmap_carry_at")
    types = batched_types(equation.operand_types, batched, size)
    index, *operands = builder.take(types)
    own_consts, own_carry = loop.parts(operands)
    start = expand_missing(builder, own_carry, given, carry, size)
    results = add_carry_at(builder, body, index, own_consts, start, equation.source)
    return builder.build(results), carry


# ---- simplify ----


@DCE.rule("carry_at")
def carry_at_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop carries that no wanted carry ever reads, and consts that nothing reads."""
    loop, body = While.of(equation), equation.body
    live = carry_fixpoint(lambda mask: loop.parts(dce_to(body, mask)[1])[1], wanted)
    new, reads = dce_to(body, live)
    consts, _ = loop.parts(reads)
    return reduced(equation, (new,), (True, *consts, *live), live, num_consts=sum(consts))


@wiring("carry_at")
def carry_at_wiring(equation: Equation) -> Wiring:
    """Wire a loop whose number of steps is the first operand."""
    first, carries = 1 + While.of(equation).num_consts, range(len(equation.outputs))
    return Wiring(
        (
            *body_ports(equation, 0, 1),
            *((("out", 0, i), ("in", 0, first - 1 + i)) for i in carries),
            *((("operand", first + i), ("result", i)) for i in carries),
        ),
        (("operand", 0),),
    )


@COUNTS.rule("carry_at")
def carry_at_counts_rule(equation: Equation, sizes: Sequence[int]) -> dict[str, int]:
    """Count the atoms of the consts, which stand behind the number of steps."""
    return {"num_consts": sum(sizes[1 : 1 + While.of(equation).num_consts])}
