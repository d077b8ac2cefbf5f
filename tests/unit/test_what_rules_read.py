"""Rules of custom ops and functions are the user's: what they read from outside counts in every transform, as in eager.

A rule is found once for each capture and never kept for another one. The oracle is a loop of autograd, or a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.api import calling
from thunder_fn.errors import UnsupportedCall

SCALE: dict[str, float] = {"backward": 1.0, "context": 1.0, "vmap": 1.0}


@torch.library.custom_op("formulas::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    """The sine."""
    return x.sin()


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = SCALE["context"]


def _batched(info: Any, in_dims: tuple[int, ...], x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return sine(x) * SCALE["vmap"], in_dims[0]


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos() * SCALE["backward"] * ctx.scale, setup_context=_context
)
sine.register_vmap(_batched)

Function = Callable[[torch.Tensor], torch.Tensor]


def scanned(x: torch.Tensor) -> torch.Tensor:
    return tfn.scan(lambda c, _: (sine(c), None), x, None, length=2)[0]


def chosen(x: torch.Tensor) -> torch.Tensor:
    return tfn.cond(x.sum() > 0, sine, torch.cos, (x,))


@tfn.composite
def named(x: torch.Tensor) -> torch.Tensor:
    return sine(x) + x


BODIES: dict[str, Function] = {
    "plain": sine,
    "scan": scanned,
    "cond": chosen,
    "composite": named,
    "checkpoint": tfn.checkpoint(sine),
}


def by_autograd(f: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(f(leaf).sum(), leaf)[0]

    return gradient


def of_grad(f: Function) -> Function:
    return tfn.grad(lambda x: f(x).sum())


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": of_grad,
    "jit of grad": lambda f: tfn.jit(of_grad(f)),
    "jit of grad of jit": lambda f: tfn.jit(of_grad(tfn.jit(f))),
    "grad of jit": lambda f: of_grad(tfn.jit(f)),
    "jit, backward": lambda f: by_autograd(tfn.jit(f)),
    "jit of vjp": lambda f: tfn.jit(lambda x: tfn.vjp(f, x)[1](torch.ones_like(x))[0]),
    "jit of vmap of grad": lambda f: tfn.jit(tfn.vmap(of_grad(f))),
    "linearize": lambda f: lambda x: tfn.vjp(f, x)[1](torch.ones_like(x))[0],
}


CASES = [
    (place, body, transform)
    for place in ("backward", "context")
    for body in BODIES
    for transform in TRANSFORMS
    if (body, transform) != ("cond", "jit of vmap of grad")  # a choice of each example runs both branches
]


@pytest.mark.parametrize(("place", "body", "transform"), CASES)
def test_what_a_backward_reads_counts(monkeypatch: pytest.MonkeyPatch, place: str, body: str, transform: str) -> None:
    f, x = BODIES[body], torch.tensor([0.3, 0.7])
    made, expected = TRANSFORMS[transform](f), by_autograd(f)
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, place, scale)
        torch.testing.assert_close(made(x), expected(x))


@pytest.mark.parametrize("make", [tfn.vmap, lambda f: tfn.jit(tfn.vmap(f)), lambda f: tfn.vmap(tfn.jit(f))])
def test_what_a_batching_rule_reads_counts(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Function], Function]
) -> None:
    made, x = make(sine), torch.tensor([0.3, 0.7])
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, "vmap", scale)
        torch.testing.assert_close(made(x), x.sin() * scale)


@torch.library.custom_op("formulas::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """Two times x, with a transpose that reads."""
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: 2 * grad * SCALE["backward"])


@tfn.custom_jvp
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.defjvp(lambda primals, tangents: (2 * primals[0], twice(tangents[0])))


@pytest.mark.parametrize("make", [of_grad, lambda f: tfn.jit(of_grad(f)), lambda f: by_autograd(tfn.jit(f))])
def test_what_the_transpose_of_a_tangent_reads_counts(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Function], Function]
) -> None:
    made, x = make(doubled), torch.tensor([0.3, 0.7])
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, "backward", scale)
        torch.testing.assert_close(made(x), torch.full_like(x, 2 * scale))


# ---- custom functions: rules that a derivative of a rule asks for ----


@tfn.custom_vjp
def backward_of_itself(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


backward_of_itself.defvjp(
    lambda x: (backward_of_itself(x), x), lambda x, ct: (ct * backward_of_itself(x) * SCALE["backward"],)
)


@tfn.custom_jvp
def forward_of_itself(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


forward_of_itself.defjvp(
    lambda primals, tangents: (
        forward_of_itself(*primals),
        tangents[0] * forward_of_itself(*primals) * SCALE["backward"],
    )
)


class OfItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, ct: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return ct * OfItself.apply(x) * SCALE["backward"]


@tfn.custom_vmap
def batched_by_itself(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


batched_by_itself.def_vmap(lambda size, batched, x: (batched_by_itself(x) * SCALE["backward"], batched[0]))


class Batched(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.sin() * SCALE["backward"], in_dims[0]


RULED: dict[str, Function] = {
    "custom_vjp": backward_of_itself,
    "custom_jvp": forward_of_itself,
    "autograd.Function": OfItself.apply,
}
TWICE: dict[str, Callable[[Function], Function]] = {
    "grad of grad": lambda f: of_grad(of_grad(f)),
    "jit of grad of grad": lambda f: tfn.jit(of_grad(of_grad(f))),
    "grad of jit of grad": lambda f: of_grad(tfn.jit(of_grad(f))),
    "jit of jvp of grad": lambda f: tfn.jit(lambda x: tfn.jvp(of_grad(f), (x,), (torch.ones_like(x),))[1]),
    "vmap of grad of grad": lambda f: tfn.vmap(of_grad(of_grad(f))),
}
BATCHED: dict[str, Function] = {"custom_vmap": batched_by_itself, "autograd.Function": Batched.apply}
OVER: dict[str, Callable[[Function], Function]] = {
    "vmap": tfn.vmap,
    "jit of vmap": lambda f: tfn.jit(tfn.vmap(f)),
    "vmap of jit": lambda f: tfn.vmap(tfn.jit(f)),
    "vmap of scan": lambda f: tfn.vmap(lambda x: tfn.scan(lambda c, _: (f(c), None), x, None, length=1)[0]),
}


RULES = [
    (name, transform)
    for name in RULED
    for transform in TWICE
    if (name, transform) != ("custom_vjp", "jit of jvp of grad")  # its tangents are the function's own
]


@pytest.mark.parametrize(("name", "transform"), RULES)
def test_what_the_rule_of_a_rule_reads_counts(monkeypatch: pytest.MonkeyPatch, name: str, transform: str) -> None:
    """The first derivative is the function times the scale."""
    made, x = TWICE[transform](RULED[name]), torch.tensor([0.3, 0.7])
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, "backward", scale)
        torch.testing.assert_close(made(x), x.sin() * scale**2)


@pytest.mark.parametrize("transform", OVER)
@pytest.mark.parametrize("name", BATCHED)
def test_what_a_rule_for_batches_reads_counts(monkeypatch: pytest.MonkeyPatch, name: str, transform: str) -> None:
    made, x = OVER[transform](BATCHED[name]), torch.tensor([0.3, 0.7])
    for scale in (1.0, 1.0, 3.0, 1.0):
        monkeypatch.setitem(SCALE, "backward", scale)
        torch.testing.assert_close(made(x), x.sin() * scale)


@pytest.mark.parametrize("name", RULED)
def test_later_calls_lower_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Rules of the user's are forgotten after a capture; programs that were made of them are not."""
    made, x, lowered = of_grad(RULED[name]), torch.tensor([0.3, 0.7]), list[str]()
    monkeypatch.setitem(SCALE, "backward", 1.0)
    lower = calling.lower

    def noted(trace: Any, *args: Any, **options: Any) -> Any:
        lowered.append(trace.name)
        return lower(trace, *args, **options)

    monkeypatch.setattr(calling, "lower", noted)
    for _ in range(3):
        made(x)
    before = len(lowered)
    for _ in range(3):
        made(x)
    assert len(lowered) == before


