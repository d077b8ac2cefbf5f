"""Plans: closed forms of time and communication, the formula of a GPT, and memory as it is measured."""

from __future__ import annotations

import html
import math
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.models import GPT
from thunder_fn.errors import InspectError
from thunder_fn.inspect.machines import KNOWN, machine_named
from thunder_fn.parameters import overlap
from thunder_fn.planning import Collective, Hardware, Link, collective_seconds, fake_world, hardware_named, plan_layers
from thunder_fn.planning.links import ring_seconds, tree_seconds
from thunder_fn.planning.measure import measured_hardware
from thunder_fn.planning.parts import Parts
from thunder_fn.planning.rates import FOLDER, read, toml_of

FILES = sorted(path.stem for path in FOLDER.glob("*.toml"))
TOY = Hardware("toy", "made up", {"float32": 100.0}, 1e6, 10.0, 0.0, 4, Link(8.0, 0.5), Link(1.0, 2.0))


@pytest.fixture
def world() -> Iterator[int]:
    with fake_world(64):
        yield 64


def gpt(layers: int = 2, width: int = 64, context: int = 32) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    with torch.device("meta"):
        model = GPT(layers, width, 2, 256, context).bfloat16()
        tokens = torch.zeros(1, context, dtype=torch.long)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return loss, params, tokens


# ---- hardware ----


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_hardware_reads_back(name: str) -> None:
    found = hardware_named(name)
    assert found.source and found.memory_bytes > 0 and found.inside.rate >= found.across.rate
    assert read(tomllib.loads(toml_of(found))) == found


@pytest.mark.parametrize(("name", "known"), [("h100", "H100 SXM"), ("h200", "H200")])
def test_files_and_the_inspectors_table_agree(name: str, known: str) -> None:
    found, machine = hardware_named(name), machine_named(known)
    assert known in KNOWN
    assert found.peak(torch.bfloat16) == machine.flops_per_second
    assert found.memory_bytes_per_second == machine.bytes_per_second


def test_unknown_hardware_names_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(tfn.errors.InspectError, match=r"there is no hardware 'h300'\nfrom: .*\nName one of b200, h100"):
        hardware_named("h300")
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    with pytest.raises(tfn.errors.InspectError, match=r"mine\.toml is no hardware: 'flops_per_second'"):
        hardware_named(tmp_path / "mine.toml")


WRONG = {
    "no TOML": ('name = "', r"mine\.toml is no TOML"),
    "text": (("memory_bytes = 80e9", 'memory_bytes = "80 GB"'), "memory_bytes cannot be '80 GB'"),
    "negative": (("memory_bytes = 80e9", "memory_bytes = -80e9"), "memory_bytes cannot be -80000000000.0"),
    "nothing a second": (("bytes_per_second = 450e9", "bytes_per_second = 0"), "bytes_per_second cannot be 0"),
    "more than all": (("matmul_efficiency = 0.7", "matmul_efficiency = 70"), "matmul_efficiency cannot be 70"),
    "no ranks": (("node_size = 8", "node_size = 0"), "node_size is a number of ranks, given 0"),
    "no dtype": (("bfloat16 =", "bf16 ="), "'bf16', which is no dtype"),
    "not the one for others": (("float32 = 67e12\n", ""), "has no float32"),
    "no link": (("[inside]", "[besides]"), "'inside'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_figures_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    change, text = WRONG[name]
    file, known = tmp_path / "mine.toml", (FOLDER / "h100.toml").read_text()
    file.write_text(change if isinstance(change, str) else known.replace(*change, 1))
    with pytest.raises(InspectError, match=text):
        hardware_named(file)


def test_worlds_and_choices_that_cannot_be_are_refused() -> None:
    x = torch.empty(8, 8, device="meta")
    loss = lambda params, x: (x @ params["w"]).sum()
    plan: Any = lambda world, search: tfn.plan(loss, ({"w": x}, x), "h100", world, search=search)
    for world in (0, -8, 1.5, "8", True):
        with pytest.raises(InspectError, match="world is a number of ranks from 1 on"):
            plan(world, {"micro": (1,)})
    for search, text in (
        ("yes", "search is True, False or a mapping"),
        ({"micro": ()}, "micro has no choice"),
        ({"micro": 2}, "micro is a sequence of numbers from 1 on, given 2"),
        ({"stages": (0,)}, "stages is a sequence of numbers from 1 on"),
        ({"keeps": ("some",), "blocks": [torch.nn.Identity()]}, "keeps is a sequence of all, none"),
        ({"precision": ("bf16",)}, "precision is a sequence of floating dtypes"),
        ({"blocks": [3]}, "blocks is a sequence of modules"),
        ({"schedule": ("2f2b",)}, "schedule is a sequence of gpipe, 1f1b"),
        ({"order": ("tensor",)}, "order is a sequence of orders of"),
    ):
        with pytest.raises(InspectError, match=text):
            plan(8, search)
    with pytest.raises(tfn.errors.UnknownOption, match="unknown choice 'micros'; did you mean 'micro'"):
        plan(8, {"micros": (1,)})


def test_this_machine_is_measured() -> None:
    found = measured_hardware(seconds=0.001)
    assert read(tomllib.loads(toml_of(found))) == found
    assert 0 < found.attention_efficiency <= 1 and 0 < found.matmul_efficiency <= 1
    assert found.memory_bytes > 2**28 and found.peak(torch.float32) > 1e8 and 0 < found.op_seconds < 1e-2


# ---- collectives ----


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("nonsense", 1, 2, 1), "kind is one of all-gather, .*, given 'nonsense'"),
        (("all-gather", 1, 2, 3), "1 bytes of 2 ranks in 3 nodes"),
        (("all-gather", -1, 2, 1), "-1 bytes of 2 ranks in 1 nodes"),
    ],
)
def test_a_collective_that_cannot_be(given: Any, text: str) -> None:
    with pytest.raises(InspectError, match=text):
        Collective(*given)


