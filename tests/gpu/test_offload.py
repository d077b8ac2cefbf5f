"""Residuals that `checkpoint` keeps in the CPU's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn import checkpoint_policies


def loss(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = tfn.checkpoint_name((x @ w).sin(), "hidden").cos()
    return x.square().sum()


@pytest.mark.parametrize("executor", ["torch", "inductor"])
def test_nobody_waits_for_what_is_offloaded(executor: str) -> None:
    run = tfn.jit(
        tfn.checkpoint(loss, policy=checkpoint_policies.offload_only_these_names("hidden")), executors=[executor]
    )
    x, w = torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda", requires_grad=True)
    for _ in range(2):
        value = run(x, w)
        node: Any = value.grad_fn
        kept = [one for one in node.saved_tensors if not one.is_cuda]
        assert len(kept) == 3
        assert all(one.is_pinned() for one in kept), "copies from and to such memory need not be waited for"
        (found,) = torch.autograd.grad(value, w)
        leaf = w.detach().cpu().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(x.cpu(), leaf), leaf)
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)
