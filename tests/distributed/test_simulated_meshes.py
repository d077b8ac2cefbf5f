"""Meshes of simulated ranks: tensor parallelism, hybrid sharding, clipping, gradients of many batches. No processes."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.distributed.ranks import evaluate_ranks
from thunder_fn.errors import RewriteError
from thunder_fn.ir.rules import lowered
from thunder_fn.parameters import Prepared, clip_by_global_norm, overlap, simulated, simulated_mesh
from thunder_fn.testing import check_schedule

PLAN = {
    "embedding.weight": "embedding",
    "*.up.weight": "column",
    "*.down.weight": "row",
    "*.norm.*": "sequence",
    "*.scale.weight": "sequence",
}


class Block(nn.Module):
    """Widths that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.RMSNorm(width)
        self.up, self.down = nn.Linear(width, width + 2), nn.Linear(width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(x + self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """The head is the embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width, padding_idx=2)
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embedding(indices)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def problem(width: int = 5, size: int = 1) -> tuple[Any, dict[str, torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Net(width).double()
    params = {name: value.detach() for name, value in module.named_parameters()}

    def loss(params: Any, indices: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(module, params, (indices,)).flatten(0, 1), indices.flatten())

    return loss, params, [torch.randint(0, 7, (2, 4)) for _ in range(size)]


def trained(new: Prepared) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return new.partition(lambda name: new[name].dtype.is_floating_point)


def gradients(functions: list[Any], params: Any, batches: list[Any], partitions: Any = None) -> list[Any]:
    """On each rank, the whole gradient of the parameters, gathered from the ranks' shares; and the loss."""
    shards = [f.prepare(params) for f in functions]
    first, fixed = trained(shards[0])
    with_value = tfn.grad_and_value(lambda own, fixed, x: functions[0](shards[0].replaced(own, fixed), x))
    program = tfn.trace(with_value, first, fixed, batches[0])
    tfn.check(program)
    check_schedule(program, len(functions), partitions)
    inputs = [[*own.values(), *rest.values(), x] for (own, rest), x in zip(map(trained, shards), batches, strict=True)]
    results = evaluate_ranks(program, inputs, partitions)
    found = [
        shard.replaced(dict(zip(sorted(first), result, strict=False)))
        for shard, result in zip(shards, results, strict=True)
    ]
    restore = functions[0].rewrite(params, batches[0]).restore
    whole = evaluate_ranks(restore, [list(each.values()) for each in found], partitions)
    names = sorted(params)
    return [(dict(zip(names, each, strict=True)), result[-1]) for each, result in zip(whole, results, strict=True)]


@given(size=st.integers(1, 4), width=st.sampled_from([1, 4, 5]), plan=st.sampled_from([*PLAN.items(), None]))
@example(size=2, width=4, plan=None)
@example(size=3, width=6, plan=None)
@settings(max_examples=1, deadline=None)
def test_ranks_that_share_a_batch_equal_one(size: int, width: int, plan: Any) -> None:
    loss, params, (batch,) = problem(width)
    chosen = PLAN if plan is None else dict([plan])
    functions = [tfn.tensor_parallel(loss, group, chosen) for group in simulated(size)]
    expected, value = tfn.grad_and_value(loss)(params, batch)
    for whole, found in gradients(functions, params, [batch] * size):
        torch.testing.assert_close(found, value)
        torch.testing.assert_close(whole, expected)


def test_each_rank_holds_its_share_and_what_crosses_is_in_the_trace() -> None:
    loss, params, (batch,) = problem(8)
    f = tfn.tensor_parallel(loss, simulated(2)[0], PLAN)
    new = f.prepare(params)
    assert new["layers.0.up.weight"].shape == (5, 8) and new["layers.0.down.weight"].shape == (8, 5)
    assert new["embedding.weight"].shape == (4, 8)
    text = str(f.rewrite(params, batch).compute)
    assert (
        "tensor_parallel_linear" in text
        and "tensor_parallel_embedding" in text
        and "tensor_parallel_layer_norm" in text
    )


class Attention(nn.Module):
    """With a norm that PyTorch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scale, self.out = nn.Embedding(6, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.words(indices)
        h = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.scale
        q, k, v = (one(h).unflatten(-1, (2, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("of_positions", [False, True])
def test_layers_on_one_value_share_what_they_send(of_positions: bool) -> None:
    """One sum for the words, one backwards for queries, keys and values, one for the row after them; or the halves."""
    module = Attention().double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    plan = {"words.weight": "embedding", "[qkv].*": "column", "out.weight": "row"}
    plan |= {"scale": "sequence"} if of_positions else {}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, params, (x,)).square().sum()

    functions = [tfn.tensor_parallel(loss, group, plan) for group in simulated(2)]
    x = torch.randint(0, 6, (3, 4))
    expected, value = tfn.grad_and_value(loss)(params, x)
    for whole, found in gradients(functions, params, [x] * 2):
        torch.testing.assert_close((whole, found), (expected, value))
    first, fixed = trained(functions[0].prepare(params))
    new = functions[0].prepare(params)
    program = tfn.trace(tfn.grad(lambda own, fixed, x: functions[0](new.replaced(own, fixed), x)), first, fixed, x)
    sent = Counter(
        one.op.name.split(".")[1]
        for one in all_equations(program)
        if "c10d" in one.op.name and math.prod(one.operands[0].type.shape) >= 3 * 4 * 4
    )
    del sent["wait_tensor"]
    halves = {"all_gather_into_tensor": 3 + 1, "reduce_scatter_tensor": 3}  # the loss reads all positions
    assert sent == (halves if of_positions else {"all_reduce": 3})


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (1, 3)])
def test_products_in_chunks_equal_the_uncut_ones(ranks: int, chunks: int) -> None:
    """The chunks' collectives are sent early, and gradients through a schedule are those without. Three do not divide."""
    module = Attention().double()
    params = {name: value.detach() for name, value in module.named_parameters()}
    plan = {"words.weight": "embedding", "[qkv].*": "column", "out.weight": "row", "scale": "sequence"}
    own: Any = lambda params, x: torch.func.functional_call(module, params, (x,)).square().sum()
    x = torch.randint(0, 6, (3, 8))
    functions = [tfn.tensor_parallel(own, group, plan, chunks=chunks) for group in simulated(ranks)]
    expected, value = tfn.grad_and_value(own)(params, x)
    for whole, found in gradients(functions, params, [x] * ranks):
        torch.testing.assert_close((whole, found), (expected, value))
    shards = [f.prepare(params) for f in functions]
    inputs = [[*shard.values(), x] for shard in shards]
    chosen = [name for name, value in shards[0].items() if value.is_floating_point()]

    def step(around: Any, inside: Any) -> Any:
        f = inside(lambda own, new, x: functions[0](new.replaced(own), x))
        gradient = lambda new, x: tfn.grad(f)({name: new[name] for name in chosen}, new, x)
        trace = tfn.trace(around(gradient), shards[0], x)
        tfn.check(trace)
        return trace, evaluate_ranks(trace, inputs)

    same: Any = lambda f: f
    _, plain = step(same, same)
    early, found = step(overlap, same)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    torch.testing.assert_close(step(same, overlap)[1], plain)
    names = [e.op.name.split(".")[1] for e in all_equations(early) if "c10d" in e.op.name]
    gathers = [at for at, name in enumerate(names) if name == "all_gather_into_tensor"]
    assert ranks == 1 or len(gathers) >= 2 * chunks
    assert ranks == 1 or "wait_tensor" not in names[gathers[0] : gathers[1]]  # two travel at a time


@pytest.mark.parametrize("other", [tfn.fsdp, tfn.ddp])
def test_on_one_mesh_with_sharding(other: Any) -> None:
    groups, partitions = simulated_mesh(data=2, tensor=2)
    loss, params, batches = problem(5, 2)
    together = [other(tfn.tensor_parallel(loss, g["tensor"], PLAN), g["data"]) for g in groups]
    reverse = tfn.tensor_parallel(other(loss, groups[0]["data"]), groups[0]["tensor"], PLAN)
    assert together[0].rewrite(params, batches[0]) == reverse.rewrite(params, batches[0])
    expected = tfn.grad(lambda p: torch.stack([loss(p, x) for x in batches]).mean())(params)
    per_rank = [batches[g["data"].rank] for g in groups]
    for (whole, value), batch in zip(gradients(together, params, per_rank, partitions), per_rank, strict=True):
        torch.testing.assert_close(value, loss(params, batch))
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize("transform", [lambda f: tfn.quantize(f, "int8"), lambda f: tfn.lora(f, 2)])
def test_with_other_steps(transform: Any) -> None:
    loss, params, (batch,) = problem(6)
    functions = [transform(tfn.tensor_parallel(loss, group, PLAN)) for group in simulated(3)]
    shards = [f.prepare(params) for f in functions]
    results = evaluate_ranks(functions[0].rewrite(params, batch).compute, [[*s.values(), batch] for s in shards])
    for (value,) in results:
        torch.testing.assert_close(value, loss(params, batch), rtol=0.05, atol=0.05)


def hybrid(f: Any, g: Any, **options: Any) -> Any:
    return tfn.ddp(tfn.fsdp(f, g["shard"], **options), g["replicate"])


@pytest.mark.parametrize("options", [{}, {"zero": 2, "bucket": "each", "offload": True}])
def test_hybrid_sharding(options: Any) -> None:
    groups, partitions = simulated_mesh(replicate=2, shard=3)
    loss, params, batches = problem(5, 6)
    expected = tfn.grad(lambda p: torch.stack([loss(p, x) for x in batches]).mean())(params)
    for whole, _ in gradients([hybrid(loss, g, **options) for g in groups], params, batches, partitions):
        torch.testing.assert_close(whole, expected)


def test_parameters_travel_in_another_precision() -> None:
    loss, params, batches = problem(5, 2)
    params = {name: value.float() for name, value in params.items()}
    functions = [tfn.fsdp(loss, group, precision=torch.bfloat16) for group in simulated(2)]
    shards = [f.prepare(params) for f in functions]
    compute = functions[0].rewrite(params, batches[0]).compute
    assert "bf16" in str(compute) and all(value.dtype == torch.float32 for value in shards[0].values())
    seen = {name: value.bfloat16().float() for name, value in params.items()}
    results = evaluate_ranks(compute, [[*s.values(), x] for s, x in zip(shards, batches, strict=True)])
    for (value,), batch in zip(results, batches, strict=True):
        torch.testing.assert_close(value, loss(seen, batch))
    expected = tfn.grad(lambda p: torch.stack([loss(p, x) for x in batches]).mean())(seen)
    for whole, _ in gradients(functions, params, batches):
        torch.testing.assert_close(whole, expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("transform", [tfn.fsdp, tfn.ddp, lambda f, mesh: tfn.fsdp(f, mesh, precision=torch.float16)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_whose_sum_is_no_float16(transform: Any, size: int) -> None:
    dtype = torch.float32 if transform not in (tfn.fsdp, tfn.ddp) else torch.float16
    functions = [transform(lambda p, x: (p["w"] * x).sum(), group) for group in simulated(size)]
    params, x = {"w": torch.ones(3, dtype=dtype)}, torch.full((3,), 3e4, dtype=dtype)
    for whole, _ in gradients(functions, params, [x] * size):
        torch.testing.assert_close(whole["w"], x, rtol=1e-3, atol=0)


@pytest.mark.parametrize("transform", [tfn.fsdp, tfn.ddp])
def test_gradients_of_complex_parameters_are_means_too(transform: Any) -> None:
    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (params["w"] * x).abs().square().sum()

    params = {"w": torch.randn(5, dtype=torch.complex128)}
    xs = [torch.randn(5, dtype=torch.float64) for _ in range(3)]
    functions = [transform(f, group) for group in simulated(3)]
    shards = [q.prepare(params) for q in functions]
    trace = tfn.trace(tfn.grad(functions[0]), shards[0], xs[0])
    mean = torch.stack([tfn.grad(f)(params, x)["w"] for x in xs]).mean(0)
    for q, (found,) in zip(
        functions, evaluate_ranks(trace, [[s["w"], x] for s, x in zip(shards, xs, strict=True)]), strict=True
    ):
        torch.testing.assert_close(found, q.prepare({"w": mean})["w"])


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_by_the_norm_of_all_ranks(norm_type: float) -> None:
    groups, partitions = simulated_mesh(data=2, tensor=2)
    loss, params, batches = problem(5, 2)
    functions = [tfn.fsdp(tfn.tensor_parallel(loss, g["tensor"], PLAN), g["data"]) for g in groups]
    shards = [f.prepare(params) for f in functions]

    def clipped(own: Any, fixed: Any, x: torch.Tensor) -> Any:
        found = tfn.grad(lambda own: functions[0](shards[0].replaced(own, fixed), x))(own)
        new, norm = clip_by_global_norm(shards[0].replaced(found, fixed), 0.1, norm_type)
        return norm, {name: new[name] for name in own}

    first, fixed = trained(shards[0])
    per_rank = [batches[g["data"].rank] for g in groups]
    inputs = [[*own.values(), *rest.values(), x] for (own, rest), x in zip(map(trained, shards), per_rank, strict=True)]
    results = evaluate_ranks(tfn.trace(clipped, first, fixed, batches[0]), inputs, partitions)
    copies = {name: value.clone().requires_grad_() for name, value in params.items()}
    torch.stack([loss(copies, x) for x in batches]).mean().backward()
    expected = nn.utils.clip_grad_norm_(copies.values(), 0.1, norm_type)
    restore = functions[0].rewrite(params, batches[0]).restore
    found = [s.replaced(dict(zip(sorted(first), r[1:], strict=True))) for s, r in zip(shards, results, strict=True)]
    for result, whole in zip(
        results, evaluate_ranks(restore, [list(f.values()) for f in found], partitions), strict=True
    ):
        torch.testing.assert_close(result[0], expected, check_dtype=False)
        torch.testing.assert_close(
            dict(zip(sorted(params), whole, strict=True)), {k: v.grad for k, v in copies.items()}
        )


def test_gradients_of_many_batches_are_reduced_once() -> None:
    loss, params, batches = problem(5, 4)
    functions = [tfn.fsdp(loss, group) for group in simulated(2)]
    shards = [f.prepare(params) for f in functions]

    def accumulated(new: Any, xs: list[torch.Tensor]) -> Any:
        whole, pull = tfn.vjp(functions[0].whole, new)
        found = [tfn.grad(loss)(whole, x) for x in xs]
        return pull({name: sum(each[name] for each in found) / len(xs) for name in whole})[0]

    program = tfn.trace(accumulated, shards[0], batches[:2])
    assert str(program).count("reduce_scatter_tensor") == str(program).count("all_gather_into_tensor") > 0
    own = (batches[:2], batches[2:])
    results = evaluate_ranks(program, [[*s.values(), *xs] for s, xs in zip(shards, own, strict=True)])
    expected = tfn.grad(lambda p: torch.stack([loss(p, x) for x in batches]).mean())(params)
    restore = functions[0].rewrite(params, batches[0]).restore
    for whole in evaluate_ranks(restore, results):
        torch.testing.assert_close(dict(zip(sorted(params), whole, strict=True)), expected)


@pytest.mark.parametrize("kind", ["fsdp", "zero=2", "ddp", "tensor_parallel"])
def test_gradients_of_each_example(kind: str) -> None:
    """Collectives have batching rules: vmap of a gradient sends those of all examples together."""
    loss, params, examples = problem(4, 3)
    make: dict[str, Any] = {
        "fsdp": lambda group: tfn.fsdp(loss, group, prefetch=1),
        "zero=2": lambda group: tfn.fsdp(loss, group, zero=2),
        "ddp": lambda group: tfn.ddp(loss, group),
        "tensor_parallel": lambda group: tfn.tensor_parallel(loss, group, PLAN),
    }
    functions = [make[kind](group) for group in simulated(2)]
    shards, batch = [f.prepare(params) for f in functions], torch.stack(examples)
    first, fixed = trained(shards[0])
    gradient = tfn.grad(lambda own, fixed, x: functions[0](shards[0].replaced(own, fixed), x))
    program = tfn.trace(tfn.vmap(gradient, in_dims=(None, None, 0)), first, fixed, batch)
    results = evaluate_ranks(program, [[*own.values(), *rest.values(), batch] for own, rest in map(trained, shards)])
    restore = functions[0].rewrite(params, examples[0]).restore
    for at, one in enumerate(examples):
        own = [dict(zip(sorted(first), (value[at] for value in result), strict=True)) for result in results]
        found = [list(shard.replaced(each).values()) for shard, each in zip(shards, own, strict=True)]
        for whole in evaluate_ranks(restore, found):
            torch.testing.assert_close(dict(zip(sorted(params), whole, strict=True)), tfn.grad(loss)(params, one))


def test_a_plan_that_says_nothing() -> None:
    loss, params, _ = problem(5)
    group = simulated(2)[0]
    for make, text in (
        (
            lambda: tfn.tensor_parallel(loss, group, {"*": "diagonal"}),
            "tensor_parallel: a weight is split by column, row, embedding, sequence; given 'diagonal'",
        ),
        (
            lambda: tfn.tensor_parallel(loss, group, ["column"]),
            "tensor_parallel: a plan is a dict of patterns on names and how the parameters are split, given a list\n"
            'Write `{"*.up.weight": "column", "*.down.weight": "row"}`.',
        ),
        (
            lambda: tfn.tensor_parallel(loss, group, {"embeding.weight": "embedding"}).prepare(params),
            "tensor_parallel: the plan's 'embeding.weight' matches no parameter\n"
            "There are embedding.weight, layers.1.down.weight, layers.0.down.weight.",
        ),
    ):
        with pytest.raises(RewriteError) as error:
            make()
        assert message_of(error.value) == text


@pytest.mark.parametrize("again", [tfn.fsdp, tfn.ddp, lambda f, mesh: tfn.tensor_parallel(f, mesh, PLAN)])
def test_ranks_that_share_parameters_already(again: Any) -> None:
    """A witness: each would take its rows of another shard, and none of them would be gathered with its own."""
    loss, group = problem(5)[0], simulated(2)[0]
    with pytest.raises(
        RewriteError,
        match=r"the 2 ranks of this mesh hold the parameters by fsdp already\nfrom: .*\nPass each its own dim",
    ):
        again(tfn.fsdp(loss, group), group)


# ---- modules ----


def test_gradients_of_a_module_accumulate_in_one_reduction() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    xs = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    sharded = tfn.lora(module, 2)
    with sharded.accumulate():
        for x in xs:
            sharded(x).square().sum().backward()
        assert all(p.grad is None for p in sharded.parameters())
    found = {name: p.grad for name, p in sharded.named_parameters() if p.requires_grad}
    for p in sharded.parameters():
        p.grad = None
    torch.stack([sharded(x).square().sum() for x in xs]).sum().backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in sharded.named_parameters() if p.requires_grad})


def test_clipping_a_module() -> None:
    module = tfn.quantize(nn.Linear(4, 4), "int8", filter=lambda name, shape: False)
    module(torch.randn(3, 4)).square().sum().backward()
    expected = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
    torch.testing.assert_close(module.clip_grad_norm_(0.1), expected)
    torch.testing.assert_close(torch.stack([p.grad.norm() for p in module.parameters()]).norm(), torch.tensor(0.1))


def test_a_module_on_the_meta_device_is_initialised_share_by_share() -> None:
    make = lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    whole = make()
    torch.manual_seed(3)
    for child in whole:
        child.reset_parameters()
    with torch.device("meta"):
        empty = make()
    for group in simulated(2):
        sharded = tfn.fsdp(empty, group)
        assert all(part.is_meta for part in sharded.parts().values())
        torch.manual_seed(3)
        sharded.initialise("cpu")
        expected = tfn.fsdp(whole, group)
        assert all(torch.equal(value, expected.parts()[name]) for name, value in sharded.parts().items())
        assert sharded.get_buffer("buffer 1/running_var").eq(1).all()


class Tied(nn.Module):
    """A head that is tied, as models of transformers have it, and a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("steps", torch.arange(3.0), persistent=False)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_module_on_the_meta_device_reads_files_module_by_module(tmp_path: Path, indexed: bool) -> None:
    whole, read = Tied(), list[str]()
    state = {name: value for name, value in whole.state_dict().items() if name != "head.weight"}
    files = {"a.safetensors": ["words.weight"], "b.safetensors": [name for name in state if name != "words.weight"]}
    for file, names in files.items() if indexed else [("all.safetensors", [*state])]:
        save_file({name: state[name] for name in names}, tmp_path / file)
    if indexed:
        where = {name: file for file, names in files.items() for name in names}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        save_file({}, tmp_path / "other.safetensors")

    def init(module: nn.Module) -> None:
        read.append(type(module).__name__)
        if isinstance(module, Tied):
            module.steps.copy_(torch.arange(3.0))

    with torch.device("meta"):
        empty = Tied()
    for group in simulated(2):
        sharded = tfn.fsdp(empty, group).initialise("cpu", init, weights=tmp_path)
        expected = tfn.fsdp(whole, group)
        assert all(torch.equal(value, expected.parts()[name]) for name, value in sharded.parts().items())
        assert all(torch.equal(one, two) for one, two in zip(sharded.buffers(), expected.buffers(), strict=True))
    assert read[:2] == ["Tied", "Embedding"]
    for weights, text in (
        ({**state, "words.weight": torch.ones(3)}, "'words.weight' is of shape (7, 4), its weight of (3,)"),
        ({}, "there is no weight of 'steps'\nPass `init=`, which fills what has no weight."),
        (tmp_path / "nowhere", "nowhere has no file of safetensors\nGive a file"),
    ):
        with pytest.raises(RewriteError) as error:
            tfn.fsdp(empty, simulated(2)[0]).initialise("cpu", init if weights else None, weights=weights)
        assert text in message_of(error.value)


def test_what_cannot_initialise_itself() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))

    with pytest.raises(RewriteError) as error:
        tfn.fsdp(nn.Sequential(Scale()), simulated(2)[0]).initialise("cpu")
    assert message_of(error.value) == (
        "initialise: '0', a Scale, has parameters and no reset_parameters\n"
        "Pass `init=`, a function that fills the parameters and buffers of one module in place."
    )


def all_equations(trace: Any) -> list[Any]:
    bodies = [(equation, lowered(equation)) for equation in trace.equations]
    return [one for equation, body in bodies for one in ([equation] if body is None else all_equations(body))]
