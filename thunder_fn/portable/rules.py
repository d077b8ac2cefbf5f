"""Custom rules as data: a rule whose functions have become bodies needs nothing of Python."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from thunder_fn.errors import ThunderError
from thunder_fn.ir.trace import Equation, Literal
from thunder_fn.portable.errors import refused
from thunder_fn.structured import custom_jvp, custom_vjp
from thunder_fn.structured.call import CALL
from thunder_fn.structured.shared.custom_calls import BatchedRule, Rule, RuleOfBodies


def _vjp_bodies(equation: Equation) -> Equation:
    everything = (True,) * len(equation.operands), (True,) * len(equation.outputs)
    return custom_vjp.expanded(equation, *everything)


_EXPANDED: dict[str, Callable[[Equation], Equation]] = {
    "custom_vjp": _vjp_bodies,
    "custom_jvp": custom_jvp.expanded,
}


def _is_asked_again(rule: Any) -> bool:
    """Test whether a part of the rule is asked again for each question."""
    rule = _of_one_example(rule)
    checks = type(rule).check_wanted is not Rule.check_wanted
    return bool(rule.has_jvp or rule.has_vmap or rule.asks or checks)


def function_of(equation: Equation) -> Any:
    """The function whose rule an equation has; None for most equations."""
    if equation.op.kind != "structured" or "rule" not in equation.literals:
        return None
    return getattr(_of_one_example(equation.literals["rule"]), "function", None)


def _of_one_example(call: Any) -> Any:
    """The call of one example, where this one is a batch."""
    return _of_one_example(call.call) if isinstance(call, BatchedRule) else call


def without_options(equation: Equation) -> Equation:
    """A call of a jitted function without the options of that: its reader chooses executors."""
    if equation.op != CALL:
        return equation
    kwargs = tuple((k, Literal(None) if k == "options" else arg) for k, arg in equation.kwargs)
    return replace(equation, kwargs=kwargs)


def with_rules_in_bodies(equation: Equation, within: Collection[Any] = ()) -> Equation:
    """The equation, its rule in its bodies.

    Law: its values are the old ones, under every transform.

    Args:
        equation: any.
        within: functions in whose rules it is. A call of one of them gets no rule once more.

    Raises:
        PortableError: a part of the rule is a Python function that has to be asked again.
    """
    if equation.op.kind != "structured" or "rule" not in equation.literals:
        return equation
    call = equation.literals["rule"]
    if isinstance(call, RuleOfBodies):
        return equation
    if equation.op.name not in _EXPANDED or _is_asked_again(call):
        raise refused(
            f"{equation.op}: the rule of {call.__name__} is Python code that each transform asks",
            equation,
            "Transform the function first, such as `grad(f)` or `vmap(f)`, and save the result.",
        )
    try:
        if any(function_of(equation) is function for function in within):
            equation = replace(equation, bodies=equation.bodies[:1])
        else:
            equation = _EXPANDED[equation.op.name](equation)
    except ThunderError as error:
        raise refused(
            f"{equation.op}: the rule of {call.__name__} is not there yet: {error}", equation
        ) from None
    rule = RuleOfBodies(
        str(call.__name__),
        tuple(getattr(call, "is_tensor", ())),
        tuple(call.constant),
        call.ignores_closures,
    )
    kwargs = tuple((k, Literal(rule) if k == "rule" else arg) for k, arg in equation.kwargs)
    return replace(equation, kwargs=kwargs)
