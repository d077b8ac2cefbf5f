"""The view of a function that is differentiated: gradients are on, arguments require grad, and graphs come from
outside.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch._functorch.vmap import vmap_increment_nesting

import thunder_fn as tfn
from thunder_fn import torch_internals as internals
from thunder_fn.derived import leaf_vjp as derive
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.memos import clear_caches
from thunder_fn.testing.laws.interpreters import INTERPRETERS

X = torch.tensor([1.5, 2.0, 0.5])


def asks_for_grad(v: Any) -> Any:
    return (v**3).sum() if v.requires_grad else v.detach().sum()


def asks_for_a_node(v: Any) -> Any:
    return ((v * v) if (v * v).grad_fn is not None else v.detach()).sum()


def asks_for_the_mode(v: Any) -> Any:
    return (v**2).sum() if torch.is_grad_enabled() else v.sum()


def differentiates_inside(v: Any) -> Any:
    return torch.autograd.grad((v**3).sum(), v, create_graph=True)[0].sum()


def differentiates_rows_inside(v: Any) -> Any:
    rows = torch.autograd.grad(v**3, v, torch.eye(3), is_grads_batched=True, create_graph=True)[0]
    return rows.square().sum() + torch.autograd.grad((v**2).sum(), v, create_graph=True)[0].sum()


def asks_functional_by_rows(v: Any) -> Any:
    return torch.autograd.functional.hessian(lambda u: (u**3).prod(), v, create_graph=True, vectorize=True).sum()


def asks_functional(v: Any) -> Any:
    return torch.autograd.functional.jacobian(lambda u: (u**3).sum(), v, create_graph=True).sum()


REVERSE: dict[str, Any] = {
    "grad": lambda f: tfn.grad(f),
    "jit of grad": lambda f: tfn.jit(tfn.grad(f)),
    "vjp": lambda f: lambda x: tfn.vjp(f, x)[1](torch.ones(()))[0],
    "jacrev": lambda f: tfn.jacrev(f),
    "value_and_grad": lambda f: lambda x: tfn.value_and_grad(f)(x)[1],
    "in a checkpoint": lambda f: tfn.grad(tfn.checkpoint(f)),
    "in a branch": lambda f: tfn.grad(lambda x: tfn.cond(x.sum() > 0, f, lambda v: v.sum(), (x,))),
}


@pytest.mark.parametrize("around", (contextlib.nullcontext, torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize(
    "f",
    (
        asks_for_grad,
        asks_for_a_node,
        asks_for_the_mode,
        differentiates_inside,
        differentiates_rows_inside,
        asks_functional,
        asks_functional_by_rows,
    ),
)
def test_bodies_that_ask_about_gradients(f: Any, around: Any) -> None:
    leaf = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    for name, transform in REVERSE.items():
        if name == "in a checkpoint" and f in (asks_functional, asks_functional_by_rows):
            continue  # `detach` inside makes a leaf of its own
        with around():
            torch.testing.assert_close(transform(f)(X), expected, msg=lambda m, name=name: f"{name}: {m}")


LEVELS: dict[str, Any] = {
    "grad": lambda api, f, w, x: api.grad(f)(w, x),
    "argnums": lambda api, f, w, x: api.grad(f, argnums=1)(w, x),
    "keywords": lambda api, f, w, x: api.grad(f)(w, x=x),
    "closure": lambda api, f, w, x: api.grad(lambda w: f(w, x))(w),
    "grad of grad": lambda api, f, w, x: api.grad(lambda w, x: (api.grad(f, argnums=1)(w, x) * w).sum())(w, x),
    "grad of grad, closed over": lambda api, f, w, x: api.grad(lambda w: (api.grad(lambda x: f(w, x))(x) * w).sum())(w),
    "vjp": lambda api, f, w, x: api.vjp(lambda w: f(w, x), w)[1](torch.ones(()))[0],
    "jacrev": lambda api, f, w, x: api.jacrev(f)(w, x),
    "jacfwd": lambda api, f, w, x: api.jacfwd(f)(w, x),
    "hessian": lambda api, f, w, x: api.hessian(f)(w, x),
    "jvp": lambda api, f, w, x: api.jvp(lambda w: f(w, x), (w,), (torch.ones(3),)),
    "jvp of grad": lambda api, f, w, x: api.jvp(lambda w: api.grad(f)(w, x), (w,), (torch.ones(3),)),
    "grad of jvp": lambda api, f, w, x: api.grad(lambda w: api.jvp(lambda x: f(w, x), (x,), (torch.ones(3),))[1])(w),
    "vmap": lambda api, f, w, x: api.vmap(f)(w, x),
    "vmap of one": lambda api, f, w, x: api.vmap(f, (0, None))(w, x),
    "vmap of a closure": lambda api, f, w, x: api.vmap(lambda w: f(w, x))(w),
    "vmap of grad": lambda api, f, w, x: api.vmap(api.grad(f))(w, x),
    "grad of vmap": lambda api, f, w, x: api.grad(lambda w, x: api.vmap(f)(w, x).sum())(w, x),
    "grad of vmap of one": lambda api, f, w, x: api.grad(lambda w: api.vmap(f, (0, None))(w, x).sum())(w),
}


@pytest.mark.parametrize("name", LEVELS)
def test_each_level_follows_its_own_arguments(name: str) -> None:
    """`requires_grad`, `is_leaf` and `grad_fn` inside of a transform, of tensors that require grad outside."""
    w, x = (v.clone().requires_grad_() for v in (X, X.sin()))

    def found(api: Any, jit: Any = lambda f: f) -> Any:
        told: list[Any] = []

        def f(w: Any, x: Any) -> Any:
            for v in (w, x, w * 2, x * 2, w * x, w.detach() * x):
                told.append((v.requires_grad, v.is_leaf, v.grad_fn is None))
            k = 2.0 if x.requires_grad else 3.0
            return (w**2 * x**2 * k * (5.0 if w.requires_grad else 7.0)).sum()

        return jit(lambda w, x: LEVELS[name](api, f, w, x))(w, x), told

    expected = found(torch.func)
    for result, told in (found(tfn), found(tfn, tfn.jit)):
        torch.testing.assert_close(result, expected[0])
        assert told == expected[1]


def test_a_function_of_autograd_has_gradients_at_each_level() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Any, x: Any) -> Any:
            ctx.save_for_backward(w, x)
            return w * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            w, x = ctx.saved_tensors
            return tuple(
                grads[0] * other if flag else None for other, flag in zip((x, w), ctx.needs_input_grad, strict=True)
            )

    def inner(x: Any) -> Any:
        return tfn.grad(lambda w: (Product.apply(w, x) ** 2).sum())(X).sum()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(tfn.grad(inner)(X.sin()), 4 * X * X.sin())


def test_an_inner_no_grad_is_seen_under_an_outer_one() -> None:
    def target(v: Any) -> Any:
        with torch.no_grad():
            constant = v**2
        return (v - constant).square().sum()

    with torch.no_grad():
        torch.testing.assert_close(tfn.grad(target)(X), torch.func.grad(target)(X))
        torch.testing.assert_close(tfn.jit(tfn.grad(target))(X), torch.func.grad(target)(X))


ASIDE = {
    "vmap": lambda api, f: api.vmap(f),
    "vjp": lambda api, f: lambda x: api.vjp(f, x)[0],
    "jvp": lambda api, f: lambda x: api.jvp(f, (x,), (x.detach(),)),
    "grad": lambda api, f: api.grad(lambda x: (f(x)[1].sum(), f(x)), has_aux=True),
    "vmap of jvp": lambda api, f: api.vmap(lambda x: api.jvp(f, (x,), (x,))),
}


@pytest.mark.parametrize("name", ASIDE)
def test_results_of_no_grad_require_no_grad_outside(name: str) -> None:
    """So an outer autograd sees as much of a transform's results as of torch.func's."""

    def f(x: Any) -> Any:
        with torch.no_grad():
            aside = x.sin()
        return aside, aside * x, x.detach().cos()

    asked, known = (
        torch.utils._pytree.tree_map(lambda y: y.requires_grad, ASIDE[name](api, f)(X.clone().requires_grad_()))
        for api in (tfn, torch.func)
    )
    assert asked == known


def test_arguments_that_are_differentiated_may_change_in_place() -> None:
    def doubled(v: Any) -> Any:
        v.mul_(v)
        return v.sum()

    torch.testing.assert_close(tfn.grad(doubled)(X.clone()), 2 * X)
    torch.testing.assert_close(tfn.grad(lambda x: tfn.vmap(doubled)(x[None] * 1).sum())(X), 2 * X)


def test_graphs_from_outside() -> None:
    x = torch.randn(4, requires_grad=True)
    y = x**2
    z = torch.arange(12.0).reshape(3, 4) @ y
    through = lambda v: torch.autograd.grad(
        (y * v).sum() + z.sum() * v.sum() + (x * v).sum(), (x, y), retain_graph=True
    )
    expected = [torch.stack(column) for column in zip(*map(through, torch.eye(4)), strict=True)]
    torch.testing.assert_close(list(tfn.vmap(through)(torch.eye(4))), expected)
    torch.testing.assert_close(
        tfn.jit(lambda v: torch.autograd.grad((y * v).sum(), y)[0])(torch.ones(4)), torch.ones(4)
    )
    for refused in (through, lambda v: (y * v).sum().backward(), lambda v: torch.autograd.backward([y.sum()])):
        with pytest.raises(UnsupportedCall, match="a graph that was recorded outside"):
            tfn.jit(refused)(torch.ones(4))
    assert x.grad is None


@pytest.mark.parametrize(
    "f",
    (
        torch.exp,
        torch.Tensor.float,
        lambda x: x[1:1],
        lambda x: x[:, :0] * x.sum(),
        lambda x: x.as_strided((2, 2), (2, 1), 1),
        lambda x: torch.as_strided_scatter(x, x.sin()[:2, :2].contiguous(), (2, 2), (1, 2), 1),
        lambda x: x.t().diagonal().unfold(0, 2, 1),
    ),
)
@pytest.mark.parametrize("shape", ((3, 3), (3, 0)))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_graphs_from_outside_of_views_and_of_nothing(f: Any, shape: Any) -> None:
    """A pullback that eager recorded is mapped as a loop over cotangents with memory of their own does it."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    try:
        y = f(x)
    except RuntimeError:
        return  # there is no such view of an empty tensor
    pull = lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0]
    rows = torch.randn(2, *y.shape, dtype=y.dtype)
    torch.testing.assert_close(tfn.vmap(pull)(rows), torch.stack([pull(row.clone()) for row in rows]))


