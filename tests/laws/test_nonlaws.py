"""Pairs that do not commute, each with a witness. A test here that fails says that they do now: make it a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.interpreters.autocast import autocast
from thunder_fn.interpreters.fold import fold_constants
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.testing.laws.interpreters import pull
from thunder_fn.testing.laws.unfolding import unfolded

Tensor = torch.Tensor


def lowering(*names: str) -> Callable[[Trace], Trace]:
    """Autocast of these ops to bfloat16."""

    def policy(equation: Equation) -> Any:
        return "lower" if equation.op.name in names else None

    return lambda trace: autocast(trace, torch.bfloat16, policy)


def differ(first: Trace, second: Trace, *inputs: Tensor) -> bool:
    """Two traces give different values, and not only in type."""
    pairs = zip(tfn.evaluate(first, inputs), tfn.evaluate(second, inputs), strict=True)
    return any(not torch.equal(a.float(), b.float()) for a, b in pairs)


def test_folding_before_autocast_computes_with_constants_in_full_precision() -> None:
    lower = lowering("aten.mul.Tensor")
    trace = tfn.trace(lambda x: x + torch.tensor([1.1, 2.3]) * torch.tensor([3.7, 0.9]), torch.ones(2))
    assert differ(lower(fold_constants(trace)), fold_constants(lower(trace)), torch.ones(2))


def test_a_loop_under_autocast_keeps_the_types_of_its_carries_its_unrolled_steps_do_not() -> None:
    lower = lowering("aten.sin.default")

    def f(x: Tensor) -> Tensor:
        return tfn.scan(lambda carry, _: ((carry * 1.1 + 0.37).sin(), ()), x, None, length=3)[0]

    trace = tfn.trace(f, torch.ones(50))
    assert differ(lower(unfolded(trace)), unfolded(lower(trace)), torch.linspace(0.1, 3, 50))


def test_autocast_of_a_gradient_does_not_cast_what_only_the_gradient_computes() -> None:
    lower = lowering("aten.sin.default")
    trace, x, ones = tfn.trace(torch.sin, torch.ones(2)), torch.tensor([0.3, 1.7]), torch.ones(2)
    (_, of_gradient), (_, of_function) = (
        tfn.evaluate(lower(pull(trace)), (x, ones)),
        tfn.evaluate(pull(lower(trace)), (x, ones.bfloat16())),
    )
    assert of_gradient.dtype == of_function.dtype and not torch.equal(of_gradient, of_function)


def test_autocast_of_a_batch_asks_about_other_ops() -> None:
    lower = lowering("aten.dot.default")
    x, y = torch.tensor([[0.3, 1.7], [2.1, 0.4]]), torch.tensor([[1.1, 0.7], [0.2, 0.9]])
    trace = tfn.trace(torch.dot, x[0], y[0])
    batch = lambda trace: tfn.interpreters.vmap.vmap(trace, (0, 0), 2)[0]
    assert differ(lower(batch(trace)), batch(lower(trace)), x, y)


def test_a_batch_with_numbers_of_its_own_is_no_loop_over_one_generator() -> None:
    """vmap draws for all examples at once, a loop for one after the other."""
    drop = lambda x: torch.rand_like(x) + 2 * torch.rand_like(x)
    torch.manual_seed(0)
    batch = tfn.vmap(drop, randomness="different")(torch.ones(2, 20))
    torch.manual_seed(0)
    assert not torch.equal(batch, torch.stack([drop(torch.ones(20)), drop(torch.ones(20))]))
