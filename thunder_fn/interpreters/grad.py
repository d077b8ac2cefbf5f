"""Reverse mode: a trace is split into a forward that leaves residuals and a backward that uses
them.

Leaf rules are derived (`derived/leaf_vjp.py`). A composite is split by splitting its body, once for
each distinct body and question, so the work grows with distinct code. Cotangents that are zero are
absent, never tensors of zeros.

Inputs and outputs of a body are passed to its backward rather than saved, and reshapes of inputs
are repeated there. So the forward of a `linear` stays the user's call, which
executors know by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thunder_fn.derived.activity import activity, contributions, usefulness
from thunder_fn.derived.leaf_vjp import alone, vjp_rule
from thunder_fn.interpreters.cheap_residuals import recomputable
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import VJP, Mask, Split, chosen, numbered
from thunder_fn.ir.splitting import late_half, split
from thunder_fn.ir.trace import Atom, Equation, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into, put, walk

aten = ops.aten


@memo(16384)
def forward_backward(
    trace: Trace,
    wanted_inputs: Mask,
    wanted_outputs: Mask,
    seeded: Mask = (),
    *,
    fused: bool = False,
) -> Split:
    """Split a trace for reverse mode.

    Args:
        trace: closed and checked.
        wanted_inputs: one per input; True where a gradient is wanted. Only floating and complex
            inputs have one.
        wanted_outputs: one per output; True where a cotangent will be given.
        seeded: one per input, none for no input; True where the backward is given, last, what the
            gradient is added to. Autograd adds up one cotangent after the other, whatever modules
            they come from, and so must we if sums are to round as eager's do.
        fused: what works element by element will be fused, so the backward computes again what is
            cheap (`cheap_residuals.py`).

    Returns:
        The split: `forward` has the trace's inputs and its outputs followed by the extra residuals.

    Raises:
        MissingRule: PyTorch can differentiate neither an op nor its decomposition.

    Source: autodidax part 4 (linearize and transpose in one step); rules by `leaf_vjp`.
    """
    # Before: inputs -> outputs
    # After:  forward:  inputs -> outputs, extra residuals
    #         backward: residuals, cotangents of the wanted outputs, seeds -> gradients
    # Both are appended to one builder, the backward's variables last, and cut apart at the end.
    active = activity(trace, wanted_inputs)
    useful = usefulness(trace, active, wanted_outputs)
    transposed, builder, steps = transposed_matrices(trace), TraceBuilder(trace.name), list[_Step]()

    def forward(equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        asked = tuple([active[var.index] and useful[var.index] for var in equation.operands])
        given = tuple([useful[var.index] for var in equation.outputs])
        if not any(asked) or not any(given):
            return put(builder, equation, operands)
        found = split_of(equation, asked, given, transposed, fused=fused)
        results = _put_forward(builder, equation, operands, found)
        steps.append(_Step(equation, found, asked, given, found.residual_values(operands, results)))
        return results[: len(equation.outputs)]

    outputs = walk(builder, trace, builder.take(trace.input_types), forward)
    reshaped, first = reshaped_inputs(builder), builder.num_vars
    backward = _Backward(builder, fused)
    for atom in chosen(trace.outputs, wanted_outputs):
        backward.seed(atom, isinstance(atom, Var) and useful[atom.index])
    for var in chosen(trace.inputs, seeded) if seeded else ():
        backward.seed(var, True)
    for step in reversed(steps):
        backward.step(step)
    asked = chosen(trace.inputs, wanted_inputs)
    gradients = [backward.cotangents.get(var.index) for var in asked]
    found = [gradient for gradient in gradients if gradient is not None]
    halves = _halves(builder, first, (outputs, found), set(reshaped), fused)
    places = numbered([gradient is not None for gradient in gradients])
    return replace(halves, gradients=places)


def _halves(
    builder: TraceBuilder,
    first: int,
    outputs: tuple[Sequence[Atom], Sequence[Atom]],
    again: set[int],
    fused: bool,
) -> Split:
    """Cut a forward and its backward, whose variables begin with `first`, apart; what is in `again`
    is computed in both.
    """
    late = range(first, builder.num_vars)
    is_again = lambda equation: equation.outputs[0].index in again
    halves = split(builder, late, outputs, again=is_again)
    if fused:
        _, carried = late_half(builder, builder.equations, late, outputs[1], is_again)
        again |= recomputable(builder, late, halves, tuple(carried.values()))
        halves = split(builder, late, outputs, again=is_again)
    return halves


@dataclass(frozen=True, slots=True)
class _Step:
    """An equation that was split; its residuals are atoms of the trace of both halves."""

    equation: Equation
    split: Split
    operands: Mask
    outputs: Mask
    residuals: tuple[Atom, ...]


def split_of(
    equation: Equation,
    operands: Mask,
    outputs: Mask,
    transposed: frozenset[int] = frozenset(),
    *,
    fused: bool = False,
) -> Split:
    """The split of an equation: a composite's is its body's, a leaf's is derived or comes from
    its decomposition.
    """
    if equation.op.kind == "composite":
        return forward_backward(equation.body, operands, outputs, fused=fused)
    if equation.op.kind == "structured":
        return VJP.of(equation)(equation, operands, outputs)
    layouts = tuple(var.index in transposed for var in equation.operands)
    rule = vjp_rule(alone(equation), operands, outputs, layouts if any(layouts) else ())
    return (
        rule if isinstance(rule, Split) else forward_backward(rule, operands, outputs, fused=fused)
    )


def _put_forward(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...], split: Split
) -> tuple[Atom, ...]:
    if split.num_extra == 0 and _computes_the_same(equation, split.forward):
        return put(builder, equation, operands)
    if equation.op.kind == "composite":
        op, types = ops.composite(ops.short_name(equation.op)), split.forward.output_types
        return builder.add(op, operands, types, bodies=(split.forward,), source=equation.source)
    return inline_into(builder, split.forward, operands, equation.source)


def _computes_the_same(equation: Equation, forward: Trace) -> bool:
    if equation.op.kind == "composite":
        return forward == equation.body
    return equation.op.kind == "leaf" and forward == alone(equation)


def type_of_cotangent(atom: Atom) -> TensorType:
    """The type of a value's cotangent, which is its own."""
    assert isinstance(atom, Var) and isinstance(atom.type, TensorType), (
        "only tensors have cotangents"
    )
    return atom.type


