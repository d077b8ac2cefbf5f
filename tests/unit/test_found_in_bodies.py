"""Sizes and numbers that the body of a structured op finds in data, under every derivative: beside plain Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors
from thunder_fn.capture import capture
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir.check import check
from thunder_fn.ir.symbols import finders
from thunder_fn.ir.trace import cut

Tensor = torch.Tensor
Step = Callable[[Tensor], Tensor]
TIMES = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
INPUTS = [torch.tensor(values, dtype=torch.float64) for values in ([0.5, -0.3, 0.8, 1.2], [-0.5, 0.3, -0.8, -0.6])]


def _halved_and_written(x: Tensor) -> Tensor:
    y = x * 1.5
    positive = y > 0.2
    y[positive] = y[positive].sin()
    return y * x.detach().sum().item()


def _mean_of_positive(x: Tensor) -> Tensor:
    positive = x[x > 0]
    return (positive**2).sum() / (positive.shape[0] + 1)


STEPS: dict[str, Step] = {
    "sizes": lambda x: x.cos() * (x[torch.tensor([True, False, True, True])].sin().sum() + _mean_of_positive(x)),
    "numbers": lambda x: x.sin() * x.detach().sum().item() + x * (x > 0).sum().item(),
}


def _custom_vjp(step: Step) -> Step:
    f = tfn.custom_vjp(step)
    f.defvjp(lambda x: (step(x), x), lambda x, ct: tfn.vjp(step, x)[1](ct))
    return f


def _custom_jvp(step: Step) -> Step:
    f = tfn.custom_jvp(step)
    f.defjvp(lambda primals, tangents: tfn.jvp(step, primals, tangents))
    return f


def _scan(unroll: int) -> Callable[[Step], Step]:
    def scanned(step: Step) -> Step:
        return lambda x: tfn.scan(lambda c, t: (step(c) * t, c.sin()), x, TIMES, unroll=unroll)[0]

    return scanned


def _three_times(step: Step) -> Step:
    return lambda x: step(step(step(x) * TIMES[0]) * TIMES[1]) * TIMES[2]


def _while(max_steps: int | None) -> Callable[[Step], Step]:
    def loop(step: Step) -> Step:
        again = lambda i, c: (i + 1, step(c) * TIMES[i])
        return lambda x: tfn.while_loop(lambda i, c: i < 3, again, (torch.tensor(0), x), max_steps=max_steps)[1]

    return loop


def _once(step: Step) -> Step:
    return step


AROUND: dict[str, tuple[Callable[[Step], Step], Callable[[Step], Step]]] = {
    "checkpoint": (tfn.checkpoint, _once),
    "checkpoint that keeps sines": (lambda step: tfn.checkpoint(step, policy=lambda e: "sin" in e.op.name), _once),
    "checkpoint of checkpoint": (lambda step: tfn.checkpoint(tfn.checkpoint(step)), _once),
    "jit": (tfn.jit, _once),
    "cond": (lambda step: lambda x: tfn.cond(x.sum() > -9, step, lambda x: x * 2, (x,)), _once),
    "scan": (_scan(1), _three_times),
    "scan in blocks": (_scan(2), _three_times),
    "scan written out": (_scan(3), _three_times),
    "map": (
        lambda step: lambda x: tfn.map(step, torch.stack([x, x * 1.1])).sum(0),
        lambda s: lambda x: s(x) + s(x * 1.1),
    ),
    "while_loop": (_while(None), _three_times),
    "bounded while_loop": (_while(4), _three_times),
    "custom_vjp": (_custom_vjp, _once),
    "custom_jvp": (_custom_jvp, _once),
}


def _linearized(f: Step) -> Step:
    return lambda x: tfn.linearize(f, x)[1](x.cos())


def _derivatives(f: Step) -> dict[str, Callable[[Tensor], Any]]:
    loss: Callable[[Tensor], Tensor] = lambda x: f(x).sum()
    return {
        "gradient": tfn.grad(loss),
        "tangent": lambda x: tfn.jvp(f, (x,), (x.cos(),))[1],
        "linearized": _linearized(f),
    }


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("around", AROUND)
def test_derivatives_are_those_of_plain_python(around: str, step: str) -> None:
    make, plain = AROUND[around]
    mine, its = tfn.jit(make(STEPS[step])), plain(STEPS[step])
    made = _derivatives(make(STEPS[step]))
    for x in INPUTS:
        torch.testing.assert_close(mine(x), its(x))
        jacobian = torch.autograd.functional.jacobian(its, x)
        torch.testing.assert_close(made["gradient"](x), jacobian.sum(0))
        torch.testing.assert_close(made["tangent"](x), jacobian @ x.cos())
        torch.testing.assert_close(made["linearized"](x), jacobian @ x.cos())
    torch.testing.assert_close(tfn.jit(made["gradient"])(x), jacobian.sum(0))  # names in one program


@pytest.mark.parametrize("around", ["checkpoint", "jit", "cond", "scan", "custom_jvp"])
def test_second_derivatives_are_those_of_plain_python(around: str) -> None:
    make, plain = AROUND[around]
    f, its, x = make(_halved_and_written), plain(_halved_and_written), INPUTS[0]
    want = torch.autograd.functional.hessian(lambda x: its(x).sum(), x)
    torch.testing.assert_close(tfn.hessian(lambda x: f(x).sum())(x), want)
    along = tfn.jit(tfn.grad(lambda x: _linearized(f)(x).sum()))(x)
    its_along = torch.func.grad(lambda x: torch.func.jvp(its, (x,), (x.cos(),))[1].sum())(x)
    torch.testing.assert_close(along, its_along)


def test_steps_written_out_find_numbers_of_their_own() -> None:
    f = tfn.jit(lambda x: tfn.scan(lambda c, t: (c * c.sum().item(), t), x, TIMES, unroll=3)[0])
    x = torch.tensor([0.5, 1.5], dtype=torch.float64)
    torch.testing.assert_close(f(x), x * 2 * 4 * 16)


def test_the_first_equation_finds_a_size() -> None:
    """The tangent has the size that the primal has found, so it is dead if nobody reads it."""
    trace = capture(lambda x: tfn.jvp(lambda x: x[x > 0], (x,), (x,)), (INPUTS[0],)).trace
    (found,) = finders(trace).values()
    assert found == trace.outputs[0]
    first = dce(cut(trace, outputs=trace.outputs[:1]))
    assert sum(equation.op.name == "aten.index.Tensor" for equation in first.equations) == 1


def test_a_loop_does_not_draw_again_as_many_numbers_as_it_found() -> None:
    step: Step = lambda x: x * torch.nn.functional.dropout(x[x > 0] * 2).sum()
    with pytest.raises(errors.MissingRule) as caught:
        tfn.grad(lambda x: _scan(1)(step)(x).sum())(INPUTS[0])
    assert message_of(caught.value).splitlines()[0] == (
        "scan: its backward reads aten.native_dropout.default, as many random numbers as a size found in data says"
    )


@pytest.mark.parametrize("around", AROUND)
def test_traces_are_valid(around: str) -> None:
    f = AROUND[around][0](STEPS["sizes"])
    check(capture(tfn.grad(lambda x: f(x).sum()), (INPUTS[0],)).trace)
    check(capture(_linearized(f), (INPUTS[0],)).trace)


CALLED_ON_A_STALE_VIEW: dict[str, Any] = {
    "checkpoint": lambda row: tfn.checkpoint(torch.sin)(row),
    "jit": lambda row: tfn.jit(torch.sin)(row),
    "vmap": lambda row: tfn.vmap(torch.sin)(row),
    "vjp": lambda row: tfn.vjp(torch.sin, row)[0],
    "cond closes over it": lambda row: tfn.cond(torch.tensor(True), lambda: row.sin(), lambda: row.cos()),
    "scan": lambda row: tfn.scan(lambda carry, x: (carry, x.sin()), torch.zeros(()), row)[1],
}


@pytest.mark.parametrize("name", CALLED_ON_A_STALE_VIEW)
def test_a_view_of_what_was_written_is_given_to_a_body(name: str) -> None:
    """Autograd takes the view again when a capture inside asks it for its node."""

    def f(x: torch.Tensor, call: Any) -> torch.Tensor:
        y = x.clone()
        row = y[1:]
        y.mul_(x)
        return (call(row) * x[1:]).sum()

    x = torch.tensor([0.3, 0.5, 0.7], requires_grad=True)
    (wanted,) = torch.autograd.grad(f(x, torch.sin), x)
    found = functools.partial(f, call=CALLED_ON_A_STALE_VIEW[name])
    assert torch.allclose(tfn.grad(found)(x.detach()), wanted)
    assert torch.allclose(tfn.jit(tfn.grad(found))(x.detach()), wanted)
