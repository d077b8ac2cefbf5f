"""Transforms of transforms as people use them: per-sample gradients, ensembles, products with Hessians."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

import thunder_fn as tfn

Tensor = torch.Tensor


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(functional_call(MODEL, parameters, (x,)), y)


MODEL = model()
PARAMETERS = {name: value.detach() for name, value in MODEL.named_parameters()}
XS, YS = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)

PER_SAMPLE: dict[str, Callable[[Any], Any]] = {
    "vmap of grad": lambda f: tfn.vmap(tfn.grad(f), (None, 0, 0)),
    "vmap of grad of jit": lambda f: tfn.vmap(tfn.grad(tfn.jit(f)), (None, 0, 0)),
    "jit of vmap of grad": lambda f: tfn.jit(tfn.vmap(tfn.grad(f), (None, 0, 0))),
    "vmap of jit of grad": lambda f: tfn.vmap(tfn.jit(tfn.grad(f)), (None, 0, 0)),
    "in chunks": lambda f: tfn.vmap(tfn.grad(f), (None, 0, 0), chunk_size=2),
    "of a checkpoint": lambda f: tfn.vmap(tfn.grad(tfn.checkpoint(f)), (None, 0, 0)),
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_per_sample_gradients(name: str) -> None:
    expected = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(PARAMETERS, XS, YS)
    torch.testing.assert_close(PER_SAMPLE[name](loss)(PARAMETERS, XS, YS), expected)


def test_gradient_of_a_batch_is_the_sum_of_per_sample_gradients() -> None:
    whole = tfn.grad(lambda p: tfn.vmap(loss, (None, 0, 0))(p, XS, YS).sum())(PARAMETERS)
    each = tfn.vmap(tfn.grad(loss), (None, 0, 0))(PARAMETERS, XS, YS)
    torch.testing.assert_close(whole, {name: value.sum(0) for name, value in each.items()})


@pytest.mark.parametrize("jit", [lambda f: f, tfn.jit], ids=["plain", "jit"])
def test_ensembles(jit: Any) -> None:
    models = [copy.deepcopy(MODEL) for _ in range(3)]
    for index, one in enumerate(models):
        torch.manual_seed(index)
        for parameter in one.parameters():
            nn.init.normal_(parameter)
    parameters, buffers = stack_module_state(models)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return functional_call(MODEL, (parameters, buffers), (x,))

    with torch.no_grad():
        found = jit(tfn.vmap(call, (0, 0, None)))(parameters, buffers, XS)
        torch.testing.assert_close(found, torch.stack([one(XS) for one in models]))
    gradients = jit(tfn.vmap(tfn.grad(lambda p, b, x: call(p, b, x).sum()), (0, 0, None)))(parameters, buffers, XS)
    for index, one in enumerate(models):
        wanted = torch.autograd.grad(one(XS).sum(), list(one.parameters()))
        torch.testing.assert_close([value[index].detach() for value in gradients.values()], list(wanted))


def scalar(x: Tensor) -> Tensor:
    return (x.sin() @ x.cos()) * (x**3).sum()


HVPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward over reverse": lambda x, v: tfn.jvp(tfn.grad(scalar), (x,), (v,))[1],
    "reverse over forward": lambda x, v: tfn.grad(lambda x: tfn.jvp(scalar, (x,), (v,))[1])(x),
    "reverse over reverse": lambda x, v: tfn.vjp(tfn.grad(scalar), x)[1](v)[0],
    "linearized": lambda x, v: tfn.linearize(tfn.grad(scalar), x)[1](v),
    "jitted": lambda x, v: tfn.jit(lambda x, v: tfn.jvp(tfn.grad(tfn.jit(scalar)), (x,), (v,))[1])(x, v),
    "of a checkpoint": lambda x, v: tfn.jvp(tfn.grad(tfn.checkpoint(scalar)), (x,), (v,))[1],
    "whole": lambda x, v: tfn.hessian(scalar)(x) @ v,
    "in lower precision nowhere": lambda x, v: tfn.jvp(tfn.grad(tfn.autocast(scalar)), (x,), (v,))[1],
}


@pytest.mark.parametrize("name", HVPS)
def test_hessian_vector_products(name: str) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    torch.testing.assert_close(HVPS[name](x, v), torch.autograd.functional.hessian(scalar, x) @ v)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_gradients_through_random_batches(randomness: str) -> None:
    def f(library: Any) -> Callable[[Tensor], Tensor]:
        drop = lambda x: nn.functional.dropout(x, 0.5) * x
        return lambda xs: library.vmap(drop, randomness=randomness)(xs).sum()

    torch.manual_seed(3)
    expected = torch.func.grad(f(torch.func))(XS)
    for grad in (tfn.grad(f(tfn)), tfn.jit(tfn.grad(f(tfn))), tfn.grad(tfn.jit(f(tfn)))):
        torch.manual_seed(3)
        torch.testing.assert_close(grad(XS), expected)


def test_jacobians_of_jacobians() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, dtype=torch.float64)
    f = lambda x: torch.linalg.solve(x.outer(x) + 2 * torch.eye(3, dtype=x.dtype), x.sin())
    expected = torch.func.jacrev(torch.func.jacrev(f))(x)
    for outer in (tfn.jacfwd, tfn.jacrev):
        for inner in (tfn.jacfwd, tfn.jacrev):
            torch.testing.assert_close(outer(inner(f))(x), expected)


def test_zero_tangents_of_forward_ad_are_plain_zeros() -> None:
    """PyTorch's are tensors without memory, which a program could not compute in place of."""
    w, x = torch.randn(4, 3), torch.randn(2, 4)
    loss: Callable[..., torch.Tensor] = lambda w, x: nn.functional.mse_loss(torch.tanh(x @ w), torch.zeros(2, 3))
    hessian = tfn.jacfwd(tfn.grad(loss))
    assert "_efficientzerotensor" not in str(tfn.trace(hessian, w, x))
    torch.testing.assert_close(tfn.jit(hessian)(w, x), torch.func.hessian(loss)(w, x))


