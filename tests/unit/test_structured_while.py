"""while_loop: number of steps, vmap, reverse mode, edge cases, error texts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import CaptureError, MissingRule, TraceTypeError
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.ir.trace import Equation, Trace

Tensor = torch.Tensor
X = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)
ZERO = torch.tensor(0)


def traced(f: Any, *args: Any) -> Any:
    """Trace f and evaluate the trace."""
    tfn.check(tfn.trace(f, *args))
    return tfn.jvp(f, args, args)[0]


def whiles(trace: Trace) -> list[Equation]:
    found = [equation for equation in trace.equations if equation.op.name == "while_loop"]
    return found + [inner for equation in trace.equations for body in equation.bodies for inner in whiles(body)]


def grow(x: Tensor, max_steps: int | None = None) -> Any:
    def body(n: Tensor, v: Tensor, history: dict[str, Tensor]) -> Any:
        return n + 1, v * 2, {"sum": history["sum"] + v}

    return tfn.while_loop(lambda n, v, h: v.sum() < 50, body, (ZERO, x, {"sum": x * 0}), max_steps=max_steps)


def grow_loop(x: Tensor, steps: int) -> Any:
    v, total = x, x * 0
    for _ in range(steps):
        v, total = v * 2, total + v
    return torch.tensor(steps), v, {"sum": total}


@pytest.mark.parametrize("max_steps", [None, 0, 2, 4, 9])
def test_it_ends_with_the_condition_or_with_max_steps(max_steps: int | None) -> None:
    steps = 4 if max_steps is None else min(4, max_steps)
    torch.testing.assert_close(grow(X, max_steps), grow_loop(X, steps))
    torch.testing.assert_close(traced(lambda x: grow(x, max_steps), X), grow_loop(X, steps))
    have = tfn.jacrev(lambda x: grow(x, max_steps)[1:])(X)
    torch.testing.assert_close(have, torch.func.jacrev(lambda x: grow_loop(x, steps)[1:])(X))


def test_each_example_takes_its_own_number_of_steps() -> None:
    xs = torch.stack([X, X * 0.01, X * 100])
    n, v, history = tfn.vmap(grow)(xs)
    want = [grow(x) for x in xs]
    assert n.tolist() == [4, 11, 0]
    torch.testing.assert_close(v, torch.stack([one[1] for one in want]))
    torch.testing.assert_close(history["sum"], torch.stack([one[2]["sum"] for one in want]))


def test_one_condition_for_all_examples_stays_one() -> None:
    def f(x: Tensor) -> Tensor:
        return tfn.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v.sin()), (ZERO, x))[1]

    trace = tfn.trace(tfn.vmap(f), torch.stack([X, -X]))
    (equation,) = whiles(trace)
    assert equation.bodies[0].output_types[0].shape == () and len(equation.outputs) == 2
    torch.testing.assert_close(tfn.vmap(f)(torch.stack([X, -X])), torch.stack([f(X), f(-X)]))


def test_no_nan_from_steps_that_an_example_does_not_take() -> None:
    """sqrt(v - 1) has a bad derivative at the last carry of the example that is done first."""

    def f(x: Tensor) -> Tensor:
        return tfn.while_loop(lambda v, s: v > 1, lambda v, s: (v - 1, s + (v - 1).sqrt()), (x, x * 0), max_steps=5)[1]

    xs = torch.tensor([2.5, 4.5, 3.0], dtype=torch.float64)
    want = torch.stack([tfn.grad(f)(x) for x in xs])
    torch.testing.assert_close(tfn.vmap(tfn.grad(f))(xs)[:2], want[:2])
    torch.testing.assert_close(tfn.grad(lambda xs: tfn.vmap(f)(xs)[:2].sum())(xs)[:2], want[:2])


def test_no_nan_from_an_example_that_takes_no_step() -> None:
    """It has no carry of its own on which the step, sqrt(limit - v) and its derivative are finite."""

    def f(limit: Tensor, x: Tensor) -> Tensor:
        def step(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            return v + 1, s + (limit - v).sqrt()

        return tfn.while_loop(lambda v, s: v < limit, step, (x, x * 0))[1]

    limits, xs = torch.tensor([2.5, -4.0, 0.5]).double(), torch.tensor([0.5, 4.5, 0.0]).double()
    want = tuple(map(torch.stack, zip(*map(tfn.grad(f, argnums=(0, 1)), limits, xs), strict=True)))
    have = tfn.grad(lambda limits, xs: tfn.vmap(f)(limits, xs).sum(), argnums=(0, 1))(limits, xs)
    torch.testing.assert_close(have, want)


def test_gradients_of_closures() -> None:
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def f(w: Tensor, x: Tensor, max_steps: int | None = None) -> Tensor:
        def body(n: Tensor, v: Tensor) -> Any:
            return n + 1, torch.tanh(linear(v) + v @ w)

        return tfn.while_loop(lambda n, v: n < 4, body, (ZERO, x), max_steps=max_steps)[1].sum()

    w = torch.eye(3, dtype=torch.float64) * 0.5
    leaf = w.clone().requires_grad_()
    want = torch.autograd.grad(f(leaf, X), leaf)[0]
    torch.testing.assert_close(tfn.grad(f)(w, X), want)
    torch.testing.assert_close(tfn.grad(lambda w: f(w, X, 6))(w), want)


def test_dce_keeps_what_the_condition_reads() -> None:
    trace = tfn.trace(lambda x: grow(x), X)
    new, _ = dce_to(trace, (True, False, False))
    tfn.check(new)
    assert len(whiles(new)[0].outputs) == 2, "the steps and what the condition looks at"
    torch.testing.assert_close(tfn.evaluate(new, (X,))[0], torch.tensor(4))


def test_numbers_in_the_condition_and_the_carry() -> None:
    def f(x: Tensor) -> Any:
        return tfn.while_loop(lambda v, k: False, lambda v, k: (v * k, k), (x, 3))

    assert f(X)[1] == traced(f, X)[1] == 3
    torch.testing.assert_close(traced(f, X)[0], X)


def raises(f: Any, *args: Any) -> str:
    with pytest.raises(TraceTypeError) as outside:
        f(*args)
    with pytest.raises(TraceTypeError) as inside:
        tfn.trace(f, *args)
    assert message_of(inside.value) == message_of(outside.value)
    return message_of(inside.value)


def positive(v: Tensor) -> Tensor:
    return v > 0


def test_errors() -> None:
    call = lambda x: tfn.while_loop(positive, lambda v: (v,), (x,))
    text = raises(call, X)
    assert text == (
        "while_loop: the condition must be a bool or a tensor of one bool, not the tensor bool[3]\n"
        f"function:     positive (test_structured_while.py:{positive.__code__.co_firstlineno})\n"
        f"from:         {__file__}:{call.__code__.co_firstlineno} in <lambda>\n"
        "Reduce it with `.all()` or `.any()`, or choose for each example: `vmap`, or `torch.where`.\n"
        "Write `thunder_fn.while_loop(cond_fn, body_fn, (x, y))`, as `torch.while_loop(cond_fn, body_fn, (x, y))`."
    )
    text = raises(lambda x: tfn.while_loop(lambda v: v.sum() > 0, lambda v: (v.float(),), (x,)), X)
    assert "while_loop: the carry must keep its types, but\n  carry[0]: f64[3] becomes f32[3]" in text
    text = raises(lambda x: tfn.while_loop(lambda n, v: v.sum() > 0, lambda n, v: (n + 0.5, -v), (0, x)), X)
    assert "carry[0]: the int 0 becomes the float 0.5" in text and "Make numbers in the first carry tensors" in text
    assert "must return a tuple of the 2 carries" in raises(
        lambda x: tfn.while_loop(lambda n, v: v.sum() > 0, lambda n, v: v, (0, x)), X
    )
    assert "carried_inputs must be a tuple" in raises(lambda x: tfn.while_loop(positive, lambda v: (v,), x), X)
    assert "max_steps is None or an int" in raises(
        lambda x: tfn.while_loop(positive, lambda v: v, (x,), max_steps=-1), X
    )


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit, lambda f: tfn.jit(f, dynamic=True)])
def test_carries_as_pytorch_takes_them(wrap: Any) -> None:
    """One state without a tuple, lists for tuples and the other way round, xs without a tensor."""
    below = lambda v: v.sum() < 9
    for first in (torch.ones(3), torch.full((3,), 9.0)):
        want = torch.full((3,), max(3.0, float(first[0])))
        bare = wrap(lambda x: tfn.while_loop(below, lambda v: v + 1, [x]))(first)
        theirs = wrap(lambda x: torch.while_loop(below, lambda v: v + 1, (x,)))(first)
        assert torch.equal(bare, want) and torch.equal(theirs, want)
        (one,) = wrap(lambda x: tfn.while_loop(below, lambda v: [v + 1], (x,)))(first)
        assert torch.equal(one, want)
        loop = lambda x: tfn.while_loop(
            lambda c: below(c[0]), lambda c: ([c[0] + 1, {"a": (c[1]["a"][0],)}],), ((x, {"a": [x]}),)
        )
        ((v, inner),) = wrap(loop)(first)
        assert torch.equal(v, want) and isinstance(inner["a"], list)
    step = lambda c, x: [[c[0] + x, list(c[1])], x * 2]
    (total, rest), ys = wrap(lambda x: tfn.scan(step, (x[0], (x[1],)), x))(torch.arange(3.0))
    assert total == 3 and type(rest) is tuple and torch.equal(ys, torch.tensor([0.0, 2.0, 4.0]))
    last, ys = wrap(lambda x: tfn.scan(lambda c, x: (c, x), x, []))(torch.ones(2))
    assert torch.equal(last, torch.ones(2)) and ys == []


def test_writes_say_so() -> None:
    def f(x: Tensor) -> Any:
        return tfn.while_loop(lambda v: v.sum() < 9, lambda v: (v.add_(1),), (x,))

    with pytest.raises(CaptureError, match="writes in place to argument 0"):
        tfn.trace(f, X.clone())


# ---- reverse mode without max_steps ----


def counted_steps(x: Tensor, steps: int) -> Tensor:
    step = lambda n, v, w: (n + 1, torch.sin(v) * w, w + 0.1)
    return tfn.while_loop(lambda n, v, w: n < steps, step, (torch.tensor(0), x, x.cos()))[1]


def test_the_buffer_takes_one_more_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs once forward, at most once for the buffer, and once in the step back."""
    from thunder_fn.structured import carry_at

    asked: list[int] = []
    plain = carry_at.History.at

    def at(self: Any, index: int, run: Any) -> Any:
        before = len(self.carries)
        found = plain(self, index, run)
        asked.append(max(len(self.carries) - before, 0))
        return found

    monkeypatch.setattr(carry_at.History, "at", at)
    x = torch.tensor([0.3, -0.2])
    total = lambda x: counted_steps(x, 30).sum()
    for gradient in (tfn.grad(total), tfn.jit(tfn.grad(total))):
        asked.clear()
        gradient(x)
        assert len(asked) == 30 and sum(asked) == 29


