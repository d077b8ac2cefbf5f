"""autocast as a transform, and `torch.autocast` regions inside traced code, both against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import AutocastError
from thunder_fn.interpreters.autocast import autocast
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Equation, TensorType

F = torch.nn.functional
BF16 = torch.bfloat16


def region(f: Callable[..., Any], dtype: torch.dtype = BF16) -> Callable[..., Any]:
    """f under PyTorch's own autocast."""

    def run(*args: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return f(*args)

    return run


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(F.linear(x, w, b).relu(), (4,), b)
    h = F.scaled_dot_product_attention(h, h, h)
    return F.mse_loss(F.softmax(h @ w, -1), x)


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(1, 2, 3, 4), torch.randn(4, 4), torch.randn(4)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def leaf_types(trace: tfn.Trace, name: str) -> set[torch.dtype]:
    """The dtypes that the leaves of this name give, in all bodies."""
    found: set[torch.dtype] = set()
    for equation in trace.equations:
        if name in equation.op.name and equation.op.kind == "leaf":
            found |= {var.type.dtype for var in equation.outputs if isinstance(var.type, TensorType)}
        for body in equation.bodies:
            found |= leaf_types(body, name)
    return found


# ---- values ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_those_of_torch_autocast(dtype: torch.dtype) -> None:
    args = inputs()
    trace = tfn.trace(tfn.autocast(mlp, dtype), *args)
    check(trace)
    assert same(tfn.autocast(mlp, dtype)(*args), region(mlp, dtype)(*args))
    assert not same(mlp(*args), region(mlp, dtype)(*args))
    assert leaf_types(trace, "mm") == {dtype} and leaf_types(trace, "mse_loss") == {torch.float32}


def test_modules_and_double_precision() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(tfn.autocast(layer)(x), region(layer)(x), rtol=2e-2, atol=2e-2)
    y = torch.randn(3, 3, dtype=torch.float64)
    assert same(tfn.autocast(torch.matmul)(y, y), y @ y)


def test_a_policy_without_answers_keeps_every_bit() -> None:
    args = inputs()
    trace = tfn.trace(mlp, *args)
    assert autocast(trace, BF16, lambda equation: None) == trace
    assert same(tfn.autocast(mlp, policy=lambda equation: None)(*args), mlp(*args))


def test_a_policy_is_a_function_of_an_equation() -> None:
    def only_attention(equation: Equation) -> str | None:
        return "lower" if "attention" in equation.op.name else None

    trace = tfn.trace(tfn.autocast(mlp, policy=only_attention), *inputs())
    assert leaf_types(trace, "addmm") == {torch.float32}
    assert BF16 in leaf_types(trace, "attention")


def test_a_table_is_laid_over_pytorchs_policy() -> None:
    trace = tfn.trace(tfn.autocast(mlp, policy={"linear": "float32", "aten._softmax": "lower"}), *inputs())
    assert leaf_types(trace, "addmm") == {torch.float32}
    assert leaf_types(trace, "_softmax") == {BF16}


def test_casts_are_made_once() -> None:
    x = torch.randn(3, 3)
    trace = tfn.trace(tfn.autocast(lambda x: x @ x + x @ x), x)
    (whole,) = trace.equations
    assert sum(e.op.name == "aten._to_copy.default" for e in whole.body.equations) == 1


@pytest.mark.parametrize("around", [tfn.autocast, region], ids=["ours", "PyTorch's"])
def test_calls_are_named_as_they_are_computed(around: Any) -> None:
    """A call under its full name, which executors take over, is given the casts; one that reads an argument in both ways
    is no such call any more."""
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    (whole,) = tfn.trace(around(lambda x, w: F.linear(x, w).sin()), x, w).equations
    (call,) = [equation for equation in whole.body.equations if equation.op.kind == "composite"]
    assert call.op.name == "torch.nn.functional.linear"
    assert {var.type.dtype for var in (*call.operands, *call.outputs)} == {BF16}
    assert all(equation.op.name != "aten._to_copy.default" for equation in call.body.equations)

    @tfn.composite
    def both(x: torch.Tensor) -> torch.Tensor:
        return x @ x + x

    (whole,) = tfn.trace(around(lambda x: both(x)), torch.randn(3, 3)).equations
    (call,) = [equation for equation in whole.body.equations if equation.op.kind == "composite"]
    assert call.op.name == "both" and call.operands[0].type.dtype == torch.float32


def test_loops_and_branches_in_a_region_of_pytorchs() -> None:
    """Carries keep their types, and branches give the widest, as in ours."""
    w, xs = torch.randn(3, 3), torch.randn(5, 3)
    scan = lambda w, xs: tfn.scan(lambda h, x: (h @ w, h @ x), torch.zeros(3), xs)
    loop = lambda w, xs: tfn.while_loop(lambda n, h: n < 3, lambda n, h: (n + 1, h @ w), (0, xs[0]))[1]
    branch = lambda w, xs: tfn.cond(w.sum() > 0, lambda x: x @ w, lambda x: x.sin(), (xs,))
    prefixes = lambda w, xs: tfn.associative_scan(lambda a, b: a @ b, torch.stack([w, w, w]), 0)
    for f in (scan, loop, branch, prefixes):
        for ours in (tfn.autocast(f), tfn.jit(tfn.autocast(f)), tfn.jit(region(f))):
            torch.testing.assert_close(ours(w, xs), region(f)(w, xs), check_dtype=f is not branch, rtol=2e-2, atol=2e-2)
    assert tfn.autocast(scan)(w, xs)[0].dtype == torch.float32


def test_the_policy_can_be_called() -> None:
    (equation,) = tfn.trace(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).equations
    assert tfn.autocast_policy(equation) == "lower"
    (equation,) = tfn.trace(torch.prod, torch.ones(2, 2)).equations
    assert tfn.autocast_policy(equation) == "float32"
    (equation,) = tfn.trace(lambda x, y: torch.cat((x, y)), torch.ones(2), torch.ones(2)).equations
    assert tfn.autocast_policy(equation) == "promote"
    (equation,) = tfn.trace(torch.sin, torch.ones(2)).equations
    assert tfn.autocast_policy(equation) is None


# ---- bodies ----


def test_carries_keep_their_types() -> None:
    w, xs = torch.randn(3, 3), torch.randn(5, 2, 3)

    def f(w: torch.Tensor, xs: torch.Tensor) -> Any:
        return tfn.scan(lambda h, x: ((h @ w + x).tanh(), h @ w), torch.zeros(2, 3), xs)

    trace = tfn.trace(tfn.autocast(f), w, xs)
    check(trace)
    assert leaf_types(trace, "mm") == {BF16}
    last, ys = tfn.autocast(f)(w, xs)
    assert last.dtype == torch.float32 and ys.dtype == BF16

    def loop(w: torch.Tensor, xs: torch.Tensor) -> Any:
        h, out = torch.zeros(2, 3), []
        for x in xs:
            product = h.to(BF16) @ w.to(BF16)
            h = (product + x).tanh()
            out.append(product)
        return h, torch.stack(out)

    torch.testing.assert_close((last, ys), loop(w, xs))


def test_branches_agree() -> None:
    x = torch.randn(3, 3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return tfn.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.sin(), (x,))

    check(tfn.trace(tfn.autocast(f), x))
    for value in (x.abs(), -x.abs()):
        assert same(
            tfn.autocast(f)(value), ((value.to(BF16) @ value.to(BF16)).float() if value.sum() > 0 else value.sin())
        )


def test_custom_rules() -> None:
    """The function and its rule are cast as in eager mode, and a gradient has the dtype of what it is of."""

    @tfn.custom_vjp
    def f(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    f.defvjp(lambda x: (x @ x, x), lambda x, ct: (7 * ct,))
    x = torch.randn(3, 3)
    assert same(tfn.autocast(f)(x), region(f)(x))
    gradient = tfn.grad(lambda x: tfn.autocast(f)(x).sum())(x)
    assert same(gradient, torch.full((3, 3), 7.0))


# ---- with other transforms ----


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.linear(x, w).tanh() @ w, x)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4)


