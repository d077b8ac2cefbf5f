"""Schedules of a pipeline: for each rank, the actions that it takes, in order. They are data.

    0F1        the forward of stage 0 on micro-batch 1
    0B1        its backward: gradients of its inputs and of its weights
    0I1, 0W1   the two halves of that: of its inputs, and of its weights
    0SEND_F1, 1RECV_F1, 1SEND_B1, 0RECV_B1, ...   what travels between them

Sends do not wait. Receives do, and take the messages of another rank in the order in which it sends
them. So ranks are a Kahn network: whether they come to an end does not depend on their speed, and
one run of the table (`in_order`) decides it.

Sources: GPipe (arXiv:1811.06965), PipeDream-Flush (arXiv:2006.09503), interleaved stages
(arXiv:2104.04473), zero bubble (arXiv:2401.10241). The words are those of
`torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal as Choice

from thunder_fn.errors import DistributedError
from thunder_fn.ir.notebook import Shown

Kind = Choice["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "SENT_F", "SENT_B"]
COMPUTE, SENDS, RECEIVES = ("F", "B", "I", "W"), ("SEND_F", "SEND_B"), ("RECV_F", "RECV_B")
TOOK: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""The seconds of actions, where nobody says otherwise: a backward has twice the products."""


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action of a rank: its kind, the stage and the micro-batch.

    Example:
        >>> from thunder_fn.parameters import Action
        >>> str(Action("F", stage=1, micro=2))  # the forward of micro-batch 2 on stage 1
        '1F2'
    """

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


Row = tuple[Action, ...]


@dataclass(frozen=True, repr=False)
class Schedule(Shown):
    """The actions of each rank that compute, in order.

    Attributes:
        rows: for each rank, forwards and backwards. A backward is one action (B), or two (I and W).

    Raises:
        DistributedError: an action is missing or twice, a stage is on two ranks, or ranks wait for
            each other; names the actions.

    Example:
        >>> print(one_f_one_b(2, 3))
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
        >>> one_f_one_b(2, 3).stored
        (2, 1)
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        _check_complete(self)
        self.with_messages()

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max(action.stage for row in self.rows for action in row)

    @property
    def micro(self) -> int:
        """The number of micro-batches."""
        return 1 + max(action.micro for row in self.rows for action in row)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of each stage."""
        found = {action.stage: rank for rank, row in enumerate(self.rows) for action in row}
        return tuple(found[stage] for stage in range(self.stages))

    @property
    def stored(self) -> tuple[int, ...]:
        """For each rank, the most forwards whose values wait for their backward at once."""
        return tuple(map(_most_stored, self.rows))

    def seconds(self, **each: float) -> float:
        """The time of a step in which an action takes so long: ``seconds(F=1, B=2, SEND_F=0.1)``.

        Example:
            >>> gpipe(4, 8).seconds(), interleaved(4, 8, 2).seconds(F=0.5, B=1)
            (33.0, 28.5)
        """
        return max(timed(self.with_messages(), {**TOOK, **each}))

    def bubble(self, **each: float) -> float:
        """The part of the ranks' time in which they compute nothing.

        Example:
            >>> one_f_one_b(4, 4).bubble()  # 3 of 7
            0.4285714285714286
        """
        took = {**TOOK, **each}
        busy = sum(took[action.kind] for row in self.rows for action in row)
        return 1 - busy / (self.seconds(**each) * len(self.rows))

    def with_messages(self) -> tuple[Row, ...]:
        """The rows with what the ranks send, receive and await; see `with_messages`."""
        return with_messages(self)

    def __str__(self) -> str:
        return "\n".join(
            f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)
        )


# ---- schedules ----


def gpipe(ranks: int, micro: int) -> Schedule:
    """Run all forwards, then all backwards. Each rank stores the values of all micro-batches.

    Example:
        >>> print(gpipe(2, 2))
        rank 0: 0F0 0F1 0B0 0B1
        rank 1: 1F0 1F1 1B0 1B1
    """
    return Schedule(
        tuple(
            tuple(Action(kind, rank, m) for kind in ("F", "B") for m in range(micro))
            for rank in range(ranks)
        )
    )


def one_f_one_b(ranks: int, micro: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush). Rank r stores ``min(ranks - r, micro)``
    micro-batches, in the time of `gpipe`.
    """
    return interleaved(ranks, micro, 1)