def test_the_buffer_under_transforms() -> None:
    """Each example its own number of steps; derivatives of the gradient."""

    def loop(x: Tensor, steps: int) -> Tensor:
        v, w = x, x.cos()
        for _ in range(steps):
            v, w = torch.sin(v) * w, w + 0.1
        return v

    xs, limits = torch.tensor([[0.3, -0.2], [1.0, 0.1], [0.2, 0.9]], dtype=torch.float64), torch.tensor([0, 5, 2])

    def own_steps(x: Tensor, limit: Tensor) -> Tensor:
        step = lambda n, v, w: (n + 1, torch.sin(v) * w, w + 0.1)
        return tfn.while_loop(lambda n, v, w: n < limit, step, (torch.tensor(0), x, x.cos()))[1].sum()

    want = [torch.func.grad(lambda x, n=n: loop(x, n).sum())(x) for x, n in zip(xs, limits.tolist(), strict=True)]
    for gradient in (tfn.vmap(tfn.grad(own_steps)), tfn.jit(tfn.vmap(tfn.grad(own_steps)))):
        torch.testing.assert_close(gradient(xs, limits), torch.stack(want))
    pairs = tfn.vmap(tfn.vmap(tfn.grad(own_steps), (0, None)), (None, 0))(xs, limits)
    torch.testing.assert_close(torch.stack([pairs[i, i] for i in range(3)]), torch.stack(want))
    total, eager = lambda x: counted_steps(x, 4).sum(), lambda x: loop(x, 4).sum()
    for transform in ("hessian", "jacfwd"):
        have = getattr(tfn, transform)(tfn.grad(total))(xs[0])
        torch.testing.assert_close(have, getattr(torch.func, transform)(torch.func.grad(eager))(xs[0]))


