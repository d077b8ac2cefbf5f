"""custom_vjp, custom_jvp and custom_vmap under every transform, and what they say of wrong rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import check, custom_jvp, custom_vjp, custom_vmap
from thunder_fn.errors import CustomRuleError
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.vmap import vmap

Tensor = torch.Tensor
SCALE = torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64)


def product(p: dict[str, Tensor], y: Tensor, k: float = 2.0) -> dict[str, Tensor]:
    return {"sign": p["w"] > 0, "out": p["w"] * y * k * SCALE}


def with_vjp() -> Any:
    """The product, with ten times the gradient of w."""
    f = custom_vjp(product)

    def fwd(p: dict[str, Tensor], y: Tensor, k: float) -> Any:
        return f(p, y, k), {"w": p["w"], "rest": (y, k)}

    def bwd(residuals: Any, ct: Any) -> Any:
        y, k = residuals["rest"]
        assert ct["sign"] is None
        return {"w": 10 * ct["out"] * y * k * SCALE}, ct["out"] * residuals["w"] * k * SCALE, None

    f.defvjp(fwd, bwd)
    return f


def with_jvp() -> Any:
    f = custom_jvp(product)

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (p, y, k), (p_dot, y_dot, k_dot) = primals, tangents
        assert k_dot is None
        moved = 10 * p_dot["w"] * y * k * SCALE + y_dot * p["w"] * k * SCALE
        return f(p, y, k), {"sign": None, "out": moved}

    return f


class Product(torch.autograd.Function):
    """The reference: what both rules say, as PyTorch writes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, y: Tensor) -> Tensor:
        return w * y * 2 * SCALE

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, ct: Tensor) -> Any:
        w, y = ctx.saved_tensors
        return 10 * ct * y * 2 * SCALE, ct * w * 2 * SCALE


RULES = {"custom_vjp": with_vjp, "custom_jvp": with_jvp}


