"""Reverse mode: a trace is split into a forward that leaves residuals and a backward that uses them.

Leaf rules are derived (`derive.py`). A composite is split by splitting its body, once for each distinct body and
question, so the work grows with distinct code. Cotangents that are zero are absent, never tensors of zeros.
"""

from __future__ import annotations

from collections.abc import Callable

from thunder_fn import ops
from thunder_fn.derive import alone, vjp_rule
from thunder_fn.interpreters.activity import activity, contributions, usefulness
from thunder_fn.interpreters.lean import lean
from thunder_fn.interpreters.shapes import reshaped_inputs, transposed_matrices
from thunder_fn.interpreters.simplify import dce, inline_into
from thunder_fn.rules import Mask, Residual, Split, memo, rules_of
from thunder_fn.trace import Arg, Atom, Constant, Equation, Literal, TensorType, Trace, TraceBuilder, Var

aten = ops.aten


@memo(16384)
def split_vjp(
    trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask, seeded: Mask = (), *, fused: bool = False
) -> Split:
    """Split a trace for reverse mode.

    Args:
        trace: closed and checked.
        wanted_inputs: one per input; True where a gradient is wanted. Only floating and complex inputs have one.
        wanted_outputs: one per output; True where a cotangent will be given.
        seeded: one per input, none for no input; True where the backward is given, last, what the gradient is added
            to. Autograd adds up one cotangent after the other, whatever modules they come from, and so must we if
            sums are to round as eager's do.
        fused: what works element by element will be fused, so the backward computes again what is cheap (`lean.py`).

    Returns:
        The split: `forward` has the trace's inputs and its outputs followed by the extra residuals.

    Raises:
        MissingRule: PyTorch can differentiate neither an op nor its decomposition.

    Source: autodidax part 4 (linearize and transpose in one step); rules through derive.py.
    """
    active = activity(trace, wanted_inputs)
    useful = usefulness(trace, active, wanted_outputs)
    forward = TraceBuilder(f"{trace.name}_forward")
    forward.require(trace.constraints)
    env: dict[int, Atom] = {}
    for var in trace.inputs:
        env[var.index] = forward.input(var.type)
    for constant in trace.constants:
        env[constant.var.index] = forward.constant(constant.tensor, constant.var.type, owned=constant.owned)
    steps: list[_Step] = []
    transposed = transposed_matrices(trace)
    for equation in trace.equations:
        operands = tuple(active[var.index] and useful[var.index] for var in equation.operands)
        outputs = tuple(useful[var.index] for var in equation.outputs)
        if any(operands) and any(outputs):
            split = split_of(equation, operands, outputs, transposed, fused=fused)
            steps.append(_forward_step(forward, env, equation, operands, outputs, split))
        else:
            _bind(env, equation.outputs, forward.copy(equation, lambda var: env[var.index]))
    split = _backward(trace, forward, env, steps, wanted_inputs, wanted_outputs, useful, seeded, fused)
    return lean(split) if fused else split


class _Step:
    """An equation that was split: what its backward needs, as variables of the forward."""

    __slots__ = ("equation", "operands", "outputs", "residuals", "split")

    def __init__(
        self, equation: Equation, split: Split, operands: Mask, outputs: Mask, residuals: tuple[Atom, ...]
    ) -> None:
        self.equation = equation
        self.split = split
        self.operands = operands
        self.outputs = outputs
        self.residuals = residuals


def _bind(env: dict[int, Atom], variables: tuple[Var, ...], values: tuple[Atom, ...]) -> None:
    env.update((var.index, value) for var, value in zip(variables, values, strict=True))


def split_of(
    equation: Equation,
    operands: Mask,
    outputs: Mask,
    transposed: frozenset[int] = frozenset(),
    *,
    fused: bool = False,
) -> Split:
    """The split of an equation: a composite's is its body's, a leaf's is derived or comes from its decomposition."""
    if equation.op.kind == "composite":
        return split_vjp(equation.body, operands, outputs, fused=fused)
    if equation.op.kind == "structured":
        return rules_of(equation).split(equation, operands, outputs)
    layouts = tuple(var.index in transposed for var in equation.operands)
    rule = vjp_rule(alone(equation), operands, outputs, layouts if any(layouts) else ())
    return rule if isinstance(rule, Split) else split_vjp(rule, operands, outputs, fused=fused)


def _forward_step(
    forward: TraceBuilder,
    env: dict[int, Atom],
    equation: Equation,
    operands: Mask,
    outputs: Mask,
    split: Split,
) -> _Step:
    read: Callable[[Var], Arg] = lambda var: env[var.index]
    arguments = tuple(env[var.index] for var in equation.operands)
    if split.num_extra == 0 and _computes_the_same(equation, split.forward):
        results = forward.copy(equation, read)
    elif equation.op.kind == "composite":
        op = ops.composite(ops.short_name(equation.op))
        types = split.forward.output_types
        results = forward.add(op, arguments, types, bodies=(split.forward,), source=equation.source)
    else:
        results = inline_into(forward, split.forward, arguments, equation.source)
    _bind(env, equation.outputs, tuple(results[: len(equation.outputs)]))
    return _Step(equation, split, operands, outputs, split.residual_values(arguments, results))


