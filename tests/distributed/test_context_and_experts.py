"""Context and expert parallelism on simulated ranks: as eager's attention and as a loop over tokens, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.errors import RewriteError
from thunder_fn.ir.trace import Trace, subtraces
from thunder_fn.parameters import simulated

Tensor = torch.Tensor


def on_ranks(functions: list[Any], inputs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    traces = list[Trace]()
    for f, given in zip(functions, inputs, strict=True):
        traces.append(tfn.trace(f, *given))
        tfn.check(traces[-1])
    return evaluate_ranks(traces, [pytree.flatten(given)[0] for given in inputs])


class Layer(nn.Module):
    """An attention between what acts on each position alone, with as many heads for keys as are given."""

    def __init__(self, heads: int, grouped: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.grouped, self.is_causal = heads, grouped, is_causal
        self.norm, self.query, self.out = nn.LayerNorm(8), nn.Linear(8, heads * 3), nn.Linear(heads * 3, 8)
        self.keys = nn.Linear(8, 2 * grouped * 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (self.heads, 3)).transpose(1, 2)
        k, v = self.keys(h).unflatten(-1, (2, self.grouped, 3)).unbind(-3)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=self.heads != self.grouped)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.parametrize(("ranks", "grouped", "is_causal"), [(1, 12, True), (2, 4, True), (3, 12, False)])
def test_ranks_with_parts_of_the_positions_equal_one_with_all(
    kind: str, ranks: int, grouped: int, is_causal: bool
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Layer(12, grouped, is_causal)).double()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x = torch.randn(2, 6, 8, dtype=torch.float64)

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(net, params, (x,)).square().sum()

    def call(x: Tensor) -> Tensor:
        return net(x)

    parts = [(part.contiguous(),) for part in x.chunk(ranks, 1)]
    found = on_ranks([tfn.context_parallel(call, g, kind) for g in simulated(ranks)], parts)
    torch.testing.assert_close(torch.cat([y for (y,) in found], 1), net(x))

    gradients = [tfn.grad(tfn.context_parallel(loss, g, kind), argnums=(0, 1)) for g in simulated(ranks)]
    expected = tfn.grad(loss, argnums=(0, 1))(params, x)
    given = [(params, *part) for part in parts]
    found = on_ranks(gradients, given)
    torch.testing.assert_close(torch.cat([each[-1] for each in found], 1), expected[1])
    for at, name in enumerate(sorted(params)):
        torch.testing.assert_close(torch.stack([each[at] for each in found]).sum(0), expected[0][name])


def test_a_ring_stores_neither_keys_of_others_nor_scores() -> None:
    """The forward hands on no more than its own queries, keys and values."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).sum()

    given = [torch.randn(1, 2, 64, 4) for _ in range(3)]
    trace = tfn.trace(tfn.grad(tfn.context_parallel(f, simulated(4)[1]), argnums=(0, 1, 2)), *given)
    backward = [e for t in subtraces(trace) for e in t.equations if e.op.name == "checkpoint"][-1]
    sizes = sum(t.shape[-1] * t.shape[-2] for t in backward.operand_types if len(getattr(t, "shape", ())) > 1)
    assert sizes <= 5 * 64 * 4


def test_attention_that_cannot_be_cut() -> None:
    first, _ = simulated(2)
    q, mask = torch.randn(1, 3, 4, 2), torch.zeros(4, 4)
    for f, kind, text in (
        (lambda x: F.scaled_dot_product_attention(x, x, x, mask), "ring", "attention has a mask"),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "ring", "attention drops weights"),
        (lambda x: F.scaled_dot_product_attention(x, x, x), "all_to_all", "the numbers of heads are no multiples of 2"),
        (
            lambda x: F.scaled_dot_product_attention(x[:, :, :2], x, x, is_causal=True),
            "ring",
            "causal attention to another number of positions",
        ),
    ):
        with pytest.raises(RewriteError, match=f"context_parallel: {text}"):
            tfn.trace(tfn.context_parallel(f, first, kind), q)
    with pytest.raises(RewriteError, match="kind is ring or all_to_all, given 'star'"):
        tfn.context_parallel(lambda x: x, first, "star")


