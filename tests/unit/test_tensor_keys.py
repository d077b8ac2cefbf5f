"""Dicts whose keys are tensors, as `{param: gradient}`: they have no order, and count by identity."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import pytree
from thunder_fn.errors import UnsupportedCall

SHAPES = {"of many elements": ((2, 3), (2,)), "of one": ((1, 1), (1,)), "scalars": ((), ())}
KINDS: dict[str, Callable[[Any], dict[Any, Any]]] = {
    "dict": dict,
    "defaultdict": lambda held: collections.defaultdict(list, held),
}
Held = dict[Any, Any]


def weighted(held: Held) -> torch.Tensor:
    """A sum to which each entry contributes in another way, by its place in the dict."""
    first, second = held.values()
    return (first * 3).sum() + second.square().sum()


def doubled(held: Held) -> Held:
    return {key: value * 2 for key, value in held.items()}


def filling(held: Held) -> Held:
    for key in held:
        held[key] = held[key] + 1
    return held


def by_torch(name: str) -> Callable[[Held], Any]:
    return {
        "jit": weighted,
        "grad": torch.func.grad(weighted),
        "jitted grad": torch.func.grad(weighted),
        "vmap": torch.vmap(weighted),
        "jvp": lambda held: torch.func.jvp(weighted, (held,), (held,))[1],
        "result": doubled,
        "checkpoint": weighted,
        "cond": doubled,
        "scan": lambda held: doubled(doubled(held)),
        "argument": filling,
        "nested": lambda held: [1, (doubled(held), weighted(held))],
    }[name]


def by_us(name: str) -> Callable[[Held], Any]:
    return {
        "jit": tfn.jit(weighted),
        "grad": tfn.grad(weighted),
        "jitted grad": tfn.jit(tfn.grad(weighted)),
        "vmap": tfn.vmap(weighted),
        "jvp": lambda held: tfn.jvp(weighted, (held,), (held,))[1],
        "result": tfn.jit(doubled),
        "checkpoint": tfn.checkpoint(weighted),
        "cond": lambda held: tfn.cond(torch.tensor(True), doubled, filling, (dict(held),)),
        "scan": tfn.jit(
            lambda held: tfn.scan(lambda c, _: (doubled(dict(reversed(c.items()))), None), dict(held), length=2)[0]
        ),
        "argument": tfn.jit(filling),
        "nested": tfn.jit(lambda held: [1, (doubled(held), weighted(held))]),
    }[name]


NAMES = ("jit", "grad", "jitted grad", "vmap", "jvp", "result", "checkpoint", "cond", "scan", "argument", "nested")


def leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (id(key), *leaves(item))]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_transforms(name: str, shapes: str, kind: str) -> None:
    one, two = (torch.full(shape, number) for shape, number in zip(SHAPES[shapes], (-1.0, 1.0), strict=True))
    ours, theirs = by_us(name), by_torch(name)
    for keys in ((one, two), (two, one), (one, two)):
        make = lambda keys=keys: KINDS[kind]({key: torch.tensor([1.0, i + 2.0]) for i, key in enumerate(keys)})
        found, expected = ours(make()), theirs(make())
        assert isinstance(found, dict) == isinstance(expected, dict)
        if name == "scan":  # the order of a carry is not that of its last value
            found, expected = (
                {id(key): item for key, item in sorted(one.items(), key=lambda x: id(x[0]))}
                for one in (found, expected)
            )
            assert list(found) == list(expected)
            found, expected = list(found.values()), list(expected.values())
        pairs = zip(leaves(found), leaves(expected), strict=True)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)


def test_a_call_with_other_tensors_as_keys_is_another_call() -> None:
    key, other = torch.zeros(2, 3), torch.zeros(2, 3)
    f = tfn.jit(lambda held: held[key] * 2 if key in held else held[other] * 3)
    assert [f({one: torch.ones(())}).item() for one in (key, other, key)] == [2.0, 3.0, 2.0]


def test_structures_without_order() -> None:
    keys = torch.zeros(2, 3), torch.zeros(4)
    one, two = (pytree.flatten(dict.fromkeys(order, 0))[1] for order in (keys, keys[::-1]))
    assert one == two
    assert [list(map(id, pytree.unflatten(spec, [0, 1]))) for spec in (one, two)] == [
        [*map(id, keys)],
        [*map(id, keys[::-1])],
    ]


def test_a_table_by_parameters_that_a_step_fills() -> None:
    """As the state of an optimizer that somebody wrote."""

    def losses(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model, momenta = torch.nn.Linear(3, 2, dtype=torch.float64), {}

        def step(x: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p not in momenta:
                        momenta[p] = torch.zeros_like(p)
                    momenta[p].mul_(0.9).add_(p.grad)
                    p.sub_(0.1 * momenta[p])
            return loss.detach()

        run = wrap(step)
        return [run(torch.ones(4, 3, dtype=torch.float64)).item() for _ in range(5)]

    assert losses(tfn.jit) == losses(lambda f: f)


CHANGES: dict[str, Callable[[Held, torch.Tensor], object]] = {
    "an entry": lambda state, key: key in state and state[key].update(exp_avg=torch.ones(2, 3, dtype=torch.float64)),
    "all": lambda state, _: state.clear(),
    "one": lambda state, key: state.pop(key, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_state_of_an_optimizer_that_the_function_does_not_step(change: str) -> None:
    def sums(wrap: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2, dtype=torch.float64)
        opt = torch.optim.Adam(model.parameters(), 0.1)

        def reset(x: torch.Tensor) -> torch.Tensor:
            CHANGES[change](opt.state, model.weight)
            return x.sum()

        run, found = wrap(reset), []
        for _ in range(4):
            run(torch.ones(2))
            found.append(len(opt.state))
            model(torch.ones(4, 3, dtype=torch.float64)).square().sum().backward()
            opt.step()
            found.append(opt.state[model.weight]["exp_avg"].sum().item())
        return found

    assert sums(tfn.jit) == pytest.approx(sums(lambda f: f), rel=1e-12)


# ---- a traced tensor is looked for by its identity ----

FIRST, SECOND = torch.ones(3), torch.full((3,), 2.0)
FACTORS = {FIRST: 2.0, SECOND: 3.0}
BY_ID = {id(FIRST): 2.0}


class Momentum:
    """An optimizer of one's own, whose state has the parameters for keys."""

    def __init__(self) -> None:
        self.state: Held = {}
        self.sums: Held = collections.defaultdict(lambda: torch.zeros(3))

    def step(self, param: torch.Tensor) -> torch.Tensor:
        if param not in self.state:
            self.state[param] = torch.zeros_like(param)
        self.state[param] = self.state[param] * 0.9 + 1
        return param - self.state[param]

    def cached(self, param: torch.Tensor) -> torch.Tensor:
        key = id(param)
        if key not in self.state:
            self.state[key] = param * 2
        return self.state[key]

    def default(self, param: torch.Tensor) -> torch.Tensor:
        self.state.setdefault(param, []).append(1)
        return param * len(self.state[param])

    def summed(self, param: torch.Tensor) -> torch.Tensor:
        self.sums[param] = self.sums[param] + param
        return self.sums[param] * 2