def _computes_the_same(equation: Equation, forward: Trace) -> bool:
    if equation.op.kind == "composite":
        return forward == equation.body
    return equation.op.kind == "leaf" and forward == alone(equation)


def _backward(
    trace: Trace,
    forward: TraceBuilder,
    env: dict[int, Atom],
    steps: list[_Step],
    wanted_inputs: Mask,
    wanted_outputs: Mask,
    useful: Mask,
    seeded: Mask,
    fused: bool,
) -> Split:
    backward = TraceBuilder(f"{trace.name}_backward")
    cotangents: dict[int, Atom] = {}
    constants = {constant.var.index: constant for constant in forward.constants}
    carried: dict[int, Var] = {}
    shapes = reshaped_inputs(forward)

    def accumulate(var: Var, value: Atom) -> None:
        known = cotangents.get(var.index)
        cotangents[var.index] = value if known is None else add(backward, known, value)

    residual = _Residuals(backward, constants, shapes, carried)

    given: list[Var] = []
    for atom, wanted in zip(trace.outputs, wanted_outputs, strict=True):
        if wanted:
            given.append(backward.fresh(type_of_cotangent(atom)))
            if isinstance(atom, Var) and useful[atom.index]:
                accumulate(atom, given[-1])
    for var, flag in zip(trace.inputs, seeded or (False,) * len(trace.inputs), strict=True):
        if flag:
            given.append(backward.fresh(type_of_cotangent(var)))
            accumulate(var, given[-1])
    for step in reversed(steps):
        _backward_step(backward, step, cotangents, residual, accumulate, fused)
    gradients = [cotangents.get(var.index) for var, wanted in zip(trace.inputs, wanted_inputs, strict=True) if wanted]
    backward.inputs = [*carried.values(), *given]
    return _finish(trace, forward, backward, env, carried, gradients)


class _Residuals:
    """Reads values of the forward in the backward, by `residual(atom)`. An object: a function that calls itself is a cycle."""

    def __init__(
        self,
        backward: TraceBuilder,
        constants: dict[int, Constant],
        shapes: dict[int, Equation],
        carried: dict[int, Var],
    ) -> None:
        self.backward, self.constants, self.shapes, self.carried = backward, constants, shapes, carried
        self.again: dict[int, Atom] = {}

    def __call__(self, atom: Atom) -> Atom:
        if not isinstance(atom, Var):
            return atom
        if atom.index in self.constants:
            constant = self.constants[atom.index]
            return self.backward.constant(constant.tensor, constant.var.type, owned=constant.owned)
        if atom.index in self.shapes:
            if atom.index not in self.again:
                maker = self.shapes[atom.index]
                _bind(self.again, maker.outputs, self.backward.copy(maker, self))
            return self.again[atom.index]
        if atom.index not in self.carried:
            self.carried[atom.index] = self.backward.fresh(atom.type)
        return self.carried[atom.index]


def type_of_cotangent(atom: Atom) -> TensorType:
    """The type of a value's cotangent, which is its own."""
    assert isinstance(atom, Var) and isinstance(atom.type, TensorType), "only tensors have cotangents"
    return atom.type


def _backward_step(
    backward: TraceBuilder,
    step: _Step,
    cotangents: dict[int, Atom],
    residual: Callable[[Atom], Atom],
    accumulate: Callable[[Var, Atom], None],
    fused: bool,
) -> None:
    wanted = [var for var, flag in zip(step.equation.outputs, step.outputs, strict=True) if flag]
    given = [cotangents.get(var.index) for var in wanted]
    if all(value is None for value in given) or all(place is None for place in step.split.gradients):
        return
    filled = tuple(
        zeros(backward, type_of_cotangent(var)) if value is None else value
        for var, value in zip(wanted, given, strict=True)
    )
    arguments = (*map(residual, step.residuals), *filled)
    split, asked = step.split, [var for var, flag in zip(step.equation.operands, step.operands, strict=True) if flag]
    if step.equation.op.kind == "composite":
        seeded = _seeded(step, cotangents)
        if any(seeded):
            split = split_vjp(step.equation.body, step.operands, step.outputs, seeded, fused=fused)
        seeds = [var for var, flag in zip(step.equation.operands, seeded, strict=True) if flag]
        op = ops.composite(f"{ops.short_name(step.equation.op)}_backward")
        arguments += tuple(cotangents.pop(var.index) for var in seeds)
        types = split.backward.output_types
        results = backward.add(op, arguments, types, bodies=(split.backward,), source=step.equation.source)
    else:
        results = inline_into(backward, split.backward, arguments, step.equation.source)
    for var, place in zip(asked, split.gradients, strict=True):
        if place is not None:
            accumulate(var, results[place])


