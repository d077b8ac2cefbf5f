"""Batches of all lengths: how often a model is traced, and what finding the right program costs.

A stream of batches of random lengths goes through a transformer, the first call included. Then a
call is timed whose program is one of many, and one whose arguments are 150 parameters.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case, single
from thunder_fn.benchmarks.models import GPT, gpt_loss, jax_gpt_loss, params_of
from thunder_fn.torch_internals.inductor import inductor_backend

BUCKETS = (16, 32, 48, 64)
"""The lengths that a user of JAX pads to."""


def run(quick: bool = False) -> Iterator[Result]:
    """The stream, then lookup among programs, then a prologue, all on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _stream(*((1, 32, 12) if quick else (4, 128, 200)))
        for count in (1, 10) if quick else (1, 100, 1000):
            yield run_case(_lookup(count), quick)
        yield run_case(_prologue(), quick)
    finally:
        torch.set_num_threads(threads)


# ---- the stream ----


def _stream(layers: int, width: int, count: int) -> Result:
    draw = random.Random(0)
    torch.manual_seed(0)
    model = GPT(layers, width)
    params, loss = params_of(model), gpt_loss(model)
    batches = [torch.randint(0, 96, (4, draw.randint(8, 64))) for _ in range(count)]
    seconds: dict[str, float] = {}
    notes: list[str] = []
    peers: dict[str, Callable[[], tuple[Callable[[torch.Tensor], Any], Callable[[], int]]]] = {
        OURS: lambda: _ours(loss, params),
        "eager": lambda: (lambda batch: loss(params, batch, batch), lambda: 0),
        "torch.compile (automatic)": lambda: _compiled(loss, params, None),
        "torch.compile (dynamic)": lambda: _compiled(loss, params, True),
        "jax.jit": lambda: _jax(params, lambda batch: batch),
        "jax.jit (padded)": lambda: _jax(params, _padded),
    }
    for name, make in peers.items():
        try:
            step, traces = make()
        except ImportError:
            continue
        start = time.perf_counter()
        for batch in batches:
            step(batch)
        seconds[name] = time.perf_counter() - start
        if name != "eager":
            notes.append(f"{name}: {traces()} traces")
    return single(
        f"dynamic: {count} batches of random lengths, loss of a {layers}-layer GPT",
        seconds,
        "at most 2 traces, ahead of every compiler",
        tuple(notes),
    )


def _ours(loss: Any, params: Any) -> tuple[Callable[[torch.Tensor], Any], Callable[[], int]]:
    step = tfn.jit(loss)
    return lambda batch: step(params, batch, batch), lambda: tfn.cache_info(step).misses


def _compiled(
    loss: Any, params: Any, dynamic: bool | None
) -> tuple[Callable[[torch.Tensor], Any], Callable[[], int]]:
    torch.compiler.reset()
    graphs, inductor = list[int](), inductor_backend()

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(1)
        return inductor(module, inputs)

    step = torch.compile(loss, dynamic=dynamic, backend=backend)
    return lambda batch: step(params, batch, batch), lambda: len(graphs)


def _jax(
    params: Any, prepare: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Callable[[torch.Tensor], Any], Callable[[], int]]:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    loss, traces = jax_gpt_loss(4), list[int]()

    def counted(*args: Any) -> Any:
        traces.append(1)
        return loss(*args)

    step = jax.jit(counted)
    converted = jax.tree.map(lambda tensor: jnp.asarray(tensor.numpy()), params)

    def call(batch: torch.Tensor) -> Any:
        tokens = jnp.asarray(prepare(batch).numpy())
        return step(converted, tokens, tokens).block_until_ready()

    return call, lambda: len(traces)


def _padded(batch: torch.Tensor) -> torch.Tensor:
    length = next(size for size in BUCKETS if size >= batch.shape[1])
    return torch.nn.functional.pad(batch, (0, length - batch.shape[1]))


# ---- lookup ----


def _lookup(count: int) -> Case:
    """Calls whose program is the oldest of `count`, each of another kind of arguments."""
    f = tfn.jit(lambda x, name: x + 1)
    f.programs.maxsize = max(f.programs.maxsize, count + 8)
    x = torch.randn(2, 2)
    names = [f"kind {i}" for i in range(count)]
    for name in names:
        f(x, name)
    turn = iter(range(10**9))

    def call() -> Any:
        return f(x, names[next(turn) * 7 % count])

    return Case(
        f"dynamic: a call among {count} programs",
        {OURS: call},
        calls=200,
        target="microseconds, whatever the number",
    )


def _prologue() -> Case:
    """A function of 150 parameters that does nothing, so that its checks are all there is to
    time.
    """
    tensors = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(150)]
    f = tfn.jit(lambda parameters: parameters[0])
    with torch.no_grad():
        f(tensors)

    def call() -> Any:
        with torch.no_grad():
            return f(tensors)

    return Case("dynamic: the prologue of 150 parameters", {OURS: call}, calls=500, target="20 us")
