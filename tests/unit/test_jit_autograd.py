"""jit under autograd: `backward` leaves eager's gradients, to any order, and frees what it saved."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import thunder_fn as tfn
from thunder_fn.api import trace
from thunder_fn.errors import MissingRule, UnsupportedCall, UnsupportedOutput
from thunder_fn.interpreters.cheap_residuals import READ_WHOLE
from thunder_fn.jitted import cache_info, jit, last_backward_traces, last_traces


@pytest.fixture(autouse=True, params=("ops", "nodes"))
def followed(request: pytest.FixtureRequest) -> None:
    """Autograd follows small programs op by op, or has our nodes."""
    if request.param == "nodes":
        request.getfixturevalue("by_nodes")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(3, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.GELU(),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 2),
    )
    return torch.nn.Sequential(*layers)


def gradients(parameters) -> list[torch.Tensor]:
    return [p.grad for p in parameters]


def test_training_a_module() -> None:
    mine, its = model(), model()
    f = jit(lambda x, y: torch.nn.functional.mse_loss(mine(x), y))
    mine_step, its_step = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (mine, its))
    for _ in range(4):
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        loss, expected = f(x, y), torch.nn.functional.mse_loss(its(x), y)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for found, known in zip(gradients(mine.parameters()), gradients(its.parameters()), strict=True):
            torch.testing.assert_close(found, known)
        mine_step.step(), its_step.step()
        mine_step.zero_grad(), its_step.zero_grad()
        mine.load_state_dict(its.state_dict())
    assert not mine[1].running_mean.requires_grad and cache_info(f).misses == 1


def test_any_order() -> None:
    def f(x, y):
        return (torch.sin(x) * y**3).sum()

    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def third(g):
        (first,) = torch.autograd.grad(g(x, y), x, create_graph=True)
        (second,) = torch.autograd.grad((first * y).sum(), y, create_graph=True)
        return torch.autograd.grad(second.sum(), (x, y))

    for found, known in zip(third(jit(f)), third(f), strict=True):
        torch.testing.assert_close(found, known)


def test_gradcheck() -> None:
    f = jit(lambda x, w: torch.softmax(x @ w, 1).exp())
    xs = [
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 4, dtype=torch.float64, requires_grad=True),
    ]
    assert torch.autograd.gradcheck(f, xs) and torch.autograd.gradgradcheck(f, xs)


def test_some_outputs_only() -> None:
    f = jit(lambda x, y: {"a": x * y, "b": (x.exp(), x.argmax()), "c": y + 1, "d": x.detach() * 2})
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    out = f(x, y)
    assert [out["a"].requires_grad, out["b"][0].requires_grad] == [True, True]
    assert not any(t.requires_grad for t in (out["b"][1], out["c"], out["d"]))
    out["b"][0].sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


def test_inputs_and_repeats_as_outputs() -> None:
    f = jit(lambda x: (x, (x * 2).unbind(), *[x + 1] * 2))
    x = torch.randn(2, requires_grad=True)
    same, (a, b), one, two = f(x)
    assert same is x and one is two
    (same.sum() + a + 2 * b + one.sum() + two.sum()).backward()
    assert x.grad.tolist() == [5, 7]
    only = jit(lambda x: x)
    assert only(x) is x and last_backward_traces(only) == []


def test_closed_over_parameters_and_accumulation() -> None:
    w = torch.nn.Parameter(torch.ones(3))
    f = jit(lambda x: (x * w).sum() + w.sum())
    for _ in range(2):
        f(torch.full((3,), 2.0)).backward()
    assert w.grad.tolist() == [6, 6, 6]
    with torch.no_grad():
        assert not f(torch.ones(3)).requires_grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # capture looks at it on what was changed in place
def test_mutation_under_grad() -> None:
    def f(x, buffer):
        buffer.mul_(0.5).add_(x)
        return (buffer * x).sum()

    for g in (f, jit(f)):
        x, buffer = torch.ones(2, requires_grad=True), torch.full((2,), 2.0)
        g(x, buffer).backward()
        assert x.grad.tolist() == [3, 3] and buffer.tolist() == [2, 2] and buffer.requires_grad


def test_a_changed_residual_is_noticed() -> None:
    x = torch.ones(2, requires_grad=True) * 1
    y = jit(torch.sin)(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_donation_under_grad_overwrites_nothing() -> None:
    f = jit(lambda x, w: (x.exp() * w).sum(), donate_argnums=0)
    x, w = torch.zeros(2), torch.ones(2, requires_grad=True)
    f(x, w).backward()
    assert w.grad.tolist() == [1, 1] and repr(x) == "<donated tensor>"


def test_backward_twice_is_refused_as_in_eager() -> None:
    x = torch.ones(2, requires_grad=True)
    y = jit(lambda x: x.exp().sum())(x)
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_residuals_are_freed() -> None:
    f = jit(lambda x, w: ((x * 2).sin() @ w).sum())
    w = torch.ones(2, requires_grad=True)
    f(torch.ones(2), w).backward()
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(2)
        y = f(x, w)
        alive = weakref.ref(x)
        del x
        y.backward()
        assert alive() is None, "backward frees what it saved though its result lives on"
        assert y.grad_fn is not None
    finally:
        gc.enable()


def test_complex_and_views() -> None:
    def f(z):
        return torch.view_as_real(z * z.conj() + z.t()).abs().sum()

    z = torch.randn(2, 2, dtype=torch.complex64, requires_grad=True)
    (found,), (known,) = torch.autograd.grad(jit(f)(z), z), torch.autograd.grad(f(z), z)
    torch.testing.assert_close(found, known)


def test_traces_that_are_shown() -> None:
    f = jit(lambda x: x.sin().sum())
    f(torch.ones(2, requires_grad=True))
    backward, program = last_backward_traces(f)
    assert "cos" in str(backward) and "cos" in str(program) and "sin" in str(last_traces(f)[-1])


def test_deepcopy_of_a_model_does_not_share_programs() -> None:
    first = model()
    second = copy.deepcopy(first)
    for m in (first, second):
        jit(m)(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is not None for m in (first, second) for p in m.parameters())


def test_views_that_are_results_may_be_changed_in_place() -> None:
    """Views may change as eager's may; autograd still refuses where the backward needs the old values, or memory is
    shared.
    """
    w = torch.randn(3, 4, requires_grad=True)

    def gradient(f: Any) -> torch.Tensor:
        y, z = f(w)
        y.add_(1)
        y[y > 0] = 0
        z.mul_(2)
        return torch.autograd.grad(y.pow(2).sum() + z.sin().sum(), w)[0]

    functions = (
        lambda x: ((x * 2).t(), (x * 3)[0]),
        lambda x: (x.sin().t().reshape(2, 6), x.cos().unsqueeze(0).expand(1, 3, 4)),
    )
    for f in functions:
        torch.testing.assert_close(gradient(jit(f)), gradient(f))
    needed = jit(lambda x: x.exp().t())(w)
    needed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        needed.sum().backward()
    first, _ = jit(lambda x: (x * 2).unbind(0)[:2])(w)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        first.add_(1)
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad is being used in an in-place"):
        jit(lambda x: x.t())(w).add_(1)


def _set_row(x: torch.Tensor) -> torch.Tensor:
    x[0] = x[1] * 3
    return x.sin()


@pytest.mark.parametrize(
    "f",
    (lambda x: x.add_(1) * 2, lambda x: x[0].mul_(3).sin(), _set_row, lambda x: x.mul_(2).exp_()),
    ids=("whole", "view", "row", "twice"),
)
def test_a_result_that_is_an_argument_may_be_changed_in_place(f: Any) -> None:
    """Its new value and both derivatives are eager's. A leaf may not, in a later call either."""
    w = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def derivatives(f: Any) -> tuple[torch.Tensor, ...]:
        x = w.sin()
        y = f(x)
        first = torch.autograd.grad(y.pow(2).sum() + x.cos().sum(), w, create_graph=True)[0]
        return x, y, first, torch.autograd.grad(first.pow(2).sum(), w)[0]

    jitted = jit(f)
    for found, known in zip(derivatives(jitted), derivatives(f), strict=True):
        torch.testing.assert_close(found, known)
    before = w.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        jitted(w)
    assert torch.equal(w, before)


