"""scan, fori_loop and map: edge cases, residual placement, error texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import CaptureError, TraceTypeError
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.simplify import dce_to
from thunder_fn.ir.trace import Equation, Literal, Trace
from thunder_fn.structured.shared.fixpoint import carry_fixpoint

Tensor = torch.Tensor
XS = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
H = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)


def traced(f: Any, *args: Any) -> Any:
    """Trace f and evaluate the trace."""
    captured = tfn.trace(f, *args)
    tfn.check(captured)
    return tfn.vmap(f, in_dims=None, out_dims=None)(*args) if not args else tfn.jvp(lambda *xs: f(*xs), args, args)[0]


def scans(trace: Trace) -> list[Equation]:
    found = [equation for equation in trace.equations if equation.op.name == "scan"]
    return found + [inner for equation in trace.equations for body in equation.bodies for inner in scans(body)]


def number(equation: Equation, name: str) -> int:
    arg = dict(equation.kwargs)[name]
    assert isinstance(arg, Literal)
    return arg.value


# ---- the fixpoint ----


def test_carry_fixpoint_follows_a_chain() -> None:
    assert carry_fixpoint(lambda m: (m[0], m[0], m[1]), (True, False, False)) == (True, True, True)
    assert carry_fixpoint(lambda m: m, (False, True)) == (False, True)
    assert carry_fixpoint(lambda m: m, ()) == ()


def shift(carry: tuple[Tensor, Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    a, b, c = carry
    return (a * x, a + 1, b * b), c


def shift_loop(init: Any, xs: Tensor) -> Any:
    carry, ys = init, []
    for x in xs.unbind(0):
        carry, y = shift(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def test_a_carry_becomes_active_two_steps_later() -> None:
    """Only `a` is differentiated; it reaches c and the ys through b."""

    def run(loop: Any) -> Any:
        return lambda a: loop((a, torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)), XS)

    for lib_f, f in ((run(lambda i, xs: tfn.scan(shift, i, xs)), run(shift_loop)),):
        have, want = tfn.jvp(lib_f, (H,), (H,)), torch.func.jvp(f, (H,), (H,))
        torch.testing.assert_close(have, want)
        have, want = tfn.jacrev(lib_f)(H), torch.func.jacrev(f)(H)
        torch.testing.assert_close(have, want)
        have, want = tfn.vmap(lib_f)(XS), torch.func.vmap(f)(XS)
        torch.testing.assert_close(have, want)


# ---- shapes ----


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
def test_dim_and_reverse_are_torchs(dim: int, reverse: bool) -> None:
    h = torch.zeros(XS.movedim(dim, 0).shape[1], dtype=torch.float64)

    def f(h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: (c + x, c * x), h, xs, dim=dim, reverse=reverse)

    slices = XS.unbind(dim)
    carry, ys = h, []
    for x in slices[::-1] if reverse else slices:
        ys.append(carry * x)
        carry = carry + x
    want = (carry, torch.stack(ys[::-1] if reverse else ys, dim))
    torch.testing.assert_close(f(h, XS), want)
    torch.testing.assert_close(traced(f, h, XS), want)


def test_zero_steps() -> None:
    def f(h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: (c * x, (c + x, c.sum() > 0)), h, xs)

    empty = XS[:0]
    for have in (f(H, empty), traced(f, H, empty)):
        last, (y, z) = have
        torch.testing.assert_close(last, H)
        assert y.shape == (0, 3) and z.shape == (0,) and z.dtype == torch.bool
    grads = tfn.grad(lambda h, xs: f(h, xs)[0].sum() + f(h, xs)[1][0].sum(), (0, 1))(H, empty)
    torch.testing.assert_close(grads, (torch.ones_like(H), empty))
    batched = tfn.vmap(f, in_dims=(0, None))(XS, empty)
    assert batched[1][0].shape == (4, 0, 3)


def test_no_xs_no_ys_no_carry() -> None:
    def powers(h: Tensor) -> Any:
        return tfn.scan(lambda c, _: (c * 2, None), h, length=3)

    torch.testing.assert_close(powers(H), (H * 8, None))
    torch.testing.assert_close(traced(powers, H), (H * 8, None))
    torch.testing.assert_close(traced(lambda xs: tfn.scan(lambda c, x: (None, x * 2), None, xs), XS), (None, XS * 2))
    assert tfn.jit(lambda xs: tfn.scan(lambda c, x: (None, None), None, xs))(XS) == (None, None)


def test_a_carry_twice_a_swap_and_an_input_as_it_is() -> None:
    def f(a: Tensor, b: Tensor, xs: Tensor) -> Any:
        def step(carry: Any, x: Tensor) -> Any:
            a, b, c = carry["a"], *carry["rest"]
            return {"a": b, "rest": [a + x, a + x]}, (x, b, c)

        return tfn.scan(step, {"a": a, "rest": [b, b]}, xs)

    want = f(H, H * 2, XS)
    torch.testing.assert_close(traced(f, H, H * 2, XS), want)

    def loss(*args: Any) -> Tensor:
        carry, ys = f(*args)
        return (carry["a"] * carry["rest"][1]).sum() + sum((y.sin() * y).sum() for y in ys)

    leaves = [leaf.clone().requires_grad_() for leaf in (H, H * 2, XS)]
    torch.testing.assert_close(tfn.grad(loss, (0, 1, 2))(H, H * 2, XS), torch.autograd.grad(loss(*leaves), leaves))


def test_numbers_in_the_carry_stay() -> None:
    def f(h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: ((c[0] * c[1], c[1], c[2]), c[1] * x), (h, 2.0, "same"), xs)

    torch.testing.assert_close(traced(f, H, XS)[0][0], H * 16)
    assert traced(f, H, XS)[0][1:] == (2.0, "same")


# ---- closures ----


def test_closures_of_every_kind() -> None:
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def loss(scale: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        shifted = scale + 1
        return tfn.scan(lambda c, x: (linear(c) * shifted + x, c), h, xs)[1].sin().sum()

    scale = torch.tensor(0.5, dtype=torch.float64)
    leaf = scale.clone().requires_grad_()
    torch.testing.assert_close(tfn.grad(loss)(scale, H, XS), torch.autograd.grad(loss(leaf, H, XS), leaf)[0])
    torch.testing.assert_close(
        tfn.vmap(loss, in_dims=(0, None, None))(torch.stack([scale, scale * 2]), H, XS),
        torch.stack([loss(scale, H, XS), loss(scale * 2, H, XS)]),
    )


def test_autograd_inside_a_traced_function_sees_through() -> None:
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)

    def f(xs: Tensor) -> Any:
        loss = tfn.scan(lambda c, x: (linear(c) + x, c), xs[0], xs)[1].sin().sum()
        return torch.autograd.grad(loss, list(linear.parameters()))

    torch.testing.assert_close(traced(f, XS), f(XS))


def test_torch_func_inside_a_traced_function_sees_through() -> None:
    def loss(h: Tensor, xs: Tensor) -> Tensor:
        return tfn.scan(lambda c, x: (c.sin() * x + c, c), h, xs)[1].sin().sum()

    def f(h: Tensor, xs: Tensor) -> Any:
        g = torch.func.grad(loss)
        return g(h, xs), torch.func.vmap(g, in_dims=(0, None))(xs, xs), torch.func.grad(lambda h: g(h, xs).sum())(h)

    torch.testing.assert_close(traced(f, H, XS), f(H, XS))


# ---- residuals ----


def test_residual_placement() -> None:
    """Of exp(w), x, tanh and its double, only what the loop makes anew is stacked, once."""
    w = torch.eye(3, dtype=torch.float64)

    def loss(w: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        def step(c: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(c * x + w.exp().sum(0)), None

        return tfn.scan(step, h, xs)[0].sum()

    split = forward_backward(tfn.trace(loss, w, H, XS), (True, True, True), (True,))
    (forward,), (backward,) = scans(split.forward), scans(split.backward)
    stacked = [str(var.type) for var in forward.outputs[number(forward, "num_carry") :]]
    assert stacked == ["f64[4, 3]", "f64[4, 3]"], "tanh(...) and the carry before the step"
    assert number(backward, "num_consts") == 1, "exp(w), computed once"
    assert any(equation.op.name == "aten.exp.default" for equation in split.forward.equations)


def test_y_that_is_a_residual_is_not_stacked_twice() -> None:
    def loss(h: Tensor, xs: Tensor) -> Tensor:
        def step(c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.tanh(c + x)
            return new, new

        return tfn.scan(step, h, xs)[1].sum()

    split = forward_backward(tfn.trace(loss, H, XS), (True, True), (True,))
    (forward,) = scans(split.forward)
    assert len(forward.outputs) == 2


def test_constant_carries_become_consts() -> None:
    def f(w: Tensor, h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: ((c[0], c[0] * c[1]), x), (w, h), xs)

    (equation,) = scans(tfn.trace(f, H, H, XS))
    assert (number(equation, "num_consts"), number(equation, "num_carry")) == (1, 1)
    torch.testing.assert_close(traced(f, H, H, XS), f(H, H, XS))


@pytest.mark.parametrize("size", [3, 4, 7, 9, 12])
@pytest.mark.parametrize("reverse", [False, True])
def test_sqrt_checkpoints_change_nothing_but_memory(size: int, reverse: bool) -> None:
    xs = torch.linspace(-1, 1, 3 * size, dtype=torch.float64).reshape(size, 3)

    def f(h: Tensor, xs: Tensor, checkpoint: Any = "sqrt") -> Any:
        def step(c: Tensor, x: Tensor) -> Any:
            new = torch.tanh(c * x.sin() + c)
            return new, new.exp()

        return tfn.scan(step, h, xs.T, dim=1, reverse=reverse, checkpoint=checkpoint)

    torch.testing.assert_close(f(H, xs), f(H, xs, None))
    torch.testing.assert_close(traced(f, H, xs), f(H, xs, None))
    loss = lambda f: lambda *args: f(*args)[1].sin().sum() + f(*args)[0].sum()
    plain = lambda h, xs: f(h, xs, None)
    torch.testing.assert_close(tfn.grad(loss(f), (0, 1))(H, xs), tfn.grad(loss(plain), (0, 1))(H, xs))


def test_sqrt_checkpoints_save_memory() -> None:
    xs = torch.zeros(100, 3, dtype=torch.float64)

    def saved(checkpoint: str | None) -> int:
        def loss(h: Tensor, xs: Tensor) -> Tensor:
            step = lambda c, x: (torch.tanh(c.sin() * x).exp(), None)
            return tfn.scan(step, h, xs, checkpoint=checkpoint)[0].sum()

        split = forward_backward(tfn.trace(loss, H, xs), (True, True), (True,))
        extra = split.forward.outputs[len(split.forward.outputs) - split.num_extra :]
        return sum(atom.type.shape[0] for atom in extra if len(atom.type.shape) > 1)

    assert saved("sqrt") == 20, "ten carries, and xs as ten blocks"
    assert saved(None) >= 300


# ---- dce ----


def test_dce_drops_a_carry_that_nothing_reads() -> None:
    def f(h: Tensor, xs: Tensor) -> Any:
        def step(carry: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Any:
            a, b, c = carry
            return (a + x, b + a, c * b), (a, c)

        return tfn.scan(step, (h, h, h), xs)

    trace = tfn.trace(f, H, XS)
    for wanted, carries in (
        ((True, False, False, False, False), 1),
        ((False, True, False, False, False), 2),
        ((False,) * 4 + (True,), 3),
    ):
        new, _ = dce_to(trace, wanted)
        tfn.check(new)
        assert number(scans(new)[0], "num_carry") == carries
        want = [value for value, flag in zip(tfn.evaluate(trace, (H, XS)), wanted, strict=True) if flag]
        torch.testing.assert_close(list(tfn.evaluate(new, (H, XS))), want)
        assert dce_to(new, (True,) * len(new.outputs))[0] == new


def test_capture_is_constant_in_the_number_of_steps() -> None:
    def f(xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: (c * x, None), H, xs)[0]

    assert len(tfn.trace(f, XS).equations) == len(tfn.trace(f, XS.repeat(100, 1)).equations) == 1


# ---- errors ----


def raises(f: Any, *args: Any) -> str:
    """The message of what f raises, in a trace and, where there are steps, in Python."""
    with pytest.raises(TraceTypeError) as outside:
        f(*args)
    with pytest.raises(TraceTypeError) as inside:
        tfn.trace(f, *args)
    assert message_of(inside.value) == message_of(outside.value)
    return message_of(inside.value)


def widen(c: dict[str, Tensor], x: Tensor) -> Any:
    return {"h": c["h"].to(torch.float32), "n": c["n"]}, x


def test_a_carry_that_changes_type_is_named() -> None:
    call = lambda h, xs: tfn.scan(widen, {"h": h, "n": h}, xs)
    text = raises(call, H, XS)
    assert text == (
        "scan: the carry must keep its types, but\n"
        "  carry['h']: f64[3] becomes f32[3]\n"
        f"function:     widen (test_structured_scan.py:{widen.__code__.co_firstlineno})\n"
        f"from:         {__file__}:{call.__code__.co_firstlineno} in <lambda>\n"
        "Cast or reshape it, e.g. `.to(torch.float32)`, in the function or in the first carry."
    )


def test_numbers_in_the_first_carry() -> None:
    def f(xs: Tensor) -> Any:
        return tfn.scan(lambda c, x: ((c[0] + x.sum(), c[1] + 1, c[2]), x * c[1] + c[2]), (0.0, 0, 2), xs)

    (total, count, fixed), ys = f(XS)
    have = tfn.jit(f)(XS)
    torch.testing.assert_close((have[0][0], have[1]), (total, ys))
    assert int(have[0][1]) == count == len(XS) and have[0][2] == fixed == 2
    text = raises(lambda xs: tfn.scan(lambda c, x: (c + x, x), 0.0, xs), XS)
    assert "carry: the float 0.0 becomes f64[3]" in text and "`torch.tensor(0.0)`" in text


def test_other_errors() -> None:
    assert "must return (carry, y), not a Tensor" in raises(lambda xs: tfn.scan(lambda c, x: x, H, xs), XS)
    assert "carry is a leaf, and the new carry is a tuple of 2" in raises(
        lambda xs: tfn.scan(lambda c, x: ((c, c), x), H, xs), XS
    )
    assert "y is of type int, and only tensors can be stacked" in raises(
        lambda xs: tfn.scan(lambda c, x: (c, 1), H, xs), XS
    )
    assert "xs[0]: 4\n  xs[1]: 3" in raises(lambda xs: tfn.scan(lambda c, x: (c, x[0]), H, (xs, xs[1:])), XS)
    assert "length is needed" in raises(lambda h: tfn.scan(lambda c, x: (c, None), h), H)
    assert "has no dim 2" in raises(lambda xs: tfn.scan(lambda c, x: (c, x), H, xs, dim=2), XS)
    assert "unroll is True or a positive int" in raises(lambda xs: tfn.scan(lambda c, x: (c, x), H, xs, unroll=0), XS)


def test_writes_to_outer_tensors_say_so() -> None:
    def f(h: Tensor, xs: Tensor) -> Any:
        def step(c: Tensor, x: Tensor) -> Any:
            h.add_(1)
            return c, x

        return tfn.scan(step, h * 2, xs)

    with pytest.raises(CaptureError) as raised:
        tfn.trace(f, H.clone(), XS)
    line = f.__code__.co_firstlineno + 2
    assert message_of(raised.value) == (
        "scan: step writes in place to a tensor from outside (f64[3]), but a body computes new values only\n"
        f"from:         {__file__}:{line} in step\n"
        "Return the new value, or write to a copy made inside the body (`x = x.clone()`).\n"
        "A module that updates buffers can be in `.eval()`, or be called by `torch.func.functional_call` on copies."
    )


def test_a_module_that_updates_buffers_in_a_body() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3, dtype=torch.float64)

        def forward(self, xs: Tensor) -> Tensor:
            return tfn.scan(lambda c, x: (self.norm(x), None), xs[0], xs)[0]

    with pytest.raises(CaptureError) as raised:
        tfn.jit(Net())(torch.randn(4, 2, 3, dtype=torch.float64))
    first, where, *_ = message_of(raised.value).splitlines()
    assert "(i64[]), a tensor from outside (f64[3]), a tensor from outside (f64[3])" in first
    assert where.endswith("in <lambda> (norm)")


def test_writes_to_its_own_tensors_are_fine() -> None:
    def f(h: Tensor, xs: Tensor) -> Any:
        def step(c: Tensor, x: Tensor) -> Any:
            new = c.clone()
            new[0] += x.sum()
            return new, new

        return tfn.scan(step, h, xs)

    torch.testing.assert_close(traced(f, H, XS), f(H, XS))


def test_a_body_named_as_a_function_that_it_calls() -> None:
    f = tfn.jit(lambda x: tfn.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    torch.testing.assert_close(f(XS), XS.cos())
    torch.testing.assert_close(f(XS + 1), (XS + 1).sin())


# ---- randomness ----


def test_random_numbers_are_drawn_in_each_step() -> None:
    def f(h: Tensor) -> Any:
        return tfn.scan(lambda c, _: (c, torch.rand(2)), h, length=3)[1]

    torch.manual_seed(0)
    want = torch.stack([torch.rand(2) for _ in range(3)])
    torch.manual_seed(0)
    torch.testing.assert_close(traced(f, H), want)


def test_the_backward_does_not_draw_again() -> None:
    def loss(h: Tensor, xs: Tensor) -> Tensor:
        return tfn.scan(lambda c, x: ((c + x) * torch.rand(3, dtype=torch.float64), c * c), h, xs)[1].sum()

    torch.manual_seed(0)
    have = tfn.grad(loss)(H, XS)
    torch.manual_seed(0)
    leaf = H.clone().requires_grad_()
    torch.testing.assert_close(have, torch.autograd.grad(loss(leaf, XS), leaf)[0])


def test_counters_index_tensors() -> None:
    """`x[i]` where i is the counter of a loop, read and written."""
    table = torch.arange(24.0, dtype=torch.float64).reshape(4, 2, 3)

    def read(i: Any, x: Tensor) -> Any:
        return x[i], x[-i - 1, 1], x[1:, ..., i % 3], x[:, i % 2, None, i % 3], x[i, i % 2, i % 3], x[..., i % 3]

    def written(i: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[i] = x[i] * 2
        x[:, i % 2, 1] = 5
        x[i, 0] += torch.ones(3)
        return x

    scanned = tfn.jit(lambda x: tfn.scan(lambda c, i: (written(i, c), read(i, c)), x, torch.arange(4)))
    last, found = scanned(table)
    carry, rows = table, []
    for i in range(4):
        rows.append(read(i, carry))
        carry = written(i, carry)
    torch.testing.assert_close(last, carry)
    for have, want in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(have, torch.stack(want))
    f = lambda x: tfn.fori_loop(0, 3, lambda i, v: v * x[i].sum() + x[i, 0], x[3, 1])
    eager = lambda x: f(x)
    torch.testing.assert_close(
        tfn.grad(lambda x: f(x).sum())(table * 0.1), torch.func.grad(lambda x: eager(x).sum())(table * 0.1)
    )
