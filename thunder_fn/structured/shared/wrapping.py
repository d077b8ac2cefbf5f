"""Rules of ops whose bodies, mostly one, are on their operands, and that keep them through every
transform: checkpoint, call and differentiated_as.

    outputs = op(*operands, **options)      bodies: operands -> outputs

A transform of such an equation is the same op, with the same options, around transformed bodies.
"""

from __future__ import annotations

from thunder_fn.errors import InvalidTrace
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.jvp import jvp_trace
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.interpreters.vmap import batch, batched_outputs
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.rules import JVP, LOWER, VJP, JvpRule, Mask, Split, union
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


def wrapped_again(equation: Equation, *bodies: Trace) -> Trace:
    """The equation's op and options around other bodies."""
    return wrapped(equation.op, equation.kwargs, *bodies, source=equation.source)


def wrapper_check_rule(equation: Equation) -> None:
    """Check bodies on the operands that give what the outputs are."""
    wanted, found = 1 + (equation.op == ops.DIFFERENTIATED_AS), len(equation.bodies)
    if found != wanted:
        raise InvalidTrace(f"{equation.op}: its bodies are {wanted}, not {found}")
    for body in equation.bodies:
        check_operands(equation, equation.operands, body)
        check_types(equation, body.output_types, "the body gives")


def wrapper_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """The op around the batched bodies. An output is batched if it is in one of them."""
    done = [batch(body, batched, size, randomness) for body in equation.bodies]
    flags = union([own for _, own in done])
    bodies = (batched_outputs(body, own, flags, size) for body, own in done)
    return wrapped_again(equation, *bodies), flags


def wrapper_dce_rule(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """Drop the outputs that are not needed, and the operands that no body needs."""
    small = [dce_to(body, wanted) for body in equation.bodies]
    reads = union([flags for _, flags in small])
    return reduced(equation, [body for body, _ in small], reads, wanted)


@LOWER.rule("call", "custom_jvp", "custom_vjp", "custom_vmap", "differentiated_as")
def first_body_lower_rule(equation: Equation) -> Trace:
    """Return the body that computes the results, the first."""
    return equation.bodies[0]


@JVP.rule("custom_vmap", "differentiated_as")
def last_body_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """Return the jvp of the body that is differentiated, the last."""
    return jvp_trace(equation.bodies[-1], active)


@VJP.rule("custom_vmap", "differentiated_as")
def last_body_vjp_rule(equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """Split the body that is differentiated, the last."""
    return forward_backward(equation.bodies[-1], wanted_inputs, wanted_outputs)


@wiring("checkpoint", "call", "custom_vmap", "differentiated_as")
def last_body_wiring(equation: Equation) -> Wiring:
    """Wire operands to the last body and its outputs to the results."""
    return Wiring(body_ports(equation, len(equation.bodies) - 1))
