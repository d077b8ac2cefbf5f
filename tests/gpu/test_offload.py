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


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    """Not at the end of the forward, nor at the beginning of the backward; of ten layers, few are there at a time."""
    size = 2**20
    x, w = torch.randn(1, device="cuda"), torch.zeros(size // 4, device="cuda", requires_grad=True)

    def deep(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(10):
            w = tfn.checkpoint_name((w * x).sin(), "hidden") * 2
        return w.sum()

    def peak(policy: Any) -> int:
        run = tfn.jit(tfn.checkpoint(deep, policy=policy))
        for _ in range(2):
            start = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(run(x, w), w)
        return torch.cuda.max_memory_allocated() - start

    assert peak(checkpoint_policies.save_only_these_names("hidden")) > 10 * size
    assert peak(checkpoint_policies.offload_only_these_names("hidden")) < 7 * size
