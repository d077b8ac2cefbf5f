"""simplify and its parts: same bits, fewer equations, no memory shared that was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

import thunder_fn as tfn
from tests.unit.small_traces import TRACES, example_inputs, same_bits
from thunder_fn import simplify
from thunder_fn.interpreters.fold import fold_constants
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.strategies import Case, cases

Tensor = torch.Tensor
PARTS = (drop_noops, fold_constants, simplify)
WEIGHT = torch.nn.Parameter(torch.randn(3))


def ops_of(trace: Trace) -> list[str]:
    return [equation.op.name for equation in trace.equations]


def keeps(transform: Callable[[Trace], Trace], trace: Trace, inputs: Any) -> Trace:
    new = transform(trace)
    check(new)
    assert transform(new) == new and len(new.equations) <= len(trace.equations)
    torch.manual_seed(3)
    expected = tfn.evaluate(trace, inputs)
    torch.manual_seed(3)
    for a, b in zip(tfn.evaluate(new, inputs), expected, strict=True):
        assert same_bits(a, b) or a == b
    return new


@pytest.mark.parametrize("transform", PARTS)
@pytest.mark.parametrize("build", TRACES)
def test_the_law_on_small_traces(transform: Any, build: Callable[[], Trace]) -> None:
    trace = build()
    keeps(transform, trace, example_inputs(trace))


X = torch.tensor([[0.0, -0.0, float("nan")], [1.5, float("inf"), -2.0]])

NOOPS: list[tuple[Callable[[Tensor], Tensor], list[str]]] = [
    (lambda x: x.clone().sin(), ["aten.sin.default"]),
    (lambda x: x.sin().clone(), ["aten.sin.default"]),
    (lambda x: x.reshape(2, 3).expand(2, 3).sin(), ["aten.sin.default"]),
    (lambda x: x.t().t().transpose(0, 1).transpose(1, 0).sin(), ["aten.sin.default"]),
    (lambda x: x.permute(0, 1).movedim(1, 1).movedim((0, 1), (0, 1)).sin(), ["aten.sin.default"]),
    (lambda x: (x * 1 / 1 - 0).sin() ** 1, ["aten.sin.default"]),
    (lambda x: x.to(torch.float32, copy=True).sin(), ["aten.sin.default"]),
    (lambda x: x[:, 0:3].sin(), ["aten.sin.default"]),
    (lambda x: x.sin() + 0, ["aten.sin.default", "aten.add.Tensor"]),
    (lambda x: (x.long() + 0) * 2, ["aten._to_copy.default", "aten.mul.Tensor"]),
    (lambda x: x.clone(), ["aten.clone.default"]),
    (lambda x: x.clone().t(), ["aten.clone.default", "aten.t.default"]),
    (lambda x: x * 1, ["aten.mul.Tensor"]),
    (lambda x: (x * True).sin(), ["aten.sin.default"]),
    (lambda x: (x.sin() * 1.0).double(), ["aten.sin.default", "aten._to_copy.default"]),
    (lambda x: (x.detach() * 1).sin(), ["aten.detach.default", "aten.sin.default"]),
]


@pytest.mark.parametrize(("f", "expected"), NOOPS)
def test_noops(f: Any, expected: list[str]) -> None:
    assert ops_of(keeps(simplify, tfn.trace(f, X), [X])) == expected


def test_a_scalar_has_the_dims_0_and_minus_1() -> None:
    def f(x: Tensor) -> Tensor:
        return x.transpose(0, -1).permute(()).movedim(0, -1).sin()

    assert ops_of(keeps(simplify, tfn.trace(f, X[0, 0]), [X[0, 0]])) == ["aten.sin.default"]
    assert tfn.jit(f)(X[1, 0]) == X[1, 0].sin()


def test_outputs_keep_their_own_memory() -> None:
    def f(x: Tensor) -> Any:
        y = x.sin()
        return x.clone(), y.clone(), y.clone(), y

    trace = tfn.trace(f, X)
    found = tfn.evaluate(keeps(drop_noops, trace, [X]), [X])
    pointers = {value.data_ptr() for value in (X, *found)}
    assert len(pointers) == 5


def test_in_place_code_leaves_no_copies() -> None:
    def f(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y.copy_(x.sin())
        y.mul_(2)
        return y

    assert ops_of(keeps(simplify, tfn.trace(f, X), [X])) == ["aten.sin.default", "aten.mul.Tensor"]


def test_constants_are_folded() -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(2, 3)).bool()
        return x.masked_fill(~mask, 0.0) * (torch.tensor([1.0, 2.0, 3.0]) * 2)

    new = keeps(simplify, tfn.trace(f, X), [X])
    assert ops_of(new) == ["aten.masked_fill.Scalar", "aten.mul.Tensor"]
    assert all(constant.owned for constant in new.constants)


def test_what_is_not_folded() -> None:
    def f(x: Tensor) -> Any:
        return (
            x + WEIGHT.exp(),
            torch.arange(3) * 2,
            torch.rand(3) * 2,
            x * torch.zeros(3),
            torch.ones(1000, 1000).tril() + x[0, 0],
        )

    trace = tfn.trace(f, X)
    new = keeps(fold_constants, trace, [X])
    assert ops_of(new) == ops_of(trace)


def test_a_checkpoint_still_computes_again() -> None:
    program = tfn.trace(lambda x: tfn.checkpoint(lambda x: x.sin().exp())(x).sum(), X)
    gradient = grad_and_value(program, (True,))
    assert ops_of(keeps(simplify, gradient, [X])).count("checkpoint") == 2


def test_an_optimizer_step_loses_its_copies() -> None:
    optimizer = tfn.functional_optimizer(torch.optim.AdamW, lr=0.1)
    params = {"w": torch.randn(3), "b": torch.randn(2)}
    trace = inline(tfn.trace(optimizer.update, params, params, optimizer.init(params)))
    new = simplify(trace)
    check(new)
    assert ops_of(trace).count("aten.clone.default") >= 2
    assert ops_of(new).count("aten.clone.default") == 0


@given(cases())
def test_the_law_on_random_traces(case: Case) -> None:
    for transform in PARTS:
        keeps(transform, case.trace, case.inputs)
