"""Laws of distributed traces: ranks meet in every collective, in whatever order they run.

A rank sends without waiting, does its collectives one at a time in the order of sending, and stops
at a wait until that one is done. A collective happens when it is next on all ranks of its group.
The states that ranks can reach are enumerated. So are the branches that each rank can take. Those
whose predicate is the same on all ranks are taken together; else each rank decides for itself.

Sends disable nothing and commute with everything, so each is done as soon as it can be: the states
differ in how many collectives are done on each rank, and no deadlock is left out. A message is one
more way to wait: for the one that is received, and for its receiver.

Source: Godefroid, Partial-order methods for the verification of concurrent systems, LNCS 1032,
1996; Siegel and Avrunin, Verification of halting properties for MPI programs, VMCAI 2006.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal as Choice

from thunder_fn.distributed.ranks import GATHER, REDUCE, WAIT, Partitions
from thunder_fn.errors import DistributedError
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into
from thunder_fn.testing.laws.comparing import Inputs, Law, LawBroken, Transform

MOST_CHOICES = 4096
"""The number of ways through the branches of all ranks that are tried at most."""

MOST_WHILE_STEPS = 2
GRID: Partitions = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}
"""A mesh of two times two ranks."""


Kind = Choice["send", "wait", "post", "receive", "sent"]


@dataclass(frozen=True, slots=True)
class Event:
    """A step of a rank that others see.

    Attributes:
        kind: "send" begins a collective and "wait" waits for it. "post" begins a message, "receive"
            waits for one, "sent" waits until one is received.
        group: the name of a collective's group.
        what: the things in which those that meet agree: the op and the types.
        channel: of a message, its group, ranks and tag.
        number: of a wait, the collective of this rank; of "sent", the message of its channel.
    """

    kind: Kind
    op: str = ""
    group: str = ""
    what: tuple[Any, ...] = ()
    place: str = ""
    channel: tuple[Any, ...] = ()
    number: int = 0


def check_schedule(
    traces: Trace | Sequence[Trace], ranks: int = 4, partitions: Partitions | None = None
) -> int:
    """Check that ranks which run these traces end, in every order and on every branch.

    Law: it raises exactly if some order of the ranks' steps does not end.

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
    posted: Event | None = None


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
            if (sent := known[0].sent) is not None:
                self.events.append(Event("wait", name, place=place, number=sent))
            return [_Known(known[0].same)]
        if equation.op in (ops.SEND, ops.RECEIVE, ops.SENT):
            return self.message(equation, known, place)
        if not ops.communicates(equation):
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
        what = (equation.op.name, literals, sizes)
        self.events.append(Event("send", equation.op.name, group, what, place))
        self.num_sent += 1
        whole = len(self.members(group)) == self.ranks
        return _Known(whole and equation.op.name in (GATHER, REDUCE), self.num_sent - 1)

    def message(self, equation: Equation, known: list[_Known], place: str) -> list[_Known]:
        if equation.op == ops.SENT:
            if (post := known[1].posted) is not None:
                self.events.append(replace(post, kind="sent", op=equation.op.name, place=place))
            return []
        other, tag, group = [arg.value for arg in equation.args if isinstance(arg, Literal)][-3:]
        members, is_send = self.members(group), equation.op == ops.SEND
        ends = (self.rank, members[other]) if is_send else (members[other], self.rank)
        channel = (group, *ends, tag)
        type = equation.operands[0].type if is_send else equation.outputs[0].type
        number = sum(event.kind == "post" and event.channel == channel for event in self.events)
        kind: Kind = "post" if is_send else "receive"
        event = Event(kind, equation.op.name, group, (type,), place, channel, number)
        self.events.append(event)
        return [_Known(posted=event)]

    def members(self, group: str) -> tuple[int, ...]:
        return _members(self.groups, group, self.rank, self.ranks)

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
    sends = [[event for event in run if event.kind == "send"] for run in runs]
    start = tuple(0 for _ in runs)
    seen, todo = {start}, [start]
    while todo:
        done = todo.pop()
        places = _farthest(runs, done)
        heads = [_head(run[:at], n) for run, at, n in zip(runs, places, done, strict=True)]
        ready = _ready(heads, groups)
        for members in ready:
            _agree([head if rank in members else None for rank, head in enumerate(heads)])
            new = tuple(n + (rank in members) for rank, n in enumerate(done))
            if new not in seen:
                seen.add(new)
                todo.append(new)
        if not ready:
            _check_end(runs, sends, done, places)
    return len(seen)


