"""roll and unroll: layers in sequence as one scan, and back, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.executors import lower
from thunder_fn.ir.trace import Trace, subtraces
from thunder_fn.testing.laws.comparing import same_bits

F = nn.functional
Tensor = torch.Tensor
X = torch.linspace(-1, 1, 6).reshape(2, 3)


def size(trace: Trace) -> int:
    """The equations of its distinct bodies."""
    return sum(len(part.equations) for part in subtraces(trace))


def names(trace: Trace) -> list[str]:
    return [equation.op.name for equation in trace.equations]


@tfn.composite
def layer(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w + b)


@tfn.composite
def noisy(w: Tensor, x: Tensor) -> Tensor:
    return F.dropout(x @ w, 0.5)


@tfn.composite
def two_lanes(w: Tensor, a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two carries that change places, and a result of its own."""
    return b * mask, (a @ w).sin(), a.sum()


WS = [torch.randn(3, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
BS = [w.sum(0) for w in WS]


def chain(x: Tensor) -> Tensor:
    for w, b in zip(WS, BS, strict=True):
        x = layer(w, b, x)
    return x.exp()


def hidden_states(x: Tensor) -> list[Tensor]:
    states = [x]
    for w, b in zip(WS, BS, strict=True):
        states.append(layer(w, b, states[-1]))
    return [states[1] * 2, states[3], *states]


def weights_made_on_the_way(x: Tensor) -> Tensor:
    for w, b in zip(WS, BS, strict=True):
        x = layer(w.t() * 2, b, x)
    return x


def lanes(x: Tensor) -> Any:
    a, b, mask, sums = x, x.cos(), (x > 0).float(), []
    for w in WS:
        a, b, s = two_lanes(w, a, b, mask)
        sums.append(s)
    return a, b, sums


def interrupted(x: Tensor) -> Tensor:
    """Equations between the layers read them, so there are two runs of two."""
    for i, (w, b) in enumerate(zip(WS, BS, strict=True)):
        x = layer(w, b, x.sin() if i == 2 else x)
    return x


def random_layers(x: Tensor) -> Tensor:
    for w in WS:
        x = noisy(w, x)
    return x + torch.rand(3)


def parallel(x: Tensor) -> Tensor:
    """Equal composites that do not follow one another stay as they are."""
    return layer(WS[0], BS[0], x) + layer(WS[1], BS[1], x)


PROGRAMS = {
    chain: 1,
    hidden_states: 1,
    weights_made_on_the_way: 1,
    lanes: 1,
    interrupted: 2,
    random_layers: 1,
    parallel: 0,
}


def is_close(have: Tensor, want: Tensor) -> bool:
    """MKL rounds a product with a weight that lies transposed otherwise, on some processors."""
    return torch.allclose(have, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", PROGRAMS)
def test_rolled_and_unrolled_compute_the_same(f: Callable[[Tensor], Any]) -> None:
    trace = tfn.trace(f, X)
    rolled = tfn.roll(trace)
    again = tfn.unroll(rolled)
    assert names(rolled).count("scan") == PROGRAMS[f] and "scan" not in names(again)
    for one in (rolled, again):
        tfn.check(one)
        for run in (lambda x, one=one: tfn.evaluate(one, (x,)), lower(one), lower(one, below_autograd=True)):
            torch.manual_seed(2)
            want = tfn.evaluate(trace, (X,))
            torch.manual_seed(2)
            same = is_close if f is weights_made_on_the_way else same_bits
            assert all(map(same, run(X), want))
    assert tfn.roll(again) == rolled and tfn.roll(parallel_trace := tfn.trace(parallel, X)) == parallel_trace


def rolling(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, rolled when it is traced; a `call` that transforms see."""
    return tfn.jit(f, transforms=tfn.roll)


@pytest.mark.parametrize("f", [chain, weights_made_on_the_way, interrupted])
def test_under_transforms(f: Callable[[Tensor], Tensor]) -> None:
    total = lambda g: lambda x: g(x).square().sum()
    close = torch.testing.assert_close
    close(tfn.grad(total(rolling(f)))(X), tfn.grad(total(f))(X))
    close(tfn.jvp(rolling(f), (X,), (X,)), tfn.jvp(f, (X,), (X,)))
    close(tfn.vmap(rolling(f))(torch.stack([X, -X])), tfn.vmap(f)(torch.stack([X, -X])))
    close(tfn.grad(total(tfn.checkpoint(rolling(f))))(X), tfn.grad(total(f))(X))
    close(tfn.hessian(total(rolling(f)))(X), tfn.hessian(total(f))(X))
    rolled_gradient = tfn.roll(tfn.trace(tfn.grad(total(f)), X))
    tfn.check(rolled_gradient)
    close(tfn.evaluate(rolled_gradient, (X,))[0], tfn.grad(total(f))(X))


def test_the_trace_of_a_gpt_is_of_constant_size() -> None:
    tokens = torch.randint(0, 96, (2, 8))
    sizes = dict[str, set[int]](forward=set(), gradient=set(), together=set())
    for layers in (3, 12):
        model = GPT(layers, 16, context=8)
        loss, params = gpt_loss(model), params_of(model)
        forward = tfn.trace(model, tokens)
        rolled = tfn.roll(forward)
        assert tfn.unroll(rolled) == forward
        assert all(map(torch.equal, tfn.evaluate(rolled, (tokens,)), tfn.evaluate(forward, (tokens,))))
        sizes["forward"].add(size(rolled))
        gradient = tfn.trace(tfn.grad(loss), params, tokens, tokens)
        sizes["gradient"].add(size(tfn.roll(gradient)))
        sizes["together"].add(size(tfn.trace(tfn.grad(rolling(loss)), params, tokens, tokens)))
    assert all(len(found) == 1 for found in sizes.values())


def test_a_jitted_gpt_trains_rolled() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 96, (2, 8))
    model = GPT(4, 16, context=8)
    loss, params = gpt_loss(model), params_of(model)
    step = tfn.jit(tfn.grad(loss), transforms=tfn.roll)
    torch.testing.assert_close(step(params, tokens, tokens), tfn.grad(loss)(params, tokens, tokens))
    assert str(tfn.last_traces(step)[1]).count("= scan") == 2
    plain = tfn.jit(model, transforms=tfn.roll)
    torch.testing.assert_close(plain(tokens), model(tokens))
    plain(tokens).sum().backward()
    rolled = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(tokens).sum().backward()
    torch.testing.assert_close(rolled, [p.grad for p in model.parameters()])


# ---- scan(unroll=) ----


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("unroll", [2, 3, 7, 9, True])
def test_steps_written_out(unroll: Any, reverse: bool) -> None:
    xs = torch.linspace(-1, 1, 21).reshape(7, 3)

    def f(xs: Tensor, unroll: Any = unroll) -> Any:
        step = lambda c, x: ((c @ WS[0] + x).sin(), (c * x, x))
        return tfn.scan(step, X[0], xs, reverse=reverse, unroll=unroll)

    for g in (f, tfn.grad(lambda xs, unroll=unroll: f(xs, unroll)[1][0].sum())):
        trace = tfn.trace(g, xs)
        want = tfn.evaluate(tfn.trace(g, xs, 1), (xs,))
        program = lower(trace, below_autograd=True)
        assert all(map(same_bits, program(xs), want))
        assert ("for v" in str(program)) == (unroll in (2, 3))


def test_a_scan_without_a_loop_is_a_graph() -> None:
    f = lambda xs: tfn.scan(lambda c, x: (c + x, c * x), X[0], xs, unroll=True)
    assert all(map(torch.equal, tfn.trace(f, X).to_fx()(X), tfn.evaluate(tfn.trace(f, X), (X,))))