SEARCHES: dict[str, Callable[[Momentum, torch.Tensor], Any]] = {
    "item": lambda _, x: x * FACTORS[x],
    "get": lambda _, x: x * FACTORS.get(x, 0.0),
    "in": lambda _, x: x + 1 if x in FACTORS else x - 1,
    "in a set": lambda _, x: x + 1 if x in frozenset(FACTORS) else x - 1,
    "id": lambda _, x: x * BY_ID.get(id(x), 0.0),
    "id in": lambda _, x: x + 1 if id(x) in BY_ID else x - 1,
    "cached by id": Momentum.cached,
    "new state": Momentum.step,
    "default state": Momentum.default,
    "default dict": Momentum.summed,
}


@pytest.mark.parametrize("name", SEARCHES)
def test_an_argument_is_no_key_of_a_dict_from_outside(name: str) -> None:
    """A program would serve other tensors of this type, too: each call is eager's, or it is refused."""
    search, held = SEARCHES[name], Momentum()
    jitted = tfn.jit(lambda x: search(held, x))
    for x in (FIRST, FIRST, SECOND, torch.ones(3)):
        with pytest.raises(UnsupportedCall, match=r"a tensor argument, or its id, among|under a traced tensor"):
            jitted(x)
        assert not held.state and not held.sums


@pytest.mark.parametrize("name", ("get", "new state"))
def test_compile_looks_for_an_argument_as_eager_does(name: str) -> None:
    search, known, held = SEARCHES[name], Momentum(), Momentum()
    compiled = tfn.compile(lambda x: search(held, x), executors="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert torch.equal(compiled(FIRST), search(known, FIRST))


def test_an_argument_is_a_key_of_a_dict_of_the_function() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held, by_id = {x: 2, y: 3}, {id(x): x, id(y): y}
        return x * held[x] + y * held.get(y, 0) + (x in held) + by_id[id(y)]

    assert torch.equal(tfn.jit(f)(FIRST, SECOND), f(FIRST, SECOND))


def test_an_argument_is_looked_for_among_its_own_keys() -> None:
    """The keys of an argument are tensors from outside, and the other argument is a traced one."""
    with pytest.raises(UnsupportedCall, match="the keys of d, but its trace serves other arguments"):
        tfn.jit(lambda d, x: d[x] + 3)({FIRST: SECOND}, FIRST)
