"""Recurrent layers by cuDNN and recurrent cells by PyTorch's fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import thunder_fn as tfn

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(4, 5, bias=False),
    "LSTM of two layers": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM with a projection": lambda: nn.LSTM(4, 5, proj_size=3),
    "GRU": lambda: nn.GRU(4, 5, batch_first=True),
    "RNN": lambda: nn.RNN(4, 5, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # the CPU's, which gives the values
@pytest.mark.parametrize("has_cudnn", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, has_cudnn: bool) -> None:
    layer, x = LAYERS[name]().cuda(), torch.randn(3, 2, 4, device="cuda")

    def trained(run: Callable[..., Any]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y, states = run(leaf)
        sum(part.square().sum() for part in (y, *tree_leaves(states))).backward()
        gradients = [leaf.grad, *(p.grad for p in layer.parameters())]
        return [y, *tree_leaves(states), *(g.clone() for g in gradients)]

    with torch.backends.cudnn.flags(enabled=has_cudnn):
        for mine, wanted in zip(trained(tfn.jit(layer)), trained(layer), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
            assert mine.stride() == wanted.stride()


def test_gradients_of_other_weights() -> None:
    """`functional_call` asks for weights side by side in memory, which tracers do not have."""
    cpu = nn.LSTM(4, 5)
    gpu, x = deepcopy(cpu).cuda(), torch.randn(3, 2, 4)

    def gradient(layer: nn.Module, x: Tensor, transform: Callable[..., Any]) -> dict[str, Tensor]:
        weights = {name: p.detach() for name, p in layer.named_parameters()}
        return transform(lambda w, x: torch.func.functional_call(layer, w, (x,))[0].square().sum())(weights, x)

    wanted = gradient(cpu, x, torch.func.grad)
    for name, found in gradient(gpu, x.cuda(), tfn.grad).items():
        torch.testing.assert_close(found.cpu(), wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_have_second_derivatives(kind: Any) -> None:
    cell, x = kind(4, 5).cuda(), torch.randn(3, 4, device="cuda")
    loss = lambda x: tree_leaves(cell(x))[0].square().sum()
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    mine = tfn.jit(tfn.grad(lambda x: tfn.grad(loss)(x).square().sum()))
    torch.testing.assert_close(tfn.grad(loss)(x), first.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine(x), second, rtol=1e-4, atol=1e-5)
