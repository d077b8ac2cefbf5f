"""Every control flow function under every transform, against Python loops under plain PyTorch, in float64.

A row is a program written twice: with a structured op, and as Python that torch.func can differentiate. A column is a
transform written twice: thunder_fn's and torch.func's. Each trace on the way passes `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.attention.flex_attention import flex_attention

import thunder_fn as tfn
from thunder_fn.ir.trace import Trace

# torch.func.jvp scripts its decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

Tensor = torch.Tensor
F64 = torch.float64
W = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6], [-0.7, 0.2, 0.3]], dtype=F64)


@pytest.fixture(autouse=True)
def _check_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every trace that is run is checked first."""
    from thunder_fn.structured.shared import bind

    plain = bind.evaluate

    def checked(trace: Trace, inputs: Any) -> Any:
        tfn.check(trace)
        return plain(trace, inputs)

    monkeypatch.setattr(bind, "evaluate", checked)
    yield


# ---- rows ----


def cond_op(x: Tensor) -> Tensor:
    return tfn.cond(x.sum() > 0, lambda x: x.sin() @ W, lambda x: (x * x.abs().sqrt()).exp(), (x,))


def cond_python(x: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, x.sin() @ W, (x * x.abs().sqrt()).exp())


BRANCHES = (lambda x: x.sin(), lambda x: x @ W * x, lambda x: x)


def switch_op(x: Tensor) -> Tensor:
    return tfn.switch((x.sum() * 3).to(torch.int64), BRANCHES, (x,))


def switch_python(x: Tensor) -> Tensor:
    index = (x.sum() * 3).to(torch.int64).clamp(0, 2)
    return torch.where(index == 0, BRANCHES[0](x), torch.where(index == 1, BRANCHES[1](x), x))


