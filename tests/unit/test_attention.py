"""Derivatives of `scaled_dot_product_attention` beyond PyTorch's own: values stay the kernel's, batches are one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func as tf
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import vjp
from thunder_fn.ir.trace import Trace

MASK = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
MASK[2] = -float("inf")
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True).sin().sum(),
    "a query that sees nothing": lambda q: (
        F.scaled_dot_product_attention(
            q, k := torch.cat([q, q[..., :2, :].sin()], -2), k.cos(), attn_mask=MASK.to(q.dtype)
        )
        .sin()
        .sum()
    ),
    "a query that may see nothing": lambda q: (
        F.scaled_dot_product_attention(
            q, k := torch.cat([q, q[..., :2, :].sin()], -2), k.cos(), attn_mask=MASK > 0, scale=0.3
        )
        .sin()
        .sum()
    ),
}
WAYS: dict[str, Callable[[Any, Any], Callable[[Tensor], Tensor]]] = {
    "jvp": lambda f, api: lambda q: api.jvp(f, (q,), (q.cos(),))[1],
    "grad of grad": lambda f, api: api.grad(lambda q: (api.grad(f)(q) * q.cos()).sum()),
    "jvp of grad": lambda f, api: lambda q: api.jvp(api.grad(f), (q,), (q.cos(),))[1],
    "third": lambda f, api: api.grad(lambda q: api.grad(lambda q: (api.grad(f)(q) * q.cos()).sum())(q).sum()),
}


def names(trace: Trace) -> list[str]:
    """All leaf ops, however deep."""
    return [name for one in trace.equations for name in ([one.op.name] if one.op.kind == "leaf" else names(one.body))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_derivatives_of_any_order(loss: str, way: str, requires_grad: bool) -> None:
    f, q = LOSSES[loss], torch.randn(2, 3, 5, 4, dtype=torch.float64).requires_grad_(requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = WAYS[way](f, tf)(q.detach())
    torch.testing.assert_close(tfn.jit(WAYS[way](f, tfn))(q).detach(), wanted)


def test_values_beside_tangents_are_the_kernels() -> None:
    q = torch.randn(2, 3, 5, 4)
    attend = lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos())
    value, _ = tfn.jvp(attend, (q,), (q,))
    assert torch.equal(value, attend(q))


def test_what_is_differentiated_once_more_still_runs_the_kernels() -> None:
    q = torch.randn(2, 3, 5, 4)
    forward, _ = tfn.linearize(tfn.grad(LOSSES["causal"]), q)
    assert torch.equal(forward, tfn.grad(LOSSES["causal"])(q))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_is_one_call(loss: str) -> None:
    f, q = LOSSES[loss], torch.randn(4, 2, 3, 5, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batched = tfn.trace(tfn.vmap(tfn.grad(f)), q)
    assert sum("flash_attention" in name for name in names(batched)) == 2
    torch.testing.assert_close(tfn.vmap(tfn.grad(f))(q), torch.stack([tfn.grad(f)(one) for one in q]))


def test_a_mask_for_each_example_is_one_call() -> None:
    q, masks = torch.randn(2, 3, 5, 4), torch.randn(4, 5, 5)
    f = lambda mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert sum("flash_attention" in name for name in names(tfn.trace(tfn.vmap(f), masks))) == 1
    torch.testing.assert_close(tfn.vmap(f)(masks), torch.stack([f(mask) for mask in masks]))


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 5, 7), (1, 7)])
@pytest.mark.parametrize("wanted", [(False, False, False, True), (True, True, True, True), (False, True, False, True)])
def test_a_mask_is_differentiated_after_the_capture(shape: tuple[int, ...], wanted: tuple[bool, ...]) -> None:
    """PyTorch chooses the kernel for CPUs where no mask requires grad, as in a capture, and has no gradient of its mask."""
    given = [torch.randn(*size, dtype=torch.float64) for size in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), shape)]
    attend = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    leaves = [one.clone().requires_grad_(flag) for one, flag in zip(given, wanted, strict=True)]
    y, ct = attend(*leaves), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], ct)
    found = evaluate(vjp(capture(attend, tuple(given)).trace, wanted, (True,)), [*given, ct])
    torch.testing.assert_close(list(found), [y.detach(), *expected])
