"""Training steps on the inductor executor, beside the torch executor, eager, torch.compile with
its optimizer, and JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, once, run_case
from thunder_fn.benchmarks.models import GPT, params_of
from thunder_fn.benchmarks.train import SIZES, eager_step, jax_step, jitted_step
from thunder_fn.executors import inductor

TARGETS = ("at most 0.7 x torch.compile, 0.8 x jax.jit", "at most 0.92 x torch.compile")


def run(quick: bool = False) -> Iterator[Result]:
    """GPTs of two sizes, the small one alone with --quick; force matching of a small
    molecule-like system.
    """
    for (layers, width, length, batch), target in list(zip(SIZES, TARGETS, strict=True))[
        : 1 if quick else None
    ]:
        name = (
            f"compiled: GPT {layers} layers, width {width}, context {length}, batch {batch}, AdamW"
        )
        peers = _gpt_peers(layers, width, length, batch)
        notes = (f"its matrix products alone: {_floor(layers, width, length, batch) * 1e3:.2f} ms",)
        yield run_case(Case(name, peers, rounds=11, target=target, notes=notes), quick)
    name = "compiled: force field, MLP energy of 64 atoms, gradient of a loss on forces"
    yield run_case(
        Case(name, _force_peers(), calls=10, rounds=11, target="ahead of torch.compile"), quick
    )


def _gpt_peers(layers: int, width: int, length: int, batch: int) -> dict[str, Any]:
    model = GPT(layers, width, context=length)
    tokens, targets = torch.randint(0, 96, (2, batch, length))
    peers: dict[str, Any] = {
        OURS: jitted_step(model, tokens, targets, [inductor()]),
        f"{OURS}, torch executor": jitted_step(model, tokens, targets),
        "eager": eager_step(model, tokens, targets),
        "torch.compile": eager_step(model, tokens, targets, torch.compile),
    }
    with contextlib.suppress(ImportError):
        peers["jax.jit"] = jax_step(model, tokens, targets)
    return peers


def _floor(layers: int, width: int, length: int, batch: int) -> float:
    """Seconds that the matrix products of the linear layers take, forward and backward."""
    rows = batch * length
    shapes = [
        (3 * width, width),
        (width, width),
        (4 * width, width),
        (width, 4 * width),
    ] * layers + [(96, width)]
    sizes = [((rows, k), (k, n)) for n, k in shapes]
    sizes += [((rows, n), (n, k)) for n, k in shapes] + [((n, rows), (rows, k)) for n, k in shapes]
    pairs = [(torch.randn(a), torch.randn(b)) for a, b in sizes]
    return min(once(lambda: [torch.mm(a, b) for a, b in pairs]) for _ in range(5))


def _force_peers() -> dict[str, Any]:
    """The gradient, by parameters, of a loss on forces that are the gradient of an energy."""
    model = nn.Sequential(
        nn.Linear(64 * 3, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
    )
    params, positions, forces = params_of(model), torch.randn(16, 64 * 3), torch.randn(16, 64 * 3)

    def gradient(transforms: Any) -> Any:
        energy = lambda params, x: torch.func.functional_call(model, params, (x,)).sum()
        loss = lambda params, x, f: ((transforms.grad(energy, 1)(params, x) + f) ** 2).mean()
        return transforms.grad(loss)

    ours, eager = tfn.jit(gradient(tfn), executors=[inductor()]), gradient(torch.func)
    compiled = torch.compile(gradient(torch.func))
    args = params, positions, forces
    return {
        OURS: lambda: ours(*args),
        "torch.func eager": lambda: eager(*args),
        "torch.compile of torch.func": lambda: compiled(*args),
    }
