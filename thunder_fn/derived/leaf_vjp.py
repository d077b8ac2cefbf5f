"""Rules of leaf ops, derived from PyTorch's own formulas.

To derive the vjp of one equation, run the op on tracers that require grad, ask autograd for the
gradients, and record both. The records before the question are the forward, those after it the
backward; values of the forward that the backward reads are the residuals. If PyTorch has no
derivative, the op is decomposed and its parts are asked.

Every result is memoised by the equation (op, static arguments, input types) and by the question.

`VJP_ATTEMPTS` is the order in which a rule is looked for. The in-place op, on a copy, is for ops
that only functionalization makes, such as `aten.copy`.

PyTorch's first derivative of some ops (`ONCE`) reads saved values that have no derivative. The rule
of such an op is one `differentiated_as` equation: the fast formula is computed, the formula for
`create_graph=True` is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorded import Leaf
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.layout import HIDDEN
from thunder_fn.derived.attempts import Attempt, Declined, first_rule, kept_rules
from thunder_fn.derived.decompositions import (
    AGAIN,
    DECOMPOSITIONS,
    DIFFERENTIABLE,
    NOT_PUSHED,
    ONCE,
)
from thunder_fn.derived.quirks import attention, collectives, determinant
from thunder_fn.derived.quirks.statistics import STATISTICS, with_own_statistics
from thunder_fn.errors import MissingRule
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import fixes_numbers, names_of, pinned, renamed
from thunder_fn.ir.equations import bound, needed, operands_in
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask, Residual, Split, chosen
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    as_dim,
    canonical,
    cut,
    is_differentiable,
    python_args,
    subtraces,
    supplying,
)


def alone(equation: Equation) -> Trace:
    """The equation as a trace of its own: one input for each operand. The key of every memo
    here.
    """
    inputs = tuple(Var(i, var.type) for i, var in enumerate(equation.operands))
    outputs = tuple(Var(len(inputs) + i, var.type) for i, var in enumerate(equation.outputs))
    single = replace(equation.reading(supplying(inputs)), outputs=outputs)
    return Trace(inputs, (single,), outputs, (), ())


def _refuse_hidden(equation: Equation) -> None:
    if equation.op == HIDDEN:
        raise MissingRule(
            "as_strided reads memory that its tensor does not hold, which has no derivative and"
            " cannot be batched",
            source=equation.source,
            fix=(
                "Take the view of the tensor that holds the memory, or use `unfold`, `narrow`"
                " and slices."
            ),
        )


def _refuse_unregistered(equation: Equation) -> None:
    if equation.op.is_foreign and not internals.is_known_to_autograd(ops.overload(equation.op)):
        raise MissingRule(
            f"{equation.op} has no derivative: none is registered for this custom op",
            source=equation.source,
            fix=(
                "Register one with `torch.library.register_autograd`, or detach its arguments if"
                " no gradient is to go through it."
            ),
        )


def call_leaf(equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
    """Run a leaf's overload; the results in the order of the equation's outputs."""
    _refuse_hidden(equation)
    args, kwargs = python_args(equation, read)
    result = ops.overload(equation.op)(*args, **kwargs)
    return () if ops.returns_nothing(equation.op) else ops.flatten_result(result)


def call_differentiable(equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
    """Run a leaf in the way that autograd knows to differentiate."""
    function = DIFFERENTIABLE.get(equation.op.name)
    if function is None:
        _refuse_unregistered(equation)
        return call_leaf(equation, read)
    args, kwargs = python_args(equation, read)
    return ops.flatten_result(function(*args, **kwargs))


def call_constant(equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
    """Run a leaf of which autograd is not to know."""
    with torch.no_grad():
        return call_leaf(equation, read)


def call_inplace_twin(equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
    """Run `op_` on a copy: for ops that functionalization makes and whose derivative only the
    in-place op has.
    """
    twin = ops.inplace_twin(equation.op)
    if twin is None or ops.is_collective(equation.op):  # autograd takes these for the identity
        raise NotImplementedError(f"{equation.op} has no in-place variant")
    (first, *rest), kwargs = python_args(equation, read)
    if not isinstance(first, torch.Tensor):  # as of `2 ** x`
        raise NotImplementedError(
            f"{equation.op} begins with a number, which nothing is written to"
        )
    return (twin(first.clone(), *rest, **kwargs),)


CANNOT = (
    NotImplementedError,
    RuntimeError,
    internals.DATA_DEPENDENT_VALUE,
    internals.DATA_DEPENDENT_SHAPE,
)
"""Exceptions of PyTorch for an op without a derivative, or with one that depends on data."""


Call = Callable[[Equation, Callable[[Var], Any]], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class VjpQuestion:
    """A question for the rule of reverse mode.

    Args:
        single: the equation, `alone`.
        wanted_inputs: operands whose gradients are asked for.
        wanted_outputs: results whose cotangents are given.
        transposed: operands that are transposes of contiguous matrices; all others are taken as
            contiguous. PyTorch multiplies matrices in the order that suits their layout, which is a
            matter of rounding and of speed.
    """

    single: Trace
    wanted_inputs: Mask
    wanted_outputs: Mask
    transposed: Mask = ()

    @property
    def equation(self) -> Equation:
        """The one equation."""
        return self.single.equations[0]

    def ask(self, call: Call, *, again: bool = False) -> Split:
        """Ask autograd; `again`, for a formula that can be differentiated again."""
        wanted = self.wanted_inputs, self.wanted_outputs
        return _ask_autograd(self.single, *wanted, self.transposed, call, again=again)


def _by_zeros(question: VjpQuestion) -> Split | Declined:
    if question.equation.op not in facts.DRAWS:
        return Declined("the op does not draw random numbers")
    return _zero_split(question.single, question.wanted_inputs, question.wanted_outputs)


def _by_transpose(question: VjpQuestion) -> Split | Declined:
    collectives.check_derivative(question.equation, reverse=True)
    if not collectives.is_symmetric(question.equation):
        return Declined("the op is no sum or mean over ranks")
    return collectives.transposed(question.single)


def _by_attention_twice(question: VjpQuestion) -> Split | Declined:
    if question.equation.op.name not in attention.BACKWARDS:
        return Declined("the op is not the backward of an attention kernel")
    return question.ask(call_constant, again=True)


def _by_autograd(call: Call) -> Callable[[VjpQuestion], Split | Declined]:
    def find(question: VjpQuestion) -> Split | Declined:
        try:
            found = _named(question.ask(call), question.single, question.wanted_inputs)
            name = question.equation.op.name
            if name not in ONCE and name not in STATISTICS:
                return found
            return _twofold(found, question.ask(call, again=True))
        except MissingRule:
            raise
        except CANNOT as error:
            return Declined.by(error)

    return find


def _by_meaning(question: VjpQuestion) -> Trace | Declined:
    if question.equation.op.name not in attention.FORWARDS:
        return Declined("the op is not an attention kernel")
    # of a mask that is differentiated: no kernel for CPUs has its gradient
    return meaning_of_attention(question.single)


def _by_fixed_numbers(question: VjpQuestion) -> Trace | Declined:
    found = pinned(question.single)
    if found is None:
        return Declined("no number of the equation is a symbol")
    if not _has_formula(found, question.wanted_inputs, question.wanted_outputs):
        return Declined("autograd has no formula for fixed numbers either")
    return found


def _by_parts(question: VjpQuestion) -> Trace | Declined:
    try:
        found = decomposition(question.single)
    except MissingRule as error:  # of an op that it consists of
        return Declined.by(error)
    return Declined("PyTorch has no decomposition") if found is None else found


VJP_ATTEMPTS: tuple[Attempt[VjpQuestion, Split | Trace], ...] = (
    Attempt("transpose of a collective", _by_transpose),
    Attempt("zero gradients", _by_zeros),
    Attempt("autograd's formula for a backward", _by_attention_twice),
    Attempt("autograd's formula", _by_autograd(call_differentiable)),
    Attempt("autograd's formula for the in-place op", _by_autograd(call_inplace_twin)),
    Attempt("definition of attention", _by_meaning),
    Attempt("autograd's formula for fixed numbers", _by_fixed_numbers),
    Attempt("decomposition", _by_parts),
)
"""The attempts at a rule for reverse mode, in order."""


@kept_rules(65536)
def vjp_rule(
    single: Trace, wanted_inputs: Mask, wanted_outputs: Mask, transposed: Mask = ()
) -> Split | Trace:
    """The split of one leaf equation, or its decomposition where PyTorch has no derivative for it.

    The arguments are those of `VjpQuestion`.

    Raises:
        MissingRule: neither is known; names the op and the user's line.
    """
    question = VjpQuestion(single, wanted_inputs, wanted_outputs, transposed)
    outcome = first_rule(VJP_ATTEMPTS, question)
    if outcome.rule is None:
        what = (
            f"vjp: PyTorch has neither a derivative nor a decomposition for {question.equation.op}"
        )
        first = next(one for _, one in outcome.declined if one.error is not None)
        raise MissingRule(what, source=question.equation.source, fix=first.why) from first.error
    return outcome.rule


def _has_formula(trace: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> bool:
    """Test whether autograd differentiates the one equation of the trace."""
    (equation,) = trace.equations
    try:
        _ask_autograd(alone(equation), wanted_inputs, wanted_outputs, (), call_differentiable)
    except CANNOT:
        return False
    return True


def _named(split: Split, single: Trace, wanted_inputs: Mask) -> Split:
    """The split with the equation's own names for unbacked sizes."""
    names = names_of(split.forward.output_types, single.output_types)
    wanted = chosen(single.input_types, wanted_inputs)
    pairs = [(at, type) for at, type in zip(split.gradients, wanted, strict=True) if at is not None]
    given = split.backward.output_types
    names |= names_of([given[at] for at, _ in pairs], [type for _, type in pairs])
    if not names:
        return split
    rename = renamed(names)
    return replace(split, forward=rename(split.forward), backward=rename(split.backward))


