"""The time of a program: its equations on one stream that computes and one for each group of ranks.

Equations run in the program's order. A collective starts when its operand is there and its group's
stream is free. Computing goes on until something waits for the result. So communication is hidden
as far as the program's own order lets it be.

Ranks of a pipeline run different programs. They are timed together: a message arrives when it was
sent and has travelled, so that the time in which a rank waits for it is the schedule's bubble.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.groups import SIMULATED
from thunder_fn.distributed.ranks import WAIT
from thunder_fn.errors import DistributedError
from thunder_fn.inspect.costs import FREE, Cost, cost_of
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, python_args
from thunder_fn.planning.fusing import fused_costs
from thunder_fn.planning.links import Collective, Kind, collective_seconds
from thunder_fn.planning.rates import Hardware

_Call: TypeAlias = dict[tuple[str, object], float]
"""The amounts that a part adds to sums, and its clocks in the end, from when it began."""

State: TypeAlias = defaultdict[tuple[str, object], float]
"""Clocks and sums: ("clock", stream), ("op", name), ("calls", name), ("sent", collective), ..."""

COMPUTE = ("clock", "")

KINDS: dict[str, Kind] = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "shard_dim_alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "receive": "receive",
}


@dataclass(frozen=True)
class Timeline:
    """The time of a step on one rank.

    Attributes:
        seconds: from the first equation to the last result.
        computing, communicating: the time that streams are busy.
        by_op: seconds of each op, longest first.
        collectives: each with how often it runs and its seconds in all, longest first.
        flops_by_dtype: operations, by the dtype that they compute in.
    """

    seconds: float
    computing: float
    communicating: float
    launches: int
    num_bytes: int
    by_op: tuple[tuple[str, float], ...]
    collectives: tuple[tuple[Collective, int, float], ...]
    flops_by_dtype: tuple[tuple[torch.dtype, int], ...]

    @property
    def exposed(self) -> float:
        """The seconds in which the rank computes nothing, because it waits for others."""
        return self.seconds - self.computing

    @property
    def flops(self) -> int:
        """The operations of all ops."""
        return sum(count for _, count in self.flops_by_dtype)

    @property
    def wire_bytes(self) -> float:
        """The bytes that the rank sends."""
        return sum(count * one.wire_bytes for one, count, _ in self.collectives)


def timeline(programs: tuple[Trace, ...], hardware: Hardware, *, fused: bool = False) -> Timeline:
    """Time programs that run one after the other on one rank.

    Args:
        programs: without composites.
        fused: whether neighbouring pointwise ops and reductions are one kernel.
    """
    streams = _Streams(hardware, fused)
    run, answer = streams.run(programs), None
    with suppress(StopIteration):
        while True:  # messages are received as if they had just been sent
            message = run.send(answer)
            answer = message.arrival if message.is_sent else streams.travel(message.equation)
    return streams.timeline()


def timelines(
    programs: Sequence[tuple[Trace, ...]], hardware: Hardware, *, fused: bool = False
) -> tuple[Timeline, ...]:
    """Time the ranks of a pipeline, each with programs of its own.

    Law: it ends for each program that `evaluate_ranks` ends for.

    Raises:
        DistributedError: ranks wait for each other.
    """
    calls = dict[Any, _Call]()
    streams = [_Streams(hardware, fused, rank, calls) for rank in range(len(programs))]
    runs = [one.run(own) for one, own in zip(streams, programs, strict=True)]
    waiting: dict[int, Message | None] = dict.fromkeys(range(len(runs)))
    sent = defaultdict[tuple[int, int], deque[float]](deque)
    while waiting:
        before = list(waiting.items())
        for rank, message in before:
            answer = None
            if message is not None:
                queue = sent[message.other, rank]
                if not queue:
                    continue
                answer = queue.popleft()
            try:
                while (message := runs[rank].send(answer)).is_sent:
                    sent[rank, message.other].append(message.arrival)
                    answer = None
                waiting[rank] = message
            except StopIteration:
                del waiting[rank]
        if before == list(waiting.items()):
            raise DistributedError(f"plan: ranks {', '.join(map(str, waiting))} wait for ever")
    return tuple(one.timeline() for one in streams)


@dataclass(frozen=True, eq=False)
class Message:
    """A message that a rank sends, and the time when it arrives; or one that it waits for.

    Attributes:
        other: the rank in the group that it goes to, or comes from.
    """

    equation: Equation
    other: int
    arrival: float = 0.0

    @property
    def is_sent(self) -> bool:
        """True for a message that this rank sends."""
        return self.equation.op == ops.SEND


def collective_of(
    equation: Equation, node_size: int, rank: int | None = None
) -> tuple[Collective, str]:
    """The collective of an equation, and the name of its group.

    Args:
        rank: of this process in the group, for messages; this process's by default.

    Raises:
        DistributedError: its ranks are simulated, so their nodes are unknown.
    """
    name = equation.op.name.split(".")[1]
    kind: Kind = next(kind for start, kind in KINDS.items() if name.startswith(start))
    literals = [arg.value for arg in equation.args if isinstance(arg, Literal)]
    group: str = next(value for value in reversed(literals) if isinstance(value, str))
    if group.startswith(SIMULATED):
        what = "plan: the ranks of this group are simulated, so their nodes are unknown"
        fix = "Make the mesh by `init_device_mesh` inside `thunder_fn.planning.fake_world(world)`."
        raise DistributedError(what, source=equation.source, fix=fix)
    ranks = internals.ranks_of_group(group)
    if kind in ("send", "receive"):
        own = torch.distributed.get_rank() if rank is None else ranks[rank]
        ranks = [own, ranks[_other_of(equation)]]
    if kind == "all-to-all" and _is_passed_on(equation):  # the slowest link of the ring
        kind, ranks = "send", [min(ranks), max(ranks)]
    whole = equation.outputs if kind in ("all-gather", "receive") else equation.operands
    num_bytes = sum(bytes_of(var.type) for var in whole)
    return Collective(kind, num_bytes, len(ranks), len({r // node_size for r in ranks})), group


def _is_passed_on(equation: Equation) -> bool:
    """Test for an exchange in which each rank sends to one other only, as a ring does."""
    options = python_args(equation, lambda _: None)[0]
    sizes = options[2] if len(options) > 2 else None
    return isinstance(sizes, list) and sum(bool(size) for size in sizes) == 1


def _other_of(equation: Equation) -> int:
    """The rank in the group that a message goes to, or comes from."""
    literals = (arg.value for arg in equation.args if isinstance(arg, Literal))
    return next(value for value in literals if type(value) is int)


Run: TypeAlias = Generator[Message, "float | None", None]
"""A rank that runs up to its next message; it is told when one that it waits for arrives."""


class _Streams:
    def __init__(
        self,
        hardware: Hardware,
        fused: bool,
        rank: int | None = None,
        calls: dict[Any, _Call] | None = None,
    ) -> None:
        self.hardware, self.fused, self.rank = hardware, fused, rank
        self.state: State = defaultdict(float)
        self.calls: dict[Any, _Call] = {} if calls is None else calls

    def run(self, traces: tuple[Trace, ...]) -> Run:
        """Run the equations of traces, in order."""
        for trace in traces:
            yield from self.equations(trace)

    def equations(self, trace: Trace) -> Run:
        """Run the equations of a trace."""
        arrives: dict[int, float] = {}
        for equation, cost in self.costs(trace):
            if equation.op.name == WAIT:
                arrival = arrives.get(equation.operands[0].index, 0.0)
                self.state[COMPUTE] = max(self.state[COMPUTE], arrival)
            elif equation.op == ops.SENT:
                continue
            elif equation.op == ops.RECEIVE:
                if self.rank is not None:  # the rank that sends it has the time
                    self.counted(equation)
                arrival = yield Message(equation, _other_of(equation))
                assert arrival is not None, "a rank goes on when a message has arrived"
                self.state[COMPUTE] = max(self.state[COMPUTE], arrival)
            elif ops.is_collective(equation.op):
                arrival = self.travel(equation)
                if equation.op == ops.SEND:
                    yield Message(equation, _other_of(equation), arrival)
                arrives.update((var.index, arrival) for var in equation.outputs)
            elif equation.op.kind == "composite":
                self.call(equation.body)
            elif equation.bodies:
                yield from self.repeat(equation)
            else:
                self.compute(equation, cost)

    def costs(self, trace: Trace) -> Iterator[tuple[Equation, Cost]]:
        """The cost of each equation; those of bodies count when they run."""
        if self.fused:
            return fused_costs(trace)
        return ((one, FREE if one.bodies else cost_of(one)) for one in trace.equations)

    def compute(self, equation: Equation, cost: Cost) -> None:
        """Run an equation on the stream that computes."""
        name, dtype = equation.op.name, _dtype_of(equation)
        launches = 1 if cost.num_bytes else 0
        beside = self.hardware.op_seconds if launches else self.hardware.view_seconds
        if _leaves_the_device(equation):
            moved = sum(bytes_of(var.type) for var in equation.operands)
            took = beside + moved / self.hardware.host_bytes_per_second
        else:
            took = beside + cost.seconds(self.hardware.machine(equation.op, dtype))
        self.add({COMPUTE: took, ("busy", ""): took, ("op", name): took})
        self.add({("flops", dtype): cost.flops, ("bytes", ""): cost.num_bytes})
        self.add({("launches", ""): launches})

    def travel(self, equation: Equation) -> float:
        """Run a collective on its group's stream, and return the time when its result arrives."""
        took, group = self.counted(equation)
        stream = ("clock", group)
        self.state[stream] = max(self.state[stream], self.state[COMPUTE]) + took
        self.add({("sending", ""): took})
        return self.state[stream]

    def counted(self, equation: Equation) -> tuple[float, str]:
        """Count a collective; the seconds that it takes, and its group."""
        one, group = collective_of(equation, self.hardware.node_size, self.rank)
        took = collective_seconds(one, self.hardware)
        self.add({("sent", one): took, ("times", one): 1, ("launches", ""): 1})
        self.add({("bytes", ""): cost_of(equation).num_bytes})
        return took, group

    def call(self, body: Trace) -> None:
        """Run a part of a program in which no message is sent, once for equal ones.

        Its time follows from how far the other streams are ahead of the one that computes.
        """
        now = self.state[COMPUTE]
        clocks = {key: self.state[key] for key in self.state if key[0] == "clock"}
        ahead = {key: round(time - now, 12) for key, time in clocks.items() if time > now}
        call = body, frozenset(ahead.items())
        if call not in self.calls:
            alone = _Streams(self.hardware, self.fused, self.rank, self.calls)
            alone.state.update(ahead)
            for message in alone.equations(body):
                what = f"plan: {message.equation.op} is inside of a part without messages"
                raise DistributedError(what, source=message.equation.source)
            self.calls[call] = dict(alone.state)
        for key, amount in self.calls[call].items():
            if key[0] == "clock":
                self.state[key] = max(self.state[key], now + amount)
            else:
                self.state[key] += amount

    def repeat(self, equation: Equation) -> Run:
        """Run a loop's body, or the last branch of a choice.

        The second step of a loop is like all later ones: the first finds streams idle.
        """
        body = dce(inline(equation.bodies[-1]))
        length = int(equation.literals.get("length", 1))
        if length:
            yield from self.equations(body)
        if length > 1:
            before = self.state.copy()
            yield from self.equations(body)
            for key, value in list(self.state.items()):
                self.state[key] += (length - 2) * (value - before[key])

    def add(self, amounts: dict[Any, float]) -> None:
        """Add to sums and clocks."""
        for key, amount in amounts.items():
            self.state[key] += amount

    def timeline(self) -> Timeline:
        of: dict[str, dict[Any, Any]] = {}
        for (kind, key), value in self.state.items():
            of.setdefault(kind, {})[key] = value
        by_op = sorted(of.get("op", {}).items(), key=lambda item: -item[1])
        sent = sorted(of.get("sent", {}).items(), key=lambda item: -item[1])
        total = lambda kind: of.get(kind, {}).get("", 0.0)
        return Timeline(
            max(of.get("clock", {}).values(), default=0.0),
            total("busy"),
            total("sending"),
            int(total("launches")),
            int(total("bytes")),
            tuple(by_op),
            tuple((one, int(of["times"][one]), seconds) for one, seconds in sent),
            tuple((dtype, int(count)) for dtype, count in of.get("flops", {}).items() if count),
        )


def _leaves_the_device(equation: Equation) -> bool:
    """Test for a copy between a device and the CPU's memory."""
    types = [var.type for var in (*equation.operands, *equation.outputs)]
    devices = {one.device.type for one in types if isinstance(one, TensorType) and one.shape}
    return "cpu" in devices and len(devices) > 1


def _dtype_of(equation: Equation) -> torch.dtype:
    """The dtype that an equation computes in: that of its first floating operand or result."""
    types = (var.type for var in (*equation.operands, *equation.outputs))
    dtypes = [type.dtype for type in types if isinstance(type, TensorType)]
    floating = (dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex)
    return next(floating, torch.float32)