def test_random_numbers_are_never_drawn_again() -> None:
    def noisy(x: Tensor) -> Tensor:
        step = lambda n, v: (n + 1, v * torch.rand_like(v))
        return tfn.while_loop(lambda n, v: n < 3, step, (torch.tensor(0), x))[1].sum()

    with pytest.raises(MissingRule) as info:
        tfn.grad(noisy)(torch.ones(2))
    first, source, fix = message_of(info.value).splitlines()
    assert (
        first
        == "while_loop: reverse mode without max_steps runs the steps again, and these draw random numbers or call back"
    )
    assert source.startswith("from:") and fix == "Give the loop max_steps=, which keeps what they gave."


def test_counters_may_be_python_numbers() -> None:
    def f(x: Tensor) -> Any:
        step = lambda n, t, done, k, v: (n + 1, t * 0.5, n > 1, k, v * 2 + t + k)
        return tfn.while_loop(
            lambda n, t, done, k, v: not done if isinstance(done, bool) else ~done, step, (0, 1.0, False, 3, x)
        )

    n, t, done, k, v = f(X)
    assert (n, t, done, k) == (3, 0.125, True, 3)
    for g in (tfn.jit(f), torch.func.functionalize(f)):
        have = g(X)
        assert [int(have[0]), float(have[1]), bool(have[2]), have[3]] == [3, 0.125, True, 3]
        torch.testing.assert_close(have[4], v)
    grad = tfn.grad(lambda x: f(x)[4].sum())
    torch.testing.assert_close(grad(X), torch.full_like(X, 8.0))