@pytest.mark.parametrize("retains", (True, False))
def test_a_mapped_backward_of_a_graph_from_outside_is_one_backward(retains: bool) -> None:
    """Hooks in the graph see cotangents, each once, and the graph is freed if it is not retained."""
    x, rows, seen = torch.randn(2, requires_grad=True), torch.randn(3, 2), list[Any]()
    between = 2 * x
    between.register_hook(lambda cotangent: seen.append(cotangent.shape))
    y = between**2
    pull = lambda v: torch.autograd.grad(y, x, v, retain_graph=retains)[0]
    torch.testing.assert_close(tfn.vmap(pull)(rows), rows * 8 * x.detach())
    assert seen == [(2,)]
    again = contextlib.nullcontext() if retains else pytest.raises(RuntimeError, match="a second time")
    with again:
        tfn.vmap(pull)(rows)


@pytest.mark.parametrize("in_dims", (([0], None), [[0], None], ([0], [None]), ([0], 0), 0))
@pytest.mark.parametrize("out_dims", (0, 1, [0], [1]))
def test_dims_of_lists_where_a_mapped_function_needs_a_graph_from_outside(in_dims: Any, out_dims: Any) -> None:
    """A list of arguments has a list of dims, whoever maps the function."""
    x, rows = torch.randn(3, requires_grad=True), torch.randn(3, 3)
    y, given = x**2, (rows, [torch.ones(3, 3)])
    pull = lambda v, more: [torch.autograd.grad(y, x, v[0], retain_graph=True)[0] + more[0]]
    plain = lambda v, more: [2 * x.detach() * v[0] + more[0]]
    args = ([given[0]], given[1])
    (found,), (wanted,) = (tfn.vmap(f, in_dims, out_dims)(*args) for f in (pull, plain))
    torch.testing.assert_close(found, wanted)


