"""Tangents that are zero are absent: nothing is computed from them, and what the facts about linear ops say holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import thunder_fn as tfn
from thunder_fn.derived.leaf_vjp import alone, is_differentiable
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.jvp import rule_of
from thunder_fn.ir import Trace, facts, ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.testing.drawn_programs import build
from thunder_fn.testing.samples import literal_of, samples, tensor_of
from thunder_fn.testing.schemas import calls_of_samples, is_callable

PLACES = (
    "slice_scatter",
    "where",
    "cat",
    "stack",
    "block_diag",
    "complex",
    "lerp",
    "scatter",
    "index",
    "put",
    "masked",
)
"""Ops that may read zeros beside values that are none: they place or mix them, and multiply nothing."""


def python_call(call: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a recorded call, with random tensors."""

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(one) for one in item]
        given = tensor_of(item)
        if given is None or isinstance(given, Tensor):
            return literal_of(item) if given is None else given
        drawn = torch.randn(given.shape, dtype=given.dtype) if is_differentiable(given) else torch.ones(given.shape)
        return drawn.to(given.dtype)

    return [value(arg) for arg in call[0]], {name: value(arg) for name, arg in call[1].items()}


def recorded() -> Iterator[tuple[ops.Op, Any]]:
    """Every recorded call of an op that has a set of arguments in which it is linear."""
    for name, calls in samples().items():
        try:
            op = ops.leaf(ops.overload_named(name))
        except (ops.InvalidTrace, RuntimeError):
            continue
        if ops.linear_in(op):
            yield from ((op, call) for call in calls)


def test_zeros_of_linear_arguments_make_zeros() -> None:
    torch.manual_seed(0)
    seen = set[str]()
    for op, call in recorded():
        for places in ops.linear_in(op):
            args, kwargs = python_call(call)
            for place in places:
                args[place] = tree_map_only((Tensor, int, float), lambda x: x * 0, args[place])
            results = [one for one in tree_flatten(ops.overload(op)(*args, **kwargs))[0] if isinstance(one, Tensor)]
            assert results and not any(map(torch.any, results)), (op.name, places, call)
        seen.add(op.name)
    unseen = {name for name in facts.LINEAR_IN if not any(name == one or one.startswith(f"{name}.") for one in seen)}
    assert len(seen) > 60 and unseen <= {"aten.conj_physical", "aten.slice_scatter"}, unseen


def read_from_zeros(trace: Trace) -> set[str]:
    """The names of ops that compute something from zeros that the trace makes."""
    zeros, found = set[int](), set[str]()
    for equation in trace.equations:
        is_read = any(var.index in zeros for var in operands_in([equation]))
        if equation.op in facts.ZEROS or (is_read and equation.op in facts.SPREADS):
            zeros.update(var.index for var in equation.outputs)
        elif is_read and not any(part in equation.op.name for part in PLACES):
            found.add(equation.op.name)
    return found


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_no_rule_computes_with_zeros() -> None:
    """The tangent by one operand of each op of PyTorch's samples, its other operands without a tangent."""
    asked, reading = 0, dict[str, set[str]]()
    for name in samples():
        for _, program in islice(calls_of_samples(name), 1) if is_callable(name) else ():
            equation = build(program).equations[-1]
            inputs = alone(equation).inputs
            given = [place for place, var in enumerate(inputs) if is_differentiable(var.type)]
            for place in given[asked % 2 :: 2] if len(given) > 1 else ():
                with suppress(MissingRule):
                    rule = rule_of(equation, tuple(other == place for other in range(len(inputs))))
                    asked += 1
                    if read_from_zeros(rule.trace):
                        reading.setdefault(name, set()).update(read_from_zeros(rule.trace))
    assert asked > 100 and not reading, reading


def flops(f: Any, *args: Any) -> int:
    f(*args)  # traced before anybody counts
    with FlopCounterMode(display=False) as counter:
        f(*args)
    return counter.get_total_flops()


def grad_of_conv(x: Tensor, w: Tensor) -> Tensor:
    """One backward of a convolution, for the gradient of its input."""
    return tfn.vjp(lambda y: F.conv1d(y, w), x)[1](x[..., :1])[0]


@pytest.mark.parametrize("f", [F.linear, F.conv1d, torch.mul, lambda x, w: torch.addmm(w[0], x, w), grad_of_conv])
def test_forward_mode_takes_two_products_where_the_function_takes_one(f: Any) -> None:
    """The weight is a constant, so the tangent of each product is one product."""
    x = torch.randn(4, 4, 4) if f in (F.conv1d, grad_of_conv) else torch.randn(4, 4)
    w = torch.randn_like(x)
    plain = flops(tfn.jit(lambda x: f(x, w)), x)
    pushed = flops(tfn.jit(lambda x, v: tfn.jvp(lambda x: f(x, w), (x,), (v,))), x, x)
    assert pushed == 2 * plain and (plain or f is torch.mul)


def test_a_product_by_hessians_takes_twice_the_gradient() -> None:
    w = [torch.randn(8, 8), torch.randn(1, 8)]
    energy = lambda x: F.linear(F.linear(x, w[0]).tanh(), w[1]).sum()
    x, v = torch.randn(8), torch.randn(8)
    product = tfn.jit(lambda x, v: tfn.jvp(tfn.grad(energy), (x,), (v,)))
    assert flops(product, x, v) <= 2 * flops(tfn.jit(tfn.grad(energy)), x)
    want = torch.func.jvp(torch.func.grad(energy), (x,), (v,))
    torch.testing.assert_close(product(x, v), want)


def test_a_tangent_that_is_absent_makes_no_nan() -> None:
    """The tangent of a product by one factor has no other term: zero times infinity is not computed."""
    a, b = torch.tensor([[1.0, torch.inf]]), torch.tensor([[2.0], [3.0]])
    f = lambda b: a @ b
    found = tfn.jvp(f, (b,), (torch.tensor([[1.0], [1.0]]),))[1]
    assert found.item() == torch.inf
    by_a = tfn.jvp(lambda a: a @ b, (a,), (torch.ones(1, 2),))[1]
    assert by_a.item() == 5.0


def test_gradients_multiply_by_no_ones() -> None:
    """The cotangent of a loss is one, and a product with one is its other factor."""
    x = torch.randn(4)
    text = str(tfn.jit(tfn.grad(lambda x: (x * x.sin()).sum())).lower(x).text())
    assert "expand" not in text and "full" not in text
    assert torch.equal(tfn.jit(tfn.grad(lambda x: (x * x).sum()))(x), x + x)
    alone = tfn.jit(tfn.grad(lambda y, x: (x * y).sum()))(torch.randn(4), x)
    assert torch.equal(alone, x) and alone.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("f", [torch.sign, torch.floor, torch.round, lambda x: x.ceil() @ torch.ones(3, 2)])
def test_a_result_whose_derivative_is_zero_depends_on_its_operand(f: Any) -> None:
    """As for torch.func, whose `strict` refuses results that do not."""
    x = torch.randn(3)
    found, want = (one.jvp(f, (x,), (x,), strict=True) for one in (tfn, torch.func))
    assert all(map(torch.equal, found, want))