def test_a_ring_and_a_tree_are_their_formulas() -> None:
    gather = Collective("all-gather", 800, ranks=4, nodes=1)
    assert ring_seconds(gather, TOY) == 3 * 0.5 + 800 * 3 / 4 / 8
    across = Collective("reduce-scatter", 800, ranks=8, nodes=2)  # 4 ranks of a node: 4 rings, of 4 bytes a second
    assert ring_seconds(across, TOY) == 6 * 0.5 + 1 * 2.0 + 800 * 7 / 8 / 4
    alone = Collective("all-gather", 800, ranks=2, nodes=2)
    assert ring_seconds(alone, TOY) == 2.0 + 400 / 1
    reduce = replace(across, kind="all-reduce")
    assert ring_seconds(reduce, TOY) == 2 * ring_seconds(across, TOY)
    assert tree_seconds(reduce, TOY) == pytest.approx(2 * (3 * 0.5 + 2.0) + 1600 / (0.9 * 4))


@given(ranks=st.integers(0, 6), num_bytes=st.integers(1, 10**9))
def test_a_collective_takes_the_faster_way_and_more_for_more(ranks: int, num_bytes: int) -> None:
    size = 2**ranks
    one = Collective("all-reduce", num_bytes, size, math.ceil(size / TOY.node_size))
    took = collective_seconds(one, TOY)
    assert took == (0.0 if size == 1 else min(ring_seconds(one, TOY), tree_seconds(one, TOY)))
    assert collective_seconds(replace(one, num_bytes=2 * num_bytes), TOY) >= took


# ---- plans ----


def test_a_product_is_the_roofline() -> None:
    x = torch.empty(64, 64, device="meta")
    found = tfn.plan(lambda x: x @ x, (x,), TOY)
    assert found.timeline.flops == 2 * 64**3
    assert found.seconds == max(2 * 64**3 / 100, 2 * x.nbytes / 10)
    assert (found.memory.input_bytes, found.memory.peak) == (x.nbytes, x.nbytes)
    assert found.mfu == pytest.approx(2 * 64**3 / 100 / found.seconds)


def test_a_function_is_bound_by_its_elements() -> None:
    x = torch.empty(1000, device="meta")
    found = tfn.plan(F.gelu, (x,), replace(TOY, elements_per_second=0.5))
    assert found.seconds == 2000
    viewed = tfn.plan(lambda x: x.view(10, 100).t(), (x,), replace(TOY, op_seconds=9.0, view_seconds=0.25))
    assert (viewed.seconds, viewed.timeline.launches) == (0.5, 0)


