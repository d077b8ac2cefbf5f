"""Structured equations under autograd that the traced function calls itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_fn import check, custom_jvp, custom_vjp, evaluate, grad, linearize, trace
from thunder_fn.structured.cond import cond

Tensor = torch.Tensor
WEIGHT = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [0.1, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)


def model(x: Tensor) -> Tensor:
    return cond(x.sum() > 0, lambda x: (x @ WEIGHT).sin(), lambda x: x * 2, (x,)).sum()


def plain_model(x: Tensor) -> Tensor:
    return ((x @ WEIGHT).sin() if x.sum() > 0 else x * 2).sum()


def gradients(f: Any, create_graph: bool) -> Any:
    return lambda x: torch.autograd.grad(f(x), (x, WEIGHT), create_graph=create_graph)


def inputs() -> list[Tensor]:
    return [
        torch.rand(2, 3, dtype=torch.float64).requires_grad_(),
        (-torch.rand(2, 3, dtype=torch.float64)).requires_grad_(),
    ]


def same(xs: Any, ys: Any) -> None:
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y)


def test_a_closed_over_parameter_that_requires_grad() -> None:
    for x in inputs():
        program = trace(model, x)
        check(program)
        same(evaluate(program, [x]), [plain_model(x)])
        same([grad(model)(x)], torch.autograd.grad(plain_model(x), x))


def test_gradients_inside_keep_the_equation_and_give_it_residuals() -> None:
    program = trace(gradients(model, False), inputs()[0])
    check(program)
    assert sum(equation.op.name == "cond" for equation in program.equations) == 2
    for x in inputs():
        expected = torch.autograd.grad(plain_model(x), (x, WEIGHT), allow_unused=True)
        found = evaluate(program, [x])
        same(found, [torch.zeros_like(f) if e is None else e for f, e in zip(found, expected, strict=True)])


def test_gradients_of_gradients_inside_and_outside() -> None:
    x = inputs()[0]

    def penalty(f: Any) -> Any:
        return lambda x: gradients(f, True)(x)[0].pow(2).sum()

    def inner(x: Tensor) -> Tensor:
        return torch.autograd.grad(penalty(model)(x), x)[0]

    expected = torch.autograd.grad(penalty(plain_model)(x), x)
    program = trace(inner, x)
    check(program)
    same(evaluate(program, [x]), expected)
    same([grad(penalty(model))(x)], expected)


def test_linearize_through_a_choice() -> None:
    for x in inputs():
        v = torch.randn_like(x)
        value, linear = linearize(model, x.detach())
        expected, tangent = torch.func.jvp(plain_model, (x.detach(),), (v,))
        same([value, linear(v)], [expected, tangent])


# ---- custom rules where plain autograd looks ----


@custom_vjp
def scaled_sine(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


scaled_sine.defvjp(
    lambda x, y: (scaled_sine(x, y), (x.cos(), x.sin(), y)), lambda kept, ct: (ct * kept[0] * kept[2], ct * kept[1])
)


@custom_jvp
def scaled_sine_forwards(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


scaled_sine_forwards.defjvp(
    lambda primals, tangents: (
        scaled_sine_forwards(*primals),
        primals[0].cos() * primals[1] * tangents[0] + primals[0].sin() * tangents[1],
    )
)


@pytest.mark.parametrize("f", [scaled_sine, scaled_sine_forwards])
def test_second_derivatives_of_a_custom_rule_by_autograd(f: Any) -> None:
    """The values that the rule keeps depend on the operands."""
    x, y = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([0.3, 1.2], [2.0, 3.0]))
    (slope,) = torch.autograd.grad(f(x, y).sum(), x, create_graph=True)
    same(torch.autograd.grad(slope.sum(), (x, y)), (-x.sin() * y, x.cos()))
    assert torch.autograd.functional.hessian(lambda x: f(x, x).sum(), x).shape == (2, 2)


@pytest.mark.parametrize("f", [scaled_sine, scaled_sine_forwards])
def test_torch_func_sees_a_custom_rule(f: Any) -> None:
    x, y = torch.tensor([0.3, 1.2], dtype=torch.float64), torch.tensor([2.0, 3.0], dtype=torch.float64)
    ones = torch.ones_like(x)
    same([torch.func.jvp(f, (x, y), (ones, ones))[1]], [x.cos() * y + x.sin()])
    same([torch.func.vmap(torch.func.grad(torch.func.grad(f)))(x, y)], [-x.sin() * y])


def test_a_custom_function_may_return_its_argument() -> None:
    double = custom_vjp(lambda x: x)
    double.defvjp(lambda x: (x, (x,)), lambda kept, ct: (ct * 2,))
    x = torch.ones(2, requires_grad=True)
    same(torch.autograd.grad(double(x).sum(), x), [torch.full((2,), 2.0)])


def test_second_derivatives_see_the_random_numbers_of_the_first() -> None:
    noisy = custom_vjp(lambda x: x * torch.rand_like(x))

    def forward(x: Tensor) -> Any:
        noise = torch.rand_like(x)
        return x.pow(2) * noise, (noise * x,)

    noisy.defvjp(forward, lambda kept, ct: (ct * 2 * kept[0],))
    x = torch.full((4,), 3.0, requires_grad=True)
    value = noisy(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    same([slope, curve], [2 * value / 3, 2 * value / 9])
