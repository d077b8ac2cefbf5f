"""A jitted function that raises leaves everything as eager would leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn


def after_a_half(x: torch.Tensor) -> None:
    x[0] = 7
    x.mul_(2)
    raise KeyError("half way")


def before_anything(x: torch.Tensor) -> None:
    raise KeyError("at once")


def after_a_draw(x: torch.Tensor) -> None:
    x += torch.rand(3)
    raise KeyError("drawn")


def inside_a_function(x: torch.Tensor) -> None:
    x.sin_()
    nn.functional.layer_norm(x, (3,))
    raise KeyError("inside")


FUNCTIONS = [after_a_half, before_anything, after_a_draw, inside_a_function]


@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.parametrize("f", FUNCTIONS)
def test_what_it_had_changed_is_changed(f: Callable[[Any], None], cache: str) -> None:
    ours, eager = torch.arange(3.0), torch.arange(3.0)
    jitted = tfn.jit(f, cache=cache)
    torch.manual_seed(3)
    with pytest.raises(KeyError):
        jitted(ours)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.raises(KeyError):
        f(eager)
    assert torch.equal(ours, eager) and torch.equal(state, torch.get_rng_state())
    assert tfn.cache_info(jitted).size == 0


def test_what_is_traced_again_without_symbols_writes_once() -> None:
    def f(x: torch.Tensor) -> int:
        x.add_(torch.rand(3)).add_(1)
        return x.nbytes  # which no symbol stands for

    ours, eager = torch.zeros(3), torch.zeros(3)
    torch.manual_seed(3)
    count = tfn.jit(f, cache="symbolic values")(ours)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert count == f(eager) and torch.equal(ours, eager) and torch.equal(state, torch.get_rng_state())


def test_closed_over_tensors_and_buffers_too() -> None:
    total = torch.zeros(2)

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total.add_(x.sum(0))
            self.norm(x)
            raise ValueError("too late")

    module, eager, x = Counter(), Counter(), torch.randn(4, 2)
    with pytest.raises(ValueError, match="too late"):
        tfn.jit(lambda x: module(x))(x)
    ours, _ = total.clone(), total.zero_()
    with pytest.raises(ValueError, match="too late"):
        eager(x)
    assert torch.equal(ours, total)
    for mine, theirs in zip(module.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_program_that_is_there_is_not_disturbed() -> None:
    def f(x: torch.Tensor, flag: bool) -> torch.Tensor:
        x.add_(1)
        if flag:
            raise RuntimeError("asked for")
        return x * 2

    jitted, x = tfn.jit(f), torch.zeros(2)
    jitted(x, False)
    with pytest.raises(RuntimeError, match="asked for"):
        jitted(x, True)
    assert torch.equal(jitted(x, False), torch.full((2,), 6.0)) and torch.equal(x, torch.full((2,), 3.0))