def test_hooks_of_saved_tensors_see_no_tracers() -> None:
    """PyTorch's checkpoint around a jitted function that has not been traced: it counts what is saved."""
    x = torch.randn(3, 4, requires_grad=True)
    f: Any = lambda x: (x.sin() * x).cos().sum()
    (expected,) = torch.autograd.grad(f(x), x)
    result = torch.utils.checkpoint.checkpoint(jit(f), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(result, x)[0], expected)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: packed.append(value) or value, lambda value: value):
        result = jit(f)(x)
    assert torch.equal(torch.autograd.grad(result, x)[0], expected)
    assert {type(value) for value in packed} == {torch.Tensor}


@pytest.mark.parametrize("op", (torch.sin, torch.clone, lambda x: x.sum(), lambda x: x.sort()[0]))
def test_second_derivatives_stop_where_gradients_were_off(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The gradient of `v * x` is v, a constant, if v was computed of x under `no_grad`."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            v = op(x)
        return v * x

    x = torch.tensor([2.0, 3.0], requires_grad=True)
    for h in (jit(f), f):
        (first,) = torch.autograd.grad(h(x).sum(), x, create_graph=True)
        assert not first.requires_grad and torch.equal(first, op(x.detach()).expand(2))
        (first,) = torch.autograd.grad(h(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 2 * op(x.detach()).square().expand(2))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("view", (lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x * 1))
def test_a_write_where_gradients_are_off_to_a_view_of_a_leaf(view: Any, mode: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with mode():
            x += 1.5
            x.unbind()[0].mul_(3)
        return x * x

    results: list[list[torch.Tensor]] = []
    for h in (jit(f), f):
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
        x = view(leaf)
        results.append([h(x).detach(), x.detach(), leaf.detach()])
    torch.testing.assert_close(*results)


def test_a_backward_outside_cannot_reach_a_leaf_made_inside() -> None:
    """Eager fills `w.grad`; the program's results know nothing of each other, and it stayed None."""

    def joined(x: torch.Tensor, p: torch.Tensor) -> Any:
        w = x.clone().requires_grad_()
        return w, (w * p).sum()

    def apart(x: torch.Tensor, p: torch.Tensor) -> Any:
        return x.clone().requires_grad_(), (x * p).sum()

    def inside(x: torch.Tensor, p: torch.Tensor) -> Any:
        w = x.clone().requires_grad_()
        loss = (w * p).sum()
        return w, torch.autograd.grad(loss, w)[0], loss.detach()

    x, p = torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
    with pytest.raises(UnsupportedOutput, match="whose backward outside would not reach it"):
        jit(joined)(x, p)
    for f in (apart, inside):
        assert all(map(torch.equal, jit(f)(x, p), f(x, p)))


def test_what_is_compared_for_equality_is_not_computed_again() -> None:
    """Compiled code may round it otherwise: no element is the greatest then, and gradients are NaN."""
    x = torch.ones(3)
    backward = trace(lambda x, y, ct: (x == y) * ct, x, x, x)
    assert READ_WHOLE.over(backward, (True,)) == (True, True, False)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def partly_constant(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.exp()
    return x * scale


FOLLOWED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any], bool]] = {
    "small ops": (lambda x: (x @ x).tanh(), {}, True),
    "a loss": (lambda x: torch.nn.functional.mse_loss(torch.nn.functional.gelu(x), x.detach()), {}, True),
    "softmax in place of nothing": (lambda x: x.softmax(-1).exp(), {}, True),
    "large results": (lambda x: x.repeat(10_000, 1).sin().sum(0), {}, False),
    "saved statistics": (lambda x: torch.nn.functional.layer_norm(x, (4,)), {}, False),
    "random numbers": (lambda x: torch.nn.functional.dropout(x), {}, False),
    "a write": (lambda x: x.clone().mul_(2) + x.detach().clone().add_(x), {}, True),
    "numbers that gradients do not pass": (partly_constant, {}, False),
    "a rule of its own": (Twice.apply, {}, False),
    "a choice": (lambda x: tfn.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), {}, False),
    "a checkpoint": (lambda x: tfn.checkpoint(torch.sin)(x), {}, False),
    "verified": (lambda x: x.sin(), {"verify": True}, False),
    "a derivative without one": (lambda x: tfn.grad(lambda x: torch.nn.functional.silu(x).sum())(x), {}, False),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_autograd_follows_small_programs_as_it_does_eager_code(name: str, request: pytest.FixtureRequest) -> None:
    """Each program has eager's gradients either way; who computes them is told by the results' `grad_fn`."""
    f, options, is_followed = FOLLOWED[name]
    is_followed = is_followed and "by_nodes" not in request.fixturenames
    x = torch.linspace(-1, 2, 16).reshape(4, 4).requires_grad_()
    torch.manual_seed(0)
    found = jit(f, **options)(x)
    torch.manual_seed(0)
    known = f(x)
    assert torch.equal(found, known)
    assert (found.grad_fn.name() != "_FunctionBackward") == is_followed
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, known)))