def test_a_number_beside_a_tensor_that_becomes_a_number() -> None:
    """In the first look at a step, the counter is a number, and so is what a step computes from it alone."""

    def by_while(x: Tensor, k: Tensor) -> Tensor:
        return tfn.while_loop(lambda i, j: i < 3, lambda i, j: (i + 1, i * 3 + 1), (0, k - 1))[1] * x

    def by_scan(x: Tensor, k: Tensor) -> Tensor:
        return tfn.scan(lambda c, _: ((c[0] + 1, c[0] * 3 + 1), None), (0, k - 1), length=3)[0][1] * x

    for f in (by_while, by_scan):
        for transform in (tfn.jit, lambda f: tfn.jit(f, cache="symbolic values")):
            torch.testing.assert_close(transform(f)(X, torch.tensor(2)), X * 7)


def test_pytorchs_spelling_with_an_int_counter() -> None:
    f = lambda x: torch.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * 2), (0, x))
    n, v = tfn.jit(f)(X)
    assert n == 3 and torch.equal(v, X * 8)


def test_fori_loop_with_bounds_in_tensors() -> None:
    f = lambda lo, hi, x: tfn.fori_loop(lo, hi, lambda i, v: v.sin() + i * x, x)

    def loop(lo: int, hi: int, x: Tensor) -> Tensor:
        v = x
        for i in range(lo, hi):
            v = v.sin() + i * x
        return v

    for lo, hi in ((1, 4), (3, 1)):
        bounds = torch.tensor(lo), torch.tensor(hi, dtype=torch.int32)
        for g in (f, tfn.jit(f)):
            torch.testing.assert_close(g(*bounds, X), loop(lo, hi, X))
            torch.testing.assert_close(g(lo, bounds[1], X), loop(lo, hi, X))
        have = tfn.grad(lambda x, a=bounds[0], b=bounds[1]: f(a, b, x).sum())(X)
        torch.testing.assert_close(have, torch.func.grad(lambda x, a=lo, b=hi: loop(a, b, x).sum())(X))
    his = torch.tensor([0, 2, 5])
    want = torch.stack([loop(0, n, X) for n in his.tolist()])
    torch.testing.assert_close(tfn.vmap(lambda hi: f(0, hi, X))(his), want)
    assert "fori_loop: hi is an int or a scalar tensor of ints, not float" in raises(lambda x: f(0, 1.5, x), X)


def test_functions_that_take_other_arguments_than_they_are_passed() -> None:
    """A JAX user's `body(carry)` is told how its loop passes the carries. A wrapper is asked, not what it wraps."""
    one, first = torch.ones(()), (torch.tensor(0), torch.ones(()))
    for f, text in (
        (lambda: tfn.while_loop(lambda c: c[0] < 3, lambda c: c, first), "the carries one by one, 2 of them"),
        (lambda: tfn.scan(lambda carry: carry, one, torch.ones(2)), "the carry and a slice of xs"),
        (lambda: tfn.fori_loop(0, 3, lambda x: x, one), "the number of the step and the value"),
        (lambda: tfn.cond(one > 0, torch.sin, lambda: one, (one,)), "its 1 operands"),
        (lambda: tfn.switch(torch.tensor(0), [lambda x, y: x, torch.sin], (one,)), "its 1 operands"),
    ):
        for run in (f, lambda f=f: tfn.trace(lambda x: f(), one)):
            with pytest.raises(TraceTypeError, match=rf": <lambda> \(.*\) is called with {text}, but: (.|\n)*Write `"):
                run()

    @functools.wraps(lambda x, y: x)
    def wrapper(*args: Any) -> Any:
        return args[0] + 1

    bound = torch.nn.Linear(2, 2).double().forward
    assert tfn.cond(one > 0, wrapper, functools.partial(torch.add, other=2), (one,)) == 2
    assert tfn.cond(one > 0, bound, bound, (torch.ones(2).double(),)).shape == (2,)
