"""Structured equations under autograd that the traced function calls itself."""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import check, evaluate, grad, linearize, trace
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
