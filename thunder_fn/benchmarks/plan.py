"""Predictions beside measurements: steps of GPTs on this CPU, fsdp on two gloo ranks, and published
runs of Llama 3.1.

The hardware file of this machine is measured first. Times of the CPU are those of its one thread,
so other processes count less. Each result notes its error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import Memory, Result, machine, single
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.inspect.machines import fastest
from thunder_fn.planning import Hardware, Plan, fake_world, hardware_named, plan, plan_layers
from thunder_fn.planning.cuts import prepared
from thunder_fn.planning.measure import measured_hardware, on_ranks, with_links

PREDICTED, MEASURED = "predicted", "measured"
RANKS = 2
SIZES = ((2, 64, 32, 4), (4, 256, 128, 8), (4, 384, 256, 4))
"""Layers, width, context and batch."""


def run(quick: bool = False) -> Iterator[Result | Memory]:
    """Predict and measure; with `quick`, the smallest model alone and no published run."""
    torch.set_num_threads(1)
    hardware = measured_hardware(0.02 if quick else 0.5)
    for sizes in SIZES[: 1 if quick else None]:
        yield from on_this_cpu(hardware, sizes)
    yield from on_two_ranks(with_links(hardware, RANKS), SIZES[0 if quick else 1])
    for published in () if quick else PUBLISHED:
        yield beside(published)
    for paper in () if quick else PAPER:
        yield beside_paper(paper)


def compared(name: str, predicted: float, measured: float, target: str, *notes: str) -> Result:
    """A time beside its prediction."""
    error = f"predicted is {predicted / measured - 1:+.0%} off"
    return single(name, {PREDICTED: predicted, MEASURED: measured}, target, (error, *notes))


# ---- this CPU ----


def on_this_cpu(hardware: Hardware, sizes: tuple[int, int, int, int]) -> Iterator[Result | Memory]:
    """The step of a GPT: loss and gradients."""
    layers, width, length, batch = sizes
    model = GPT(layers, width, context=length)
    tokens, targets = torch.randint(0, 96, (2, batch, length))
    step, args = tfn.jit(tfn.grad(gpt_loss(model))), (params_of(model), tokens, targets)
    found = plan(step, args, hardware)
    measured = fastest(lambda: step(*args), 2.0, "cpu")
    name = f"plan: GPT {layers} layers, width {width}, context {length}, batch {batch}, on this CPU"
    yield compared(f"{name}: time", found.seconds, measured, "within 20%")
    peak = measured_peak(lambda: step(*args))
    note = f"predicted is {found.live_bytes / peak - 1:+.1%} off"
    peaks, none = {PREDICTED: found.live_bytes, MEASURED: peak}, {PREDICTED: 0.0, MEASURED: 0.0}
    yield Memory(f"{name}: peak", peaks, none, "within 5%", machine(), (note,))


def measured_peak(call: Callable[[], object]) -> int:
    """The most bytes that live at a time of those that a call allocates, by PyTorch's profiler."""
    call()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        call()
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((one for one in events if one.name() == "[memory]"), key=_start)
    live = peak = 0
    for event in memory:
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _start(event: Any) -> int:
    return event.start_ns()


# ---- two ranks ----


def on_two_ranks(hardware: Hardware, sizes: tuple[int, int, int, int]) -> Iterator[Result]:
    """The step of a GPT whose parameters are sharded over two processes of this machine."""
    with fake_world(RANKS):
        step, args = sharded_step(sizes, "meta")
        found = plan(step, args, hardware)
    measured = on_ranks(RANKS, __name__, json.dumps(sizes))
    if measured is None:
        raise RuntimeError("a rank failed; its error is above")
    name = f"plan: GPT {sizes[0]} layers, width {sizes[1]}, fsdp on {RANKS} gloo ranks: time"
    note = "gloo's threads compute on the cores that the ranks compute on"
    yield compared(name, found.seconds, measured, "within 20%", note)


