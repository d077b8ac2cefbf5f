"""The trace of each rank: the halves of its stages in the order of a schedule, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_fn.distributed import messages as messages  # defines the ops
from thunder_fn.distributed.groups import Group
from thunder_fn.interpreters.grad import add, full, zeros
from thunder_fn.interpreters.pipeline.schedules import Action, Schedule
from thunder_fn.interpreters.pipeline.stages import Stage, halved
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask, chosen, scattered
from thunder_fn.ir.trace import Atom, Literal, TensorType, Trace, TraceBuilder, Type, Var, type_of

aten = ops.aten


@memo(64)
def program_of(
    trace: Trace,
    stages: tuple[Stage, ...],
    schedule: Schedule,
    group: Group,
    parts: tuple[tuple[int, ...], ...],
    wanted_inputs: Mask,
) -> tuple[Trace, tuple[int, ...]]:
    """The trace of one rank's step.

    Law: run on all ranks, each gives the mean loss, and together they give its gradients. They are
        those of eager's loop over micro-batches of ``(loss(params, part) / micro).backward()``:
        added up in the order of micro-batches. Parameters that several stages read are added up
        from the last stage to the first.

    Args:
        trace: of the loss, on the inputs of a whole step.
        parts: for each micro-batch the places of its inputs; the trace reads those of the first.
        wanted_inputs: one per input of the trace; True where a gradient is wanted.

    Returns:
        The trace from the inputs to the loss and this rank's gradients; and the places of the
            inputs whose gradients these are.
    """
    rank = _Rank(TraceBuilder(f"{trace.name}_rank_{group.rank}"), stages, schedule, group, parts)
    rank.inputs = rank.builder.take(trace.input_types)
    for action in schedule.with_messages()[group.rank]:
        rank.act(action)
    rank.share_gradients(wanted_inputs)
    value = rank.share_loss()
    own = sorted(rank.totals)
    return rank.builder.build((value, *(rank.totals[place] for place in own))), tuple(own)


@dataclass
class _Rank:
    """A rank's trace while it grows.

    `found` are values by stage, micro-batch and name: what a stage hands on ("out"), its residuals
    ("kept"), gradients of what it received ("back"), what its second half reads ("rest").
    `sums` are the gradients of a stage's inputs, by stage and place.
    """

    builder: TraceBuilder
    stages: Sequence[Stage]
    schedule: Schedule
    group: Group
    parts: Sequence[Sequence[int]]
    inputs: tuple[Var, ...] = ()
    found: dict[tuple[int, int, str], tuple[Atom, ...]] = field(
        default_factory=dict[tuple[int, int, str], tuple[Atom, ...]]
    )
    handles: dict[tuple[Any, ...], list[tuple[Atom, Atom]]] = field(
        default_factory=dict[tuple[Any, ...], list[tuple[Atom, Atom]]]
    )
    sums: dict[tuple[int, int], Atom] = field(default_factory=dict[tuple[int, int], Atom])
    totals: dict[int, Atom] = field(default_factory=dict[int, Atom])
    value: Atom | None = None

    # ---- actions ----

    def act(self, action: Action) -> None:
        """Append one action."""
        stage, micro = action.stage, action.micro
        match action.kind:
            case "F":
                self.forward(stage, micro)
            case "B":
                self.backward(stage, micro)
            case "I":
                self.backward_of_received(stage, micro)
            case "W":
                self.backward_of_inputs(stage, micro)
            case "SEND_F":
                to = self.schedule.owners[stage + 1]
                self.send(action, self.found[stage, micro, "out"], to)
            case "SEND_B":
                self.send(action, self.found[stage, micro, "back"], self.schedule.owners[stage - 1])
            case "RECV_F":
                types = self.stages[stage - 1].trace.output_types
                source = self.schedule.owners[stage - 1]
                self.found[stage - 1, micro, "out"] = self.receive(types, source)
            case "RECV_B":
                source = self.schedule.owners[stage + 1]
                types = chosen(self.stages[stage].trace.output_types, self.stages[stage].handed)
                self.found[stage + 1, micro, "back"] = self.receive(types, source)
            case "SENT_F" | "SENT_B":
                self.await_sent(("SEND" + action.kind[4:], stage, micro))

    def forward(self, stage: int, micro: int) -> None:
        one = self.stages[stage]
        first, here = self.parts[0], self.parts[micro]
        moved = dict(zip(first, here, strict=True))
        arguments: list[Atom] = [self.inputs[moved.get(place, place)] for place in one.reads]
        arguments += self.found.pop((stage - 1, micro, "out"), ()) if stage else ()
        results = self.put(one.halves.forward, arguments)
        outputs = results[: len(one.trace.outputs)]
        self.found[stage, micro, "kept"] = one.halves.residual_values(arguments, results)
        if stage + 1 < len(self.stages):
            self.found[stage, micro, "out"] = outputs
        else:
            part = self.divided(outputs[0])
            self.value = part if self.value is None else add(self.builder, self.value, part)

    def backward(self, stage: int, micro: int) -> None:
        one = self.stages[stage]
        results = self.put(one.halves.backward, self.given_to_backward(stage, micro))
        self.collect(stage, micro, one.halves.gradients, results)

    def backward_of_received(self, stage: int, micro: int) -> None:
        one = self.stages[stage]
        two, places = halved(one)
        arguments = self.given_to_backward(stage, micro)
        results = self.put(two.forward, arguments)
        self.found[stage, micro, "rest"] = two.residual_values(arguments, results)
        count = len(one.reads)
        received = scattered(places, one.wanted)[count:]
        self.hand_back(stage, micro, received, results)

    def backward_of_inputs(self, stage: int, micro: int) -> None:
        one = self.stages[stage]
        two, places = halved(one)
        results = self.put(two.backward, self.found.pop((stage, micro, "rest")))
        first = sum(one.received)
        own = [None if place is None else place - first for place in places]
        self.collect_inputs(stage, own, results)

    def given_to_backward(self, stage: int, micro: int) -> tuple[Atom, ...]:
        """The residuals of a stage's forward, and its cotangents."""
        kept = self.found.pop((stage, micro, "kept"))
        if stage + 1 < len(self.stages):
            return (*kept, *self.found.pop((stage + 1, micro, "back")))
        loss = self.stages[stage].trace.outputs[0]
        type = type_of(loss)
        assert isinstance(type, TensorType), "a loss is a tensor"
        return (*kept, full(self.builder, type, 1 / self.schedule.micro))

    def collect(
        self, stage: int, micro: int, places: Sequence[int | None], results: tuple[Atom, ...]
    ) -> None:
        """Keep the gradients of a whole backward."""
        one = self.stages[stage]
        received = scattered(places, one.wanted)[len(one.reads) :]
        self.hand_back(stage, micro, received, results)
        self.collect_inputs(stage, places, results)

    def hand_back(
        self, stage: int, micro: int, places: Sequence[int | None], results: tuple[Atom, ...]
    ) -> None:
        """Keep the gradients of what a stage received, for the stage before it."""
        if stage:
            found = tuple(results[place] for place in places if place is not None)
            self.found[stage, micro, "back"] = found

    def collect_inputs(
        self, stage: int, places: Sequence[int | None], results: tuple[Atom, ...]
    ) -> None:
        """Add the gradients of the step's inputs to those of the micro-batches before."""
        one = self.stages[stage]
        for read, place in zip(one.reads, scattered(places, one.wanted), strict=False):
            if place is not None:
                known = self.sums.get((stage, read))
                new = results[place]
                self.sums[stage, read] = new if known is None else add(self.builder, known, new)

    # ---- what all ranks tell each other at the end ----

    def share_gradients(self, wanted: Mask) -> None:
        """Add up the gradients of inputs that several stages read, on all ranks that read them.

        An input that none reads belongs to the first stage.
        """
        for place, flag in enumerate(wanted):
            reading = [i for i, stage in enumerate(self.stages) if place in stage.reads] or [0]
            ranks = list(dict.fromkeys(self.schedule.owners[stage] for stage in reversed(reading)))
            if not flag or self.group.rank not in ranks:
                continue
            own = [self.sums.get((stage, place)) for stage in reversed(reading)]
            total = self.total([one for one in own if one is not None], self.inputs[place])
            self.totals[place] = self.everywhere(place, total, ranks)

    def total(self, parts: Sequence[Atom], like: Var) -> Atom:
        """The sum of gradients; zeros if there are none."""
        assert isinstance(like.type, TensorType), "inputs with gradients are tensors"
        if not parts:
            return zeros(self.builder, like.type)
        found = parts[0]
        for part in parts[1:]:
            found = add(self.builder, found, part)
        return found

    def everywhere(self, place: int, own: Atom, ranks: Sequence[int]) -> Atom:
        """The sum of the ranks' gradients, in this order of ranks; the first adds them up."""
        if len(ranks) == 1:
            return own
        root, key = ranks[0], ("gradient", place)
        if self.group.rank == root:
            for rank in ranks[1:]:
                own = add(self.builder, own, *self.receive((type_of(own),), rank))
            for rank in ranks[1:]:
                self.send((*key, rank), (own,), rank)
            for rank in ranks[1:]:
                self.await_sent((*key, rank))
            return own
        self.send(key, (own,), root)
        (found,) = self.receive((type_of(own),), root)
        self.await_sent(key)
        return found

    def share_loss(self) -> Atom:
        """The mean of the micro-batches' losses, which the last stage tells all."""
        last, ranks = self.schedule.owners[-1], range(len(self.schedule.rows))
        (type,) = self.stages[-1].trace.output_types[:1]
        if self.group.rank != last:
            return self.receive((type,), last)[0]
        value = self.value
        assert value is not None, "the rank of the last stage has losses"
        others = [rank for rank in ranks if rank != last]
        for rank in others:
            self.send(("loss", rank), (value,), rank)
        for rank in others:
            self.await_sent(("loss", rank))
        return value

    def divided(self, loss: Atom) -> Atom:
        """A micro-batch's part of the mean loss."""
        return ops.emit(self.builder, aten.div.Tensor, (loss, self.schedule.micro), type_of(loss))

    # ---- equations ----

    def put(self, half: Trace, arguments: Sequence[Atom]) -> tuple[Atom, ...]:
        """Append a half of a stage, as a composite."""
        op = ops.composite(half.name)
        return self.builder.add(op, tuple(arguments), half.output_types, bodies=(half,))

    def send(self, key: Any, values: Sequence[Atom], to: int) -> None:
        """Append sends of values, which travel from here on."""
        key = (key.kind, key.stage, key.micro) if isinstance(key, Action) else key
        travelling = list[tuple[Atom, Atom]]()
        for value in values:
            type = type_of(value)
            assert isinstance(type, TensorType), "messages are tensors"
            (x,) = self.builder.add(ops.CONTIGUOUS, (value,), (type,))
            arguments = (x, Literal(to), Literal(0), Literal(self.group.name))
            (handle,) = self.builder.add(ops.SEND, arguments, (_handle_type(type),))
            travelling.append((x, handle))
        self.handles[key] = travelling

    def await_sent(self, key: tuple[Any, ...]) -> None:
        """Append the waits for the sends of one key."""
        for x, handle in self.handles.pop(key):
            self.builder.add(ops.SENT, (x, handle), ())

    def receive(self, types: Sequence[Type], source: int) -> tuple[Atom, ...]:
        """Append receives of values of these types."""
        found = list[Atom]()
        for type in types:
            assert isinstance(type, TensorType), "messages are tensors"
            here = self.inputs[self.parts[0][0]]  # others may be parameters of other ranks
            shape = tuple(Literal(size) for size in type.shape)
            ends = (Literal(source), Literal(0), Literal(self.group.name))
            arguments = (here, shape, Literal(type.dtype), *ends)
            found += self.builder.add(ops.RECEIVE, arguments, (type,))
        return tuple(found)


def _handle_type(type: TensorType) -> TensorType:
    return TensorType(torch.uint8, (0,), type.device)
