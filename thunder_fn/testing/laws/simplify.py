"""Postconditions of dce, cse, inline, drop_noops and fold_constants: what each is for.

The law of check_errors is here, too: its code is that of the first NaN that PyTorch computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_fn.interpreters import simplify
from thunder_fn.interpreters.check_errors import KINDS, check_errors
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.memory import is_alias
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, every_equation, subtraces
from thunder_fn.testing.laws.comparing import (
    Inputs,
    holds,
    is_inexact,
    leaf_counts,
    num_equations,
    run,
    seeded,
)


def drops_the_dead(before: Trace, after: Trace) -> bool:
    """Never grow a trace; what is left is used, random or effectful, in bodies too."""
    small = num_equations(after) <= num_equations(before)
    holds(small, "equations were added", trace=before, made=after)
    for inner in _outside_operators(after):
        used = {var.index for var in operands_in(inner.equations)}
        used |= {atom.index for atom in inner.outputs if isinstance(atom, Var)}
        for equation in inner.equations:
            live = any(var.index in used for var in equation.outputs)
            live = live or ops.has_side_effect(equation)
            holds(live, f"{equation.op} is left, which nothing uses", trace=before, made=after)
            what = f"{equation.op} is given what its body does not read"
            holds(not _takes_the_dead(equation), what, trace=before, made=after)
    _keeps_calls(before, after)
    return True


def _takes_the_dead(equation: Equation) -> bool:
    """Test for a composite, but no user's call and no operator, whose body does not read all."""
    op = equation.op
    if op.kind != "composite" or ops.is_call(op) or ops.is_operator(op):
        return False
    body = equation.body
    return not {*operands_in(body.equations), *body.outputs}.issuperset(body.inputs)


def _keeps_calls(before: Trace, after: Trace) -> None:
    """Executors' operators stay whole, and a user's call whose results are all used stays as
    written.
    """
    given = list(every_equation(before))
    operators = {(e.op, e.bodies) for e in given if ops.is_operator(e.op)}
    calls = {(ops.short_name(e.op), len(e.outputs)) for e in given if ops.is_call(e.op)}
    own = {(e.op.name, len(e.outputs)) for e in given if not ops.is_call(e.op)}
    opened = {ops.short_name(op) for op, _ in operators} - {name for name, _ in own}
    for equation in every_equation(after):
        name = (equation.op.name, len(equation.outputs))
        whole = not ops.is_operator(equation.op) or (equation.op, equation.bodies) in operators
        whole = whole and equation.op.name not in opened - {one for one, _ in calls}
        holds(whole, f"the operator {equation.op} was opened", trace=before, made=after)
        kept = name not in calls - own
        holds(kept, f"the call {equation.op} lost its arguments", trace=before, made=after)


def _outside_operators(trace: Trace) -> Iterator[Trace]:
    """The trace and the bodies in it; an executor's operator is computed as a whole."""
    yield trace
    for equation in trace.equations:
        if not ops.is_operator(equation.op):
            for body in equation.bodies:
                yield from _outside_operators(body)


def leaves_no_twins(before: Trace, after: Trace) -> bool:
    """No two equations are the same, unless they are random; the trace never grows."""
    small = num_equations(after) <= num_equations(before)
    holds(small, "equations were added", trace=before, made=after)
    for inner in subtraces(after):
        kept = [
            (e.op, e.args, e.kwargs, e.bodies)
            for e in inner.equations
            if not ops.has_side_effect(e)
        ]
        holds(len(kept) == len(set(kept)), "an equation stands twice", trace=before, made=after)
    return True


def leaves_no_composites(before: Trace, after: Trace) -> bool:
    """All equations are leaves or structured, in bodies too, the same leaves as before."""
    left = [e for e in every_equation(after) if e.op.kind == "composite"]
    holds(not left, "a composite is left", trace=before, made=after)
    same = leaf_counts(after) == leaf_counts(before)
    holds(same, "the leaves changed", trace=before, made=after)
    return True


SAME_PLACES = frozenset(
    f"aten.{name}"
    for name in (
        *("reshape.default", "view.default", "_unsafe_view.default", "expand.default"),
        *("squeeze.default", "squeeze.dim", "squeeze.dims", "slice.Tensor"),
    )
)
"""Views that move no element where they keep the type."""

NEUTRAL = {
    **dict.fromkeys(("mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar"), 1),
    "pow.Tensor_Scalar": 1,
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), 0),
}
"""The second operand of floats that changes no bit of the first."""