def sharded_step(sizes: tuple[int, int, int, int], device: str) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients of this rank, and the arguments."""
    layers, width, length, batch = sizes
    torch.manual_seed(0)  # ranks prepare the same parameters
    with torch.device(device):
        model = GPT(layers, width, context=length)
        tokens = torch.zeros(batch, length, dtype=torch.long)
    f = tfn.fsdp(gpt_loss(model), init_device_mesh("cpu", (RANKS,)))
    return tfn.jit(tfn.grad(f)), (f.prepare(params_of(model)), tokens, tokens)


def measure_rank(folder: Path, sizes: tuple[int, int, int, int]) -> float:
    """The least seconds of a step, on one of the ranks."""
    torch.set_num_threads(1)
    store, rank = f"file://{folder / 'store'}", int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    step, args = sharded_step(sizes, "cpu")
    times: list[float] = []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        step(*args)
        times.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return min(times)


# ---- published runs ----


@dataclass(frozen=True)
class Published:
    """A run that others measured.

    Attributes:
        tokens_per_second: of each GPU.
        batch: sequences of a group of `tensor` GPUs, of 8192 tokens.
        policy: the values that checkpointed layers keep: "none", "matmuls", or "all" without
            checkpoint.
    """

    model: str
    data: int
    tensor: int
    batch: int
    policy: str
    fused: bool
    tokens_per_second: float
    source: str


TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
ASYNC = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, vanilla TP"
OLDER = "torchtitan, docs/performance.md of 2024"
PUBLISHED = (
    Published("8B", 8, 1, 2, "matmuls", False, 5762, TITAN),
    Published("8B", 8, 1, 2, "matmuls", True, 6667, TITAN),
    Published("8B", 128, 1, 2, "matmuls", False, 5605, TITAN),
    Published("8B", 128, 1, 2, "matmuls", True, 6514, TITAN),
    Published("8B", 8, 8, 12, "matmuls", True, 4378, ASYNC),
    Published("70B", 32, 8, 16, "none", True, 597.3, ASYNC),
    Published("405B", 16, 8, 2, "none", True, 109, OLDER),
)
"""Llama 3.1 in bfloat16, without runs in float8."""


@dataclass(frozen=True)
class Pipelines:
    """A run of Llama 3.1 405B with stages, as the paper of Llama 3 has it in table 4.

    Attributes:
        data, context, tensor, stages: the ranks of the mesh's dims.
        batch: sequences of a group of ranks with one batch, one in each micro-batch.
        flops_per_second: of each GPU, without recomputation.
        keeps: the values that checkpointed layers keep; "all" without checkpoint.
    """

    data: int
    context: int
    tensor: int
    stages: int
    batch: int
    length: int
    flops_per_second: float
    keeps: str = "all"

    @property
    def world(self) -> int:
        """The ranks of all dims."""
        return self.data * self.context * self.tensor * self.stages


PAPER = (
    Pipelines(64, 1, 8, 16, 32, 8192, 430e12),
    Pipelines(128, 1, 8, 16, 16, 8192, 400e12),
)
"""The runs on sequences of 8,192 tokens, on 8,192 and 16,384 GPUs."""

LLAMAS = {
    "8B": (4096, 14336, 32, 32),
    "70B": (8192, 28672, 80, 64),
    "405B": (16384, 53248, 126, 128),
}
"""Width, width of the MLP, layers and heads."""

SPLIT = {
    **dict.fromkeys(("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"), "column"),
    **dict.fromkeys(("*.gate_proj.weight", "*.up_proj.weight"), "column"),
    **dict.fromkeys(("*.o_proj.weight", "*.down_proj.weight"), "row"),
    "lm_head.weight": "column",
    "*embed_tokens.weight": "embedding",
    "*norm.weight": "sequence",
}
"""torchtitan's plan, but for losses, which it splits too."""
LENGTH, WORDS = 8192, 128256


def beside(one: Published) -> Result:
    """The seconds of a published run's step, and of its plan."""
    found = planned(one)
    measured = one.batch * LENGTH / one.tensor / one.tokens_per_second
    mesh = f"FSDP {one.data}, TP {one.tensor}" + (", compiled" if one.fused else "")
    name = f"plan: Llama 3.1 {one.model}, {mesh}, batch {one.batch}, on H100s: step"
    limits = "no optimizer; GPUs of 500 W in the run, of 700 W in the file"
    return compared(name, found.seconds, measured, "within 25%", one.source, limits)


def planned(one: Published, hardware: Hardware | None = None) -> Plan:
    """Plan a published run, on H100s with the memory of the run's machines."""
    known = hardware or replace(
        hardware_named("h100"), memory_bytes=96e9, memory_bytes_per_second=2.4e12
    )
    with fake_world(one.data * one.tensor):
        return plan_layers(
            lambda layers: llama(one, layers), LLAMAS[one.model][2], known, fused=one.fused
        )


def llama(one: Published, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """Loss and gradients of a Llama of transformers with so many layers, and the arguments."""
    with torch.device("meta"):
        model = llama_of(one.model, layers)
        tokens = torch.zeros(one.batch, LENGTH, dtype=torch.long)
    _checkpoint(model.model.layers, one.policy)
    mesh = init_device_mesh("cpu", (one.data, one.tensor), mesh_dim_names=("data", "tensor"))

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,)).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    f: Any = loss if one.tensor == 1 else tfn.tensor_parallel(loss, mesh["tensor"], SPLIT)
    f = tfn.fsdp(f, mesh["data"])
    held = f.prepare({name: p.detach() for name, p in model.named_parameters()})
    chosen, others = held.partition(lambda name: held[name].is_floating_point())
    step = tfn.grad(lambda chosen, others, tokens: f(held.replaced(chosen, others), tokens))
    return step, (chosen, others, tokens)


