"""Structured ops: choices, loops, calls, checkpoints and functions with a backward of their own;
bodies are programs.

Operands may repeat and bodies need not read them all. The values that a loop hands on are picked
among the variables of its carries' types, the newest first. So carries are computed, forwarded,
exchanged and merged. Loops take 0 to 3 steps; one whose length nobody knows counts its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.interpreters.checkpoint.policies import (
    Budget,
    everything_saveable,
    matmuls_saveable,
    nothing_saveable,
)
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.vmap import batch
from thunder_fn.ir import ops
from thunder_fn.ir.rules import Mask
from thunder_fn.ir.trace import (
    Dim,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
    type_of,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.call import CALL
from thunder_fn.structured.checkpoint import CHECKPOINT
from thunder_fn.structured.cond import COND, SWITCH
from thunder_fn.structured.custom_jvp import CUSTOM_JVP
from thunder_fn.structured.custom_vjp import CUSTOM_VJP
from thunder_fn.structured.custom_vmap import CUSTOM_VMAP
from thunder_fn.structured.shared.custom_calls import Rule
from thunder_fn.structured.shared.scan_parts import SCAN, slice_of, stacked
from thunder_fn.structured.shared.while_parts import BOOL, COUNT, WHILE
from thunder_fn.testing.drawn_programs import (
    BODIES,
    STEPS,
    Draft,
    Program,
    Skip,
    Step,
    dtype_of,
    shape_of,
    tensor_type,
)
from thunder_fn.testing.laws.comparing import draws
from thunder_fn.testing.steps.enter import structured
from thunder_fn.testing.suits import (
    both,
    has_dims,
    has_elements,
    has_rank,
    is_any,
    is_complex,
    is_inexact,
    is_mask,
    is_real,
)

aten = torch.ops.aten
TWICE = ops.leaf(aten.mul.Scalar)

POLICIES = (nothing_saveable, everything_saveable, matmuls_saveable, Budget(64))


def _operands(d: Draft, counts: tuple[int, ...]) -> tuple[Var, ...]:
    return tuple(d.var(is_any) for _ in range(counts[d.number(len(counts))]))


def _types(variables: tuple[Var, ...]) -> tuple[TensorType, ...]:
    return tuple(map(tensor_type, variables))


def _same_types(types: tuple[TensorType, ...]) -> Callable[[Draft], tuple[Var, ...]]:
    return lambda d: tuple(d.of_type(type) for type in types)


# ---- choices ----


def _truth(d: Draft) -> Var:
    """A scalar that says yes or no: one that is known before, one that values decide, or one that
    is there, a number among them.
    """
    match d.number(4):
        case 0:
            (total,) = d.leaf(aten.sum.default, d.var(is_real))
            return d.leaf(aten.gt.Scalar, total, 0)[0]
        case 1:
            return d.leaf(aten.any.default, d.var(is_mask))[0]
        case 2:
            return d.leaf(
                aten.full.default,
                [],
                d.number(2) == 1,
                dtype=torch.bool,
                device=torch.device("cpu"),
            )[0]
        case _:
            return d.var(lambda var: not is_complex(var) and has_rank(0)(var))


@structured("choice", bodies=2)
def _cond(d: Draft, step: Step) -> None:
    choice, operands = _truth(d), _operands(d, (1, 2, 3, 0))
    _choose(d, COND, choice, operands, step, 2)


@structured("choice", bodies=3)
def _switch(d: Draft, step: Step) -> None:
    count = 3 - d.number(3)
    (index,) = d.leaf(
        aten.full.default, [], d.number(5) - 1, dtype=torch.int64, device=torch.device("cpu")
    )
    if d.number(2) == 0:
        (total,) = d.leaf(aten.sum.default, d.var(lambda var: is_real(var) and has_elements(var)))
        (total,) = d.leaf(aten.nan_to_num.default, total, 0.0)
        (index,) = d.leaf(aten._to_copy.default, total, dtype=torch.int64)
    _choose(d, SWITCH, index, _operands(d, (1, 2, 3, 0)), step, count)


def _choose(
    d: Draft, op: Op, choice: Var, operands: tuple[Var, ...], step: Step, count: int
) -> None:
    types = _types(operands)
    first = Draft.closed(step.body(), types, "branch")
    results = _types(tuple(atom for atom in first.outputs if isinstance(atom, Var)))
    others = [
        Draft.closed(step.body(i), types, "branch", _same_types(results)) for i in range(1, count)
    ]
    d.structured(op, (choice, *operands), results, first, *others)


@structured("choice", bodies=1)
def _guarded(d: Draft, step: Step) -> None:
    """Append a choice that keeps a function from numbers where it, or its derivative, is not
    finite.
    """
    x = d.var(both(is_real, has_elements))
    (positive,) = d.leaf(aten.gt.Scalar, x, 0)
    (choice,) = d.leaf(aten.all.default, positive)
    function = (aten.sqrt.default, aten.log.default, aten.reciprocal.default)[d.number(3)]
    types = _types((x,))
    first = Draft.closed(Program(), types, "branch", lambda body: body.leaf(function, body.env[0]))
    d.structured(
        COND,
        (choice, x),
        types,
        first,
        Draft.closed(step.body(), types, "branch", _same_types(types)),
    )


# ---- loops ----


def _starts(d: Draft, counts: tuple[int, ...]) -> tuple[Var, ...]:
    """The first carries: variables, or numbers of their types that depend on nothing."""
    return tuple(
        (
            d.leaf(
                aten.full.default,
                list(shape_of(var)),
                0.5,
                dtype=dtype_of(var),
                device=torch.device("cpu"),
            )[0]
            if is_inexact(var) and d.number(3) == 1
            else var
        )
        for var in _operands(d, counts)
    )


def _handed_on(body: Draft, carry: tuple[Var, ...], is_delay: bool) -> tuple[Var, ...]:
    """The carries of the next step: any values of the right types, or those that the carry
    before had.
    """
    before = (None, *carry)[: len(carry)]
    return tuple(
        (
            last
            if is_delay and last is not None and last.type == var.type
            else body.of_type(tensor_type(var))
        )
        for var, last in zip(carry, before, strict=True)
    )


@structured("loop", bodies=1)
def _scan(d: Draft, step: Step) -> None:
    _loop(d, step, (1, 2, 0, 3), (1, 2, 0), (1, 0, 2))


@structured("loop", bodies=1)
def _map(d: Draft, step: Step) -> None:
    _loop(d, step, (0,), (1, 0, 2), (1, 2))


def _loop(
    d: Draft,
    step: Step,
    num_carry: tuple[int, ...],
    num_consts: tuple[int, ...],
    num_xs: tuple[int, ...],
) -> None:
    carry, consts = _starts(d, num_carry), _operands(d, num_consts)
    xs: tuple[Var, ...] = ()
    length, reverse = (2, 3, 1, 0)[d.number(4)], d.number(2) == 1
    for _ in range(num_xs[d.number(len(num_xs))]):
        xs = (
            *xs,
            d.var(lambda var: has_dims(var) and (not xs or shape_of(var)[0] == shape_of(xs[0])[0])),
        )
        length = shape_of(xs[0])[0]
    types, is_delay = _types(carry), d.number(3) == 1

    def outputs(body: Draft) -> tuple[Var, ...]:
        new = _handed_on(body, tuple(body.env[len(consts) :][: len(carry)]), is_delay)
        rest = tuple(var for var in body.unused() if var not in new)
        return (*new, *rest[-2:]) if not carry else (*new, *rest[-1:])

    slices = tuple(slice_of(var.type) for var in xs)
    body = Draft.closed(step.body(), (*_types(consts), *types, *slices), "step", outputs)
    results = (*types, *(stacked(type, length) for type in body.output_types[len(types) :]))
    literals = {
        "num_consts": len(consts),
        "num_carry": len(carry),
        "length": length,
        "reverse": reverse,
        "unroll": 1,
    }
    d.structured(SCAN, (*consts, *carry, *xs), results, body, **literals)


@structured("loop", bodies=2)
def _while_loop(d: Draft, step: Step) -> None:
    """Append a loop that runs while a counter is low and, perhaps, a truth of the other carries
    holds.
    """
    carry, consts = _starts(d, (1, 2, 3, 0)), _operands(d, (1, 0, 2))
    limit, max_steps = (2, 3, 1, 0)[d.number(4)], (None, 3, 1, 0)[d.number(4)]
    types, is_delay = (*_types(consts), COUNT, *_types(carry)), d.number(3) == 1

    def outputs(body: Draft) -> tuple[Var, ...]:
        counter, *own = body.env[len(consts) :][: 1 + len(carry)]
        return (body.leaf(aten.add.Scalar, counter, 1)[0], *_handed_on(body, tuple(own), is_delay))

    def holds(body: Draft) -> tuple[Var, ...]:
        (low,) = body.leaf(aten.lt.Scalar, body.env[len(consts)], limit)
        try:
            found = _truth(body)
        except Skip:
            return (low,)
        return (
            body.leaf(aten.logical_and.default, low, found)
            if tensor_type(found) == BOOL
            else (low,)
        )

    condition = Draft.closed(step.body(1), types, "condition", holds)
    body = Draft.closed(step.body(), types, "body", outputs)
    if any(map(draws, (condition, body))):
        # reverse mode refuses a loop of unknown length with random numbers
        max_steps = max_steps or 3
    (start,) = d.leaf(aten.full.default, [], 0, dtype=torch.int64, device=torch.device("cpu"))
    literals = {"num_consts": len(consts), "max_steps": max_steps}
    d.structured(
        WHILE, (*consts, start, *carry), (COUNT, *_types(carry)), condition, body, **literals
    )


@structured("loop", bodies=0)
def _countdown(d: Draft, step: Step) -> None:
    """Append a loop whose step, taken once more, has a derivative that is not finite."""
    x = d.var(both(is_real, has_elements))
    (start,) = d.leaf(aten.clamp.default, x, None, 2.75)

    def steps(body: Draft) -> tuple[Var, ...]:
        (smaller,) = body.leaf(
            aten.sub.Tensor, body.env[0], body.leaf(aten.ones_like.default, body.env[0])[0]
        )
        (root,) = body.leaf(aten.sqrt.default, smaller)
        return smaller, body.leaf(aten.add.Tensor, body.env[1], root)[0]

    def goes_on(body: Draft) -> tuple[Var, ...]:
        (above,) = body.leaf(aten.gt.Scalar, body.env[0], 1)
        return body.leaf(aten.all.default, above)

    types = _types((x, x))
    bodies = (
        Draft.closed(Program(), types, "body", goes_on),
        Draft.closed(Program(), types, "body", steps),
    )
    d.structured(WHILE, (start, x), types, *bodies, num_consts=0, max_steps=(3, None)[d.number(2)])


# ---- functions with a way of their own to be differentiated ----


@structured("rule", bodies=1)
def _call(d: Draft, step: Step) -> None:
    """Append a jitted function inside a jitted one."""
    operands = _operands(d, (1, 2, 3, 0))
    body = Draft.closed(step.body(), _types(operands), "block")
    d.structured(CALL, operands, body.output_types, body, name="block", options=None)


@structured("rule", bodies=1)
def _checkpoint(d: Draft, step: Step) -> None:
    operands, policy = _operands(d, (1, 2, 3, 0)), POLICIES[d.number(len(POLICIES))]
    body = Draft.closed(step.body(), _types(operands), "block")
    d.structured(CHECKPOINT, operands, body.output_types, body, policy=policy)


@structured("rule", bodies=1)
def _custom_vjp(d: Draft, step: Step) -> None:
    """Append a custom_vjp with the right backward, so that the laws hold of it as they do of its
    body.
    """
    _with_rule(d, step, _differentiated)


def _custom_jvp(d: Draft, step: Step) -> None:
    """Append a custom_jvp with the right tangents."""
    _with_rule(d, step, _pushed)


def _custom_vmap(d: Draft, step: Step) -> None:
    """Append a custom_vmap with the right batch."""
    _with_rule(d, step, _batched)


def _ruled(d: Draft, step: Step) -> None:
    """Append a function whose rule gives twice its gradient, tangent or batch: inlining it loses
    the rule.
    """
    _with_rule(d, step, (_differentiated, _pushed, _batched)[d.number(3)], _doubled)


for _name, _rule in (("custom_jvp", _custom_jvp), ("custom_vmap", _custom_vmap), ("ruled", _ruled)):
    STEPS[_name], BODIES[_name] = _rule, 1
"""Steps that are in no random program: laws of derivatives do not hold of the last."""

Change: TypeAlias = Callable[[Trace, int], Trace]
Parts: TypeAlias = tuple[Op, tuple[Trace, ...], dict[str, Any]]
"""The op of a function with a rule, the traces of the rule, and the options."""


def _unchanged(trace: Trace, start: int = 0) -> Trace:
    return trace


def _doubled(trace: Trace, start: int = 0) -> Trace:
    """The trace with twice its outputs, from one on."""
    builder = TraceBuilder(trace.name)
    outputs = inline_into(builder, trace, builder.take(trace.input_types))
    twice = (builder.add(TWICE, (x, Literal(2)), (type_of(x),))[0] for x in outputs[start:])
    return builder.build((*outputs[:start], *twice))


def _with_rule(
    d: Draft, step: Step, parts: Callable[[Trace, Change], Parts], change: Change = _unchanged
) -> None:
    """Append a function with a rule that is the right one, changed."""
    operands = _operands(d, (1, 2, 3, 0))
    body = Draft.closed(step.body(), _types(operands), "block")
    op, more, options = parts(body, change)
    d.structured(op, operands, body.output_types, body, *more, **options)


def _pushed(body: Trace, change: Change) -> Parts:
    own = jvp(body, tuple(map(is_differentiable, body.input_types)))
    own = change(own, len(body.outputs)).renamed("jvp")
    return CUSTOM_JVP, (own,), {"rule": DerivedRule(body, change)}


def _batched(body: Trace, change: Change) -> Parts:
    return CUSTOM_VMAP, (), {"rule": DerivedRule(body, change)}


@dataclass(frozen=True)
class DerivedRule(Rule):
    """The rule of a function whose derivatives and batch are those of its body, changed."""

    body: Trace
    change: Change
    name: ClassVar[str] = "derived_rule"
    __name__ = name

    @property
    def is_tensor(self) -> tuple[bool, ...]:
        """Tell that each argument is a tensor."""
        return (True,) * len(self.body.inputs)

    def primal(self, *tensors: Any) -> Any:
        """Call the function."""
        return evaluate(self.body, tensors)

    def vmap(self, _: Any, size: Dim, batched: Mask, tensors: Any) -> tuple[Any, list[bool]]:
        """The outputs, and which of them are batched."""
        new, flags = batch(self.body, batched, size, "different")
        return evaluate(self.change(new, 0), tensors), list(flags)


def _differentiated(body: Trace, change: Change) -> Parts:
    wanted = tuple(map(is_differentiable, body.input_types))
    split = forward_backward(body, wanted, tuple(map(is_differentiable, body.output_types)))
    results = split.forward.outputs
    found = split.residual_values(split.forward.inputs, results)
    outputs = (*results[: len(body.outputs)], *found)
    forward = split.forward
    own = cut(forward, outputs=outputs, name="fwd")
    supply = iter(split.gradients)
    places = tuple(next(supply) if flag else None for flag in wanted)
    backward = change(split.backward, 0).renamed("bwd")
    options = {"rule": DerivedRule(body, change), "gradients": places}
    return CUSTOM_VJP, (own, backward), options
