"""A whole training step of a small GPT: loss, gradient and AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of


def run(quick: bool = False) -> Iterator[Result]:
    """GPT with 4 layers, width 256, context 128, batch 8; the smaller one with --quick."""
    layers, width, length, batch = (2, 64, 32, 4) if quick else (4, 256, 128, 8)
    model = GPT(layers, width, context=length)
    tokens = torch.randint(0, 96, (batch, length))
    targets = torch.randint(0, 96, (batch, length))
    peers = {
        OURS: jitted_step(model, tokens, targets),
        "eager": eager_step(layers, width, length, model, tokens, targets),
        "torch.compile": compiled_step(layers, width, length, model, tokens, targets),
    }
    name = f"train: GPT {layers} layers, width {width}, context {length}, batch {batch}, AdamW"
    yield run_case(Case(name, peers, rounds=11, target="1.0 x eager"), quick)


def jitted_step(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """The step as one trace, its state donated."""
    loss = gpt_loss(model)
    optimizer = tfn.functional_optimizer(torch.optim.AdamW, lr=1e-3)

    def step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        gradients, value = tfn.grad_and_value(loss)(params, tokens, targets)
        return *optimizer.update(params, gradients, state), value

    jitted = tfn.jit(step, donate_argnums=(0, 1))
    held: list[Any] = [params_of(model)]
    held.append(optimizer.init(held[0]))

    def call() -> torch.Tensor:
        held[0], held[1], value = jitted(held[0], held[1], tokens, targets)
        return value

    return call


def _twin(layers: int, width: int, length: int, model: GPT) -> tuple[GPT, torch.optim.Optimizer]:
    twin = GPT(layers, width, context=length)
    twin.load_state_dict(model.state_dict())
    return twin, torch.optim.AdamW(twin.parameters(), lr=1e-3)


def eager_step(layers: int, width: int, length: int, model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """The usual loop of PyTorch."""
    twin, optimizer = _twin(layers, width, length, model)

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten())
        value.backward()
        optimizer.step()
        return value

    return call


def compiled_step(layers: int, width: int, length: int, model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """The usual loop with the model compiled."""
    twin, optimizer = _twin(layers, width, length, model)
    compiled = torch.compile(twin)

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
        value.backward()
        optimizer.step()
        return value

    return call
