"""Overwrites of some elements of a written tensor, done where it lies, whoever fuses the equations around it."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import thunder_fn as tfn
from thunder_fn import evaluate, jit
from thunder_fn.executors import FusionExecutor
from thunder_fn.executors.updates import IN_PLACE, updates
from thunder_fn.interpreters.simplify import inline
from thunder_fn.jitted import last_traces

ROWS, WIDTH = 64, 80
"""A cache of 20 KB."""


def fusing(name: str = "fusing") -> FusionExecutor:
    """An executor that fuses whatever it is offered, and evaluates that."""
    executor = FusionExecutor(
        name, fuse=lambda region: lambda *xs: evaluate(region, xs), numerics="bitwise", min_shared=3
    )
    for op in (torch.add, torch.mul, torch.sin, torch.index_copy, torch.index_add, torch.index_fill, torch.sum):
        executor.register_supported(op)
    for op in (torch.ops.aten.index_put.default, torch.ops.aten.scatter.src):
        executor.register_supported(op)
    return executor


def program_of(f: object) -> str:
    return str(last_traces(f)[-1])  # type: ignore[arg-type]


class Layer(torch.nn.Module):
    """A layer that keeps its results in a cache."""

    def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, (x * 2).sin() + x)
        return (cache.sum(0, keepdim=True) * x).sin() + x


class Layers(torch.nn.Module):
    """Layers with a cache each, which are equal and so have equal regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at)
        return x


def test_a_row_is_written_where_the_cache_lies() -> None:
    f, eager, calls = jit(Layers(), executors=[fusing()]), Layers(), 3
    caches = [torch.zeros(ROWS, WIDTH) for _ in range(3)]
    others, where = copy.deepcopy(caches), [cache.data_ptr() for cache in caches]
    with torch.no_grad():
        for step in range(calls):
            x, at = torch.randn(1, WIDTH), torch.tensor([step])
            assert torch.equal(f(x, caches, at), eager(x, others, at))
            assert all(map(torch.equal, caches, others)) and [cache.data_ptr() for cache in caches] == where
    text = program_of(f)
    assert text.count("index_copy_(") == 3 and "clone" not in text.split("return")[-1]
    assert text.count("= fusing_fusion_") == 6 and "fusing_fusion_2" not in text, "two regions, for all layers"


def test_why_it_is_no_part_of_a_region() -> None:
    def f(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
        cache.index_copy_(0, at, x.sin() * 2)
        return cache * 2 + 1

    report = tfn.explain_claims(
        jit(f, executors=[fusing()]), torch.zeros(ROWS, WIDTH), torch.tensor([1]), torch.ones(1, WIDTH)
    )
    (found,) = (one for one in report.forward if one.op == "aten.index_copy.default")
    assert (found.taken_by, found.refusals) == ("torch", (("fusing", IN_PLACE),))
    small = tfn.explain_claims(jit(f, executors=[fusing()]), torch.zeros(4, 5), torch.tensor([1]), torch.ones(1, 5))
    (found,) = (one for one in small.forward if one.op == "aten.index_copy.default")
    assert found.taken_by == "fusing", "so little is copied faster than another call is made"


def test_the_way_from_an_input() -> None:
    def f(x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        once = torch.index_copy(x, 0, at, y[:1])
        twice = torch.index_fill(once, 0, at + 1, 3.0)
        return once.sin(), twice, torch.index_copy(y * 2, 0, at, x[:1])

    trace = inline(tfn.trace(f, torch.zeros(ROWS, WIDTH), torch.ones(ROWS, WIDTH), torch.tensor([1])))
    found = sorted(trace.equations[position].op.name for position in updates(trace, ((0, 1),)).equations)
    assert found == ["aten.index_copy.default", "aten.index_fill.int_Scalar"]
    assert not updates(trace, ((1, 1),)).equations, "the output is an update of another input"
    assert not updates(trace, ((1, 2),)).equations, "all of it is new"
    assert not updates(trace, ((0, 0),)).equations
    assert not updates(trace, ()).equations


STEPS = {
    "copy": lambda cache, at, x: cache.index_copy_(0, at, x),
    "add": lambda cache, at, x: cache.index_add_(0, at, x.sin() * 2),
    "put": lambda cache, at, x: cache.__setitem__((at, slice(1, 3)), x[:, 1:3] * 3 + 1),
    "fill": lambda cache, at, x: cache.index_fill_(1, at, 2.0),
    "all": lambda cache, at, x: cache.mul_(2).add_(x),
    "view": lambda cache, at, x: cache[:2].index_copy_(0, at * 0, x),
    "old": lambda cache, at, x: cache.add_(cache.clone().index_fill(0, at, 5.0)),
}


@settings(max_examples=25)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_updates_are_those_of_eager(names: list[str], reads_between: bool, returns_cache: bool) -> None:
    """Law: whatever is written to a tensor in whatever order, it holds what eager code leaves, and results are eager's."""

    def f(cache: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        seen = []
        for name in names:
            STEPS[name](cache, at, x)
            if reads_between:
                seen.append((cache.sum() * 2).sin() + cache[0, 0])
        return (*seen, cache[1:3] if returns_cache else cache.sum(0))

    jitted, ours, theirs = jit(f, executors=[fusing()]), torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    theirs.copy_(ours)
    for step in range(2):
        at, x = torch.tensor([step]), torch.randn(1, WIDTH)
        found, wanted = jitted(ours, at, x), f(theirs, at, x)
        assert all(map(torch.equal, found, wanted)) and torch.equal(ours, theirs)


def test_what_is_returned_as_a_copy_is_copied_once() -> None:
    def f(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (cache * 2 + x).view(-1)
        cache.add_(1)
        return y, y, y.view(cache.shape)

    executor = FusionExecutor("viewing", fuse=lambda region: lambda *xs: evaluate(region, xs), numerics="bitwise")
    for op in (torch.add, torch.mul, torch.ops.aten.view.default, torch.ops.aten.reshape.default):
        executor.register_supported(op)
    jitted, cache, x = jit(f, executors=[executor]), torch.zeros(2, 3), torch.ones(2, 3)
    first, second, _ = jitted(cache, x)
    assert first is second and torch.equal(first, torch.ones(6)) and torch.equal(cache, torch.ones(2, 3))
    assert program_of(jitted).count("clone(") == 3, "each result and what is written, once"


def test_a_constant_that_is_returned_twice_is_one_tensor() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.tensor([1.0, 2.0])
        return y, y, x + y

    jitted = jit(f)
    first, second, total = jitted(torch.ones(2))
    assert first is second and torch.equal(total, torch.tensor([2.0, 3.0]))
    first.zero_()
    assert torch.equal(jitted(torch.ones(2))[0], torch.tensor([1.0, 2.0]))