# ---- what a function changes around a call ----

STATE: Any = SimpleNamespace(scale=1.0)


@contextmanager
def scaled_by(scale: float) -> Generator[None]:
    before, STATE.scale = STATE.scale, scale
    yield
    STATE.scale = before


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * STATE.scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = STATE.scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.scale

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        return t * ctx.scale

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor) -> Any:
        return x * STATE.scale, in_dims[0]


class ReadsLate(Scaled):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * STATE.scale


by_jvp = tfn.custom_jvp(lambda x: x * STATE.scale)
by_jvp.defjvp(lambda primals, tangents: (primals[0] * STATE.scale, tangents[0] * STATE.scale))
by_vjp = tfn.custom_vjp(lambda x: x * STATE.scale)
by_vjp.defvjp(lambda x: (x * STATE.scale, x), lambda x, g: (g * STATE.scale,))
by_vmap = tfn.custom_vmap(lambda x: x * STATE.scale)
by_vmap.def_vmap(lambda size, flags, x: (x * STATE.scale, True))

IN_CONTEXT: dict[str, tuple[Function, str]] = {
    "Function": (Scaled.apply, "grad jvp vmap vmap-grad grad-grad jacrev"),
    "custom_jvp": (by_jvp, "grad jvp vmap vmap-grad grad-grad jacrev"),
    "custom_vjp": (by_vjp, "grad vmap vmap-grad grad-grad jacrev"),
    "custom_vmap": (by_vmap, "grad jvp vmap vmap-grad jacrev"),
}


