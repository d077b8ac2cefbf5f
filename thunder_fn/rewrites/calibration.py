"""Static calibration: the steps of activations from sample inputs.

A scheme such as `int8_static` has a part `input_scale` beside each weight's codes: the step of what the weight is multiplied
with. It is NaN until samples were seen, so that what was never calibrated gives NaN and no plausible number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder_fn.derive import alone
from thunder_fn.errors import RewriteError, located
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.rewrite import has_one_body
from thunder_fn.rewrites.eight_bits import INT8_LARGEST, STATIC_LINEAR
from thunder_fn.rewrites.prepared import Prepared
from thunder_fn.rewrites.scheme import scales_of
from thunder_fn.rules import lowered
from thunder_fn.structured.running import bodies_compiled_by
from thunder_fn.trace import Equation, Trace, Var

See = Callable[[Equation, Sequence[Any]], Sequence[Any]]


def observe(trace: Trace, inputs: Sequence[Any], see: See) -> tuple[Any, ...]:
    """Evaluate a trace; `see` is shown each equation before it runs, in composites too, and says on which operands it runs.

    Law: where `see` returns the operands as they are, which are the very tensors that were passed down, ``observe(t, xs, see)``
    is ``evaluate(t, xs)``.
    """
    env = [*inputs, *(constant.tensor for constant in trace.constants)]
    for equation in trace.equations:
        values = see(equation, [env[var.index] for var in equation.operands])
        body = equation.body if has_one_body(equation) else lowered(equation)  # a checkpoint's own: the other copies
        if body is not None:
            env.extend(observe(body, values, see))
            continue
        with bodies_compiled_by(lambda inner: lambda *given: observe(inner, given, see)):  # those of loops and branches
            env.extend(evaluate(alone(equation), values))
    return tuple(env[atom.index] if isinstance(atom, Var) else atom.value for atom in trace.outputs)


def calibrated(prepared: Prepared, runs: Iterable[tuple[Trace, Sequence[Any]]]) -> Prepared:
    """The parts with the steps of activations that traces on samples met.

    Args:
        prepared: the first inputs of each trace.
        runs: traces, and the other inputs of each.

    Raises:
        RewriteError: no weight is stored with a step of activations, or no sample was given.
    """
    places = {  # a step of a loop is given the step of its layer, which lies in those of a stack
        steps.data_ptr() + at * steps.itemsize: (name, at)
        for name, steps in prepared.calibrated.items()
        for at in range(steps.numel())
    }
    if not places:
        what = "calibrate: no parameter is stored with a step for activations"
        raise RewriteError(located(what, fix='Quantise with a scheme that has one, such as "int8_static".'))
    greatest: dict[tuple[str, int], torch.Tensor] = {}

    def see(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
        place = places.get(values[3].data_ptr()) if equation.op.name == STATIC_LINEAR else None
        if place is None or not values[0].numel():
            return values
        amax = values[0].detach().abs().amax().float()
        greatest[place] = torch.maximum(greatest[place], amax) if place in greatest else amax
        step = scales_of(greatest[place], INT8_LARGEST)
        return [*values[:3], step, *values[4:]]  # layers behind see what they will see

    runs = list(runs)
    if not runs:
        raise RewriteError("calibrate: no sample inputs were given")
    with torch.no_grad():
        for trace, others in runs:
            observe(trace, [*prepared.values(), *others], see)
    found = {name: steps.clone() for name, steps in prepared.calibrated.items()}
    for (name, at), amax in greatest.items():
        found[name].view(-1)[at] = scales_of(amax, INT8_LARGEST)
    return prepared.replaced(found)
