"""Traces that a user passes: the beginning of one is small enough to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from thunder_fn.ir.trace import Equation, Trace, cut
from thunder_fn.testing.drawn_programs import example_inputs
from thunder_fn.testing.laws.comparing import Inputs, run


@dataclass(frozen=True)
class Given:
    """A trace, or its first equations. Values for its inputs are drawn if none are given.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.testing import Given
        >>> whole = tfn.trace(lambda x: x.sin().cos(), torch.ones(2))
        >>> [equation.op.name for equation in Given(whole, length=1).trace.equations]
        ['aten.sin.default']
    """

    whole: Trace
    length: int | None = None
    values: tuple[Any, ...] | None = None
    place: int = 0
    seed: int = 0

    @cached_property
    def trace(self) -> Trace:
        """The trace of these equations, whose outputs are what none of them reads."""
        if self.length is None:
            return self.whole
        kept = self.whole.equations[: self.length]
        read = {var for equation in kept for var in equation.operands}
        outputs = [var for e in kept for var in e.outputs if var not in read]
        return cut(self.whole, equations=kept, outputs=outputs)

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The values of its inputs."""
        return example_inputs(self.whole, self.seed) if self.values is None else self.values

    def source(self) -> str:
        """The Python that makes it from what was passed."""
        length = "" if self.length is None else f", {self.length}"
        return f"Given(traces[{self.place}]{length})"

    def shortest(self, breaks: Callable[[Given], bool]) -> Given:
        """The shortest beginning that breaks what the whole does."""
        lengths = range(1, len(self.whole.equations))
        found = (case for case in (replace(self, length=n) for n in lengths) if breaks(case))
        return next(found, self)


def smallest_part(
    trace: Trace, inputs: Inputs, breaks: Callable[[Trace, Inputs], bool]
) -> Trace | None:
    """A few equations of a trace that break a law, on the values that they read there; None if not
    even all do.

    Each equation is left out in turn, the last first, and its results become inputs.
    """
    bound = tuple(var for equation in trace.equations for var in equation.outputs)
    computed = run(replace(trace, outputs=bound), inputs)
    values = dict(zip((*trace.inputs, *bound), (*inputs, *computed), strict=True))
    constants = {constant.var for constant in trace.constants}

    def part(kept: Sequence[Equation]) -> tuple[Trace, Inputs]:
        read = dict.fromkeys(var for equation in kept for var in equation.operands)
        made = [var for equation in kept for var in equation.outputs]
        free = [var for var in read if var not in made and var not in constants]
        outputs = [var for var in made if var not in read]
        new = cut(trace, inputs=free, equations=kept, outputs=outputs, name="part")
        return new, tuple(values[var] for var in free)

    kept = list(trace.equations)
    if not breaks(*part(kept)):
        return None
    for equation in trace.equations[::-1]:
        fewer = [one for one in kept if one is not equation]
        kept = fewer if breaks(*part(fewer)) else kept
    return part(kept)[0]