def leaves_no_noops(before: Trace, after: Trace) -> bool:
    """No reshape to the same shape is left, and no product with one, quotient by one or difference
    with zero that stays inside.
    """
    for inner in subtraces(after):
        inside = _inside(inner)
        views = {var for e in inner.equations if is_alias(e.op) for var in e.outputs}
        for equation in inner.equations:
            what = f"{equation.op} is left, which computes its operand"
            holds(not _is_noop(equation, inside, views), what, trace=before, made=after)
    return True


def _inside(trace: Trace) -> set[Var]:
    """The variables that only leaves read which make new memory."""
    found = {var for equation in trace.equations for var in equation.outputs}
    for equation in trace.equations:
        if equation.op.kind != "leaf" or not ops.is_pointwise(equation.op):
            found -= set(equation.operands)
    return found - set(trace.outputs)


def _is_noop(equation: Equation, inside: set[Var], views: set[Var]) -> bool:
    if equation.op.kind != "leaf" or len(equation.outputs) != 1 or not equation.args:
        return False
    first, name = equation.args[0], equation.op.name.removeprefix("aten.")
    if not isinstance(first, Var) or first.type != equation.outputs[0].type:
        return False
    if equation.op.name in SAME_PLACES:
        return True
    if name == "clone.default" and not equation.kwargs and first in inside - views:
        return True
    second = equation.args[1] if len(equation.args) == 2 and not equation.kwargs else None
    return (
        isinstance(second, Literal)
        and name in NEUTRAL
        and equation.outputs[0] in inside
        and not isinstance(second.value, bool)
        and repr(float(second.value)) == repr(float(NEUTRAL[name]))
    )


def leaves_no_known(before: Trace, after: Trace) -> bool:
    """No leaf is left that computes with owned constants alone, draws nothing, and whose small
    result stays inside.
    """
    for inner in subtraces(after):
        owned = {constant.var for constant in inner.constants if constant.owned}
        inside = _inside(inner)
        for equation in inner.equations:
            known = (
                equation.op.kind == "leaf"
                and bool(equation.operands)
                and owned.issuperset(equation.operands)
                and inside.issuperset(equation.outputs)
                and all(isinstance(var.type, TensorType) for var in equation.outputs)
                and not ops.has_side_effect(equation)
            )
            holds(not known, f"{equation.op} of constants is left", trace=before, made=after)
    return True


ENSURED_BY: Mapping[str, Callable[[Trace, Trace], bool]] = MappingProxyType(
    {
        "dce": drops_the_dead,
        "cse": leaves_no_twins,
        "inline": leaves_no_composites,
        "drop_noops": leaves_no_noops,
        "fold_constants": leaves_no_known,
    }
)
"""The postcondition of each."""


# ---- laws of single interpreters ----


def law_dce_drops_the_dead(trace: Trace, inputs: Inputs) -> None:
    """dce never grows a trace, and what it leaves is used, random or effectful; in bodies too."""
    drops_the_dead(trace, simplify.dce(trace))


def law_cse_leaves_no_twins(trace: Trace, inputs: Inputs) -> None:
    """After cse no two equations are the same, unless they are random; it never grows a trace."""
    leaves_no_twins(trace, simplify.cse(trace))


def law_inline_leaves_no_composites(trace: Trace, inputs: Inputs) -> None:
    """After inline all equations are leaves or structured, the same leaves as before."""
    leaves_no_composites(trace, simplify.inline(trace))


# ---- check_errors ----


class _Watching(TorchDispatchMode):
    """The ops that computed NaN, in order, as PyTorch runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = ops.leaf(func)
        if ops.is_view(op) or op in facts.MOVES or op in facts.EMPTY:
            return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        floats = [x for x in results if isinstance(x, torch.Tensor) and is_inexact(x)]
        if any(bool(x.isnan().any()) for x in floats):
            self.seen.append(op.name)
        return result


def law_check_errors_finds_nan(trace: Trace, inputs: Inputs) -> None:
    """The code is that of the first op that computes NaN, or 0: on these inputs, and on NaN."""
    trace = dce(trace)
    new, checks = check_errors(trace, KINDS)
    poisoned = tuple(torch.full_like(x, torch.nan) if is_inexact(x) else x for x in inputs)
    for given in (inputs, poisoned):
        watching = _Watching()
        with watching:
            seeded(lambda given=given: evaluate(trace, given))
        code = int(run(new, given)[-1])
        first = watching.seen[0] if watching.seen else "none"
        told = checks[code - 1].text.split()[0] if code else "none"
        is_known = code == 0 or "." in told  # of an op without a rule the results are looked at
        holds(not is_known or told == first, f"{told} for {first}", checked=new)