def test_a_loop_counts_its_steps() -> None:
    x = torch.empty(8, 8, device="meta")
    found = tfn.plan(lambda x: tfn.fori_loop(0, 10, lambda _, y: y @ x, x), (x,), replace(TOY, op_seconds=1.0))
    assert found.timeline.flops == 10 * 2 * 8**3
    once = tfn.plan(lambda x: tfn.fori_loop(0, 1, lambda _, y: y @ x, x), (x,), replace(TOY, op_seconds=1.0))
    assert found.seconds == pytest.approx(10 * once.seconds)


def test_a_gpt_has_six_operations_for_a_parameter_and_a_token(world: int) -> None:
    layers, width, context = 2, 64, 32
    loss, params, tokens = gpt(layers, width, context)
    found = tfn.plan(tfn.grad(loss), (params, tokens))
    matrices = 12 * layers * width**2 + 256 * width
    attention = dict(found.timeline.by_op)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in attention  # as on a GPU: no scores
    scores = (4 + 10) * layers * context**2 * width  # two products forward, five backward
    assert found.timeline.flops - scores == pytest.approx(6 * matrices * context, rel=0.05)  # and pointwise ops


def test_fsdp_gathers_twice_and_reduces_once(world: int) -> None:
    loss, params, tokens = gpt()
    f = tfn.fsdp(loss, init_device_mesh("cpu", (world,)))
    found = tfn.plan(tfn.grad(f), (f.prepare(params), tokens), world=world)
    whole = sum(2 * 64 * math.ceil(p.shape[0] / world) * p[0].numel() for p in params.values())  # shards are padded
    sent = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    for one, times, _ in found.timeline.collectives:
        assert (one.ranks, one.nodes) == (world, world // 8)
        sent[one.kind] += times * one.num_bytes
    assert sent["reduce-scatter"] == whole
    embeddings = sum(params[name].nbytes for name in ("tokens.weight", "positions.weight"))  # no backward reads them
    assert whole <= sent["all-gather"] <= 2 * whole
    assert sent["all-gather"] >= 2 * (whole - 2 * embeddings)
    assert found.exposed_communication + found.hidden_communication == pytest.approx(found.timeline.communicating)


def test_attention_is_split_by_heads_over_tensor_parallel_ranks(world: int) -> None:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.linear(x, params[name]).unflatten(-1, (8, 16)).transpose(1, 2) for name in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), params["o"]).sum()

    params = {name: torch.empty(128, 128, device="meta") for name in "qkvo"}
    x = torch.empty(2, 32, 128, device="meta")
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("data", "tensor"))
    split = {**dict.fromkeys("qkv", "column"), "o": "row"}
    f = tfn.tensor_parallel(loss, mesh["tensor"], split)
    found = tfn.plan(f, (f.prepare(params), x))
    assert [(one.kind, one.num_bytes, one.nodes, times) for one, times, _ in found.timeline.collectives] == [
        ("all-reduce", x.nbytes, 1, 1)
    ]
    alone = tfn.plan(loss, (params, x))
    assert found.timeline.flops < 1.2 * alone.timeline.flops / 8


