"""Programs that are nested deeper than Python's limit of calls allows for, and programs that are long."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.capture.nesting import DEEPEST
from thunder_fn.executors.torch_executor import lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import nesting

Function = Callable[[torch.Tensor], torch.Tensor]
ONE = torch.ones(1, 2)


def modules(depth: int) -> Function:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


def nested(depth: int, wrap: Callable[[Function], Function]) -> Function:
    f: Function = torch.sin
    for _ in range(depth):
        f = wrap(f)
    return f


def in_a_choice(f: Function) -> Function:
    return lambda x: tfn.cond(x.sum() > 0, lambda x: f(x) + 1, torch.cos, (x,))


def in_a_loop(f: Function) -> Function:
    return lambda x: tfn.scan(lambda c, _: (f(c) + 1, None), x, length=1)[0]


DEEP = {
    "modules": lambda: modules(200),
    "composites": lambda: nested(200, lambda f: tfn.composite(lambda x: f(x) + 1)),
    "checkpoints": lambda: nested(40, lambda f: tfn.checkpoint(lambda x: f(x) + 1)),
    "choices": lambda: nested(15, in_a_choice),
    "loops": lambda: nested(15, in_a_loop),
    "jit": lambda: nested(25, lambda f: tfn.jit(lambda x: f(x) + 1)),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_programs(kind: str) -> None:
    """They trace, transform, print, pickle and run. Python's limit is the usual one when they begin."""
    f, before = DEEP[kind](), sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    try:
        trace = tfn.trace(f, ONE)
        expected = evaluate(trace, (ONE,))
        again = pickle.loads(pickle.dumps(trace))
        assert again == trace or trace.constants
        assert len(str(trace)) > 100
        torch.testing.assert_close(lower(trace)(ONE), expected)
        torch.testing.assert_close(tfn.jit(f)(ONE), expected[0])
        torch.testing.assert_close(tfn.jit(tfn.vmap(f))(ONE[None])[0], expected[0])
        primal, tangent = tfn.jit(lambda x: tfn.jvp(f, (x,), (x,)))(ONE)
        gradient = tfn.jit(tfn.grad(lambda x: f(x).sum()))(ONE)
        torch.testing.assert_close((primal, tangent.sum()), (expected[0], (gradient * ONE).sum()))
    finally:
        sys.setrecursionlimit(max(before, sys.getrecursionlimit()))


def test_calls_are_composites_up_to_a_depth() -> None:
    """Deeper ones are no level of their own, so a stack of modules is no stack of bodies. Their paths are kept."""
    trace = tfn.trace(modules(200), ONE)
    assert trace.depth <= DEEPEST + 1
    while any(equation.bodies for equation in trace.equations):
        (trace,) = (equation.body for equation in trace.equations if equation.bodies)
    source = trace.equations[0].source
    assert source is not None and source.module.count(".") == 199


def test_the_limit_rises_for_what_is_deep_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(nesting.sys, "getrecursionlimit", lambda: 1000)
    monkeypatch.setattr(nesting.sys, "setrecursionlimit", asked.append)
    for level in (0, nesting.FIRST, nesting.FIRST + 1, 10**9):
        nesting.make_room(level)
    assert asked == [1000 + nesting.CALLS * (nesting.FIRST + 1), nesting.MOST]


def test_endless_recursion_is_an_error() -> None:
    class Endless(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + 1

    @tfn.composite
    def endless(x: torch.Tensor) -> torch.Tensor:
        return endless(x) + 1

    for f in (Endless(), endless):
        with pytest.raises(tfn.errors.TracedFunctionError, match="raised RecursionError while it was traced"):
            tfn.jit(f)(ONE)
        torch.testing.assert_close(tfn.jit(torch.sin)(ONE), ONE.sin())
