"""Bodies that change Python objects: they give what a Python loop gives, or are refused. The oracle is that loop."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace as ns
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
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


# ---- containers and objects among the arguments ----


class Slots:
    __slots__ = ("n", "new")

    def __init__(self) -> None:
        self.n = 0


@dataclasses.dataclass
class Settings:
    n: Any = 0


class OwnDict(dict[str, Any]):
    pass


class OwnList(list[Any]):
    pass


HOLDERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"n": 0},
    "ordered": lambda: OrderedDict(n=0),
    "list": lambda: [0],
    "namespace": lambda: ns(n=0),
    "slots": Slots,
    "dataclass": Settings,
    "dict of the user's": lambda: OwnDict(n=0),
    "list of the user's": lambda: OwnList([0]),
    "module": lambda: Counting(reads=False),
}


def held(o: Any) -> Any:
    return o["n"] if isinstance(o, dict) else o[0] if isinstance(o, list) else o.n


def hold(o: Any, value: Any) -> None:
    if isinstance(o, (dict, list)):
        o["n" if isinstance(o, dict) else 0] = value
    else:
        o.n = value


def counts(x: Tensor, o: Any) -> Tensor:
    hold(o, held(o) + 1)
    return x * held(o)


def sets(x: Tensor, o: Any) -> Tensor:
    hold(o, 7)
    return x * 2


def grows(x: Tensor, o: Any) -> Tensor:
    if isinstance(o, dict):
        o[f"new{len(o)}"] = len(o)
    elif isinstance(o, list):
        o.append(len(o))
    else:
        o.new = 3
    return x * 2


class Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, o: Any, f: Callable[[Tensor, Any], Tensor]) -> Tensor:
        return f(x, o)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None, None


class SetUp(Calls):
    @staticmethod
    def forward(x: Tensor, o: Any, f: Callable[[Tensor, Any], Tensor]) -> Tensor:  # type: ignore[override]
        return f(x, o)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def with_vjp(f: Callable[[Tensor, Any], Tensor], x: Tensor, o: Any) -> Tensor:
    call = tfn.custom_vjp(f)
    call.defvjp(lambda x, o: (f(x, o), ()), lambda left, g: (g, None))
    return call(x, o)


def with_jvp(f: Callable[[Tensor, Any], Tensor], x: Tensor, o: Any) -> Tensor:
    call = tfn.custom_jvp(f)
    call.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return call(x, o)


def of_function(cls: Any) -> Callable[..., Tensor]:
    return lambda f, x, o: cls.apply(x, o, f)


PASSING: dict[str, Callable[[Callable[[Tensor, Any], Tensor], Tensor, Any], Tensor]] = {
    "jit": lambda f, x, o: tfn.jit(f)(x, o),
    "checkpoint": lambda f, x, o: tfn.checkpoint(f)(x, o),
    "torch's checkpoint": lambda f, x, o: torch.utils.checkpoint.checkpoint(f, x, o, use_reentrant=False),
    "composite": lambda f, x, o: tfn.composite(f)(x, o),
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
    "Function": of_function(Calls),
    "Function with setup": of_function(SetUp),
}


def content(o: Any) -> Any:
    return (
        dict(o)
        if isinstance(o, dict)
        else list(o)
        if isinstance(o, list)
        else {n: getattr(o, n, None) for n in ("n", "new")}
    )


@pytest.mark.parametrize("passing", PASSING)
@pytest.mark.parametrize("f", [counts, sets, grows], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", HOLDERS)
def test_what_a_function_does_to_its_arguments_reaches_the_caller(
    kind: str, f: Callable[[Tensor, Any], Tensor], passing: str
) -> None:
    given, closed = HOLDERS[kind](), HOLDERS[kind]()
    has_copy = "changes a Settings among its arguments, which it has a copy of"
    steps = {
        "closed over": tfn.jit(lambda x, o: PASSING[passing](f, x, closed)),
        "an argument": tfn.jit(lambda x, o: PASSING[passing](f, x, o)),
    }
    for i, (way, step) in itertools.product(range(2), steps.items()):
        held_by = given if way == "an argument" else closed
        if kind == "dataclass" and (way == "an argument" or passing == "jit"):
            with pytest.raises(UnsupportedCall, match=has_copy):
                step(X + i, given)
            continue
        oracle = HOLDERS[kind]()
        for _ in range(i):
            f(X, oracle)
        torch.testing.assert_close(step(X + i, given), f(X + i, oracle))
        assert content(held_by) == content(oracle)


@pytest.mark.parametrize("passing", ["checkpoint", "custom_vjp", "Function"])
def test_a_container_with_tensors_that_a_function_changes_is_the_callers_or_refused(passing: str) -> None:
    def f(x: Tensor, o: dict[str, Any]) -> Tensor:
        o["n"] += 1
        o["last"] = x * 2
        return x * o["n"]

    def step(x: Tensor) -> Any:
        o = {"n": 1, "last": x}
        return PASSING[passing](f, x, o), o

    try:
        found = tfn.jit(step)(X)
    except UnsupportedCall as error:
        assert "changes a dict among its arguments, which it has a copy of" in str(error)
    else:
        torch.testing.assert_close(found, (X * 2, {"n": 2, "last": X * 2}))


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_dicts_are_copies_under_transforms_as_under_torch_func(name: str) -> None:
    def transformed(of: Any) -> Callable[..., Any]:
        return of.vmap(counts, in_dims=(0, None)) if name == "vmap" else of.grad(lambda x, o: counts(x, o).sum())

    found, expected = {"n": 0}, {"n": 0}
    torch.testing.assert_close(transformed(tfn)(X, found), transformed(torch.func)(X, expected))
    assert found == expected
    with pytest.raises(UnsupportedCall, match="changes a Settings among its arguments"):
        transformed(tfn)(X, Settings())