def test_prefetching_hides_communication(world: int) -> None:
    loss, params, tokens = gpt(2)
    exposed = []
    for prefetch in (None, 1):
        f = tfn.fsdp(loss, init_device_mesh("cpu", (world,)), prefetch=prefetch)
        found = tfn.plan(tfn.grad(f), (f.prepare(params), tokens), replace(TOY, op_seconds=1e3))
        exposed.append(found.exposed_communication)
    assert exposed[1] < exposed[0]


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_ranks_of_a_pipeline_wait_as_its_schedule_says(kind: str) -> None:
    """Stages of equal cost on links that take no time; each rank holds its own parameters."""

    def deep(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + params[0]
        for w in params[1:]:
            x = x @ w
        return x.square().mean()

    free = Link(1e15, 0.0)
    hardware = replace(TOY, memory_bytes_per_second=1e15, inside=free, across=free)
    with torch.device("meta"), fake_world(4):
        params, x = [torch.empty(64), *(torch.empty(64, 64) for _ in range(4))], torch.empty(24, 64)
        step = tfn.pipeline(deep, init_device_mesh("cpu", (4,)), stages=4, micro=6, schedule=kind)
        found = tfn.plan(step, (params, x), hardware)
    assert found.bubble == pytest.approx(step.schedule.bubble(), rel=0.05)
    assert found.seconds == max(one.seconds for one in found.stages) and found.fits
    assert [one.held_bytes - x.nbytes for one in found.stages] == [(64 + 64**2) * 4, *[64**2 * 4] * 3]
    assert found.peak_bytes == max(one.peak_bytes for one in found.stages)
    assert "ranks of the pipeline, whose bubble is" in str(found)


def test_equal_stages_and_micro_batches_are_planned_once_and_as_a_flat_program() -> None:
    """Each rank has the operations, launches and peak of the program that jit makes of it. A weight is gathered once,
    its gradient reduced for each micro-batch.
    """
    width, rows, micro, ranks = 64, 8, 6, 4

    def deep(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = (x @ w).tanh()
        return x.square().mean()

    with torch.device("meta"), fake_world(2 * ranks):
        mesh = init_device_mesh("cpu", (ranks, 2), mesh_dim_names=("pipe", "data"))
        params, x = [torch.empty(width, width) for _ in range(2 * ranks)], torch.empty(micro * rows, width)
        f = tfn.fsdp(deep, mesh["data"], zero=2)
        step, held = tfn.pipeline(f, mesh["pipe"], stages=ranks, micro=micro), f.prepare(params)
        found = tfn.plan(step, (held, x), "h100")
        flat = [
            tfn.inspect.memory(replace(step, group=replace(step.group, rank=rank)), held, x) for rank in range(ranks)
        ]
    product = 2 * rows * width * width
    for rank, (one, memory) in enumerate(zip(found.stages, flat, strict=True)):
        counts = {each.kind: times for each, times, _ in one.timeline.collectives}
        assert counts["all-gather"] == 2 and counts["reduce-scatter"] == 2 * micro
        assert 1 <= one.timeline.flops / (micro * (5 if rank == 0 else 6) * product) < 1.1
        assert one.live_bytes == pytest.approx(memory.peak, rel=0.02), rank
        assert sum(memory.names[at].endswith("mm.default") for at in range(len(memory.names))) == micro * (
            6 - (rank == 0)
        )
        assert one.held_bytes == 2 * width * width // 2 * 4 + x.nbytes


def test_what_calls_of_a_part_have_in_common_is_computed_in_the_first() -> None:
    part = torch.nn.Sequential(torch.nn.Linear(3, 3))
    part.forward = lambda w, x: (w.exp() @ x.sin(), w.cos())  # type: ignore[assignment]
    f = lambda w, v, x, y: (*part(w, x), *part(w, y), *part(v, x), *part(w, x + y))
    args = [torch.randn(3, 3, dtype=torch.float64) for _ in range(4)]
    trace = tfn.trace(f, *args)
    calls = [one for one in trace.equations if one.op.kind == "composite"]
    assert len(calls) == 4 and len({one.body for one in calls}) == 1
    stages = lambda w, v, x, y: (*part(w, x), *part(v, y), *part(w, x + 1), *part(v, x + y))
    for same, exps in ((lambda w, v, x, y: stages(w, w, x, y), 1), (stages, 2)):
        trace = tfn.trace(same, *args)
        new = Parts().shared(trace)
        tfn.check(new)
        found, expected = tfn.evaluate(new, args), tfn.evaluate(trace, args)
        assert all(map(torch.equal, found, expected))
        ops = [one.op.name for call in new.equations for body in call.bodies for one in body.equations]
        assert ops.count("aten.exp.default") == exps


def test_products_in_chunks_are_planned_as_overlapped(world: int) -> None:
    """More of the communication is hidden, and the rank waits less; chunks alone hide reductions."""
    empty = lambda *shape: torch.empty(*shape, device="meta", dtype=torch.bfloat16)
    params = {"norm": empty(8192), "up": empty(32768, 8192), "down": empty(8192, 32768)}
    x = empty(1, 8192, 8192)
    mesh = init_device_mesh("cpu", (world // 8, 8), mesh_dim_names=("data", "tensor"))
    plan = {"norm": "sequence", "up": "column", "down": "row"}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(x, x.shape[-1:], params["norm"])
        return (x + F.linear(F.gelu(F.linear(h, params["up"])), params["down"])).square().sum()

    def planned(chunks: int, around: Any) -> Any:
        f = tfn.tensor_parallel(loss, mesh["tensor"], plan, chunks=chunks)
        new = f.prepare(params)
        own, others = new.partition(lambda name: new[name].is_floating_point())
        step = tfn.grad(lambda own, others, x: f(new.replaced(own, others), x))
        return tfn.plan(around(step), (own, others, x), "h100")

    whole, cut = planned(1, overlap), planned(2, overlap)
    assert whole.hidden_communication < 0.2 * whole.timeline.communicating  # gradients of weights hide some
    assert cut.hidden_communication > 0.25 * cut.timeline.communicating
    assert cut.exposed_communication < whole.exposed_communication
    assert planned(2, lambda step: step).hidden_communication > whole.hidden_communication


def test_a_ring_sends_to_one_neighbour_at_a_time(world: int) -> None:
    mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "cp"))["cp"]
    x = torch.empty(1, 8, 128, 64, device="meta", dtype=torch.bfloat16)
    f = lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)
    ring, heads = (tfn.plan(tfn.context_parallel(f, mesh, kind), (x,)) for kind in ("ring", "all_to_all"))
    assert [(one.kind, times) for one, times, _ in ring.timeline.collectives] == [("send", 2 * 7)]
    assert [(one.kind, times) for one, times, _ in heads.timeline.collectives] == [("all-to-all", 4)]
    assert ring.timeline.wire_bytes == 14 * x.nbytes and heads.timeline.wire_bytes == 4 * x.nbytes * 7 / 8


def test_experts_send_their_slots(world: int) -> None:
    """There and back, forwards and backwards."""
    experts, capacity, width, tokens = 2 * world, 3, 8, 16
    with torch.device("meta"):
        x, weights, chosen = torch.empty(tokens, width), torch.empty(tokens, 2), torch.empty(tokens, 2).long()
        params = torch.empty(2, width, width)
    mesh = init_device_mesh("cpu", (world,))
    moe = tfn.expert_parallel(lambda params, x: x @ params, mesh, experts, capacity=capacity)
    found = tfn.plan(tfn.grad(lambda x: moe(params, x, chosen, weights).square().sum()), (x,), "h100")
    ((one, times, _),) = found.timeline.collectives
    assert (one.kind, one.ranks, one.num_bytes, times) == ("all-to-all", world, experts * capacity * width * 4, 4)


def test_equal_layers_cost_equally(world: int) -> None:
    def make(layers: int) -> tuple[Any, tuple[Any, torch.Tensor]]:
        with torch.device("meta"):
            blocks = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(layers)])
            x = torch.zeros(128, 64)
        call = lambda params, x: [x := torch.func.functional_call(blocks[i], params[i], (x,)) for i in params][-1]
        f = tfn.fsdp(lambda params, x: call(params, x).sum(), init_device_mesh("cpu", (world,)))
        params = {i: {name: p.detach() for name, p in block.named_parameters()} for i, block in enumerate(blocks)}
        return tfn.grad(f), (f.prepare(params), x)

    deep, whole = plan_layers(make, 8), tfn.plan(*make(8))
    assert deep.timeline.launches == whole.timeline.launches
    assert deep.timeline.num_bytes == whole.timeline.num_bytes
    assert dict(deep.timeline.flops_by_dtype) == dict(whole.timeline.flops_by_dtype)
    counts = lambda found: {one: times for one, times, _ in found.timeline.collectives}
    assert counts(deep) == counts(whole)
    assert deep.held_bytes == whole.held_bytes
    assert deep.live_bytes == pytest.approx(whole.live_bytes, rel=0.1)  # shallow peaks lie elsewhere
    assert deep.seconds == pytest.approx(whole.seconds, rel=0.01)


