"""Bodies that change Python objects: they give what a Python loop gives, or are refused. The oracle is that loop."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace as ns
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

Tensor = torch.Tensor
X = torch.arange(1.0, 5.0)
OUTSIDE = ns(n=0, log=[], memo={}, hit=False)


class Loops:
    """The structured ops as Python runs them."""

    @staticmethod
    def sum(step: Callable[[Tensor], Tensor], xs: Tensor) -> Tensor:
        return sum((step(x) for x in xs), torch.zeros(()))

    @staticmethod
    def cond(pred: Tensor, yes: Callable[..., Tensor], no: Callable[..., Tensor], x: Tensor) -> Tensor:
        return yes(x) if bool(pred) else no(x)

    @staticmethod
    def repeat(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        while bool(x.sum() < 40):
            x = step(x)
        return x


class Traced:
    """The structured ops."""

    sum = staticmethod(lambda step, xs: tfn.scan(lambda c, x: (c + step(x), None), torch.zeros(()), xs)[0])
    cond = staticmethod(lambda pred, yes, no, x: tfn.cond(pred, yes, no, (x,)))
    repeat = staticmethod(lambda step, x: tfn.while_loop(lambda x: x.sum() < 40, lambda x: (step(x),), (x,))[0])


class Counting(nn.Module):
    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.n, self.reads, self.table = 0, reads, None

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.table = self.table or [1.0, 2.0]
        return x * (self.n if self.reads else self.table[1])


def counted(make: Callable[[], Any], step: Callable[[Any], float], after: Callable[[Any], float] | None = None) -> Any:
    """A function whose body changes an object of its own; with `after`, the function reads it after the loop alone."""

    def f(x: Tensor, ops: Any) -> Tensor:
        held = make()
        one = (lambda x: x * step(held)) if after is None else (lambda x: (step(held), x)[1])
        return ops.sum(one, x) * (1.0 if after is None else after(held))

    return f


def again(held: Any, name: str = "n") -> int:
    setattr(held, name, getattr(held, name) + 1)
    return getattr(held, name)


def with_nonlocal(x: Tensor, ops: Any) -> Tensor:
    first = True

    def step(x: Tensor) -> Tensor:
        nonlocal first
        first, was = False, first
        return x * 2 if was else x

    return ops.sum(step, x)


def last(x: Tensor, ops: Any) -> Tensor:
    held = ns(x=torch.ones(()))

    def step(x: Tensor) -> Tensor:
        held.x = x * held.x
        return held.x

    return ops.sum(step, x)


def after_loop(x: Tensor, ops: Any) -> Tensor:
    def step(x: Tensor) -> Tensor:
        OUTSIDE.n += 1
        return x

    return ops.sum(step, x) * OUTSIDE.n


def in_one_branch(x: Tensor, ops: Any) -> Tensor:
    def yes(x: Tensor) -> Tensor:
        OUTSIDE.hit = True
        return x * 2

    return ops.cond(x.sum() < 0, yes, lambda x: x * 3, x) * (2.0 if OUTSIDE.hit else 3.0)


def between_branches(x: Tensor, ops: Any) -> Tensor:
    held = ns(k=1.0)

    def yes(x: Tensor) -> Tensor:
        held.k = 5.0
        return x * 2

    return ops.cond(x.sum() < 0, yes, lambda x: x * held.k, x)


REFUSED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "item": counted(lambda: [0], lambda held: (held.append(0), len(held))[1]),
    "attribute": counted(lambda: ns(n=0), again),
    "pop": counted(lambda: [1.0, 2.0, 3.0, 4.0], lambda held: held.pop()),
    "rotate": counted(lambda: deque([1.0, 2.0, 3.0]), lambda held: (held.rotate(1), held[0])[1]),
    "iterator": counted(lambda: iter(range(9)), next),
    "count": counted(itertools.count, next),
    "array": counted(lambda: np.zeros(1), lambda held: (np.add(held, 1, out=held), float(held[0]))[1]),
    "random": counted(lambda: None, lambda held: random.random()),
    "generator": counted(lambda: random.Random(0), lambda held: held.random()),
    "module": lambda x, ops: ops.sum(Counting(reads=True), x),
    "list after": counted(list, lambda held: held.append(1), len),
    "method after": counted(lambda: (one := [], one.append), lambda held: held[1](1), lambda held: len(held[0])),
    "library after": counted(Counter, lambda held: held.update("a"), lambda held: held["a"]),
    "nonlocal": with_nonlocal,
    "last tensor": last,
    "outside, after": after_loop,
    "while": lambda x, ops: ops.repeat((lambda held: lambda x: x + again(held))(ns(n=0)), x),
    "one branch": in_one_branch,
    "between branches": between_branches,
}


def memo(k: int) -> float:
    if k not in OUTSIDE.memo:
        OUTSIDE.memo[k] = k * 2.0
    return OUTSIDE.memo[k]


def logged(x: Tensor) -> Tensor:
    OUTSIDE.log.append("x")
    return x * 2


MODULE = Counting(reads=False)
KEPT: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "memo": lambda x, ops: ops.sum(lambda x: x * memo(3), x),
    "memo of branches": lambda x, ops: ops.cond(x.sum() < 0, lambda x: x * memo(5), lambda x: x * memo(6), x),
    "memo of its own": counted(dict, lambda held: held.setdefault(3, 6.0)),
    "same value": counted(ns, lambda held: (setattr(held, "n", 2.0), held.n)[1]),
    "log": lambda x, ops: ops.sum(logged, x),
    "counter of a module": lambda x, ops: ops.sum(MODULE, x),
}


@pytest.fixture(autouse=True)
def as_at_first() -> Iterable[None]:
    yield
    OUTSIDE.n, OUTSIDE.hit = 0, False
    OUTSIDE.memo.clear()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "jit": tfn.jit,
    "grad": lambda f: tfn.grad(lambda x: f(x).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_bodies_whose_numbers_depend_on_a_side_effect_are_refused(name: str, transform: str) -> None:
    with pytest.raises(UnsupportedCall, match=r"(changes|draws from) .*(traced once|one branch)"):
        TRANSFORMS[transform](lambda x: REFUSED[name](x, Traced))(X)


@pytest.mark.parametrize("name", KEPT)
def test_bodies_with_harmless_side_effects_give_what_eager_gives(name: str) -> None:
    f = KEPT[name]
    jitted = tfn.jit(lambda x: f(x, Traced))
    expected = [f(X + step, Loops) for step in range(3)]
    MODULE.table = None
    OUTSIDE.memo.clear()
    for step in range(3):
        torch.testing.assert_close(jitted(X + step), expected[step])


# ---- every op that takes a function ----


def with_rule(
    kind: Any, set_rule: str, rule: Callable[..., Any], x: Tensor, step: Callable[[Tensor], Tensor]
) -> Tensor:
    f = kind(step)
    getattr(f, set_rule)(*rule(step))
    return (tfn.vmap(f) if kind is tfn.custom_vmap else f)(x)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.step = step
        return step(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.step(g), None


FWD_BWD = lambda step: (lambda x: (step(x), None), lambda _, g: (step(g),))
OPS: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "associative_scan": lambda x, step: tfn.associative_scan(lambda a, b: a + step(b), x),
    "pointwise": lambda x, step: tfn.associative_scan(lambda a, b: a + step(b), x, combine_mode="pointwise"),
    "scan": lambda x, step: tfn.scan(lambda c, x: (step(c + x), x), torch.zeros(()), x)[0],
    "scan in blocks": lambda x, step: tfn.scan(lambda c, x: (step(c + x), x), torch.zeros(()), x, checkpoint="sqrt")[0],
    "scan unrolled": lambda x, step: tfn.scan(lambda c, x: (step(c + x), x), torch.zeros(()), x, unroll=True)[0],
    "map": lambda x, step: tfn.map(step, x),
    "fori_loop": lambda x, step: tfn.fori_loop(0, 3, lambda i, x: step(x), x),
    "while_loop": lambda x, step: tfn.while_loop(lambda x: x.sum() < 40, lambda x: (step(x) + 1,), (x,))[0],
    "condition": lambda x, step: tfn.while_loop(lambda x: step(x).sum() < 40, lambda x: (x + 1,), (x,))[0],
    "cond": lambda x, step: tfn.cond(x.sum() > 0, step, lambda x: step(x) + 1, (x,)),
    "switch": lambda x, step: tfn.switch(1, (lambda x: x, step), (x,)),
    "checkpoint": lambda x, step: tfn.checkpoint(step)(x),
    "composite": lambda x, step: tfn.composite(step)(x),
    "vmap": lambda x, step: tfn.vmap(step)(x),
    "vmap in chunks": lambda x, step: tfn.vmap(step, chunk_size=3)(x),
    "jacrev": lambda x, step: tfn.jacrev(step, chunk_size=3)(x),
    "jacfwd": lambda x, step: tfn.jacfwd(step)(x),
    "hessian": lambda x, step: tfn.hessian(lambda x: step(x.sin()).sum())(x),
    "vjp twice": lambda x, step: (lambda out, pull: out + pull(x)[0] + pull(out)[0])(*tfn.vjp(step, x)),
    "linearize": lambda x, step: (lambda out, push: out + push(x) + push(out))(*tfn.linearize(step, x)),
    "custom_vjp": lambda x, step: with_rule(tfn.custom_vjp, "defvjp", FWD_BWD, x, step),
    "custom_jvp": lambda x, step: with_rule(
        tfn.custom_jvp, "defjvp", lambda step: (lambda p, t: (step(p[0]), step(t[0])),), x, step
    ),
    "custom_vmap": lambda x, step: with_rule(
        tfn.custom_vmap, "def_vmap", lambda step: (lambda size, flags, x: (step(x), True),), x, step
    ),
    "Function": lambda x, step: Once.apply(x, step),
    "jit": lambda x, step: (lambda f: f(x) + f(x))(tfn.jit(step)),
    "pure_callback": lambda x, step: tfn.pure_callback(step, x, x),
}


def outcomes(transform: Callable[..., Any], op: Callable[..., Tensor], counts: bool) -> Any:
    """The results of three calls, and the counter at the end; or the refusal."""
    held = ns(n=0)

    def count() -> None:
        held.n += 1

    def scaled(x: Tensor) -> Tensor:
        count()
        return x * held.n

    def doubled(x: Tensor) -> Tensor:
        count()
        return x * 2

    run = transform(lambda x: op(x, scaled if counts else doubled))
    try:
        return [run(X + i) for i in range(3)], held.n
    except UnsupportedCall as error:
        return error


@pytest.mark.parametrize("name", OPS)
def test_a_counter_in_the_function_of_any_op_is_eagers_or_refused(name: str) -> None:
    found, expected = outcomes(tfn.jit, OPS[name], True), outcomes(lambda f: f, OPS[name], True)
    if not isinstance(found, UnsupportedCall):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OPS)
def test_a_counter_that_nothing_reads_is_allowed_in_the_function_of_any_op(name: str) -> None:
    found, expected = outcomes(tfn.jit, OPS[name], False), outcomes(lambda f: f, OPS[name], False)
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("name", ["custom_vjp", "custom_jvp", "Function"])
def test_a_rule_that_computes_with_a_counter_is_refused_where_it_is_asked_for(name: str) -> None:
    with pytest.raises(UnsupportedCall, match=r"changes held\.n, and computes with the change"):
        raise outcomes(lambda f: tfn.grad(lambda x: f(x).sum()), OPS[name], True)