_READS_LAYOUT = facts.FACTORS | facts.ADDRESSES


@memo(4096)
def ruled(trace: Trace) -> Mask:
    """Tell for each equation whether it is a leaf that autograd alone cannot differentiate, or not
    again, as its rule does.

    Autograd has no derivative of most backwards (`silu_backward`), and wrong ones of some ops and
    of saved statistics.
    """
    return tuple(
        equation.op.kind == "leaf" and _is_ruled(_of_any_size(alone(equation)))
        for equation in trace.equations
    )


@dataclass(frozen=True, slots=True)
class _OfAnySize:
    """An equation, `alone`, that is equal to those of other sizes: whether autograd has a formula
    is a matter of the op, its options, dtypes and ranks.
    """

    kind: Any
    single: Trace = field(compare=False)

    @property
    def has_foreign(self) -> bool:
        """Test whether it calls a custom op."""
        return self.single.has_foreign


def _kind_of(arg: Any) -> Any:
    """An argument with 2 for all larger numbers, as in the classes of sizes of jit."""
    match arg:
        case Var(type=TensorType(shape=shape) as type):
            return replace(type, shape=tuple(map(_kind_of, shape)))
        case Var():
            return arg.type
        case Literal(value=tuple() as values):
            return tuple(_kind_of(Literal(value)) for value in values)
        case Literal(value=bool()):
            return arg
        case Literal(value=int() as value):
            return Literal(_kind_of(value))
        case tuple():
            return tuple(map(_kind_of, arg))
        case int():
            return max(-2, min(arg, 2))
        case _:
            return arg


