"""Writes by `.data`, of which autograd's version counters know nothing: as in eager code, whoever is jitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_fn as tfn


class Put(torch.autograd.Function):
    """Writes to a part of its argument without a count and returns it, as adaptive solvers do."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.index = index
        memory.data[index] = value
        return memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad[ctx.index], None


def both(x: Tensor) -> None:
    x.data.mul_(2)
    x.detach().add_(1)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "data.mul_": lambda x: x.data.mul_(2),
    "data.copy_": lambda x: x.data.copy_(torch.arange(3.0)),
    "data[0] =": lambda x: x.data.__setitem__(0, 5.0),
    "data of a view": lambda x: x[1:].data.add_(1),
    "a view of data": lambda x: x.data[1:].add_(1),
    "detach().mul_": lambda x: x.detach().mul_(2),
    "both": both,
}
TENSORS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "a leaf": lambda: (w := torch.ones(3, requires_grad=True), w),
    "a result": lambda: (w := torch.ones(3, requires_grad=True), w * 3),
    "no gradient": lambda: (torch.ones(3, requires_grad=True), torch.full((3,), 2.0)),
}


def outcome(write: Callable[[Tensor], object], tensor: str) -> tuple[Any, ...]:
    """The value after the write, whether it was counted, and the gradient of a graph that saved the tensor before."""
    leaf, x = TENSORS[tensor]()
    y = (x * x * leaf).sum()
    write(x)
    try:
        y.backward()
    except RuntimeError as error:
        return x.tolist(), x._version > 0, str(error).partition(":")[0]
    assert leaf.grad is not None
    return x.tolist(), x._version > 0, leaf.grad.tolist()


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("write", WRITES)
def test_a_graph_from_before_takes_what_eager_takes(write: str, tensor: str) -> None:
    f = WRITES[write]
    expected = outcome(f, tensor)
    jitted = tfn.jit(f)
    for _ in range(3):
        assert outcome(jitted, tensor) == expected
    held: list[Tensor] = []
    closing = tfn.jit(lambda: (f(held[0]), None)[1])

    def closed(x: Tensor) -> None:
        held[:] = [x]
        closing()

    assert outcome(closed, tensor) == expected


STEPS: tuple[Callable[..., Any], ...] = (
    lambda k, x: Put.apply(k, x, (..., 0)),
    lambda k: (k[..., :1] * 2).sum(-1).tanh(),
    lambda k, y: Put.apply(k, y, (..., 1)),
)


@pytest.mark.parametrize("jitted", ["0", "1", "2", "01", "12", "02", "012"])
def test_steps_of_a_solver_in_parts(jitted: str) -> None:
    def gradient(first: Any, middle: Any, last: Any) -> Tensor:
        x = torch.linspace(0.1, 0.6, 6).view(3, 2).requires_grad_()
        k = first(torch.zeros(3, 2, 3), x)
        k = last(k, middle(k))
        z = last(k, k[..., 0].sin())
        (grad,) = torch.autograd.grad((z[..., :2] * torch.tensor([1.0, 2.0])).sum(), x)
        return grad

    steps = [tfn.jit(f) if str(i) in jitted else f for i, f in enumerate(STEPS)]
    for _ in range(2):
        torch.testing.assert_close(gradient(*steps), gradient(*STEPS))


def test_buffers_of_modules() -> None:
    class Average(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin() + self.mean
            self.mean.data.mul_(0.5).add_(x.detach())
            return y

    ours, eager = tfn.jit(Average()), Average()
    for i in range(3):
        x, twin = (torch.full((3,), i + 1.0, requires_grad=True) for _ in range(2))
        for y in (ours(x), eager(twin)):
            y.sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        torch.testing.assert_close(ours.mean, eager.mean)
        assert ours.mean._version == eager.mean._version
