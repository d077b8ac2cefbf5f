"""Batching rules for symbolic batch sizes: one program for all of them, and what a loop over the examples gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.jitted import cache_info, jit

Tensor = torch.Tensor
F = torch.nn.functional
w = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

RULES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "conv1d": (lambda x: F.conv1d(x[None], w[..., 0], stride=2), (3, 8)),
    "conv2d": (lambda x: F.conv2d(x[None], w, padding=1), (3, 6, 6)),
    "conv2d of a weight for each": (lambda x: F.conv2d(w[:2, :, :2, :2].repeat(1, 1, 3, 3), x.view(2, 3, 2, 2)), (24,)),
    "groups": (lambda x: F.conv2d(x.view(1, 6, 3, 3), x[:48].view(4, 3, 2, 2), x[:4], groups=2), (54,)),
    "transposed": (lambda x: F.conv_transpose2d(x.view(1, 4, 3, 3), w * x[0], stride=2), (36,)),
    "max_pool2d": (lambda x: F.max_pool2d(x[None], 2), (3, 6, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (3, 6, 6)),
    "avg_pool2d of a batch": (lambda x: F.avg_pool2d(x, 2), (2, 3, 6, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x[None], 2), (3, 6, 6)),
    "gather": (lambda x: x.gather(-1, x.argsort(1)), (4, 5)),
    "gather from one": (lambda x: w.view(4, 27).gather(1, x.argsort(1)), (4, 5)),
    "scatter": (lambda x: torch.zeros_like(x).scatter(0, x.argsort(0), x) + x.scatter(1, x.argsort(1)[:, :2], 1.5), (4, 5)),
    "scatter_add": (lambda x: x.new_zeros(4, 5).scatter_add(1, x.argsort(1), x.exp()), (4, 5)),
    "cross_entropy": (lambda x: F.cross_entropy(x, x.argmax(1)), (4, 5)),
    "topk": (lambda x: x.topk(2)[0], (4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("shapes", [((3, 1), (3, 1)), ((2, 3, 2), (4, 2)), ((1, 3, 2), (2, 4, 2))])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_the_jacobian_of_distances(p: float, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Functorch's rule reads one example's cotangent for all, where the points are the same."""
    points = tuple(
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for shape in shapes
    )
    f = lambda a, b: torch.cdist(a, 2 * b, p=p)
    torch.testing.assert_close(tfn.jacrev(f, (0, 1))(*points), torch.autograd.functional.jacobian(f, points))


@pytest.mark.parametrize("name", RULES)
def test_one_program_for_all_batch_sizes(name: str) -> None:
    f, shape = RULES[name]
    loss = lambda x: f(x).pow(2).sum()
    g = jit(lambda x: (tfn.vmap(f)(x), tfn.vmap(tfn.grad(loss))(x)), dynamic={"x": {0: True}})
    torch.manual_seed(0)
    for count in (3, 7, 5):
        x = torch.randn(count, *shape, dtype=torch.float64)
        values, gradients = g(x)
        torch.testing.assert_close(values, torch.stack([f(row) for row in x]))
        torch.testing.assert_close(gradients, torch.stack([torch.func.grad(loss)(row) for row in x]))
    assert cache_info(g).misses == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_a_number_is_copied_into_each_example(dtype: torch.dtype) -> None:
    """PyTorch's `copy_` takes a number, which has no dtype that could be changed."""
    x = torch.arange(6).reshape(3, 2).to(dtype)
    for f in (lambda u: u.clone().copy_(3), lambda u: u.clone()[0].copy_(True), lambda u: u.t().clone().copy_(2.5)):
        for around in (lambda g: g, tfn.jit):
            assert torch.equal(around(tfn.vmap(f))(x), torch.func.vmap(f)(x))


OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "a leaf": lambda: torch.randn(3, 2, dtype=torch.float64),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64)),
    "a result": lambda: torch.randn(3, 2, dtype=torch.float64, requires_grad=True).tanh(),
    "a view of a result": lambda: torch.randn(2, 6, dtype=torch.float64, requires_grad=True).tanh().t()[::2],
    "a view of a leaf": lambda: torch.randn(6, 2, dtype=torch.float64, requires_grad=True)[1::2],
    "an expanded result": lambda: torch.randn(3, 1, dtype=torch.float64, requires_grad=True).exp().expand(3, 2),
}
GIVEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "vmap": (lambda c: tfn.vmap(lambda row: row.sin().sum())(c), lambda c: c.sin().sum(1)),
    "vmap of columns": (lambda c: tfn.vmap(lambda v: v.sin() * v[0], -1, 1)(c), lambda c: c.sin() * c[:1]),
    "vmap of grad": (lambda c: tfn.vmap(tfn.grad(lambda row: row.sin().sum()))(c), lambda c: c.cos()),
    "associative_scan": (lambda c: tfn.associative_scan(torch.mul, c, 0), lambda c: c.cumprod(0)),
    "map": (lambda c: tfn.map(lambda row: row.cos(), c, batch_size=2), lambda c: c.cos()),
    "scan": (lambda c: tfn.scan(lambda s, row: (s + row, s * row), c[0], c)[1], lambda c: (c.cumsum(0) - c + c[0]) * c),
    "grad": (lambda c: tfn.grad(lambda c: c.pow(3).sum())(c), lambda c: 3 * c * c),
}


