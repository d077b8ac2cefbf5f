"""overlap: the collectives of a step sent early and awaited late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fn.api.calling import Transformed, transformed
from thunder_fn.api.captures import Plan, in_place, planned
from thunder_fn.capture import Captured
from thunder_fn.distributed.schedule import overlapped
from thunder_fn.errors import RewriteError, is_int
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Atom, Equation, Trace, TraceBuilder
from thunder_fn.ir.walking import inline_into, put, rewritten


@dataclass(frozen=True)
class Overlapped(Transformed):
    """A function whose collectives travel while it computes. See `overlap`."""

    fn: Callable[..., Any]
    in_flight: int

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return planned(self, args, kwargs, lambda capture: self._plan(capture, args, kwargs))

    def _plan(self, capture: Callable[..., Captured], args: Any, kwargs: Any) -> Plan:
        captured = capture(self.fn, args, kwargs)
        new = _scheduled(captured.trace, self.in_flight)
        return Plan(self.__name__, captured, new, in_place(captured))


@memo(64, derives=False)
def _scheduled(trace: Trace, in_flight: int) -> Trace:
    """The trace with its collectives where the schedule says. Derivatives are those of the trace
    itself: the schedule reaches into custom rules, which are gone there.
    """
    flat = trace
    while any(map(_holds, flat.equations)):
        flat = rewritten(flat, _in_place_of_calls)
    builder = TraceBuilder(trace.name)
    given = builder.take(trace.input_types)
    bodies = overlapped(flat, in_flight), trace
    types = trace.output_types
    return builder.build(builder.add(ops.DIFFERENTIATED_AS, given, types, bodies=bodies))


def _holds(equation: Equation) -> bool:
    return lowered(equation) is not None and ops.communicates(equation)


def _in_place_of_calls(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
) -> Sequence[Atom]:
    body = lowered(equation)
    if body is None or not _holds(equation):
        return put(builder, equation, operands)
    return inline_into(builder, body, operands, equation.source)


def overlap(f: Any, in_flight: int = 2) -> Any:
    """Send the gathers of a step early, and wait for results where something reads them.

    Law: it computes what f computes, by the same equations in another order.

    Put it around the whole step, `overlap(grad(f))`: then the backward's collectives are scheduled
    too. All ranks schedule one trace in one way.

    Args:
        f: any PyTorch callable, jitted or not.
        in_flight: how many gathers, and how many reductions, travel at a time.

    Raises:
        RewriteError: in_flight is not a number from 1 on.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> square = overlap(lambda x: x * x)
        >>> square(torch.tensor(3.0))
        tensor(9.)

    Source: `thunder_fn.distributed.schedule` names the paper; async tensor parallelism of PyTorch
    (2024), and Wang et al., Overlap Communication with Dependent Computation (ASPLOS 2023).
    """
    if not is_int(in_flight, 1):
        raise RewriteError(f"overlap: in_flight is a number from 1 on, given {in_flight!r}")
    return transformed(f, lambda fn: Overlapped(fn, in_flight), "bitwise")