BATCHED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (3,)),
    "softmax": lambda x: F.softmax(x, 0) * F.layer_norm(x, (3,)),
    "loop": lambda x: tfn.scan(lambda c, t: (c * t.sin(), c), torch.ones(()), x)[1] * x,
    "checkpoint": lambda x: tfn.checkpoint(lambda x: F.layer_norm(x.sin(), (3,)))(x),
}


@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_are_differentiated(name: str) -> None:
    """`is_grads_batched=True` runs a vmap below autograd: a node of ours would cut the graph there."""
    x = torch.tensor([0.3, -1.2, 0.7], requires_grad=True)
    weights = torch.arange(9.0).view(3, 3)
    y, expected = tfn.jit(BATCHED[name])(x), BATCHED[name](x)
    rows = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True, create_graph=True)[0]
    its = torch.stack([torch.autograd.grad(expected, x, row, create_graph=True)[0] for row in torch.eye(3)])
    assert_close(rows, its)
    assert_close(*(torch.autograd.grad((one * weights).sum(), x)[0] for one in (rows, its)), rtol=1e-4, atol=1e-4)


def test_a_custom_rule_under_batched_gradients_is_refused() -> None:
    rule = tfn.custom_vjp(lambda x: x.sin())
    rule.defvjp(lambda x: (x.sin(), x), lambda x, g: (rule(g * x),))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedCall, match="would lose its rule"):
        torch.autograd.grad(tfn.jit(rule)(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)


def test_a_number_is_copied_into_an_argument() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_(1.0)
        return y * 2

    (ours, its) = ((torch.zeros(3, requires_grad=True) * 1, torch.ones(3, requires_grad=True)) for _ in range(2))
    assert_close(jit(f)(*ours), f(*its))
    assert_close(ours[0], its[0])


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze": lambda v: v.unsqueeze_(0),
    "squeeze": lambda v: v.squeeze_(0),
    "t": lambda v: v.t_(),
    "transpose": lambda v: v.transpose_(0, 1),
    "as_strided": lambda v: v.as_strided_((3,), (1,)),
}