@pytest.mark.parametrize("place", OUTSIDE)
@pytest.mark.parametrize("name", GIVEN)
def test_what_a_transform_is_given_inside_may_come_from_outside(name: str, place: str) -> None:
    """From a jitted function or a gradient around, a tensor that is closed over is a batch as an argument is."""
    torch.manual_seed(0)
    c, x = OUTSIDE[place](), torch.ones((), dtype=torch.float64)
    ours, plain = GIVEN[name]
    torch.testing.assert_close(jit(lambda x: x * ours(c))(x), plain(c))
    torch.testing.assert_close(tfn.grad(lambda x: (x * ours(c)).sum())(x), plain(c).sum())
    if c.requires_grad:
        wanted = torch.autograd.grad(plain(c).sum(), c)
        torch.testing.assert_close(torch.autograd.grad(jit(lambda x: x * ours(c))(x).sum(), c), wanted)


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (x.shape[-1],)), (5,)),
    "layer_norm of a matrix": (lambda x: F.layer_norm(x, x.shape[1:], x[0].sin(), x[1]), (3, 5)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (4, 3)),
    "group_norm": (lambda x: F.group_norm(x, 2), (2, 4, 3)),
}


@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_a_batch_of_gradients_of_a_norm(name: str, cache: Any) -> None:
    """The saved statistics follow from an input that all cotangents share, or that is batched, too."""
    norm, shape = NORMS[name]
    torch.manual_seed(0)
    x, cotangents = torch.randn(shape, dtype=torch.float64), torch.randn(3, *shape, dtype=torch.float64)
    xs = torch.randn(3, *shape, dtype=torch.float64)

    def pulled(y: Tensor, x: Tensor, cotangent: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(y, x, cotangent.view_as(y), create_graph=True)
        return gradient

    def wanted(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        rows = x if x.dim() > len(shape) else [x, x, x]
        total = sum((pulled(norm(row), row, c).sin() * c).sum() for row, c in zip(rows, cotangents, strict=True))
        return torch.autograd.grad(total, x)[0]

    vjp = lambda x, c: tfn.vjp(lambda x: norm(x).view_as(x), x)[1](c)[0].sin() * c
    of_one = tfn.grad(lambda x, c: tfn.vmap(vjp, (None, 0))(x, c).sum())
    of_each = tfn.grad(lambda x, c: tfn.vmap(vjp)(x, c).sum())
    torch.testing.assert_close(jit(of_one, cache=cache)(x, cotangents), wanted(x))
    torch.testing.assert_close(jit(of_each, cache=cache)(xs, cotangents), wanted(xs))


ADDRESSES: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda x: (x * 2).as_strided((2, 2), (3, 1), 1),
    "as_strided of an argument": lambda x: x.as_strided((3, 2), (1, 2)),
    "as_strided_scatter": lambda x: (x * 2).as_strided_scatter(x[:4].view(2, 2), (2, 2), (2, 1), 1),
    "group_norm": lambda x: F.group_norm(x.view(1, 2, 3), 2),
    "weight_norm": lambda x: torch._weight_norm(x.view(3, 2), x[:3, None] * 1, 0),
    "median": lambda x: x.view(2, 3).t().median(0)[0],
}


@pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")
@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ADDRESSES)
def test_an_op_that_reads_memory_reads_that_of_its_example(name: str, dim: int, cache: str) -> None:
    """Law: a batch of values and of gradients is those of the examples, though each is a part of one memory."""
    f = ADDRESSES[name]
    both = lambda x: (f(x), tfn.grad(lambda x: (f(x) * f(x).sin()).sum())(x))
    batched = jit(tfn.vmap(both, dim), cache=cache)
    for size in (2, 3):
        x = torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
        wanted = [torch.stack(parts) for parts in zip(*(both(row.clone()) for row in x), strict=True)]
        torch.testing.assert_close(list(batched(x.movedim(0, dim))), wanted)


@pytest.mark.parametrize("affine", ["one", "of each example"])
def test_running_statistics_have_no_derivative_in_a_batch(affine: str) -> None:
    """Law: a sum of running statistics has the gradient zero, and those that are written require none, as without a batch."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 2, 3).requires_grad_()
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)

    def run(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        found = mean.clone(), var.clone()
        return F.batch_norm(x, *found, scale.expand(3), None, True), *found

    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    if affine == "one":
        batched = lambda x: tfn.vmap(lambda x: run(x, scales[0]))(x)
    else:
        batched = lambda x: tfn.vmap(lambda scale: run(x[0], scale))(scales)
    assert [one.requires_grad for one in batched(x)] == [True, False, False]
    gradient = tfn.grad(lambda x: sum(one.sin().sum() for one in batched(x)[1:]))
    torch.testing.assert_close(gradient(x.detach()), torch.zeros_like(x))
