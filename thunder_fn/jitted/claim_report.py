"""explain_claims: the claims of each executor on a function, and the reasons of the others to
refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.executors import Decision
from thunder_fn.executors.base import is_within
from thunder_fn.executors.idle import decisions_of
from thunder_fn.executors.of_traces import with_executors_of
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.trace import Trace
from thunder_fn.jitted.autograd.bridge import bridge
from thunder_fn.jitted.call import read_call
from thunder_fn.jitted.options import Options
from thunder_fn.jitted.program import capture_call, close_over, places_of
from thunder_fn.lines import is_internal


@dataclass(frozen=True, slots=True, repr=False)
class ClaimReport(Shown):
    """Claims by executor. `str` of it is the same as a text.

    Attributes:
        forward: the decisions about the function's own trace, or about the forward where a gradient
            may be asked for.
        backward: those about the backward; empty if no argument requires a gradient.
        left_out: executors that were not asked, and why.
    """

    function: str
    forward: tuple[Decision, ...]
    backward: tuple[Decision, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()

    def taken_by(self, executor: str) -> tuple[Decision, ...]:
        """The parts that an executor took, given its name."""
        return tuple(one for one in (*self.forward, *self.backward) if one.taken_by == executor)

    def __str__(self) -> str:
        lines = [f"claims of {self.function}"]
        lines += [f"  {name} is not asked: {reason}" for name, reason in self.left_out]
        if not self.forward:
            lines.append("  the torch executor runs all of it")
        for title, decisions in zip(HALVES, (self.forward, self.backward), strict=True):
            if decisions:
                lines += [f"{title}:", *(_line(decision) for decision in decisions)]
        return "\n".join(lines)


def _line(decision: Decision) -> str:
    times = f"{decision.times} x " if decision.times > 1 else ""
    who = (
        f"{decision.taken_by}{f' {decision.how}' if decision.how else ''}"
        if decision.taken_by
        else "unfolded"
    )
    why = (
        f" ({'; '.join(f'{name}: {reason}' for name, reason in decision.refusals)})"
        if decision.refusals
        else ""
    )
    return f"  {'  ' * decision.depth}{times}{decision.op}: {who}{why}{_place(decision.source)}"


HALVES = ("forward", "backward")

SOURCE = re.compile(r"(?P<file>.*):\d+ in .*?(?: \((?P<module>.*)\))?")
"""The text of a source: file, line, function and module."""


def _place(source: str) -> str:
    """The user's line; the module alone where the line would be one of PyTorch."""
    found = SOURCE.fullmatch(source)
    if found is None or not is_internal(found["file"]):
        return f" from {source}" if source else ""
    return f" in {found['module']}" if found["module"] else ""


def explain(
    fn: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ClaimReport:
    """The report of one call. Nothing is run."""
    call = read_call(options, args, kwargs)
    captured, traces = capture_call(fn, options, call)
    closed, constants = close_over(traces[-1])
    executors = options.executors_of(closed)
    tensors = (*call.values, *constants)
    writes = places_of([write.target for write in captured.writes], len(call.tensors), constants)
    bridged = (
        bridge(closed, tensors, (None,) * len(writes), executors)
        if torch.is_grad_enabled()
        else None
    )
    halves = (closed,) if bridged is None else (bridged.split.forward, bridged.split.backward)
    return ClaimReport(
        closed.name,
        decisions_of(halves[0], executors, writes if bridged is None else ()),
        () if bridged is None else decisions_of(bridged.split.backward, executors),
        left_out(options, halves),
    )


def left_out(options: Options, halves: Sequence[Trace]) -> tuple[tuple[str, str], ...]:
    """The executors that are not asked about a program, or about its two halves, and why."""
    found = list[tuple[str, str]]()
    for executor in with_executors_of(options.executors, halves[0]):
        if not is_within(executor.numerics, options.numerics):
            what = f"its results are {executor.numerics}, and numerics={options.numerics!r}"
            found.append((executor.name, what))
            continue
        for title, half in zip(HALVES, halves, strict=False):
            reason = executor.declines(half)
            if reason is not None:
                found.append((executor.name, reason if len(halves) == 1 else f"{title}: {reason}"))
    return tuple(dict.fromkeys(found))
