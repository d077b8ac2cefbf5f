"""Rules of ops that own one body on their operands and keep it through every transform: checkpoint
and call.

    outputs = op(*operands, **options)      one body, on the operands

A transform of such an equation is the same op, with the same options, around the transformed body.
"""

from __future__ import annotations

from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.interpreters.vmap import batch
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.rules import LOWER, Mask
from thunder_fn.ir.trace import Arg, Dim, Equation, Op, Source, Trace, TraceBuilder, Var
from thunder_fn.structured.shared.bodies import reduced


def wrapped(
    op: Op, kwargs: tuple[tuple[str, Arg], ...], *bodies: Trace, source: Source | None = None
) -> Trace:
    """A trace of one equation: the op around bodies, the first of which computes its results."""
    builder, first = TraceBuilder(op.name), bodies[0]
    inputs = builder.take(first.input_types)
    return builder.build(
        builder.add(op, inputs, first.output_types, kwargs=kwargs, bodies=bodies, source=source)
    )


def wrapped_again(equation: Equation, body: Trace) -> Trace:
    """The equation's op and options around another body."""
    return wrapped(equation.op, equation.kwargs, body, source=equation.source)


def wrapper_check_rule(equation: Equation) -> None:
    """Check one body on the operands whose types the outputs have."""
    check_operands(equation, equation.operands, equation.body)
    check_types(equation, equation.body.output_types, "the body gives")


def wrapper_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """The op around the batched body."""
    body, flags = batch(equation.body, batched, size, randomness)
    return wrapped_again(equation, body), flags


def wrapper_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop the outputs and operands that are not needed."""
    body, reads = dce_to(equation.body, wanted)
    return reduced(equation, (body,), reads, wanted)


@LOWER.rule("call", "custom_jvp", "custom_vjp", "custom_vmap", "differentiated_as")
def first_body_lower_rule(equation: Equation) -> Trace:
    """Return the body that computes the results, the first."""
    return equation.bodies[0]


@wiring("checkpoint", "call", "custom_vmap")
def body_wiring(equation: Equation) -> Wiring:
    """Wire operands to the body and its outputs to the results."""
    return Wiring(body_ports(equation, 0))
