"""Reverse mode of a jvp that a user wrote: the transpose of what is linear in the tangents."""

from __future__ import annotations

from functools import lru_cache

from thunder_fn.interpreters.partial import partial_eval
from thunder_fn.interpreters.simplify import dce, inline_into
from thunder_fn.interpreters.vjp import split_vjp, zeros
from thunder_fn.rules import JvpRule, Mask, Residual, Split
from thunder_fn.trace import Atom, TensorType, Trace, TraceBuilder, Var


@lru_cache(maxsize=4096)
def transposed(rule: JvpRule, active: Mask, wanted_outputs: Mask, count: int) -> Split:
    """Split a jvp that is linear in its tangents into a forward and a backward.

    Law: for every tangent v and cotangent ct, ``<ct, jvp(v)> == <backward(ct), v>``.

    Args:
        rule: takes the primals, then a tangent for each active one.
        count: how many of the rule's outputs are the function's; tangents follow.
    """
    num_primals, num_tangents = len(active), sum(active)
    known_outputs = (True,) * count + (False,) * (len(rule.trace.outputs) - count)
    known, linear = partial_eval(rule.trace, (True,) * num_primals + (False,) * num_tangents, known_outputs)
    num_kept = len(linear.inputs) - num_tangents
    moved = (wanted for wanted, flag in zip(wanted_outputs, rule.active_outputs, strict=True) if flag)
    back = split_vjp(linear, (False,) * num_kept + (True,) * num_tangents, tuple(moved))
    places, extras = _placed(known, count)
    builder = TraceBuilder(f"{rule.trace.name}_transposed")
    kept = [builder.input(type) for type in known.output_types[count:]]
    given = [
        builder.input(type)
        for type, wanted in zip(rule.trace.output_types[:count], wanted_outputs, strict=True)
        if wanted
    ]
    nothing = [zeros(builder, var.type) for var in linear.inputs[num_kept:] if isinstance(var.type, TensorType)]
    results = inline_into(builder, back.forward, (*kept, *nothing))
    residuals = back.residual_values((*kept, *nothing), results)
    gradients = inline_into(builder, back.backward, (*residuals, *given))
    forward = Trace(known.inputs, known.equations, (*known.outputs[:count], *extras), known.constants, name=known.name)
    return Split(dce(forward), dce(builder.build(gradients)), places, back.gradients)


def _placed(known: Trace, count: int) -> tuple[tuple[Residual, ...], list[Atom]]:
    """Where each of the residuals is: an input or an output again, or an extra output."""
    inputs, outputs, extras = list(known.inputs), list(known.outputs[:count]), list[Atom]()
    places: list[Residual] = []
    for atom in known.outputs[count:]:
        if isinstance(atom, Var) and atom in inputs:
            places.append(Residual("input", inputs.index(atom)))
        elif atom in outputs:
            places.append(Residual("output", outputs.index(atom)))
        else:
            places.append(Residual("extra", len(extras)))
            extras.append(atom)
    return tuple(places), extras
