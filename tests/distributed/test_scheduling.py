"""The schedule of collectives: prefetching for ZeRO-2 and ZeRO-3, and buckets of so many bytes. No processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import thunder_fn as tfn
from tests.distributed.test_simulated_meshes import gradients, problem
from tests.messages import message_of
from thunder_fn.distributed import schedule
from thunder_fn.distributed.ranks import GATHER, REDUCE, SCATTER, WAIT, evaluate_ranks
from thunder_fn.distributed.schedule import awaited_late, overlapped, with_collectives_unfolded
from thunder_fn.errors import RewriteError
from thunder_fn.executors.claims import claim
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Equation, TensorType, Trace, static_shape
from thunder_fn.parameters import simulated
from thunder_fn.structured.checkpoint import CHECKPOINT

BUCKETS = ["block", None, 1, 200, 10**6]


def in_flight(trace: Trace, *sends: str) -> int:
    """The number of collectives of these kinds that are sent and not yet awaited, at most."""
    sent, most = 0, 0
    own = {e.outputs[0].index for e in trace.equations if e.op.name in sends}
    for equation in trace.equations:
        sent += equation.op.name in sends
        sent -= equation.op.name == WAIT and equation.operands[0].index in own
        most = max(most, sent)
    return most


def whole_at_once(trace: Trace) -> int:
    """The number of gathers that are sent and whose consequences are still to be read, at most."""
    roots, spans = dict[int, int](), dict[int, list[int]]()
    for at, equation in enumerate(trace.equations):
        read = {roots[var.index] for var in equation.operands if var.index in roots}
        for gather in read:
            spans[gather][1] = at
        if equation.op.name == GATHER:
            spans[at], read = [at, at], {at}
        if len(read) == 1 and all(var.index in roots or equation.op.name == GATHER for var in equation.operands):
            roots.update((var.index, *read) for var in equation.outputs)
    return max(sum(first <= at <= last for first, last in spans.values()) for at in range(len(trace.equations)))


def shape_of(var: Any) -> tuple[int, ...]:
    assert isinstance(var.type, TensorType)
    return static_shape(var.type)


def loss_of(params: Any, batches: list[Any]) -> Any:
    loss, _, _ = problem(5)
    return tfn.grad(lambda p: torch.stack([loss(p, x) for x in batches]).mean())(params)


def all_equations(trace: Trace) -> list[Equation]:
    found: list[Equation] = []
    for equation in trace.equations:
        body = lowered(equation)
        found += [equation] if body is None else all_equations(body)
    return found


@given(limit=st.integers(1, 4), bucket=st.sampled_from(["block", "each"]))
@settings(max_examples=4, deadline=None)
def test_gathers_are_sent_early_and_no_more_of_them_than_allowed(limit: int, bucket: str) -> None:
    loss, params, batches = problem(5, 2)
    functions = [tfn.fsdp(loss, group, zero=2, bucket=bucket) for group in simulated(2)]
    inputs = [[*f.prepare(params).values(), x] for f, x in zip(functions, batches, strict=True)]
    trace = functions[0].rewrite(params, batches[0]).compute
    scheduled = overlapped(trace, limit)
    tfn.check(scheduled)
    assert Counter(e.op for e in with_collectives_unfolded(trace).equations) == Counter(
        e.op for e in scheduled.equations
    )
    for found, expected in zip(evaluate_ranks(scheduled, inputs), evaluate_ranks(trace, inputs), strict=True):
        assert torch.equal(found[0], expected[0])
    gathers = sum(e.op.name == GATHER for e in scheduled.equations)
    assert in_flight(scheduled, GATHER) == min(limit, gathers)


@given(
    size=st.integers(1, 4),
    zero=st.sampled_from([2, 3]),
    prefetch=st.sampled_from([None, 0, 1, 3]),
    bucket=st.sampled_from(BUCKETS),
)
@settings(max_examples=4, deadline=None)
def test_n_ranks_equal_one_however_they_are_scheduled(size: int, zero: int, prefetch: Any, bucket: Any) -> None:
    loss, params, batches = problem(5, size)
    functions = [tfn.fsdp(loss, group, zero=zero, prefetch=prefetch, bucket=bucket) for group in simulated(size)]
    expected = loss_of(params, batches)
    for (whole, value), batch in zip(gradients(functions, params, batches), batches, strict=True):
        torch.testing.assert_close(value, loss(params, batch))
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero_3_gathers_ahead_in_the_backward_too(prefetch: int) -> None:
    """The backward is one body, in which as many gathers are in flight as in the forward, those of the last block first."""
    loss, params, batches = problem(5)
    f = tfn.fsdp(loss, simulated(3)[0], prefetch=prefetch)
    plain = tfn.fsdp(loss, simulated(3)[0], prefetch=None)
    new = f.prepare(params)
    forward, backward = (e.body for e in tfn.trace(tfn.grad(f), new, batches[0]).equations if e.op == CHECKPOINT)
    for body in (forward, backward):
        assert in_flight(body, GATHER) == prefetch + 1
        assert in_flight(body, SCATTER) <= prefetch + 1
        assert whole_at_once(body) == prefetch + 1
    widths = [[shape_of(e.outputs[0]) for e in body.equations if e.op.name == GATHER] for body in (forward, backward)]
    unscheduled = all_equations(tfn.trace(tfn.grad(plain), plain.prepare(params), batches[0]))
    assert sum(map(len, widths)) == sum(e.op.name == GATHER for e in unscheduled)
    head, *blocks = widths[1]
    assert head == widths[0][-1] and len(blocks) >= 2


def test_whole_parameters_of_zero_3_are_gone_between_forward_and_backward() -> None:
    """The backward is given shards and activations, and nothing that was gathered."""
    loss, params, batches = problem(5)
    f = tfn.fsdp(loss, simulated(2)[0], prefetch=1)
    forward, backward = (
        e for e in tfn.trace(tfn.grad(f), f.prepare(params), batches[0]).equations if e.op == CHECKPOINT
    )
    gathered = {e.outputs[0].index for e in forward.body.equations if e.op.name == WAIT}
    assert not gathered & {atom.index for atom in forward.body.outputs if hasattr(atom, "index")}
    assert sum(e.op.name == GATHER for e in backward.body.equations) >= 3


# ---- reductions behind the backward ----

REDUCING = {
    "ddp": tfn.ddp,
    "ddp, each": lambda f, group: tfn.ddp(f, group, bucket=None),
    "zero 2": lambda f, group: tfn.fsdp(f, group, zero=2),
    "zero 2, no prefetch": lambda f, group: tfn.fsdp(f, group, zero=2, prefetch=None),
}


def products_behind(trace: Trace) -> list[int]:
    """For each reduction the matrix products between its start and its wait, in the order of their starts."""
    places = {e.operands[0].index: at for at, e in enumerate(trace.equations) if e.op.name == WAIT}
    is_product = [e.op.name.endswith("mm.default") for e in trace.equations]
    return [
        sum(is_product[at : places[e.outputs[0].index]])
        for at, e in enumerate(trace.equations)
        if e.op.name in (REDUCE, SCATTER)
    ]


def steps_of(name: str, size: int) -> tuple[Trace, list[list[Any]]]:
    loss, params, batches = problem(5, size)
    functions = [REDUCING[name](loss, group) for group in simulated(size)]
    held = [f.prepare(params) for f in functions]
    inputs = [[*own.values(), x] for own, x in zip(held, batches, strict=True)]
    return tfn.trace(tfn.grad(functions[0]), held[0], batches[0]), inputs


def late_and_lawful(given: Trace, limit: int) -> Trace:
    late, order = awaited_late(given, limit)
    tfn.check(late)
    assert [given.equations[at].op for at in order] == [e.op for e in late.equations]
    assert sorted(order) == list(range(len(given.equations)))
    for scheduled in (late, awaited_late(late, limit)[0]):
        assert in_flight(scheduled, REDUCE, SCATTER) <= max(limit, in_flight(given, REDUCE, SCATTER))
    makers = {var.index: e for e in late.equations for var in e.outputs}
    made = [e for e in late.equations if e.op.name != WAIT]
    for at, equation in enumerate(made):
        if equation.op.name in (REDUCE, SCATTER):
            assert made[at - 1] is makers[equation.operands[0].index], "it is sent when its operand is there"
    return late


@given(size=st.integers(2, 4), name=st.sampled_from([*REDUCING]), limit=st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_waits_that_are_put_off_change_no_bit(size: int, name: str, limit: int) -> None:
    program, inputs = steps_of(name, size)
    given = inline(program)
    late = late_and_lawful(given, limit)
    for found, expected in zip(evaluate_ranks(late, inputs), evaluate_ranks(given, inputs), strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", REDUCING)
def test_reductions_travel_while_the_backward_computes(name: str) -> None:
    """Half of them at least; the trace before waits at once."""
    program, _ = steps_of(name, 2)
    behind = products_behind(claim(program).trace)
    assert not any(products_behind(inline(program)))
    assert behind[0] >= 2 and sum(map(bool, behind)) >= len(behind) / 2
    assert in_flight(claim(program).trace, REDUCE, SCATTER) == 2


@pytest.mark.parametrize("bug", ["make_room", "chain"])
def test_a_wrong_schedule_of_reductions_is_seen(monkeypatch: Any, bug: str) -> None:
    wrong = {"make_room": lambda *_: iter(()), "chain": lambda *_: (-1, [])}
    monkeypatch.setattr(schedule._Late, bug, wrong[bug])
    with pytest.raises(AssertionError):
        late_and_lawful(inline(steps_of("zero 2", 2)[0]), 1)


@pytest.mark.parametrize("transform", [tfn.fsdp, tfn.ddp])
def test_buckets_hold_so_many_bytes(transform: Any) -> None:
    loss, params, batches = problem(5)
    sizes = sorted(8 * value.numel() for value in params.values())
    program = {
        bucket: all_equations(
            tfn.trace(tfn.grad(f := transform(loss, simulated(2)[0], bucket=bucket)), f.prepare(params), batches[0])
        )
        for bucket in (1, 200, 10**6)
    }
    name = SCATTER if transform is tfn.fsdp else REDUCE
    sent = {
        bucket: [8 * shape_of(e.operands[0])[0] for e in found if e.op.name == name]
        for bucket, found in program.items()
    }
    assert len(sent[1]) == len(params) and len(sent[10**6]) == 1
    assert len(sent[10**6]) < len(sent[200]) < len(sent[1])
    padding = 8 * len(params) * 5
    assert all(size <= max(200, sizes[-1]) + padding for size in sent[200])


def test_what_prefetch_and_bucket_are_not() -> None:
    loss, _, _ = problem(5)
    for options, text in (
        ({"prefetch": -1}, "fsdp: prefetch is a number of buckets from 0 on, given -1"),
        ({"prefetch": True}, "fsdp: prefetch is a number of buckets from 0 on, given True"),
        ({"bucket": 0}, "fsdp: bucket is 'block', a number of bytes or None, given 0"),
        ({"bucket": "all"}, "fsdp: bucket is 'block', a number of bytes or None, given 'all'"),
    ):
        with pytest.raises(RewriteError) as error:
            tfn.fsdp(loss, simulated(2)[0], **options)
        assert message_of(error.value) == text