F = torch.nn.functional
ATTENTION = torch.nn.MultiheadAttention(4, 2, batch_first=True).double().requires_grad_(False)
LABELS = torch.tensor([[0, 1, -1, 2], [1, -1, 0, 0], [3, 2, 1, 0]])
FUSED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "heads that share keys": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :2].sin(), x[:, :2].cos(), enable_gqa=True),
        (1, 4, 2, 3),
    ),
    "MultiheadAttention": (lambda x: ATTENTION(x, x, x, need_weights=False)[0], (2, 2, 4)),
    "multi_margin_loss": (lambda x: F.multi_margin_loss(x, LABELS[2, :3], p=2, reduction="none").sin(), (3, 4)),
    "multilabel_margin_loss": (lambda x: F.multilabel_margin_loss(x, LABELS, reduction="none").sin(), (3, 4)),
    "glu": (F.glu, (3, 4)),
    "weight_norm": (lambda x: torch._weight_norm(x, x[:, :1].exp(), 0), (3, 4)),
}


@pytest.mark.parametrize("name", FUSED)
def test_second_derivatives_of_fused_ops(name: str) -> None:
    f, shape = FUSED[name]
    x, v = torch.randn((2, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(x: Tensor) -> Tensor:
        y = f(x)
        return (y * torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()).sum().sin()

    def eager(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    def push(g: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda x: tfn.jvp(g, (x,), (v,))[1]

    gradient, second = eager(x), (eager(x + 1e-5 * v) - eager(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(tfn.vmap(loss)(torch.stack([x, v])), torch.stack([loss(x), loss(v)]))
    torch.testing.assert_close(tfn.vmap(tfn.grad(loss))(torch.stack([x, v])), torch.stack([gradient, eager(v)]))
    torch.testing.assert_close(push(loss)(x), (gradient * v).sum())
    forward_reverse = push(tfn.grad(loss))
    reverse_reverse = tfn.grad(lambda x: (tfn.grad(loss)(x) * v).sum())
    for hvp in (forward_reverse, reverse_reverse, tfn.grad(push(loss))):
        torch.testing.assert_close(hvp(x), second, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(tfn.vmap(hvp)(x[None])[0], second, rtol=1e-4, atol=1e-6)


HINGES: dict[str, Callable[[Tensor], Tensor]] = {
    "multi_margin_loss": lambda x: F.multi_margin_loss(x[None], LABELS[0, 1:2]),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, LABELS[1]),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, x.detach().new_tensor([-1, 1, -1, 1])),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x[:2], x[2:], x.detach().new_tensor([1, -1])),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach().new_tensor([0, 1, 2, 0])),
    "huber_loss": lambda x: F.huber_loss(x, x.detach().new_tensor([0, 1, 2, 0])),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x[None, :2], x[None, 2:], -x.detach().new_ones(1)),
}


@pytest.mark.parametrize("name", HINGES)
def test_derivatives_where_a_loss_has_a_corner(name: str) -> None:
    """They are those of PyTorch's kernels, whatever formula stands for a kernel."""
    f = HINGES[name]
    for x in torch.tensor([[-0.5, 2, 1, 0], [0, 1, 1, 0], [1, 0, 2, 1], [-1, -1, 0, 1]], dtype=torch.float64):
        leaf = x.clone().requires_grad_()
        gradient = torch.autograd.grad(f(leaf), leaf)[0]
        torch.testing.assert_close(tfn.grad(f)(x), gradient)
        torch.testing.assert_close(tfn.vmap(tfn.grad(f))(x[None])[0], gradient)
        torch.testing.assert_close(tfn.jacfwd(f)(x), gradient)
        torch.testing.assert_close(tfn.vmap(tfn.jacfwd(f))(x[None])[0], gradient)


# ---- third derivatives of normalizations, which PyTorch has wrong: its formulas take saved statistics for constants ----


def normal(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + 1e-5).sqrt()


SCALES, SHIFTS = torch.tensor([0.7, 1.3, 0.9]).double(), torch.tensor([0.1, -0.4, 0.2]).double()
NORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "layer_norm": (
        lambda x: nn.functional.layer_norm(x, (3,), SCALES, SHIFTS),
        lambda x: normal(x, (-1,)) * SCALES + SHIFTS,
    ),
    "layer_norm of two dims": (lambda x: nn.functional.layer_norm(x, (4, 3)), lambda x: normal(x, (-2, -1))),
    "instance_norm": (nn.functional.instance_norm, lambda x: normal(x, (-1,))),
    "batch_norm": (
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: normal(x, (0, 2)),
    ),
    "group_norm": (
        lambda x: nn.functional.group_norm(x, 2),
        lambda x: normal(x.unflatten(1, (2, 2)), (-2, -1)).flatten(1, 2),
    ),
}


def along(lib: Any, f: Callable[[Tensor], Tensor], v: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """The derivative of a scalar function along v, by either mode."""
    return {
        "grad": lambda x: (lib.grad(f)(x) * v).sum(),
        "jvp": lambda x: lib.jvp(f, (x,), (v,))[1],
    }


@pytest.mark.parametrize("modes", ("grad grad grad", "grad jvp grad", "jvp grad grad", "jvp jvp grad", "jvp grad jvp"))
@pytest.mark.parametrize("name", NORMS)
def test_third_derivatives_of_normalizations(name: str, modes: str) -> None:
    torch.manual_seed(0)
    x, v = torch.randn(2, 2, 4, 3).double()
    found = []
    for lib, f in zip((tfn, torch.func), NORMS[name], strict=True):
        third: Callable[[Tensor], Tensor] = lambda x, f=f: (f(x) ** 3).sum()
        for mode in reversed(modes.split()):
            third = along(lib, third, v)[mode]
        found.append(third(x))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_second_derivatives_of_normalizations_are_eager_s(dtype: torch.dtype) -> None:
    """To the bit: what differentiates further is not what computes."""
    x, w = torch.randn(5, 8, dtype=dtype), torch.rand(8, dtype=dtype)
    f: Any = lambda x, w: nn.functional.layer_norm(x, (8,), w).sin().sum()
    squares: Any = lambda grads: sum(grad.float().square().sum() for grad in grads)
    found = tfn.grad(lambda x, w: squares(tfn.grad(f, (0, 1))(x, w)), (0, 1))(x, w)
    leaves = [leaf.clone().requires_grad_() for leaf in (x, w)]
    squares(torch.autograd.grad(f(*leaves), leaves, create_graph=True)).backward()
    assert all(torch.equal(a, leaf.grad) for a, leaf in zip(found, leaves, strict=True) if leaf.grad is not None)


SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "logsigmoid at 0": (nn.functional.logsigmoid, [0.0, 1.0, 30.0]),
    "cumprod of zeros": (lambda x: x.cumprod(0), [2.0, 0.0, 3.0, 0.0, 4.0]),
    "eigh": (lambda x: torch.linalg.eigh(x + x.mT)[1].square(), [[3.0, 1.0], [0.2, 1.0]]),
    "eig": (lambda x: torch.linalg.eig(x)[1].abs(), [[3.0, 1.0], [0.2, 1.0]]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_derivatives_of_forward_mode(name: str) -> None:
    """Forward mode differentiated again is reverse mode twice, where formulas divide by zero or select."""
    f, values = SPECIAL[name]
    x = torch.tensor(values, dtype=torch.float64)
    total = lambda x: (f(x) * torch.linspace(1, 2, f(x).numel(), dtype=x.dtype).reshape(f(x).shape)).sum()
    want = torch.autograd.functional.hessian(total, x)
    for transform in (lambda f: tfn.jacrev(tfn.jacfwd(f)), lambda f: tfn.jacfwd(tfn.jacfwd(f)), tfn.hessian):
        torch.testing.assert_close(transform(total)(x), want)
