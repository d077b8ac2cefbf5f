"""The rule that each transform derives for an op, and why no attempt before it had one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thunder_fn.capture import capture
from thunder_fn.derived.attempts import Attempt, Outcome, first_rule
from thunder_fn.derived.leaf_jvp import JVP_ATTEMPTS, JvpQuestion
from thunder_fn.derived.leaf_vjp import VJP_ATTEMPTS, VjpQuestion, alone, is_differentiable
from thunder_fn.derived.leaf_vmap import VMAP_ATTEMPTS, LoopWarning, VmapQuestion
from thunder_fn.errors import CaptureError, ThunderError, kind_of
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.trace import Equation, TensorType, Trace


@dataclass(frozen=True, slots=True)
class RuleRow:
    """The rule of one op for one transform.

    Attributes:
        op: such as `aten.sin.default`.
        transform: vjp, jvp or vmap.
        found_by: the attempt that has the rule; of jvp, "two vjps" where none had.
        declined: the attempts before it, each with its reason.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> row = tfn.inspect.explain_rule(torch.ops.aten.sin.default, torch.ones(2)).rows[0]
        >>> row.op, row.transform, row.found_by
        ('aten.sin.default', 'vjp', "autograd's formula")
    """

    op: str
    transform: str
    found_by: str
    declined: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.transform} of {self.op}: {self.found_by}"]
        return "\n".join((*lines, *(f"    not {name}: {why}" for name, why in self.declined)))


@dataclass(frozen=True, slots=True, repr=False)
class RuleReport(Shown):
    """The rules of every leaf op of a function. `str` of it is the same as a text.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> report = tfn.inspect.explain_rule(torch.ops.aten.sin.default, torch.ones(2))
        >>> [row.transform for row in report.rows]
        ['vjp', 'jvp', 'vmap']
    """

    rows: tuple[RuleRow, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


def rule_order() -> dict[str, tuple[str, ...]]:
    """Return the order in which each transform looks for the rule of a leaf op.

    Law: `explain_rule` reports the attempts in this order.

    Example:
        >>> from thunder_fn.inspect import rule_order
        >>> rule_order()["vjp"][3:5]
        ("autograd's formula", "autograd's formula for the in-place op")
    """
    tables: dict[str, tuple[Attempt[Any, Any], ...]] = {
        "vjp": VJP_ATTEMPTS,
        "jvp": JVP_ATTEMPTS,
        "vmap": VMAP_ATTEMPTS,
    }
    order = {name: tuple(attempt.name for attempt in table) for name, table in tables.items()}
    return order | {"jvp": (*order["jvp"], TWO_VJPS)}


TWO_VJPS = "two vjps"


def explain_rule(op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RuleReport:
    """Report which rule vjp, jvp and vmap derive for an op, and why the attempts before it had
    none.

    Law: the rule that it names is the one that the transform uses.

    Args:
        op: an op such as `torch.cumsum` or `torch.ops.aten.cumsum.default`, or any function: then
            each op in it.
        args, kwargs: arguments of a call, since the rule depends on dtypes and on static arguments.

    Raises:
        CaptureError: the call cannot be traced.

    Example:
        >>> import torch
        >>> from thunder_fn.inspect import explain_rule
        >>> print(explain_rule(torch.special.i0e, torch.rand(3)).rows[2])
        vmap of aten.special_i0e.default: the op on the whole batch
            not parts of one size: no size is found in data
            not a fill of the whole batch: the op does not fill a tensor
    """
    if not callable(op):
        what = f"explain_rule: expected an op or a function, given {kind_of(op)}"
        raise CaptureError(what, fix="Write `explain_rule(torch.sin, x)`.")
    trace = inline(capture(op, args, kwargs).trace)
    leaves = dict.fromkeys(
        alone(one) for one in trace.equations if one.op.kind == "leaf" and one.outputs
    )
    return RuleReport(tuple(row for single in leaves for row in _rows(single)))


def _rows(single: Trace) -> Iterator[RuleRow]:
    for transform, ask in (("vjp", _vjp), ("jvp", _jvp), ("vmap", _vmap)):
        op = str(single.equations[0].op)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", LoopWarning)
                outcome = ask(single)
        except ThunderError as error:
            yield RuleRow(op, transform, f"refused: {error}".splitlines()[0], ())
            continue
        if outcome is not None:
            declined = tuple((name, one.why) for name, one in outcome.declined)
            default = TWO_VJPS if transform == "jvp" else "none"
            yield RuleRow(
                op, transform, outcome.found_by if outcome.rule is not None else default, declined
            )


def _vjp(single: Trace) -> Outcome[Any] | None:
    wanted, followed = _flags(single.equations[0])
    if not any(wanted) or not any(followed):
        return None
    return first_rule(VJP_ATTEMPTS, VjpQuestion(single, wanted, followed))


def _jvp(single: Trace) -> Outcome[Any] | None:
    active, followed = _flags(single.equations[0])
    if not any(active) or not any(followed) or ops.is_random(single.equations[0].op):
        return None
    return first_rule(JVP_ATTEMPTS, JvpQuestion(single, active))


def _vmap(single: Trace) -> Outcome[Any] | None:
    batched = tuple(isinstance(var.type, TensorType) for var in single.inputs)
    return first_rule(VMAP_ATTEMPTS, VmapQuestion(single, batched, 2, "different"))


def _flags(equation: Equation) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    operands = tuple(is_differentiable(var.type) for var in equation.operands)
    return operands, tuple(is_differentiable(var.type) for var in equation.outputs)
