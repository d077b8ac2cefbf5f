"""Printed traces, before and after each interpreter. `make golden` rewrites them; `git diff` shows what changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.interpreters import grad as reverse, simplify
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Trace

F = nn.functional


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def sine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sin(a) * b + 1


def blocks(parameters: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """The same block with two sets of parameters: one body."""
    for values in parameters:
        x = torch.func.functional_call(Block(), values, (x,))
    return x.square().mean()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[0] = x[1]
    y[1:].mul_(2).add_(x[1:])
    return y.relu_()


def dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5).sum()


@tfn.composite
def halve(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two results, of which its caller needs one."""
    return x / 2, x.exp()


def wasteful(x: torch.Tensor) -> torch.Tensor:
    """Equations that capture leaves out, and the same twice in composites."""
    first, _ = halve(x)
    second, _ = halve(x)
    torch.cos(x)
    return (first.sin() + second.sin()) * tfn.stop_gradient(x)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Any]]] = {
    "sine": (sine, (ones(2, 2), ones(2))),
    "blocks": (blocks, ([dict(Block().named_parameters()) for _ in range(2)], ones(3, 4))),
    "in_place": (in_place, (ones(3, 2),)),
    "dropout": (dropout, (ones(4),)),
    "wasteful": (wasteful, (ones(2),)),
}

INTERPRETERS: dict[str, Callable[[Trace], Trace]] = {
    "dce": simplify.dce,
    "cse": simplify.cse,
    "inline": simplify.inline,
    "vjp": lambda t: reverse.vjp(t, (True,) * len(t.inputs), (True,) * len(t.outputs)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_interpreter(name: str, golden: Callable[[str, str], None]) -> None:
    f, args = PROGRAMS[name]
    captured = tfn.trace(f, *args)
    check(captured)
    texts = [f"# captured\n\n{captured}"]
    for interpreter, transform in INTERPRETERS.items():
        new = transform(captured)
        check(new)
        texts.append(f"# {interpreter}\n\n{new if new != captured else '(unchanged)'}")
    golden(name, "\n\n".join(text.rstrip() for text in texts))


def test_gradient_of_a_gradient(golden: Callable[[str, str], None]) -> None:
    """From the outside, as a user sees it."""
    first = tfn.grad(lambda x: torch.sin(x) ** 3)
    second = tfn.grad(first)
    traces = [tfn.trace(f, torch.ones(())) for f in (first, second)]
    for trace in traces:
        check(trace)
    golden("grad_of_grad", "\n\n".join(str(trace).rstrip() for trace in traces))
