"""Lists and dicts that `forward` of a jitted module changes are the caller's."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import pytree

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Module(torch.nn.Module):
    """Changes its arguments as it is told."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.change = torch.nn.Linear(3, 3), change

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = self.linear(x)
        self.change(y, *args, **kwargs)
        return y.sin()


def swap(y: torch.Tensor, given: dict[str, Any]) -> None:
    given["a"], given["b"] = given["b"], given["a"]


def nested(y: torch.Tensor, given: dict[str, Any]) -> None:
    given["inner"].append(y)
    given["rows"] = [given["inner"], {"new": y * 2}]


def renewed(y: torch.Tensor, given: list[Any]) -> None:
    given[0].add_(1)
    given.insert(0, y)
    del given[-1]


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "fill a dict": (lambda y, given: given.update(y=y, n=len(y)), lambda: ({},)),
    "append": (lambda y, given: given.append(y), lambda: ([X],)),
    "pop": (lambda y, given: given.pop("x"), lambda: ({"u": 1, "x": X},)),
    "swap": (swap, lambda: ({"a": X, "b": X + 1},)),
    "nested": (nested, lambda: ({"inner": [X]},)),
    "renewed": (renewed, lambda: ([X.clone(), X, X],)),
    "order of keys": (lambda y, given: given.update(a=given.pop("a")), lambda: (OrderedDict(a=X, b=X),)),
    "a default": (lambda y, given: given["k"].append(y), lambda: (defaultdict(list),)),
    "a deque": (lambda y, given: given.appendleft(y), lambda: (deque([X]),)),
    "none": (lambda y, given: None, lambda: ([{"a": X}],)),
    "the second of two": (lambda y, one, two: two.append(y), lambda: ([], [])),
}


@pytest.mark.parametrize(
    "make", (tfn.jit, lambda module: tfn.compile(module, executors="torch")), ids=("jit", "compile")
)
@pytest.mark.parametrize("name", CHANGES)
def test_containers_hold_what_they_hold_in_eager(name: str, make: Callable[..., Any]) -> None:
    change, arguments = CHANGES[name]
    module = Module(change)
    jitted = make(copy.deepcopy(module))
    for _ in range(2):
        known, found = arguments(), arguments()
        objects = [id(node) for node in pytree.nodes_in(found) if isinstance(node, (list, dict, deque))]
        seen = [(args, run(X, *args)) for run, args in ((module, known), (jitted, found))]
        leaves, spec = zip(*map(pytree.flatten, seen), strict=True)
        assert spec[0] == spec[1]
        for one, two in zip(*leaves, strict=True):
            assert (
                torch.equal(one, two) and one.requires_grad == two.requires_grad if torch.is_tensor(one) else one == two
            )
        assert {*objects} <= {id(node) for node in pytree.nodes_in(found)}, "the caller's objects stay"
        for run, (args, result) in zip((module, jitted), seen, strict=True):
            run.zero_grad()
            tensors = [
                leaf for leaf in pytree.flatten((args, result))[0] if torch.is_tensor(leaf) and leaf.requires_grad
            ]
            torch.stack([tensor.sum() for tensor in tensors]).sum().backward()
        assert torch.equal(module.linear.weight.grad, jitted.linear.weight.grad)


RETURNS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "the list": (lambda x, given: given, lambda: ([X],)),
    "filled": (lambda x, given: (given.append(x.sin()), given)[1], lambda: ([X],)),
    "in a tuple": (lambda x, given: (x.sin(), given), lambda: ({"a": X},)),
    "twice": (lambda x, given: {"y": given, "z": [given, x.sin()]}, lambda: ({"a": X},)),
    "without tensors": (lambda x, given: (x.sin(), given), lambda: ({},)),
    "a part": (lambda x, given: given["rows"][0], lambda: ({"rows": [[X], [X]]},)),
    "moved": (lambda x, given: given.pop("rows"), lambda: ({"rows": [[X], [X]]},)),
    "two": (lambda x, one, two: (two, one, x), lambda: ([], deque([X]))),
    "in itself new": (lambda x, given: given.update(new=[given["a"], x]), lambda: ({"a": [X]},)),
    "a copy": (lambda x, given: list(given), lambda: ([X],)),
    "keys that are tensors": (lambda x, given: (x.sin(), given), lambda: ({X: 1},)),
}