def _seeded(step: _Step, cotangents: dict[int, Atom]) -> Mask:
    """The operands of a composite to whose cotangent, known so far, its body adds more than once."""
    counts = contributions(step.equation.body, step.operands, step.outputs)
    operands = step.equation.operands
    return tuple(
        flag and count > 1 and var.index in cotangents and operands.count(var) == 1
        for var, flag, count in zip(operands, step.operands, counts, strict=True)
    )


def _finish(
    trace: Trace,
    forward: TraceBuilder,
    backward: TraceBuilder,
    env: dict[int, Atom],
    carried: dict[int, Var],
    gradients: list[Atom | None],
) -> Split:
    outputs = tuple(env[atom.index] if isinstance(atom, Var) else atom for atom in trace.outputs)
    inputs = {var.index: i for i, var in enumerate(forward.inputs)}
    results = {atom.index: i for i, atom in reversed(list(enumerate(outputs))) if isinstance(atom, Var)}
    by_index = {var.index: var for equation in forward.equations for var in equation.outputs}
    extras: list[Var] = []
    residuals: list[Residual] = []
    for index in carried:
        if index in inputs:
            residuals.append(Residual("input", inputs[index]))
        elif index in results:
            residuals.append(Residual("output", results[index]))
        else:
            residuals.append(Residual("extra", len(extras)))
            extras.append(by_index[index])
    found = [gradient for gradient in gradients if gradient is not None]
    places = iter(range(len(found)))
    return Split(
        forward.build((*outputs, *extras)),
        backward.build(tuple(found)),
        tuple(residuals),
        tuple(None if gradient is None else next(places) for gradient in gradients),
    )


def add(builder: TraceBuilder, a: Atom, b: Atom) -> Var:
    """The sum of two cotangents."""
    (result,) = builder.add(ops.leaf(aten.add.Tensor), (a, b), (type_of_cotangent(a),))
    return result


def zeros(builder: TraceBuilder, type: TensorType) -> Var:
    """A contiguous tensor of zeros: for a cotangent that is zero beside others that are not."""
    return full(builder, type, 0)


def ones(builder: TraceBuilder, type: TensorType) -> Var:
    """A tensor of ones: the cotangent of a loss."""
    return full(builder, type, 1)


def full(builder: TraceBuilder, type: TensorType, value: float) -> Var:
    """A tensor that holds one number everywhere."""
    kwargs = (("dtype", Literal(type.dtype)), ("device", Literal(type.device)))
    shape = tuple(Literal(size) for size in type.shape)
    (result,) = builder.add(ops.leaf(aten.full.default), (shape, Literal(value)), (type,), kwargs=kwargs)
    return result


@memo(1024)
def vjp(trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> Trace:
    """A trace of the outputs and the vector-Jacobian product.

    Law: for every tangent v and cotangent ct, ``<ct, jvp(v)> == <vjp(ct), v>``.

    Returns:
        The trace from the inputs, then one cotangent for each wanted output, to the outputs, then one gradient for
        each wanted input, zeros where the outputs do not depend on it.
    """
    split = split_vjp(trace, wanted_inputs, wanted_outputs)
    builder = TraceBuilder(f"{trace.name}_vjp")
    inputs = tuple(builder.input(var.type) for var in trace.inputs)
    given = tuple(
        builder.input(type_of_cotangent(atom))
        for atom, wanted in zip(trace.outputs, wanted_outputs, strict=True)
        if wanted
    )
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
    """Append the backward of a split whose forward has been appended; one gradient for each wanted input."""
    found = inline_into(builder, split.backward, (*split.residual_values(inputs, results), *given))
    asked = [var for var, wanted in zip(trace.inputs, wanted_inputs, strict=True) if wanted]
    return tuple(
        zeros(builder, type_of_cotangent(var)) if place is None else found[place]
        for var, place in zip(asked, split.gradients, strict=True)
    )


@memo(1024)
def grad_and_value(trace: Trace, wanted_inputs: Mask, *, fused: bool = False) -> Trace:
    """A trace of the gradients of the first output, a scalar, followed by all outputs.

    Law: equals `vjp` with a cotangent of one for output 0. `fused` is as for `split_vjp`.
    """
    wanted_outputs = (True,) + (False,) * (len(trace.outputs) - 1)
    split = split_vjp(trace, wanted_inputs, wanted_outputs, fused=fused)
    builder = TraceBuilder(f"grad_{trace.name}")
    inputs = tuple(builder.input(var.type) for var in trace.inputs)
    results = inline_into(builder, split.forward, inputs)
    seed = ones(builder, type_of_cotangent(trace.outputs[0]))
    gradients = pull_back(builder, trace, split, inputs, results, (seed,), wanted_inputs)
    return dce(builder.build((*gradients, *results[: len(trace.outputs)])))
