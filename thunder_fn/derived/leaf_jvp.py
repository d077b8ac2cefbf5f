"""Forward-mode rules of leaf ops, derived from PyTorch's forward AD formulas.

If PyTorch has no forward formula, or one that cannot be differentiated again, the op is decomposed.
Without a decomposition the rule comes from two vjps. The vjp is linear in the cotangent, and the
transpose of that linear map is the jvp.

The values beside the tangents are those of the op, bitwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import Recorder
from thunder_fn.derived.attempts import Attempt, Declined, first_rule, kept_rules
from thunder_fn.derived.decompositions import NOT_PUSHED, PUSHED_ONCE
from thunder_fn.derived.leaf_vjp import (
    CANNOT,
    call_differentiable,
    close_recording,
    decomposition,
    differentiable_outputs,
    ill_defined,
    is_differentiable,
    meaning_of_attention,
)
from thunder_fn.derived.quirks import attention, collectives
from thunder_fn.derived.quirks.statistics import STATISTICS, with_own_statistics
from thunder_fn.errors import MissingRule
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import names_of, pinned, renamed
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.rules import JvpRule, Mask, chosen, scattered
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Op,
    Trace,
    TraceBuilder,
    Var,
    map_arg,
    map_args,
    python_args,
    vars_in,
)
from thunder_fn.ir.walking import inline_into

_ZEROS = Op("leaf", "aten.zeros_like.default")
_ADD = Op("leaf", "aten.add.Tensor")
_NOT_LINEAR = frozenset((*facts.PARTS_LINEAR_IN, ops.STOP_GRADIENT.name, "aten.view.dtype"))
"""Views and backwards that are not linear, or not in the same operands for each result."""


@dataclass(frozen=True, slots=True)
class JvpQuestion:
    """A question for the rule of forward mode: one equation, `alone`, and which operands have
    tangents.
    """

    single: Trace
    active: Mask

    @property
    def equation(self) -> Equation:
        """The one equation."""
        return self.single.equations[0]


def _by_linearity(question: JvpQuestion) -> JvpRule | Declined:
    collectives.check_derivative(question.equation, reverse=False)
    if not collectives.is_linear(question.equation) or not all(question.active):
        return Declined("the op is no linear collective")
    return collectives.pushed(question.single, question.active)


def _by_blocks(question: JvpQuestion) -> JvpRule | Declined:
    if question.equation.op.name not in attention.PUSHED:
        return Declined("the op is not an attention kernel")
    rule = _attention_in_blocks(question.single, question.active)
    return Declined("it drops weights, or a mask has a tangent") if rule is None else rule


def _by_meaning(question: JvpQuestion) -> Trace | Declined:
    if question.equation.op.name not in attention.ALL:
        return Declined("the op is not an attention kernel")
    return meaning_of_attention(question.single)


def _by_parts_first(question: JvpQuestion) -> Trace | Declined | None:
    name = question.equation.op.name
    if name in PUSHED_ONCE:
        return None
    if name.startswith("aten.") and name not in NOT_PUSHED:
        return Declined("PyTorch's formula is right")
    # PyTorch takes the tangents of custom ops for zero, without a word
    return decomposition(question.single)


def _by_own_statistics(question: JvpQuestion) -> Trace | Declined:
    own = own_statistics(question.single)
    return Declined("the op is not the backward of a normalization") if own is None else own


def _by_one_term(question: JvpQuestion) -> JvpRule | Declined:
    """Give the tangent of the one term of a sum that has one."""
    equation, active = question.equation, chosen(question.single.inputs, question.active)
    if equation.op not in facts.ADDS or len(active) != 1:
        return Declined("the op is no sum, or two terms have tangents")
    first, second = equation.args[:2]
    is_kept = active[0] == first or (equation.op.name == "aten.add.Tensor" and not equation.kwargs)
    if first == second or not is_kept or active[0].type != equation.outputs[0].type:
        return Declined("the term is doubled, multiplied or broadcast")
    builder = TraceBuilder(f"{equation.op.name}_jvp")
    primals = builder.take(question.single.input_types)
    (tangent,) = builder.take([active[0].type])
    (value,) = builder.copy(equation, lambda var: primals[var.index])
    return JvpRule(builder.build((value, tangent)), (True,))


def _by_terms(question: JvpQuestion) -> JvpRule | Declined:
    """Put the tangents in the place of what the op is linear in: of a product, one factor at a
    time, and the sum of these terms.
    """
    equation, active = question.equation, chosen(question.single.inputs, question.active)
    if equation.op.name in _NOT_LINEAR or not all(
        is_differentiable(type) for type in equation.output_types
    ):
        return Declined("the op is not linear in an operand")
    sets = _linear_sets(equation, set(active))
    if sets is None:
        return Declined("the op is not linear in the operands with tangents")
    builder = TraceBuilder(f"{equation.op.name}_jvp")
    primals = builder.take(question.single.input_types)
    tangents = dict(zip(active, builder.take([var.type for var in active]), strict=True))
    results = builder.copy(equation, lambda var: primals[var.index])
    terms = [_term(builder, equation, places, primals, tangents) for places in sets]
    pushed = list(terms[0])
    for term in terms[1:]:
        pairs = zip(pushed, term, strict=True)
        pushed = [builder.add(_ADD, (a, b), (a.type,))[0] for a, b in pairs]
    return JvpRule(builder.build((*results, *pushed)), (True,) * len(results))


def _linear_sets(equation: Equation, active: set[Var]) -> list[tuple[int, ...]] | None:
    """The sets of places in which the op is linear and that hold all tangents; None if a tangent
    is elsewhere, or beside something in its set that has none.
    """
    places = {place for place, arg in enumerate(equation.args) if active & set(vars_in(arg))}
    if any(active & set(vars_in(arg)) for _, arg in equation.kwargs):
        return None
    sets = [one for one in ops.linear_in(equation.op) if places & set(one)]
    held = [place for one in sets for place in one]
    are_apart = len(held) == len(set(held))
    covered = places <= set(held) and all(
        _moves(arg, active) for place, arg in enumerate(equation.args) if place in held
    )
    return sets if are_apart and covered else None


def _moves(arg: Arg, active: set[Var]) -> bool:
    """Test whether all that an argument holds has a tangent, or is nothing."""
    if isinstance(arg, tuple):
        return all(_moves(item, active) for item in arg)
    return arg in active if isinstance(arg, Var) else arg.value is None or arg.value == 0


def _term(
    builder: TraceBuilder,
    equation: Equation,
    places: tuple[int, ...],
    primals: tuple[Var, ...],
    tangents: dict[Var, Var],
) -> tuple[Var, ...]:
    """The op on tangents in these places, on primals in the others."""
    args = tuple(
        map_arg(tangents.__getitem__ if place in places else lambda var: primals[var.index], arg)
        for place, arg in enumerate(equation.args)
    )
    _, kwargs = map_args(lambda var: primals[var.index], equation)
    return builder.add(equation.op, args, equation.output_types, kwargs=kwargs)


def _by_all_operands(question: JvpQuestion) -> JvpRule | Declined:
    """Put zeros in place of missing tangents, in each of which a product is linear. Those of
    PyTorch's forward AD would fix the sizes.
    """
    wanted = tuple(map(is_differentiable, question.single.input_types))
    if question.equation.op not in facts.MATMULS or question.active == wanted:
        return Declined("the op is no product, or all operands have tangents")
    rule = jvp_rule(question.single, wanted)
    if not isinstance(rule, JvpRule):
        return Declined("there is no rule for tangents of all operands")
    builder = TraceBuilder(rule.trace.name)
    primals = builder.take(question.single.input_types)
    given = iter(builder.take(chosen(question.single.input_types, question.active)))
    tangents = [
        next(given) if flag else builder.add(_ZEROS, (primal,), (primal.type,))[0]
        for primal, flag in chosen(zip(primals, question.active, strict=True), wanted)
    ]
    outputs = inline_into(builder, rule.trace, (*primals, *tangents))
    return JvpRule(builder.build(outputs), rule.active_outputs)


def _by_forward_ad(question: JvpQuestion) -> JvpRule | Trace | Declined | None:
    try:
        with (
            warnings.catch_warnings()
        ):  # PyTorch's own table of decompositions is scripted when it is first used
            warnings.filterwarnings(
                "ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning
            )
            rule = _ask_forward_ad(question.single, question.active)
    except CANNOT as error:
        return Declined.by(error)
    reads = _reads_statistics(question.single, question.active, rule.trace)
    return decomposition(question.single) if reads else rule


def _by_fixed_numbers(question: JvpQuestion) -> Trace | Declined:
    found = pinned(question.single)
    return Declined("no number of the equation is a symbol") if found is None else found


def _by_parts(question: JvpQuestion) -> Trace | Declined:
    found = decomposition(question.single)
    return Declined("PyTorch has no decomposition") if found is None else found


JVP_ATTEMPTS: tuple[Attempt[JvpQuestion, JvpRule | Trace | None], ...] = (
    Attempt("linear collective", _by_linearity),
    Attempt("attention in blocks", _by_blocks),
    Attempt("definition of attention", _by_meaning),
    Attempt("decomposition in place of forward AD", _by_parts_first),
    Attempt("statistics computed anew", _by_own_statistics),
    Attempt("the tangent of one term", _by_one_term),
    Attempt("the op on the tangents", _by_terms),
    Attempt("forward AD with tangents of all operands", _by_all_operands),
    Attempt("forward AD", _by_forward_ad),
    Attempt("forward AD for fixed numbers", _by_fixed_numbers),
    Attempt("decomposition", _by_parts),
)
"""The attempts at a rule for forward mode, in order. None says that two vjps are to give it."""


@kept_rules(65536)
def jvp_rule(single: Trace, active: Mask) -> JvpRule | Trace | None:
    """The jvp of one leaf equation, or its decomposition; None where neither PyTorch nor a
    decomposition knows it.
    """
    return first_rule(JVP_ATTEMPTS, JvpQuestion(single, active)).rule


def _attention_in_blocks(single: Trace, active: Mask) -> JvpRule | None:
    """The op, then the tangents of its first results; None where ops of ours do not compute
    these.
    """
    (equation,) = single.equations
    op = ops.overload(equation.op)
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running():
        tracers = recorder.inputs_of_types(single.input_types)
        pushed = scattered(recorder.inputs_of_types(chosen(single.input_types, active)), active)
        read: Callable[[Var], Any] = lambda var: tracers[var.index]
        args, kwargs = python_args(equation, read)
        given = internals.named_arguments(op, args, kwargs)
        places = internals.named_arguments(op, equation.args, dict(equation.kwargs))
        moved = {
            name: pushed[arg.index]
            for name, arg in places.items()
            if isinstance(arg, Var) and pushed[arg.index] is not None
        }
        found = attention.tangents(op, given, moved)
        if found is None:
            return None
        results = call_differentiable(equation, read)
        flags = tuple(
            i < len(found) and isinstance(result, torch.Tensor) for i, result in enumerate(results)
        )
        tangents = [one for one, flag in zip(found, flags, strict=False) if flag]
        trace = close_recording(recorder, [*results, *tangents], f"{equation.op.name}_jvp")
    return JvpRule(trace, flags)


def own_statistics(single: Trace) -> Trace | None:
    """The backward of a normalization in other leaves, its statistics computed anew; None for
    other ops.
    """
    (equation,) = single.equations
    if equation.op.name not in STATISTICS:
        return None
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running():
        tracers = recorder.inputs_of_types(single.input_types)
        results = with_own_statistics(recorder, equation, lambda var: tracers[var.index])
        return (
            None if results is None else close_recording(recorder, list(results), equation.op.name)
        )


def _reads_statistics(single: Trace, active: Mask, pushed: Trace) -> bool:
    """Test whether the tangents are computed from what the op saves for its backward (a mean, the
    factors of a matrix).

    PyTorch's formulas take that for constant, so that they are right once but have wrong
    derivatives themselves.
    """
    outputs = single.equations[0].outputs
    followed = differentiable_outputs(single, active)
    pairs = zip(outputs, followed, pushed.outputs, strict=False)
    saved = {
        atom.index
        for var, flag, atom in pairs
        if not flag and is_differentiable(var.type) and isinstance(atom, Var)
    }
    return any(var.index in saved for var in operands_in(pushed.equations))


def _ask_forward_ad(single: Trace, active: Mask) -> JvpRule:
    (equation,) = single.equations
    internals.load_forward_decompositions()
    recorder = Recorder(track_no_grad=False, symbolic=is_symbolic(single))
    with recorder.running(), recorder.mode.assuming(True, ill_defined(equation)):
        tracers = recorder.inputs_of_types(single.input_types)
        tangents = recorder.inputs_of_types(chosen(single.input_types, active))
        places = [index for index, flag in enumerate(active) if flag]
        present: list[bool] = []

        def run(*primals: torch.Tensor) -> Any:
            values = list(tracers)
            for index, primal in zip(places, primals, strict=True):
                values[index] = primal
            results = call_differentiable(equation, lambda var: values[var.index])
            present.extend(isinstance(result, torch.Tensor) for result in results)
            return tuple(result for result in results if isinstance(result, torch.Tensor))

        primals = tuple(tracers[index] for index in places)
        both: Any = torch.func.jvp(run, primals, tuple(tangents))
        outputs, tangents_out = both
        flags = [is_differentiable(type) for type in chosen(equation.output_types, present)]
        found = [
            tangent.to(result.dtype)  # PyTorch gives float64 for a float32 scalar times 1.5
            for tangent, result in chosen(zip(tangents_out, outputs, strict=True), flags)
        ]
        results = [*scattered(outputs, present), *found]
        trace = close_recording(recorder, results, f"{equation.op.name}_jvp")
    names = names_of(trace.output_types, single.output_types)
    trace = renamed(names)(trace) if names else trace
    return JvpRule(trace, tuple(map(bool, scattered(flags, present))))


def missing_jvp(single: Trace) -> MissingRule:
    """The error for a leaf without a forward derivative."""
    (equation,) = single.equations
    return MissingRule(
        f"jvp: PyTorch has neither a forward derivative nor a decomposition for {equation.op}",
        source=equation.source,
        fix="Write it with other ops, put `custom_jvp` around it, or use reverse mode.",
    )
