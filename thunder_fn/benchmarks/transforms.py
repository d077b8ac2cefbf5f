"""Transforms as scientists use them: per-sample gradients, Hessians, Jacobians, ensembles, side by side with torch.func."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case
from thunder_fn.benchmarks.models import params_of

Tensor = torch.Tensor


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    """Three linear layers with tanh between them."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def cnn() -> nn.Module:
    """Two convolutions and a linear layer, for 28x28 images of one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10)
    )


def run(quick: bool = False) -> Iterator[Result]:
    """Every case: ours jitted on the torch executor, torch.func eager, torch.compile of torch.func."""
    for name, f, args in cases():
        yield run_case(Case(f"transforms: {name}", _peers(f, args), rounds=11, target="1.0 x torch.func eager"), quick)


def _peers(f: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    jitted, eager, compiled = tfn.jit(f(tfn)), f(torch.func), torch.compile(f(torch.func))
    return {
        OURS: lambda: jitted(*args),
        "torch.func eager": lambda: eager(*args),
        "torch.compile of torch.func": lambda: compiled(*args),
    }


def cases() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, a function from a namespace of transforms to the function to measure, and its arguments."""
    for kind, model, shape in (("MLP", mlp(64, 64, 10), (64,)), ("CNN", cnn(), (1, 16, 16))):
        loss = sample_loss(model)
        args = (params_of(model), torch.randn(64, *shape), torch.randint(0, 10, (64,)))
        yield f"per-sample gradients, {kind}, batch 64", lambda t, loss=loss: t.vmap(t.grad(loss), (None, 0, 0)), args
    scalar = mlp(64, 64, 1)
    params = params_of(scalar)
    energy = lambda x: torch.func.functional_call(scalar, params, (x,)).sum()
    point = torch.randn(64)
    yield "Hessian of a 3-layer MLP of 64 inputs", lambda t: t.hessian(energy), (point,)
    yield (
        "Hessian-vector product",
        lambda t: lambda x, v: t.jvp(t.grad(energy), (x,), (v,))[1],
        (point, torch.randn(64)),
    )
    many = mlp(64, 64, 32)
    fixed = params_of(many)
    yield (
        "Jacobian, 64 inputs and 32 outputs",
        lambda t: t.jacrev(lambda x: torch.func.functional_call(many, fixed, (x,))),
        (point,),
    )
    models = [mlp(64, 64, 10) for _ in range(16)]
    stacked, _ = torch.func.stack_module_state(models)
    stacked = {name: value.detach() for name, value in stacked.items()}
    base = models[0]
    predict = lambda p, x: torch.func.functional_call(base, p, (x,))
    yield "ensemble of 16 MLPs, batch 64", lambda t: t.vmap(predict, (0, None)), (stacked, torch.randn(64, 64))


def sample_loss(model: nn.Module) -> Any:
    """The loss of one example as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    return loss
