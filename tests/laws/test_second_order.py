"""Second derivatives under every transform, against differences of first ones in float64: torch.func is no oracle for them.

Law: whatever the order of `vmap`, `grad`, `jacrev` and `jacfwd`, and whether autograd or a trace differentiates, the result is
the derivative of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.ir.trace import subtraces

Tensor = torch.Tensor
Case = Callable[[Tensor, Tensor, Tensor], Tensor]

EYE = 3 * torch.eye(2, dtype=torch.float64)
CASES: dict[str, tuple[Case, int, int]] = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x.view(2, 3) * w, (3,), w, b), 6, 3),
    "batch_norm": (lambda x, w, b: F.batch_norm(x.view(3, 2), None, None, w, b, True), 6, 2),
    "instance_norm": (lambda x, w, b: F.instance_norm(x.view(2, 2, 3), None, None, w, b), 12, 2),
    "group_norm": (lambda x, w, b: F.group_norm(x.view(1, 4, 2), 2, w, b), 8, 4),
    "rms_norm": (lambda x, w, b: F.rms_norm(x.view(2, 3), (3,), w), 6, 3),
    "silu": (lambda x, w, b: F.silu(x), 3, 1),
    "mish": (lambda x, w, b: F.mish(x), 3, 1),
    "solve": (lambda x, w, b: torch.linalg.solve(x.view(2, 2) + EYE, w), 4, 2),
    "slogdet": (lambda x, w, b: torch.linalg.slogdet(x.view(2, 2) + EYE)[1], 4, 1),
    "cumprod": (lambda x, w, b: x.cumprod(0), 3, 1),
    "rfft": (lambda x, w, b: torch.view_as_real(torch.fft.rfft(x)), 4, 1),
}


def loss_of(case: Case, n: int, k: int) -> Callable[[Tensor], Tensor]:
    def loss(packed: Tensor) -> Tensor:
        y = case(packed[:n], packed[n : n + k], packed[n + k :]).flatten()
        return (y.sin() * torch.arange(1.0, 1.0 + y.numel(), dtype=y.dtype)).sum()

    return loss


def hessian_by_differences(loss: Callable[[Tensor], Tensor], x: Tensor, step: float = 1e-5) -> Tensor:
    def gradient(at: Tensor) -> Tensor:
        leaf = at.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    steps = step * torch.eye(x.numel(), dtype=x.dtype)
    return torch.stack([(gradient(x + one) - gradient(x - one)) / (2 * step) for one in steps])


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name: str) -> None:
    case, n, k = CASES[name]
    loss = loss_of(case, n, k)
    xs, vs = (torch.randn(2, n + 2 * k, dtype=torch.float64) for _ in range(2))
    hessians = torch.stack([hessian_by_differences(loss, x) for x in xs])
    along = torch.einsum("bij,bj->bi", hessians, vs)

    def dotted(gradients: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda xs: (gradients(xs) * vs).sum()

    def by_autograd(gradients: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = xs.clone().requires_grad_()
        dotted(gradients)(leaf).backward()
        assert leaf.grad is not None
        return leaf.grad

    each: Any = tfn.vmap(tfn.grad(loss))
    found = {
        "vmap(hessian)": (tfn.vmap(tfn.hessian(loss))(xs), hessians),
        "vmap(jacrev(jacrev))": (tfn.vmap(tfn.jacrev(tfn.jacrev(loss)))(xs), hessians),
        "grad(vmap(grad))": (tfn.grad(dotted(each))(xs), along),
        "vmap(jvp(grad))": (tfn.vmap(lambda x, v: tfn.jvp(tfn.grad(loss), (x,), (v,))[1])(xs, vs), along),
        "backward of vmap(grad)": (by_autograd(each), along),
        "backward of jit(vmap(grad))": (by_autograd(tfn.jit(each)), along),
        "backward of grad": (by_autograd(lambda xs: torch.stack([tfn.grad(loss)(x) for x in xs])), along),
        "torch.func.grad of grad": (
            torch.stack(
                [torch.func.grad(lambda x, v=v: tfn.grad(loss)(x) @ v)(x) for x, v in zip(xs, vs, strict=True)]
            ),
            along,
        ),
    }
    for text, (mine, expected) in found.items():
        torch.testing.assert_close(mine, expected, rtol=2e-5, atol=2e-5, msg=lambda m, text=text: f"{text}: {m}")


@pytest.mark.parametrize("outer", ["jacrev", "jacfwd"])
@pytest.mark.parametrize("inner", ["jacrev", "jacfwd"])
def test_second_derivatives_where_a_formula_divides_by_zero(outer: str, inner: str) -> None:
    """Autograd's is NaN for sinc at 0, and torch.func's is 0."""
    hessian = getattr(tfn, outer)(getattr(tfn, inner)(torch.sinc))
    found = tfn.vmap(hessian)(torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64))
    steps = torch.tensor([-1e-4, 0.0, 1e-4], dtype=torch.float64)
    before, at, after = (torch.sinc(torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64) + step) for step in steps)
    torch.testing.assert_close(found, (before - 2 * at + after) / 1e-8, rtol=1e-5, atol=1e-6)


MATRICES = {
    "equal singular values": torch.eye(3),
    "two equal ones": torch.diag(torch.tensor([0.5, 0.5, 2.0])),
    "rank n - 1": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]),
    "rank n - 2": torch.diag(torch.tensor([2.0, 0.0, 0.0])),
    "regular": torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 3.0], [2.0, 0.0, 1.0]]),
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_derivatives_of_determinants(matrix: str) -> None:
    """torch.func's second ones are NaN where singular values are equal, and `backward()` is zero where the determinant
    is. Differences are exact for a polynomial of degree 3.
    """
    A, det = MATRICES[matrix].double(), torch.linalg.det
    moves = 0.01 * torch.eye(9, dtype=A.dtype).view(9, 3, 3)
    slope = (det(A + moves) - det(A - moves)) / 0.02
    for first in (tfn.grad(det), tfn.jacfwd(det), tfn.jit(tfn.grad(det))):
        torch.testing.assert_close(first(A).flatten(), slope)
    batch = torch.stack([A, torch.eye(3, dtype=A.dtype), A])
    torch.testing.assert_close(tfn.vmap(tfn.grad(det))(batch)[::2].flatten(1), torch.stack([slope, slope]))
    a, b = moves[:, None], moves[None, :]
    wanted = (det(A + a + b) - det(A + a - b) - det(A - a + b) + det(A - a - b)) / 4e-4
    hessians = [outer(inner(det)) for outer in (tfn.jacrev, tfn.jacfwd) for inner in (tfn.jacrev, tfn.jacfwd)]
    for hessian in hessians:
        for found in (hessian(A), *tfn.vmap(hessian)(torch.stack([A, A]))):
            torch.testing.assert_close(found.view(9, 9), wanted)


PLACES = torch.tensor([0, 0, 2, 0])
PRODUCTS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "scatter_reduce": lambda x, own: x[:3].scatter_reduce(0, PLACES, x[3:], "prod", include_self=own),
    "index_reduce": lambda x, own: x[:3].index_reduce(0, PLACES, x[3:], "prod", include_self=own),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("zeros", [(), (3,), (3, 4), (0, 3), (3, 4, 6)])
@pytest.mark.parametrize("op", PRODUCTS)
def test_second_derivatives_of_products_with_zeros(op: str, zeros: tuple[int, ...], own: bool) -> None:
    """Autograd refuses two zeros in a product; its gradient is right, so differences of that are the oracle."""
    x = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    x[list(zeros)] = 0.0

    def loss(x: Tensor) -> Tensor:
        return (PRODUCTS[op](x, own).sin() * torch.arange(1.0, 4.0, dtype=x.dtype)).sum()

    expected = hessian_by_differences(loss, x)
    for outer in (tfn.jacrev, tfn.jacfwd):
        for inner in (tfn.jacrev, tfn.jacfwd):
            torch.testing.assert_close(outer(inner(loss))(x), expected, rtol=1e-5, atol=1e-6)


def _runs(x: Tensor) -> Tensor:
    rows = [x[0]]
    for row in x[1:]:
        rows.append(rows[-1] * row)
    return torch.stack(rows)


RUNS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "prod": (torch.prod, lambda x: _runs(x)[-1]),
    "prod of a dim": (lambda x: torch.stack([x, x.cos()], 1).prod(0)[:1], lambda x: _runs(x)[-1:]),
    "cumprod": (lambda x: x.cumprod(0), _runs),
}
ORDERS = [*itertools.product(("rev", "fwd"), repeat=2), ("rev", "fwd", "rev"), ("fwd", "fwd", "fwd")]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("op", RUNS)
def test_higher_derivatives_of_products_at_zeros_for_all_sizes(op: str, order: tuple[str, ...]) -> None:
    """From the third call on sizes are symbols. The oracle multiplies element by element."""

    def derivative(lib: Any, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        found: Any = lambda x: (run(x).sin() * torch.arange(1.0, 1.0 + x.shape[0], dtype=x.dtype)).sum()
        for way in reversed(order):
            found = getattr(lib, "jac" + way)(found)
        return found

    run, slow = RUNS[op]
    found, expected = derivative(tfn, run), derivative(torch.func, slow)
    for size, zeros in ((2, [0]), (3, [0]), (4, [1, 3]), (5, [0, 1, 4])):
        x = torch.linspace(0.5, 1.5, size, dtype=torch.float64)
        x[zeros] = 0.0
        torch.testing.assert_close(found(x), expected(x), rtol=1e-9, atol=1e-9)


GROWING: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": torch.prod,
    "cumprod": lambda x: x.cumprod(0),
    "scatter_reduce": lambda x: torch.ones(2).scatter_reduce(0, torch.arange(len(x)) % 2, x, "prod"),
    "index_reduce": lambda x: torch.ones(2).index_reduce(0, torch.arange(len(x)) % 2, x, "prod"),
}


@pytest.mark.parametrize("name", GROWING)
def test_traces_of_derivatives_of_products_grow_with_the_logarithm_of_the_size(name: str) -> None:
    def count(size: int) -> int:
        once = tfn.grad(lambda x: GROWING[name](x).sin().sum())
        trace = tfn.trace(tfn.grad(lambda x: once(x).sin().sum()), torch.rand(size))
        return sum(len(each.equations) for each in subtraces(trace))

    small, middle, large = map(count, (8, 32, 128))
    assert large - middle <= middle - small < small
