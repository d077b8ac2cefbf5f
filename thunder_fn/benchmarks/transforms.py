"""Transforms as scientists use them: per-sample gradients, Hessians, Jacobians, ensembles, side
by side with torch.func.
"""

from __future__ import annotations

import contextlib
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
        nn.Linear(inputs, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, outputs),
    )


def cnn() -> nn.Module:
    """Two convolutions and a linear layer, for 28x28 images of one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 10),
    )


def run(quick: bool = False) -> Iterator[Result]:
    """Measure every case: ours jitted on the torch executor, torch.func eager, torch.compile of
    torch.func, jax.jit.
    """
    for name, args, f, in_jax in cases():
        peers = _peers(args, f, in_jax)
        yield run_case(
            Case(f"transforms: {name}", peers, rounds=11, target="1.0 x torch.func eager"), quick
        )


def _peers(args: tuple[Any, ...], f: Any, in_jax: Any) -> dict[str, Any]:
    jitted, eager, compiled = tfn.jit(f(tfn)), f(torch.func), torch.compile(f(torch.func))
    found = {
        OURS: lambda: jitted(*args),
        "torch.func eager": lambda: eager(*args),
        "torch.compile of torch.func": lambda: compiled(*args),
    }
    with contextlib.suppress(ImportError):
        import jax  # pyright: ignore[reportMissingImports]

        g, given = jax.jit(in_jax(jax)), jax.tree.map(lambda x: jax.numpy.asarray(x.numpy()), args)
        found["jax.jit"] = lambda: jax.block_until_ready(g(*given))
    return found


def cases() -> Iterator[tuple[str, tuple[Any, ...], Any, Any]]:
    """Name, arguments, and what to measure: functions of a namespace of transforms, in PyTorch
    and in JAX.
    """
    for kind, model, shape in (("MLP", mlp(64, 64, 10), (64,)), ("CNN", cnn(), (1, 16, 16))):
        loss = sample_loss(model)
        args = (params_of(model), torch.randn(64, *shape), torch.randint(0, 10, (64,)))
        yield (
            f"per-sample gradients, {kind}, batch 64",
            args,
            lambda t, loss=loss: t.vmap(t.grad(loss), (None, 0, 0)),
            lambda jax, model=model: jax.vmap(jax.grad(jax_sample_loss(model)), (None, 0, 0)),
        )
    scalar = mlp(64, 64, 1)
    params = params_of(scalar)
    energy = lambda x: torch.func.functional_call(scalar, params, (x,)).sum()
    energy_in_jax = lambda x: jax_apply(scalar, params, x).sum()
    point = torch.randn(64)
    yield (
        "Hessian of a 3-layer MLP of 64 inputs",
        (point,),
        lambda t: t.hessian(energy),
        lambda jax: jax.hessian(energy_in_jax),
    )
    yield (
        "Hessian-vector product",
        (point, torch.randn(64)),
        lambda t: lambda x, v: t.jvp(t.grad(energy), (x,), (v,))[1],
        lambda jax: lambda x, v: jax.jvp(jax.grad(energy_in_jax), (x,), (v,))[1],
    )
    many = mlp(64, 64, 32)
    fixed = params_of(many)
    yield (
        "Jacobian, 64 inputs and 32 outputs",
        (point,),
        lambda t: t.jacrev(lambda x: torch.func.functional_call(many, fixed, (x,))),
        lambda jax: jax.jacrev(lambda x: jax_apply(many, fixed, x)),
    )
    models = [mlp(64, 64, 10) for _ in range(16)]
    stacked, _ = torch.func.stack_module_state(models)
    stacked = {name: value.detach() for name, value in stacked.items()}
    base = models[0]
    predict = lambda p, x: torch.func.functional_call(base, p, (x,))
    yield (
        "ensemble of 16 MLPs, batch 64",
        (stacked, torch.randn(64, 64)),
        lambda t: t.vmap(predict, (0, None)),
        lambda jax: jax.vmap(lambda p, x: jax_apply(base, p, x), (0, None)),
    )


def sample_loss(model: nn.Module) -> Any:
    """The loss of one example as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    return loss


def jax_sample_loss(model: nn.Module) -> Any:
    """Compute the loss of a sample in JAX."""
    import jax  # pyright: ignore[reportMissingImports]

    return lambda params, x, y: -jax.nn.log_softmax(jax_apply(model, params, x[None])[0])[y]


def jax_apply(model: nn.Module, params: Any, x: Any) -> Any:
    """A sequential model in JAX, on the same parameters."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    held: Any = {
        key: p if isinstance(p, jax.Array) else jnp.asarray(p.numpy()) for key, p in params.items()
    }
    for name, layer in model.named_children():
        weight, bias = held.get(f"{name}.weight"), held.get(f"{name}.bias")
        match layer:
            case nn.Linear():
                x = x @ weight.T + bias
            case nn.Conv2d():
                x = (
                    jax.lax.conv_general_dilated(x, weight, layer.stride, "VALID")
                    + bias[:, None, None]
                )
            case nn.Tanh():
                x = jnp.tanh(x)
            case nn.ReLU():
                x = jax.nn.relu(x)
            case _:
                x = x.reshape(x.shape[0], -1)
    return x
