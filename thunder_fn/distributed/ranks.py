"""A distributed trace on simulated ranks, in one process: the reference semantics of collectives.

All ranks run the same trace in step; a collective sees the values of all of them. So laws about
distributed transforms are tested without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder_fn.distributed.heartbeat import WAIT as WAIT
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Equation, Literal, Trace, TraceBuilder, Var

Ranks = Sequence[Any]

GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
REDUCE = "_c10d_functional.all_reduce.default"

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.mean(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def _all_gather(values: list[Any], size: int, group: str) -> list[Any]:
    return [torch.cat(values)] * len(values)


def _all_reduce(values: list[Any], reduction: str, group: str) -> list[Any]:
    return [_REDUCTIONS[reduction](torch.stack(values))] * len(values)


def _reduce_scatter(values: list[Any], reduction: str, size: int, group: str) -> list[Any]:
    return list(_REDUCTIONS[reduction](torch.stack(values)).chunk(len(values)))


_RULES: dict[str, Callable[..., list[Any]]] = {
    GATHER: _all_gather,
    SCATTER: _reduce_scatter,
    REDUCE: _all_reduce,
    WAIT: lambda values: values,
}


Partitions = Mapping[str, Sequence[Sequence[int]]]


def evaluate_ranks(
    trace: Trace, inputs: Sequence[Sequence[Any]], partitions: Partitions | None = None
) -> list[tuple[Any, ...]]:
    """Run a trace on all ranks at once.

    Law: with the collectives of `torch.distributed`, rank r computes ``evaluate_ranks(trace,
        inputs)[r]``.

    Args:
        trace: the same for all ranks.
        inputs: for each rank, one value for each of the trace's inputs.
        partitions: for each name of a group, the ranks of each group of that name, as the dims of a
            mesh have them. A group that is not named has all ranks.

    Raises:
        MissingRule: a collective that has no rule here, or one in a loop or a branch; names the
            user's line.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x + 1, torch.ones(()))
        >>> evaluate_ranks(trace, [[torch.tensor(1.0)], [torch.tensor(2.0)]])
        [(tensor(2.),), (tensor(3.),)]
    """
    envs: list[list[Any]] = [
        [*values, *(constant.tensor for constant in trace.constants)] for values in inputs
    ]
    for equation in trace.equations:
        results = _run(
            equation,
            [[env[var.index] for var in equation.operands] for env in envs],
            partitions or {},
        )
        for env, values in zip(envs, results, strict=True):
            env.extend(values)
    return [
        tuple(env[atom.index] if isinstance(atom, Var) else atom.value for atom in trace.outputs)
        for env in envs
    ]


def _run(
    equation: Equation, operands: list[list[Any]], partitions: Partitions
) -> list[Sequence[Any]]:
    if equation.op.name in _RULES:
        options = [arg.value for arg in equation.args if isinstance(arg, Literal)]
        results: list[Sequence[Any]] = [()] * len(operands)
        for ranks in partitions.get(str(options[-1]) if options else "", [range(len(operands))]):
            found = _RULES[equation.op.name]([operands[rank][0] for rank in ranks], *options)
            for rank, value in zip(ranks, found, strict=True):
                results[rank] = (value,)
        return results
    body = lowered(equation)
    if body is not None:
        return list(evaluate_ranks(body, operands, partitions))
    if is_collective(equation):
        what = f"evaluate_ranks: {equation.op} has no rule, or holds collectives in its bodies"
        raise MissingRule(
            what, source=equation.source, fix="Run it on real ranks, launched by torchrun."
        )
    alone = _alone(equation)
    return [evaluate(alone, values) for values in operands]


def is_collective(equation: Equation) -> bool:
    """Test whether the equation, or one in its bodies, talks to other ranks."""
    return ops.is_collective(equation.op) or any(
        is_collective(inner) for body in equation.bodies for inner in body.equations
    )


def _alone(equation: Equation) -> Trace:
    builder = TraceBuilder()
    inputs = iter([builder.input(var.type) for var in equation.operands])
    return dce(builder.build(builder.copy(equation, lambda _: next(inputs))))
