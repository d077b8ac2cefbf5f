"""Group norm's kernels refuse tensors that are neither contiguous nor channels last, strides of sizes of one included."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn

SHAPE = (1, 8, 2, 3)
LAYOUTS = {
    "contiguous": (48, 6, 3, 1),
    "channels last": (48, 1, 24, 8),
    "another batch stride": (8, 1, 24, 8),
    "transposed": (48, 6, 1, 2),
    "expanded": (48, 6, 0, 1),
}


def group_norm(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 4)


@pytest.mark.parametrize("captured", LAYOUTS)
@pytest.mark.parametrize("given", LAYOUTS)
def test_a_trace_takes_every_layout(captured: str, given: str) -> None:
    """Whatever layout it was captured with: layouts are no part of a type."""
    sample, x = (torch.randn(64).as_strided(SHAPE, LAYOUTS[layout]) for layout in (captured, given))
    forward = tfn.trace(group_norm, sample)
    backward = tfn.trace(tfn.grad(lambda x: group_norm(x).pow(3).sum()), sample)
    leaf = x.clone().requires_grad_()
    group_norm(leaf).pow(3).sum().backward()
    (found,) = tfn.evaluate(forward, [x])
    (gradient,) = tfn.evaluate(backward, [x])
    torch.testing.assert_close(found, group_norm(x))
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-4, atol=1e-5)


def test_what_an_attention_returns_in_another_batch_stride() -> None:
    """Computed in place of it, a sum has its strides; eager's sum has those of channels last."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x.view(1, 8, 6).transpose(1, 2) @ w).view(6, 1, 8).permute(1, 2, 0).reshape(SHAPE)
        return group_norm(y + x)

    x, w = torch.randn(SHAPE, requires_grad=True), torch.randn(8, 8)
    found, expected = tfn.jit(block)(x, w), block(x, w)
    torch.testing.assert_close(found, expected)
    for mine, its in zip(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
