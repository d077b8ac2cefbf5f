"""Laws of collectives on meshes of simulated ranks: reverse mode, forward mode, batching and simplification of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import thunder_fn as tfn
from thunder_fn.distributed.collectives import collectives as c
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.errors import DistributedError, MissingRule
from thunder_fn.parameters import simulated_mesh

Step = Callable[[torch.Tensor, Any], torch.Tensor]
Meaning = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def all_of(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values)


OPS: dict[str, tuple[Step, Meaning]] = {
    "all_gather": (
        lambda x, g: c.all_gather_into_tensor(x, g.size, g.name),
        lambda xs: [torch.cat(xs)] * len(xs),
    ),
    "reduce_scatter": (
        lambda x, g: c.reduce_scatter_tensor(x, "sum", g.size, g.name),
        lambda xs: list(all_of(xs).sum(0).chunk(len(xs))),
    ),
    "reduce_scatter avg": (
        lambda x, g: c.reduce_scatter_tensor(x, "avg", g.size, g.name),
        lambda xs: list(all_of(xs).mean(0).chunk(len(xs))),
    ),
    "all_reduce": (lambda x, g: c.all_reduce(x, "sum", g.name), lambda xs: [all_of(xs).sum(0)] * len(xs)),
    "all_reduce avg": (lambda x, g: c.all_reduce(x, "avg", g.name), lambda xs: [all_of(xs).mean(0)] * len(xs)),
    "all_to_all": (
        lambda x, g: c.all_to_all_single(x, [len(x) // g.size] * g.size, [len(x) // g.size] * g.size, g.name),
        lambda xs: [torch.cat([x.chunk(len(xs))[at] for x in xs]) for at in range(len(xs))],
    ),
    "broadcast": (lambda x, g: c.broadcast(x, g.size - 1, g.name), lambda xs: [xs[-1]] * len(xs)),
    "all_reduce max": (lambda x, g: c.all_reduce(x, "max", g.name), lambda xs: [all_of(xs).amax(0)] * len(xs)),
}
NO_DERIVATIVE = {"all_reduce max": ("vjp", "jvp"), "broadcast": ("vjp",)}


class Problem:
    """A function around two collectives, of which each rank has an argument, and the same in a loop over ranks."""

    def __init__(self, names: list[str], dims: list[str], sizes: dict[str, int], columns: int) -> None:
        self.names, self.dims = names, dims
        self.groups, self.partitions = simulated_mesh(**sizes)
        self.count = len(self.groups)
        rows = 2 * (sizes["a"] * sizes["b"]) ** 2
        self.xs = [torch.randn(rows, columns, dtype=torch.float64) for _ in self.groups]
        self.tangents = [torch.randn_like(x) for x in self.xs]

    def f(self, x: torch.Tensor) -> torch.Tensor:
        """The traced function; sizes of groups are the same on all ranks."""
        for name, dim in zip(self.names, self.dims, strict=True):
            x = c.wait_tensor(OPS[name][0](x.sin(), self.groups[0][dim])) * x.mean()
        return x

    def expected(self, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The oracle: PyTorch on the values of all ranks."""
        for name, dim in zip(self.names, self.dims, strict=True):
            found: list[Any] = [None] * len(xs)
            for ranks in self.partitions[self.groups[0][dim].name]:
                means = [xs[rank].mean() for rank in ranks]
                for rank, value, mean in zip(ranks, OPS[name][1]([xs[r].sin() for r in ranks]), means, strict=True):
                    found[rank] = value * mean
            xs = found
        return xs

    def run(self, g: Any, *inputs: list[torch.Tensor]) -> list[tuple[Any, ...]]:
        trace = tfn.trace(g, *(each[0] for each in inputs))
        tfn.check(trace)
        each = [list(values) for values in zip(*inputs, strict=True)]
        found = evaluate_ranks(trace, each, self.partitions)
        for simple in evaluate_ranks(tfn.simplify(trace), each, self.partitions), found:
            torch.testing.assert_close(simple, found, rtol=0, atol=0)
        return found


@st.composite
def problems(draw: st.DrawFn, names: list[str]) -> Problem:
    sizes = draw(st.sampled_from([{"a": 1, "b": 2}, {"a": 2, "b": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 1}]))
    count = draw(st.integers(1, 2))
    chosen = [draw(st.sampled_from(names)) for _ in range(count)]
    dims = [draw(st.sampled_from("ab")) for _ in range(count)]
    torch.manual_seed(draw(st.integers(0, 100)))
    return Problem(chosen, dims, sizes, draw(st.integers(1, 3)))


