"""Executors that were asked for and take nothing of a program: one warning says why."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.base import NOT_REGISTERED, SAID_NO, Executor, FusionExecutor
from thunder_fn.executors.claims import Claimed, claim
from thunder_fn.executors.decisions import IN_ITSELF, TOO_SMALL, Decision
from thunder_fn.executors.of_traces import is_brought
from thunder_fn.executors.operator_executor import GRAD_ONLY, Implementation
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Source, TensorType, Trace

NOTHING_TO_TAKE = (NOT_REGISTERED.reason, TOO_SMALL, IN_ITSELF)
"""Reasons that leave nothing slow."""

SHOWN = 3
"""The most reasons that a warning gives."""


def decisions_of(
    trace: Trace, executors: Sequence[Executor], writes: Sequence[int | None] = ()
) -> tuple[Decision, ...]:
    """The log of a claiming, then those of the bodies of structured ops, which are programs of
    their own.
    """
    claimed = claim(dce(trace), executors, writes, below_autograd=True)
    return (*claimed.log, *_inside(claimed, executors))


def _inside(claimed: Claimed, executors: Sequence[Executor]) -> Iterator[Decision]:
    for equation in claimed.trace.equations:
        for body in dict.fromkeys(equation.bodies) if equation.op.kind == "structured" else ():
            for decision in decisions_of(body, executors):
                yield replace(decision, depth=decision.depth + 1)


def warn_of_idle(asked: Sequence[Executor], claimed: Claimed, source: Source | None) -> None:
    """Warn of each executor that was asked for and refuses all that it is asked about in a program,
    and say why.

    There is no warning where nothing is lost: a compiler is left with a single small op, other
    executors take what this one refuses, or the executor gave the derivatives alone.
    """
    busy = {decision.taken_by for decision in claimed.log}
    idle = [one for one in asked if one.claims and one.name not in busy]
    log = (*claimed.log, *(_inside(claimed, claimed.asked) if idle else ()))
    views = {one.op.name for one in claimed.trace.equations if ops.is_view(one.op) or is_empty(one)}
    left = [one for one in log if one.op not in views and one.taken_by in (None, "torch")]
    for executor in idle:
        is_busy = any(decision.taken_by == executor.name for decision in log)
        reasons = None if is_busy else _reasons(executor, left)
        if reasons is not None:
            name = claimed.trace.name
            what = f"{executor.name}: takes nothing of {name}, and others run it:{reasons}"
            fix = "`tfn.explain_claims` says who runs what. Leave it out if that is meant."
            warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=3)


def is_empty(equation: Equation) -> bool:
    """Test for an equation on tensors without elements: there is nothing to compute."""
    types = (*equation.operand_types, *equation.output_types)
    return any(isinstance(one, TensorType) and 0 in one.shape for one in types)


def _reasons(executor: Executor, left: Sequence[Decision]) -> str | None:
    """The commonest reasons of an executor to refuse what PyTorch's own kernels run; None if it is
    asked about nothing, or about too little.
    """
    found, unknown = Counter[tuple[str, str]](), dict[str, None]()
    for decision in left:
        reason = dict(decision.refusals).get(executor.name, NOT_REGISTERED.reason)
        if reason == GRAD_ONLY.reason:
            return None
        is_plain = reason.endswith(SAID_NO) and is_brought(executor)  # others of its kind may suit
        if reason not in NOTHING_TO_TAKE and not is_plain:
            found[decision.op, reason] += decision.times
        if reason == NOT_REGISTERED.reason and decision.op.startswith("aten."):
            unknown[decision.op] = None
    times = sum(times for (op, _), times in found.items() if op.startswith("aten."))
    if isinstance(executor, FusionExecutor) and times < executor.min_size:
        return None
    if not found and unknown and _is_for_others(executor) and not is_brought(executor):
        return f"\n  nothing is registered for {', '.join(list(unknown)[:SHOWN])}"
    return "".join(f"\n  {op}: {reason}" for (op, reason), _ in found.most_common(SHOWN)) or None


def _is_for_others(executor: Executor) -> bool:
    """Test for an executor of ops that are not its own, which a user calls by name."""
    return any(
        isinstance(rule, Implementation) and rule.execution_transform is not None
        for rule in executor.rules.values()
    )
