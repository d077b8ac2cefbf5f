"""Reverse mode of a user's jvp: the transpose of its linear part."""

from __future__ import annotations

from thunder_fn.interpreters.grad import forward_backward, zeros
from thunder_fn.interpreters.partial_eval import partial_split
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import JvpRule, Mask, Split, chosen
from thunder_fn.ir.trace import TensorType, TraceBuilder
from thunder_fn.ir.walking import inline_into


@memo(4096)
def transposed(rule: JvpRule, active: Mask, wanted_outputs: Mask, count: int) -> Split:
    """Split a jvp that is linear in its tangents into a forward and a backward.

    Law: for every tangent v and cotangent ct, ``<ct, jvp(v)> == <backward(ct), v>``.

    Args:
        rule: takes the primals, then a tangent for each active one.
        count: how many of the rule's outputs are the function's; tangents follow.
    """
    # Before: rule:     primals, tangents -> outputs, tangents of the active outputs
    # After:  forward:  primals -> outputs, residuals
    #         backward: residuals, cotangents -> gradients of the active primals
    # The linear part, residuals and tangents -> tangents, is split at zero tangents; what its own
    # forward computes there is no more than what the backward reads.
    num_primals, num_tangents = len(active), sum(active)
    known_outputs = (True,) * count + (False,) * (len(rule.trace.outputs) - count)
    halves = partial_split(
        rule.trace, (True,) * num_primals + (False,) * num_tangents, known_outputs
    )
    linear, num_kept = halves.backward, len(halves.residuals)
    moved = chosen(wanted_outputs, rule.active_outputs)
    back = forward_backward(linear, (False,) * num_kept + (True,) * num_tangents, moved)
    builder = TraceBuilder(f"{rule.trace.name}_transposed")
    kept = [builder.input(type) for type in linear.input_types[:num_kept]]
    given = [
        builder.input(type)
        for type, wanted in zip(rule.trace.output_types[:count], wanted_outputs, strict=True)
        if wanted
    ]
    nothing = [
        zeros(builder, var.type)
        for var in linear.inputs[num_kept:]
        if isinstance(var.type, TensorType)
    ]
    results = inline_into(builder, back.forward, (*kept, *nothing))
    residuals = back.residual_values((*kept, *nothing), results)
    gradients = inline_into(builder, back.backward, (*residuals, *given))
    return Split(
        dce(halves.forward), dce(builder.build(gradients)), halves.residuals, back.gradients
    )
