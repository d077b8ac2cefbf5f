"""Kernels of other libraries that read memory: what their callers made contiguous is so in every program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

import thunder_fn as tfn

W = torch.linspace(-1, 2, 6).reshape(3, 2)
X = torch.linspace(-2, 1, 6).reshape(2, 3).sin()


@torch.library.custom_op("kernel_test::twice", mutates_args=())
def kernel(x: Tensor) -> Tensor:
    """Reads the elements from memory, whatever their strides."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) * 2


@kernel.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return kernel(grad.contiguous())


kernel.register_autograd(_backward)


@torch.library.custom_op("kernel_test::sum", mutates_args=())
def summed(xs: list[Tensor], scale: float) -> Tensor:
    """Reads from memory too, of several tensors."""
    return sum(torch.as_strided(x, (x.numel(),), (1,)).view(x.shape) for x in xs) * scale  # type: ignore[return-value]


@summed.register_fake
def _(xs: list[Tensor], scale: float) -> Tensor:
    return torch.empty_like(xs[0], memory_format=torch.contiguous_format)


class Wrapped(torch.autograd.Function):
    """An autograd function around a kernel without a formula."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return summed([x.contiguous()], 2.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return summed([grad.contiguous(), grad.contiguous()], 1.0)


Twice = Callable[[Tensor], Tensor]
CALLED: dict[str, Twice] = {
    "custom op": lambda x: kernel(x.contiguous()),
    "autograd function": Wrapped.apply,  # type: ignore[dict-item]
}
PROGRAMS: dict[str, Callable[[Twice, Tensor], Tensor]] = {
    "transposed gradient": lambda twice, x: (twice(x).t() * W).sin().sum(),
    "expanded gradient": lambda twice, x: twice(x).sum(),
    "einsum": lambda twice, x: torch.einsum("ij,jk->ki", twice(x), W).pow(2).sum(),
    "transposed argument": lambda twice, x: (twice(x.t() * W).sin() * W).sum(),
    "a chain": lambda twice, x: (twice(twice(x.sin()).t()).sin() * W).sum(),
    "matrix product": lambda twice, x: (twice(x).t() @ x).t().sin().sum(),
}


def backward(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    f(x).backward()
    assert x.grad is not None
    return x.grad


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: tfn.grad(f)(x),
    "jit(grad)": lambda f, x: tfn.jit(tfn.grad(f), executors=["torch"])(x),
    "backward of jit": lambda f, x: backward(tfn.jit(f, executors=["torch"]), x),
    "of many sizes": lambda f, x: backward(tfn.jit(f, executors=["torch"], cache="symbolic values"), x),
    "inductor": lambda f, x: backward(tfn.jit(f, executors=["inductor", "torch"]), x),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_read_what_they_read_in_eager_mode(name: str, called: str, way: str) -> None:
    f = lambda x: PROGRAMS[name](CALLED[called], x)
    for x in (X, X.t().contiguous().t()):
        torch.testing.assert_close(WAYS[way](f, x), backward(f, x))


@pytest.mark.parametrize("called", CALLED)
def test_a_program_for_arguments_of_any_layout(called: str) -> None:
    jitted = tfn.jit(CALLED[called], executors=["torch"])
    for x in (X, X.t().contiguous().t(), X.expand(2, 2, 3)[0], torch.stack([X, X], -1)[..., 0]):
        torch.testing.assert_close(jitted(x), x * 2)


@pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")
def test_second_derivatives_and_batches() -> None:
    f = lambda x: (kernel(x.sin()).t() * W).sin().sum()
    wanted = lambda x: ((x.sin() * 2).t() * W).sin().sum()
    torch.testing.assert_close(tfn.hessian(f)(X), func.hessian(wanted)(X))
    xs = torch.stack([X, X + 1])
    torch.testing.assert_close(tfn.vmap(tfn.grad(f))(xs), func.vmap(func.grad(wanted))(xs))