def in_contexts(call: Function) -> Function:
    def f(x: torch.Tensor) -> torch.Tensor:
        with scaled_by(2.0):
            first = call(x)
        with scaled_by(3.0):
            return first * first + call(x) * STATE.scale

    return f


def transformed(of: Any, name: str, f: Function) -> Function:
    return {
        "grad": lambda: of.grad(lambda x: f(x).sum()),
        "jvp": lambda: lambda x: of.jvp(f, (x,), (x + 1,)),
        "vmap": lambda: of.vmap(f),
        "vmap-grad": lambda: of.vmap(of.grad(f)),
        "grad-grad": lambda: of.grad(lambda x: of.grad(lambda x: f(x).sum())(x).sum()),
        "jacrev": lambda: of.jacrev(f),
    }[name]()


@pytest.mark.parametrize("jit", [lambda f: f, tfn.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("name", "transform"), [(n, t) for n, (_, ts) in IN_CONTEXT.items() for t in ts.split()])
def test_rules_see_what_held_at_their_call(name: str, transform: str, jit: Callable[[Any], Any]) -> None:
    x = torch.arange(1.0, 4.0)
    expected = transformed(torch.func, transform, in_contexts(lambda x: x * STATE.scale))(x)
    run = jit(transformed(tfn, transform, in_contexts(IN_CONTEXT[name][0])))
    for _ in range(2):
        torch.testing.assert_close(run(x), expected)
    assert STATE.scale == 1.0


def test_a_backward_that_reads_what_changes_after_its_call_is_refused() -> None:
    x = torch.arange(1.0, 4.0)
    f = in_contexts(ReadsLate.apply)
    with pytest.raises(
        UnsupportedCall, match=r"backward of ReadsLate reads STATE\.scale, which changes after the call"
    ):
        tfn.grad(lambda x: f(x).sum())(x)
    torch.testing.assert_close(tfn.vmap(f)(x), torch.func.vmap(in_contexts(Scaled.apply))(x))
