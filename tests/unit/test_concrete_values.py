"""Eager transforms answer Python's questions about values, as torch.func does, which is the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.func
import torch.nn.functional as F
from torch.testing import assert_close

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.errors import DataDependentBranch, DataDependentValue, MissingRule

Tensor = torch.Tensor
W = torch.tensor([0.3, -0.2, 2.0])
A = torch.arange(9.0).view(3, 3) / 5
POINTS = [torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.2, 0.1, 0.3]), torch.tensor([3.0, 1.0, 1.5])]


def branch(x: Tensor) -> Tensor:
    y = (x * x).sum()
    return y * 2 if y > 2 else -y


def newton(x: Tensor) -> Tensor:
    y = x.clone()
    while (y * y - x).abs().max() > 1e-3:
        y = (y + x / y) / 2
    return y.sum()


def numbers(x: Tensor) -> Tensor:
    first = x.detach()
    s = x.sin()
    for _ in range(int(first.abs().sum()) % 4):
        s = s * x
    return s.sum() * float(first[0]) + round(first[1].item()) * x.sum()


def lists(x: Tensor) -> Tensor:
    if max(x.tolist()) > 1:
        return x.prod()
    return x.cumsum(0).pow(2).sum()


def writes(x: Tensor) -> Tensor:
    y = x.clone()
    y[0] = 5.0
    y[1:].mul_(3)
    return (y * x).sum() if y[1] > 2 else y.sum()


def found(x: Tensor) -> Tensor:
    kept = x[x > 0.6]
    if kept.shape[0] > 1:
        return kept.sum() * 2
    return sum((x[i] ** 2 for i in range(len(kept))), x.sum())


def builtins(x: Tensor) -> Tensor:
    least = min(x)
    top = sorted(x, key=lambda v: v.item())[-1]
    chosen = [x[0], x[1] * 2, x[2] * 3][x.argmax()]
    return least * 3 + top**2 + chosen if 2.0 in x or torch.equal(x, x * 1) else least


def exchanges(x: Tensor) -> Tensor:
    scale = abs((x.detach().to(torch.complex64) * 1j).sum().item())
    text = f"{x.detach()[0].item():.2f}"
    return (x * {True: scale, False: 1.0}[bool(torch.allclose(x, x + 1e-9))]).sum() * len(text)


def gradients(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return x.sum() * 3 if slope.sum() > 3 else (slope * x).sum()


def generated(x: Tensor) -> Tensor:
    return sum((v * v for v in x if v > 0.6), x.sum() * 0)


FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(branch, newton, numbers, lists, writes, found, builtins, exchanges, generated),
)


def _results(library: Any, f: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
    value, pullback = library.vjp(f, x)
    found = [library.grad(f)(x), value, pullback(torch.ones_like(value)), library.jvp(f, (x,), (W,))]
    return [*found, library.hessian(f)(x)] if f in (branch, writes) else found


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # torch.func
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_torch_func_answers_alike(f: Callable[[Tensor], Tensor]) -> None:
    for x in POINTS:  # each takes other branches: no capture serves the next point
        ours = _results(tfn, f, x)
        assert_close(ours, _results(torch.func, f, x), check_dtype=False)  # see tangents of 0-dim tensors
        assert all(leaf.dtype == torch.float32 for leaf in pytree.flatten(ours)[0])
        assert_close(tfn.functionalize(f)(x), f(x))


def test_gradients_inside_are_known() -> None:
    for x in POINTS:
        assert_close(tfn.grad(gradients)(x), torch.func.grad(gradients)(x))


def closed_over(m: Any, x: Tensor) -> Tensor:
    return m.grad(lambda x: m.grad(lambda z: (z * x).sum() if x.sum() > 1 else z.sum())(x).pow(2).sum())(x)


def both_levels(m: Any, x: Tensor) -> Tensor:
    inner = lambda z: (z.sin() if z.sum() > 1 else z.cos()).sum()
    return m.grad(lambda x: m.grad(inner)(x).sum() if x[0] > 0.5 else x.sum())(x)


def written_before(m: Any, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        y = x.clone()
        y[1:].mul_(-4)
        inner = lambda z: (z * 2 * y).sum() if y.sum() > 0 else (z * z).sum()
        return m.grad(inner)(x).sum() + m.grad(lambda z: z.sum() if z.sum() < 0 else (z**3).sum())(y).sum()

    return m.grad(outer)(x)


def one_argument_for_all(m: Any, x: Tensor) -> Tensor:
    return m.vmap(lambda a, b: a * 2 if b.sum() > 1 else a, in_dims=(0, None))(A, x)


def closed_over_by_vmap(m: Any, x: Tensor) -> Tensor:
    f = lambda x: m.vmap(lambda a: a * x if x.sum() > 1 else a * x * x)(A).sum()
    return m.grad(f)(x) + m.vmap(m.grad(lambda a: (a * x).sum() if x.sum() > 1 else a.sum()))(A).sum(0)


def functions_of_primals(m: Any, x: Tensor) -> Tensor:
    return m.jvp(lambda x: m.vjp(branch, x)[1](torch.tensor(1.0))[0], (x,), (W,))


@pytest.mark.parametrize(
    "f",
    [
        *(closed_over, both_levels, written_before, one_argument_for_all, closed_over_by_vmap),
        functions_of_primals,
    ],
    ids=lambda f: f.__name__,
)
def test_values_of_captures_around_are_known(f: Callable[[Any, Tensor], Tensor]) -> None:
    for x in POINTS:
        assert_close(f(tfn, x), f(torch.func, x))


def test_text_has_the_values() -> None:
    seen: list[str] = []

    def f(x: Tensor) -> Tensor:
        seen.extend((repr(x * 2), f"{x[0]:.1f}", f"{x.sum()}", str([x[1]])))
        return x.sum()

    tfn.grad(f)(torch.tensor([1.0, 2.0]))
    assert seen == [
        *("Tracer(f32[2], tensor([2., 4.]))", "1.0", "3.0", "[Tracer(f32[], tensor(2.))]"),
    ]
    seen.clear()
    tfn.trace(f, torch.ones(2))
    assert seen[:1] == ["Tracer(f32[2])"]


class Chosen(torch.autograd.Function):
    """Asks for values in both directions: of arguments, and of what is saved."""

    @staticmethod
    def forward(x: Any) -> Any:
        y = x.exp()
        return (y * float(x[0]) if x.sum() > 2 else y * 3), y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, _ = grads
        x, y = ctx.saved_tensors
        return grad * y.tolist()[2] + (grad * x if x.sum() > 2 else grad)


@tfn.custom_vjp
def chosen(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 2 else x * 3


chosen.defvjp(lambda x: (chosen(x), x), lambda x, g: (g * 2 if x.sum() > 2 else g * 3,))


def test_custom_rules_are_told() -> None:
    for x in POINTS:
        f = lambda x: Chosen.apply(x.sin() * 2)[0].pow(2).sum()  # pyright: ignore[reportUnknownMemberType]
        assert_close(tfn.grad(f)(x), torch.func.grad(f)(x))
        factor = 2 if x.sum() > 2 else 3
        assert_close(tfn.grad(lambda x: chosen(x).pow(2).sum())(x), 2 * factor**2 * x)


def test_checkpoints_are_told() -> None:
    f = lambda x: tfn.checkpoint(branch)(x * 1.5).sin()
    for x in POINTS:
        assert_close(tfn.grad(f)(x), torch.func.grad(lambda x: branch(x * 1.5).sin())(x))


def test_casts_around_the_call_are_those_of_the_function() -> None:
    """A question is answered by the value that autocast gives: 1 + 2**-9 is 1 in bfloat16."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        y = (w @ x).float()
        return y.sum() if (y - 1).sum() > 0 else y.sum() * 3

    w, x = torch.tensor([[1.0, 2**-9]]), torch.ones(2, 1)
    assert tfn.grad(f)(w, x).equal(torch.ones(1, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tfn.grad(f)(w, x).equal(torch.func.grad(f)(w, x))
        assert tfn.grad(f)(w, x).equal(3 * torch.ones(1, 2))


def test_linearize_takes_the_branch_of_its_primals() -> None:
    for x in POINTS:
        value, linear = tfn.linearize(branch, x)
        assert_close((value, linear(W)), torch.func.jvp(branch, (x,), (W,)))


def test_closed_over_tensors_are_read_anew() -> None:
    scale = torch.tensor(1.0)
    slope = tfn.grad(lambda x: (x * scale).sum() if scale > 0 else (x**2).sum())
    assert slope(W).equal(torch.ones(3))
    scale.fill_(-1)
    assert_close(slope(W), 2 * W)


def test_parameters_are_known() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(3, 1)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        out = torch.func.functional_call(linear, {"weight": weight}, (x,)).sum()
        return out if linear.bias.sum() > 0 else -out

    with torch.no_grad():
        for bias in (1.0, -1.0):
            linear.bias.fill_(bias)
            weight = linear.weight.detach()
            assert_close(tfn.grad(loss)(weight, W), torch.func.grad(loss)(weight, W))


def test_neg_and_conj_bits_are_values() -> None:
    f = lambda z: z.sum() * 2 if z.sum() > 0 else z.sum() * 3
    for x in (W, -W):
        negative = torch.view_as_complex(torch.stack((x, x), -1)).conj().imag
        assert negative.is_neg()
        assert_close(tfn.grad(f)(negative), torch.func.grad(f)(negative))


@pytest.mark.parametrize(
    "f",
    [
        lambda: tfn.jit(tfn.grad(branch))(W),
        lambda: tfn.grad(tfn.jit(branch))(W),
        lambda: tfn.grad(lambda x: tfn.jit(branch)(x))(W),
        lambda: tfn.vmap(branch)(A),
        lambda: tfn.vmap(tfn.grad(branch))(A),
        lambda: tfn.grad(lambda x: tfn.vmap(branch)(A * x).sum())(W),
        lambda: tfn.trace(branch, W),
        lambda: tfn.grad(lambda x: tfn.scan(lambda c, a: (c * branch(a), a), x.sum(), A)[0])(W),
        lambda: tfn.grad(lambda x: tfn.cond(torch.tensor(True), branch, lambda x: x.sum(), (x,)))(W),
        lambda: tfn.grad(branch)(torch.empty(3, device="meta")),
    ],
    ids=[
        *("jit(grad)", "grad(jit)", "jit in grad", "vmap", "vmap(grad)", "grad(vmap)"),
        *("trace", "scan", "cond", "meta"),
    ],
)
def test_programs_of_more_than_one_call_are_not_told(f: Callable[[], Any]) -> None:
    with pytest.raises((DataDependentBranch, DataDependentValue)):
        f()


def test_splits_of_unknown_sizes_have_an_error_of_ours() -> None:
    with pytest.raises(MissingRule, match=r"aten\.split\.Tensor"):
        tfn.grad(lambda x: x[x > 0.6].chunk(int((x > 0.6).sum()))[0].sum())(POINTS[0])


def test_structured_equations_are_computed() -> None:
    def f(x: Tensor) -> Tensor:
        total, _ = tfn.scan(lambda c, a: (c + a.sum(), a), x.sum(), A)
        way = tfn.cond(x.sum() > 1, torch.sin, torch.cos, (x,))
        return total * 2 if total > 8 else way.sum() * 3 if way.sum() > 1 else way.sum()

    def plain(x: Tensor) -> Tensor:
        total = x.sum() + A.sum()
        way = x.sin() if x.sum() > 1 else x.cos()
        return total * 2 if total > 8 else way.sum() * 3 if way.sum() > 1 else way.sum()

    for x in (*POINTS, *(x / 5 for x in POINTS)):
        assert_close(tfn.grad(f)(x), torch.func.grad(plain)(x))


def draws(x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5, True)
    z = y * torch.randn(3)
    if torch.rand(3).sum() > 1.5:
        z = z * torch.rand(3)
    w = F.dropout(z.sin(), 0.3, True)
    return (w * y).sum() if w.sum() > 0 else (w * x * torch.randn(3)).sum()


def draws_at_two_levels(m: Any, x: Tensor) -> Tensor:
    inner = lambda z: (z * torch.rand(3)).sum() if torch.rand(()) < 0.5 else draws(z)
    return m.grad(lambda x: m.grad(inner)(x * torch.rand(3)).sum())(x)


def draws_sizes(m: Any, x: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        chosen = torch.rand(3).mul(x).multinomial(1).tolist()[0]
        count = len((torch.rand(5) > 0.5).nonzero())
        return x[chosen] * torch.bernoulli(torch.sigmoid(x)).sum() + (x * torch.rand(3)).sum() * count

    return m.grad(f)(x)


def test_random_numbers_are_told_in_the_order_of_eager_mode() -> None:
    of = lambda m, x: (m.grad(draws)(x), m.jvp(draws, (x,), (W,)), m.jacrev(draws)(x))
    for f in (of, draws_at_two_levels, draws_sizes):
        for seed in range(4):
            found: list[Any] = []
            for m in (tfn, torch.func):
                torch.manual_seed(seed)
                found.append((f(m, POINTS[0]), torch.rand(2)))  # afterwards the generator is where it was
            assert_close(*found)


def test_draws_that_cannot_be_told_are_refused_and_undone() -> None:
    generator = torch.Generator().manual_seed(0)
    scale = lambda a: (a * 2).sum() if torch.rand(()) > 0.5 else a.sum()
    torch.manual_seed(0)
    with pytest.raises(DataDependentBranch):
        tfn.vmap(scale, randomness="different")(A)
    with pytest.raises(DataDependentBranch):
        tfn.grad(lambda x: x.sum() if torch.rand((), generator=generator) > 0.5 else -x.sum())(W)
    with pytest.raises(DataDependentBranch):
        tfn.grad(lambda x: x.sum() if torch.rand(()) > 2 else tfn.jit(branch)(x))(W)
    after = torch.rand(2)
    torch.manual_seed(0)
    assert after.equal(torch.rand(2))


def test_rules_that_decide_by_their_own_draws_are_refused() -> None:
    """Forward is captured for its value and for its rule, which have to draw the same numbers."""

    class Drawing(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return x * 2 if torch.rand(3).sum() > 1.5 else x * 3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    with pytest.raises(MissingRule, match="Drawing is not part of the trace"):
        tfn.grad(lambda x: Drawing.apply(x).sum())(W)  # pyright: ignore[reportUnknownMemberType]