def gradient_by_autograd(f: Callable[..., Any], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [arg.clone().requires_grad_() for arg in args]
    return torch.autograd.grad(f(*leaves), leaves)


@pytest.mark.parametrize("around", [lambda f: f, tfn.jit, tfn.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_gradients_are_those_of_torch_autocast(around: Any) -> None:
    x, w = pair()
    expected = gradient_by_autograd(region(loss), x, w)
    for f in (tfn.autocast(around(loss)), around(tfn.autocast(loss)), around(region(loss)), region(around(loss))):
        found = tfn.grad(f, argnums=(0, 1))(x, w)
        assert all(a.dtype == torch.float32 for a in found)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # the sum of w's is in bfloat16 or not


def test_batches_are_those_of_a_loop() -> None:
    x, w = pair()
    xs = torch.stack([x, 2 * x, -x])
    expected = torch.stack([region(loss)(x, w) for x in xs])
    for f in (tfn.autocast(loss), region(loss)):
        torch.testing.assert_close(tfn.vmap(f, in_dims=(0, None))(xs, w), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(tfn.autocast(tfn.vmap(loss, (0, None)))(xs, w), expected, rtol=1e-2, atol=1e-2)
    each = tfn.vmap(tfn.grad(region(loss)), in_dims=(0, None))(xs, w)
    rows = torch.stack([gradient_by_autograd(region(loss), x, w)[0] for x in xs])
    torch.testing.assert_close(each, rows, rtol=2e-2, atol=2e-2)


def test_tangents_are_those_of_torch_func() -> None:
    x, w = pair()
    directions = (torch.ones_like(x), torch.ones_like(w))
    expected = torch.func.jvp(region(loss), (x, w), directions)
    for f in (tfn.autocast(loss), region(loss)):
        torch.testing.assert_close(tfn.jvp(f, (x, w), directions), expected, rtol=1e-2, atol=1e-2)
    assert tfn.hessian(tfn.autocast(loss))(x, w).shape == (4, 4, 4, 4)


W = torch.linspace(-1, 1, 16).reshape(4, 4)


def _off(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return (x.float() @ W).sin() @ W


def _half(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        y = x @ W
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ W
    return y @ W + z


def _in_a_branch(x: torch.Tensor) -> torch.Tensor:
    return tfn.cond(x.sum() > 0, _off, lambda x: _off(x) * 2, (x,))


def _returns_from_the_middle(x: torch.Tensor) -> torch.Tensor:
    def inner() -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ W

    return inner() @ W


REGIONS = (_off, _half, _in_a_branch, _returns_from_the_middle)


@pytest.mark.parametrize("f", REGIONS)
def test_the_innermost_region_decides(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.linspace(-2, 2, 12).reshape(3, 4).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = f(x)
    (gradient,) = torch.autograd.grad(want.float().sum(), x)
    x, g = x.detach(), tfn.autocast(f)
    batch = lambda x: tfn.vmap(g)(x[None])[0]
    for run in (g, tfn.jit(g), tfn.autocast(tfn.jit(f)), tfn.autocast(tfn.checkpoint(f)), batch):
        have = run(x)
        assert have.dtype == want.dtype
        # MKL rounds a product by its memory's layout on some processors; a region that decides wrongly is off by 1e-3
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    loss = lambda x: g(x).float().sum()
    for run in (tfn.grad(loss), tfn.jit(tfn.grad(loss)), tfn.grad(tfn.checkpoint(loss))):
        assert torch.equal(run(x), gradient)


def test_the_innermost_autocast_decides() -> None:
    x = torch.ones(3, 4)
    inner = lambda x: tfn.autocast(lambda x: x @ W, torch.float16)(x)
    for f in (tfn.autocast(inner), tfn.jit(tfn.autocast(inner)), tfn.autocast(lambda x: tfn.jit(inner)(x))):
        assert f(x).dtype is torch.float16
    assert tfn.autocast(lambda x: inner(x) @ W)(x).dtype is torch.bfloat16


def test_rules_derived_inside_a_region_are_as_outside() -> None:
    def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a, b).sin().sum()

    a, b = torch.randn(7, 7) + 7 * torch.eye(7), torch.randn(7, 3)
    inside = region(tfn.grad(solve))(a, b)
    assert same(inside, tfn.grad(solve)(a, b))


# ---- bad input ----


def test_bad_input() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(
        AutocastError, match=r"(?m)^autocast: the lower precision is a floating dtype, given torch.int32$"
    ):
        tfn.autocast(torch.mm, torch.int32)
    with pytest.raises(
        AutocastError, match=r"(?m)^autocast: a policy is a function of an equation or a table of answers, given 3$"
    ):
        tfn.autocast(torch.mm, policy=3)
    with pytest.raises(AutocastError) as found:
        tfn.autocast(torch.mm, policy=lambda equation: "half")(x, x)
    lines = message_of(found.value).splitlines()
    assert lines[0] == "autocast: the policy <lambda> answered 'half'"
    assert lines[1].startswith("in equation:  v2: f32[2, 2] = aten.mm.default(v0, v1)")
    assert lines[-1] == 'Answer "lower", "float32", "promote" or None.'
    with pytest.raises(AutocastError, match="the policy table answered 'bf16'"):
        tfn.autocast(torch.mm, policy={"aten.mm": "bf16"})(x, x)
