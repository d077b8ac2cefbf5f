"""prune: what a program need not run."""

from __future__ import annotations

import torch

import thunder_fn as tfn
from thunder_fn.executors import lower
from thunder_fn.executors.pruning import prune
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
