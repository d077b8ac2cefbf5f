"""A jitted function inside a traced one is a `call` equation, which keeps its name and options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.errors import InvalidTrace
from thunder_fn.interpreters.simplify import cse
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Equation, Literal, Op, Trace, cut, subtraces
from thunder_fn.structured.call import CALL, call_options

Tensor = torch.Tensor
close = torch.testing.assert_close
X = torch.tensor([0.3, -0.2, 0.5])


def sines_as_cosines(trace: Trace) -> Trace:
    """A transform that changes values, so that one sees where it was applied."""
    cosine = Op("leaf", "aten.cos.default")
    equations = tuple(
        Equation(cosine if e.op.name == "aten.sin.default" else e.op, e.args, e.kwargs, e.outputs, e.bodies)
        for e in trace.equations
    )
    return Trace(trace.inputs, equations, trace.outputs, trace.constants, trace.constraints, trace.name)


def calls_in(trace: Trace) -> list[Equation]:
    return [equation for part in subtraces(trace) for equation in part.equations if equation.op == CALL]


def test_prints_as_call() -> None:
    double = tfn.jit(lambda x: x + x, transforms=cse)

    @tfn.jit
    def inner(x: Tensor) -> Tensor:
        return double(x).sin()

    trace = tfn.trace(lambda x: inner(inner(x)), X)
    assert str(trace) == (
        "def program(v0):\n"
        "    # v0: f32[3]\n"
        "    v1 = call(v0, name='inner', options=Options)  # f32[3]\n"
        "        # def call(v0):\n"
        "        #   v1 = call_1(v0, name='program', options=Options_1)  # f32[3]\n"
        "            # def call_1(v0):\n"
        "            #   v1 = aten.add.Tensor(v0, v0)  # f32[3]\n"
        "            #   return (v1,)\n"
        "        #   v2 = aten.sin.default(v1)  # f32[3]\n"
        "        #   return (v2,)\n"
        "    v2 = call(v1, name='inner', options=Options)  # f32[3], as above\n"
        "    return (v2,)\n"
    )
    check(trace)
    assert torch.equal(trace.python_callable()(X)[0], ((X * 2).sin() * 2).sin())
    assert [call_options(equation) for equation in calls_in(trace)] == [
        ("inner", inner.options),
        ("inner", inner.options),
        ("program", double.options),
    ]


def test_every_transform_keeps_the_call_and_its_options() -> None:
    inner = tfn.jit(lambda x: x.sin() * x, transforms=cse)
    f = lambda x: inner(x).sum()
    for g, args in (
        (tfn.grad(f), (X,)),
        (tfn.vmap(f), (torch.stack([X, X]),)),
        (lambda x: tfn.jvp(f, (x,), (x,)), (X,)),
        (tfn.checkpoint(f), (X,)),
        (tfn.grad(tfn.checkpoint(f)), (X,)),
    ):
        found = calls_in(tfn.trace(g, *args))
        assert found and all(call_options(equation) == ("program", inner.options) for equation in found)


def test_its_transforms_are_its_own() -> None:
    inner = tfn.jit(lambda x: x.sin(), transforms=sines_as_cosines)
    f = lambda x: (inner(x) + x.sin()).sum()
    for g in (f, tfn.jit(f)):
        close(g(X), (X.cos() + X.sin()).sum())
        close(tfn.grad(g)(X), -X.sin() + X.cos())
    outer = tfn.jit(f, transforms=sines_as_cosines)
    close(outer(X), (X.cos() * 2).sum())


def test_the_program_unfolds_a_call_with_its_own_executors() -> None:
    inner = tfn.jit(lambda x: x.sin())
    f = tfn.jit(lambda x: inner(x) + inner(x * 2))
    close(f(X), X.sin() + (X * 2).sin())
    text = str(tfn.last_traces(f)[-1])
    assert text.count("# call of program") == 2 and "call(" not in text


def test_effects_of_the_inner_function() -> None:
    norm = torch.nn.BatchNorm1d(3)
    twin = copy.deepcopy(norm)
    jitted = tfn.jit(norm)

    @tfn.jit
    def add_one(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    @tfn.jit
    def outer(x: Tensor) -> Tensor:
        y = x.clone()
        z = add_one(y)
        return jitted(y) + z

    x = torch.randn(4, 3)
    for _ in range(2):
        close(outer(x), twin(x + 1) + (x + 1) * 2)
    close(norm.running_mean, twin.running_mean)
    assert norm.num_batches_tracked == 2


def test_random_numbers_are_eagers() -> None:
    inner = tfn.jit(lambda x: F.dropout(x, 0.5))
    outer = tfn.jit(lambda x: inner(x) + inner(x))
    x = torch.ones(20)
    torch.manual_seed(3)
    want = F.dropout(x, 0.5) + F.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(outer(x), want)


def test_inside_pytorchs_own_transforms() -> None:
    inner = tfn.jit(lambda x: x.sin() * x)
    f, eager = lambda x: inner(x).sum(), lambda x: (x.sin() * x).sum()

    def autograd(f: Any) -> Any:
        def gradient(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(f(x), x)[0]

        return gradient

    for transform in (torch.func.grad, torch.func.jacfwd, lambda f: torch.func.vmap(lambda x: f(x) * x), autograd):
        close(tfn.jit(transform(f))(X), transform(eager)(X))


def test_linearize_runs_what_is_known_once() -> None:
    inner = tfn.jit(lambda x: (F.dropout(x, 0.5).sin() * x, x.exp()))
    torch.manual_seed(3)
    want, tangent = tfn.jvp(lambda x: inner(x)[0] + inner(x)[1], (X,), (X,))
    torch.manual_seed(3)
    value, linear = tfn.linearize(lambda x: inner(x)[0] + inner(x)[1], X)
    close(value, want)
    close(linear(X), tangent)
    (call, *_) = calls_in(linear.trace)
    names = {equation.op.name for equation in call.body.equations}
    assert not names & {"aten.native_dropout.default", "aten.sin.default", "aten.cos.default", "aten.exp.default"}


# ---- lookasides ----


def helper(x: Tensor) -> Tensor:
    return x * 2


def test_lookasides_may_call_jit() -> None:
    faster = tfn.jit(lambda x: x + x.sin())
    f = tfn.jit(lambda x: helper(x) * 3, lookasides=tfn.Lookaside(helper, faster))
    close(f(X), (X + X.sin()) * 3)
    close(tfn.grad(lambda x: f(x).sum())(X), (1 + X.cos()) * 3)
    assert [call_options(equation)[0] for equation in calls_in(tfn.last_traces(f)[0])] == ["program"]
    made_inside = tfn.jit(lambda x: helper(x), lookasides=tfn.Lookaside(helper, lambda x: tfn.jit(helper)(x) + 1))
    close(made_inside(X), X * 2 + 1)
    close(helper(X), X * 2)


def test_lookasides_of_the_inner_function_are_its_own() -> None:
    inner = tfn.jit(lambda x: helper(x), lookasides=tfn.Lookaside(helper, lambda x: x - 1))
    outer = tfn.jit(lambda x: inner(x) + helper(x))
    close(outer(X), X - 1 + X * 2)


# ---- checkpoint ----


def test_policies_see_what_is_in_a_call() -> None:
    inner = tfn.jit(lambda x: (x[None] @ torch.eye(3)).sin()[0].sin())
    saved = {
        policy: tfn.saved_residuals(tfn.checkpoint(lambda x: inner(x).sum(), policy), X)
        for policy in (None, tfn.checkpoint_policies.matmuls_saveable)
    }
    assert [residual.reason for residual in saved[None]] == ["argument args[0]"]
    assert "aten.mm" in saved[tfn.checkpoint_policies.matmuls_saveable][0].reason


# ---- check ----


def test_check() -> None:
    inner = tfn.jit(lambda x: x.sin())
    trace = tfn.trace(lambda x: inner(x), X)
    (equation,) = trace.equations
    wrong = Equation(equation.op, equation.args, (("name", Literal("f")),), equation.outputs, equation.bodies)
    with pytest.raises(InvalidTrace, match=r"call: takes name= and options="):
        check(cut(trace, equations=(wrong,)))


# ---- the training loop ----


def test_a_training_step_of_jitted_parts() -> None:
    """jit(step), where step scans over micro-batches of jit(model) and applies an optimizer, is the eager loop."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    xs, ys = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 1).double()

    @tfn.jit
    def apply(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,))

    optimizer = tfn.functional_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)

    @tfn.jit
    def step(params: Any, state: Any, xs: Tensor, ys: Tensor) -> Any:
        def micro_batch(total: Any, batch: Any) -> Any:
            gradients, loss = tfn.grad_and_value(lambda p: F.mse_loss(apply(p, batch[0]), batch[1]))(params)
            return {name: total[name] + gradient for name, gradient in gradients.items()}, loss

        total, losses = tfn.scan(micro_batch, {name: torch.zeros_like(p) for name, p in params.items()}, (xs, ys))
        mean = {name: gradient / len(xs) for name, gradient in total.items()}
        return *optimizer.update(params, mean, state), losses.mean()

    params: Any = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = optimizer.init(params)
    eager = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        params, state, loss = step(params, state, xs, ys)
        eager.zero_grad()
        losses = [F.mse_loss(model(x), y) for x, y in zip(xs, ys, strict=True)]
        torch.stack(losses).mean().backward()
        eager.step()
        close(loss, torch.stack(losses).mean())
    for name, p in model.named_parameters():
        close(params[name], p)
    assert {call_options(e)[0] for e in calls_in(tfn.last_traces(step)[0])} == {"apply"}