def _of_any_size(single: Trace) -> _OfAnySize:
    (equation,) = single.equations
    parts = equation.args, equation.kwargs, equation.outputs
    return _OfAnySize((equation.op, *map(_kind_of, parts)), single)


@kept_rules(65536)
def _is_ruled(of: _OfAnySize) -> bool:
    single = of.single
    (equation,) = single.equations
    if equation.op.name in _OTHERWISE:
        return True
    wanted = tuple(is_differentiable(var.type) for var in equation.operands)
    followed = tuple(is_differentiable(var.type) for var in equation.outputs)
    if not any(wanted) or not any(followed) or ops.is_random(equation.op):
        return False
    try:
        _ask_autograd(single, wanted, followed, (), call_leaf)
        return False
    except MissingRule:
        return False
    except CANNOT:
        return _has_rule(single, wanted, followed)


def read_formulas(trace: Trace) -> None:
    """Derive the rules of the custom ops in a trace, so that who watches learns what they read.

    A derivative that is asked for later reads the same.
    """
    for body in subtraces(trace) if trace.has_foreign else ():
        for equation in body.equations:
            wanted = tuple(is_differentiable(var.type) for var in equation.operands)
            followed = tuple(is_differentiable(var.type) for var in equation.outputs)
            if equation.op.is_foreign and any(wanted) and any(followed):
                with suppress(Exception):  # who asks for the derivative sees it
                    vjp_rule(alone(equation), wanted, followed)