def test_a_fused_kernel_moves_what_crosses_it() -> None:
    x = torch.empty(1000, device="meta")
    plain = tfn.plan(lambda x: x.sin().cos().exp(), (x,), TOY)
    fused = tfn.plan(lambda x: x.sin().cos().exp(), (x,), TOY, fused=True)
    assert (plain.timeline.num_bytes, plain.timeline.launches) == (6 * x.nbytes, 3)
    assert (fused.timeline.num_bytes, fused.timeline.launches) == (2 * x.nbytes, 1)


def test_a_plan_is_a_page_that_says_where_memory_and_time_go(world: int) -> None:
    loss, params, tokens = gpt(1)
    f = tfn.fsdp(loss, init_device_mesh("cpu", (world,)))
    text = str(tfn.plan(tfn.grad(f), (f.prepare(params), tokens)))
    assert "on 64 ranks of H100 SXM" in text and "fits in 74.5 GiB" in text
    for word in ("at the peak:", "time by op:", "collectives:", "reduce-scatter", "models.py:"):
        assert word in text
    tiny = replace(hardware_named("h100"), memory_bytes=1.0)
    assert "DOES NOT FIT in 1 B" in str(tfn.plan(tfn.grad(loss), (params, tokens), tiny))


def test_a_world_of_another_size_and_simulated_ranks_are_refused(world: int) -> None:
    x = torch.empty(4, device="meta")
    with pytest.raises(tfn.errors.DistributedError, match="asked for 8 ranks in a process group of 64"):
        tfn.plan(torch.sin, (x,), world=8)
    f = tfn.fsdp(lambda p, x: (p["w"] * x).sum(), tfn.parameters.simulated(4)[0])
    with pytest.raises(tfn.errors.DistributedError, match="ranks of this group are simulated"):
        tfn.plan(tfn.grad(f), (f.prepare({"w": x}), x))


