"""Loops whose steps are all one Triton kernel: while_loop, carries of integers and bools, every op a step may have."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import thunder_fn as tfn

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy, in the padding


def is_one_kernel(f: Callable[..., Any], *args: Tensor) -> None:
    """Check a loop on the simulated GPU against the same loop in PyTorch on the CPU."""
    jitted = tfn.jit(f, executors=["inductor"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", tfn.errors.RegionWarning)
        found, wanted = jitted(*(x.cuda() for x in args)), f(*args)
    assert "by inductor, all steps of" in str(tfn.last_traces(jitted)[-1])
    for mine, plain in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(mine.cpu(), plain, rtol=1e-4, atol=1e-5, equal_nan=True)


def roots(x: Tensor) -> Any:
    """Newton's method, with a count of its steps."""
    more = lambda i, y, x: ((y * y - x).abs().max() > 1e-4).logical_and(i < 50)
    body = lambda i, y, x: (i + 1, (y + x / y) * 0.5, x)
    return tfn.while_loop(more, body, (torch.zeros((), dtype=torch.int64, device=x.device), x, x))


def solved(matrix: Tensor, b: Tensor) -> Tensor:
    """Conjugate gradients; how small the rest is depends on the order of sums."""

    def body(x: Tensor, r: Tensor, p: Tensor, size: Tensor) -> tuple[Tensor, ...]:
        image = matrix @ p
        alpha = size / p.dot(image)
        x, r = x + alpha * p, r - alpha * image
        return x, r, r + r.dot(r) / size * p, r.dot(r)

    start = torch.zeros_like(b), b, b, b.dot(b)
    return tfn.while_loop(lambda x, r, p, size: size > 1e-8, body, start)[0]


def counted(n: Tensor) -> Any:
    """Integers and bools: how long each takes to come down to one."""
    alive = n > 1
    step = lambda n, alive, count: (
        torch.where(alive, n - 1, n),
        (n > 2).logical_and(alive),
        count + alive.sum(),
    )
    start = n, alive, torch.zeros((), dtype=torch.int64, device=n.device)
    return tfn.while_loop(lambda n, alive, count: alive.any(), step, start)


def bounded(max_steps: int) -> Callable[[Tensor], Any]:
    return lambda x: tfn.while_loop(lambda x: x.norm() > 0.1, lambda x: (x * 0.5,), (x,), max_steps=max_steps)


def matrix(size: int) -> Tensor:
    square = torch.randn(size, size)
    return square @ square.t() + size * torch.eye(size)


WHILES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]] = {
    "roots": (roots, lambda: (torch.rand(5) + 1,)),
    "no step": (roots, lambda: (torch.ones(5),)),
    "conjugate gradients": (solved, lambda: (matrix(5), torch.randn(5))),
    "integers and bools": (counted, lambda: (torch.tensor([3, 9, 5]),)),
    "large integers": (counted, lambda: (torch.tensor([1, 3]) + 2**40 * torch.tensor([-1, 0]),)),
    "three steps": (bounded(3), lambda: (torch.ones(3, 3),)),
    "fewer than allowed": (bounded(30), lambda: (torch.ones(3, 3),)),
    "none allowed": (bounded(0), lambda: (torch.ones(3, 3),)),
}


@pytest.mark.parametrize("name", WHILES)
def test_all_steps_of_a_while_loop_are_one_kernel(name: str) -> None:
    """The condition is on the GPU, so nobody waits for it."""
    f, args = WHILES[name]
    is_one_kernel(f, *args())


def test_a_large_step_is_no_such_kernel() -> None:
    run = tfn.jit(roots, executors=["inductor"])
    x = torch.rand(5000) + 1
    torch.testing.assert_close(run(x.cuda())[1].cpu(), roots(x)[1])
    assert "all steps of" not in str(tfn.last_traces(run)[-1])


ANY = ("c + x", "c - x", "3 * c", "x - 2 * c", "-c", "c.abs()", "c * c", "torch.maximum(c, x)", "torch.minimum(c, x)")
ANY += ("c.sum()", "c.sum(0)", "(c > x).sum(1, keepdim=True)", "(c > 1).any(1)", "c.all()", "(c == c).all(0)")
ANY += ("c.clamp(-1, 2)", "c.clamp(min=x)", "c.clamp_max(1)", "torch.where(c > x, c, x)", "torch.where(c > 0, c, -1)")
ANY += ("c < 2", "c >= 1.5", "c != x", "c.float() / 3", "c / 2", "c.bool()", "c.to(torch.int32)", "c.logical_not()")
ANY += ("(c > 0) & (x > 0)", "(c > 0) | (x > 0)", "(c > 0) ^ (x > 0)", "~(c > 0)", "c.logical_xor(x)", "c ** 2")
ANY += ("c.t()", "c.reshape(1, 3, 5)", "x[None].expand(2, 3, 5)", "torch.full_like(c, 2)", "torch.zeros_like(c)")
FLOATS = (
    "c.mean(1)",
    "c.amax(1)",
    "c.amin((0, 1))",
    "c.max()",
    "x.min()",
    "c.norm()",
    "torch.linalg.vector_norm(x, dim=1)",
)
FLOATS += (
    "c.isnan()",
    "c.sqrt().amax(1)",
    "c.sqrt().clamp(0.1, 1)",
    "c.relu()",
    "c.long()",
    "c.sigmoid()",
    "c @ x.t()",
)
BOOLS = ("c & x", "c | x", "c ^ x", "~c", "c.sum()", "c.sum(1)", "c.any(0)", "c.all()", "c.long() + x", "c.float() * 2")
BOOLS += ("torch.where(c, x, c)", "c == x", "c.logical_and(x)", "torch.ones_like(c)", "torch.full_like(c, False)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.int32, torch.bool])
def test_every_op_of_a_step(dtype: torch.dtype) -> None:
    """On sizes that have padding, with the carry, a slice and numbers."""
    texts = BOOLS if dtype == torch.bool else ANY + FLOATS * dtype.is_floating_point
    ops = [eval(f"lambda c, x: {text}", {"torch": torch}) for text in texts]
    c, xs = (torch.randn(3, 5) * 2).to(dtype), (torch.randn(2, 3, 5) * 2).to(dtype)
    if dtype == torch.int64:
        c, xs = c * (2**40 + 1), xs * (2**33 + 1)
    for some in (ops[start : start + 12] for start in range(0, len(ops), 12)):
        is_one_kernel(lambda c, xs, some=some: tfn.scan(lambda c, x: (x, tuple(op(c, x) for op in some)), c, xs), c, xs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity(value: float) -> None:
    """They stay in comparisons, extremes and bounds as in PyTorch."""
    x = torch.tensor([1.0, value, -2.0])
    ops = (lambda x: x.max(), lambda x: x.min(), lambda x: x.clamp(-1, 1), lambda x: x > 0, lambda x: (x == x).all())
    is_one_kernel(lambda x: tfn.scan(lambda c, _: (c, tuple(op(c) for op in ops)), x, torch.zeros(2).to(x)), x)