def loss_of(f: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, y: f({"w": w}, y)["out"].sin().sum()


def reference(w: Tensor, y: Tensor) -> Tensor:
    return Product.apply(w, y).sin().sum()


def point() -> tuple[Tensor, Tensor]:
    return torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", RULES)
def test_gradients_of_any_order(kind: str) -> None:
    f, args = loss_of(RULES[kind]()), point()
    close(tfn.grad(f, argnums=(0, 1))(*args), torch.func.grad(reference, argnums=(0, 1))(*args))

    def twice(transforms: Any, g: Any) -> Any:
        return transforms.grad(lambda w, y: transforms.grad(g)(w, y).sin().sum(), argnums=(0, 1))(*args)

    close(twice(tfn, f), twice(torch.func, reference))
    close([tfn.jacrev(tfn.grad(f))(*args)], [torch.func.jacrev(torch.func.grad(reference))(*args)])


@pytest.mark.parametrize("kind", RULES)
def test_batches(kind: str) -> None:
    f = loss_of(RULES[kind]())
    w, y = (torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    for in_dims, args in (((0, 0), (w, y)), ((None, 0), (w[0], y)), ((0, None), (w, y[0]))):
        for argnums in (0, 1):
            found = tfn.vmap(tfn.grad(f, argnums), in_dims)(*args)
            close([found], [torch.func.vmap(torch.func.grad(reference, argnums), in_dims)(*args)])
            summed = tfn.grad(lambda *xs: tfn.vmap(f, in_dims)(*xs).sum(), argnums)(*args)
            close(
                [summed], [torch.func.grad(lambda *xs: torch.func.vmap(reference, in_dims)(*xs).sum(), argnums)(*args)]
            )


@pytest.mark.parametrize("kind", RULES)
def test_every_trace_is_checked(kind: str) -> None:
    f, args = loss_of(RULES[kind]()), point()
    program = tfn.trace(f, *args)
    assert program.equations[0].op.name == kind
    for trace in (
        program,
        grad_and_value(program, (True, True)),
        jvp(program, (True, False)),
        vmap(program, (0, None), 2)[0],
        vmap(grad_and_value(program, (True, True)), (0, None), 2)[0],
        grad_and_value(
            tfn.trace(lambda w, y: tfn.vmap(f, (0, None))(w, y).sum(), torch.stack([args[0]] * 2), args[1]),
            (True, True),
        ),
    ):
        check(trace)


def test_the_jvp_of_custom_vjp_is_that_of_its_function() -> None:
    (w, y), tangents = point(), point()
    close(tfn.jvp(loss_of(with_vjp()), (w, y), tangents), tfn.jvp(loss_of(product), (w, y), tangents))


@pytest.mark.parametrize("keeps", ("output", "copy", "input"))
def test_second_derivatives_are_those_of_the_first(keeps: str) -> None:
    """As in JAX, `fwd` and `bwd` are differentiated as they are written, whichever way asks: by finite differences."""
    f = tfn.custom_vjp(torch.exp)

    def fwd(x: Any) -> Any:
        y = x.exp()
        return y, {"output": y, "copy": x.exp(), "input": x}[keeps]

    f.defvjp(fwd, lambda kept, ct: (ct * 2 * (kept if keeps != "input" else kept.exp()),))
    x = torch.tensor([0.7, 1.3], dtype=torch.float64)
    loss = lambda x: f(x).sum()
    step = 1e-6
    expected = (tfn.grad(loss)(x + step) - tfn.grad(loss)(x - step)) / (2 * step)

    def by_autograd(grad: Any) -> Any:
        y = x.clone().requires_grad_()
        return torch.autograd.grad(grad(y).sum(), y)[0]

    first = lambda f: lambda y: torch.autograd.grad(f(y), y, create_graph=True)[0]
    twice = lambda api: api.grad(lambda x: api.grad(loss)(x).sum())
    found = {
        "grad of grad": twice(tfn)(x),
        "jit": tfn.jit(twice(tfn))(x),
        "torch.func": twice(torch.func)(x),
        "autograd": by_autograd(first(loss)),
        "autograd of jit": by_autograd(first(tfn.jit(loss))),
        "autograd of grad": by_autograd(tfn.grad(loss)),
        "inside jit": by_autograd(tfn.jit(first(loss))),
    }
    for name, value in found.items():
        torch.testing.assert_close(value.detach(), expected, msg=lambda m, name=name: f"{name}: {m}")


def test_the_jvp_of_custom_jvp_is_its_rule() -> None:
    (w, y), (w_dot, y_dot) = point(), point()
    f = loss_of(with_jvp())
    _, tangent = tfn.jvp(f, (w, y), (w_dot, y_dot))
    gradients = torch.func.grad(reference, argnums=(0, 1))(w, y)
    close([tangent], [(gradients[0] * w_dot + gradients[1] * y_dot).sum()])
    close([tfn.linearize(f, w, y)[1](w_dot, y_dot)], [tangent])
    close([tfn.jvp(lambda w: f(w, y), (w,), (w_dot,))[1]], [(gradients[0] * w_dot).sum()])


@pytest.mark.parametrize("kind", RULES)
def test_eager_calls(kind: str) -> None:
    f, (w, y) = loss_of(RULES[kind]()), point()
    close([f(w, y)], [reference(w, y)])
    w.requires_grad_()
    close(torch.autograd.grad(f(w, y), w), torch.autograd.grad(reference(w, y), w))
    close([torch.func.grad(f)(w.detach(), y)], [torch.func.grad(reference)(w.detach(), y)])
    batch = torch.stack([w, 2 * w]).detach()
    close(
        [torch.func.vmap(torch.func.grad(f), (0, None))(batch, y)],
        [torch.func.vmap(torch.func.grad(reference), (0, None))(batch, y)],
    )


@pytest.mark.parametrize("kind", RULES)
def test_autograd_inside_a_traced_function(kind: str) -> None:
    f, args = loss_of(RULES[kind]()), tuple(x.requires_grad_() for x in point())
    program = tfn.trace(lambda *xs: torch.autograd.grad(f(*xs), xs), *args)
    check(program)
    close(tfn.evaluate(program, args), torch.autograd.grad(reference(*args), args))


def test_static_arguments() -> None:
    def scaled(g: Callable[[Tensor], Tensor], x: Tensor, k: int) -> Tensor:
        return g(x) * k

    f = custom_vjp(scaled, nondiff_argnums=(0, 2))
    f.defvjp(lambda g, x, k: (g(x) * k, x), lambda g, k, x, ct: (ct * x * k * 100,))
    close([tfn.grad(lambda x: f(torch.sin, x, k=3).sum())(SCALE)], [SCALE * 300])
    j = custom_jvp(scaled, nondiff_argnums=(0, -1))
    j.defjvp(lambda g, k, primals, tangents: (g(primals[0]) * k, tangents[0] * 100 * k))
    close([tfn.grad(lambda x: j(torch.sin, x, 3).sum())(SCALE)], [SCALE * 0 + 300])
    with pytest.raises(CustomRuleError) as error:
        tfn.grad(lambda x: f(torch.sin, x, x).sum())(SCALE)
    assert message_of(error.value) == (
        "scaled: args[2] is in nondiff_argnums, so it is static, but it holds a tensor\n"
        "Take it out of nondiff_argnums, and return None for it from the rule."
    )


def test_a_rule_that_closes_over_a_traced_tensor() -> None:
    def f(w: Tensor, y: Tensor) -> Tensor:
        g = custom_vjp(lambda x: x * 2)
        g.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * y * 7,))
        return g(w).sum()

    w, y = point()
    close(tfn.grad(f, argnums=(0, 1))(w, y), [7 * y, torch.zeros_like(y)])
    close([tfn.vmap(tfn.grad(f))(torch.stack([w, w]), torch.stack([y, -y]))], [torch.stack([7 * y, -7 * y])])


