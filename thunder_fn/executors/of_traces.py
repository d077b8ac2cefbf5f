"""Executors that a trace brings: those that know its composites.

Composites may have a namespace, as `quantized.int8_linear` has, and a namespace executors. A
program of a trace that has such a composite, in whatever body, asks them after the executors that
its user chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thunder_fn.executors.base import Executor
from thunder_fn.executors.eligibility import TORCH
from thunder_fn.ir.trace import Trace

_BROUGHT: dict[str, tuple[Executor, ...]] = {}


def bring(namespace: str, *executors: Executor) -> None:
    """Composites of a namespace bring these executors, in order of priority."""
    _BROUGHT[namespace] = executors


def is_brought(executor: Executor) -> bool:
    """Test for an executor that composites bring, which a recipe may name too."""
    return any(executor in brought for brought in _BROUGHT.values())


def with_executors_of(chosen: Sequence[Executor], trace: Trace) -> tuple[Executor, ...]:
    """The executors that a user chose, and behind them those that the trace brings. Nobody comes
    after the torch executor.
    """
    if TORCH in chosen:
        return tuple(chosen)
    names = {executor.name for executor in chosen}
    namespaces = dict.fromkeys(_namespaces(trace, set()))
    brought = {one.name: one for namespace in namespaces for one in _BROUGHT.get(namespace, ())}
    return (*chosen, *(executor for name, executor in brought.items() if name not in names))


def _namespaces(trace: Trace, seen: set[Trace]) -> Iterator[str]:
    seen.add(trace)
    for equation in trace.equations:
        if equation.op.kind == "composite":
            yield equation.op.name.partition(".")[0]
        for body in equation.bodies:
            if body not in seen:
                yield from _namespaces(body, seen)