def step(carry: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    h, total = carry
    new = torch.tanh(h @ W.exp() + x * h)
    return (new, total + new.sum()), (new * 2, x)


def scan_loop(init: Any, xs: Tensor, reverse: bool) -> Any:
    carry, ys = init, []
    for x in reversed(xs.unbind(0)) if reverse else xs.unbind(0):
        carry, y = step(carry, x)
        ys.append(y)
    columns = [torch.stack(column[::-1] if reverse else column) for column in zip(*ys, strict=True)]
    return carry, columns


def scan_row(run: Callable[..., Any], reverse: bool) -> Callable[[Tensor], Tensor]:
    def program(x: Tensor) -> Tensor:
        xs = torch.stack([x, x.sin(), x * 2, x.cos()])
        (h, total), (y, z) = run((torch.ones(3, dtype=F64), x.sum()), xs, reverse)
        return h * total + (y * z * torch.arange(4)[:, None]).sum(0)

    return program


def while_cond(n: Tensor, v: Tensor) -> Tensor:
    return (v.sum() < 20) & (n < 8)


def while_body(n: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return n + 1, v * 1.3 + v.sin() @ W + 0.5


def while_op(x: Tensor) -> Tensor:
    n, v = tfn.while_loop(while_cond, while_body, (torch.tensor(0), x), max_steps=10)
    return v * n


def while_unbounded(x: Tensor) -> Tensor:
    n, v = tfn.while_loop(while_cond, while_body, (torch.tensor(0), x))
    return v * n


def while_python(x: Tensor) -> Tensor:
    n, v = torch.tensor(0), x
    for _ in range(10):
        alive = while_cond(n, v)
        new_n, new_v = while_body(n, v)
        n, v = torch.where(alive, new_n, n), torch.where(alive, new_v, v)
    return v * n


def combine(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return a[0] * b[0], a[1] * b[0] + b[1]


def associative_op(x: Tensor) -> Tensor:
    gates, values = torch.stack([x, x.sin(), x * 2, x.cos(), x + 1]), torch.stack([x, x, x.exp(), x, x * x])
    return tfn.associative_scan(combine, (gates, values), 0)[1].sin().sum(0)


def associative_python(x: Tensor) -> Tensor:
    gates, values = torch.stack([x, x.sin(), x * 2, x.cos(), x + 1]), torch.stack([x, x, x.exp(), x, x * x])
    found = [(gates[0], values[0])]
    for pair in zip(gates[1:], values[1:], strict=True):
        found.append(combine(found[-1], pair))
    return torch.stack([value for _, value in found]).sin().sum(0)


def map_op(x: Tensor) -> Tensor:
    return tfn.map(lambda y: (y @ W).sin() * x, torch.outer(x, x)).sum(0)


def map_python(x: Tensor) -> Tensor:
    return torch.stack([(y @ W).sin() * x for y in torch.outer(x, x).unbind(0)]).sum(0)


def fori_op(x: Tensor) -> Tensor:
    return tfn.fori_loop(1, 5, lambda i, v: (v @ W).sin() + v * i, x)


def fori_python(x: Tensor) -> Tensor:
    for i in range(1, 5):
        x = (x @ W).sin() + x * i
    return x


def nested_op(x: Tensor) -> Tensor:
    def inner(c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        new = tfn.cond(c.sum() > 0, lambda c: (c * y).sin(), lambda c: c - y, (c,))
        return tfn.fori_loop(0, 2, lambda i, v: (v @ W).cos() * x, new), new

    last, ys = tfn.scan(inner, x, torch.outer(x, x))
    return last + ys.sum(0)


def nested_python(x: Tensor) -> Tensor:
    c, ys = x, []
    for y in torch.outer(x, x).unbind(0):
        new = torch.where(c.sum() > 0, (c * y).sin(), c - y)
        ys.append(new)
        c = new
        for _ in range(2):
            c = (c @ W).cos() * x
    return c + torch.stack(ys).sum(0)


def checkpoint_op(x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: (x @ W).sin().exp() * x, x.cos(), use_reentrant=False)


def checkpoint_python(x: Tensor) -> Tensor:
    return (x.cos() @ W).sin().exp() * x.cos()


@tfn.jit
def inner_function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ W).sin() * y, x.exp()


def call_op(x: Tensor) -> Tensor:
    a, b = inner_function(x, x.cos())
    return tfn.fori_loop(0, 2, lambda i, v: inner_function(v, b)[0], a * b)


def call_python(x: Tensor) -> Tensor:
    a, b = (x @ W).sin() * x.cos(), x.exp()
    v = a * b
    for _ in range(2):
        v = (v @ W).sin() * b
    return v


def flex_op(x: Tensor) -> Tensor:
    q = torch.outer(x, x.exp())[None, None]
    return flex_attention(q, q.sin(), q, score_mod=lambda s, b, h, i, j: s + x[i] * x[j])[0, 0].sum(0)


def flex_python(x: Tensor) -> Tensor:
    q = torch.outer(x, x.exp())
    return ((q @ q.sin().T / 3**0.5 + torch.outer(x, x)).softmax(-1) @ q).sum(0)


@dataclass(frozen=True)
class Row:
    """A program with a structured op, and the same in Python."""

    op: Callable[[Tensor], Tensor]
    python: Callable[[Tensor], Tensor]


ROWS = {
    "cond": Row(cond_op, cond_python),
    "switch": Row(switch_op, switch_python),
    "scan": Row(scan_row(lambda i, xs, r: tfn.scan(step, i, xs, reverse=r), False), scan_row(scan_loop, False)),
    "scan reversed": Row(scan_row(lambda i, xs, r: tfn.scan(step, i, xs, reverse=r), True), scan_row(scan_loop, True)),
    "while_loop": Row(while_op, while_python),
    "while_loop unbounded": Row(while_unbounded, while_python),
    "associative_scan": Row(associative_op, associative_python),
    "fori_loop": Row(fori_op, fori_python),
    "map": Row(map_op, map_python),
    "nested": Row(nested_op, nested_python),
    "checkpoint": Row(checkpoint_op, checkpoint_python),
    "call": Row(call_op, call_python),
    "flex_attention": Row(flex_op, flex_python),
}

# ---- columns ----

X = torch.tensor([0.3, -0.2, 0.4], dtype=F64)
XS = torch.tensor([[0.3, -0.2, 0.4], [-0.5, 0.1, 0.2], [0.9, 0.8, -0.1], [0.2, 0.5, 0.1]], dtype=F64)
V = torch.tensor([1.0, -0.5, 2.0], dtype=F64)
U = torch.tensor([0.2, 0.7, -1.0], dtype=F64)


def total(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (f(x) * U).sin().sum()


def directional(f: Callable[[Tensor], Tensor], grad: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: (grad(total(f))(x) * V).sum()


def vmap_both(f: Callable[[Tensor], Tensor], vmap: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: vmap(f)(torch.stack([x, -x, x * 0.5])).sum(0)


def jitted(lib: Any, f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return tfn.jit(f) if lib is tfn else f


COLUMNS: dict[str, Callable[[Any, Callable[[Tensor], Tensor]], Any]] = {
    "eager": lambda lib, f: f(X),
    "grad": lambda lib, f: lib.grad(total(f))(X),
    "jvp": lambda lib, f: lib.jvp(f, (X,), (V,)),
    "vjp": lambda lib, f: lib.vjp(f, X)[1](U)[0],
    "vmap": lambda lib, f: lib.vmap(f)(XS),
    "grad of grad": lambda lib, f: lib.grad(directional(f, lib.grad))(X),
    "vmap of grad": lambda lib, f: lib.vmap(lib.grad(total(f)))(XS),
    "grad of vmap": lambda lib, f: lib.grad(total(vmap_both(f, lib.vmap)))(X),
    "jvp of vjp": lambda lib, f: lib.jvp(lambda x: lib.vjp(f, x)[1](U)[0], (X,), (V,)),
    "vjp of jvp": lambda lib, f: lib.vjp(lambda x: lib.jvp(f, (x,), (V,))[1], X)[1](U)[0],
    "jacrev": lambda lib, f: lib.jacrev(f)(X),
    "jit": lambda lib, f: jitted(lib, f)(X),
    "jit of grad": lambda lib, f: jitted(lib, lib.grad(total(f)))(X),
    "grad of jit": lambda lib, f: lib.grad(total(jitted(lib, f)))(X),
    "hessian": lambda lib, f: lib.hessian(total(f))(X),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_cell(row: str, column: str) -> None:
    """The structured op under thunder_fn is the Python program under torch.func."""
    if row == "flex_attention" and column == "eager":
        pytest.skip("outside a trace it is PyTorch's own, which has no kernel for the CPU in float64")
    have = COLUMNS[column](tfn, ROWS[row].op)
    want = COLUMNS[column](torch.func, ROWS[row].python)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", ROWS)
def test_traced(row: str) -> None:
    """The trace evaluates as the program does, and its printed text too."""
    trace = tfn.trace(ROWS[row].op, X)
    tfn.check(trace)
    want = ROWS[row].python(X)
    torch.testing.assert_close(tfn.evaluate(trace, (X,))[0], want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(trace.python_callable()(X)[0], want, rtol=1e-9, atol=1e-9, check_stride=False)
