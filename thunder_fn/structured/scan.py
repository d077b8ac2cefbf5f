"""scan: a loop of known length whose steps hand on a carry, read a slice of xs and give a slice of ys.

    carry..., ys... = scan(consts..., carry..., xs...)    body: consts, carry, x -> carry, y

Inside, xs and ys are stacked along dim 0. The signature is torch's, the semantics are in JAX.

Every rule asks the same question first, which carries are active, batched or used, and answers it with
`carry_fixpoint`. The split, which decides memory, is in `scan_split.py`; the functions for users are in `loops.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from thunder_fn.capture import current
from thunder_fn.check import check_operands, check_types
from thunder_fn.errors import InvalidTrace, TraceTypeError, located
from thunder_fn.interpreters.jvp import push_forward
from thunder_fn.interpreters.simplify import dce_to, inline_into
from thunder_fn.interpreters.vjp import zeros
from thunder_fn.interpreters.vmap import batch, batched_type, move_dim
from thunder_fn.rules import JvpRule, Mask, StructuredOp, register
from thunder_fn.structured.bind import bind
from thunder_fn.structured.bodies import body_activity, tensor_type, without_inputs
from thunder_fn.structured.cond import expand
from thunder_fn.structured.fixpoint import carry_fixpoint
from thunder_fn.structured.loop import SCAN, Loop, Parts, active_carry, add_scan, slice_of, stacked
from thunder_fn.structured.roll import in_blocks
from thunder_fn.structured.running import body_function
from thunder_fn.structured.scan_split import scan_split_rule
from thunder_fn.trace import Atom, Dim, Equation, Literal, Trace, TraceBuilder, Type, Var, as_dim

# ---- check ----


def scan_check_rule(equation: Equation) -> None:
    """The body takes consts, carry and slices of xs, and gives the carry's types and slices of ys."""
    loop = Loop.of(equation)
    numbers = (loop.num_consts, loop.num_carry, loop.length)
    if any(isinstance(number, int) and number < 0 for number in numbers):
        raise InvalidTrace(located(f"scan: its numbers are not negative, given {loop}", source=equation.source))
    consts, carry, xs = loop.parts(equation.operands)
    for var in xs:
        if tensor_type(var.type).shape[:1] != (loop.length,):
            what = f"scan: {var} is {var.type}, but the loop has {loop.length} steps"
            raise TraceTypeError(located(what, source=equation.source))
    slices = (Var(var.index, slice_of(var.type)) for var in xs)
    check_operands(equation, (*consts, *carry, *slices), equation.body)
    own_carry, ys = loop.results(equation.body.output_types)
    check_types(equation, (*own_carry, *(stacked(type, loop.length) for type in ys)), "the body gives")
    check_types(
        equation,
        (*(var.type for var in carry), *(var.type for var in equation.outputs[loop.num_carry :])),
        "the carry is",
    )


# ---- evaluate ----


def scan_evaluate_rule(
    bodies: Sequence[Trace],
    *args: Any,
    num_consts: int,
    num_carry: int,
    length: Any,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, ...]:
    """Run the body step by step; inside a capture, record the loop."""
    loop, (body,) = Loop(num_consts, num_carry, as_dim(length), reverse, unroll), bodies
    recorder = current()
    own_carry, own_ys = loop.results(body.output_types)
    if recorder is not None:
        types = (*own_carry, *(stacked(type, loop.length) for type in own_ys))
        return bind(recorder, SCAN, args, (body,), types, **loop.literals())
    consts, carry, xs = loop.parts(args)
    slices, run = [x.unbind(0) for x in xs], body_function(body)
    columns: list[list[Any]] = [[] for _ in own_ys]
    for step in reversed(range(length)) if reverse else range(length):
        outputs = run(*consts, *carry, *[slice[step] for slice in slices])
        carry, ys = loop.results(outputs)
        for column, y in zip(columns, ys, strict=True):
            column.append(y)
    return (*carry, *(_stack(column, type, reverse) for column, type in zip(columns, own_ys, strict=True)))


