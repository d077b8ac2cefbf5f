"""Static calibration: the steps of activations from sample inputs.

A scheme such as `int8_static` has a part `input_scale` beside each weight's codes: the step of the
activations that the weight is multiplied with. It is NaN until samples were seen, so that an
uncalibrated layer gives NaN and no plausible number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.distributed.collectives import collectives
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.ddp import Ddp
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.quantize.eight_bits import INT8_LARGEST, STATIC_LINEAR
from thunder_fn.interpreters.quantize.scheme import scales_of
from thunder_fn.interpreters.rewriting.prepared import Layout, Prepared, layout_of_types
from thunder_fn.interpreters.rewriting.rewrite import has_one_body
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Equation, TensorType, Trace, Var
from thunder_fn.progress import tracked
from thunder_fn.structured.shared.running import bodies_compiled_by

See = Callable[[Equation, Sequence[Any]], Sequence[Any]]


def observe(trace: Trace, inputs: Sequence[Any], see: See) -> tuple[Any, ...]:
    """Evaluate a trace; `see` is shown each equation before it runs, in composites too, and says on
    which operands it runs.

    Law: where `see` returns the operands as they are, which are the very tensors that were passed
        down, ``observe(t, xs, see)`` is ``evaluate(t, xs)``.
    """
    env = [*inputs, *(constant.tensor for constant in trace.constants)]
    for equation in trace.equations:
        values = see(equation, [env[var.index] for var in equation.operands])
        # a checkpoint's own: the other copies
        body = equation.body if has_one_body(equation) else lowered(equation)
        if body is not None:
            env.extend(observe(body, values, see))
            continue
        with bodies_compiled_by(
            lambda inner: lambda *given: observe(inner, given, see)
        ):  # those of loops and branches
            env.extend(evaluate(alone(equation), values))
    return tuple(env[atom.index] if isinstance(atom, Var) else atom.value for atom in trace.outputs)


def calibrated(
    params: Prepared, runs: Callable[[Layout], Iterable[tuple[Trace, Sequence[Any]]]]
) -> Prepared:
    """The parts with the steps of activations that traces on samples met, on any rank that shares
    them.

    Args:
        params: of which all ranks gather the codes, for the time that this takes.
        runs: for the layout of whole codes, traces whose first inputs these are, and the other
            inputs of each.

    Raises:
        RewriteError: no weight is stored with a step of activations, or no sample was given.
    """
    if not params.calibrated:
        what = "calibrate: no parameter is stored with a step for activations"
        raise RewriteError(what, fix='Quantise with a scheme that has one, such as "int8_static".')
    steps = tuple(step for step in params.layout.steps if isinstance(step, Fsdp | Ddp))
    local = replace(
        params.layout, steps=tuple(step for step in params.layout.steps if step not in steps)
    )
    outputs = zip(local.rewrite.names, local.rewrite.prepare.output_types, strict=True)
    shares = layout_of_types(dict(outputs), steps)  # pyright: ignore[reportArgumentType]
    whole = Prepared(shares, [params[name] for name in shares.rewrite.names]).restore()
    found = _steps_met(
        Prepared(local, [whole[name] for name in local.rewrite.names]),
        list(runs(local)),
        _greatest_of(steps),
    )
    return params.replaced(shares.only(found).prepare(found))


def _greatest_of(steps: Sequence[Fsdp | Ddp]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The greatest of the numbers of all ranks."""

    def over_ranks(values: torch.Tensor) -> torch.Tensor:
        for step in steps:
            values = collectives.wait_tensor(collectives.all_reduce(values, "max", step.group.name))
        return values

    def greatest(values: torch.Tensor) -> torch.Tensor:
        type = TensorType(values.dtype, tuple(values.shape), values.device)
        return evaluate(traced(over_ranks, type), [values])[0] if steps else values

    return greatest


def _steps_met(
    prepared: Prepared,
    runs: Sequence[tuple[Trace, Sequence[Any]]],
    over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    places = {  # a step of a loop is given the step of its layer, which lies in those of a stack
        steps.data_ptr() + at * steps.itemsize: (name, at)
        for name, steps in prepared.calibrated.items()
        for at in range(steps.numel())
    }
    greatest: dict[tuple[str, int], torch.Tensor] = {}

    def see(equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
        place = places.get(values[3].data_ptr()) if equation.op.name == STATIC_LINEAR else None
        if place is None or not values[0].numel():
            return values
        amax = values[0].detach().abs().amax().float()
        greatest[place] = torch.maximum(greatest[place], amax) if place in greatest else amax
        step = scales_of(greatest[place], INT8_LARGEST)
        return [*values[:3], step, *values[4:]]  # layers behind see what they will see

    if not runs:
        raise RewriteError("calibrate: no sample inputs were given")
    with torch.no_grad():
        for trace, others in tracked(runs, "calibrating on samples"):
            observe(trace, [*prepared.values(), *others], see)
        found = {name: steps.clone() for name, steps in prepared.calibrated.items()}
        unseen = next(iter(found.values())).new_tensor(-1.0)
        every = over_ranks(
            torch.stack([greatest.get(place, unseen).to(unseen) for place in places.values()])
        )
    for (name, at), amax in zip(places.values(), every, strict=True):
        if not amax < 0:
            found[name].view(-1)[at] = scales_of(amax, INT8_LARGEST)
    return found