def differentiable(kind: str) -> list[str]:
    return [name for name in OPS if kind not in NO_DERIVATIVE.get(name, ())]


@given(problem=problems([*OPS]))
@settings(max_examples=15, deadline=None)
def test_each_rank_has_its_value(problem: Problem) -> None:
    for (found,), expected in zip(problem.run(problem.f, problem.xs), problem.expected(problem.xs), strict=True):
        torch.testing.assert_close(found, expected)


@given(problem=problems(differentiable("vjp")))
@settings(max_examples=15, deadline=None)
def test_reverse_mode_is_autograd_over_all_ranks(problem: Problem) -> None:
    xs = [x.clone().requires_grad_() for x in problem.xs]
    cotangents = [torch.randn_like(y) for y in problem.expected(xs)]
    expected = torch.autograd.grad(problem.expected(xs), xs, cotangents)
    found = problem.run(lambda x, ct: tfn.vjp(problem.f, x)[1](ct), problem.xs, cotangents)
    for (gradient,), value in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, value)


@given(problem=problems(differentiable("jvp")))
@settings(max_examples=15, deadline=None)
def test_forward_mode_is_torch_func_over_all_ranks(problem: Problem) -> None:
    pushed: Any = torch.func.jvp(lambda *xs: problem.expected(list(xs)), (*problem.xs,), (*problem.tangents,))
    (values, tangents), push = pushed, lambda x, t: tfn.jvp(problem.f, (x,), (t,))
    found = problem.run(push, problem.xs, problem.tangents)
    for (value, tangent), y, t in zip(found, values, tangents, strict=True):
        torch.testing.assert_close((value, tangent), (y, t))


@given(problem=problems([*OPS]), dim=st.integers(0, 2), size=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_batching_is_a_loop(problem: Problem, dim: int, size: int) -> None:
    batches = [torch.randn(size, *x.shape, dtype=x.dtype) for x in problem.xs]
    found = problem.run(tfn.vmap(problem.f, in_dims=dim), [x.movedim(0, dim) for x in batches])
    for at in range(size):
        for (value,), expected in zip(found, problem.expected([x[at] for x in batches]), strict=True):
            torch.testing.assert_close(value[at], expected)


@given(problem=problems(differentiable("vjp")), size=st.integers(1, 2))
@settings(max_examples=6, deadline=None)
def test_gradients_of_each_example(problem: Problem, size: int) -> None:
    batches = [torch.randn(size, *x.shape, dtype=x.dtype) for x in problem.xs]
    gradient = tfn.grad(lambda x: problem.f(x).square().sum())
    found = problem.run(tfn.vmap(gradient), batches)
    for at in range(size):
        xs = [x[at].clone().requires_grad_() for x in batches]
        total = torch.stack([y.square().sum() for y in problem.expected(xs)]).sum()
        for (value,), expected in zip(found, torch.autograd.grad(total, xs), strict=True):
            torch.testing.assert_close(value[at], expected)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in NO_DERIVATIVE.items() for kind in kinds])
def test_collectives_without_a_derivative_are_refused(name: str, kind: str) -> None:
    """PyTorch has one of a maximum, the maximum of cotangents, which is no derivative."""
    problem = Problem([name], ["a"], {"a": 2, "b": 1}, 2)
    x = problem.xs[0]
    with pytest.raises(MissingRule, match=rf"{kind}: _c10d_functional\.\w+\.default (by 'max' has no|has none)"):
        tfn.vjp(problem.f, x)[1](x) if kind == "vjp" else tfn.trace(lambda x, t: tfn.jvp(problem.f, (x,), (t,)), x, x)


def test_ranks_that_send_what_others_do_not_take_are_named() -> None:
    sends: Callable[..., Any] = lambda x, sizes: c.wait_tensor(c.all_to_all_single(x, [1, 2], sizes, "simulated"))
    traces = [tfn.trace(lambda x, sizes=sizes: sends(x, sizes), torch.ones(3)) for sizes in ([1, 2], [3, 0])]
    with pytest.raises(DistributedError, match=r"rank 0 sends 2 rows to rank 1, which takes 1"):
        evaluate_ranks(traces, [[torch.ones(3)]] * 2)
