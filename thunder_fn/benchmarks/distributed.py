"""fsdp on two gloo ranks beside PyTorch's FSDP2: both train one GPT in the same two processes, in
interleaved rounds.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Memory, Result, machine, single
from thunder_fn.benchmarks.models import GPT
from thunder_fn.planning.measure import on_ranks

RANKS = 2
FSDP2 = "torch fully_shard"
PLAIN = "thunder_fn, prefetch=None"


def run(quick: bool = False) -> Iterator[Result | Memory]:
    """Bytes and step time on two ranks, ours and FSDP2 side by side."""
    found = on_ranks(RANKS, "thunder_fn.benchmarks.distributed", str(int(quick)))
    if found is None:
        raise RuntimeError("a rank failed; its error is above")
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
    # it prefetches one block, too
    models = {OURS: ahead, PLAIN: plain, FSDP2: _fully_shard(make(), mesh)}
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


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2] == "1")))
