"""Pipelines: schedules as data, and steps on simulated ranks that equal eager's loop over micro-batches. No processes."""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.capture import pytree
from thunder_fn.distributed.collectives import all_gathered
from thunder_fn.distributed.ranks import GATHER, WAIT, evaluate_ranks
from thunder_fn.distributed.schedule import overlapped
from thunder_fn.errors import DistributedError, MissingRule, RewriteError
from thunder_fn.interpreters.pipeline.schedules import SCHEDULES, Action, Schedule, interleaved, one_f_one_b
from thunder_fn.interpreters.pipeline.stages import stages_of
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Trace
from thunder_fn.parameters import simulated, simulated_mesh
from thunder_fn.planning import fake_world
from thunder_fn.testing import LawBroken, check_schedule

Params = Any


def eager(f: Any, params: Params, micro: int, *batch: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """The loop that a pipeline equals: the loss, and the gradients of the leaves of the parameters."""
    leaves, spec = pytree.flatten(params)
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    total = torch.zeros((), dtype=own[0].dtype)
    for parts in zip(*(x.chunk(micro) for x in batch), strict=True):
        loss = f(pytree.unflatten(spec, own), *parts) / micro
        loss.backward()
        total = total + loss.detach()
    return total, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in own]


def pipelined(f: Any, ranks: int, params: Params, *batch: Any, **options: Any) -> list[tuple[Any, dict[int, Any]]]:
    """On each simulated rank the loss, and the gradients of its parameters, by their places."""
    steps = [tfn.pipeline(f, group, **options) for group in simulated(ranks)]
    held = [step.prepare(params, *batch) for step in steps]
    traces = [tfn.trace(step, own, *batch) for step, own in zip(steps, held, strict=True)]
    for trace in traces:
        tfn.check(trace)
    check_schedule(traces)
    leaves = [pytree.flatten(own)[0] for own in held]
    found = list[tuple[Any, dict[int, Any]]]()
    for own, (value, *grads) in zip(leaves, evaluate_ranks(traces, [[*own, *batch] for own in leaves]), strict=True):
        places = [place for place, leaf in enumerate(own) if not leaf.is_meta]
        found.append((value, dict(zip(places, grads, strict=True))))
    return found


def check_equal(f: Any, ranks: int, params: Params, *batch: Any, tied: tuple[int, ...] = (), **options: Any) -> None:
    """All ranks have the loss, and together all gradients: those of eager's loop, to the bit but for tied parameters."""
    micro = options["micro"]
    value, grads = eager(f, params, micro, *batch)
    seen = set[int]()
    for loss, own in pipelined(f, ranks, params, *batch, **options):
        assert torch.equal(loss, value)
        for place, grad in own.items():
            torch.testing.assert_close(grad, grads[place])
            assert place in tied or torch.equal(grad, grads[place])
        seen |= set(own)
    assert seen == set(range(len(grads)))


# ---- schedules ----


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 2, 6, 15])
def test_what_a_schedule_promises(name: str, ranks: int, micro: int) -> None:
    if name == "interleaved" and micro % ranks:
        with pytest.raises(DistributedError, match="Give a multiple of the number of ranks"):
            SCHEDULES[name](ranks, micro)
        return
    schedule = SCHEDULES[name](ranks, micro)
    promised = {
        "gpipe": [micro] * ranks,
        "1f1b": [min(ranks - rank, micro) for rank in range(ranks)],
        "interleaved": [min(2 * micro, 2 * (ranks - rank - 1) + ranks + 1) for rank in range(ranks)],
        "zero_bubble": [min(ranks, micro)] * ranks,
    }[name]
    assert all(stored <= limit for stored, limit in zip(schedule.stored, promised, strict=True))
    if name != "zero_bubble":
        assert list(schedule.stored) == promised
    full = {"gpipe": 3 * (micro + ranks - 1), "1f1b": 3 * (micro + ranks - 1)}
    assert schedule.seconds() == full.get(name, schedule.seconds())
    if micro >= ranks > 1:
        flat = one_f_one_b(ranks, micro).bubble()
        assert schedule.bubble() < flat or name in full
    assert interleaved(ranks, micro, 1) == one_f_one_b(ranks, micro)


