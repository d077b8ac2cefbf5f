"""prune: what a program need not run."""

from __future__ import annotations

from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.executors import lower
from thunder_fn.executors.pruning import drop_dead, prune
from thunder_fn.ir.trace import Trace


def _count(trace: Trace, name: str) -> int:
    return sum(equation.op.name == name for equation in trace.equations)


def test_equal_equations_run_once() -> None:
    x = torch.randn(3)
    trace = tfn.trace(lambda x: x.sin() * x.sin(), x)
    new, gone = prune(trace, below_autograd=True)
    tfn.check(new)
    assert gone == (1,)
    assert torch.equal(tfn.evaluate(new, [x])[0], tfn.evaluate(trace, [x])[0])


def test_two_outputs_stay_two_tensors() -> None:
    x = torch.randn(3)
    program = lower(tfn.trace(lambda x: (x.sin(), x.sin(), x.sin().view(3)), x))
    a, b, c = program(x)
    a.zero_()
    assert torch.equal(b, x.sin())
    b.zero_()
    assert torch.equal(c, x.sin())


def test_random_numbers_are_drawn_as_often_as_in_eager() -> None:
    new, gone = prune(tfn.trace(lambda: torch.rand(3) + torch.rand(3)), below_autograd=True)
    assert gone == () and _count(new, "aten.rand.default") == 2


def test_copies_that_are_only_read_go() -> None:
    new, _ = prune(tfn.trace(lambda x: x.clone() + 1, torch.randn(3)), below_autograd=True)
    assert _count(new, "aten.clone.default") == 0


def test_copies_that_are_returned_stay() -> None:
    x = torch.randn(3)
    for f in (lambda x: x.clone(), lambda x: x.clone().view(3)):
        (result,) = lower(tfn.trace(f, x), below_autograd=True)(x)
        result.zero_()
        assert x.any()


def test_a_detached_input_is_another_tensor() -> None:
    x = torch.randn(3)
    new, _ = prune(tfn.trace(lambda x: x.detach(), x), below_autograd=True)
    assert _count(new, "aten.detach.default") == 1
    new, _ = prune(tfn.trace(lambda x: x.sin().detach(), x), below_autograd=True)
    assert _count(new, "aten.detach.default") == 0


def _reshapes(f: Any, x: torch.Tensor) -> int:
    program = lower(tfn.trace(f, x), below_autograd=True)
    assert torch.equal(program(x)[0], f(x)) and program(x)[0].is_contiguous() == f(x).is_contiguous()
    return str(program).count("reshape(") + str(program).count("squeeze(")


def test_reshapes_of_reshapes_are_one() -> None:
    x = torch.randn(2, 3, 4)
    assert _reshapes(lambda x: x.sin().reshape(6, 4).unsqueeze(1).view(1, 24).squeeze(0).reshape(4, 6).cos(), x) == 1
    assert _reshapes(lambda x: x.sin().reshape(6, 4).reshape(24).reshape(2, 3, 4).cos(), x) == 0
    assert _reshapes(lambda x: x.transpose(0, 2).reshape(12, 2).reshape(3, 8).cos(), x) == 1
    assert _reshapes(lambda x: x.view(torch.int32).view(6, 4).view(torch.int16).view(2, 3, 8).cos(), x) == 2


def test_a_view_of_all_is_what_it_is_a_view_of_where_that_is_memory_of_the_program() -> None:
    x = torch.randn(3, 4)
    assert _reshapes(lambda x: x.sin().reshape(3, 4), x) == 0
    for f in (lambda x: x.reshape(3, 4), lambda x: x.t().reshape(4, 3), lambda x: x.reshape(12).view(3, 4)):
        result = lower(tfn.trace(f, x), below_autograd=True)(x)[0]
        assert result is not x and result.data_ptr() == x.data_ptr() and torch.equal(result, f(x))
    both = lower(tfn.trace(lambda x: (y := x.sin(), y.reshape(3, 4), y.view(3, 4)), x), below_autograd=True)(x)
    assert len(set(map(id, both))) == 3 and len({one.data_ptr() for one in both}) == 1


def test_products_with_ones_go() -> None:
    x = torch.randn(3, 4)
    count = lambda f, x=x: _count(prune(tfn.trace(f, x), below_autograd=True)[0], "aten.mul.Tensor")
    assert count(lambda x: (x * torch.full((), 1.0).expand(3, 4)).sin()) == 0
    assert count(lambda x: (torch.full((2, 6), 1.0).reshape(3, 4) * x).sin()) == 0
    assert count(lambda x: (x * torch.full((), 1.5)).sin()) == 1
    assert count(lambda x: (x * torch.full((2, 1, 1), 1.0)).sin()) == 1  # more elements
    assert count(lambda x: (x * torch.full((), 1.0, dtype=torch.complex64)).sin()) == 1
    assert count(lambda x: (x * torch.full((3, 4), 1).view(torch.float64)).sin()) == 1  # other numbers
    assert (
        count(lambda x: (x * torch.full((), 1, dtype=torch.complex64)).sin(), x + 0j) == 1
    )  # inf * (1 + 0j) is inf + nan j


def test_a_sum_keeps_no_dims_that_a_reshape_drops() -> None:
    """Unless something else reads them; as in the gradient of a bias."""
    x = torch.randn(3, 4, 5)
    cases = [
        (lambda x: x.sum((0,), keepdim=True).reshape(4, 5), 0),
        (lambda x: x.sum((0, -1), keepdim=True).reshape(4), 0),
        (lambda x: (x.sum((1,), keepdim=True, dtype=torch.float64).reshape(3, 5)).sin(), 0),
        (lambda x: x.sum((0,), keepdim=True).reshape(5, 4), 1),
        (lambda x: x.sum((0,), keepdim=True).reshape(20), 1),
        (lambda x: (y := x.sum((0,), keepdim=True), y.reshape(4, 5)), 1),
        (lambda x: (y := x.sum((0,), keepdim=True)).reshape(4, 5) * y, 1),
    ]
    for f, reshapes in cases:
        trace = tfn.trace(f, x)
        new, _ = drop_dead(prune(trace, below_autograd=True)[0])
        tfn.check(new)
        assert _count(new, "aten.reshape.default") == reshapes
        assert _count(new, "aten.sum.dim_IntList") == 1
        for mine, its in zip(tfn.evaluate(new, [x]), tfn.evaluate(trace, [x]), strict=True):
            assert torch.equal(mine, its)