def llama_of(name: str, layers: int, attention: str | None = None) -> Any:
    """A Llama of transformers with so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, inner, _, heads = LLAMAS[name]
    attentions: Any = {"attn_implementation": attention}
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=WORDS,
        max_position_embeddings=LENGTH,
        use_cache=False,
        **attentions,
    )
    return LlamaForCausalLM(config).bfloat16()


# ---- stages ----


def beside_paper(one: Pipelines) -> Result:
    """The seconds of a published step with stages, and of its plan."""
    with fake_world(one.world):
        found = plan(*in_stages(one, LLAMAS["405B"][2]), "h100", fused=True)
    measured = model_flops(one) / one.world / one.flops_per_second
    mesh = f"FSDP {one.data}, CP {one.context}, TP {one.tensor}, PP {one.stages}"
    name = f"plan: Llama 3.1 405B, {mesh}, on H100s: step"
    source = "The Llama 3 Herd of Models (arXiv:2407.21783), table 4"
    rate = f"predicted are {model_flops(one) / one.world / found.seconds / 1e12:.0f} TFLOP/s"
    return compared(name, found.seconds, measured, "within 25%", source, rate, "no optimizer")


def model_flops(one: Pipelines) -> float:
    """The operations of a step that count, by PaLM's formula (arXiv:2204.02311, appendix B)."""
    width, inner, layers, heads = LLAMAS["405B"]
    keys = 8 * width // heads
    of_layer = 2 * width * width + 2 * width * keys + 3 * width * inner
    params = layers * of_layer + WORDS * width
    of_token = 6 * params + 12 * layers * width * one.length
    return of_token * one.length * one.batch * one.data


def in_stages(one: Pipelines, layers: int) -> tuple[Any, tuple[Any, ...]]:
    """The step of a Llama 3.1 405B with so many layers, cut in all ways, and the arguments."""
    from transformers import AttentionInterface

    AttentionInterface.register("causal", _causal)  # all ranks' positions need no mask
    with torch.device("meta"):
        model = llama_of("405B", layers, "causal")
        tokens = torch.zeros(one.batch, one.length // one.context, dtype=torch.long)
    _checkpoint(model.model.layers, one.keeps)
    dims = {"pipe": one.stages, "data": one.data, "context": one.context, "tensor": one.tensor}
    mesh = init_device_mesh("cpu", (*dims.values(),), mesh_dim_names=(*dims,))
    sizes = (one.stages, one.data * one.context, one.tensor)
    rows = init_device_mesh("cpu", sizes, mesh_dim_names=("pipe", "shards", "tensor"))

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,)).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    split = tfn.tensor_parallel(loss, mesh["tensor"], SPLIT)
    params: Any = {name: p.detach() for name, p in model.named_parameters()}
    f: Any = split
    if one.context > 1:
        f = tfn.context_parallel(split, mesh["context"], "all_to_all")
        params = prepared(split, params)
    f = tfn.fsdp(f, rows["shards"], zero=2)
    interleaved: dict[str, Any] = {"stages": 2 * one.stages, "schedule": "interleaved"}
    step = tfn.pipeline(f, mesh["pipe"], micro=one.batch, **interleaved)
    return step, (prepared(f, params), tokens)


def _causal(module: Any, query: Any, key: Any, value: Any, _: Any, **options: Any) -> Any:
    """Attention as transformers calls it, with a key for each query's head."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scale = options.get("scaling")
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    return found.transpose(1, 2).contiguous(), None


def llama_405b() -> tuple[Any, tuple[Any, ...]]:
    """A step of Llama 3.1 405B in four dims, for `python -m thunder_fn plan`; its world is a
    multiple of 256.
    """
    data = dist.get_world_size() // 256
    one = Pipelines(data, 2, 8, 16, 32, LENGTH, 0.0, "none")
    return in_stages(one, LLAMAS["405B"][2])


def _checkpoint(layers: Any, policy: str) -> None:
    policies: Any = {"none": None, "matmuls": tfn.checkpoint_policies.matmuls_saveable}
    for layer in layers if policy in policies else ():
        layer.forward = tfn.checkpoint(layer.forward, policies[policy])


if __name__ == "__main__":
    print(json.dumps(measure_rank(Path(sys.argv[1]), tuple(json.loads(sys.argv[2])))))