@pytest.mark.parametrize(
    "make", [torch.sin, lambda x: x.diff(dim=-1), lambda x: torch.cat((x, x))], ids=["sin", "diff", "cat"]
)
@pytest.mark.parametrize("change", SHAPES)
def test_shapes_that_change_in_place_where_gradients_are_off(change: str, make: Callable[..., torch.Tensor]) -> None:
    """Law: the gradient is eager's. Where eager takes the dims of the new shape for those of the old one, it is refused."""

    def f(x: torch.Tensor) -> torch.Tensor:
        v = make(x)
        with torch.no_grad():
            SHAPES[change](v)
        return v

    def gradient(f: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = torch.arange(9.0).reshape(3, 3).requires_grad_()
        result = f(x)
        (result * torch.arange(float(result.numel())).reshape(result.shape)).sum().backward()
        assert x.grad is not None
        return x.grad

    if "squeeze" in change:
        assert torch.equal(gradient(tfn.jit(f)), gradient(f))
        return
    with pytest.raises(UnsupportedCall, match="changed in place where gradients are off"):
        gradient(tfn.jit(f))


OF_INFERENCE: dict[str, Callable[[Any, Any], Any]] = {
    "a summand": lambda x, b: x - b,
    "of another size": lambda x, b: (x[None] + b[:, None]).sin(),
    "a summand inside": lambda x, b: (x.sin() - b).exp(),
    "computed with": lambda x, b: (x.sin() - b * 2).exp(),
    "a weight of weights": lambda x, b: (x @ torch.outer(b, b + 1)).tanh().tanh(),
    "a mask": lambda x, b: torch.where(b > 0.5, x.exp(), x.sin()),
    "an index": lambda x, b: x.exp()[b.argsort()],
}


@pytest.mark.parametrize("name", OF_INFERENCE)
@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
def test_tensors_of_inference_mode_beside_what_requires_grad(name: str, cache: Any) -> None:
    """They have no version, and autograd does not save them: what eager differentiates twice, jit does."""
    with torch.inference_mode():
        b = torch.tensor([0.3, 1.0, 0.6])
    x = torch.randn(3, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def derivatives(f: Callable[[Any, Any], Any]) -> tuple[torch.Tensor, torch.Tensor]:
        (first,) = torch.autograd.grad(f(x, b).pow(3).sum(), x, create_graph=True)
        return first, *torch.autograd.grad(first.pow(2).sum(), x)

    assert_close(derivatives(jit(OF_INFERENCE[name], cache=cache)), derivatives(OF_INFERENCE[name]))


@pytest.mark.parametrize("number", [False, True, 0, 2, 1.5], ids=repr)
@pytest.mark.parametrize(
    "op", [torch.pow, torch.float_power, torch.xlogy, torch.special.xlog1py], ids=lambda op: op.__name__
)
def test_derivatives_of_ops_that_begin_with_a_number(op: Any, number: float) -> None:
    """They are those of eager mode, or a missing rule; eager mode fails for `False ** x`."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return op(number, x)

    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    try:
        (expected,) = torch.autograd.grad(f(x).sum(), x)
    except RuntimeError:
        with contextlib.suppress(MissingRule):
            tfn.jit(f)(x)
    else:
        torch.testing.assert_close(torch.autograd.grad(tfn.jit(f)(x).sum(), x), (expected,))
