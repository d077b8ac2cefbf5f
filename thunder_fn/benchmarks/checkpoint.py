"""Memory of a GPT's train step under each checkpoint policy, beside torch.utils.checkpoint.

Each figure comes from a process of its own. A first step pays for tracing and for memory that
stays. The figure is the memory that PyTorch's allocator has handed out at the peak of a later step,
to the byte. Beside it stands the kernel's figure for a step: the process's peak above its memory
before. It differs by about a megabyte from run to run.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import (
    checkpoint as torch_checkpoint,
    create_selective_checkpoint_contexts,
)

import thunder_fn as tfn
from thunder_fn import torch_internals as internals
from thunder_fn.benchmarks.harness import FREEING_HEAP, OURS, Memory, in_process, machine
from thunder_fn.benchmarks.models import GPT, params_of

POLICIES = tfn.checkpoint_policies
VARIANTS: dict[str, tuple[Any, str]] = {
    "everything, without a checkpoint": (None, "no checkpoint"),
    "nothing": (POLICIES.nothing_saveable, "checkpoint"),
    "matrix products": (POLICIES.matmuls_saveable, "selective checkpoint, matrix products"),
    "at most 4 MB a block": (POLICIES.budget(4 << 20), "no checkpoint"),
    "everything": (POLICIES.everything_saveable, "no checkpoint"),
}
"""The policy of our blocks, and a way in PyTorch that keeps no less."""


def run(quick: bool = False) -> Iterator[Memory]:
    """Measure every policy beside its counterpart in PyTorch."""
    theirs = {
        name: _measure("torch", name, quick)
        for name in dict.fromkeys(name for _, name in VARIANTS.values())
    }
    for name, (_, peer) in VARIANTS.items():
        ours, own = _measure(OURS, name, quick), f"torch, {peer}"
        yield Memory(
            f"checkpoint: GPT 12 layers, train step, our blocks keep: {name}",
            {OURS: ours["allocated"], own: theirs[peer]["allocated"]},
            {OURS: ours["seconds"], own: theirs[peer]["seconds"]},
            f"no more than {own}",
            machine(),
            (
                f"residuals as computed from the trace: {ours['residuals'] / 1e6:.1f} MB",
                (
                    f"peak of the process: {ours['process'] / 1e6:.1f} MB, {own}"
                    f" {theirs[peer]['process'] / 1e6:.1f} MB"
                ),
            ),
        )


def _measure(side: str, variant: str, quick: bool) -> dict[str, Any]:
    return in_process("checkpoint", side, variant, str(int(quick)), environment=FREEING_HEAP)


# ---- in a process of its own ----


class Checkpointed(GPT):
    """The GPT, each block through `around`."""

    def __init__(self, around: Callable[[Any], Any], layers: int, width: int, context: int) -> None:
        super().__init__(layers, width, context=context)
        self.around = around

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = self.around(block)(x)
        return self.head(self.norm(x))


def our_step(model: Checkpointed, tokens: torch.Tensor) -> tuple[Callable[[], object], int]:
    """A jitted step with donated parameters, and the bytes of its residuals."""

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, params, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def step(params: Any, tokens: torch.Tensor) -> Any:
        gradients, value = tfn.grad_and_value(loss)(params, tokens)
        return {key: params[key] - 0.1 * gradients[key] for key in params}, value

    held = [params_of(model)]
    found = tfn.saved_residuals(lambda params: loss(params, tokens), held[0])
    residuals = sum(each.own_bytes for each in found)
    jitted = tfn.jit(step, donate_argnums=0)

    def call() -> object:
        held[0], value = jitted(held[0], tokens)
        return value

    return call, residuals


def their_step(model: Checkpointed, tokens: torch.Tensor) -> Callable[[], object]:
    """The usual loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def call() -> object:
        value = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()  # so that gradients belong to the step, as ours do
        return value.detach()

    return call


def _around_ours(variant: str) -> Callable[[Any], Any]:
    policy, _ = VARIANTS[variant]
    return (lambda block: block) if policy is None else lambda block: tfn.checkpoint(block, policy)


def _around_theirs(variant: str) -> Callable[[Any], Any]:
    if variant == "no checkpoint":
        return lambda block: block
    contexts: dict[str, Any] = {}
    if variant.startswith("selective"):
        products = [
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
        ]
        contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, products)}
    return lambda block: functools.partial(torch_checkpoint, block, use_reentrant=False, **contexts)


def allocated_peak(step: Callable[[], object]) -> int:
    """Bytes that PyTorch's allocator has handed out at the peak of a step, above what it had
    before.
    """
    return max(itertools.accumulate(internals.allocations(step)))


def process_peak(step: Callable[[], object]) -> tuple[int, float]:
    """Bytes that the process takes in a step at its peak, above what it held before, and the
    seconds.
    """
    gc.collect()
    _trim()
    before = _forget_peak()
    start = time.perf_counter()
    step()
    return _peak() - before, time.perf_counter() - start


def _trim() -> None:
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _forget_peak() -> int:
    """Let the peak begin anew. Returns the bytes held now."""
    if sys.platform != "linux":
        return _peak()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    if sys.platform == "linux":
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def main(side: str, variant: str, quick: bool) -> None:
    """Measure one variant and print it as JSON."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    width, context, batch = (64, 32, 4) if quick else (192, 128, 16)
    around = (_around_ours if side == OURS else _around_theirs)(variant)
    model, tokens = Checkpointed(around, 12, width, context), torch.randint(0, 96, (batch, context))
    step, residuals = our_step(model, tokens) if side == OURS else (their_step(model, tokens), None)
    step()
    process, seconds = process_peak(step)
    found = {
        "allocated": allocated_peak(step),
        "process": process,
        "seconds": seconds,
        "residuals": residuals,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "1")