@given(data=st.data(), ranks=st.integers(1, 4), micro=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_drawn_schedules_end_or_name_who_waits(data: Any, ranks: int, micro: int) -> None:
    """Independent of the order in which the table is run: each rank's row is shuffled, and a schedule is refused exactly if
    its actions, by what each needs, have a circle."""
    rows = tuple(
        tuple(data.draw(st.permutations([Action(kind, rank, m) for kind in ("F", "B") for m in range(micro)])))
        for rank in range(ranks)
    )
    edges = {(a, b) for row in rows for a, b in pairwise(row)}
    for rank in range(ranks):
        for m in range(micro):
            edges.add((Action("F", rank, m), Action("B", rank, m)))
            if rank:
                edges.add((Action("F", rank - 1, m), Action("F", rank, m)))
                edges.add((Action("B", rank, m), Action("B", rank - 1, m)))
    left = {action for row in rows for action in row}
    while free := {one for one in left if not any(b == one and a in left for a, b in edges)}:
        left -= free
    if left:
        with pytest.raises(DistributedError, match="wait for ever: rank"):
            Schedule(rows)
    else:
        schedule = Schedule(rows)
        assert sum(len(row) for row in schedule.with_messages()) == sum(map(len, rows)) + 6 * (ranks - 1) * micro


def test_a_table_that_prints() -> None:
    schedule = one_f_one_b(2, 2)
    assert str(schedule) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    rows = [" ".join(map(str, row)) for row in schedule.with_messages()]
    assert rows == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0SENT_F0 0B0 0RECV_B1 0SENT_F1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1SENT_B0 1SENT_B1",
    ]


def test_schedules_that_are_none() -> None:
    forward, backward = Action("F", 0, 0), Action("B", 0, 0)
    later = Action("F", 1, 0), Action("B", 1, 0)
    for rows, text in (
        (((forward, backward, forward),), "pipeline: a schedule with actions that are there twice: 0F0"),
        (((forward,),), "pipeline: a schedule with no, or not one, of these: 0B0"),
        (((forward, backward), (*later, Action("F", 0, 1))), "stages on more than one rank: stage 0"),
        (((forward, Action("SEND_F", 0, 0), backward),), "actions that do not compute: 0SEND_F0"),
        (((forward, backward), later[::-1]), "wait for ever: rank 0 at 0RECV_B0, rank 1 at 1B0"),
        ((), "no, or not one, of these: actions"),
    ):
        with pytest.raises(DistributedError) as error:
            Schedule(rows)
        assert text in message_of(error.value)


# ---- steps ----


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 5), nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """With a skip over all stages, and a mask and a scale that are made in the first."""

    def __init__(self, depth: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Block(4) for _ in range(depth)])
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        first = x = self.embedding(indices)
        mask, length = indices > 2, indices.shape[1]
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.where(mask[..., None], x + first.sin(), x) / length)


