"""Formulas of custom ops are functions of the user's: what they read from outside counts in every transform, as in eager.

The derivatives of an op are found once for each capture and never kept for another one. The oracle is a loop of autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn

SCALE: dict[str, float] = {"backward": 1.0, "context": 1.0, "vmap": 1.0}


@torch.library.custom_op("formulas::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    """The sine."""
    return x.sin()


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = SCALE["context"]


def _batched(info: Any, in_dims: tuple[int, ...], x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return sine(x) * SCALE["vmap"], in_dims[0]


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos() * SCALE["backward"] * ctx.scale, setup_context=_context
)
sine.register_vmap(_batched)

Function = Callable[[torch.Tensor], torch.Tensor]


def scanned(x: torch.Tensor) -> torch.Tensor:
    return tfn.scan(lambda c, _: (sine(c), None), x, None, length=2)[0]


def chosen(x: torch.Tensor) -> torch.Tensor:
    return tfn.cond(x.sum() > 0, sine, torch.cos, (x,))


@tfn.composite
def named(x: torch.Tensor) -> torch.Tensor:
    return sine(x) + x


BODIES: dict[str, Function] = {
    "plain": sine,
    "scan": scanned,
    "cond": chosen,
    "composite": named,
    "checkpoint": tfn.checkpoint(sine),
}


def by_autograd(f: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]

    return gradient


def of_grad(f: Function) -> Function:
    return tfn.grad(lambda x: f(x).sum())


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": of_grad,
    "jit of grad": lambda f: tfn.jit(of_grad(f)),
    "jit of grad of jit": lambda f: tfn.jit(of_grad(tfn.jit(f))),
    "grad of jit": lambda f: of_grad(tfn.jit(f)),
    "jit, backward": lambda f: by_autograd(tfn.jit(f)),
    "jit of vjp": lambda f: tfn.jit(lambda x: tfn.vjp(f, x)[1](torch.ones_like(x))[0]),
    "jit of vmap of grad": lambda f: tfn.jit(tfn.vmap(of_grad(f))),
    "linearize": lambda f: lambda x: tfn.vjp(f, x)[1](torch.ones_like(x))[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("place", ["backward", "context"])
def test_what_a_backward_reads_counts(monkeypatch: pytest.MonkeyPatch, place: str, body: str, transform: str) -> None:
    f, x = BODIES[body], torch.tensor([0.3, 0.7])
    if transform == "jit of vmap of grad" and body == "cond":
        pytest.skip("a choice of each example runs both branches")
    made, expected = TRANSFORMS[transform](f), by_autograd(f)
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, place, scale)
        torch.testing.assert_close(made(x), expected(x))


@pytest.mark.parametrize("make", [tfn.vmap, lambda f: tfn.jit(tfn.vmap(f)), lambda f: tfn.vmap(tfn.jit(f))])
def test_what_a_batching_rule_reads_counts(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Function], Function]
) -> None:
    made, x = make(sine), torch.tensor([0.3, 0.7])
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, "vmap", scale)
        torch.testing.assert_close(made(x), x.sin() * scale)
