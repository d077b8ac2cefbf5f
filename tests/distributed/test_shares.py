"""Activations that stay split between a column layer and a row layer: as one rank, and with no more communication than needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.distributed.test_scheduling import all_equations
from tests.distributed.test_simulated_meshes import gradients
from thunder_fn.distributed.ranks import GATHER, REDUCE, evaluate_ranks
from thunder_fn.executors import lower
from thunder_fn.parameters import simulated

WIDTH, HEADS = 4, 12
CAUSAL = torch.ones(HEADS, 3, 3, dtype=torch.float64).tril().log1p()
PLAN = {"up*": "column", "down": "row"}
Steps = dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


def heads(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """On [batch, head, position, channel]."""
    return lambda x, b: f(x.unflatten(-1, (HEADS, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
KEEPING: Steps = {
    "gelu": lambda x, b: F.gelu(x),
    "whole factor": lambda x, b: x * b,
    "whole vector": lambda x, b: b[0, 0] - x,
    "a number for each row": lambda x, b: x + b[:, :, :1],
    "twice": lambda x, b: x.sin() * x,
    "attention": heads(lambda x: F.scaled_dot_product_attention(x, x + 1, x, is_causal=True)),
    "fused attention": heads(lambda x: FUSED(x, x + 1, x, 0.0, True)[0]),
    "fused attention, mask": heads(lambda x: FUSED(x, x, x, attn_mask=CAUSAL[None])[0]),
    "mask": heads(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=CAUSAL)),
    "softmax": heads(lambda x: x.softmax(-1)),
    "products": heads(lambda x: x @ x.transpose(-1, -2) @ x),
    "norm": heads(lambda x: F.layer_norm(x, x.shape[-1:])),
    "mean": heads(lambda x: x - x.mean(-1, keepdim=True) + x.amax((2,))[:, :, None]),
    "halves": heads(lambda x: torch.cat((-x[..., 1:], x[..., :1]), -1)),
    "parts": heads(lambda x: torch.stack(x.unbind(2), 2) + torch.cat(x.split(2, -1), -1)),
    "groups": lambda x, b: x.unflatten(-1, (HEADS, 1, -1)).expand(-1, -1, -1, 2, -1).sum(3).flatten(2),
    "permuted": lambda x, b: x.permute(2, 0, 1).exp().permute(1, 2, 0),
    "one position": lambda x, b: x[:, 1].unsqueeze(1) + x,
    "positions": lambda x, b: torch.ones(3, 3).to(x) @ x + x,
    "float": lambda x, b: x.float().double() + x,
}
NEEDING: Steps = {
    "cumsum": lambda x, b: x.cumsum(-1),
    "backwards": lambda x, b: x.flip(-1),
    "sum": lambda x, b: x - x.sum(-1, keepdim=True),
    "softmax of all": lambda x, b: x.softmax(-1),
    "part": lambda x, b: x * x[..., 3:4],
    "heads side by side": lambda x, b: x.transpose(1, 2).reshape(x.shape),
    "odd": lambda x, b: x.unflatten(-1, (2, -1)).flip(-2).flatten(2),
}


def problem(*names: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    steps, size = {**KEEPING, **NEEDING}, HEADS * 3
    drawn = torch.Generator().manual_seed(0)
    shapes = {"up": (size, WIDTH), "bias": (size,), "down": (WIDTH, size), "b": (2, 3, size)}
    params = {name: torch.randn(shape, generator=drawn, dtype=torch.float64) for name, shape in shapes.items()}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, params["up"], params["bias"])
        for name in names:
            y = steps[name](y, params["b"])
        return F.linear(torch.tanh(y), params["down"]).square().mean()

    return loss, params, torch.randn(2, 3, WIDTH, generator=drawn, dtype=torch.float64)


def sent(trace: Any) -> dict[str, int]:
    found = Counter(equation.op.name for equation in all_equations(trace))
    return {name: found[name] for name in (GATHER, REDUCE) if found[name]}


@given(names=st.lists(st.sampled_from([*KEEPING, *NEEDING]), max_size=3), size=st.sampled_from([2, 3, 5]))
@settings(max_examples=6, deadline=None)
def test_ranks_that_keep_their_shares_equal_one(names: list[str], size: int) -> None:
    loss, params, x = problem(*names)
    functions = [tfn.tensor_parallel(loss, group, PLAN) for group in simulated(size)]
    expected, value = tfn.grad_and_value(loss)(params, x)
    for whole, found in gradients(functions, params, [x] * size):
        torch.testing.assert_close(found, value)
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("name", KEEPING)
def test_nothing_is_gathered_between_a_column_and_a_row(name: str) -> None:
    loss, params, x = problem(name)
    functions = [tfn.tensor_parallel(loss, group, PLAN) for group in simulated(3)]
    compute = functions[0].rewrite(params, x).compute
    assert sent(compute) == {REDUCE: 1}
    for (value,) in evaluate_ranks(compute, [[*f.prepare(params).values(), x] for f in functions]):
        torch.testing.assert_close(value, loss(params, x))


@pytest.mark.parametrize("name", NEEDING)
def test_what_needs_all_of_it_gathers_once(name: str) -> None:
    loss, params, x = problem(name)
    functions = [tfn.tensor_parallel(loss, group, PLAN) for group in simulated(3)]
    compute = functions[0].rewrite(params, x).compute
    assert sent(compute) == {REDUCE: 1, GATHER: 1}
    for (value,) in evaluate_ranks(compute, [[*f.prepare(params).values(), x] for f in functions]):
        torch.testing.assert_close(value, loss(params, x))


def test_a_bias_that_the_plan_names_is_split_with_its_columns() -> None:
    loss, params, x = problem("gelu", "sum")
    for size in (3, 5):  # five do not divide the columns
        functions = [tfn.tensor_parallel(loss, group, {**PLAN, "bias": "column"}) for group in simulated(size)]
        assert functions[0].prepare(params)["bias"].shape == (-(-HEADS * 3 // size),)
        expected, value = tfn.grad_and_value(loss)(params, x)
        for whole, found in gradients(functions, params, [x] * size):
            torch.testing.assert_close(found, value)
            torch.testing.assert_close(whole, expected)


def test_what_is_read_split_and_whole_is_sent_one_way() -> None:
    """All ranks have one gradient of a gathered value, and take their share of it."""
    loss, params, x = problem("sum")
    f = tfn.tensor_parallel(loss, simulated(3)[0], {**PLAN, "bias": "column"})
    new = f.prepare(params)
    first, fixed = new.partition(lambda name: new[name].dtype.is_floating_point)
    gradient = tfn.trace(tfn.grad(lambda own, fixed, x: f(new.replaced(own, fixed), x)), first, fixed, x)
    program = str(lower(gradient))
    assert program.count("all_gather_into_tensor_default(") == 1 and "reduce_scatter" not in program


class Layer(nn.Module):
    """A transformer's layer: attention with two heads of keys for four of queries, a gated MLP, rotary positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // 2) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(width, 6), nn.Linear(width, 6), nn.Linear(6, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (
            y.unflatten(-1, (n, -1)).transpose(1, 2) for y, n in ((self.q(h), 4), (self.k(h), 2), (self.v(h), 2))
        )
        angles = torch.outer(torch.arange(x.shape[1]), torch.ones(q.shape[-1])).to(x)
        q, k = (y * angles.cos() + torch.cat((-y[..., 1:], y[..., :1]), -1) * angles.sin() for y in (q, k))
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_a_transformer_layer_sends_two_sums_each_way() -> None:
    torch.manual_seed(0)
    module = nn.ModuleList([Layer(8)]).double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    columns = dict.fromkeys((f"*.{name}.weight" for name in ("q", "k", "v", "gate", "up")), "column")
    plan = {**columns, "*.o.weight": "row", "*.down.weight": "row"}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        own = {name.removeprefix("0."): value for name, value in params.items()}
        return torch.func.functional_call(module[0], own, (x,)).square().mean()

    x = torch.randn(2, 3, 8, dtype=torch.float64)
    functions = [tfn.tensor_parallel(loss, group, plan) for group in simulated(2)]
    assert sent(functions[0].rewrite(params, x).compute) == {REDUCE: 2}
    expected, value = tfn.grad_and_value(loss)(params, x)
    for whole, found in gradients(functions, params, [x] * 2):
        torch.testing.assert_close(found, value)
        torch.testing.assert_close(whole, expected)


def test_attention_reads_gathered_heads() -> None:
    """A width that the ranks do not divide is gathered, into memory that attention on CPUs reads rightly."""
    drawn = torch.randn(8, 4, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64)

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, params["w"]).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y)

    functions = [tfn.tensor_parallel(f, group, {"w": "column"}) for group in simulated(3)]
    compute = functions[0].rewrite({"w": drawn}, x).compute
    for (value,) in evaluate_ranks(compute, [[*g.prepare({"w": drawn}).values(), x] for g in functions]):
        torch.testing.assert_close(value, f({"w": drawn}, x))
