"""Context and expert parallelism on simulated ranks: as eager's attention and as a loop over tokens, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.capture import pytree
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.errors import RewriteError, VmapError
from thunder_fn.inspect.costs import cost_of_trace
from thunder_fn.ir.trace import Trace, subtraces
from thunder_fn.parameters import positions, simulated, simulated_mesh

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

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (self.heads, 3)).transpose(1, 2)
        k, v = self.keys(h).unflatten(-1, (2, self.grouped, 3)).unbind(-3)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        grouped = self.heads != self.grouped
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.is_causal, enable_gqa=grouped)
        return x + self.out(y.transpose(1, 2).flatten(2))


def sees(*shape: int) -> Tensor:
    """A mask in which one query sees nothing, and every other the first or the last key."""
    seen = torch.rand(shape) < 0.5
    seen[..., 0] = True
    if shape[-2] > 1:
        seen[..., 5, :] = False
    return seen


LENGTH, HEADS = 12, 12
MASKS: dict[str, Any] = {
    "": lambda: None,
    "causal": lambda: None,
    "of bools": lambda: sees(LENGTH, LENGTH),
    "of an example": lambda: sees(2, 1, LENGTH, LENGTH),
    "of keys": lambda: sees(2, 1, 1, LENGTH),
    "added, of heads": lambda: torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64),
    "added, of keys and heads": lambda: torch.randn(HEADS, 1, LENGTH, dtype=torch.float64),
    "added, of queries": lambda: torch.randn(LENGTH, 1, dtype=torch.float64),
}
CASES = [
    *((kind, order, 2, 4, "causal") for kind in ("ring", "all_to_all") for order in (False, True)),
    ("ring", True, 1, 12, "causal"),
    ("ring", False, 3, 12, ""),
    ("all_to_all", True, 3, 12, ""),
    *(("ring", True, 2, 4, name) for name in [*MASKS][2:]),
    *(("all_to_all", True, 2, 4, name) for name in [*MASKS][2:] if name != "of an example"),
    ("ring", False, 2, 4, "of bools"),
]


@pytest.mark.parametrize(("kind", "balanced", "ranks", "grouped", "masked"), CASES)
def test_ranks_with_parts_of_the_positions_equal_one_with_all(
    kind: str, balanced: bool, ranks: int, grouped: int, masked: str
) -> None:
    torch.manual_seed(0)
    net, mask = Layer(HEADS, grouped, masked == "causal").double(), MASKS[masked]()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x, scale = torch.randn(2, LENGTH, 8, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    is_added = mask is not None and mask.is_floating_point()

    def f(params: Any, x: Tensor, scale: Tensor, mask: Tensor | None) -> Tensor:
        seen = mask * scale if is_added and mask is not None else mask
        return torch.func.functional_call(net, params, (x, seen))

    def step(f: Any) -> Any:
        loss = lambda *args: ((y := f(*args)).square().sum(), y)
        return tfn.grad_and_value(loss, argnums=(0, 1, 2), has_aux=True)

    groups = simulated(ranks)
    places = [positions(group, balanced=balanced) for group in groups]
    given = list[Any]()
    for place in places:
        rows = mask if mask is None or mask.shape[-2] == 1 else place.part(mask, -2)
        given.append((params, place.part(x, 1), scale, rows))
    steps = [step(tfn.context_parallel(f, group, kind, balanced=balanced)) for group in groups]
    found = on_ranks(steps, given)
    (own, dx, dscale), (_, y) = step(f)(params, x, scale, mask)
    torch.testing.assert_close(places[0].joined([each[-1] for each in found], 1), y)
    count = len(params)
    torch.testing.assert_close(places[0].joined([each[count] for each in found], 1), dx)
    torch.testing.assert_close(sum(each[count + 1] for each in found), dscale)
    for at, name in enumerate(sorted(own)):
        torch.testing.assert_close(torch.stack([each[at] for each in found]).sum(0), own[name])


def test_heads_and_positions_and_parameters_on_ranks_equal_one() -> None:
    """As `plan(..., search=)` cuts a step: fsdp over the ranks of positions, around heads on ranks."""
    groups, partitions = simulated_mesh(context=2, tensor=2)
    module = Layer(4, 4, True).double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    own: Any = lambda params, x: torch.func.functional_call(module, params, (x,)).square().sum()
    x, plan = torch.randn(2, 4, 8, dtype=torch.float64), {"query.weight": "column", "out.weight": "row"}
    traces, given = list[Trace](), list[list[Tensor]]()
    for g in groups:
        tensor = tfn.tensor_parallel(own, g["tensor"], plan)
        whole = tensor.prepare(params)
        f = tfn.fsdp(tfn.context_parallel(tensor, g["context"], "all_to_all"), g["context"], reduction="sum")
        new, part = f.prepare(whole), positions(g["context"]).part(x, 1)
        chosen, _ = new.partition(lambda name, new=new: new[name].is_floating_point())
        step = tfn.grad_and_value(lambda chosen, new, part, f=f: f(new.replaced(chosen), part))
        traces.append(tfn.trace(step, chosen, new, part))
        given.append([*chosen.values(), *new.values(), part])
    found = evaluate_ranks(traces, given, partitions)
    grads, value = tfn.grad_and_value(own)(params, x)
    for rank, g in enumerate(groups):
        other = next(at for at, o in enumerate(groups) if o["tensor"] == g["tensor"] and o["context"] != g["context"])
        torch.testing.assert_close(found[rank][-1] + found[other][-1], value)
        names = sorted(chosen)
        mine = dict(zip(names, found[rank], strict=False))
        for name, whole in grads.items():
            whole = whole.chunk(2, int(plan[name] == "row"))[g["tensor"].rank] if name in plan else whole
            torch.testing.assert_close(mine[name], whole.chunk(2)[g["context"].rank])


def test_a_balanced_ring_gives_all_ranks_the_same_work() -> None:
    """Half of the products of a ring without causality, and those of a rank's own part."""
    x = torch.randn(1, 2, 16, 4)
    causal = lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)
    every = lambda x: F.scaled_dot_product_attention(x, x, x)
    flops = lambda f, group: cost_of_trace(tfn.trace(tfn.context_parallel(f, group, balanced=True), x)).flops
    first, *others = (flops(causal, group) for group in simulated(4))
    assert {*others} == {first} and first < 0.65 * flops(every, simulated(4)[0])


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
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, mask),
            "ring",
            "a mask of 4 rows and 4 columns for 4 queries of this rank and 8 keys of all ranks",
        ),
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
    with pytest.raises(RewriteError, match="3 positions of a rank are no two parts"):
        odd = lambda x: F.scaled_dot_product_attention(x, x, x)
        tfn.trace(tfn.context_parallel(odd, first, balanced=True), q[:, :, :3])
    with pytest.raises(RewriteError, match="6 positions are no 4 equal parts"):
        positions(first, balanced=True).part(torch.ones(6), 0)
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


