"""A whole training step of a small GPT: loss, gradient and AdamW."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case
from thunder_fn.benchmarks.models import GPT, gpt_loss, jax_gpt_loss, params_of
from thunder_fn.executors import Executor

SIZES = ((2, 64, 32, 4), (4, 256, 128, 8))
"""Layers, width, context and batch of each case."""

RATE, DECAY, EPSILON, BETAS = 1e-3, 1e-2, 1e-8, (0.9, 0.999)
"""PyTorch's defaults for AdamW, for the peer that has no optimizer of its own."""


def run(quick: bool = False) -> Iterator[Result]:
    """A GPT with 2 layers of width 64, and one with 4 of width 256; the small one alone with
    --quick.
    """
    for layers, width, length, batch in SIZES[: 1 if quick else None]:
        model = GPT(layers, width, context=length)
        tokens, targets = torch.randint(0, 96, (2, batch, length))
        peers = {
            OURS: jitted_step(model, tokens, targets),
            "as written": plain_step(model, tokens, targets),
            "eager": eager_step(model, tokens, targets),
            "torch.compile": eager_step(model, tokens, targets, torch.compile),
        }
        with contextlib.suppress(ImportError):
            peers["jax.jit"] = jax_step(model, tokens, targets)
        name = f"train: GPT {layers} layers, width {width}, context {length}, batch {batch}, AdamW"
        yield run_case(Case(name, peers, rounds=11, target="1.0 x eager"), quick)


def jitted_step(
    model: GPT, tokens: torch.Tensor, targets: torch.Tensor, executors: Sequence[Executor] = ()
) -> Any:
    """The step as one trace, its state donated."""
    loss = gpt_loss(model)
    optimizer = tfn.functional_optimizer(torch.optim.AdamW, lr=RATE)

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        gradients, value = tfn.grad_and_value(loss)(params, tokens, targets)
        return *optimizer.update(params, gradients, state), value

    jitted = tfn.jit(step, donate_argnums=(0, 1), executors=executors)
    held: list[Any] = [params_of(model)]
    held.append(optimizer.init(held[0]))

    def call() -> torch.Tensor:
        held[0], held[1], value = jitted(held[0], held[1], tokens, targets)
        return value

    return call


def eager_step(
    model: GPT,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    prepare: Callable[[Any], Any] = lambda it: it,
) -> Callable[[], object]:
    """The usual loop of PyTorch, on a copy of the model; `prepare` may compile it and the
    optimizer's step.
    """
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE)
    prepared, update = prepare(twin), prepare(optimizer.step)

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(prepared(tokens).flatten(0, 1), targets.flatten())
        value.backward()
        update()
        return value

    return call


def plain_step(
    model: GPT, tokens: torch.Tensor, targets: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The usual loop of PyTorch under `jit`, on a copy of the model."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten())
        value.backward()
        optimizer.step()
        return value

    jitted = tfn.jit(step)
    return lambda: jitted(tokens, targets)


def jax_step(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> Callable[[], object]:
    """Write the step in JAX, jitted and donated, with AdamW written out.

    Raises:
        ImportError: JAX is not installed.
    """
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    loss = jax_gpt_loss(model.blocks[0].heads)  # type: ignore[arg-type]
    batch = [jnp.asarray(tensor.numpy()) for tensor in (tokens, targets)]

    def moved(p: Any, m: Any, v: Any, count: Any) -> Any:
        step = (m / (1 - BETAS[0] ** count)) / (jnp.sqrt(v / (1 - BETAS[1] ** count)) + EPSILON)
        return p * (1 - RATE * DECAY) - RATE * step

    def step(params: Any, first: Any, second: Any, count: Any, tokens: Any, targets: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        first = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, first, gradients)
        second = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, second, gradients)
        params = jax.tree.map(lambda p, m, v: moved(p, m, v, count + 1), params, first, second)
        return params, first, second, count + 1, value

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    params = {name: jnp.asarray(value.numpy()) for name, value in params_of(model).items()}
    held = [
        params,
        jax.tree.map(jnp.zeros_like, params),
        jax.tree.map(jnp.zeros_like, params),
        jnp.zeros(()),
    ]

    def call() -> object:
        *held[:], value = jitted(*held, *batch)
        return value.block_until_ready()

    return call
