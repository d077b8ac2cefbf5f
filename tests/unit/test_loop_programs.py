"""Loops and choices on the torch executor: Python's own, bitwise what evaluate gives, nobody's memory touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.executors import lower
from thunder_fn.interpreters.grad import vjp
from thunder_fn.testing.laws.comparing import same_bits

Tensor = torch.Tensor
W = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6], [-0.7, 0.2, 0.3]])
H = torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.2, -0.3]])
XS = torch.linspace(-1, 1, 24).reshape(4, 2, 3)


def rnn(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        new = torch.tanh(x + h @ w.t())
        return new, new

    return tfn.scan(step, h, xs)


def test_the_text_of_a_scan() -> None:
    program = lower(tfn.trace(rnn, W, H, XS))
    assert str(program) == (
        "# torch: t\n"
        "def invariant(v0):\n"
        "    v1 = t(v0)  # f32[3, 3]\n"
        "    return (v1,)\n"
        "\n"
        "# torch: add, mm, tanh_\n"
        "def scan(v0, v2, x3):\n"
        "    (v1,) = invariant(v0)\n"
        "    y0 = []\n"
        "    for v3 in x3.unbind(0):\n"
        "        v4 = mm(v2, v1)  # f32[2, 3]\n"
        "        v5 = add(v3, v4)  # f32[2, 3]\n"
        "        del v4\n"
        "        v6 = tanh_(v5)  # f32[2, 3] in v5's memory\n"
        "        del v5\n"
        "        y0.append(v6)\n"
        "        v2 = v6\n"
        "    return (v2, stack(y0))\n"
        "\n"
        "def rnn(v0, v1, v2):\n"
        "    # v0: f32[3, 3]\n"
        "    # v1: f32[2, 3]\n"
        "    # v2: f32[4, 2, 3]\n"
        "    (v3, v4) = scan(v0, v1, v2)  # f32[2, 3], f32[4, 2, 3]\n"
        "    return (v3, v4)\n"
    )


def test_the_text_of_a_while_loop_and_a_cond() -> None:
    def f(x: Tensor) -> Any:
        y = tfn.cond(x.sum() > 0, torch.sin, lambda x: x, (x,))
        return tfn.while_loop(lambda x: x.sum() < 5, lambda x: (x * 2 + 1,), (y,))

    program = lower(tfn.trace(f, H))
    assert str(program) == (
        "# torch: sin\n"
        "def cond(choice, v0):\n"
        "    if choice:\n"
        "        v1 = sin(v0)  # f32[2, 3]\n"
        "        return (v1,)\n"
        "    else:\n"
        "        return (v0,)\n"
        "\n"
        "# torch: lt, sum; torch.Tensor: add_, mul_\n"
        "def while_loop(v0):\n"
        "    v0 = clone(v0)\n"
        "    while True:\n"
        "        v1 = sum(v0)  # f32[]\n"
        "        v2 = lt(v1, 5)  # bool[]\n"
        "        del v1\n"
        "        if not v2:\n"
        "            break\n"
        "        v1 = mul_(v0, number_2)  # f32[2, 3] in v0's memory\n"
        "        v2 = add_(v1, number_1)  # f32[2, 3] in v1's memory\n"
        "        del v1\n"
        "        v0 = v2\n"
        "    return (v0,)\n"
        "\n"
        "# torch: gt, sum\n"
        "def f(v0):\n"
        "    # v0: f32[2, 3]\n"
        "    v1 = sum(v0)  # f32[]\n"
        "    v2 = gt(v1, 0)  # bool[]\n"
        "    del v1\n"
        "    (v3,) = cond(v2, v0)  # f32[2, 3]\n"
        "    del v2\n"
        "    (v4,) = while_loop(v3)  # f32[2, 3]\n"
        "    v4 = own(v4, v3)\n"
        "    del v3\n"
        "    return (v4,)\n"
    )


# ---- whose memory a step may use ----


def swapped(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: ((c[1] * 2 + x, c[0].exp()), c[0] + c[1]), (h, h), xs)


def carry_before_the_step(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (c * 2 + x, c), h, xs)


def views_of_the_carry(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(c: Tensor, x: Tensor) -> Any:
        new = c * 2 + x
        return new, new[:, 1:]

    return tfn.scan(step, h, xs)


def one_value_twice(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(c: Any, x: Tensor) -> Any:
        new = c[0] * 2 + c[1] * x
        return (new, new), None

    return tfn.scan(step, (h, h.sin()), xs)


def a_constant_as_carry(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (h, c.mul(2).add(x)), h * 2, xs)


def an_expanded_carry(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (c + x, c.exp()), h[:1].expand(2, 3), xs, reverse=True)


def two_columns_and_a_sum(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(total: Any, x: Tensor) -> Any:
        return (total[0] + x @ w, total[1] + x.sum()), (x.t(), w.t() * 2)

    return tfn.scan(step, (h, torch.tensor(0.0)), xs, reverse=True)


def no_xs(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, _: ((c @ w).sin(), None), h, None, length=3)


def no_outputs(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (None, None), None, xs)[0], h * 2


def no_steps(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (c + x, c), h, xs[:0])


def nested(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(c: Tensor, x: Tensor) -> Any:
        inner, ys = tfn.scan(lambda d, row: (d + (row @ w.t()), d * row), c, x)
        choice = tfn.cond(inner.sum() > 0, lambda c: (c.sin(), c), lambda c: (c, c * 2), (inner,))
        _, last = tfn.while_loop(lambda n, v: n < 2, lambda n, v: (n + 1, v * 2), (torch.tensor(0), choice[1]))
        return choice[0] + last, (ys, inner)

    return tfn.scan(step, h, xs)


def a_while_that_never_runs(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """Its body would fail: the matrix has no inverse."""
    zeros = w * 0
    return tfn.while_loop(lambda c: c.sum() > 1e9, lambda c: (c @ torch.linalg.inv(zeros),), (h,))


def a_bounded_while(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    step = lambda n, c, d: (n + 1, d, c * 2 + w.t()[0])
    return tfn.while_loop(lambda n, c, d: n < 9, step, (torch.tensor(0), h, h), max_steps=5)


def switches(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    branches = (torch.sin, lambda x: x, lambda x: x @ w)
    return [tfn.switch(torch.tensor(i) + 0 * h[0, 0].long(), branches, (h,)) for i in (-3, 0, 1, 2, 7)]


def random_steps(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.scan(lambda c, x: (c + torch.rand_like(c), torch.nn.functional.dropout(x, 0.5)), h, xs)


PROGRAMS: tuple[Callable[..., Any], ...] = (
    *(rnn, swapped, carry_before_the_step, views_of_the_carry, one_value_twice, a_constant_as_carry),
    *(an_expanded_carry, two_columns_and_a_sum, no_xs, no_outputs, no_steps, nested, a_while_that_never_runs),
    *(a_bounded_while, switches, random_steps),
)


@pytest.mark.parametrize("below_autograd", [True, False])
@pytest.mark.parametrize("f", PROGRAMS)
def test_lowered_is_evaluated_bitwise(f: Callable[..., Any], below_autograd: bool) -> None:
    trace = tfn.trace(f, W, H, XS)
    traces = [(trace, (W, H, XS))]
    if f is not random_steps:
        wanted = tuple(atom.type.dtype.is_floating_point for atom in trace.outputs)
        given = tuple(
            torch.full(atom.type.shape, 0.5) for atom, flag in zip(trace.outputs, wanted, strict=True) if flag
        )
        traces.append((vjp(trace, (True,) * 3, wanted), (W, H, XS, *given)))
    for one, inputs in traces:
        before = [x.clone() for x in inputs]
        torch.manual_seed(1)
        want = tfn.evaluate(one, inputs)
        torch.manual_seed(1)
        have = lower(one, below_autograd=below_autograd)(*inputs)
        assert all(map(same_bits, have, want))
        assert all(map(same_bits, inputs, before))


def test_equal_loops_are_written_once() -> None:
    program = str(lower(tfn.trace(lambda w, h, xs: rnn(w, *rnn(w, h, xs)), W, H, XS)))
    assert program.count("def scan(") == 1 and program.count("= scan(") == 2 and "scan_1" not in program


def test_nested_conditions_do_not_blow_up() -> None:
    def nested(f: Any) -> Any:
        return lambda x: tfn.cond(x.sum() > 0, f, f, (x,))

    f: Any = lambda x: (x.sin() * x).sum()
    for _ in range(12):
        f = nested(f)
    x = torch.ones(3)
    trace = tfn.trace(tfn.grad(f), x)
    program = lower(trace)
    assert torch.equal(program(x)[0], tfn.evaluate(trace, (x,))[0])
    assert len(str(program).splitlines()) < 600
