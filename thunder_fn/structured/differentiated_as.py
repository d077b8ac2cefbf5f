"""differentiated_as: computed in one way, differentiated in another.

    outputs = differentiated_as(*operands)     bodies: computed, differentiated     on the operands

Both bodies give the same values. PyTorch's first derivative of some ops reads saved values, such as
the factors of a matrix, of which no derivative is known. So it cannot be differentiated again. With
`create_graph=True` PyTorch computes it from the arguments. A rule that `derived/leaf_vjp.py` makes
of such an op has both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.jvp import jvp_trace
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.interpreters.vmap import batch, batched_outputs
from thunder_fn.ir import ops
from thunder_fn.ir.check import check_operands, check_types
from thunder_fn.ir.flow import Wiring, body_ports, wiring
from thunder_fn.ir.rules import CHECK, DCE, EVALUATE, JVP, VJP, VMAP, JvpRule, Mask, Split, union
from thunder_fn.ir.trace import Dim, Equation, Trace, Var
from thunder_fn.structured.shared.bind import bind
from thunder_fn.structured.shared.bodies import reduced
from thunder_fn.structured.shared.wrapping import wrapped


@CHECK.rule("differentiated_as")
def differentiated_as_check_rule(equation: Equation) -> None:
    """Check that both bodies are on the operands and give the outputs."""
    for body in equation.bodies:
        check_operands(equation, equation.operands, body)
        check_types(equation, body.output_types, f"{body.name} gives")


@EVALUATE.rule("differentiated_as")
def differentiated_as_evaluate_rule(bodies: Sequence[Trace], *operands: Any) -> tuple[Any, ...]:
    """Compute, where autograd or torch.func looks in the way that they can differentiate; inside
    a capture, record.
    """
    recorder, (computed, differentiated) = current(), bodies
    if recorder is not None:
        return bind(recorder, ops.DIFFERENTIATED_AS, operands, tuple(bodies), computed.output_types)
    followed = torch.is_grad_enabled() and any(map(internals.is_followed, operands))
    return evaluate(
        differentiated if followed or internals.inside_torch_func() else computed, operands
    )


@JVP.rule("differentiated_as")
def differentiated_as_jvp_rule(equation: Equation, active: Mask) -> JvpRule:
    """The jvp of the body that is differentiated."""
    return jvp_trace(equation.bodies[1], active)


@VJP.rule("differentiated_as")
def differentiated_as_vjp_rule(
    equation: Equation, wanted_inputs: Mask, wanted_outputs: Mask
) -> Split:
    """The split of the body that is differentiated."""
    return forward_backward(equation.bodies[1], wanted_inputs, wanted_outputs)


@VMAP.rule("differentiated_as")
def differentiated_as_vmap_rule(
    equation: Equation, batched: Mask, size: Dim, randomness: str
) -> tuple[Trace, Mask]:
    """Return the op on both bodies' batches."""
    done = [batch(body, batched, size, randomness) for body in equation.bodies]
    flags = union([own for _, own in done])
    bodies = tuple(batched_outputs(trace, own, flags, size) for trace, own in done)
    return wrapped(equation.op, (), *bodies), flags


@DCE.rule("differentiated_as")
def differentiated_as_dce_rule(
    equation: Equation, wanted: Mask
) -> tuple[Equation, tuple[Var, ...]]:
    """Drop the outputs that are not needed, and the operands that neither body needs."""
    cut = [dce_to(body, wanted) for body in equation.bodies]
    reads = union([flags for _, flags in cut])
    return reduced(equation, [body for body, _ in cut], reads, wanted)


@wiring("differentiated_as")
def differentiated_as_wiring(equation: Equation) -> Wiring:
    """Wire the body that is differentiated."""
    return Wiring(body_ports(equation, 1))
