"""Symbols in bodies: one program for all batch sizes of vmap, lengths of scan and sizes around cond, while and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.jitted import cache_info, jit

Tensor = torch.Tensor
w = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) / 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * cotangent * ctx.saved_tensors[0].cos()

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return Double.apply(x) * info.batch_size / x.shape[0], 0  # type: ignore[return-value]


@tfn.custom_vmap
def scaled(x: Tensor) -> Tensor:
    return x * 2


@scaled.def_vmap
def _scaled_rule(axis_size: int, in_batched: Any, x: Tensor) -> tuple[Tensor, bool]:
    return x * 2 * axis_size / x.shape[0], True


def _cell(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return (carry @ w + x).tanh(), carry.sum()


def _rnn(x: Tensor) -> Tensor:
    last, sums = tfn.scan(_cell, torch.zeros(4), x)
    return last.sum() + sums.pow(2).sum() / x.shape[0]


def _steps(x: Tensor) -> Tensor:
    return tfn.while_loop(lambda x: x.sum() < 10, lambda x: (x + x.shape[0],), (x,))[0]


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: tfn.vmap(lambda row: (row @ w).softmax(-1) * row.shape[0])(x),
    "vmap(grad)": lambda x: tfn.vmap(tfn.grad(lambda row: torch.tanh(row * w[0]).sum() * x.shape[0]))(x),
    "jacrev": lambda x: tfn.jacrev(lambda v: v.sin() * v.shape[0])(x.sum(1)),
    "hessian": lambda x: tfn.hessian(lambda v: v.sin().sum() * v.cos().logsumexp(0))(x.sum(1)),
    "scan": _rnn,
    "grad(scan)": tfn.grad(_rnn),
    "jvp(scan)": lambda x: tfn.jvp(_rnn, (x,), (x,)),
    "vmap(scan)": lambda x: tfn.vmap(_rnn)(torch.stack([x, x + 1])),
    "scan(reverse)": lambda x: tfn.scan(_cell, torch.zeros(4), x, reverse=True),
    "fori_loop": lambda x: tfn.fori_loop(0, x.shape[0], lambda i, v: v * 0.5 + i, x),
    "map": lambda x: tfn.map(lambda row: row * x.shape[0], x),
    "cond": lambda x: tfn.cond(x.sum() > 0, lambda x: x * x.shape[0], lambda x: x.cos(), (x,)),
    "vmap(cond)": lambda x: tfn.vmap(lambda v: tfn.cond(v.sum() > 0, torch.sin, torch.cos, (v,)))(x),
    "while_loop": _steps,
    "vmap(while_loop)": lambda x: tfn.vmap(_steps)(x),
    "checkpoint": tfn.grad(lambda x: checkpoint(lambda x: (x @ w).tanh() * x.shape[0], x, use_reentrant=False).sum()),
    "jit": lambda x: jit(lambda x: x * x.shape[0])(x),
    "autograd.Function": tfn.grad(lambda x: Double.apply(x).sum() * x.shape[0]),
    "vmap(autograd.Function)": lambda x: tfn.vmap(Double.apply)(x),
    "custom_vmap": lambda x: tfn.vmap(scaled)(x),
    "dropout": lambda x: tfn.vmap(lambda v: torch.nn.functional.dropout(v), randomness="different")(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_program_for_all_sizes(name: str) -> None:
    f = PROGRAMS[name]
    g = jit(f, cache="symbolic values")
    for rows in (3, 7, 5):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        torch.manual_seed(0)
        mine = g(x)
        torch.manual_seed(0)
        torch.testing.assert_close(mine, f(x))
    assert cache_info(g).misses == 1


def test_sizes_0_and_1_have_programs_of_their_own() -> None:
    for name in ("vmap", "scan", "grad(scan)", "cond", "fori_loop"):
        g = jit(PROGRAMS[name], cache="symbolic values")
        for rows in (3, 1, 4, 0, 1):
            torch.testing.assert_close(g(torch.ones(rows, 4)), PROGRAMS[name](torch.ones(rows, 4)), equal_nan=True)
        assert cache_info(g).misses == 3


def test_a_rule_that_holds_for_one_number_only_is_for_this_number() -> None:
    def per_example(x: Tensor) -> Tensor:
        return tfn.vmap(lambda row: torch.nn.functional.conv1d(row[None], w[None, :1, :2]))(x)

    g = jit(per_example, cache="symbolic values")
    for rows in (3, 5, 3, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(g(x), per_example(x))
    assert cache_info(g).misses <= 3


def first_half(x: Tensor) -> Tensor:
    return x.split(x.shape[0] // 2)[0]


def halves_swapped(x: Tensor) -> Tensor:
    return torch.cat(x.split(x.shape[0] // 2)[::-1])


AROUND: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "the whole function": tfn.vmap,
    "a part of the function": lambda f: lambda x: tfn.vmap(f)(x) + 1,
    "of a gradient": lambda f: tfn.vmap(tfn.grad(lambda x: f(x).square().sum())),
    "inside a gradient": lambda f: tfn.grad(lambda x: tfn.vmap(f)(x).square().sum()),
    "inside jvp": lambda f: lambda x: tfn.jvp(tfn.vmap(f), (x,), (x,)),
    "twice": lambda f: lambda x: tfn.vmap(tfn.vmap(f, in_dims=1, out_dims=1))(x),
    "in a jitted function": lambda f: jit(tfn.vmap(f)),
    "in the body of a loop": lambda f: lambda x: tfn.map(tfn.vmap(f), x[None]),
}


@pytest.mark.parametrize("f", [first_half, halves_swapped])
@pytest.mark.parametrize("around", AROUND)
def test_a_rule_that_took_a_size_for_a_number_guards_what_is_made_of_it(
    f: Callable[[Tensor], Tensor], around: str
) -> None:
    whole = AROUND[around](f)
    g = jit(whole, cache="symbolic values")
    for rows in (6, 4, 8, 5, 6):
        x = torch.randn(2, rows, 3, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(g(x), whole(x))


def test_a_shape_is_a_size() -> None:
    g = jit(lambda x: x.shape, cache="symbolic values")
    for shape in ((2, 3), (4, 5)):
        assert type(g(torch.ones(shape))) is torch.Size
        assert g(torch.ones(shape)) == torch.Size(shape)
    assert pytree.flatten(g(torch.ones(4, 5)))[0] == [4, 5]


class Asking(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor | None:  # type: ignore[override]
        return 2 * cotangent * ctx.saved_tensors[0].cos() if ctx.needs_input_grad[0] else None


@tfn.custom_vjp
def pulled(x: Tensor) -> Tensor:
    return x.sin()


pulled.defvjp(lambda x: (x.sin(), x), lambda x, cotangent: (2 * cotangent * x.cos(),))


@tfn.custom_jvp
def pushed(x: Tensor) -> Tensor:
    return x.sin()


@pushed.defjvp
def _pushed(primals: Any, tangents: Any) -> Any:
    return primals[0].sin(), 2 * tangents[0] * primals[0].cos()


RULES: dict[str, Callable[[Tensor], Any]] = {
    "a Function that asks what is needed": Asking.apply,
    "Function": Double.apply,
    "custom_vjp": pulled,
    "custom_jvp": pushed,
    "custom_vjp in an operator": tfn.composite(pulled),
}


@pytest.mark.parametrize("options", [{}, {"cache": "symbolic values"}], ids=["sizes", "values"])
@pytest.mark.parametrize("name", RULES)
def test_the_rule_of_a_batch_has_the_size_that_another_argument_binds(name: str, options: dict[str, Any]) -> None:
    g = jit(lambda a, x: tfn.vmap(RULES[name])(x).t() @ a, **options)
    for rows in (3, 4, 5):
        a, x = torch.randn(rows, 2), torch.randn(rows, 4, requires_grad=True)
        result = g(a, x)
        torch.testing.assert_close(result, x.sin().t() @ a)
        (mine,) = torch.autograd.grad(result.sum(), x)
        torch.testing.assert_close(mine, 2 * torch.autograd.grad((x.sin().t() @ a).sum(), x)[0])
