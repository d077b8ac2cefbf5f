"""Attention of every order on each of PyTorch's kernels, beside its definition in float64."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.func as tf
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_fn as tfn
from thunder_fn.errors import MissingRule

KERNELS = {
    SDPBackend.EFFICIENT_ATTENTION: (torch.float32, torch.bfloat16),
    SDPBackend.FLASH_ATTENTION: (torch.bfloat16, torch.float16),
    SDPBackend.CUDNN_ATTENTION: (torch.bfloat16, torch.float16),
    SDPBackend.MATH: (torch.float32,),
}
CASES = [
    pytest.param(kernel, dtype, masked, requires_grad, id=f"{kernel.name}-{dtype}-{masked=}-{requires_grad=}")
    for kernel, dtypes in KERNELS.items()
    for dtype in dtypes
    for masked in (False, True)
    for requires_grad in (False, True)
    if not (masked and kernel is SDPBackend.FLASH_ATTENTION)
]
LENGTH = 37
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def loss(q: Tensor, masked: bool) -> Tensor:
    """Attention of 37 queries, so that what kernels pad is seen, to keys and values of other numbers."""
    mask = (
        torch.linspace(-1, 1, LENGTH * LENGTH, device=q.device).reshape(LENGTH, LENGTH).to(q.dtype) if masked else None
    )
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), attn_mask=mask, is_causal=not masked).sin().sum()


def looped(q: Tensor, masked: bool) -> Tensor:
    total = q.new_zeros(())
    for _ in range(3):
        q = q * 0.9
        total = total + loss(q, masked)
    return total


def scanned(q: Tensor, masked: bool) -> Tensor:
    return tfn.scan(lambda c, _: (c * 0.9, loss(c * 0.9, masked)), q, None, length=3)[1].sum()


def second(grad: Any, f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return grad(lambda q: (grad(f)(q) * q.cos()).sum())


def forward(jvp: Any, f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: jvp(f, (q,), (q.cos(),))[1]


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "grad": lambda f, api: api.grad(f),
    "jvp": lambda f, api: forward(api.jvp, f),
    "grad of grad": lambda f, api: second(api.grad, f),
    "jvp of grad": lambda f, api: forward(api.jvp, api.grad(f)),
    "grad of jvp": lambda f, api: api.grad(forward(api.jvp, f)),
    "grad of checkpoint": lambda f, api: api.grad(f if api is tf else tfn.checkpoint(f)),
}


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm())


def reference(f: Callable[[Tensor], Tensor], q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return f(q.detach().double().cpu())


def some(dtype: torch.dtype, requires_grad: bool) -> Tensor:
    # Drawn on the CPU: the same numbers on every GPU.
    return torch.randn(2, 2, LENGTH, 16).to("cuda", dtype).requires_grad_(requires_grad)


@pytest.mark.parametrize(("kernel", "dtype", "masked", "requires_grad"), CASES)
def test_derivatives(kernel: SDPBackend, dtype: torch.dtype, masked: bool, requires_grad: bool) -> None:
    q, f = some(dtype, requires_grad), lambda q: loss(q, masked)
    with sdpa_kernel(kernel):
        assert torch.equal(tfn.jit(f)(q), f(q)), "the kernel is eager's"
        found = {name: tfn.jit(way(f, tfn))(q) for name, way in WAYS.items()}
    wrong = {name: far(value, reference(WAYS[name](f, tf), q)) for name, value in found.items()}
    assert all(error < TOLERANCE[dtype] for error in wrong.values()), wrong


@pytest.mark.parametrize(("kernel", "dtype", "masked", "requires_grad"), CASES)
def test_batches_are_one_call(kernel: SDPBackend, dtype: torch.dtype, masked: bool, requires_grad: bool) -> None:
    q = torch.stack([some(dtype, False) for _ in range(3)]).requires_grad_(requires_grad)
    f = lambda q: loss(q, masked)
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {name: tfn.jit(tfn.vmap(way(f, tfn)))(q) for name, way in WAYS.items()}
    for name, value in found.items():
        wanted = torch.stack([reference(WAYS[name](f, tf), example) for example in q])
        assert far(value, wanted) < TOLERANCE[dtype], name


@pytest.mark.parametrize(("kernel", "dtype", "masked", "requires_grad"), CASES)
def test_scan_bodies(kernel: SDPBackend, dtype: torch.dtype, masked: bool, requires_grad: bool) -> None:
    q = some(dtype, requires_grad)
    with sdpa_kernel(kernel):
        got = tfn.jit(tfn.grad(lambda q: scanned(q, masked)))(q)
    assert far(got, reference(tf.grad(lambda q: looped(q, masked)), q)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel is not SDPBackend.MATH])
@pytest.mark.parametrize("wrapped", ["plain", "checkpoint", "scan"])
def test_dropout_is_eagers(kernel: SDPBackend, wrapped: str) -> None:
    q = some(KERNELS[kernel][0], False)
    drop = lambda q: F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.5).sin().sum()
    loop = lambda q: drop(q) + drop(q * 0.5)
    scan = lambda q: tfn.scan(lambda c, _: (c * 0.5, drop(c)), q, None, length=2)[1].sum()
    f = {"plain": loop, "checkpoint": tfn.checkpoint(loop), "scan": scan}[wrapped]
    with sdpa_kernel(kernel):
        torch.manual_seed(3)
        mine = tfn.jit(tfn.grad(f))(q)
        torch.manual_seed(3)
        leaf = q.clone().requires_grad_()
        (eager,) = torch.autograd.grad(loop(leaf), leaf)
    assert far(mine, eager) < TOLERANCE[q.dtype]


def test_the_first_call_of_a_process_is_traced_once(tmp_path: Path) -> None:
    """PyTorch changes the order of its kernels in the first call of one, on some GPUs."""
    script = tmp_path / "first.py"
    script.write_text(
        """
import torch
import thunder_fn as tfn
from torch.nn.functional import scaled_dot_product_attention

q = torch.randn(1, 2, 16, 8, device="cuda")
f = tfn.jit(lambda q: scaled_dot_product_attention(q, q, q).sin())
for _ in range(2):
    torch.testing.assert_close(f(q), scaled_dot_product_attention(q, q, q).sin())
assert tfn.cache_info(f).misses == 1, tfn.cache_info(f)
"""
    )
    subprocess.run([sys.executable, str(script)], check=True)


def test_dropout_has_no_second_derivative() -> None:
    q = some(torch.float32, False)
    drop = lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        for f in (second(tfn.grad, drop), forward(tfn.jvp, drop)):
            with pytest.raises(MissingRule, match="with dropout has a first derivative in reverse mode only"):
                tfn.trace(f, q)


def test_a_log_sum_exp_that_nothing_reads_is_not_computed() -> None:
    q = some(torch.float32, False)
    f = lambda q: loss(q, False)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        plain, pulled = tfn.jit(f), tfn.jit(tfn.grad(f))
        plain(q), pulled(q)
    asked = [
        line
        for jitted in (plain, pulled)
        for line in str(tfn.last_traces(jitted)[-1]).splitlines()
        if "efficient" in line
    ]
    assert [", False" in line for line in asked if "_backward" not in line and "= aten" in line] == [True, False]
