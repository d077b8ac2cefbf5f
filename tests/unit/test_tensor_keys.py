"""Dicts whose keys are tensors, as `{param: gradient}`: they have no order, and count by identity."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.capture import pytree

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
