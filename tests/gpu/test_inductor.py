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
from torch.utils._pytree import tree_leaves

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
    """Parameters are updated where they lie, with step counts on the CPU."""
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
        mine = trained("cuda", jit)
    for name, wanted in trained("cpu", lambda step: step).items():
        torch.testing.assert_close(mine[name].cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_regions_are_on_one_device() -> None:
    """An optimizer of PyTorch counts its steps on the CPU, beside updates on the GPU."""
    start = [torch.randn(8, 8), torch.randn(8)]

    def trained(jit: Callable[..., Any], device: str) -> list[Tensor]:
        weights = [value.clone().to(device).requires_grad_() for value in start]
        optimizer, x = torch.optim.AdamW(weights, lr=0.1), torch.ones(4, 8, device=device)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.gelu(x @ weights[0] + weights[1]).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        run = jit(step)
        return [*(run(x).detach() for _ in range(3)), *(value.detach() for value in weights)]

    jitted: list[Any] = []
    jit = lambda f: jitted.append(tfn.jit(f, executors=["inductor"])) or jitted[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(jit, "cuda")
    for mine, wanted in zip(found, trained(lambda f: f, "cpu"), strict=True):
        torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-2, atol=1e-3)
    inside = [line for line in str(tfn.last_traces(jitted[0])[-1]).splitlines() if line.startswith("        #     v")]
    assert inside
    assert all("cuda:0" in line for line in inside), "numbers of the CPU are in a region"


STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Any]]] = {
    "rnn": lambda c, x, w, b: ((new := (c @ w + x + b).tanh()), new.sigmoid()),
    "linear": lambda c, x, w, b: ((new := F.linear(c, w, b).relu() + x), new.mean(0, keepdim=True)),
    "sums": lambda c, x, w, b: (
        c * 0.9 - x.sum(-1, keepdim=True),
        ((c + 1).sum(0) * b, ((c + 1).t() @ (x + 1)).mean((0, 1))),
    ),
    "choices": lambda c, x, w, b: (torch.where(c > x, c.sin(), torch.maximum(x, c * 0.5)), (1 - c).abs()),
    "views": lambda c, x, w, b: (c.unsqueeze(0).expand(2, *c.shape).sum(0) * 0.4 + b.reshape(1, -1), x.t() * 2),
    "functions": lambda c, x, w, b: (
        (c.square() + 1).log() / (x.exp() + 1) - (c * c + 1).rsqrt(),
        (c.pow(2).sqrt() + torch.erf(x) - x.expm1().cos(), F.silu(c) + torch.minimum(c, x), (x == c).float()),
    ),
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, in the padding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
def test_all_small_steps_are_one_kernel(name: str, dtype: torch.dtype) -> None:
    """Sizes that are no powers of two have padding, which sums and products must not see."""
    torch.manual_seed(0)
    sizes = (3, 5), (4, 3, 5), (5, 5), (5,)
    args = [(torch.randn(size) * 0.3).to(dtype) for size in sizes]
    f = lambda c, xs, w, b: tfn.scan(lambda c, x: STEPS[name](c, x, w, b), c, xs, reverse=True)

    def loss(*args: Tensor) -> Tensor:
        carry, ys = f(*args)
        return sum((leaf.float().square().sum() for leaf in tree_leaves(ys)), carry.float().sum())

    for g in (f, tfn.grad(loss, argnums=(0, 1, 2, 3))):
        jitted = tfn.jit(g, executors=["inductor"])
        found, wanted = jitted(*(x.cuda() for x in args)), g(*args)
        assert "by inductor, all steps of" in str(tfn.last_traces(jitted)[-1])
        for mine, plain in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
            # Triton's interpreter cuts bfloat16 off, and does not round it.
            rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (0.1, 0.1 * float(plain.abs().max()))
            torch.testing.assert_close(mine.cpu(), plain, rtol=rtol, atol=atol)
            assert mine.stride() == plain.stride()


@pytest.mark.parametrize("size", [3, 5000])
def test_small_steps_of_a_loop_are_one_region(size: int) -> None:
    """All 70 steps are one kernel, or two blocks and a shorter one for the rest."""
    averaged = lambda c, xs: tfn.scan(lambda c, x: ((new := c * 0.9 + x.sin()), new.cos()), c, xs, reverse=True)
    loss = lambda c, xs: averaged(c, xs)[1].square().sum() + averaged(c, xs)[0].sum()
    c, xs = torch.randn(size), torch.randn(70, size)
    for f in (averaged, tfn.grad(loss, argnums=(0, 1))):
        found = tfn.jit(f, executors=["inductor"])(c.cuda(), xs.cuda())
        for mine, wanted in zip(found, f(c, xs), strict=True):
            torch.testing.assert_close(mine.cpu(), wanted, rtol=1e-4, atol=1e-5)