class _Backward:
    """The backward, appended to the builder that holds the forward; cotangents by variable of
    the original.
    """

    def __init__(self, builder: TraceBuilder, fused: bool) -> None:
        self.builder, self.fused = builder, fused
        self.cotangents: dict[int, Atom] = {}

    def seed(self, atom: Atom, useful: bool) -> None:
        """Add an input of the backward: a cotangent that is given."""
        given = self.builder.input(type_of_cotangent(atom))
        if useful:
            self.accumulate(atom, given)

    def accumulate(self, atom: Atom, value: Atom) -> None:
        assert isinstance(atom, Var)
        known = self.cotangents.get(atom.index)
        self.cotangents[atom.index] = value if known is None else add(self.builder, known, value)

    def step(self, step: _Step) -> None:
        """Append the backward of one equation."""
        equation, split, builder = step.equation, step.split, self.builder
        wanted = chosen(equation.outputs, step.outputs)
        given = [self.cotangents.get(var.index) for var in wanted]
        if all(value is None for value in given) or all(place is None for place in split.gradients):
            return
        filled = [
            zeros(builder, type_of_cotangent(var)) if value is None else value
            for var, value in zip(wanted, given, strict=True)
        ]
        arguments = (*step.residuals, *filled)
        if equation.op.kind == "composite":
            seeded = _seeded(step, self.cotangents)
            if any(seeded):
                split = forward_backward(
                    equation.body, step.operands, step.outputs, seeded, fused=self.fused
                )
            seeds = chosen(equation.operands, seeded)
            op = ops.composite(f"{ops.short_name(equation.op)}_backward")
            arguments += tuple(self.cotangents.pop(var.index) for var in seeds)
            types = split.backward.output_types
            results = builder.add(
                op, arguments, types, bodies=(split.backward,), source=equation.source
            )
        else:
            results = inline_into(builder, split.backward, arguments, equation.source)
        asked = chosen(equation.operands, step.operands)
        for var, place in zip(asked, split.gradients, strict=True):
            if place is not None:
                self.accumulate(var, results[place])


def _seeded(step: _Step, cotangents: dict[int, Atom]) -> Mask:
    """The operands of a composite to whose cotangent, known so far, its body adds more than
    once.
    """
    counts = contributions(step.equation.body, step.operands, step.outputs)
    operands = step.equation.operands
    return tuple(
        flag and count > 1 and var.index in cotangents and operands.count(var) == 1
        for var, flag, count in zip(operands, step.operands, counts, strict=True)
    )


def add(builder: TraceBuilder, a: Atom, b: Atom) -> Var:
    """The sum of two cotangents."""
    return ops.emit(builder, aten.add.Tensor, (a, b), type_of_cotangent(a))


def zeros(builder: TraceBuilder, type: TensorType) -> Var:
    """A contiguous tensor of zeros: for a cotangent that is zero beside others that are not."""
    return full(builder, type, 0)


