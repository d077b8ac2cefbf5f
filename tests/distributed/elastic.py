"""A run that loses ranks. `python -m tests.distributed.elastic FOLDER RUNS` starts it again each time with another
number of ranks, in forks, and gives what these said.

A moment is [place, rank, step]: where which rank is killed, after it has begun the step.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thunder_fn as tfn
from tests import forks
from thunder_fn.parameters import Checkpoints

STEPS, EVERY, EXAMPLES = 6, 2, 4
PLACES = ("forward", "backward", "update", "write", "metadata", "rename", "between")
SIZES = (2, 1)
"""The numbers of ranks, in turn: after each kill the next one."""


def die() -> NoReturn:
    """End this process at once, as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


dying = {"at": ""}
"""The place where this process is to die. All ranks compile the same program, which looks here."""


def die_at(place: str) -> None:
    """End this process if this is the place."""
    if dying["at"] == place:
        die()


class Net(nn.Module):
    """A net that may be killed between its layers, forwards or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.up(x))
        tfn.debug.callback(lambda _: die_at("forward"), x)
        return self.down(may_die(x))


@tfn.custom_vjp
def may_die(x: torch.Tensor) -> torch.Tensor:
    """The same; backwards the process may die."""
    return x * 1


def _forward(x: torch.Tensor) -> Any:
    return x * 1, None


def _backward(_: Any, gradient: torch.Tensor) -> Any:
    tfn.debug.callback(lambda _: die_at("backward"), gradient)
    return (gradient,)


may_die.defvjp(_forward, _backward)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, the same for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, 6, dtype=torch.float64, generator=generator)
    return x, x[:, :3].argmax(1)


def train(mesh: Any, rank: int, size: int, folder: Path, moment: tuple[str, int, int] | None) -> None:
    """Go on from the last checkpoint to the end, or to the moment. Rank 0 notes the loss of each step."""
    torch.manual_seed(0)
    model: Any = tfn.fsdp(tfn.jit(Net().double()), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    saved = Checkpoints(folder / "saved")
    state = {"model": model.sharded_state_dict(), "optimizer": model.sharded_optimizer_state_dict(optimizer)}
    begin = saved.load(state)
    if begin:
        model.load_optimizer_state_dict(optimizer, state["optimizer"])
    for step in range(begin, STEPS):
        if moment is not None and moment[1:] == (rank, step):
            dying["at"] = moment[0]  # for a save that goes on beside the next step, too
        x, y = (part.chunk(size)[rank] for part in data(step))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        die_at("update")
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{step} {mean.item()!r} {size}\n")
        die_at("between")
        if step % EVERY == EVERY - 1:
            state = {"model": model.sharded_state_dict(), "optimizer": model.sharded_optimizer_state_dict(optimizer)}
            saved.save(step + 1, state, wait=step % 4 == 1)
    saved.finish()


def may_die_in(owner: type, name: str, place: str) -> None:
    """Let a process die where it enters a method."""
    method = getattr(owner, name)

    def entered(*args: Any, **kwargs: Any) -> Any:
        die_at(place)
        return method(*args, **kwargs)

    setattr(owner, name, entered)


def run_rank(ports: int, rank: int, size: int, folder: Path, moment: tuple[str, int, int] | None) -> None:
    """Join the other ranks and train."""
    store = dist.TCPStore("127.0.0.1", int(os.read(ports, 5)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    train(init_device_mesh("cpu", (size,)), rank, size, folder, moment)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends as Python does


def run_world(number: int, size: int, folder: Path, moment: tuple[str, int, int] | None) -> list[forks.Done]:
    """Run ranks in forks until all have ended."""
    ports, told = os.pipe()
    files = [folder / f"written_{number}_{rank}.txt" for rank in range(size)]
    pids = [forks.start(partial(run_rank, ports, rank, size, folder, moment), file) for rank, file in enumerate(files)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(told, f"{store.port:05}".encode() * size)
    return list(map(forks.wait, pids, files))


def main(folder: Path, runs: list[Any]) -> list[list[list[forks.Done]]]:
    """Make runs: worlds, each until its moment, and a last one to the end."""
    torch.set_num_threads(1)
    may_die_in(FileSystemWriter, "write_data", "write")
    may_die_in(FileSystemWriter, "finish", "metadata")
    may_die_in(Checkpoints, "_end", "rename")
    _warm_up()
    found = list[list[list[forks.Done]]]()
    for place, moments in enumerate(runs):
        own = folder / str(place)
        own.mkdir()
        worlds = [moment and tuple(moment) for moment in (*moments, None)]
        found.append([run_world(n, SIZES[n % len(SIZES)], own, moment) for n, moment in enumerate(worlds)])
    return found


def _warm_up() -> None:
    """Derive here the rules that all ranks need."""
    net, (x, y) = Net().double(), data(0)
    F.cross_entropy(tfn.jit(net)(x), y).backward()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
