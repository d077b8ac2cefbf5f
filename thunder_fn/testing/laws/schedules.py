"""Laws of distributed traces: ranks meet in every collective, in whatever order they run.

A rank sends without waiting, does its collectives one at a time in the order of sending, and stops
at a wait until that one is done. A collective happens when it is next on all ranks of its group.
The states that ranks can reach are enumerated. So are the branches that each rank can take. Those
whose predicate is the same on all ranks are taken together; else each rank decides for itself.

Sends disable nothing and commute with everything, so each is done as soon as it can be: the states
differ in how many collectives are done on each rank, and no deadlock is left out.

Source: Godefroid, Partial-order methods for the verification of concurrent systems, LNCS 1032,
1996; Siegel and Avrunin, Verification of halting properties for MPI programs, VMCAI 2006.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_fn.distributed.ranks import GATHER, REDUCE, WAIT, is_collective
from thunder_fn.errors import DistributedError
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into
from thunder_fn.testing.laws.comparing import Inputs, Law, LawBroken, Transform

Partitions = Mapping[str, Sequence[Sequence[int]]]
"""For each name of a group, the ranks of each group of that name, as for `evaluate_ranks`."""

MOST_CHOICES = 4096
"""The number of ways through the branches of all ranks that are tried at most."""

MOST_WHILE_STEPS = 2
GRID: Partitions = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}
"""A mesh of two times two ranks."""


@dataclass(frozen=True, slots=True)
class Event:
    """A collective that a rank sends; or, if `waits_for` is a number, a wait for that one."""

    op: str
    group: str = ""
    what: tuple[Any, ...] = ()
    place: str = ""
    waits_for: int | None = None


def check_schedule(
    traces: Trace | Sequence[Trace], ranks: int = 4, partitions: Partitions | None = None
) -> int:
    """Check that ranks which run these traces end, in every order and on every branch.

    Args:
        traces: one for all ranks, or one for each.
        ranks: the number of ranks, if there is one trace.
        partitions: the groups, as for `evaluate_ranks`; a group that is not named has all ranks.

    Returns:
        The number of states that were looked at.

    Raises:
        LawBroken: ranks wait for each other for ever, or meet in different collectives; says where
            each of them stands.
        DistributedError: there are too many ways through the branches.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.distributed.collectives import collectives
        >>> sum_up = lambda x: collectives.wait_tensor(collectives.all_reduce(x, "sum", "all"))
        >>> check_schedule(tfn.trace(sum_up, torch.ones(2)), ranks=3)
        2
    """
    programs = [traces] * ranks if isinstance(traces, Trace) else list(traces)
    groups, states = partitions or {}, 0
    for way, runs in enumerate(_ways(programs, groups)):
        if way == MOST_CHOICES:
            what = f"check_schedule: there are more than {MOST_CHOICES} ways through the branches"
            raise DistributedError(what, fix="Check the parts of the program one by one.")
        states += explored(runs, groups)
    return states


# ---- the ways through the branches ----


def _ways(programs: Sequence[Trace], groups: Partitions) -> Iterator[list[tuple[Event, ...]]]:
    """The events of all ranks, for every combination of decisions."""
    decisions: dict[Any, int] = {}
    while True:
        asked: dict[Any, int] = {}

        def decide(key: Any, count: int, asked: dict[Any, int] = asked) -> int:
            asked[key] = count
            return decisions.setdefault(key, 0)

        yield [
            tuple(_Rank(rank, len(programs), groups, decide).run(trace))
            for rank, trace in enumerate(programs)
        ]
        decisions = {key: decisions[key] for key in asked}
        for key in reversed(list(asked)):
            if decisions[key] + 1 < asked[key]:
                decisions[key] += 1
                break
            del decisions[key]
        else:
            return


@dataclass(frozen=True, slots=True)
class _Known:
    """The facts about a value: whether it is the same on all ranks, and the send it comes from."""

    same: bool = False
    sent: int | None = None


_DIFFERS, _SAME = _Known(), _Known(True)


@dataclass(slots=True)
class _Rank:
    """A rank that runs a trace without values, and notes what it sends and waits for."""

    rank: int
    ranks: int
    groups: Partitions
    decide: Callable[[Any, int], int]
    events: list[Event] = field(default_factory=list[Event])
    num_sent: int = 0

    def run(self, trace: Trace) -> list[Event]:
        self.body(trace, [_DIFFERS] * len(trace.inputs), ())
        return self.events

    def body(self, trace: Trace, given: Sequence[_Known], path: tuple[Any, ...]) -> list[_Known]:
        env = {var.index: known for var, known in zip(trace.inputs, given, strict=True)}
        env |= {c.var.index: _SAME if c.owned else _DIFFERS for c in trace.constants}
        for place, equation in enumerate(trace.equations):
            known = [env[var.index] for var in equation.operands]
            results = self.equation(equation, known, (*path, place))
            env |= {var.index: one for var, one in zip(equation.outputs, results, strict=True)}
        return [env[atom.index] if isinstance(atom, Var) else _SAME for atom in trace.outputs]

    def equation(
        self, equation: Equation, known: list[_Known], path: tuple[Any, ...]
    ) -> list[_Known]:
        name, place = equation.op.name, str(equation.source or "")
        if name == WAIT:
            sent = known[0].sent
            if sent is not None:
                self.events.append(Event(name, place=place, waits_for=sent))
            return [_Known(known[0].same)]
        if not is_collective(equation):
            same = all(one.same for one in known) and not ops.has_side_effect(equation)
            sent = known[0].sent if known and ops.is_view(equation.op) else None
            return [_Known(same, sent)] * len(equation.outputs)
        if equation.op.kind == "leaf":
            return [self.send(equation, place)] * len(equation.outputs)
        return self.structured(equation, known, path)

    def send(self, equation: Equation, place: str) -> _Known:
        literals = tuple(arg.value for arg in equation.args if isinstance(arg, Literal))
        group = next((one for one in reversed(literals) if isinstance(one, str)), "")
        types = [var.type for var in equation.operands if isinstance(var.type, TensorType)]
        sizes = tuple((type.dtype, type.shape) for type in types)
        self.events.append(Event(equation.op.name, group, (literals, sizes), place))
        self.num_sent += 1
        whole = len(_members(self.groups, group, self.rank, self.ranks)) == self.ranks
        return _Known(whole and equation.op.name in (GATHER, REDUCE), self.num_sent - 1)

    def structured(
        self, equation: Equation, known: list[_Known], path: tuple[Any, ...]
    ) -> list[_Known]:
        literals = dict(equation.literals)
        match equation.op.name:
            case "cond" | "switch":
                taken = self.chosen(known[0], path, len(equation.bodies))
                return self.body(equation.bodies[taken], known[1:], (*path, taken))
            case "scan":
                steps = range(int(literals["length"]))
            case "while_loop":
                same = _Known(all(one.same for one in known))
                steps = range(self.chosen(same, path, MOST_WHILE_STEPS + 1))
            case _:
                return self.body(equation.bodies[0], known, path)
        same = _Known(all(one.same for one in known))  # a carry may come to differ
        for step in steps:
            for place, body in enumerate(equation.bodies):
                self.body(body, [same] * len(body.inputs), (*path, step, place))
        return [same] * len(equation.outputs)

    def chosen(self, predicate: _Known, path: tuple[Any, ...], count: int) -> int:
        return self.decide(path if predicate.same else (self.rank, *path), count)


def _members(groups: Partitions, group: str, rank: int, ranks: int) -> tuple[int, ...]:
    for members in groups.get(group, [range(ranks)]):
        if rank in members:
            return tuple(members)
    return (rank,)


# ---- the states ----


def explored(runs: Sequence[tuple[Event, ...]], groups: Partitions) -> int:
    """The number of states that ranks with these events can reach, if all of them end."""
    sends = [[event for event in run if event.waits_for is None] for run in runs]
    start = tuple(0 for _ in runs)
    seen, todo = {start}, [start]
    while todo:
        done = todo.pop()
        heads = [_head(run, own, n) for run, own, n in zip(runs, sends, done, strict=True)]
        moved = False
        for members in _ready(heads, groups):
            _agree(heads, members)
            new = tuple(n + (rank in members) for rank, n in enumerate(done))
            moved = True
            if new not in seen:
                seen.add(new)
                todo.append(new)
        if not moved and any(n < len(own) for n, own in zip(done, sends, strict=True)):
            raise LawBroken(f"ranks wait for each other for ever\n{_standing(runs, sends, done)}")
    return len(seen)


def _head(run: Sequence[Event], sends: Sequence[Event], done: int) -> Event | None:
    """The next collective of a rank that has done so many, if it comes to send it."""
    if done == len(sends):
        return None
    count = 0
    for event in run:
        if event.waits_for is not None:
            if event.waits_for >= done:
                return None
        elif count == done:
            return event
        else:
            count += 1
    return None


def _ready(heads: Sequence[Event | None], groups: Partitions) -> list[tuple[int, ...]]:
    """The groups all of whose ranks have come to a collective of this group."""
    found: dict[tuple[int, ...], None] = {}
    for rank, head in enumerate(heads):
        if head is not None:
            members = _members(groups, head.group, rank, len(heads))
            others = [heads[other] for other in members]
            if all(other is not None and other.group == head.group for other in others):
                found[members] = None
    return list(found)


def _agree(heads: Sequence[Event | None], members: tuple[int, ...]) -> None:
    met = {rank: head for rank in members if (head := heads[rank]) is not None}
    if len({(head.op, head.what) for head in met.values()}) > 1:
        lines = [f"  rank {rank}: {_text(head)}" for rank, head in met.items()]
        raise LawBroken("\n".join(["ranks meet in different collectives", *lines]))


def _standing(
    runs: Sequence[Sequence[Event]], sends: Sequence[Sequence[Event]], done: Sequence[int]
) -> str:
    lines = list[str]()
    for rank, (run, own, n) in enumerate(zip(runs, sends, done, strict=True)):
        head = own[n] if n < len(own) else None
        state = "is at its end" if head is None else f"waits in {_text(head)}"
        if head is not None and _head(run, own, n) is None:
            state = f"waits before it sends {_text(head)}"
        lines.append(f"  rank {rank} {state}")
    return "\n".join(lines)


def _text(event: Event) -> str:
    return f"{event.op} of group {event.group!r} {event.place}".rstrip()


# ---- the law of a transform ----


def spread(trace: Trace) -> Trace:
    """The program with sums over ranks: of each input over a row of a mesh, of each result over a
    column, all of them sent before the first is waited for.
    """
    builder = TraceBuilder(trace.name)
    inputs = builder.take(trace.input_types)
    results = inline_into(builder, trace, _summed(builder, inputs, "rows"))
    return builder.build(tuple(_summed(builder, results, "columns")))


def _summed(builder: TraceBuilder, atoms: Sequence[Any], group: str) -> list[Any]:
    sent = dict[int, Var]()
    reduce, wait = (ops.leaf(ops.overload_named(name)) for name in (REDUCE, WAIT))
    for place, atom in enumerate(atoms):
        type = atom.type if isinstance(atom, Var) else None
        if isinstance(type, TensorType) and type.dtype.is_floating_point:
            args = (atom, Literal("sum"), Literal(group))
            (sent[place],) = builder.add(reduce, args, (type,))
    return [
        builder.add(wait, (sent[place],), (sent[place].type,))[0] if place in sent else atom
        for place, atom in enumerate(atoms)
    ]


def keeps_schedules(transform: Transform) -> Law:
    """Let ranks meet that transform the same distributed trace, each on its own: two times two
    ranks end, in every order.
    """

    def law(trace: Trace, inputs: Inputs) -> bool:
        given = spread(trace)
        if not is_sent(given):
            return False
        check_schedule(given, 4, GRID)
        made = [transform(pickle.loads(pickle.dumps(given))) for _ in range(4)]
        try:
            check_schedule(made, 4, GRID)
        except LawBroken as error:
            raise LawBroken(error.what, given=given, made=made[0]) from None
        return True

    return law


def is_sent(trace: Trace) -> bool:
    """Test whether a trace talks to other ranks."""
    return any(map(is_collective, trace.equations))
