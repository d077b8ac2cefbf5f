"""A rank on a GPU of its own: `python -m tests.gpu.ranks RANK SIZE PORT` trains a module in several ways.

It prints as JSON, for each way, the largest difference of the results from those of one process; then an error.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thunder_fn as tfn
from thunder_fn.errors import DistributedError

STEPS, BATCH = 2, 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))


def trained(module: Callable[[Tensor], Tensor], parameters: Any, x: Tensor) -> Tensor:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(STEPS):
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module(x).detach().cpu()


WAYS: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "ddp": tfn.ddp,
    "fsdp": tfn.fsdp,
    "zero=2": lambda module, mesh: tfn.fsdp(module, mesh, zero=2),
    "offload": lambda module, mesh: tfn.fsdp(module, mesh, offload=True),
    "tensor_parallel": lambda module, mesh: tfn.tensor_parallel(module, mesh, {"0.*": "column", "3.weight": "row"}),
}


def found(way: str, mesh: DeviceMesh, rank: int, x: Tensor) -> float:
    """The largest difference of this rank's results from those of one process."""
    one = model()
    wanted = trained(one, one.parameters(), x)
    own = slice(None) if way == "tensor_parallel" else slice(rank * BATCH, (rank + 1) * BATCH)
    module = WAYS[way](tfn.jit(model().cuda()), mesh)
    mine = trained(module, module.parameters(), x[own].cuda())
    return float((mine - wanted[own]).abs().max())


def refused(mesh: DeviceMesh, rank: int) -> str:
    """The error of a rank that would draw other adapters than the rank before it."""
    module = tfn.ddp(model().cuda(), mesh)
    torch.cuda.manual_seed(rank)
    try:
        tfn.lora(module, rank=2)
    except DistributedError as error:
        return str(error)
    return ""


def main(rank: int, size: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(size))
    torch.cuda.set_device(rank)
    # The simulated GPU has no values of NCCL's collectives.
    backend = "cpu:gloo,cuda:gloo" if "nullcuda" in os.environ.get("LD_PRELOAD", "") else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=1200))
    mesh = init_device_mesh("cuda", (size,))
    x = torch.randn(size * BATCH, 8, generator=torch.Generator().manual_seed(1))
    print(json.dumps([{way: found(way, mesh, rank, x) for way in WAYS}, refused(mesh, rank)]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