def scaled_by(decorate: Any, stop: Any = lambda w: w) -> Any:
    """A function of w and x whose rule knows of x only, and gives the true derivative times ten."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        def scaled(x: Tensor) -> Tensor:
            return x * stop(w)

        f = decorate(scaled)
        if decorate is custom_vjp:
            f.defvjp(lambda x: (f(x), None), lambda _, ct: (10 * ct * w,))
        else:
            f.defjvp(lambda primals, tangents: (f(*primals), 10 * tangents[0] * w))
        return f(x).sum()

    return loss


@pytest.mark.parametrize("decorate", [custom_vjp, custom_jvp])
def test_a_function_that_closes_over_what_is_differentiated(decorate: Any) -> None:
    """Its rule says nothing of it, so its derivative would be silently lost; jax refuses it too."""
    w, y = point()
    loss = scaled_by(decorate)
    for derivative in (
        lambda: tfn.grad(loss)(w, y),
        lambda: tfn.jvp(lambda w: loss(w, y), (w,), (w,)),
        lambda: tfn.jit(tfn.vmap(tfn.grad(loss, (0, 1))))(w[None], y[None]),
    ):
        with pytest.raises(CustomRuleError) as error:
            derivative()
        what, where, fix = message_of(error.value).split("\n")
        closed = f"an f64[{', '.join(map(str, w.shape))}]"
        assert what in {
            f"{decorate.__name__}: {name}scaled closes over {closed} that is differentiated, and its rule says nothing of it"
            for name in ("", "vmap_")
        }
        assert where.startswith("from:         ") and where.endswith("test_custom.py:" + where.rsplit(":", 1)[1])
        assert fix == (
            "Pass it as an argument that the rule knows; or close over `stop_gradient` of it, if it is to be constant."
        )
    close([tfn.grad(loss, 1)(w, y)], [10 * w])
    close(tfn.grad(scaled_by(decorate, tfn.stop_gradient), (0, 1))(w, y), [torch.zeros_like(w), 10 * w])


def test_forward_mode_of_pytorch_sees_the_rule() -> None:
    """Under torch.func.jvp and dual tensors, in eager calls and jitted ones, a custom_jvp is its rule, not its body."""

    @custom_jvp
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() * y

    f.defjvp(lambda primals, tangents: (f(*primals), 100 * tangents[0] + 1000 * tangents[1]))
    x, y = point()[0], 2 * point()[0]
    for call in (f, tfn.jit(f)):
        close([torch.func.jvp(call, (x, y), (x, y))[1]], [100 * x + 1000 * y])
        close([torch.func.jacfwd(lambda x, call=call: call(x, y).sum())(x)], [torch.full_like(x, 100)])
        with forward_ad.dual_level():
            close([forward_ad.unpack_dual(call(forward_ad.make_dual(x, x), y)).tangent], [100 * x])
        mixed = torch.func.grad(lambda y, call=call: torch.func.jvp(lambda x: call(x, y), (x,), (x * y,))[1].sum())(y)
        close([mixed], [100 * x])


def test_integer_arguments_and_none() -> None:
    @custom_vjp
    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    pick.defvjp(
        lambda x, i: (x[i], (x, i)), lambda res, ct: [torch.zeros_like(res[0]).index_add(0, res[1], 2 * ct), None]
    )
    index = torch.tensor([0, 0, 2])
    close([tfn.grad(lambda x: pick(x, index).sum())(SCALE)], [torch.tensor([4.0, 0.0, 2.0], dtype=torch.float64)])


# ---- custom_vmap ----


def with_vmap() -> Any:
    f = custom_vmap(lambda p, y: {"out": p["w"] * y.sum(), "other": y})

    @f.def_vmap
    def rule(axis_size: int, in_batched: Any, p: Any, y: Tensor) -> Any:
        (w_batched,), y_batched = in_batched[0].values(), in_batched[1]
        total = y.sum(-1, keepdim=True) if y_batched else y.sum()
        return {"out": p["w"] * total + 100, "other": y}, {"out": w_batched or y_batched, "other": y_batched}

    return f


def test_custom_vmap() -> None:
    f = with_vmap()
    w, y = (torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    for in_dims, args in (((0, 0), (w, y)), ((None, 0), (w[0], y)), ((0, None), (w, y[0]))):
        g = lambda w, y: f({"w": w}, y)["out"]
        expected = torch.vmap(lambda w, y: w * y.sum() + 100, in_dims)(*args)
        close([tfn.vmap(g, in_dims)(*args)], [expected])
        program = tfn.trace(g, w[0], y[0])
        check(program)
        check(vmap(program, in_dims, 4)[0])
        two = tfn.vmap(tfn.vmap(g, in_dims), (0, 0))(*(torch.stack([arg, 2 * arg]) for arg in args))
        close(two, [expected, torch.vmap(lambda w, y: w * y.sum() + 100, in_dims)(*(2 * arg for arg in args))])
        rows = tfn.grad(lambda w, y: tfn.vmap(g, in_dims)(w, y).sin().sum(), argnums=(0, 1))(*args)
        close(
            rows,
            torch.func.grad(
                lambda w, y: torch.vmap(lambda w, y: w * y.sum() + 100, in_dims)(w, y).sin().sum(), argnums=(0, 1)
            )(*args),
        )
    close([tfn.grad(lambda w: f({"w": w}, y[0])["out"].sum())(w[0])], [y[0].sum().expand(3)])
    close([f({"w": w[0]}, y[0])["out"]], [w[0] * y[0].sum()])


# ---- wrong rules ----


def vjp_error(fwd: Any, bwd: Any, *args: Any) -> str:
    f = custom_vjp(lambda *xs: xs[0]["w"] * 2)
    f.defvjp(fwd, bwd)
    with pytest.raises(CustomRuleError) as error:
        tfn.grad(lambda p, *xs: f(p, *xs).sum())(*args)
    return message_of(error.value)


P = {"w": torch.ones(3), "b": torch.ones(2)}
INT = torch.ones(2, dtype=torch.int64)


def fwd(*xs: Any) -> Any:
    return xs[0]["w"] * 2, None


WRONG_VJPS = [
    (
        lambda p: p["w"] * 2,
        lambda res, ct: (ct,),
        (P,),
        "custom_vjp: fwd of <lambda> must return (output, residuals), but it returned f32[3]",
    ),
    (
        lambda p: ((p["w"], p["b"]), None),
        lambda res, ct: (ct,),
        (P,),
        "custom_vjp: fwd of <lambda> returned another structure than the function: "
        "its out is a tuple of 2, and the function's out is a leaf",
    ),
    (
        lambda p: (p["b"] * 2, None),
        lambda res, ct: (ct,),
        (P,),
        "custom_vjp: fwd of <lambda> returned f32[2] for out, but the function returns f32[3]",
    ),
    (
        fwd,
        lambda res, ct: ct,
        (P,),
        "custom_vjp: bwd of <lambda> must return a tuple with one gradient for each argument, 1 of them, "
        "but it returned f32[3]",
    ),
    (
        fwd,
        lambda res, ct: (None, None),
        (P,),
        "custom_vjp: bwd of <lambda> must return a tuple with one gradient for each argument, 1 of them, "
        "but it returned a tuple of 2",
    ),
    (
        fwd,
        lambda res, ct: (ct,),
        (P,),
        "custom_vjp: bwd of <lambda> returned f32[3] for args[0], which is a dict with the keys 'b', 'w'\n"
        "Return the same structure, with None for what has no gradient.",
    ),
    (
        fwd,
        lambda res, ct: ({"w": ct.double(), "b": None},),
        (P,),
        "custom_vjp: bwd of <lambda> returned f64[3] for args[0]['w'], which is f32[3]\n"
        "Return the same shape and dtype, e.g. with `.sum_to_size(x.shape)` or `.to(x.dtype)`.",
    ),
    (
        fwd,
        lambda res, ct: ({"w": 1.0, "b": None},),
        (P,),
        "custom_vjp: bwd of <lambda> returned a float for args[0]['w'], which is f32[3]",
    ),
    (
        fwd,
        lambda res, ct: (None, ct[:2]),
        (P, INT),
        "custom_vjp: bwd of <lambda> returned a gradient for args[1], which is i64[2]\nReturn None for it.",
    ),
]


@pytest.mark.parametrize(("fwd", "bwd", "args", "text"), WRONG_VJPS)
def test_wrong_backwards(fwd: Any, bwd: Any, args: Any, text: str) -> None:
    assert vjp_error(fwd, bwd, *args) == text


def jvp_error(rule: Any) -> str:
    f = custom_jvp(lambda p: {"o": p["w"] * 2})
    f.defjvp(rule)
    with pytest.raises(CustomRuleError) as error:
        tfn.grad(lambda p: f(p)["o"].sum())(P)
    return message_of(error.value)


WRONG_JVPS = [
    (
        lambda ps, ts: ps[0],
        "custom_jvp: the rule of <lambda> must return (output, tangent), but it returned a dict with the keys 'b', 'w'",
    ),
    (
        lambda ps, ts: ({"o": ps[0]["b"]}, {"o": None}),
        "custom_jvp: the rule of <lambda> returned f32[2] for out['o'], which is f32[3]\n"
        "Return the same shape and dtype, e.g. with `.sum_to_size(x.shape)` or `.to(x.dtype)`.",
    ),
    (
        lambda ps, ts: ({"o": ps[0]["w"]}, ts[0]["w"]),
        "custom_jvp: the rule of <lambda> returned f32[3] for tangent, which is a dict with the keys 'o'\n"
        "Return the same structure, with None for what has no gradient.",
    ),
]


@pytest.mark.parametrize(("rule", "text"), WRONG_JVPS)
def test_wrong_derivatives(rule: Any, text: str) -> None:
    assert jvp_error(rule) == text


def test_wrong_batching_rules() -> None:
    f = custom_vmap(lambda x: (x, x))
    for rule, text in (
        (
            lambda n, b, x: x,
            "custom_vmap: the rule of <lambda> must return (output, out_batched), but it returned f32[2, 3]",
        ),
        (
            lambda n, b, x: ((x, x), (True, (True, True))),
            "custom_vmap: the rule of <lambda> returned a tuple of 2 for out_batched[1], which is a bool",
        ),
        (
            lambda n, b, x: ((x, x), (True, False)),
            "custom_vmap: the rule of <lambda> returned f32[2, 3] for out[1], which is f32[3]\n"
            "Return the same shape and dtype, e.g. with `.sum_to_size(x.shape)` or `.to(x.dtype)`.",
        ),
    ):
        f.def_vmap(rule)
        with pytest.raises(CustomRuleError) as error:
            tfn.vmap(f)(torch.ones(2, 3))
        assert re.sub("\nfrom: .*", "", str(error.value)) == text


def test_a_missing_rule_is_missed_only_where_it_is_needed() -> None:
    x = torch.ones(3)
    for make, use, text in (
        (custom_vjp, tfn.grad, "custom_vjp: cube has no rule\nCall `cube.defvjp(fwd, bwd)` before differentiating."),
        (custom_jvp, tfn.grad, "custom_jvp: cube has no rule\nCall `cube.defjvp(rule)` before differentiating."),
        (custom_vmap, tfn.vmap, "custom_vmap: cube has no rule\nCall `cube.def_vmap(rule)` before batching it."),
    ):

        def cube(x: Tensor) -> Tensor:
            return x**3

        f = make(cube)
        close(tfn.evaluate(tfn.trace(f, x), [x]), [x**3])
        with pytest.raises(CustomRuleError) as error:
            use(lambda x, f=f: f(x).sum())(torch.ones(2, 3))
        assert re.sub("\nfrom: .*", "", str(error.value)) == text


@pytest.mark.parametrize("kind", RULES)
def test_torch_func_inside_a_traced_function(kind: str) -> None:
    f, (w, y) = loss_of(RULES[kind]()), point()

    def gradient(g: Any) -> Any:
        return lambda w: torch.func.grad(g)(w, y)

    def many(g: Any) -> Any:
        return lambda w: torch.func.vmap(torch.func.grad(g), (0, None))(torch.stack([w, 2 * w]), y)

    for transformed in (gradient, many):
        program = tfn.trace(transformed(f), w)
        check(program)
        close(tfn.evaluate(program, [w]), [transformed(reference)(w)])


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("decorate", [custom_vjp, custom_jvp])
def test_a_plain_call_closes_over_a_leaf_that_requires_grad(decorate: Any, follows: bool) -> None:
    """The gradient of the leaf would be that of the function, beside a rule that says otherwise."""
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=follows)
    f = decorate(lambda x: x * w)
    rules = {
        custom_vjp: (lambda x: (x * w, None), lambda _, g: (10 * g,)),
        custom_jvp: (lambda p, t: (p[0] * w, 10 * t[0]),),
    }
    getattr(f, "defvjp" if decorate is custom_vjp else "defjvp")(*rules[decorate])
    with pytest.raises(CustomRuleError, match=r"closes over .* that is differentiated"):
        f(x).sum().backward()
    with torch.no_grad():
        assert torch.equal(f(x), torch.ones(2))
