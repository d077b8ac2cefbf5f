"""fsdp on two gloo ranks beside PyTorch's FSDP2, and what a step would take on many GPUs
(`--plan`).

Both train one GPT in the same two processes, in interleaved rounds. The plan traces the train step
of a larger model for N ranks, without memory for it. It runs the trace's equations through two
queues, one that computes and one that communicates.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Memory, Result, machine, single
from thunder_fn.benchmarks.models import GPT
from thunder_fn.distributed.ranks import GATHER, SCATTER, WAIT
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.trace import Equation, TensorType, Trace, static_shape
from thunder_fn.parameters import simulated

RANKS = 2
FSDP2 = "torch fully_shard"
PLAIN = "thunder_fn, prefetch=None"


def run(quick: bool = False) -> Iterator[Result | Memory]:
    """Bytes and step time on two ranks, ours and FSDP2 side by side."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, quick, folder) for rank in range(RANKS)]
        outputs = [rank.communicate(timeout=600) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(error[-2000:] for _, error in outputs))
    found = json.loads(outputs[0][0].splitlines()[-1])
    name = (
        f"distributed: GPT of {found['layers']} layers, width {found['width']}, AdamW, {RANKS} gloo"
        " ranks"
    )
    note = f"losses after {found['steps']} steps differ by {found['off']:.1e}"
    yield single(f"{name}: step", found["seconds"], target="no slower than FSDP2", notes=(note,))
    share, bucket = found["total"] / RANKS, found["bucket"]
    target = f"within 5% of total / N plus the largest bucket: {1.05 * share + bucket:,.0f} bytes"
    seconds = dict.fromkeys(found["bytes"], 0.0)
    note = (
        f"parameters that a rank stores, of {found['total']:,} bytes in all; a step holds whole"
        f" buckets besides, of at most {bucket:,} bytes each: one with prefetch=None, two with"
        " prefetch=1"
    )
    yield Memory(f"{name}: parameters", found["bytes"], seconds, target, machine(), (note,))