def _stack(column: list[Any], type: Type, reverse: bool) -> Any:
    if column:
        return torch.stack(column[::-1] if reverse else column)
    empty = stacked(type, 0)
    return torch.empty(cast("tuple[int, ...]", empty.shape), dtype=empty.dtype, device=empty.device)


def scan_constants_rule(equation: Equation) -> Mask:
    """The first operands."""
    return tuple(i < Loop.of(equation).num_consts for i in range(len(equation.operands)))


def scan_slices_rule(equation: Equation) -> Mask:
    """The last operands."""
    loop = Loop.of(equation)
    return tuple(i >= loop.num_consts + loop.num_carry for i in range(len(equation.operands)))


# ---- jvp ----


def scan_activity_rule(equation: Equation, active: Mask) -> Mask:
    """Active carries stay active; ys are as the body makes them then."""
    loop = Loop.of(equation)
    consts, _, xs = loop.parts(active)
    carry = active_carry(loop, equation.body, active)
    return (*carry, *body_activity(equation.body, (*consts, *carry, *xs))[loop.num_carry :])


def scan_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """A scan of the body's jvp; a carry that becomes active on the way starts with a tangent of zeros."""
    loop, body = Loop.of(equation), equation.body
    consts, _, xs = loop.parts(active)
    carry = active_carry(loop, body, active)
    rule = push_forward(body, (*consts, *carry, *xs))
    builder = TraceBuilder("scan_jvp")
    primals = tuple(builder.input(var.type) for var in equation.operands)
    given = {i: builder.input(primals[i].type) for i, flag in enumerate(active) if flag}
    tangents = tuple(
        (given[i] if i in given else zeros(builder, tensor_type(primals[i].type)),) if flag else ()
        for i, flag in enumerate((*consts, *carry, *xs))
    )
    pairs = zip(loop.parts(primals), loop.parts(tangents), strict=True)
    parts = tuple((*own, *(value for found in more for value in found)) for own, more in pairs)
    new, moved = _jvp_body(loop, rule, (consts, carry, xs))
    outputs = add_scan(builder, loop, new, parts, equation.source)  # type: ignore[arg-type]
    first, count = loop.num_carry, loop.num_carry + sum(carry)
    num_ys = len(equation.outputs) - first
    order = (*outputs[:first], *outputs[count : count + num_ys], *outputs[first:count], *outputs[count + num_ys :])
    return JvpRule(builder.build(order), (*carry, *moved))


def _jvp_body(loop: Loop, rule: JvpRule, active: Parts[bool]) -> tuple[Trace, Mask]:
    """The body's jvp as the body of a scan: tangents stand behind their primals, part by part. Also which ys move."""
    builder = TraceBuilder(rule.trace.name)
    num_primals = sum(map(len, active))
    primal_types = loop.parts(rule.trace.input_types[:num_primals])
    primals: list[Atom] = []
    tangents: list[Atom] = []
    for types, flags in zip(primal_types, active, strict=True):
        primals += [builder.input(type) for type in types]
        tangents += [builder.input(type) for type, flag in zip(types, flags, strict=True) if flag]
    results = inline_into(builder, rule.trace, (*primals, *tangents))
    num_outputs = len(rule.active_outputs)
    found = iter(results[num_outputs:])
    by_output = [next(found) if flag else None for flag in rule.active_outputs]
    carry_tangents = tuple(
        zeros(builder, tensor_type(type)) if tangent is None else tangent
        for type, tangent, flag in zip(primal_types[1], by_output[: loop.num_carry], active[1], strict=True)
        if flag
    )
    ys_tangents = tuple(tangent for tangent in by_output[loop.num_carry :] if tangent is not None)
    carry, ys = loop.results(results[:num_outputs])
    return builder.build((*carry, *carry_tangents, *ys, *ys_tangents)), rule.active_outputs[loop.num_carry :]


