"""Regions for a GPU: equal updates of several parameters are one region, and so are small steps of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn.executors import claim
from thunder_fn.extend import FusionExecutor
from thunder_fn.ir.trace import Equation, Trace


class Launching(FusionExecutor):
    """Has regions side by side as one, as on a GPU."""

    def joins(self, region: Trace) -> bool:
        return True

    def unrolls(self, leaves: Sequence[Equation]) -> int:
        return 12 // len(leaves)


def executor() -> Launching:
    made = Launching("launching", fuse=lambda region: lambda *xs: tfn.evaluate(region, xs), min_shared=2)
    for op in (torch.mul, torch.add, torch.sin, torch.cos, torch.neg):
        made.register_supported(op)
    return made


@tfn.composite
def update(p: Tensor, g: Tensor) -> Tensor:
    return p + (g * 0.1).sin()


def updated(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [update(p, g) for p, g in zip(params, grads, strict=True)]


def chained(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Each update reads what another one gave; the sums between them are in no region."""
    once = updated(params, grads)
    return updated(once, [one.cumsum(0) for one in once])


def crossed(params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The second three depend on the first three, in another order."""
    first = updated(params, grads)
    return updated([*reversed(first)], [one.cumsum(0) for one in first]) + first


SHAPES = ((2,), (2,), (3, 2), (3, 2), (4,), (4,))


@pytest.mark.parametrize(("f", "count"), [(updated, 1), (chained, 2), (crossed, 2)])
def test_updates_of_all_shapes_are_one_region(f: Any, count: int) -> None:
    torch.manual_seed(0)
    params, grads = [torch.randn(s) for s in SHAPES], [torch.randn(s) for s in SHAPES]
    if f is crossed:
        params, grads = params[:2] * 3, grads[:2] * 3
    claimed = claim(tfn.trace(f, params, grads), [executor()])
    tfn.check(claimed.trace)
    found = [one for one in claimed.trace.equations if one.op.name.startswith("launching::")]
    assert len(found) == count
    assert sum(len(one.body.equations) for one in found) == 3 * len(params) * count
    results = tfn.evaluate(claimed.trace, [*params, *grads])
    assert all(map(torch.equal, results, f(params, grads)))
    assert all(map(torch.equal, tfn.jit(f, executors=[executor()])(params, grads), f(params, grads)))


def test_two_updates_stay_two_regions() -> None:
    xs = [torch.ones(2), torch.ones(2)]
    claimed = claim(tfn.trace(updated, xs, xs), [executor()])
    assert sum(one.op.name.startswith("launching::") for one in claimed.trace.equations) == 2


def test_an_executor_that_does_not_ask_for_it_has_them_apart() -> None:
    xs = [torch.ones(2)] * 4
    own = executor()
    own.joins = lambda region: False  # type: ignore[method-assign]
    claimed = claim(tfn.trace(updated, xs, xs), [own])
    assert sum(one.op.name.startswith("launching::") for one in claimed.trace.equations) == 4


@tfn.composite
def moved(c: Tensor, x: Tensor) -> Tensor:
    return c * 0.5 + x.sin()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("length", "left"), [(1, [1]), (4, []), (8, [2]), (11, [2])])
def test_small_steps_are_regions_of_several(length: int, left: list[int], reverse: bool) -> None:
    """A step has three ops, so four steps are a block; three that are left over are a region behind the loop."""
    f = lambda c, xs: tfn.scan(lambda c, x: ((new := moved(c, x)), new), c, xs, reverse=reverse)
    c, xs = torch.randn(2), torch.randn(length, 2)
    claimed = claim(tfn.trace(f, c, xs), [executor()])
    tfn.check(claimed.trace)
    assert [one.literals["length"] for one in claimed.trace.equations if one.op.name == "scan"] == left
    for found in (tfn.jit(f, executors=[executor()])(c, xs), tfn.evaluate(claimed.trace, [c, xs])):
        assert all(map(torch.equal, found, f(c, xs)))


def test_steps_that_an_executor_does_not_take_stay_steps() -> None:
    f = lambda c, xs: tfn.scan(lambda c, x: ((new := moved(c, x).cumsum(0)), new), c, xs)
    claimed = claim(tfn.trace(f, torch.ones(2), torch.ones(8, 2)), [executor()])
    assert [one.literals["length"] for one in claimed.trace.equations if one.op.name == "scan"] == [8]