def _start(rank: int, quick: bool, folder: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "thunder_fn.benchmarks.distributed",
        folder,
        str(int(quick)),
    ]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# ---- one rank ----


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure on one rank."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    timeout, store = datetime.timedelta(seconds=120), f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timeout)
    mesh = init_device_mesh("cpu", (RANKS,))
    layers, width, context = (2, 32, 16) if quick else (4, 256, 128)
    make = lambda: (torch.manual_seed(0), GPT(layers, width, context=context))[1]
    tokens = torch.randint(0, 96, (4, context), generator=torch.Generator().manual_seed(rank))
    ahead, plain = tfn.fsdp(tfn.jit(make()), mesh), tfn.fsdp(tfn.jit(make()), mesh, prefetch=None)
    models = {
        OURS: ahead,
        PLAIN: plain,
        FSDP2: _fully_shard(make(), mesh),
    }  # it prefetches one block, too
    steps = {name: _step(model, tokens) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    rounds = 4 if quick else 12
    for index in range(rounds):
        for name in list(steps)[:: 1 if index % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            losses[name] = steps[name]()
            times[name].append(time.perf_counter() - start)
    total = sum(p.numel() * p.element_size() for p in make().parameters())
    block = sum(p.numel() * p.element_size() for p in make().blocks[0].parameters())
    found = {
        "layers": layers,
        "width": width,
        "steps": rounds,
        "total": total,
        "bucket": block,
        "seconds": {name: statistics.median(values[2:]) for name, values in times.items()},
        "bytes": {name: _local_bytes(model) for name, model in models.items()},
        "off": abs(losses[OURS] - losses[FSDP2]),
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def _fully_shard(model: GPT, mesh: DeviceMesh) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: Any, tokens: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _local_bytes(model: Any) -> int:
    local = lambda p: p.to_local() if hasattr(p, "to_local") else p
    return sum(local(p).numel() * p.element_size() for p in model.parameters())


# ---- the plan ----


@dataclass(frozen=True)
class Hardware:
    """Rates that programs reach on a GPU and on the links between GPUs."""

    flops: float = 989e12 * 0.45
    inside: float = 370e9  # bytes a second between the GPUs of a node
    across: float = 45e9  # and of each GPU to other nodes
    node: int = 8
    latency: float = 5e-6  # of a hop

    def rate(self, ranks: int) -> float:
        """Bytes a second that a GPU sends. Across nodes there are as many rings as a node has
        GPUs, each of which leaves the node by another link. All links of a node carry what one
        GPU sends inside.
        """
        return self.inside if ranks <= self.node else min(self.inside, self.node * self.across)

    def hops(self, ranks: int) -> int:
        """Through a node, and through nodes."""
        return ranks - 1 if ranks <= self.node else self.node + ranks // self.node - 2


@dataclass(frozen=True)
class Plan:
    """A train step on many GPUs: its seconds, by cause."""

    ranks: int
    seconds: float
    computing: float
    communicating: float
    wire_bytes: float
    flops: float
    parameter_bytes: int


H100 = Hardware()
CONTEXT = 2048


def plan(
    sizes: tuple[int, ...] = (8, 64, 1024),
    hardware: Hardware = H100,
    layers: int = 32,
    width: int = 4096,
) -> Iterator[str]:
    """The step time of a GPT on so many GPUs, one line each, extrapolated from its trace."""
    yield (
        f"plan: GPT of {layers} layers, width {width}, context {CONTEXT}, one sequence a GPU, fsdp"
        " by blocks, in bf16, on H100s"
    )
    yield (
        f"  a model, no measurement: {hardware.flops / 1e12:.0f} TFLOP/s,"
        f" {hardware.inside / 1e9:.0f} GB/s in a node of {hardware.node},"
        f" {hardware.across / 1e9:.0f} GB/s from each GPU across; prefetch=1, in the order of the"
        " trace, no optimizer"
    )
    columns = (
        "GPUs",
        "step ms",
        "computing",
        "wire",
        "hidden",
        "to balance",
        "GB sent",
        "TFLOP",
        "GB held",
    )
    yield "  " + " ".join(f"{column:>11}" for column in columns)
    for ranks in sizes:
        found = extrapolated(step_trace(ranks, layers, width, CONTEXT), ranks, hardware)
        hidden = 1 - (found.seconds - found.computing) / found.communicating
        milliseconds = [
            1e3 * part for part in (found.seconds, found.computing, found.communicating)
        ]
        amounts = (found.wire_bytes / 1e9, found.flops / 1e12, found.parameter_bytes / 1e9)
        balanced = CONTEXT * found.communicating / found.computing
        words = [*(f"{part:.1f}" for part in milliseconds), f"{hidden:.0%}", f"{balanced:,.0f}"]
        yield "  " + " ".join(
            f"{word:>11}" for word in (str(ranks), *words, *(f"{size:.2f}" for size in amounts))
        )


def step_trace(
    ranks: int, layers: int, width: int, context: int, prefetch: int | None = 1
) -> Trace:
    """Loss and gradients on one of so many ranks, traced on the meta device. The next block is
    gathered while one computes.
    """
    with torch.device("meta"):
        model = GPT(layers, width, width // 128 or 1, 32000, context).bfloat16()
        tokens = torch.zeros(1, context, dtype=torch.long)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    f = tfn.fsdp(loss, simulated(ranks)[0], prefetch=prefetch)
    return tfn.trace(tfn.grad(f), f.prepare(params), tokens)


class _Queues:
    """Two queues, one that computes and one that communicates: the seconds at which each has
    done its work.
    """

    def __init__(self, ranks: int, hardware: Hardware) -> None:
        self.ranks, self.hardware = ranks, hardware
        self.computed = self.sent = self.busy = self.wire = self.flops = 0.0

    def run(self, trace: Trace) -> None:
        """Run the equations of a trace, those of its composites too, in order. A collective is sent
        where it stands, and computing goes on until something waits for it.
        """
        arrives: dict[int, float] = {}
        for equation in trace.equations:
            body = lowered(equation)
            if body is not None:
                self.run(body)
            elif equation.op.name in (GATHER, SCATTER):
                moved = _ring_bytes(equation, self.ranks)
                took = (
                    moved / self.hardware.rate(self.ranks)
                    + self.hardware.hops(self.ranks) * self.hardware.latency
                )
                self.sent = arrives[equation.outputs[0].index] = (
                    max(self.sent, self.computed) + took
                )
                self.busy, self.wire = self.busy + took, self.wire + moved
            elif equation.op.name == WAIT:
                self.computed = max(self.computed, arrives.get(equation.operands[0].index, 0.0))
            else:
                work = products(equation)
                self.computed, self.flops = (
                    self.computed + work / self.hardware.flops,
                    self.flops + work,
                )


def extrapolated(trace: Trace, ranks: int, hardware: Hardware) -> Plan:
    """A train step, its equations run through two queues in the trace's order: overlap is what
    its schedule allows.
    """
    queues = _Queues(ranks, hardware)
    queues.run(trace)
    held = sum(_bytes(var.type) for var in trace.inputs)
    seconds, computing = max(queues.computed, queues.sent), queues.flops / hardware.flops
    return Plan(ranks, seconds, computing, queues.busy, queues.wire, queues.flops, held)


def products(equation: Equation) -> float:
    """The floating-point operations of a matrix product; nothing for other ops, which memory
    limits.
    """
    shapes = [
        static_shape(var.type) for var in equation.operands if isinstance(var.type, TensorType)
    ]
    match equation.op.name:
        case "aten.mm.default" | "aten.bmm.default":
            first, second = shapes
        case "aten.addmm.default":
            _, first, second = shapes
        case _:
            return 0.0
    return 2.0 * torch.Size(first).numel() * second[-1]


def _ring_bytes(equation: Equation, ranks: int) -> float:
    """The bytes that each rank sends in a ring: all shards but one."""
    whole = equation.outputs[0].type if equation.op.name == GATHER else equation.operands[0].type
    return _bytes(whole) * (ranks - 1) / ranks


def _bytes(type: Any) -> int:
    return (
        torch.Size(static_shape(type)).numel() * type.dtype.itemsize
        if isinstance(type, TensorType)
        else 0
    )


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2] == "1")))
