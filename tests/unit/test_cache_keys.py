"""The key of a cached program: each property that a function reads of its arguments is looked at in every call."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from thunder_fn import errors
from thunder_fn.api import grad, vmap
from thunder_fn.capture import pytree
from thunder_fn.executors import inductor
from thunder_fn.jitted import cache_info, explain_misses, jit


def same(mine: Any, its: Any) -> None:
    """Equal in value, dtype and Python type."""
    assert type(mine) is type(its), (mine, its)
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


# ---- dicts ----


class Key(enum.StrEnum):
    A = "a"


A, B = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
DICTS = [
    *({"a": A, "b": B}, {"b": B, "a": A}, {Key.A: A, "b": B}),
    *({1: A, 0: B}, {True: A, False: B}, {1.0: A, 0.0: B}, {0: B, 1: A}, {1: A, False: B}),
    *(OrderedDict(a=A, b=B), OrderedDict(b=B, a=A)),
    *(defaultdict(list, {"a": A, "b": B}), defaultdict(list, {"b": B, "a": A}), defaultdict(dict, {"b": B, "a": A})),
]


def listed(tree: dict[Any, Any]) -> torch.Tensor:
    """Depends on the order and the types of keys."""
    weights = {str: 1.0, Key: 2.0, int: 3.0, bool: 4.0, float: 5.0}
    return torch.cat([value * weights[type(key)] for key, value in tree.items()])


@pytest.mark.parametrize("place", ["argument", "nested", "keywords"])
def test_dicts_are_told_apart_by_the_order_and_types_of_their_keys(place: str) -> None:
    ways: dict[str, Callable[..., Any]] = {
        "argument": listed,
        "nested": lambda t: (listed(t[0]["inner"]), type(t[0]["inner"]).__name__),
        "keywords": lambda **kwargs: listed(kwargs),
    }
    f, g = ways[place], jit(ways[place])
    for _ in range(2):
        for tree in DICTS:
            if place == "keywords":
                if {*map(type, tree)} == {str}:
                    same(g(**tree), f(**tree))
                continue
            given = tree if place == "argument" else ({"inner": tree}, 1)
            mine, its = g(given), f(given)
            same(*((mine, its) if place == "argument" else (mine[0], its[0])))
    assert cache_info(g).hits >= len(DICTS) // 4, "calls that are alike share a program"


@dataclasses.dataclass(frozen=True)
class Config:
    scale: Any


EQUAL = [
    *((1,), (1.0,), (np.float64(1),), (True,), (0.0,), (-0.0,), (((1,),),), (((True,),),), torch.Size([1])),
    *(frozenset([1]), frozenset([1.0]), frozenset([(1,)]), frozenset([(True,)])),
    *(Config(1), Config(True), Config(1.0), Config(0.0), Config(-0.0), Config((1,)), Config((1.0,)), Config(Config(1))),
    *(0, 0.0, -0.0, 0j, complex(-0.0, 0), Config(Config(True)), ("a", Config(1)), ("a", Config(1.0))),
]
"""Values that equal others here in pairs, and are not the same."""


def text_of(value: Any) -> float:
    return float(sum(map(ord, repr(value))))


def scaled(tree: dict[Any, torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x * text_of(key)).sum() for key, x in tree.items()]).sum()


PLACES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], tuple[Any, ...]], Any]] = {
    "static": (f := lambda x, k: x * text_of(k), f, lambda k: (A, k), {"static_argnums": 1}),
    "key": (scaled, scaled, lambda k: ({k: A},), {}),
    "nested key": (f := lambda d: d[0].popitem()[1] * text_of([*d[0]]), f, lambda k: ([{k: A, "a": B}],), {}),
    "key of a result": (f := lambda x, k: {k: x * 2}, f, lambda k: (A, k), {"static_argnums": 1}),
    "key of a gradient": (grad(scaled), torch.func.grad(scaled), lambda k: ({k: A},), {}),
}


@pytest.mark.parametrize("place", PLACES)
def test_equal_values_of_other_types_are_told_apart(place: str) -> None:
    f, expected, given, options = PLACES[place]
    jitted = jit(f, **options)
    for value in (*EQUAL, *EQUAL):
        for way in (jitted, jitted, f):
            assert repr(way(*given(value))) == repr(expected(*given(value))), value
    assert cache_info(jitted).misses <= len(EQUAL)


def test_a_miss_for_the_order_of_keys_says_so() -> None:
    f = jit(listed)
    f({"a": A, "b": B})
    f({"b": B, "a": A})
    assert str(explain_misses(f)[0]).startswith(
        "the order or the types of a dict's keys: it was ['a', 'b'], and is ['b', 'a']"
    )


def test_arguments_may_be_named_self_or_f() -> None:
    f = jit(lambda **kwargs: kwargs["self"] * kwargs["f"])
    for _ in range(2):
        same(f(self=A, f=B), A * B)


# ---- conjugate, negative and inference tensors ----

C = torch.tensor([1 + 2j, 3 - 1j, -2 + 0.5j])
BITS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: C.clone(),
    "conj": lambda: C.clone().conj(),
    "neg": lambda: torch._neg_view(C.clone()),
    "both": lambda: torch._neg_view(C.clone()).conj(),
    "real neg": lambda: C.clone().conj().imag,
}
OF_BITS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.sin() * 2 + 1,
    lambda x: x.imag * 2 if x.is_complex() else x * 2,
    lambda x: x.mul_(2) + 1,
    lambda x: x[1:].fill_(3) * x[0],
    lambda x: x * (1.0 + x.is_conj() + 2 * x.is_neg()),
    lambda x: x.conj() * 2,
    lambda x: x,
]


@pytest.mark.parametrize("f", OF_BITS)
def test_conjugate_and_negative_arguments(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    g = jit(f)
    for make in (*BITS.values(), *BITS.values()):
        mine, its = make(), make()
        same(g(mine), f(its))
        same(mine, its)


def test_compiled_regions_see_no_bits() -> None:
    f, n = OF_BITS[0], C.clone().conj().imag
    g, h = jit(f, executors=[inductor()]), jit(lambda x: x * n.sin() + 1, executors=[inductor()])
    for x in (n, n.clone()):
        same(g(x), f(x))
    same(h(n), n * n.sin() + 1)


def test_gradients_reach_conjugate_arguments() -> None:
    loss = lambda x: (x * x + x.imag).abs().sum()
    for view in (lambda p: p.conj(), lambda p: torch._neg_view(p), lambda p: p.detach().conj().requires_grad_()):
        p, q = C.clone().requires_grad_(), C.clone().requires_grad_()
        mine, its = view(p), view(q)
        loss(its).backward()
        jit(loss)(mine).backward()
        same(*((mine.grad, its.grad) if mine.is_leaf else (p.grad, q.grad)))


def test_conjugate_tensors_from_outside() -> None:
    c, n = C.conj(), C.clone().conj().imag
    f = lambda x: x * c + n.sin()
    same(jit(f)(C), f(C))


# ---- what is written to arguments, and what is returned of them ----

SHOWN: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[0].relu_(),
    lambda x: x.mul_(2)[1:],
    lambda x: (x.mul_(2).t(), x),
    lambda x: x.view(4, 2, 2)[1].add_(1),
    lambda x: x.diagonal().zero_(),
    lambda x: x[:, 1].fill_(3),
    lambda x: {"rows": [x.add_(1)[2], x[3]], "sum": x.sum()},
    lambda x: x.sin_(),
]


def change_results(f: Callable[..., Any], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    result = f(x)
    for number, leaf in enumerate(pytree.flatten(result)[0]):
        leaf.mul_(3).sub_(number)
    return x, result


@pytest.mark.parametrize("f", SHOWN)
def test_results_show_the_memory_that_was_written_to(f: Callable[[torch.Tensor], Any]) -> None:
    g = jit(f)
    make: list[Callable[[], torch.Tensor]] = [
        lambda: torch.arange(16.0).view(4, 4) - 8,
        lambda: torch.arange(32.0)[16:].view(4, 4) - 8,
    ]
    for x in (*make, *make):
        torch.testing.assert_close(change_results(g, x()), change_results(f, x()))
    batch = lambda: torch.arange(64.0).view(4, 4, 4) - 8
    torch.testing.assert_close(change_results(vmap(f), batch()), change_results(torch.func.vmap(f), batch()))


def fill(found: list[Any], named: dict[str, Any], *, rest: dict[str, Any]) -> Any:
    named["h"] = named["a"] * 2
    found.append(named["h"])
    rest["inner"][0] = named.pop("a")
    return named["h"].sum()


def test_lists_and_dicts_of_the_caller_are_filled() -> None:
    f = jit(fill)
    for value in (A, A + 1, A):
        given = [([1], {"a": value, "b": B}, {"inner": [0, None]}) for _ in range(2)]
        results = [g(*tree[:2], rest=tree[2]) for g, tree in zip((f, fill), given, strict=True)]
        same(*results)
        (leaves, spec), (expected, other) = map(pytree.flatten, given)
        assert spec == other and pytree.orders_of(given[0]) == pytree.orders_of(given[1])
        for mine, its in zip(leaves, expected, strict=True):
            same(mine, its)
    assert cache_info(f).misses == 1


def test_filled_inside_of_another_function() -> None:
    def outer(tree: dict[str, Any]) -> torch.Tensor:
        jit(lambda inner: inner.update(k=inner["a"] + 1))(tree)
        return tree["k"] * 2

    mine, its = {"a": A}, {"a": A}
    same(jit(outer)(mine), outer(its))
    same(mine["k"], its["k"])


@dataclasses.dataclass
class Holder:
    """A container that is not written back."""

    x: Any
    y: Any = None


@pytest.mark.parametrize("name", ["y", "other"])
def test_changes_of_other_containers_are_refused(name: str) -> None:
    def f(holder: Holder) -> torch.Tensor:
        setattr(holder, name, holder.x * 2)
        return holder.x

    with pytest.raises(errors.UnsupportedCall, match="changes a Holder among its arguments"):
        jit(f)(Holder(A))


class Shapeless:
    """Has no text."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        raise AttributeError("shape")


class Static(Shapeless):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Wrapped(Shapeless):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(args[0].value)


@pytest.mark.parametrize(
    ("f", "calls", "options"),
    [
        (torch.sin, [Wrapped(A), Wrapped(A + 1), Wrapped(A.double())], {}),
        (lambda one: one.value * 2, [Shapeless(A), Shapeless(A + 1), Shapeless(torch.ones(5))], {}),
        (lambda one: one.value * A, [Static(2), Static(3), Static(4)], {"static_argnums": 0}),
        (lambda one: A * 2, [Shapeless, Shapeless(A), Wrapped(A), [Shapeless(A)]], {}),
    ],
)
def test_objects_whose_repr_raises_are_told_apart(f: Callable[[Any], Any], calls: list[Any], options: Any) -> None:
    jitted = jit(f, **options)
    for argument in (*calls, *calls):
        same(jitted(argument), f(argument))
    assert str(explain_misses(jitted))
