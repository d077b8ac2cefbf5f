"""A distributed trace on simulated ranks, in one process: the reference semantics of collectives.

Each rank runs until it waits for others; a collective sees the values of all of its ranks. So laws
about distributed transforms are tested without processes, and ranks that disagree are named.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import torch

from thunder_fn.distributed.heartbeat import WAIT as WAIT
from thunder_fn.errors import DistributedError, MissingRule
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import bind, specialize_atom, specialize_equation
from thunder_fn.ir.trace import (
    Equation,
    Trace,
    TraceBuilder,
    Var,
    python_arg,
    python_args,
    type_of_value,
)

GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
REDUCE = "_c10d_functional.all_reduce.default"
ALL_TO_ALL = "_c10d_functional.all_to_all_single.default"

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


def _broadcast(values: list[Any], source: int, group: str) -> list[Any]:
    return [values[source]] * len(values)


def _all_to_all(
    values: list[Any], received: list[Sequence[int]], sent: list[Sequence[int]]
) -> list[Any]:
    for source, to in product(range(len(values)), repeat=2):
        if sent[source][to] != received[to][source]:
            what = f"all_to_all_single: rank {source} sends {sent[source][to]} rows to rank {to}"
            fix = "Tell the other ranks how many rows come, by an `all_to_all_single` of numbers."
            raise DistributedError(f"{what}, which takes {received[to][source]}", fix=fix)
    parts = [value.split(list(sizes)) for value, sizes in zip(values, sent, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(values))]


_RULES: dict[str, Callable[..., list[Any]]] = {
    GATHER: _all_gather,
    SCATTER: _reduce_scatter,
    REDUCE: _all_reduce,
    ALL_TO_ALL: _all_to_all,
    "_c10d_functional.broadcast.default": _broadcast,
    WAIT: lambda values: values,
}


Partitions = Mapping[str, Sequence[Sequence[int]]]


def evaluate_ranks(
    trace: Trace | Sequence[Trace],
    inputs: Sequence[Sequence[Any]],
    partitions: Partitions | None = None,
) -> list[tuple[Any, ...]]:
    """Run a trace on all ranks at once.

    Law: with the collectives of `torch.distributed`, rank r computes ``evaluate_ranks(trace,
        inputs)[r]``.

    Args:
        trace: the same for all ranks, or one for each.
        inputs: for each rank, one value for each of the trace's inputs.
        partitions: for each name of a group, the ranks of each group of that name, as the dims of a
            mesh have them. A group that is not named has all ranks.

    Raises:
        MissingRule: a collective that has no rule here, or one in a loop or a branch; names the
            user's line.
        DistributedError: ranks wait for each other; names them, and where each is.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x + 1, torch.ones(()))
        >>> evaluate_ranks(trace, [[torch.tensor(1.0)], [torch.tensor(2.0)]])
        [(tensor(2.),), (tensor(3.),)]
    """
    traces = [trace] * len(inputs) if isinstance(trace, Trace) else list(trace)
    runs = [_run(one, values) for one, values in zip(traces, inputs, strict=True)]
    return _Ranks(runs, partitions or {}).results()


Question: TypeAlias = tuple[Equation, list[Any]]
"""An equation that talks to other ranks, and the values of its operands."""
Run: TypeAlias = Generator[Question, Any, tuple[Any, ...]]


def _run(trace: Trace, values: Sequence[Any]) -> Run:
    """Run a trace on one rank, and ask for the results of what talks to others. Numbers are put in
    place of symbols when they are known: each rank finds its own sizes in its data.
    """
    env = [*values, *(constant.tensor for constant in trace.constants)]
    numbers = bind(trace.inputs, values)
    for each in trace.equations:
        equation = specialize_equation(each, numbers)
        operands = [env[var.index] for var in equation.operands]
        body = lowered(equation)
        if equation.op.name in _RULES or equation.op in _MESSAGES:
            results = yield equation, operands
        elif body is not None:
            results = yield from _run(body, operands)
        elif ops.communicates(equation):
            what = f"evaluate_ranks: {equation.op} has no rule, or holds collectives in its bodies"
            raise MissingRule(
                what, source=equation.source, fix="Run it on real ranks, launched by torchrun."
            )
        else:
            results = evaluate(_alone(equation), operands)
        numbers.update(bind(equation.outputs, results))
        env += results
    read: Callable[[Var], Any] = lambda var: env[var.index]
    return tuple(python_arg(specialize_atom(atom, numbers), read) for atom in trace.outputs)


_MESSAGES = (ops.SEND, ops.RECEIVE, ops.SENT)


class _Ranks:
    """Ranks that run until each has its results: one goes on while it waits for no other."""

    def __init__(self, runs: Sequence[Run], partitions: Partitions) -> None:
        self.runs, self.partitions = runs, partitions
        self.asked: list[Question | None] = [None] * len(runs)
        self.found: list[tuple[Any, ...]] = [()] * len(runs)
        self.sent = defaultdict[tuple[str, int, int], deque[Any]](deque)

    def results(self) -> list[tuple[Any, ...]]:
        """The results of all ranks."""
        for rank in range(len(self.runs)):
            self.go_on(rank, None)
        while any(self.asked):
            if not [rank for rank in range(len(self.runs)) if self.answer(rank)]:
                fix = "All ranks run the same collectives, in the same order."
                raise DistributedError(self.stuck(), fix=fix)
        return self.found

    def go_on(self, rank: int, answer: Any) -> None:
        """Let a rank run up to its next question."""
        try:
            self.asked[rank] = self.runs[rank].send(answer)
        except StopIteration as end:
            self.asked[rank], self.found[rank] = None, end.value

    def answer(self, rank: int) -> bool:
        """Answer a rank's question, and those of the ranks that it meets, if that can be now."""
        asked = self.asked[rank]
        if asked is None:
            return False
        equation, operands = asked
        if equation.op in _MESSAGES:
            return self.deliver(rank, equation, operands)
        options = _options(equation)
        ranks = self.group(rank, str(options[-1]) if options else "")
        if equation.op.name == WAIT:
            ranks = [rank]
        given = [self.asked[one] for one in ranks]
        there = [one for one in given if one is not None and one[0].op == equation.op]
        if equation.op.name == ALL_TO_ALL:  # each rank says what it sends to the others
            options = [[_options(one)[at] for one, _ in there] for at in (0, 1)]
        elif any(_options(one) != options for one, _ in there):
            return False
        if len(there) < len(ranks):
            return False
        found = _RULES[equation.op.name]([values[0] for _, values in there], *options)
        for one, value in zip(ranks, found, strict=True):
            self.go_on(one, (value,))
        return True

    def deliver(self, rank: int, equation: Equation, operands: list[Any]) -> bool:
        """Send or receive a message."""
        if equation.op == ops.SENT:
            self.go_on(rank, ())
            return True
        *_, other, _, group = _options(equation)
        ranks = self.group(rank, group)
        source, to = (rank, ranks[other]) if equation.op == ops.SEND else (ranks[other], rank)
        queue = self.sent[group, source, to]
        if equation.op == ops.SEND:
            queue.append(operands[0].clone())
            self.go_on(rank, (operands[0].new_empty(0, dtype=torch.uint8),))
        elif queue:
            self.go_on(rank, (self.checked(queue.popleft(), equation, source),))
        else:
            return False
        return True

    def checked(self, value: torch.Tensor, equation: Equation, source: int) -> Any:
        """A message, if it is of the type that is received."""
        if type_of_value(value) == equation.outputs[0].type:
            return value
        want, have = equation.outputs[0].type, type_of_value(value)
        what = f"rank {source} sends {have} where {want} is received"
        raise DistributedError(what, source=equation.source)

    def group(self, rank: int, name: str) -> Sequence[int]:
        """The ranks of a rank's group."""
        groups = self.partitions.get(name, [range(len(self.runs))])
        return next(ranks for ranks in groups if rank in ranks)

    def stuck(self) -> str:
        """Say where each rank waits."""
        places = [
            f"rank {rank} in {asked[0].op}" if asked else f"rank {rank} at the end"
            for rank, asked in enumerate(self.asked)
        ]
        return f"ranks wait for each other: {', '.join(places)}"


def _options(equation: Equation) -> list[Any]:
    """The arguments of a collective but for its tensors."""
    return [value for value in python_args(equation, lambda _: None)[0] if value is not None]


def _alone(equation: Equation) -> Trace:
    builder = TraceBuilder()
    inputs = iter([builder.input(var.type) for var in equation.operands])
    return dce(builder.build(builder.copy(equation, lambda _: next(inputs))))