class Returning(torch.nn.Module):
    """Returns its arguments as it is told."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.change(x, *args)


RUNS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jit": tfn.jit,
    "jit of a module": lambda f: tfn.jit(Returning(f)),
    "jit inside": lambda f: tfn.jit(lambda *args: tfn.jit(f)(*args)),
    "compile": lambda f: tfn.compile(f, executors="torch"),
}


def containers_in(tree: Any) -> list[Any]:
    return [node for node in pytree.nodes_in(tree) if isinstance(node, (list, dict, deque))]


def places(known: list[Any], tree: Any) -> list[int]:
    """The containers of a tree by the place among known ones, -1 for others."""
    numbers = {id(node): place for place, node in enumerate(known)}
    return [numbers.get(id(node), -1) for node in containers_in(tree)]


@pytest.mark.parametrize("make", RUNS)
@pytest.mark.parametrize("name", RETURNS)
def test_a_container_that_is_returned_is_the_callers(name: str, make: str) -> None:
    f, arguments = RETURNS[name]
    made = RUNS[make](f)
    for _ in range(2):
        ends = list[Any]()
        for run in (f, made):
            given = arguments()
            known = containers_in(given)
            ends.append((places(known, (result := run(X, *given), given)), repr((result, given))))
        assert ends[0] == ends[1]


def test_of_a_jitted_module_inside() -> None:
    inner = tfn.jit(Module(lambda y, given: given.update(y=y)))

    def f(x: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {}
        return inner(x, given) + given["y"]

    assert torch.equal(tfn.jit(f)(X), f(X))


class Keeping(torch.nn.Module):
    """Stores tensors in containers of its own, as it is told."""

    def __init__(self, store: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.store = torch.nn.Linear(3, 3), store
        self.kept: list[Any] = []
        self.named: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.store(self, y)
        return y.sin()


def named(module: Keeping, y: torch.Tensor) -> None:
    module.named["y"] = y * 2


def carried(module: Keeping, y: torch.Tensor) -> None:
    before = module.named.get("y")
    module.named["y"] = y.detach() if before is None else (y + before).detach()


def read_again(module: Keeping, y: torch.Tensor) -> None:
    module.kept.append(y)
    module.named["sum"] = torch.stack(module.kept).sum(0)


STORES: dict[str, tuple[Callable[..., Any], int]] = {
    "append": (lambda module, y: module.kept.append(y), 4),
    "item": (named, 1),
    "update": (lambda module, y: module.named.update(y=y * 2), 6),
    "cleared": (lambda module, y: (module.kept.clear(), module.kept.append(y)), 4),
    "carried": (carried, 2),
    "read": (read_again, 6),
}


@pytest.mark.parametrize("name", STORES)
def test_own_containers_hold_what_they_hold_in_eager(name: str) -> None:
    store, traces = STORES[name]
    module = Keeping(store)
    jitted = tfn.jit(copy.deepcopy(module))
    for step in range(6):
        if step == 3:
            module.kept, jitted.kept = [], []
        if step == 4:
            module.named.clear()
            jitted.named.clear()
        assert torch.equal(module(X * step), jitted(X * step))
        known, found = ((one.kept, sorted(one.named.items())) for one in (module, jitted))
        leaves, spec = zip(*map(pytree.flatten, (known, found)), strict=True)
        assert spec[0] == spec[1]
        for one, two in zip(*leaves, strict=True):
            if torch.is_tensor(one):
                assert torch.allclose(one, two) and one.requires_grad == two.requires_grad
    assert tfn.cache_info(jitted).misses <= traces
    for one in (module, jitted):
        last = [*one.kept, *one.named.values()][-1]
        if last.requires_grad:
            last.sum().backward()
    assert (module.linear.weight.grad is None) == (jitted.linear.weight.grad is None)
    if module.linear.weight.grad is not None:
        assert torch.allclose(module.linear.weight.grad, jitted.linear.weight.grad)
