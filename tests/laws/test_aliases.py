"""Tensors that share memory: writes, views, `detach`, `.data` and `no_grad` in any order mean what autograd makes of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeAlias

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import thunder_fn as tfn

Tensor = torch.Tensor
Step: TypeAlias = tuple[str, int, int, bool]


def _set_data(x: Tensor, other: Tensor) -> None:
    x.data = other if other.shape == x.shape else x.data * 2


def _copy_part(x: Tensor, other: Tensor) -> None:
    x.flatten()[0:1].copy_(other.flatten()[-1:]) if x.is_contiguous() else x.mul_(1.5)


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[-1:],
    "flat": lambda x: x.view(-1) if x.is_contiguous() else x.t(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "twice": lambda x: x * 2,
    "detached strided": lambda x: x.detach().as_strided((2,), (1,)) if x.is_contiguous() and x.numel() > 1 else x.t(),
    "strided": lambda x: x.as_strided((2,), (1,)) if x.is_contiguous() and x.numel() > 1 else x.t(),
    "detached row": lambda x: x.detach()[:1],
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_": lambda x, other: x.mul_(3.0),
    "add_": lambda x, other: x.add_(other.sum() * 0.5),
    "set data": _set_data,
    "copy part": _copy_part,
    "detach_": lambda x, other: x.detach_(),
    "ge_": lambda x, other: x.ge_(other.mean()),
    "logical_not_": lambda x, other: x.logical_not_() if not torch.is_grad_enabled() else None,
    "t_": lambda x, other: x.t_(),
    "as_strided_": lambda x, other: x.as_strided_(x.shape[::-1], x.stride()[::-1]),
}
steps = st.lists(
    st.tuples(st.sampled_from([*MAKES, *CHANGES]), st.integers(0, 5), st.integers(0, 5), st.booleans()),
    min_size=1,
    max_size=6,
)


def program(steps: list[Step]) -> Callable[[Tensor], Tensor]:
    """The steps as a function: each makes a tensor of one in the pool, or changes one, perhaps where gradients are off."""

    def f(x: Tensor) -> Tensor:
        pool, turned = [x * 1.0], False
        for name, first, second, is_off in steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            with torch.no_grad() if is_off else nullcontext():
                turned |= name in ("t_", "as_strided_")  # a tracer becomes a view of what it was
                if name in ("set data", "detach_") and (
                    turned or a._base is not None or any(v._base is a for v in pool)
                ):
                    continue  # to autograd they are still views of each other, with one history or memory or not
                if is_off and name in ("t_", "as_strided_"):
                    continue  # autograd does not see that the shape of the gradient changes
                if name in MAKES:
                    pool.append(MAKES[name](a))
                else:
                    CHANGES[name](a, b)
        return torch.stack([(value * value).sum() * (i + 1) for i, value in enumerate(pool)]).sum()

    return f


def by_autograd(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    value = f(leaf)
    gradient = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
    return value.detach(), torch.zeros_like(x) if gradient is None else gradient


@given(steps)
def test_writes_mean_what_autograd_makes_of_them(steps: list[Step]) -> None:
    f, x = program(steps), torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    try:
        known = by_autograd(f, x)
    except RuntimeError:  # autograd refuses the program, as it does an in-place change of a view that no_grad made
        return
    value, gradient = tfn.value_and_grad(f)(x.clone())
    torch.testing.assert_close((value, gradient), known)
    torch.testing.assert_close(by_autograd(tfn.jit(f), x), known)


@given(steps)
def test_arguments_change_as_eager_changes_them(steps: list[Step]) -> None:
    """A leaf that requires grad may be changed where gradients are off; what it then means is the same in jit."""

    def changes(x: Tensor) -> Tensor:
        for name, _, _, is_off in steps:
            with torch.no_grad():
                part = (x.detach() if is_off else x)[:1] if name in MAKES else x
                CHANGES.get(name, CHANGES["mul_"])(part, part.detach())
        return (x * x).sum()

    def run(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaf = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3).requires_grad_()
        value = f(leaf) * 2 + leaf.sum()
        return value.detach(), leaf.detach().clone(), torch.autograd.grad(value, leaf)[0]

    if any(name in ("detach_", "set data", "t_", "as_strided_") for name, *_ in steps):
        return  # of a leaf, the first does nothing but end its requires_grad, and the others give it other memory or shape
    torch.testing.assert_close(run(tfn.jit(changes)), run(changes))


def test_rows_of_an_embedding_are_scaled_without_a_gradient() -> None:
    def f(w: Tensor) -> Tensor:
        return torch.nn.functional.embedding(torch.tensor([0, 1, 0]), w * 1.0, max_norm=1.0).square().sum()

    w = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(tfn.value_and_grad(f)(w), by_autograd(f, w))


def test_a_leaf_that_gets_another_history_cannot_be_written() -> None:
    p = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        tfn.jit(lambda p: p.mul_(2).sum())(p)
    assert p.tolist() == [1, 1]