# ---- experts ----


def expert(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["up"]) @ params["down"]


def loop(params: Any, x: Tensor, indices: Tensor, weights: Tensor, capacity: int | None) -> Tensor:
    """The oracle: token by token, choice by choice."""
    taken, rows = dict[int, int](), list[Tensor]()
    for token in range(len(x)):
        total = torch.zeros_like(x[0])
        for choice in range(indices.shape[1]):
            e = int(indices[token, choice])
            taken[e] = taken.get(e, 0) + 1
            if capacity is None or taken[e] <= capacity:
                own = {name: value[e] for name, value in params.items()}
                total = total + weights[token, choice] * expert(own, x[token : token + 1])[0]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("capacity", [None, 2])
@pytest.mark.parametrize(("ranks", "experts", "choices"), [(2, 4, 1), (4, 8, 3)])
def test_experts_on_many_ranks_are_those_of_a_loop(
    ranks: int, experts: int, choices: int, capacity: int | None
) -> None:
    torch.manual_seed(0)
    params = {
        "up": torch.randn(experts, 3, 5, dtype=torch.float64),
        "down": torch.randn(experts, 5, 3, dtype=torch.float64),
    }
    xs = [torch.randn(6, 3, dtype=torch.float64) for _ in range(ranks)]
    indices = [torch.rand(6, experts).topk(choices).indices for _ in xs]
    weights = [torch.rand(6, choices, dtype=torch.float64) for _ in xs]

    def whole(params: Any, xs: Any, weights: Any) -> Any:
        every = zip(xs, indices, weights, strict=True)
        return [loop(params, x, i, w, capacity) for x, i, w in every]

    def step(moe: Any) -> Any:
        return tfn.grad_and_value(lambda p, x, w, i: moe(p, x, i, w).square().sum(), argnums=(0, 1, 2))

    leaves = [value.clone().requires_grad_() for value in (*params.values(), *xs, *weights)]
    total = sum(
        y.square().sum()
        for y in whole(dict(zip(params, leaves[:2], strict=True)), leaves[2 : 2 + ranks], leaves[2 + ranks :])
    )
    up, down, *expected = torch.autograd.grad(total, leaves)  # pyright: ignore[reportCallIssue,reportArgumentType]
    groups = simulated(ranks)
    own = [{name: value.chunk(ranks)[g.rank] for name, value in params.items()} for g in groups]
    made = [tfn.expert_parallel(expert, g, experts, capacity=capacity) for g in groups]
    given = list(zip(own, xs, weights, indices, strict=True))
    found = on_ranks([step(moe) for moe in made], given)
    for rank, (down_, up_, x, w, value) in enumerate(found):
        torch.testing.assert_close(up_, up.chunk(ranks)[rank])
        torch.testing.assert_close(down_, down.chunk(ranks)[rank])
        torch.testing.assert_close((x, w), (expected[rank], expected[ranks + rank]))
        y = loop(params, xs[rank], indices[rank], weights[rank], capacity)
        torch.testing.assert_close(value, y.square().sum())


def test_experts_that_do_not_fit() -> None:
    first, _ = simulated(2)
    for make, text in (
        (lambda: tfn.expert_parallel(expert, first, 3), "3 experts on 2 ranks\nGive a multiple"),
        (lambda: tfn.expert_parallel(expert, first, 0), "experts is a number from 1 on, given 0"),
        (lambda: tfn.expert_parallel(expert, first, 2, capacity=0), "capacity is a number from 1 on, given 0"),
        (lambda: tfn.expert_parallel(3, first, 2), "expected a function, given an int"),  # pyright: ignore[reportArgumentType]
        (
            lambda: tfn.expert_parallel(expert, first, 2)({}, torch.ones(2, 3, 4), torch.ones(2, 1), torch.ones(2, 1)),
            "given (2, 3, 4), (2, 1), (2, 1)",
        ),
    ):
        with pytest.raises(RewriteError) as error:
            make()
        assert text in str(error.value)
