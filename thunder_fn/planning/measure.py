"""`python -m thunder_fn measure-hardware`: the rates of this machine, as a hardware file.

Matrix products and copies are measured alone, so nothing of a rate is lost to `efficiency`. With
`--gloo N`, so many processes on this machine measure their links.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from thunder_fn.distributed.collectives import all_gathered
from thunder_fn.distributed.groups import group_of
from thunder_fn.errors import DistributedError
from thunder_fn.inspect.machines import fastest, measured_machine
from thunder_fn.planning.rates import Hardware, Link, toml_of
from thunder_fn.progress import tracked

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
NO_LINK = Link(1e9, 0.0)
LARGE = 1 << 22
"""Elements of a large message, of float32."""


def main(argv: Sequence[str]) -> int:
    """Parse the command line, measure, and write the file. The exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn measure-hardware", description=__doc__
    )
    parser.add_argument("--out", type=Path, metavar="TOML", help="printed if left out")
    parser.add_argument("--device", default="cpu", help="cpu by default")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    parser.add_argument("--gloo", type=int, default=0, metavar="N", help="measure links of N ranks")
    options = parser.parse_args(argv)
    found = measured_hardware(options.seconds, options.device)
    if options.gloo > 1:
        found = with_links(found, options.gloo)
    text = toml_of(found)
    if options.out is None:
        print(text, end="")
        return 0
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"thunder_fn measure-hardware: {options.out}: {error.strerror}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


def measured_hardware(seconds: float = 0.2, device: str = "cpu") -> Hardware:
    """Measure this machine: matrix products by dtype, memory, attention, and one small op.

    Args:
        seconds: for each figure.
    """
    machines = {
        dtype: measured_machine(dtype, device, seconds)
        for dtype in tracked(DTYPES, "measuring matrix products")
    }
    rates = {
        str(dtype).removeprefix("torch."): machine.flops_per_second
        for dtype, machine in machines.items()
    }
    first = machines[torch.float32]
    return Hardware(
        name=first.name,
        source=f"measured on {datetime.date.today().isoformat()}",
        flops_per_second=rates,
        memory_bytes=float(_memory_bytes(device)),
        memory_bytes_per_second=first.bytes_per_second,
        op_seconds=_op_seconds(device, seconds),
        node_size=os.cpu_count() or 1,
        inside=NO_LINK,
        across=NO_LINK,
        view_seconds=_view_seconds(device, seconds),
        matmul_efficiency=min(1.0, _product_rate(device, seconds) / first.flops_per_second),
        elements_per_second=_elements_per_second(device, seconds),
        attention_efficiency=min(1.0, _attention_rate(device, seconds) / first.flops_per_second),
    )


def _memory_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _op_seconds(device: str, seconds: float) -> float:
    """The time of an op on one number."""
    x = torch.ones((), device=device)
    return fastest(lambda: torch.ops.aten.add.Tensor(x, x), seconds, device, calls=100)


def _view_seconds(device: str, seconds: float) -> float:
    """The time of an op that computes nothing."""
    x = torch.ones(4, 4, device=device)
    return fastest(lambda: torch.ops.aten.t.default(x), seconds, device, calls=100)


def _product_rate(device: str, seconds: float) -> float:
    """Operations a second of a linear layer: forward, and backward for inputs and for weights."""
    rows, wide, narrow = (1024, 1024, 256) if device == "cpu" else (8192, 16384, 4096)
    x, y = torch.randn(rows, narrow, device=device), torch.randn(rows, wide, device=device)
    w = torch.randn(wide, narrow, device=device)
    products = (lambda: x @ w.t(), lambda: y @ w, lambda: y.t() @ x)
    took = sum(fastest(product, seconds, device) for product in products)
    return len(products) * 2 * rows * wide * narrow / took


def _elements_per_second(device: str, seconds: float) -> float:
    """The rate of gelu on numbers that lie in a cache."""
    x = torch.randn(1 << 14, device=device)
    return x.numel() / fastest(lambda: F.gelu(x), seconds, device, calls=10)


def _attention_rate(device: str, seconds: float) -> float:
    """Operations a second of fused attention, by PyTorch's formula, which has no causal half."""
    q = torch.randn(1, 4, 256, 64, device=device)
    took = fastest(lambda: F.scaled_dot_product_attention(q, q, q), seconds, device)
    return 4 * q.shape[1] * q.shape[2] ** 2 * q.shape[3] / took


# ---- links ----


def with_links(hardware: Hardware, ranks: int) -> Hardware:
    """Measure gloo between this number of processes of this machine.

    Two sizes of an all-gather give a line: its slope is the rate, its start the latency of the
    steps.
    """
    found = on_ranks(ranks, "thunder_fn.planning.measure")
    if found is None:
        raise DistributedError(f"measure-hardware: a rank of {ranks} failed; see its error above")
    link = Link(found["bytes_per_second"], found["seconds"] / (ranks - 1))
    return replace(hardware, inside=link, node_size=max(hardware.node_size, ranks))


def on_ranks(ranks: int, module: str, *arguments: str) -> Any:
    """Run a module as one process for each rank, on a folder for their store and the arguments.

    Returns:
        The JSON in the last line that the first rank prints; None if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", module, folder, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        started = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        return None
    return json.loads(outputs[0].splitlines()[-1])


def gloo_rank(folder: Path) -> dict[str, float]:
    """Measure as one rank: the seconds of a small all-gather, and bytes a second of a large one."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size
    )
    group = group_of(init_device_mesh("cpu", (size,)))
    seconds: dict[int, float] = {}
    for elements in (1, LARGE):
        own, times = torch.ones(elements), list[float]()
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            all_gathered(own, group)
            times.append(time.perf_counter() - start)
        seconds[elements] = statistics.median(times[2:])
    dist.destroy_process_group()
    sent = 4 * LARGE * (size - 1)
    return {"seconds": seconds[1], "bytes_per_second": sent / (seconds[LARGE] - seconds[1])}


if __name__ == "__main__":
    print(json.dumps(gloo_rank(Path(sys.argv[1]))))