def interleaved(ranks: int, micro: int, chunks: int = 2) -> Schedule:
    """1F1B where each rank has several stages, of which later ones are `ranks` apart. The bubble is
    `chunks` times smaller.

    Raises:
        DistributedError: there are several stages on a rank, and `ranks` does not divide `micro`.
    """
    if chunks > 1 and micro % ranks:
        what = f"pipeline: interleaved stages on {ranks} ranks, and {micro} micro-batches"
        raise DistributedError(what, fix="Give a multiple of the number of ranks.")

    def row(rank: int) -> Iterator[Action]:
        place = lambda k: (k // ranks) % chunks
        at = lambda k: k // (ranks * chunks) * ranks + k % ranks if chunks > 1 else k
        forward = lambda k: Action("F", place(k) * ranks + rank, at(k))
        backward = lambda k: Action("B", (chunks - 1 - place(k)) * ranks + rank, at(k))
        total, ahead = micro * chunks, ranks - rank - 1
        first = min(total, ahead if chunks == 1 else 2 * ahead + (chunks - 1) * ranks)
        yield from map(forward, range(first))
        for k in range(first, total):
            yield forward(k)
            yield backward(k - first)
        yield from map(backward, range(total - first, total))

    return Schedule(tuple(tuple(row(rank)) for rank in range(ranks)))


def zero_bubble(ranks: int, micro: int) -> Schedule:
    """1F1B whose backwards are halved (ZB-H1): gradients of inputs go first, and those of weights
    fill the time in which a rank would wait. Each rank stores at most ``min(ranks, micro)``
    micro-batches.
    """

    def row(rank: int) -> Iterator[Action]:
        first = min(micro, ranks - rank - 1)
        yield from (Action("F", rank, m) for m in range(first))
        for m in range(micro):
            if first + m < micro:
                yield Action("F", rank, first + m)
            yield Action("I", rank, m)
            if m >= rank:
                yield Action("W", rank, m - rank)
        yield from (Action("W", rank, m) for m in range(max(0, micro - rank), micro))

    return Schedule(tuple(tuple(row(rank)) for rank in range(ranks)))


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def _most_stored(row: Row) -> int:
    stored, most = 0, 0
    for action in row:
        stored += (action.kind == "F") - (action.kind in ("B", "W"))
        most = max(most, stored)
    return most


# ---- checks ----


def _check_complete(schedule: Schedule) -> None:
    """Check that each stage is on one rank and runs each micro-batch once, forward and backward."""
    count = Counter(action for row in schedule.rows for action in row)
    twice = [str(action) for action, times in count.items() if times > 1]
    strange = [str(action) for action in count if action.kind not in COMPUTE]
    on = defaultdict[int, set[int]](set)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            on[action.stage].add(rank)
    split = [f"stage {stage}" for stage, ranks in on.items() if len(ranks) > 1]
    missing = [
        f"{stage}{kind}{micro}"
        for stage in range(max(on, default=0) + 1)
        for micro in range(schedule.micro if count else 0)
        for kind in ("F", "B")
        if not _is_there(count, kind, stage, micro)
    ]
    for what, found in (
        ("actions that do not compute", strange),
        ("actions that are there twice", twice),
        ("stages on more than one rank", split),
        ("no, or not one, of these", missing if count else ["actions"]),
    ):
        if found:
            text = f"pipeline: a schedule with {what}: {', '.join(found[:8])}"
            fix = "Give each stage to one rank, with F, and B or I and W, for each micro-batch."
            raise DistributedError(text, fix=fix)


def _is_there(count: Mapping[Action, int], kind: str, stage: int, micro: int) -> bool:
    has = lambda one: Action(one, stage, micro) in count
    if kind == "F":
        return has("F")
    return (has("B"), has("I"), has("W")) in ((True, False, False), (False, True, True))


# ---- messages ----


def with_messages(schedule: Schedule) -> tuple[Row, ...]:
    """The rows of a schedule with what the ranks send, receive and await.

    Law: the messages from one rank to another are received in the order in which they are sent. A
        send is awaited as soon as its rank knows, by what it has received since, that the message
        has arrived; such a wait takes no time.
    """
    sent = tuple(tuple(_with_sends(schedule, row)) for row in schedule.rows)
    queues = defaultdict[tuple[int, int], deque[Action]](deque)
    for rank, row in enumerate(sent):
        for action in row:
            if action.kind in SENDS:
                queues[rank, _reader(schedule, action)].append(action)
    rows = tuple(
        tuple(_with_receives(schedule, rank, row, queues)) for rank, row in enumerate(sent)
    )
    return _with_waits(rows, in_order(rows))


def _with_sends(schedule: Schedule, row: Row) -> Iterator[Action]:
    for action in row:
        yield action
        kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
        step = 1 if kind == "SEND_F" else -1
        if action.kind == "W" or not 0 <= action.stage + step < schedule.stages:
            continue
        if schedule.owners[action.stage + step] != schedule.owners[action.stage]:
            yield Action(kind, action.stage, action.micro)


def _reader(schedule: Schedule, send: Action) -> int:
    """The rank to which a message goes."""
    return schedule.owners[send.stage + (1 if send.kind == "SEND_F" else -1)]


def _with_receives(
    schedule: Schedule, rank: int, row: Row, queues: Mapping[tuple[int, int], deque[Action]]
) -> Iterator[Action]:
    here = set[Action]()
    for action in row:
        message = _message_of(action, schedule.stages)
        if message is not None and schedule.owners[message.stage] != rank:
            while message not in here:
                found = queues[schedule.owners[message.stage], rank].popleft()
                here.add(found)
                yield _receive_of(found)
        yield action


def _message_of(action: Action, stages: int) -> Action | None:
    """The message that an action needs, if it comes from another rank."""
    if action.kind == "F" and action.stage > 0:
        return Action("SEND_F", action.stage - 1, action.micro)
    if action.kind in ("B", "I") and action.stage + 1 < stages:
        return Action("SEND_B", action.stage + 1, action.micro)
    return None


def _receive_of(send: Action) -> Action:
    if send.kind == "SEND_F":
        return Action("RECV_F", send.stage + 1, send.micro)
    return Action("RECV_B", send.stage - 1, send.micro)


def _send_of(receive: Action) -> Action:
    if receive.kind == "RECV_F":
        return Action("SEND_F", receive.stage - 1, receive.micro)
    return Action("SEND_B", receive.stage + 1, receive.micro)


def in_order(rows: Sequence[Row]) -> list[tuple[int, Action]]:
    """Return the actions of all rows, with their ranks, in an order in which they can happen.

    Raises:
        DistributedError: ranks wait for each other; names the actions.
    """
    done = [set[Action]() for _ in rows]
    at, found, before = [0] * len(rows), list[tuple[int, Action]](), -1
    last = max((action.stage for row in rows for action in row), default=0)
    sent = set[Action]()
    while before < len(found):
        before = len(found)
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and _is_ready(
                action := row[at[rank]], last, done[rank], sent
            ):
                done[rank].add(action)
                sent.update((action,) if action.kind in SENDS else ())
                found.append((rank, action))
                at[rank] += 1
    stuck = [
        f"rank {rank} at {row[place]}"
        for rank, (row, place) in enumerate(zip(rows, at, strict=True))
        if place < len(row)
    ]
    if stuck:
        what = f"pipeline: the ranks of this schedule wait for ever: {', '.join(stuck)}"
        raise DistributedError(what, fix="Put each action after those that it needs.")
    return found


def _is_ready(action: Action, last: int, done: set[Action], sent: set[Action]) -> bool:
    """Test that a rank that has done so much, and was sent so much, has what an action reads."""
    stage, micro = action.stage, action.micro
    has = lambda stage, *kinds: any(Action(kind, stage, micro) in done for kind in kinds)
    match action.kind:
        case "RECV_F" | "RECV_B":
            return _send_of(action) in sent
        case "F":
            return stage == 0 or has(stage, "RECV_F") or has(stage - 1, "F")
        case "B" | "I":
            later = stage == last or has(stage, "RECV_B") or has(stage + 1, "B", "I")
            return later and has(stage, "F")
        case "W":
            return has(stage, "I")
        case _:
            return True


def _with_waits(rows: Sequence[Row], order: Sequence[tuple[int, Action]]) -> tuple[Row, ...]:
    """The rows, with a wait for each message where its rank knows that it has arrived, or last.

    A rank knows what has happened before by vector clocks, which messages carry (Mattern, 1988).
    """
    clocks = [[0] * len(rows) for _ in rows]
    carried, arrived = dict[Action, list[int]](), dict[Action, tuple[int, int]]()
    travelling, new = [list[Action]() for _ in rows], [list[Action]() for _ in rows]
    for rank, action in order:
        new[rank].append(action)
        clocks[rank][rank] += 1
        if action.kind in SENDS:
            travelling[rank].append(action)
            carried[action] = clocks[rank].copy()
        elif action.kind in RECEIVES:
            send = _send_of(action)
            clocks[rank] = [*map(max, clocks[rank], carried[send])]
            arrived[send] = rank, clocks[rank][rank]
            known = [
                one
                for one in travelling[rank]
                if one in arrived and clocks[rank][arrived[one][0]] >= arrived[one][1]
            ]
            travelling[rank] = [one for one in travelling[rank] if one not in known]
            new[rank] += map(_wait_of, known)
    return tuple((*row, *map(_wait_of, left)) for row, left in zip(new, travelling, strict=True))


def _wait_of(send: Action) -> Action:
    return Action("SENT_F" if send.kind == "SEND_F" else "SENT_B", send.stage, send.micro)


def timed(rows: Sequence[Row], seconds: Mapping[str, float]) -> list[float]:
    """The time at which each rank has done its row, where actions of a kind take so long."""
    clocks, arrival = [0.0] * len(rows), dict[Action, float]()
    for rank, action in in_order(rows):
        if action.kind in RECEIVES:
            clocks[rank] = max(clocks[rank], arrival[_send_of(action)])
        clocks[rank] += seconds.get(action.kind, 0.0)
        if action.kind in SENDS:
            arrival[action] = clocks[rank]
    return clocks