def _farthest(runs: Sequence[tuple[Event, ...]], done: Sequence[int]) -> list[int]:
    """The place to which each rank comes before it waits, if so many of its collectives are done.

    Messages have one sender and one receiver, so no order of them changes how far ranks come.
    """
    places, posted = [0] * len(runs), defaultdict[Any, list[Event]](list)
    received, moved = Counter[Any](), True
    while moved:
        moved = False
        for rank, run in enumerate(runs):
            while places[rank] < len(run):
                event = run[places[rank]]
                if event.kind == "wait" and event.number >= done[rank]:
                    break
                if event.kind == "receive":
                    if received[event.channel] == len(posted[event.channel]):
                        break
                    _agree([posted[event.channel][received[event.channel]], event])
                    received[event.channel] += 1
                if event.kind == "sent" and event.number >= received[event.channel]:
                    break
                if event.kind == "post":
                    posted[event.channel].append(event)
                places[rank] += 1
                moved = True
    return places


def _head(run: Sequence[Event], done: int) -> Event | None:
    """The next collective of a rank that has done so many, if it has begun it."""
    begun = [event for event in run if event.kind == "send"]
    return begun[done] if done < len(begun) else None


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


def _agree(events: Sequence[Event | None]) -> None:
    met = {rank: event for rank, event in enumerate(events) if event is not None}
    if len({event.what for event in met.values()}) > 1:
        if any(event.kind == "receive" for event in met.values()):
            types = [str(event.what[0]) for event in met.values()]
            lines = [f"  {_text(event)}" for event in met.values()]
            raise LawBroken("\n".join([f"{types[0]} is sent, {types[1]} received", *lines]))
        lines = [f"  rank {rank}: {_text(event)}" for rank, event in met.items()]
        raise LawBroken("\n".join(["ranks meet in different collectives", *lines]))


def _check_end(
    runs: Sequence[Sequence[Event]],
    sends: Sequence[Sequence[Event]],
    done: Sequence[int],
    places: Sequence[int],
) -> None:
    """Raise where a rank has more to do, and none goes on."""
    lines, stuck = list[str](), False
    for rank, (run, own) in enumerate(zip(runs, sends, strict=True)):
        waits = done[rank] < len(own)
        event = run[places[rank]] if places[rank] < len(run) else own[done[rank]] if waits else None
        if event is not None and event.kind == "wait":
            event = own[done[rank]]
        stuck |= event is not None
        lines.append(f"  rank {rank} {f'waits in {_text(event)}' if event else 'is at its end'}")
    if stuck:
        raise LawBroken("\n".join(["ranks wait for each other for ever", *lines]))
    ends = Counter((e.channel, e.kind) for run in runs for e in run)
    for run in runs:
        for event in run:
            if event.kind == "post" and ends[event.channel, "receive"] <= event.number:
                raise LawBroken(f"a message is never received: {_text(event)}")


def _text(event: Event) -> str:
    """The op of an event, its group, for a message its other end, and the user's line."""
    to = ""
    if event.channel:
        _, source, target, tag = event.channel
        to = f" from rank {source} to rank {target} with tag {tag}"
    return f"{event.op}{to} of group {event.group!r} {event.place}".rstrip()


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
    return any(map(ops.communicates, trace.equations))