def test_hooks_on_saved_tensors_are_not_dropped() -> None:
    def hooked(v: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 10):
            return (v**2).sum()

    for call in (tfn.grad(hooked), tfn.jit(tfn.grad(hooked)), lambda x: tfn.jit(hooked)(x.clone().requires_grad_())):
        with pytest.raises(UnsupportedCall, match="saved_tensors_hooks"):
            call(X)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 10):
        torch.testing.assert_close(tfn.grad(lambda v: (v**2).sum())(X), 2 * X)

    def kept_elsewhere(v: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return (v**2).sum()

    torch.testing.assert_close(tfn.grad(kept_elsewhere)(X), 2 * X)


@pytest.mark.parametrize(
    "transform", (tfn.vmap, tfn.grad, lambda f: lambda x: tfn.jvp(f, (x,), (x,)), lambda f: tfn.vmap(tfn.jit(f)))
)
def test_data_of_what_a_transform_is_given_is_not_set(transform: Any) -> None:
    def rebinds(v: Any) -> Any:
        v.data = torch.ones_like(v)
        return v.sum()

    x = torch.zeros(3)
    with pytest.raises(UnsupportedCall, match="of a tensor from outside"):
        transform(rebinds)(x)
    torch.testing.assert_close(x, torch.zeros(3))
    tfn.jit(rebinds)(x)
    torch.testing.assert_close(x, torch.ones(3))


def test_the_tangent_of_a_number_is_zero() -> None:
    f = lambda v: {"sum": v.sum(), "float": 12.2, "int": 3, "size": v.shape[0], "text": "x"}
    expected = {"sum": torch.tensor(3.0), "float": 0.0, "int": 0, "size": 0, "text": "x"}
    assert tfn.jvp(f, (X,), (torch.ones(3),))[1] == expected
    assert tfn.linearize(f, X)[1](torch.ones(3)) == expected


def test_remainders_of_a_number() -> None:
    x = torch.tensor([1.0, 3.0, -2.5], requires_grad=True)
    for number in (0, 5, 2.5):
        (expected,) = torch.autograd.grad(torch.remainder(torch.tensor(float(number)), x).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(tfn.jit(lambda x, n=number: n % x)(x).sum(), x)[0], expected)


AROUND: dict[str, Any] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "below autograd": internals.below_autograd,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "fake tensors": internals.FakeTensorMode,
    "batched": lambda: vmap_increment_nesting(2, "error"),
}
"""States of PyTorch in which an executor, or the code of a user, may ask for a rule for the first time."""


