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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.derived.quirks import attention_orders
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
    "grad of jvp": lambda f, api: api.grad(lambda q: api.jvp(f, (q,), (q.cos(),))[1]),
    "jvp of jvp": lambda f, api: lambda q: api.jvp(lambda q: api.jvp(f, (q,), (q.cos(),))[1], (q,), (q.sin(),))[1],
    "batched": lambda f, api: api.vmap(lambda q: api.jvp(api.grad(f), (q[None],), (q.cos()[None],))[1]),
    "third": lambda f, api: api.grad(lambda q: api.grad(lambda q: (api.grad(f)(q) * q.cos()).sum())(q).sum()),
}


def names(trace: Trace) -> list[str]:
    """All leaf ops, however deep."""
    return [name for one in trace.equations for name in ([one.op.name] if one.op.kind == "leaf" else names(one.body))]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_derivatives_of_any_order(loss: str, way: str, requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_orders.ELEMENTS, "cpu", 15)  # two or three queries of one head in a block
    f, q = LOSSES[loss], torch.randn(2, 3, 5, 4, dtype=torch.float64).requires_grad_(requires_grad)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = WAYS[way](f, tf)(q.detach())
        if wanted.isnan().any():  # PyTorch's own, of a query that sees nothing
            assert way == "grad of jvp" and "nothing" in loss
            wanted = by_differences(WAYS["jvp"](f, tf), q.detach())
    torch.testing.assert_close(tfn.jit(WAYS[way](f, tfn))(q).detach(), wanted)


def by_differences(f: Callable[[Tensor], Tensor], q: Tensor, step: float = 1e-5) -> Tensor:
    moves = torch.eye(q.numel(), dtype=q.dtype).view(-1, *q.shape) * step
    return torch.stack([(f(q + move) - f(q - move)) / (2 * step) for move in moves]).view_as(q)


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


def by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def pairs(values: Any, others: Any) -> Any:
    return sum((a * b).sum() for a, b in zip(values, others, strict=True))


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "jvp": lambda api, f: lambda x, t, u: api.jvp(f, x, t)[1],
    "gradient of a jvp": lambda api, f: (
        lambda x, t, u: api.grad(lambda x, t: api.jvp(f, x, t)[1].sin().sum(), argnums=(0, 1))(x, t)
    ),
    "jvp of a gradient": lambda api, f: (
        lambda x, t, u: api.jvp(api.grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 2)), x, t)[1]
    ),
    "gradient of a gradient": lambda api, f: (
        lambda x, t, u: api.grad(
            lambda *x: pairs(api.grad(lambda *x: f(*x).sin().sum(), argnums=(0, 1, 2))(*x), t), argnums=(0, 1, 2)
        )(*x)
    ),
    "third": lambda api, f: (
        lambda x, t, u: api.jvp(lambda *x: api.grad(lambda *x: api.jvp(f, x, t)[1].sin().sum())(*x), x, u)[1]
    ),
}


@pytest.mark.parametrize("heads", [4, 2], ids=["own", "shared"])
@pytest.mark.parametrize("order", ORDERS)
def test_keys_and_values_of_their_own(order: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_orders.ELEMENTS, "cpu", 40)
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    x, t, u = (tuple(torch.randn(2, count, 5, 6, dtype=torch.float64) for count in (4, heads, heads)) for _ in range(3))
    torch.testing.assert_close(ORDERS[order](tfn, attend)(x, t, u), ORDERS[order](tf, by_definition)(x, t, u))
    assert "softmax" not in str(tfn.trace(ORDERS[order](tfn, attend), x, t, u)) or order == "third"


@pytest.mark.parametrize("order", ORDERS)
def test_masks_that_are_differentiated_beside_them(order: str) -> None:
    mask = torch.randn(5, 5, dtype=torch.float64)
    x, t, u = (tuple(torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(3)) for _ in range(3))
    of_mask = lambda api, f: api.grad(
        lambda mask: sum(one.sin().sum() for one in tree_leaves(ORDERS[order](api, f(mask))(x, t, u)))
    )(mask)
    attend = lambda mask: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    plain = lambda mask: lambda q, k, v: by_definition(q, k, v, mask)
    torch.testing.assert_close(of_mask(tfn, attend), of_mask(tf, plain))


def test_memory_of_tangents_and_second_derivatives_is_linear() -> None:
    """All weights of 4,096 queries are 64 MB; no tensor is a tenth of that."""
    sizes = list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            sizes.extend(one.untyped_storage().nbytes() for one in tree_leaves(result) if isinstance(one, Tensor))
            return result

    parts = (torch.randn(1, 1, 4096, 4) for _ in range(8))
    q, k, v, *tangents = parts
    of = attention_orders.Attention(q, k, v, None, True, None, *tangents)
    with Sizes():
        for formula in attention_orders.FORMULAS.values():
            attention_orders.in_blocks(formula, of)
    assert 2**20 < max(sizes) < 6.4e6
