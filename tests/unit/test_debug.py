"""Printing and calling back from programs: once for each run, example and step, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn import debug
from thunder_fn.errors import MissingRule, UnsupportedInput, VmapError

XS = torch.tensor([1.0, -2.0, 3.0])
SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def see(*values: Any) -> None:
    assert not any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
    SEEN.append(tuple(value.tolist() if isinstance(value, torch.Tensor) else value for value in values))


def total(x: torch.Tensor) -> torch.Tensor:
    debug.callback(see, x.sum())
    return (x**3).sum()


ONCE: dict[str, Callable[[torch.Tensor], Any]] = {
    "eager": total,
    "jit": tfn.jit(total),
    "grad": tfn.grad(total),
    "jit of grad": tfn.jit(tfn.grad(total)),
    "vjp": lambda x: tfn.vjp(total, x)[1](torch.ones(())),
    "jvp": lambda x: tfn.jvp(total, (x,), (x,)),
    "linearize": lambda x: tfn.linearize(total, x)[1](x),
    "hessian": tfn.hessian(total),
    "checkpoint": tfn.grad(tfn.checkpoint(total)),
    "backward": lambda x: tfn.jit(total)(x.clone().requires_grad_()).backward(),
    "backward of a checkpoint": lambda x: tfn.checkpoint(total)(x.clone().requires_grad_()).backward(),
    "a second backward": lambda x: twice(tfn.jit(total), x),
    "verify": tfn.jit(total, verify=True),
    "a jitted function inside": tfn.jit(lambda x: tfn.jit(total)(x) * 2),
    "a result that nobody reads": tfn.jit(lambda x: (total(x), x)[1]),
    "torch.func.grad": lambda x: torch.func.grad(total)(x),
}


def twice(f: Callable[..., Any], x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    torch.autograd.grad(first.sum(), x)


@pytest.mark.parametrize("name", ONCE)
def test_a_run_calls_back_once(name: str) -> None:
    for _ in range(2):
        SEEN.clear()
        ONCE[name](XS)
        assert SEEN == [(2.0,)]


def test_nothing_is_called_while_tracing() -> None:
    trace = tfn.trace(tfn.grad(total), XS)
    tfn.eval_shape(total, XS)
    tfn.jit(total).lower(XS)
    assert SEEN == []
    tfn.evaluate(trace, (XS,))
    assert SEEN == [(2.0,)]


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit])
def test_a_batch_calls_back_for_each_example(wrap: Callable[[Any], Any]) -> None:
    pairs = torch.arange(6.0).reshape(3, 2)
    wrap(tfn.vmap(lambda x, n: debug.callback(see, x, 7) or x * n, in_dims=(1, None)))(pairs, torch.tensor(2.0))
    assert SEEN == [([0.0, 2.0, 4.0], 7), ([1.0, 3.0, 5.0], 7)]
    SEEN.clear()
    wrap(tfn.vmap(tfn.vmap(lambda x, y: debug.callback(see, x, y) or x * y, (None, 0)), (0, None)))(XS[:2], XS)
    assert [(float(x), float(y)) for x in XS[:2] for y in XS] == SEEN
    SEEN.clear()
    wrap(tfn.vmap(tfn.grad(lambda x: total(x[None]))))(XS)
    assert SEEN == [(1.0,), (-2.0,), (3.0,)]
    SEEN.clear()
    wrap(tfn.vmap(lambda x, y: debug.callback(see, y) or x, (0, None)))(XS, torch.tensor(5.0))
    assert SEEN == [(5.0,)]


def test_torch_funcs_vmap_calls_back_for_each_example() -> None:
    torch.func.vmap(lambda x: debug.callback(see, x) or x)(XS)
    assert SEEN == [(1.0,), (-2.0,), (3.0,)]


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit, tfn.grad])
def test_loops_and_branches_call_back_where_they_run(wrap: Callable[[Any], Any]) -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        return tfn.scan(lambda c, row: (c + row, total((c * row)[None])), x[0], x)[1].sum()

    def branch(x: torch.Tensor) -> torch.Tensor:
        return tfn.cond(x.sum() > 0, total, lambda x: debug.callback(see, "no") or x.sum(), (x,))

    wrap(steps)(XS)
    assert SEEN == [(1.0,), (-4.0,), (0.0,)]
    SEEN.clear()
    wrap(branch)(XS)
    wrap(branch)(-XS)
    assert SEEN == [(2.0,), ("no",)]


def test_examples_call_back_in_the_branch_that_they_take() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return tfn.cond(
            x > 0, lambda x: debug.callback(see, "yes", x) or x * 2, lambda x: debug.callback(see, "no", x) or x, (x,)
        )

    wanted = [("yes", 1.0), ("no", -2.0), ("yes", 3.0)]
    for g in (tfn.vmap(f), tfn.jit(tfn.vmap(f)), tfn.vmap(tfn.grad(f))):
        SEEN.clear()
        g(XS)
        assert wanted == SEEN


def test_while_loops_call_back_at_each_step_or_say_why_not() -> None:
    def loop(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return tfn.while_loop(lambda x: x < 4, lambda x: (debug.callback(see, x) or x * 2,), (x,), **options)[0]

    for f in (loop, tfn.jit(loop), tfn.grad(lambda x: loop(x, max_steps=4))):
        SEEN.clear()
        f(torch.tensor(1.0))
        assert SEEN == [(1.0,), (2.0,)]
    with pytest.raises(MissingRule, match="call back"):
        tfn.grad(loop)(torch.tensor(1.0))
    with pytest.raises(VmapError, match=r"Use `tfn\.map`"):
        tfn.vmap(loop)(XS.abs())


def test_effects_keep_their_order_and_their_number() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            debug.callback(see, x)
        x.add_(1)
        debug.callback(see, x)
        return x

    for g in (f, tfn.jit(f), tfn.jit(tfn.checkpoint(f))):
        SEEN.clear()
        g(XS.clone())
        assert SEEN == [([1.0, -2.0, 3.0],)] * 2 + [([2.0, -1.0, 4.0],)]


def test_print_formats_values(capsys: pytest.CaptureFixture[str]) -> None:
    f = tfn.jit(lambda x: debug.print("{:.1f} of {n}: {d[a]}", x.sum(), n=x.shape[0], d={"a": x[:1]}) or x)
    f(XS)
    f(XS * 2)
    assert capsys.readouterr().out == "2.0 of 3: tensor([1.])\n4.0 of 3: tensor([2.])\n"
    sizes = tfn.jit(lambda x: debug.print("{}", x.shape[0]) or x, cache="symbolic values")
    sizes(torch.ones(2)), sizes(torch.ones(5))
    assert capsys.readouterr().out == "2\n5\n" and tfn.cache_info(sizes).misses == 1


def test_misuse() -> None:
    with pytest.raises(UnsupportedInput, match=r'Write `debug.print\("{}", x\)`'):
        debug.print(XS)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match=r"debug\.callback: expected a function, given a Tensor"):
        debug.callback(XS)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match="unhashable"):
        debug.callback(see, bytearray(b"x"))
