"""Regions that Inductor compiles to Triton, beside the same functions on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import thunder_fn as tfn


def fused(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.gelu(x @ w).softmax(-1) * 2 + x.sin(), (x.shape[-1],)).cos().sum()


def several(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Results that are views of each other, and one that is an input."""
    y = (x @ w).sin() * 2 + x
    return y, y.t(), y[1:], x, y.sum(0).exp()


FUNCTIONS: dict[str, Callable[..., Any]] = {"grad": tfn.grad(fused), "several results": several}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_regions_are_right(name: str) -> None:
    f, x, w = FUNCTIONS[name], torch.randn(6, 32), torch.randn(32, 32)
    jitted = tfn.jit(f, executors=["inductor"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [jitted(x.cuda(), w.cuda()) for _ in range(2)]
    assert "by inductor" in str(tfn.last_traces(jitted)[-1])
    for found in results:
        for mine, wanted in zip(
            *(value if isinstance(value, tuple) else (value,) for value in (found, f(x, w))), strict=True
        ):
            torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-5)
            assert mine.stride() == wanted.stride()


@pytest.mark.parametrize("executor", ["inductor", "cudagraphs"])
def test_a_step_that_gives_its_arguments_away(executor: str) -> None:
    """Parameters are updated where they lie, with step counts on the CPU, or for graphs on the GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))
    x = torch.randn(4, 16)

    def trained(device: str, jit: Callable[..., Any], **options: Any) -> dict[str, Tensor]:
        adamw = tfn.functional_optimizer(torch.optim.AdamW, lr=1e-2, **options)

        def step(p: Any, state: Any, x: Tensor) -> tuple[Any, Any]:
            grads = tfn.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().sum())(p)
            return adamw.update(p, grads, state)

        run = jit(step)
        p = {name: value.detach().clone().to(device) for name, value in model.named_parameters()}
        state = adamw.init(p)
        for _ in range(3):
            p, state = run(p, state, x.to(device))
        return p

    jit = partial(tfn.jit, executors=[executor], donate_argnums=(0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = trained("cuda", jit, **({"capturable": True} if executor == "cudagraphs" else {}))
    for name, wanted in trained("cpu", lambda step: step).items():
        torch.testing.assert_close(mine[name].cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_small_steps_of_a_loop_are_one_region() -> None:
    """70 steps are two blocks, and a shorter one for the rest."""
    averaged = lambda c, xs: tfn.scan(lambda c, x: ((new := c * 0.9 + x.sin()), new.cos()), c, xs, reverse=True)
    loss = lambda c, xs: averaged(c, xs)[1].square().sum() + averaged(c, xs)[0].sum()
    c, xs = torch.randn(3), torch.randn(70, 3)
    for f in (averaged, tfn.grad(loss, argnums=(0, 1))):
        found = tfn.jit(f, executors=["inductor"])(c.cuda(), xs.cuda())
        for mine, wanted in zip(found, f(c, xs), strict=True):
            torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-5)
