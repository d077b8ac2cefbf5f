"""Writes beside transformed functions: what shares memory in eager mode shares it in a trace, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder_fn as tfn
from thunder_fn.errors import AliasedMutation

Tensor = torch.Tensor
Function = Callable[..., Any]
X = torch.arange(1.0, 10.0, dtype=torch.float64).reshape(3, 3)

TRANSFORMED: dict[str, Callable[[Function], Function]] = {
    "jit": tfn.jit,
    "vjp": lambda f: lambda x: tfn.vjp(f, x)[0],
    "jvp": lambda f: lambda x: tfn.jvp(f, (x,), (torch.ones_like(x),))[0],
    "linearize": lambda f: lambda x: tfn.linearize(f, x)[0],
    "grad": lambda f: lambda x: tfn.grad(lambda u: ((u * 1).sum(), f(u)), has_aux=True)(x)[1],
    "autocast": tfn.autocast,
    "functionalize": tfn.functionalize,
    "checkpoint": tfn.checkpoint,
    "checkpoint of PyTorch": lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
}
RETURNED: dict[str, Function] = {
    "itself": lambda u: u,
    "a row": lambda u: u[1],
    "a transpose": lambda u: u.t()[1:],
    "a flat view": lambda u: u.view(-1)[2:],
    "a diagonal": lambda u: u.diagonal(),
    "a column": lambda u: u.select(1, 2),
    "itself, written to": lambda u: u.mul_(2),
    "a row, written to": lambda u: u.mul_(2)[1],
}


def written(op: Function) -> Function:
    def f(w: Tensor) -> tuple[Tensor, Tensor]:
        x = w * w
        y = op(x)
        y.mul_(w.flatten()[: y.numel()].reshape(y.shape))
        x.add_(w)
        return y * 1, x * 1

    return f


def values_and_gradient(f: Function) -> list[Tensor]:
    w = X.clone().requires_grad_()
    results = f(w)
    torch.stack([(result.cos() * (i + 1)).sum() for i, result in enumerate(results)]).sum().backward()
    assert w.grad is not None
    return [*results, w.grad]


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_result_that_is_memory_of_an_argument(name: str, returned: str) -> None:
    function = RETURNED[returned]
    expected = values_and_gradient(written(function))
    inside = values_and_gradient(tfn.jit(written(TRANSFORMED[name](function))))
    torch.testing.assert_close(inside, expected)


@pytest.mark.parametrize("in_dims", [0, 1])
@pytest.mark.parametrize("returned", ["itself", "a row", "itself, written to"])
def test_a_result_of_vmap_that_is_memory_of_an_argument(returned: str, in_dims: int) -> None:
    function = {"itself": lambda u: u, "a row": lambda u: u[1:], "itself, written to": lambda u: u.mul_(2)}[returned]
    expected = values_and_gradient(written(torch.func.vmap(function, in_dims)))
    inside = values_and_gradient(tfn.jit(written(tfn.vmap(function, in_dims))))
    torch.testing.assert_close(inside, expected)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_result_that_is_memory_from_outside(name: str) -> None:
    def run(wrap: Callable[[Function], Function]) -> Function:
        def f(w: Tensor) -> tuple[Tensor, Tensor]:
            h = w * 2
            y = wrap(lambda u: h[0])(w * 1)
            h.mul_(w)
            return y * 1, h * 1

        return f

    expected = values_and_gradient(run(lambda f: f))
    torch.testing.assert_close(values_and_gradient(tfn.jit(run(TRANSFORMED[name]))), expected)


@pytest.mark.parametrize("name", [name for name in TRANSFORMED if "checkpoint" not in name])
@pytest.mark.parametrize("via", [tfn.jit, lambda f: f])
def test_a_write_from_inside_keeps_its_history(name: str, via: Callable[[Function], Function]) -> None:
    def run(wrap: Callable[[Function], Function]) -> Function:
        def f(w: Tensor) -> tuple[Tensor, ...]:
            h, buffer = w * 2, torch.zeros(3, dtype=torch.float64)

            def g(u: Tensor) -> Tensor:
                h.add_(u)
                buffer.add_(h[0])
                with torch.no_grad():
                    h.mul_(2)
                u.mul_(3)
                return u * 1

            u = w * 1
            y = wrap(g)(u)
            return y, h, buffer, u

        return f

    expected = values_and_gradient(run(lambda f: f))
    torch.testing.assert_close(values_and_gradient(via(run(TRANSFORMED[name]))), expected)


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0] * 3


same_vjp = tfn.custom_vjp(lambda x: x)
same_vjp.defvjp(lambda x: (x, None), lambda residuals, cotangent: (cotangent * 3,))


@pytest.mark.parametrize("op", [Same.apply, same_vjp])
@pytest.mark.parametrize("target", ["result", "argument"])
def test_a_custom_function_that_returns_its_argument_is_not_written_to(op: Function, target: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = op(x)
        (y if target == "result" else x).mul_(2)
        return y * x

    with pytest.raises(AliasedMutation, match="shares memory with what"):
        tfn.jit(f)(torch.ones(2))


@pytest.mark.parametrize("via", [tfn.jit, lambda f: f])
def test_a_pullback_does_not_see_what_its_function_wrote(via: Callable[[Function], Function]) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        x, h = x * 1, x * 2
        pulled = tfn.vjp(lambda x: (x.mul_(x).sin() * h.mul_(2)).sum(), x)[1](torch.ones((), dtype=x.dtype))[0]
        x = x / x.abs().sqrt()
        pushed = tfn.linearize(lambda x: x.mul_(x).sin(), x)[1](torch.ones_like(x))
        return pulled, pushed

    pulled, pushed = via(f)(X)
    torch.testing.assert_close(pulled, 2 * X * (X * X).cos() * 4 * X)
    torch.testing.assert_close(pushed, 2 * X * (X * X).cos())


CHOICES: dict[str, Function] = {
    "cond": lambda x: tfn.cond(x.sum() > 0, lambda u: u, lambda u: u * 2, (x,)),
    "cond of a number": lambda x: tfn.cond(x.dim() > 0, lambda u: u, lambda u: u * 2, (x,)),
    "cond, a closure": lambda x: tfn.cond(x.sum() > 0, lambda: x, lambda: x * 2),
    "switch": lambda x: tfn.switch(torch.tensor(0), [lambda u: u[1:]], (x,)),
    "switch of a number": lambda x: tfn.switch(0, [lambda u: u], (x,)),
    "scan": lambda x: tfn.scan(lambda c, u: (c, u), x, x)[0],
    "scan of nothing": lambda x: tfn.scan(lambda c, u: (c, u), x, x[:0])[0],
    "scan without xs": lambda x: tfn.scan(lambda c, u: (c, u), x, [])[0],
    "ys": lambda x: tfn.scan(lambda c, u: (c, u), x, x)[1],
    "fori_loop": lambda x: tfn.fori_loop(0, 2, lambda i, u: u, x),
    "fori_loop of nothing": lambda x: tfn.fori_loop(0, 0, lambda i, u: u, x),
    "while_loop": lambda x: tfn.while_loop(lambda u: u.sum() < 0, lambda u: (u * 2,), (x,))[0],
    "map": lambda x: tfn.map(lambda u: u, x[:1]),
    "associative_scan": lambda x: tfn.associative_scan(torch.add, x[:1]),
    "reversed": lambda x: tfn.associative_scan(torch.add, x[:1], reverse=True),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("via", [tfn.jit, lambda f: f])
def test_choices_and_loops_return_memory_of_their_own(name: str, via: Callable[[Function], Function]) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = CHOICES[name](x)
        before = x * 1
        y.mul_(5)
        return x, before

    after, before = via(f)(X.clone())
    torch.testing.assert_close(after, before)
    x = X.clone()
    assert via(CHOICES[name])(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def turned(x: Tensor) -> Any:
    x.t_()
    return x * 2


def turned_and_written(x: Tensor) -> Any:
    x.t_()
    x[0].mul_(3)
    return x


def written_and_turned(x: Tensor) -> Any:
    row = x[0]
    x.mul_(2)
    x.transpose_(0, 1)
    row.add_(1)
    return x.sum(0), row


def turned_inside(x: Tensor) -> Any:
    tfn.jit(turned)(x)
    return x * 1, x[0]


def turned_again(x: Tensor) -> Any:
    x.t_().add_(1).swapaxes_(0, 1)
    return x


LAYOUTS: dict[str, Function] = {
    "contiguous": lambda w: w * 1,
    "transposed": lambda w: (w * 1).t(),
    "with gaps": lambda w: (torch.cat([w, w]) * 1)[::2],
    "without gradient": lambda w: w.detach().clone(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("f", [turned, turned_and_written, written_and_turned, turned_inside, turned_again])
@pytest.mark.parametrize("options", [{}, {"cache": "symbolic values"}])
def test_an_argument_that_is_transposed_in_place_keeps_its_memory(f: Function, layout: str, options: Any) -> None:
    """A view of it that the caller holds does not change."""

    def run(f: Function) -> Any:
        w = X.clone().requires_grad_()
        x = LAYOUTS[layout](w)
        row = x[1]
        results = f(x)
        tensors = [x, row, *(results if isinstance(results, tuple) else (results,))]
        loss = torch.stack([(tensor * tensor * (i + 1)).sum() for i, tensor in enumerate([x, *tensors[2:]])]).sum()
        gradient = torch.autograd.grad(loss, w)[0] if x.requires_grad else None
        return [tensor.detach() for tensor in tensors], gradient, x.stride()

    torch.testing.assert_close(run(tfn.jit(f, **options)), run(f))


@pytest.mark.parametrize("name", ["cond", "while_loop", "switch"])
def test_an_operand_that_a_choice_returns_stays_what_it_was(name: str) -> None:
    """It is no result of the other branch, which requires a gradient, and neither is a view of it."""

    def f(c: Tensor, x: Tensor) -> Tensor:
        if name == "cond":
            return tfn.cond(c.sum() > 0, lambda u: u, lambda u: u * x, (c,))
        if name == "switch":
            return tfn.switch(torch.zeros((), dtype=torch.int64), [lambda u: u, lambda u: u * x], (c,))
        return tfn.while_loop(lambda u: u.sum() < 0, lambda u: (u * x,), (c,), max_steps=3)[0]

    c, x = torch.ones(3), torch.ones(3, requires_grad=True)
    row = c[1:]
    result = tfn.jit(f)(c, x)
    assert not c.requires_grad and c.is_leaf and not row.requires_grad
    assert result.requires_grad and torch.equal(
        torch.autograd.grad(result.sum(), x, allow_unused=True)[0], torch.zeros(3)
    )


def tangent(T: Any, f: Function, x: Tensor, t: Tensor) -> Any:
    return T.jvp(f, (x, x), (t, t))[1]


def cotangents(T: Any, f: Function, x: Tensor, t: Tensor) -> Any:
    out, pull = T.vjp(f, x, x)
    return pull(torch.cat([t, t * 3]).view(-1)[: out.numel()].view(out.shape) if out.numel() > 9 else t.view(out.shape))


def linear(T: Any, f: Function, x: Tensor, t: Tensor) -> Any:
    return T.linearize(f, x, x)[1](t, t)


def gradients(T: Any, f: Function, x: Tensor, t: Tensor) -> Any:
    return T.grad(lambda u, v: (f(u, v) ** 2).sum(), (0, 1))(x, t)


DERIVED = [tangent, cotangents, linear, gradients]
OF_TWO: dict[str, Function] = {
    "the first": lambda u, v: u,
    "a sum": lambda u, v: u + v,
    "a sum with a transpose": lambda u, v: u.t() + v,
    "a flat view": lambda u, v: u.view(-1),
    "a view and a sum": lambda u, v: (u + v.t()).view(-1),
    "a product": lambda u, v: u * v,
    "a difference": lambda u, v: u - v,
    "a repeated row": lambda u, v: (u + v)[0].expand(3, 3),
    "both, beside each other": lambda u, v: torch.cat([u, v]),
}


@pytest.mark.parametrize("via", [tfn.jit, lambda f: f], ids=["jit", "plain"])
@pytest.mark.parametrize("returned", OF_TWO)
@pytest.mark.parametrize("derive", DERIVED)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by torch.func.linearize
def test_a_derivative_that_is_memory_of_what_it_is_of(
    derive: Function, returned: str, via: Callable[[Function], Function]
) -> None:
    """A write to each derivative, and then to what it was taken of, changes the others as under torch.func."""

    def run(T: Any) -> Function:
        def f(x: Tensor, t: Tensor) -> Any:
            t = t * 1
            found = derive(T, OF_TWO[returned], x, t)
            found = found if isinstance(found, tuple) else (found,)
            for one in found if returned != "a repeated row" else ():
                one.add_(1)
            t.mul_(2)
            return [*(one * 1 for one in found), t]

        return f

    t = X.cos()
    torch.testing.assert_close(via(run(tfn))(X.clone(), t), run(torch.func)(X.clone(), t))


@pytest.mark.parametrize("via", [tfn.jit, lambda f: f], ids=["jit", "plain"])
def test_a_tangent_that_is_memory_which_the_function_writes_is_refused(via: Callable[[Function], Function]) -> None:
    """PyTorch reads the tangent after the write, or before, as its formula has it."""
    with pytest.raises(AliasedMutation, match="shares memory with a tangent"):
        via(lambda x: tfn.jvp(lambda u: u.sigmoid_(), (x,), (x,))[1])(X.clone())
    with pytest.raises(AliasedMutation, match="shares memory with a tangent"):
        via(lambda c, x: tfn.jvp(lambda u: u * c.tanh_(), (x,), (c[0:],))[1])(X.clone(), X.clone())
    apart = via(lambda x: tfn.jvp(lambda u: u.sigmoid_(), (x,), (x.clone(),))[1])(X.clone())
    torch.testing.assert_close(apart, torch.func.jvp(torch.sigmoid, (X,), (X,))[1])


def test_a_view_that_a_call_returns_is_made_again_inside_of_it() -> None:
    """The argument was written to before, so that its views are made again when they are asked for."""

    def f(x: Tensor) -> Tensor:
        x.add_(1)

        def loss(y: Tensor) -> Tensor:
            part = x.unsafe_chunk(1)[0]
            part[x > 0] *= 2
            return (part * y).sum()

        return tfn.grad(loss)(x * 2)

    x = torch.tensor([0.5, -3.0])
    y = x.clone()
    assert tfn.jit(f)(x).tolist() == f(y).tolist() == [3.0, -2.0]
    assert x.tolist() == y.tolist() == [3.0, -2.0]
