"""Compiling: from nothing to a compiled training step, in fresh processes, by depth; tiered; and
with a warm disk cache.

Each figure is one run of a process of its own with empty caches, the peers one after the other.
Imports are counted: a process that has nothing to compile need not import a compiler.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from thunder_fn.benchmarks.harness import OURS, Result, empty_caches, in_process, single

_WIDTH, _LENGTH, _BATCH = 128, 64, 8


def run(quick: bool = False) -> Iterator[Result]:
    """The first training steps of GPTs with 2 and 12 layers (1 and 2 with --quick)."""
    few, many = (1, 2) if quick else (2, 12)
    tiers = {layers: _fresh("tiered", layers)[0] for layers in (few, many)}
    ratio = tiers[many]["first"] / tiers[few]["first"]
    note = f"{ratio:.2f} x that of {few} layers ({tiers[few]['first']:.2f} s)"
    target = "under 2 s, and at most 1.3 x that of few layers"
    yield single(
        f"compile: first train step, {many} layers, tiered",
        {OURS: tiers[many]["first"]},
        target,
        (note,),
    )
    ours = {layers: _fresh("inductor", layers, again=True) for layers in (few, many)}
    theirs = {layers: _fresh("torch.compile", layers, again=True) for layers in (few, many)}
    cold, warm = (
        [times[index]["compiled"] for times in (ours[many], theirs[many])] for index in (0, 1)
    )
    small, small_theirs = ours[few][0]["compiled"], theirs[few][0]["compiled"]
    note = (
        f"{cold[0] / small:.2f} x that of {few} layers ({small:.2f} s; torch.compile"
        f" {small_theirs:.2f} s)"
    )
    target = "under half of torch.compile's, and at most 1.3 x that of few layers"
    yield single(
        f"compile: {many} layers, cold", {OURS: cold[0], "torch.compile": cold[1]}, target, (note,)
    )
    name = f"compile: {many} layers, second process"
    yield single(name, {OURS: warm[0], "torch.compile": warm[1]}, "at most 0.3 x torch.compile's")


def _fresh(peer: str, layers: int, *, again: bool = False) -> list[dict[str, float]]:
    """Seconds of the first step, and of all until a step is compiled, in a new process; then in
    a second one.
    """
    with empty_caches() as caches:
        return [
            in_process("compile", peer, str(layers), environment=caches) for _ in range(1 + again)
        ]


def _measure(peer: str, layers: int) -> dict[str, float]:
    """Measure in the new process. PyTorch and the model are there when the clock starts."""
    import torch

    from thunder_fn.benchmarks.models import GPT
    from thunder_fn.benchmarks.train import eager_step, jitted_step

    model = GPT(layers, _WIDTH, context=_LENGTH)
    tokens, targets = (torch.randint(0, 96, (_BATCH, _LENGTH)) for _ in range(2))
    start = time.perf_counter()
    step: Any
    if peer == "torch.compile":
        step = eager_step(model, tokens, targets, torch.compile)
    else:
        from thunder_fn.executors import inductor

        step = jitted_step(model, tokens, targets, [inductor(tiered=peer == "tiered")])
    step()
    first = time.perf_counter() - start
    step()
    return {"first": first, "compiled": time.perf_counter() - start}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))) + "\n")