# ---- vmap ----


def scan_batch_rule(equation: Equation, batched: Mask, size: Dim, randomness: str) -> tuple[Trace, Mask]:
    """A scan of the batched body. A carry that becomes batched on the way starts expanded."""
    loop, body = Loop.of(equation), equation.body
    consts, given, xs = loop.parts(batched)
    carry = carry_fixpoint(
        lambda mask: batch(body, (*consts, *mask, *xs), size, randomness)[1][: loop.num_carry], given
    )
    new, flags = batch(body, (*consts, *carry, *xs), size, randomness)
    builder = TraceBuilder("vmap_scan")
    operands = [
        builder.input(batched_type(var.type, size) if flag else var.type)
        for var, flag in zip(equation.operands, batched, strict=True)
    ]
    own_consts, own_carry, own_xs = loop.parts(operands)
    parts = (
        own_consts,
        tuple(
            expand(builder, var, size) if flag and not had else var
            for var, flag, had in zip(own_carry, carry, given, strict=True)
        ),
        tuple(move_dim(builder, var, 0, 1) if flag else var for var, flag in zip(own_xs, xs, strict=True)),
    )
    results = add_scan(builder, loop, _expanded_carry(loop, new, flags, carry, size), parts, equation.source)
    final, ys = loop.results(results)
    ys_flags = flags[loop.num_carry :]
    moved = tuple(move_dim(builder, y, 1, 0) if flag else y for y, flag in zip(ys, ys_flags, strict=True))
    return builder.build((*final, *moved)), (*carry, *ys_flags)


def _expanded_carry(loop: Loop, body: Trace, own: Mask, carry: Mask, size: Dim) -> Trace:
    """The batched body, every batched carry of which stays so."""
    builder = TraceBuilder(body.name)
    results = inline_into(builder, body, tuple(builder.input(type) for type in body.input_types))
    wanted = (*carry, *own[loop.num_carry :])
    return builder.build(
        tuple(
            expand(builder, value, size) if flag and not had else value
            for value, had, flag in zip(results, own, wanted, strict=True)
        )
    )


# ---- simplify ----


def scan_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop ys, xs and consts that are not needed, and carries that no needed thing ever reads."""
    loop = Loop.of(equation)
    wanted_carry, wanted_ys = loop.results(wanted)

    def step(live: Mask) -> Mask:
        return loop.parts(dce_to(equation.body, (*live, *wanted_ys))[1])[1]

    live = carry_fixpoint(step, wanted_carry)
    body, reads = dce_to(equation.body, (*live, *wanted_ys))
    consts, _, xs = loop.parts(reads)
    kept = (*consts, *live, *xs)
    if body is equation.body and all(kept):
        return equation, equation.operands
    operands = tuple(var for var, flag in zip(equation.operands, kept, strict=True) if flag)
    outputs = tuple(var for var, flag in zip(equation.outputs, (*live, *wanted_ys), strict=True) if flag)
    new = replace(loop, num_consts=sum(consts), num_carry=sum(live))
    kwargs = tuple((key, Literal(value)) for key, value in new.literals().items())
    return Equation(SCAN, operands, kwargs, outputs, (without_inputs(body, kept),), equation.source), operands


# ---- lower ----


def scan_lower_rule(equation: Equation) -> Trace | None:
    """With `unroll`, a shorter scan of so many steps at once."""
    loop = Loop.of(equation)
    return in_blocks(equation) if loop.unroll > 1 and loop.length else None


register(
    StructuredOp(
        SCAN.name,
        check=scan_check_rule,
        evaluate=scan_evaluate_rule,
        activity=scan_activity_rule,
        jvp=scan_jvp_rule,
        split=scan_split_rule,
        batch=scan_batch_rule,
        dce=scan_dce_rule,
        lower=scan_lower_rule,
        constants=scan_constants_rule,
        slices=scan_slices_rule,
    )
)
