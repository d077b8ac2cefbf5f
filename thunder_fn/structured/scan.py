"""scan: a loop of known length whose steps hand on a carry, read a slice of xs and give a slice of
ys.

    carry..., ys... = scan(consts..., carry..., xs...)    body: consts, carry, x -> carry, y

Inside, xs and ys are stacked along dim 0. The signature is torch's, the semantics are in JAX.

Every rule asks the same question first, which carries are active, batched or used, and answers it
with `carry_fixpoint`. Reverse mode, which decides memory, is in `scan_vjp.py`; the functions for
users are in `loops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from thunder_fn.capture import current
from thunder_fn.errors import InvalidTrace, TraceTypeError
from thunder_fn.interpreters.check_errors import CHECK_ERRORS, Checked, carrying_code
from thunder_fn.interpreters.grad import zeros
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.interpreters.vmap import (
    batch,
    batched_outputs,
    batched_types,
    expand_missing,
    move_dim,
)
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.pairs import COUNTS
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, INVARIANT, LOWER, SLICED, VJP, VMAP, Mask
from thunder_fn.ir.trace import Atom, Dim, Equation, Trace, TraceBuilder, Type, Var, as_dim
from thunder_fn.structured.roll import in_blocks
from thunder_fn.structured.scan_vjp import scan_vjp_rule
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import reduced, tensor_type
from thunder_fn.structured.shared.fixpoint import carry_fixpoint
from thunder_fn.structured.shared.running import body_function
from thunder_fn.structured.shared.scan_parts import SCAN, Loop, add_scan, slice_of, stacked

# ---- check ----


@CHECK.rule("scan")
def scan_check_rule(equation: Equation) -> None:
    """Check that the body takes consts, carry and slices of xs, and gives the carry's types and
    slices of ys.
    """
    loop = Loop.of(equation)
    numbers = (loop.num_consts, loop.num_carry, loop.length)
    if any(isinstance(number, int) and number < 0 for number in numbers):
        raise InvalidTrace(
            f"scan: its numbers are not negative, given {loop}", source=equation.source
        )
    consts, carry, xs = loop.parts(equation.operands)
    for var in xs:
        if tensor_type(var.type).shape[:1] != (loop.length,):
            what = f"scan: {var} is {var.type}, but the loop has {loop.length} steps"
            raise TraceTypeError(what, source=equation.source)
    slices = (Var(var.index, slice_of(var.type)) for var in xs)
    check_operands(equation, (*consts, *carry, *slices), equation.body)
    own_carry, ys = loop.results(equation.body.output_types)
    check_types(
        equation, (*own_carry, *(stacked(type, loop.length) for type in ys)), "the body gives"
    )
    check_types(
        equation,
        (*(var.type for var in carry), *equation.output_types[loop.num_carry :]),
        "the carry is",
    )


# ---- evaluate ----


@EVALUATE.rule("scan")
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
    return (
        *carry,
        *(_stack(column, type, reverse) for column, type in zip(columns, own_ys, strict=True)),
    )


def _stack(column: list[Any], type: Type, reverse: bool) -> Any:
    if column:
        return torch.stack(column[::-1] if reverse else column)
    empty = stacked(type, 0)
    return torch.empty(cast("tuple[int, ...]", empty.shape), dtype=empty.dtype, device=empty.device)


@INVARIANT.rule("scan")
def scan_constants_rule(equation: Equation) -> Mask:
    """The first operands."""
    return tuple(i < Loop.of(equation).num_consts for i in range(len(equation.operands)))


@SLICED.rule("scan")
def scan_slices_rule(equation: Equation) -> Mask:
    """The last operands."""
    loop = Loop.of(equation)
    return tuple(i >= loop.num_consts + loop.num_carry for i in range(len(equation.operands)))


# ---- vmap ----


@VMAP.rule("scan")
def scan_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """A scan of the batched body. A carry that becomes batched on the way starts expanded."""
    # Before: xs and ys are stacked along dim 0, which is also the batch dim of batched operands
    # After:  the loop is dim 0 and the batch dim 1 of batched xs and ys, so that a slice has the
    #         batch dim first, as the batched body takes it
    loop, body = Loop.of(equation), equation.body
    consts, given, xs = loop.parts(batched)
    carry = carry_fixpoint(
        lambda mask: batch(body, (*consts, *mask, *xs), size, randomness)[1][: loop.num_carry],
        given,
    )
    new, flags = batch(body, (*consts, *carry, *xs), size, randomness)
    builder = TraceBuilder("vmap_scan")
    types = equation.operand_types
    operands = builder.take(batched_types(types, batched, size))
    own_consts, own_carry, own_xs = loop.parts(operands)
    parts = (
        own_consts,
        expand_missing(builder, own_carry, given, carry, size),
        tuple(
            move_dim(builder, var, 0, 1) if flag else var
            for var, flag in zip(own_xs, xs, strict=True)
        ),
    )
    results = add_scan(
        builder, loop, batched_outputs(new, flags, carry, size), parts, equation.source
    )
    final, ys = loop.results(results)
    ys_flags = flags[loop.num_carry :]
    moved = tuple(
        move_dim(builder, y, 1, 0) if flag else y for y, flag in zip(ys, ys_flags, strict=True)
    )
    return builder.build((*final, *moved)), (*carry, *ys_flags)


# ---- check_errors ----


@CHECK_ERRORS.rule("scan")
def scan_check_errors_rule(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    checked: Callable[[Trace], Trace],
) -> Checked:
    """Carry the first code behind the carries."""
    loop = Loop.of(equation)
    consts, carry, xs = loop.parts(operands)
    body, count = checked(equation.body), loop.num_carry
    start = zeros(builder, tensor_type(body.output_types[-1]))
    new = carrying_code(body, loop.num_consts + count, count)
    results = add_scan(builder, loop, new, (consts, (*carry, start), xs), equation.source)
    return (*results[:count], *results[count + 1 :]), results[count]


# ---- simplify ----


@DCE.rule("scan")
def scan_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop ys, xs and consts that are not needed, and carries that no needed thing ever reads."""
    # A wanted result needs its carry; a step needs the carries that it reads for what is live:
    # `live` is the least set that is closed under both.
    loop = Loop.of(equation)
    wanted_carry, wanted_ys = loop.results(wanted)

    def step(live: Mask) -> Mask:
        return loop.parts(dce_to(equation.body, (*live, *wanted_ys))[1])[1]

    live = carry_fixpoint(step, wanted_carry)
    body, reads = dce_to(equation.body, (*live, *wanted_ys))
    consts, _, xs = loop.parts(reads)
    kept = (*consts, *live, *xs)
    counts = {"num_consts": sum(consts), "num_carry": sum(live)}
    return reduced(equation, (body,), kept, (*live, *wanted_ys), **counts)


# ---- lower ----


@LOWER.rule("scan")
def scan_lower_rule(equation: Equation) -> Trace | None:
    """Lower a scan with `unroll` to a shorter scan of so many steps at once."""
    loop = Loop.of(equation)
    return in_blocks(equation) if loop.unroll > 1 and loop.length else None


VJP.enter(scan_vjp_rule, "scan")


@wiring("scan")
def scan_wiring(equation: Equation) -> Wiring:
    """Wire a carry from each step to the next, and to the result where there are no steps."""
    loop = Loop.of(equation)
    first, carries = loop.num_consts, range(loop.num_carry)
    return Wiring(
        (
            *body_ports(equation, 0),
            *((("out", 0, i), ("in", 0, first + i)) for i in carries),
            *((("operand", first + i), ("result", i)) for i in carries),
        )
    )


@COUNTS.rule("scan")
def scan_counts_rule(equation: Equation, sizes: Sequence[int]) -> dict[str, int]:
    """Count the atoms of the consts and of the carry."""
    consts, carry, _ = Loop.of(equation).parts(sizes)
    return {"num_consts": sum(consts), "num_carry": sum(carry)}