@pytest.mark.parametrize("capacity", [None, 2, "ragged"])
@pytest.mark.parametrize(("ranks", "experts", "choices"), [(2, 4, 1), (4, 8, 3)])
def test_experts_on_many_ranks_are_those_of_a_loop(ranks: int, experts: int, choices: int, capacity: Any) -> None:
    """Ragged rows are as many as each rank's tokens have chosen: here nobody chooses the last expert."""
    torch.manual_seed(0)
    options, capacity = ({"ragged": True}, None) if capacity == "ragged" else ({"capacity": capacity}, capacity)
    params = {
        "up": torch.randn(experts, 3, 5, dtype=torch.float64),
        "down": torch.randn(experts, 5, 3, dtype=torch.float64),
    }
    xs = [torch.randn(6, 3, dtype=torch.float64) for _ in range(ranks)]
    indices = [torch.rand(6, experts - 1).topk(choices).indices for _ in xs]
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
    made = [tfn.expert_parallel(expert, g, experts, **options) for g in groups]
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
        (lambda: tfn.expert_parallel(expert, first, 2, capacity=1, ragged=True), "have no capacity, given 1"),
        (lambda: tfn.expert_parallel(3, first, 2), "expected a function, given an int"),  # pyright: ignore[reportArgumentType]
        (
            lambda: tfn.expert_parallel(expert, first, 2)({}, torch.ones(2, 3, 4), torch.ones(2, 1), torch.ones(2, 1)),
            "given (2, 3, 4), (2, 1), (2, 1)",
        ),
    ):
        with pytest.raises(RewriteError) as error:
            make()
        assert text in message_of(error.value)


def test_ragged_rows_are_not_batched() -> None:
    moe = tfn.expert_parallel(expert, simulated(2)[0], 2, ragged=True)
    params, indices = {"up": torch.ones(1, 2, 3), "down": torch.ones(1, 3, 2)}, torch.zeros(4, 1, dtype=torch.int64)
    each = lambda x, i: moe(params, x, i, torch.ones(4, 1))
    with pytest.raises(VmapError, match="depends on data, so that it differs between examples"):
        tfn.trace(tfn.vmap(each), torch.ones(3, 4, 2), indices.expand(3, 4, 1))