def _many_rules(x: Any) -> Any:
    y = torch.softmax(torch.nn.functional.silu(x.expand(2, 3)), 0)
    return torch.where(y > 0.5, torch.atan2(y, x), y.cumsum(0)).sum() + torch.linalg.vector_norm(y)


@pytest.mark.parametrize("around", AROUND)
def test_rules_are_found_alike_whatever_runs_around(around: str) -> None:
    one = tfn.trace(_many_rules, X)
    found = []
    for context in (contextlib.nullcontext, AROUND[around]):
        clear_caches()
        with context():
            made = [INTERPRETERS[name].run(one) for name in ("vjp", "jvp", "vjp of vjp", "forward_backward")]
            found.append((derive.ruled(one), [str(new) for news in made for new in news]))
    clear_caches()
    assert found[0] == found[1]


# ---- writes where gradients are off ----


def _multiplied(v: Any) -> Any:
    y = v * 1
    with torch.no_grad():
        y.mul_(v)
    return y * v


def _copied(v: Any) -> Any:
    y = v * 1
    with torch.no_grad():
        y.copy_(v * 3)
    return y * v


def _element_written(v: Any) -> Any:
    y = v * 1
    with torch.no_grad():
        y[0] = v[1] * 2
    return y * v


def _made_and_written(v: Any) -> Any:
    with torch.no_grad():
        y = v * 2
        y.add_(v)
    return y * v


def _written_by_a_view(v: Any) -> Any:
    y = v * 1
    view = y.view(-1)
    with torch.no_grad():
        view.mul_(v)
    return y + view * v


def _written_by_a_view_from_inside(v: Any) -> Any:
    y = v * 1
    with torch.no_grad():
        y.view(-1).mul_(v)
    return y * v


def _detached_written(v: Any) -> Any:
    y = v * 1
    y.detach().mul_(v)
    return y * v


def _constant_written(v: Any) -> Any:
    y = torch.ones_like(v)
    with torch.no_grad():
        y.add_(v * v)
    return y * v


TRANSFORMS: dict[str, Any] = {
    "jvp": lambda lib, f: lib.jvp(f, (X,), (torch.ones(3),)),
    "jacfwd": lambda lib, f: lib.jacfwd(f)(X),
    "vjp": lambda lib, f: lib.vjp(f, X)[1](torch.ones(3)),
    "jvp of jvp": lambda lib, f: lib.jvp(lambda v: lib.jvp(f, (v,), (torch.ones(3),))[1], (X,), (torch.ones(3),)),
    "jacrev of jacfwd": lambda lib, f: lib.jacrev(lib.jacfwd(f))(X),
    "jacfwd of jacrev": lambda lib, f: lib.jacfwd(lib.jacrev(f))(X),
    "vmap of jvp": lambda lib, f: lib.vmap(lambda t: lib.jvp(f, (X,), (t,))[1])(torch.eye(3)),
    "jvp of vmap": lambda lib, f: lib.jvp(lib.vmap(f), (X.expand(2, 3) * 1,), (torch.ones(2, 3),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "f",
    [
        _multiplied,
        _copied,
        _element_written,
        _made_and_written,
        _written_by_a_view,
        _written_by_a_view_from_inside,
        _detached_written,
        _constant_written,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_a_write_without_gradients_has_the_derivatives_of_torch_func(f: Any, transform: str) -> None:
    """Reverse mode keeps the history from before the write; forward mode, which is not off, follows it."""
    run = TRANSFORMS[transform]
    expected = run(torch.func, f)
    for mine in (f, tfn.jit(f)):
        torch.testing.assert_close(run(tfn, mine), expected)