def ones(builder: TraceBuilder, type: TensorType) -> Var:
    """A tensor of ones: the cotangent of a loss."""
    return full(builder, type, 1)


def full(builder: TraceBuilder, type: TensorType, value: float) -> Var:
    """A tensor that holds one number everywhere."""
    kind = {"dtype": type.dtype, "device": type.device}
    return ops.emit(builder, aten.full.default, (type.shape, value), type, **kind)


@memo(1024)
def vjp(trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> Trace:
    """A trace of the outputs and the vector-Jacobian product.

    Law: for every tangent v and cotangent ct, ``<ct, jvp(v)> == <vjp(ct), v>``.

    Returns:
        The trace from the inputs, then one cotangent for each wanted output, to the outputs, then
            one gradient for each wanted input, zeros where the outputs do not depend on it.
    """
    split = forward_backward(trace, wanted_inputs, wanted_outputs)
    builder = TraceBuilder(f"{trace.name}_vjp")
    inputs = builder.take(trace.input_types)
    given = builder.take(map(type_of_cotangent, chosen(trace.outputs, wanted_outputs)))
    results = inline_into(builder, split.forward, inputs)
    gradients = pull_back(builder, trace, split, inputs, results, given, wanted_inputs)
    return dce(builder.build((*results[: len(trace.outputs)], *gradients)))


def pull_back(
    builder: TraceBuilder,
    trace: Trace,
    split: Split,
    inputs: tuple[Atom, ...],
    results: tuple[Atom, ...],
    given: tuple[Atom, ...],
    wanted_inputs: Mask,
) -> tuple[Atom, ...]:
    """Append the backward of a split whose forward has been appended; one gradient for each
    wanted input.
    """
    found = inline_into(builder, split.backward, (*split.residual_values(inputs, results), *given))
    asked = chosen(trace.inputs, wanted_inputs)
    return tuple(
        zeros(builder, type_of_cotangent(var)) if place is None else found[place]
        for var, place in zip(asked, split.gradients, strict=True)
    )


def _of_loss(trace: Trace, wanted_inputs: Mask, *, fused: bool) -> Split:
    wanted_outputs = (True,) + (False,) * (len(trace.outputs) - 1)
    return forward_backward(trace, wanted_inputs, wanted_outputs, fused=fused)


def is_reached(trace: Trace, wanted_inputs: Mask, *, fused: bool = False) -> Mask:
    """Tell for each wanted input whether the first output depends on it; else its gradient is 0."""
    split = _of_loss(trace, wanted_inputs, fused=fused)
    return tuple(place is not None for place in split.gradients)


@memo(1024)
def grad_and_value(trace: Trace, wanted_inputs: Mask, *, fused: bool = False) -> Trace:
    """A trace of the gradients of the first output, a scalar, followed by all outputs.

    Law: equals `vjp` with a cotangent of one for output 0. `fused` is as for `forward_backward`.
    """
    split = _of_loss(trace, wanted_inputs, fused=fused)
    builder = TraceBuilder(f"grad_{trace.name}")
    inputs = builder.take(trace.input_types)
    results = inline_into(builder, split.forward, inputs)
    seed = ones(builder, type_of_cotangent(trace.outputs[0]))
    gradients = pull_back(builder, trace, split, inputs, results, (seed,), wanted_inputs)
    return dce(builder.build((*gradients, *results[: len(trace.outputs)])))


# ---- other shapes of a tensor ----


TRANSPOSE = ops.leaf(ops.aten.t.default)
EXPAND = ops.leaf(ops.aten.expand.default)


def transposed_matrices(trace: Trace) -> frozenset[int]:
    """The variables that are transposes of matrices, as the weight is in `linear`."""
    found: set[int] = set()
    for equation in trace.equations:
        type = equation.outputs[0].type if equation.op == TRANSPOSE else None
        if (
            isinstance(type, TensorType)
            and len(type.shape) == 2
            and equation.operands[0].index not in found
        ):
            found.add(equation.outputs[0].index)
    return frozenset(found)


def reshaped_inputs(forward: TraceBuilder) -> dict[int, Equation]:
    """The equations that give an input another shape, by result: the backward does it again,
    rather than be handed both.
    """
    known, found = {var.index for var in forward.inputs}, dict[int, Equation]()
    for equation in forward.equations:
        if (equation.op in facts.RESHAPES or equation.op == EXPAND) and all(
            var.index in known for var in equation.operands
        ):
            known.update(var.index for var in equation.outputs)
            found.update((var.index, equation) for var in equation.outputs)
    return found