def test_sizes_that_depend_on_data_are_refused() -> None:
    """They counted as two elements, which made each such step nearly free."""
    x = torch.empty(1000, device="meta")
    with pytest.raises(InspectError, match=r"the size of aten\.index\.Tensor depends on data"):
        tfn.plan(lambda x: x[x > 0] * 2, (x,), "h100")
    assert tfn.plan(lambda x: torch.where(x > 0, x, 0) * 2, (x,), "h100").memory.peak >= x.nbytes


def test_experts_without_room_to_spare_are_planned_with_rows_spread_evenly(world: int) -> None:
    """As many rows travel as there are: with room for all of an expert's, each slot would."""
    tokens, choices, width, experts = 48, 2, 32, 2 * world
    with torch.device("meta"):
        x, w = torch.empty(tokens, width), torch.empty(2, width, width)
        indices, weights = torch.empty(tokens, choices, dtype=torch.long), torch.empty(tokens, choices)
    mesh = init_device_mesh("cpu", (world,))
    moe = tfn.expert_parallel(lambda w, x: x @ w, mesh, experts, ragged=True)
    step = tfn.grad_and_value(lambda w, x, indices, weights: moe(w, x, indices, weights).sum(), argnums=(0, 1))
    found = tfn.plan(step, (w, x, indices, weights), "h100")
    sent = {one.num_bytes: times for one, times, _ in found.timeline.collectives if one.kind == "all-to-all"}
    rows = tokens * choices
    assert sent[rows * width * 4] >= 4  # to the experts and back, forwards and backwards
    assert set(sent) <= {rows * width * 4, experts * 8}
    products = 3 * 2 * 2 * (rows // 2) * width**2  # of slots and weights, and their two gradients
    assert products <= found.timeline.flops < 1.5 * products


def test_a_world_ends_with_its_block() -> None:
    for size in (2, 1024):
        with fake_world(size):
            assert torch.distributed.get_world_size() == size
        assert not torch.distributed.is_initialized()


def test_the_command_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from thunder_fn.__main__ import main

    file = tmp_path / "steps.py"
    file.write_text(
        "import torch, thunder_fn as tfn\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "def example():\n"
        "    f = tfn.fsdp(lambda p, x: (x @ p['w']).sum(), init_device_mesh('cpu', (1024,)))\n"
        "    w, x = torch.empty(2048, 8, device='meta'), torch.empty(4, 2048, device='meta')\n"
        "    return tfn.grad(f), (f.prepare({'w': w}), x)\n"
    )
    page = tmp_path / "plan.html"
    assert main(["plan", f"{file}:example", "--world", "1024", "--hardware", "b200", "--out", f"{page}"]) == 0
    printed = capsys.readouterr().out
    assert "on 1,024 ranks of B200 SXM" in printed and printed.endswith(f"{page}\n")
    shown = html.unescape(page.read_text().partition('<div id="app">')[0])
    assert all(line in shown for line in printed.splitlines()[:-1])
    assert main(["plan", f"{file}:example", "--out", f"{tmp_path / 'none' / 'plan.html'}", "--world", "1024"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert main(["plan", f"{file}:example", "--world", "1024", "--hardware", "abacus"]) == 2
    assert "there is no hardware 'abacus'" in capsys.readouterr().err


# ---- search ----


def test_search_orders_ways_by_time_among_those_that_fit() -> None:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, params["up"]).relu(), params["down"]).sum()

    params = {"up": torch.empty(256, 64, device="meta"), "down": torch.empty(64, 256, device="meta")}
    args, choices = (params, torch.empty(8, 64, device="meta")), {"micro": (1, 2, 3)}
    choices |= {"split": {"up": "column", "down": "row"}, "tensor": (1, 2, 3)}
    found = tfn.plan(loss, args, "h100", 16, search=choices)
    ways = [(way.data, way.tensor, way.micro) for way, _, _ in found.found]
    assert sorted(ways) == [(8, 2, 1), (8, 2, 2), (16, 1, 1), (16, 1, 2)]
    times = [seconds for _, one, seconds in found.found if one.fits]
    assert times == sorted(times) and len(times) == 4
    assert {str(way)[-7:] for way, _ in found.refused} == {"1 micro", "2 micro", "3 micro"}
    for word in (str(found.best), "takes", "5 ways are not possible"):
        assert word in str(found)
    tight = replace(hardware_named("h100"), memory_bytes=found.plan.peak_bytes - 1)
    again = tfn.plan(loss, args, tight, 16, search=choices)
    assert again.best != found.best or not again.plan.fits
    assert not torch.distributed.is_initialized()


def test_search_cuts_positions_and_stages_too() -> None:
    """Each way has the collectives of its cuts, and a pipeline's plan has all micro-batches."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        q = F.linear(x, params["a"]).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.linear(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2), params["o"]).square().sum()

    args = ({name: torch.empty(64, 64, device="meta") for name in "ao"}, torch.empty(2, 8, 64, device="meta"))
    choices: dict[str, Any] = {"split": {"a": "column", "o": "row"}, "tensor": (2,), "micro": (2,)}
    found = tfn.plan(loss, args, "h100", 8, search={**choices, "context": (2, 3), "stages": (1, 2)})
    ways = {way.stages: (way, one) for way, one, _ in found.found}
    assert [str(way) for way, _ in sorted(ways.values(), key=lambda found: found[0].stages)] == [
        "fsdp 2 x tp 2 x cp 2, keeps all, 2 micro",
        "fsdp 1 x tp 2 x cp 2 x pp 2, keeps all, 2 micro",
    ]
    for way, one in ways.values():
        programs = one.stages or (one,)
        seen = {each.kind for part in programs for each, _, _ in part.timeline.collectives}
        assert len(programs) == way.stages and ("send" in seen) == (way.stages > 1)
        assert {"all-to-all", "all-reduce", "all-gather", "reduce-scatter"} <= seen
    assert [way.context for way, _ in found.refused] == [3, 3]


def test_search_chooses_the_schedule_and_the_order_of_dims() -> None:
    """The order of the dims decides which of them cross nodes; an order that changes nothing is tried once."""
    loss = lambda params, x: (((x @ params["a"]).tanh() @ params["b"]).tanh() @ params["c"]).square().mean()
    args = ({name: torch.empty(64, 64, device="meta") for name in "abc"}, torch.empty(8, 64, device="meta"))
    orders = (("pipe", "shards", "tensor"), ("shards", "pipe", "tensor"), ("shards", "tensor", "pipe"))
    choices = {"stages": (1, 2), "schedule": ("1f1b", "zero_bubble"), "order": orders, "micro": (4,)}
    found = tfn.plan(loss, args, "h100", 16, search=choices)
    assert sorted((way.stages, way.schedule, way.order) for way, _, _ in found.found) == [
        (1, "1f1b", orders[0]),
        *((2, schedule, order) for schedule in choices["schedule"] for order in orders[:2]),
    ]
    nodes: Any = {}
    for way, one, _ in found.found:
        every = (each for part in (one.stages or (one,)) for each, _, _ in part.timeline.collectives)
        nodes[str(way)] = {each.kind: each.nodes for each in every}
    assert nodes["fsdp 8 x tp 1 x pp 2, keeps all, 4 micro"]["send"] == 2
    assert nodes["fsdp 8 x tp 1 x pp 2, keeps all, 4 micro, zero_bubble, mesh of shards, pipe, tensor"]["send"] == 1


def test_search_chooses_precision_offload_and_a_budget() -> None:
    """Half of the bytes travel in half precision; offloaded shards lie elsewhere and take time to come."""
    with torch.device("meta"):
        blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(3)]
        model, x = torch.nn.Sequential(*blocks), torch.zeros(4096, 512)
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda params, x: torch.func.functional_call(model, params, (x,)).square().mean()
    choices: dict[str, Any] = {"blocks": blocks, "micro": (1,), "precision": (None, torch.bfloat16)}
    choices |= {"offload": (False, True), "keeps": ("all", 0)}
    found = tfn.plan(loss, (params, x), "h100", 8, search=choices)
    plans = {(way.precision, way.offload, way.keeps): one for way, one, _ in found.found}
    assert len(plans) == 8 and found.best.precision == torch.bfloat16 and not found.best.offload
    whole, half = (plans[dtype, False, "all"] for dtype in (None, torch.bfloat16))
    assert half.timeline.wire_bytes == whole.timeline.wire_bytes / 2
    assert dict(half.timeline.flops_by_dtype)[torch.bfloat16] > 0.9 * whole.timeline.flops
    away = plans[None, True, "all"]
    shards = sum(p.nbytes for p in params.values()) // 8
    assert away.offloaded_bytes >= 2 * shards and away.held_bytes == whole.held_bytes - shards
    assert away.seconds > whole.seconds + shards / away.hardware.host_bytes_per_second
    assert plans[None, False, 0].live_bytes < whole.live_bytes
    assert plans[None, False, 0].timeline.flops > whole.timeline.flops


def test_a_plan_is_compiled_by_the_ranks_that_it_is_of(tmp_path: Path) -> None:
    """Ranks that are not there give no numbers: PyTorch before 2.13 scatters no values in its fake groups."""
    loss = lambda params, x: (x @ params["w"]).square().mean()
    params, x = {"w": torch.randn(4, 3)}, torch.randn(6, 4)
    found = tfn.plan(loss, (params, x), "h100", 1, search={"micro": (3,)})
    with fake_world(1), pytest.raises(tfn.errors.DistributedError, match="ranks of this group are not there"):
        step: Any = tfn.compile(loss, recipe=found.recipe, executors="torch")
        step(step.prepare(params, x), *step.part(x))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    step = tfn.compile(loss, recipe=found.recipe, executors="torch")
    value, grads = step(step.prepare(params, x), *step.part(x))
    dist.destroy_process_group()
    expected, its = tfn.grad_and_value(loss)(params, x)
    torch.testing.assert_close((value, grads["w"]), (its, expected["w"]))
    with pytest.raises(tfn.errors.RecipeError, match=r"the plan is of 1 ranks .*, and there is no process group"):
        tfn.compile(loss, recipe=found.recipe)
    with fake_world(2), pytest.raises(tfn.errors.RecipeError, match="and there is 2 ranks"):
        tfn.compile(loss, recipe=found.recipe)
    with fake_world(1), pytest.raises(tfn.errors.RecipeError, match="given the module a Linear"):
        tfn.compile(torch.nn.Linear(2, 2), recipe=found.recipe)


def test_blocks_are_checkpointed_while_ways_are_planned() -> None:
    with torch.device("meta"):
        blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
        model, x = torch.nn.Sequential(*blocks), torch.zeros(4, 8)
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss = lambda params, x: torch.func.functional_call(model, params, (x,)).square().sum()
    choices = {"blocks": blocks, "micro": (1,), "keeps": ("all", "none")}
    found = tfn.plan(loss, (params, x), "h100", 2, search=choices)
    flops = {way.keeps: one.timeline.flops for way, one, _ in found.found}
    assert flops["none"] > flops["all"]
    assert not any("forward" in vars(block) for block in blocks)


def test_casts_that_meta_tensors_do_not_see_are_refused() -> None:
    """A step under `torch.autocast` was planned in full precision."""
    layer = torch.nn.Linear(4, 4, device="meta")
    x = torch.empty(2, 4, device="meta")

    def step(x: torch.Tensor, device: str, enabled: bool) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            return layer(x)

    for device in ("cpu", "cuda"):
        with pytest.raises(
            tfn.errors.InspectError, match=r"casts nothing on meta tensors(.|\n)*test_planning(.|\n)*tfn.autocast"
        ):
            tfn.plan(step, (x, device, True), "h100")
        assert tfn.plan(step, (x, device, False), "h100").seconds > 0
