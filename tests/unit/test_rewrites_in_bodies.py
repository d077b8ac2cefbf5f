"""Parameters that are stored in another way, used in the bodies of loops and branches: their codes go there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.ir.trace import Trace
from thunder_fn.parameters import SCHEMES

ROUNDING = {"int8_dynamic": 0.05, "int8_static": 0.05, "fp8_dynamic": 0.2}


class Loops(nn.Module):
    """Four layers: of the steps of a scan, of two branches in a while_loop, and of a while_loop."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.step, self.one, self.other, self.last = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, sums = tfn.scan(lambda c, i: ((y := torch.tanh(self.step(c))), y.sum() * i), x, torch.arange(3.0))

        def body(i: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            c = tfn.cond(i > 0, lambda v: self.one(v).sin(), lambda v: self.other(v).cos(), (c,))
            return i + 1, self.last(c)

        start = torch.zeros((), dtype=torch.int64)
        return tfn.while_loop(lambda i, c: i < 2, body, (start, x), max_steps=3)[1] + sums.sum()


def equations(trace: Trace, inside: tuple[str, ...] = ()) -> list[tuple[str, tuple[str, ...]]]:
    """The names of the ops of a trace, and of the ops around them."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for equation in trace.equations:
        found.append((equation.op.name, inside))
        for body in equation.bodies:
            found += equations(body, (*inside, equation.op.name))
    return found


def gradient(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(module(x).square().sum(), x)
    return found


def close(found: torch.Tensor, expected: torch.Tensor, scheme: str) -> None:
    off = (found - expected).abs().max() / expected.abs().max()
    assert off <= ROUNDING.get(scheme, 1e-5), (scheme, float(off))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_go_into_loops_and_branches(scheme: str) -> None:
    """The law of `represent`, and that nothing as large as a decoded weight is kept for the backward."""
    torch.manual_seed(0)
    q, x = tfn.quantize(tfn.jit(Loops(64), numerics="bitwise"), scheme), torch.randn(2, 64)
    if scheme == "int8_static":
        q.calibrate([(x,)])
        assert all(bool(part.isfinite().all()) for name, part in q.parts().items() if "input_scale" in name)
    whole = q.restored().requires_grad_(False)
    close(q(x), whole(x), scheme)
    kept = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        found = gradient(q, x)
    close(found, gradient(whole, x), scheme)
    assert not any(value.numel() >= 64 * 64 and value.itemsize > 1 for value in kept)


def test_the_trace_multiplies_codes_in_bodies() -> None:
    params = {"w": torch.randn(64, 64) / 8, "k": torch.randn(1, 1, 3)}

    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        def step(c: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return F.linear(F.conv1d(c.unsqueeze(1), params["k"], padding=1).squeeze(1), params["w"]), c.sum()

        return tfn.cond(x.sum() > 0, lambda v: F.linear(v, params["w"]), lambda v: v, (tfn.scan(step, x, x)[0],))

    q, x = tfn.quantize(f, "int8"), torch.randn(2, 64)
    found = equations(q.rewrite(params, x).compute)
    assert {inside[0] for name, inside in found if name == "quantized.int8_linear"} == {"scan", "cond"}
    decoded = [inside for name, inside in found if name == "int8_decode"]
    assert decoded == [()]  # what a step needs whole, for the convolution, is decoded before the loop, once
    new = q.prepare(params)
    torch.testing.assert_close(q(new, x), f(new.restore(), x))


def test_adapters_beside_codes_in_a_loop() -> None:
    torch.manual_seed(0)
    q, x = tfn.quantize(tfn.lora(Loops(32), rank=2), "nf4"), torch.randn(2, 32)
    trained = {name: part for name, part in q.named_parameters() if part.requires_grad}
    with torch.no_grad():
        for part in trained.values():
            part.copy_(torch.randn_like(part) * 0.1)
    found = dict(zip(trained, torch.autograd.grad(q(x).square().sum(), tuple(trained.values())), strict=True))
    whole, parts = q.restored(), q.parts()
    weights = {name: part for name, part in whole.named_parameters() if name.endswith("weight")}
    expected = torch.autograd.grad(whole(x).square().sum(), tuple(weights.values()))
    for name, own in zip(weights, expected, strict=True):
        a, b = (parts[f"{name}.{part}"].detach() for part in ("lora_a", "lora_b"))
        slot = name.replace(".", "/")
        torch.testing.assert_close(found[f"{slot}/lora_b"], own @ a.t(), rtol=1e-3, atol=1e-4 * float(own.abs().max()))
        torch.testing.assert_close(found[f"{slot}/lora_a"], b.t() @ own, rtol=1e-3, atol=1e-4 * float(own.abs().max()))