def is_autograds(trace: Trace) -> bool:
    """Test whether autograd's derivatives of leaves, of any order, are those of our rules: neither
    an op nor its backward has a rule of another kind.
    """
    return not any(ruled(trace)) and not any(
        map(_has_ruled_backward, dict.fromkeys(map(alone, trace.equations)))
    )


@kept_rules(65536)
def _has_ruled_backward(single: Trace) -> bool:
    (equation,) = single.equations
    wanted = tuple(is_differentiable(var.type) for var in equation.operands)
    followed = tuple(is_differentiable(var.type) for var in equation.outputs)
    if not any(wanted) or not any(followed) or ops.is_constant(equation.op):
        return False
    try:
        rule = vjp_rule(single, wanted, followed)
    except MissingRule:  # for all operands at once
        return True
    return isinstance(rule, Trace) or any(
        one.op.name in _OTHERWISE or one.op.kind != "leaf" for one in rule.backward.equations
    )


def _has_rule(single: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> bool:
    try:
        vjp_rule(single, wanted_inputs, wanted_outputs)
    except MissingRule:
        return False
    return True


_OTHERWISE = frozenset((ops.NO_GRAD.name, *DIFFERENTIABLE, *ONCE, *STATISTICS, *NOT_PUSHED))
"""Ops whose rules are not autograd's first answer."""


def _zero_split(single: Trace, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
    """The split of an op that no derivative goes through."""
    (equation,) = single.equations
    types = [
        var.type for var, wanted in zip(equation.outputs, wanted_outputs, strict=True) if wanted
    ]
    backward = Trace(
        tuple(Var(i, type) for i, type in enumerate(types)), (), (), (), (), "backward"
    )
    return Split(single, backward, (), (None,) * sum(wanted_inputs))


def _twofold(computed: Split, differentiated: Split) -> Split:
    """A backward that is computed by one split and differentiated by another, of the same op and
    question.
    """
    if computed.backward == differentiated.backward:
        return computed
    if differentiated.num_extra or computed.gradients != differentiated.gradients:
        return differentiated
    if fixes_numbers(computed.backward) and not fixes_numbers(differentiated.backward):
        return differentiated
    residuals = tuple(dict.fromkeys((*computed.residuals, *differentiated.residuals)))
    types = {
        residual: type
        for split in (computed, differentiated)
        for residual, type in zip(split.residuals, split.backward.input_types, strict=False)
    }
    builder = TraceBuilder("backward")
    cotangents = computed.backward.input_types[len(computed.residuals) :]
    inputs = tuple(
        builder.input(type) for type in (*(types[residual] for residual in residuals), *cotangents)
    )
    bodies = tuple(_on_residuals(split, residuals, inputs) for split in (computed, differentiated))
    results = builder.add(
        ops.DIFFERENTIATED_AS, inputs, computed.backward.output_types, bodies=bodies
    )
    return Split(computed.forward, builder.build(results), residuals, computed.gradients)


def _on_residuals(split: Split, residuals: tuple[Residual, ...], inputs: tuple[Var, ...]) -> Trace:
    """The backward of a split as a trace of more residuals than it reads."""
    # Before: own residuals, cotangents -> gradients
    # After:  residuals, cotangents -> gradients; those that are not its own have indices below 0
    trace, count = split.backward, len(split.residuals)
    own = dict(zip(split.residuals, trace.inputs, strict=False))
    spare = range(-1, -1 - len(residuals), -1)
    given = (
        own.get(r) or Var(i, var.type) for i, r, var in zip(spare, residuals, inputs, strict=False)
    )
    taken = (*given, *trace.inputs[count:])
    return cut(trace, inputs=taken)


def _ask_autograd(
    single: Trace,
    wanted_inputs: Mask,
    wanted_outputs: Mask,
    transposed: Mask,
    call: Call,
    *,
    again: bool = False,
) -> Split:
    """The split by autograd's formula; `again`, by one that can be differentiated again."""
    (equation,) = single.equations
    layouts = zip(single.inputs, transposed or (False,) * len(single.inputs), strict=True)
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running(), recorder.mode.assuming(True, ill_defined(equation)):
        types = ((var.type, flag) for var, flag in layouts if isinstance(var.type, TensorType))
        tracers = [recorder.input_of_type(type, is_transposed=flag) for type, flag in types]
        asked = [tracer.requires_grad_() for tracer in chosen(tracers, wanted_inputs)]
        if equation.op in _READS_LAYOUT or equation.op.name in facts.READ_AS_CONTIGUOUS:
            recorder.contiguous.update(var.index for var in recorder.inputs)
        read: Callable[[Var], Any] = lambda var: tracers[var.index]
        results = call(equation, read)
        outputs = tuple(_atom(recorder, result) for result in results)
        held = [*zip(tracers, recorder.inputs, strict=True), *zip(results, outputs, strict=True)]
        forward_items = len(recorder.root.items)
        if again:
            results = _differentiable_again(recorder, equation, read) or results
        wanted = chosen(results, wanted_outputs)
        given = _cotangents(recorder, chosen(equation.outputs, wanted_outputs), wanted)
        flags = [result is not None and result.requires_grad for result in wanted]
        if not any(flags):
            return _split(recorder, forward_items, outputs, [None] * len(asked), len(tracers))
        ends, cotangents = chosen(wanted, flags), chosen(given, flags)
        grads = torch.autograd.grad(ends, asked, cotangents, allow_unused=True, create_graph=again)
        if equation.op.name == determinant.DET and not again:
            grads = [torch.ops.thunder_fn.det_gradient(*grads, *tracers, *ends, *cotangents)]
        gradients = [None if grad is None else recorder.var_of(grad) for grad in grads]
        _check_unwritten(recorder, equation, held)
    return _split(recorder, forward_items, outputs, gradients, len(tracers))


def _cotangents(
    recorder: Recorder, outputs: Sequence[Var], results: Sequence[Any]
) -> list[torch.Tensor]:
    """Tracers of the cotangents of an equation's outputs, of which these are the results."""
    return [
        recorder.input_of_type(var.type if result is None else _tensor_type(result))
        for var, result in zip(outputs, results, strict=True)
        if isinstance(var.type, TensorType)
    ]


def _check_unwritten(
    recorder: Recorder, equation: Equation, held: Sequence[tuple[Any, Atom]]
) -> None:
    """Refuse the derivative of a custom op that writes to what the op read or returned.

    Args:
        held: the tensors that the backward could keep, and what they were before it.
    """
    if all(
        _atom(recorder, value) == atom for value, atom in held if isinstance(value, torch.Tensor)
    ) and not any(recorder.is_written(constant.tensor) for constant in recorder.constants):
        return
    raise MissingRule(
        f"vjp: the backward of {equation.op} writes in place to a tensor that it did not make, but"
        " a derivative computes new values only",
        source=equation.source,
        fix="Write to a copy (`x = x.clone()`), or do this outside of the traced function.",
    )


def _differentiable_again(
    recorder: Recorder, equation: Equation, read: Callable[[Var], Any]
) -> tuple[Any, ...] | None:
    """The results of an op by ops that have all derivatives, None if its own have."""
    if equation.op.name in STATISTICS:
        return with_own_statistics(recorder, equation, read)
    if equation.op.name == determinant.DET:
        return torch.ops.thunder_fn.det(read(equation.operands[0])), None, None
    if (formula := AGAIN.get(equation.op.name)) is not None:
        args, kwargs = python_args(equation, read)
        return ops.flatten_result(formula(*args, **kwargs))
    return attention_by_meaning(equation, read) if equation.op.name in attention.KERNELS else None


def attention_by_meaning(equation: Equation, read: Callable[[Var], Any]) -> tuple[Any, ...]:
    """The results of an attention kernel with plain ops, None where no derivative goes through.

    Raises:
        MissingRule: the kernel draws numbers that no other op can draw.
    """
    args, kwargs = python_args(equation, read)
    results = attention.meaning(ops.overload(equation.op), args, kwargs)
    if results is not NotImplemented:
        return ops.flatten_result(results)
    raise MissingRule(
        f"{equation.op} with dropout has a first derivative in reverse mode only, since no"
        " other op can draw its numbers",
        source=equation.source,
        fix=(
            "Call it with `dropout_p=0.0`, or inside of"
            " `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`."
        ),
    )


@kept_rules(4096)
def meaning_of_attention(single: Trace) -> Trace:
    """An attention kernel with plain ops; the results that no derivative goes through are the
    kernel's own.
    """
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running():
        tracers = recorder.inputs_of_types(single.input_types)
        stops = [
            recorder.emit(ops.STOP_GRADIENT, (var,), (var.type,), ())[0] for var in recorder.inputs
        ]
        stopped = [recorder.tracer_of(stop) for stop in stops]
        own = call_constant(equation, lambda var: stopped[var.index])
        results = attention_by_meaning(equation, lambda var: tracers[var.index])
        chosen = [
            result if given is None else given for given, result in zip(results, own, strict=True)
        ]
        return close_recording(recorder, chosen, f"{equation.op.name}_parts")


def ill_defined(equation: Equation) -> str:
    """Explain a failed check inside a derivative."""
    return (
        f"{equation.op}: a condition of its derivative does not hold, so that the result is not"
        " well-defined"
    )


@kept_rules(65536)
def differentiable_outputs(single: Trace, active: Mask) -> Mask:
    """Tell which outputs of a leaf autograd follows when the active inputs require grad.

    Statistics that an op saves for its backward are constants, such as the mean of a layer_norm.
    PyTorch's formulas count what they depend on among the gradients of the inputs. Ops that
    autograd does not know follow every output.
    """
    (equation,) = single.equations
    possible = tuple(is_differentiable(var.type) for var in equation.outputs)
    if sum(possible) < 2:
        return possible
    asked = _followed(single, active)
    if asked is None:  # one operand has no derivative, such as a running mean: ask about each
        places = [place for place, flag in enumerate(active) if flag]
        each = (
            _followed(single, tuple(i == place for i in range(len(active)))) for place in places
        )
        masks = [found for found in each if found is not None]
        asked = tuple(map(any, zip(*masks, strict=True)))
    return asked if any(asked) else possible


def _followed(single: Trace, active: Mask) -> Mask | None:
    """Tell which outputs autograd follows; None if it refuses one of the active inputs."""
    (equation,) = single.equations
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running():
        tracers = recorder.inputs_of_types(single.input_types)
        for tracer, flag in zip(tracers, active, strict=True):
            tracer.requires_grad_(flag)
        try:
            results = call_differentiable(equation, lambda var: tracers[var.index])
        except CANNOT:
            return None
        return tuple(isinstance(one, torch.Tensor) and one.requires_grad for one in results)


def _tensor_type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tensor.dtype, tuple(map(as_dim, tensor.shape)), tensor.device)


def _atom(recorder: Recorder, value: Any) -> Atom:
    if isinstance(value, torch.Tensor):
        var = recorder.var_of(value)
        assert var is not None, "results of a recorded op are tracers"
        return var
    return Literal(value)


def _split(
    recorder: Recorder,
    boundary: int,
    outputs: tuple[Atom, ...],
    gradients: list[Var | None],
    num_inputs: int,
) -> Split:
    """Cut the recording where the cotangents came in."""
    # Before: recorded equations: inputs -> outputs | cotangents -> gradients
    # After:  forward:  inputs -> outputs, extra residuals
    #         backward: residuals, cotangents -> gradients that are there
    inputs, cotangents = recorder.inputs[:num_inputs], recorder.inputs[num_inputs:]
    leaves = [item for item in recorder.root.items if isinstance(item, Leaf)]
    before, after = leaves[:boundary], leaves[boundary:]
    wanted = [grad for grad in gradients if grad is not None]
    backward, needed = _live_equations(after, wanted)
    known = {var.index for var in cotangents} | {
        constant.var.index for constant in recorder.constants
    }
    known |= {var.index for var in bound(backward)}
    residuals = [var for var in needed if var.index not in known]
    places = [_place(var, inputs, outputs) for var in residuals]
    extras = [var for var, place in zip(residuals, places, strict=True) if place is None]
    forward, _ = _live_equations(
        before, [*(atom for atom in outputs if isinstance(atom, Var)), *extras]
    )
    constants, given = tuple(recorder.constants), recorder.decisions.constraints
    counter = iter(range(len(extras)))
    return Split(
        canonical(tuple(inputs), tuple(forward), (*outputs, *extras), constants, given, "forward"),
        canonical(
            (*residuals, *cotangents), tuple(backward), tuple(wanted), constants, given, "backward"
        ),
        tuple(place or Residual("extra", next(counter)) for place in places),
        tuple(_positions(gradients)),
    )


def _positions(gradients: list[Var | None]) -> list[int | None]:
    counter = iter(range(len(gradients)))
    return [None if grad is None else next(counter) for grad in gradients]


def _place(var: Var, inputs: list[Var], outputs: tuple[Atom, ...]) -> Residual | None:
    if var in inputs:
        return Residual("input", inputs.index(var))
    if var in outputs:
        return Residual("output", outputs.index(var))
    return None


def _live_equations(leaves: list[Leaf], wanted: list[Var]) -> tuple[list[Equation], list[Var]]:
    """The equations that are needed for `wanted`, and every variable they and `wanted` read, in
    order of first use.
    """
    found = needed(leaves, {var.index for var in wanted}, lambda leaf: not leaf.outputs)
    kept = [Equation(one.op, one.args, one.kwargs, one.outputs, (), one.source) for one in found]
    reads = {var.index: var for var in operands_in(kept)}
    reads |= {var.index: var for var in wanted if var.index not in reads}
    return kept, list(reads.values())


# ---- decompositions ----


def decomposition(single: Trace) -> Trace | None:
    """Decompose a leaf into other leaves by PyTorch's tables or ours; None if neither knows it."""
    (equation,) = single.equations
    _refuse_hidden(equation)
    function = DECOMPOSITIONS.get(equation.op.name) or internals.decomposition_of(
        ops.overload(equation.op)
    )
    if function is None:
        return None
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running():
        tracers = recorder.inputs_of_types(single.input_types)
        args, kwargs = python_args(equation, lambda var: tracers[var.index])
        try:
            result = function(*args, **kwargs)
        except (
            internals.DATA_DEPENDENT_VALUE,
            internals.DATA_DEPENDENT_SHAPE,
            internals.NEEDS_A_NUMBER,
        ):
            return None
        if result is NotImplemented:
            return None
        trace = close_recording(recorder, list(ops.flatten_result(result)), equation.op.name)
    names = names_of(trace.output_types, single.output_types)
    trace = renamed(names)(trace) if names else trace
    is_itself = any(alone(inner) == single for inner in trace.equations)
    return (
        _constant_statistics(single, trace)
        if trace.output_types == single.output_types and not is_itself
        else None
    )


def _constant_statistics(single: Trace, parts: Trace) -> Trace:
    """Stop derivatives at the statistics, through which the op itself has none."""
    floating = tuple(is_differentiable(type) for type in single.input_types)
    followed = differentiable_outputs(single, floating)
    if all(
        flag or not is_differentiable(type)
        for flag, type in zip(followed, single.output_types, strict=True)
    ):
        return parts
    stops = [
        Equation(ops.STOP_GRADIENT, (atom,), (), (Var(-1 - place, type),))
        for place, (atom, type, flag) in enumerate(
            zip(parts.outputs, parts.output_types, followed, strict=True)
        )
        if is_differentiable(type) and not flag
    ]
    stopped = {-1 - var.index: var for stop in stops for var in stop.outputs}
    outputs = tuple(stopped.get(place, atom) for place, atom in enumerate(parts.outputs))
    return cut(parts, equations=(*parts.equations, *stops), outputs=outputs)


def close_recording(recorder: Recorder, results: list[Any], name: str) -> Trace:
    """The flat trace of the records that the results need. Called while the recorder runs."""
    outputs = tuple(_atom(recorder, value) for value in results)
    leaves = [item for item in recorder.root.items if isinstance(item, Leaf)]
    equations, _ = _live_equations(leaves, [atom for atom in outputs if isinstance(atom, Var)])
    constants, constraints = tuple(recorder.constants), recorder.decisions.constraints
    return canonical(
        tuple(recorder.inputs), tuple(equations), outputs, constants, constraints, name
    )