def problem(depth: int = 4, tied: bool = False, rows: int = 12) -> tuple[Any, dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    module = Net(depth, tied).double()
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params: Params, indices: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(module, params, (indices,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return loss, params, (torch.randint(0, 7, (rows, 3)), torch.randint(0, 7, (rows, 3)))


MODULES = ["layers.1", "layers.2", "head"]


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "micro"),
    [
        ("gpipe", 2, ["layers.2"], 4),
        ("1f1b", 4, MODULES, 6),
        ("1f1b", 3, None, 2),
        ("1f1b", 2, ["layers.1.up"], 3),
        ("interleaved", 2, MODULES, 4),
        ("interleaved", 2, 6, 2),
        ("zero_bubble", 4, MODULES, 6),
        ("zero_bubble", 2, 2, 1),
        ("gpipe", 1, 1, 3),
        (Schedule(one_f_one_b(2, 2).rows[::-1]), 2, 2, 2),
    ],
)
def test_a_pipeline_equals_the_loop_over_micro_batches(schedule: Any, ranks: int, stages: Any, micro: int) -> None:
    loss, params, batch = problem()
    check_equal(loss, ranks, params, *batch, schedule=schedule, stages=stages, micro=micro)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_parameter_of_two_stages(schedule: str) -> None:
    loss, params, batch = problem(2, tied=True)
    check_equal(loss, 3, params, *batch, tied=(0,), schedule=schedule, stages=["layers.1", "head"], micro=4)


@given(
    depth=st.integers(2, 6),
    ranks=st.integers(1, 3),
    micro=st.sampled_from([1, 2, 3, 6]),
    name=st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    skips=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3),
    shared=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
@settings(max_examples=12, deadline=None)
def test_drawn_functions(depth: int, ranks: int, micro: int, name: str, skips: Any, shared: list[int]) -> None:
    """Layers that read what any layer before has made, and parameters that any number of layers share."""
    torch.manual_seed(depth)
    ranks = min(ranks, depth)
    params = [torch.randn(3, 3, dtype=torch.float64) for _ in range(1 + max(shared[:depth]))]
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)

    def f(params: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        values = [x]
        for layer in range(depth):
            value = torch.tanh(values[-1] @ params[shared[layer]])
            for source, reader in skips:
                value = value * values[source] if reader == layer and source < layer else value
            values.append(value)
        return (values[-1] - y).square().mean()

    every = tuple(range(len(params)))
    check_equal(f, ranks, params, x, y, tied=every, schedule=name, stages=ranks, micro=micro)


def stored_at_most(trace: Trace) -> int:
    """The most forwards of stages, in a rank's program, that some backward of the same stage is still to read."""
    (body,) = [one.body for one in trace.equations if one.op.kind == "composite"]
    last = {var.index: at for at, one in enumerate(body.equations) for var in one.operands}
    spans = list[tuple[int, int]]()
    for at, one in enumerate(body.equations):
        if one.op.name.endswith("_forward") and one.op.name.startswith("stage_"):
            spans.append((at, max(last.get(var.index, at) for var in one.outputs)))
    return max(sum(first <= at <= end for first, end in spans) for at in range(len(body.equations)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_values_that_a_rank_stores(schedule: str) -> None:
    loss, params, batch = problem()
    for group in simulated(3):
        step = tfn.pipeline(loss, group, stages=["layers.1", "layers.3"], micro=6, schedule=schedule)
        trace = tfn.trace(step, params, *batch)
        assert (
            stored_at_most(trace) == (6 if schedule == "gpipe" else 3 - group.rank) == step.schedule.stored[group.rank]
        )


def test_messages_are_in_the_trace_and_no_simplification_drops_them() -> None:
    loss, params, batch = problem(2)
    step = tfn.pipeline(loss, simulated(2)[1], stages=["layers.1"], micro=2)
    trace = tfn.trace(step, params, *batch)
    (body,) = [one.body for one in trace.equations if one.op.kind == "composite"]
    names = [one.op for one in body.equations if ops.is_collective(one.op)]
    assert names.count(ops.SEND) == names.count(ops.SENT) and names.count(ops.RECEIVE) > 2
    (again,) = [one.body for one in tfn.simplify(trace).equations if one.op.kind == "composite"]
    assert [one.op for one in again.equations if ops.is_collective(one.op)] == names


def test_over_another_dim_of_the_mesh() -> None:
    """Shards of parameters within stages: the ranks of a stage gather and reduce among each other."""
    groups, partitions = simulated_mesh(pipe=2, data=2)
    loss, params, batch = problem(2, rows=8)
    halves = [[x.chunk(2)[at] for x in batch] for at in range(2)]
    plain = [tfn.ddp(loss, g["data"]) for g in groups]
    steps = [tfn.pipeline(f, g["pipe"], stages=["layers.1"], micro=2) for f, g in zip(plain, groups, strict=True)]
    held = [f.prepare(params) for f in plain]
    mine = [halves[g["data"].rank] for g in groups]
    traces = [tfn.trace(s, own, *b) for s, own, b in zip(steps, held, mine, strict=True)]
    inputs = [[*pytree.flatten(own)[0], *b] for own, b in zip(held, mine, strict=True)]
    whole, seen = [eager(loss, params, 2, *half)[1] for half in halves], 0
    for step, own, b, (_, *grads) in zip(steps, held, mine, evaluate_ranks(traces, inputs, partitions), strict=True):
        kept = [not leaf.is_meta for leaf in pytree.flatten(step.prepare(own, *b))[0]]
        names = [name for name, flag in zip(sorted(own), kept, strict=True) if flag]
        for name, grad in zip(names, grads, strict=True):
            place = sorted(params).index(name)
            torch.testing.assert_close(grad, (whole[0][place] + whole[1][place]) / 2)
            seen += 1
    assert seen == 2 * len(params)


@pytest.mark.parametrize("stages", [2, ["layers.1"]])
def test_shards_are_gathered_by_the_stage_that_reads_them(stages: Any) -> None:
    """Stages sent parameters that were gathered ahead before they had arrived: another loss in one step of ten."""
    groups, partitions = simulated_mesh(pipe=2, data=2)
    loss, params, batch = problem(2, rows=8)
    halves = [[x.chunk(2)[at] for x in batch] for at in range(2)]
    plain = [tfn.fsdp(loss, g["data"], zero=2, prefetch=2) for g in groups]
    steps = [tfn.pipeline(f, g["pipe"], stages=stages, micro=2) for f, g in zip(plain, groups, strict=True)]
    held = [f.prepare(params) for f in plain]
    mine = [halves[g["data"].rank] for g in groups]
    traces = [tfn.trace(s, own, *b) for s, own, b in zip(steps, held, mine, strict=True)]
    found = evaluate_ranks(traces, [[*own.values(), *b] for own, b in zip(held, mine, strict=True)], partitions)
    whole = [dict(zip(sorted(params), eager(loss, params, 2, *half)[1], strict=True)) for half in halves]
    for g, step, trace, own, b, (_, *grads) in zip(groups, steps, traces, held, mine, found, strict=True):
        travelling = {
            var.index
            for one in trace.equations
            if ops.is_collective(one.op) and "wait" not in one.op.name and one.op != ops.RECEIVE
            for var in one.outputs
        }
        assert all(one.operands[0].index not in travelling for one in trace.equations if one.op == ops.SEND)
        names = [name for name, leaf in step.prepare(own, *b).items() if not leaf.is_meta]
        assert [name for name in names if name.startswith("layers.")]
        assert not [name for name in names if name.startswith(f"layers.{1 - g['pipe'].rank}.")]
        for name, grad in zip(names, grads, strict=True):
            mean = (whole[0][name] + whole[1][name]) / 2
            rows = F.pad(mean, [0, 0] * (mean.dim() - 1) + [0, 2 * grad.shape[0] - mean.shape[0]])
            torch.testing.assert_close(grad, rows.chunk(2)[g["data"].rank])


def test_no_cut_is_between_a_collective_and_its_wait() -> None:
    """Of two that one equation needs, too, wherever costs would have the cut."""
    (group, _), x = simulated(2), torch.randn(4, 4)
    gathered = lambda x: all_gathered(x.reshape(-1), group).reshape(8, 4)

    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        for a, b in params:
            x = torch.tanh(x @ torch.cat((gathered(a), gathered(b)))[:4])
        return x.square().mean()

    trace = overlapped(tfn.trace(f, [(x, x), (x, x)], x), 3)
    for count in range(2, 12):
        for stage in stages_of(trace, count, (True,) * 4 + (False,), params=4):
            waits = {var.index for e in stage.trace.equations if e.op.name == WAIT for var in e.operands}
            sent = {var.index for e in stage.trace.equations if e.op.name == GATHER for var in e.outputs}
            assert sent == waits


def test_shares_of_layers_within_stages() -> None:
    """Each rank's number, which is no parameter with a gradient, stays with the rank and has None."""
    groups, partitions = simulated_mesh(pipe=2, tensor=2)
    loss, params, batch = problem(2, rows=4)
    plan = {"layers.*.up.weight": "column", "layers.*.down.weight": "row", "head.weight": "column"}
    shares = [tfn.tensor_parallel(loss, g["tensor"], plan) for g in groups]
    steps = [tfn.pipeline(f, g["pipe"], stages=["layers.1"], micro=2) for f, g in zip(shares, groups, strict=True)]
    held = [f.prepare(params) for f in shares]
    traces = [tfn.trace(step, own, *batch) for step, own in zip(steps, held, strict=True)]
    found = evaluate_ranks(traces, [[*own.values(), *batch] for own in held], partitions)
    whole, seen = dict(zip(sorted(params), eager(loss, params, 2, *batch)[1], strict=True)), 0
    for g, step, own, (_, *grads) in zip(groups, steps, held, found, strict=True):
        kept = step.prepare(own, *batch)
        names = [name for name in own if own[name].is_floating_point() and not kept[name].is_meta]
        assert not any(kept[name].is_meta for name in own if name.endswith(".rank"))
        for name, grad in zip(names, grads, strict=True):
            style = next((style for key, style in plan.items() if fnmatch(name, key)), None)
            expected = whole[name]
            if style is not None:
                dim, rows = int(style == "row"), grad.shape[int(style == "row")]
                padding = [0, 0] * (1 - dim) + [0, 2 * rows - expected.shape[dim]]
                expected = F.pad(expected, padding).chunk(2, dim)[g["tensor"].rank]
            torch.testing.assert_close(grad, expected)
            seen += 1
    assert seen == 2 * len(params)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    loss, params, batch = problem(2)
    steps = [
        tfn.pipeline(loss, group, stages=["layers.1"], micro=m) for group, m in zip(simulated(2), (2, 4), strict=True)
    ]
    traces = [tfn.trace(step, params, *batch) for step in steps]
    with pytest.raises(DistributedError, match=r"rank 0 sends f64\[6, 3, 4\] where f64\[3, 3, 4\] is received"):
        evaluate_ranks(traces, [[*pytree.flatten(params)[0], *batch]] * 2)
    with pytest.raises(LawBroken, match=r"f64\[6, 3, 4\] is sent, f64\[3, 3, 4\] received"):
        check_schedule(traces)
    with pytest.raises(LawBroken, match=r"rank 1 waits in thunder_fn.receive.default from rank 0 to rank 1"):
        check_schedule([traces[1]] * 2)
    with pytest.raises(DistributedError, match=r"rank 0 in thunder_fn.receive.default, rank 1 in thunder_fn.receive"):
        evaluate_ranks([traces[1]] * 2, [[*pytree.flatten(params)[0], *batch]] * 2)


def test_a_step_is_not_differentiated_again_and_not_batched() -> None:
    """Other ranks would have to take part; without an error each rank would give the part of a derivative."""
    params, x = [torch.randn(4, 3), torch.randn(3, 2)], torch.randn(6, 4)

    def f(params: Params, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ params[0]) @ params[1]).square().mean()

    for group in simulated(2):
        step = tfn.pipeline(f, group, stages=2, micro=3)
        value = lambda p, x, step=step: step(p, x)[0]
        push = lambda p, x, value=value: tfn.jvp(value, (p, x), (p, x))
        for again in (tfn.grad(value), push):
            with pytest.raises(MissingRule, match="a message to another rank has no derivative"):
                tfn.trace(again, params, x)
        with pytest.raises(MissingRule, match="vmap: a message from rank to rank is not batched"):
            tfn.trace(tfn.vmap(value, in_dims=(None, 0)), params, x[None])
        with pytest.raises(DistributedError, match="the ranks of this group are simulated and cannot answer"):
            step(params, x)
    alone = tfn.pipeline(f, simulated(1)[0], stages=1, micro=1)
    found = tfn.grad(lambda p: alone(p, x)[1][0].square().sum())(params)
    for grad, expected in zip(found, tfn.grad(lambda p: tfn.grad(f)(p, x)[0].square().sum())(params), strict=True):
        torch.testing.assert_close(grad, expected)


def test_parameters_that_require_grad() -> None:
    """Nothing is recorded for autograd, under `jit` neither."""
    params, x = [torch.randn(4, 3, requires_grad=True)], torch.randn(6, 4)
    step = tfn.pipeline(lambda p, x: (x @ p[0]).square().mean(), simulated(1)[0], stages=1, micro=2)
    for f in (step, tfn.jit(step)):
        value, (grad,) = f(params, x)
        assert not value.requires_grad and not grad.requires_grad
        torch.testing.assert_close(grad, torch.autograd.grad((x @ params[0]).square().mean(), params)[0])


def test_a_plan_of_a_step_counts_its_messages() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        params, x = [torch.empty(8, 8, device="meta") for _ in range(2)], torch.empty(8, 8, device="meta")
        step = tfn.pipeline(lambda p, x: (x @ p[0] @ p[1]).square().mean(), mesh, stages=2, micro=4)
        found = tfn.plan(step, (step.prepare(params, x), x), "h100")
    for rank in found.stages:
        sent = {one.kind: times for one, times, _ in rank.timeline.collectives if one.num_bytes > 4}
        assert sent == {"send": 4, "receive": 4}
    loss = 4  # the last rank tells it
    assert [rank.timeline.wire_bytes for rank in found.stages] == [4 * 2 * 8 * 4, 4 * 2 * 8 * 4 + loss]


def test_misuse() -> None:
    loss, params, batch = problem(2)
    first, _ = simulated(2)
    writing = nn.BatchNorm1d(3).double()
    for make, text in (
        (lambda: tfn.pipeline(loss, first, schedule="1b1f"), "pipeline: schedule is 'gpipe', '1f1b', 'interleaved'"),
        (lambda: tfn.pipeline(loss, first, micro=0), "pipeline: micro is a number from 1 on, given 0"),
        (
            lambda: tfn.pipeline(tfn.checkpoint(loss), first)(params, *batch),
            "the whole loss is one checkpoint, which has no stages",
        ),
        (lambda: tfn.pipeline(loss, first, stages="layers.1"), "stages is a number from 1 on or names of modules"),
        (lambda: tfn.pipeline(loss, first, stages=2.0), "names of modules, given 2.0"),  # pyright: ignore[reportArgumentType]
        (lambda: tfn.pipeline(loss, first, stages=3), "pipeline: the schedule has 2 stages, and there are 3"),
        (lambda: tfn.pipeline(loss, first, schedule=one_f_one_b(3, 2)), "has 3 ranks, and there are 2"),
        (lambda: tfn.pipeline(loss, first, micro=5)(params, *batch), "12 examples are no 5 micro-batches"),
        (lambda: tfn.pipeline(loss, first)(params), "given no tensor of a batch"),
        (lambda: tfn.pipeline(3, first), "pipeline: expected a function of (params, *batch), given an int"),
        (
            lambda: tfn.pipeline(loss, first, stages=["layers.7"]).prepare(params, *batch),
            "pipeline: stages begin with layers.7\nName modules in the order in which they run. There are embedding,",
        ),
        (
            lambda: tfn.pipeline(lambda p, x: (writing(x) * p).mean(), first, stages=2).prepare(
                torch.ones(3).double(), torch.randn(8, 3).double()
            ),
            "the function writes to tensors, such as buffers, on each micro-batch",
        ),
        (
            lambda: tfn.pipeline(lambda p, x: (x * p).argmax(), first, stages=2).prepare(
                torch.ones(3), torch.ones(8, 3)
            ),
            "the loss must be a real number, whose mean is taken, and it is i64[]",
        ),
    ):
        with pytest.raises(RewriteError) as error:
            make()
        assert text in message_of(error.value)
