"""Regions side by side: the same ops on other tensors, as an optimizer updates each parameter.

    v5, v6 = inductor::region(v0, v1)           v5, v6, v7, v8 = inductor::region(v0, v1, v2, v3)
    v7, v8 = inductor::region(v2, v3)

On a GPU each region is a launch, which takes longer than a small update. So executors of GPUs have
such regions as one.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_fn.executors.base import FusionExecutor
from thunder_fn.executors.regions import Group, grouped
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.ir.walking import unfolded

MIN_TIMES = 3
"""The least number of regions of the same ops that become one."""


def joined(trace: Trace, fusion: FusionExecutor, kind: str) -> tuple[Trace, tuple[int, ...]]:
    """The trace with regions side by side as one.

    Law: it computes what the trace computes.

    Args:
        trace: claimed; the executor's regions are composites called `kind`.

    Returns:
        The trace, and for each of its equations the position of the first that it stands for.
    """
    groups = _groups(trace, fusion, kind)
    if not groups:
        return trace, tuple(range(len(trace.equations)))
    together, firsts = grouped(trace, groups, kind)

    def opened(equation: Equation) -> Equation:
        is_region = lambda inner: inner.op.name == kind
        if not any(map(is_region, equation.body.equations)):
            return equation
        return replace(equation, bodies=(unfolded(equation.body, is_region),))

    equations = tuple(one if one.op.name != kind else opened(one) for one in together.equations)
    return replace(together, equations=equations), firsts


def _groups(trace: Trace, fusion: FusionExecutor, kind: str) -> list[Group]:
    """Regions of the same ops none of which reads, directly or not, what another one gives.

    Of these no region has a way to one of the same level, which counts the regions before it.
    """
    levels: dict[int, int] = {}
    found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for position, equation in enumerate(trace.equations):
        level = max((levels.get(var.index, 0) for var in equation.operands), default=0)
        if equation.op.name == kind and fusion.joins(equation.body):
            level += 1
            ops = tuple(inner.op.name for inner in equation.body.equations)
            found.setdefault((level, ops), []).append(position)
        levels.update((var.index, level) for var in equation.outputs)
    return [tuple(group) for group in found.values() if len(group) >= MIN_TIMES]
