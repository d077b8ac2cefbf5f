"""A tuple of tensors outside that a jitted function replaces: traced once, and as in Python, whatever else holds its parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import thunder_fn as tfn

Tensor = torch.Tensor
Step = Callable[[Any, Tensor], Any]


def summed(s: Any, x: Tensor) -> Any:
    s.t = (s.t[0] + x, s.t[1] * 2)
    return s.t[0] * 1


def unpacked(s: Any, x: Tensor) -> Any:
    a, b = s.t
    s.t = (a + x, b * 2 + a)
    return a + b


def mapped(s: Any, x: Tensor) -> Any:
    s.t = tuple(v * 0.9 + x for v in s.t)
    return s.t[1] + 1


def exchanged(s: Any, x: Tensor) -> Any:
    s.t = (s.t[1] + x, s.t[0])
    return s.t[0] * 2


def by_key(s: Any, x: Tensor) -> Any:
    s.d["t"] = (s.d["t"][0] + x,)
    return x * 2


def cell(s: Any, x: Tensor) -> Any:
    h, c = s.t
    for _ in range(2):
        h, c = torch.tanh(h + x), c * 0.5 + h
    s.t = (h.detach(), c.detach())
    return h


def written(s: Any, x: Tensor) -> Any:
    s.t[0].add_(x)
    s.t = (s.t[0] * 2, s.t[1])
    return s.t[0] + 1


def in_turns(s: Any, x: Tensor) -> Any:
    s.t = (s.t[0] + x, s.t[1])
    s.t = (s.t[0] * 2, s.t[1] + 1)
    return s.t[0] - s.t[1]


def kept_aside(s: Any, x: Tensor) -> Any:
    s.old = s.t
    s.t = (s.t[0] + x, s.t[1] + 1)
    return s.old[0] * 3


def logged(s: Any, x: Tensor) -> Any:
    s.log.append(s.t[0])
    s.t = (s.t[0] + x, s.t[1])
    return s.t[1] * 1


def logged_whole(s: Any, x: Tensor) -> Any:
    s.log.append(s.t)
    s.t = (s.t[0] + x, s.t[1])
    return s.log[-1][0] * 1


def kept_in_another(s: Any, x: Tensor) -> Any:
    s.d["t"], s.other = s.t, [x * 2, (s.t, s.u)]
    s.t = (s.t[0] + x, s.t[1] * 2)
    return s.d["t"][1] + s.other[1][0][0]


def given_back(s: Any, x: Tensor) -> Any:
    old = s.t
    s.t = (old[0] + x, old[1])
    return old


def not_always(s: Any, x: Tensor) -> Any:
    if s.n % 2 == 0:
        s.t = (s.t[0] + x, s.t[1] + 2)
    return s.t[0] * 1


def beside_another(s: Any, x: Tensor) -> Any:
    y = s.t[0] * s.u[0]
    s.t = (s.t[0] + x, s.t[1])
    return y


def both(s: Any, x: Tensor) -> Any:
    s.t, s.u = (s.t[0] + x, s.u[0]), (s.u[0] * 2, s.t[1])
    return s.t[0] + s.u[0]


STEPS = [
    summed, unpacked, mapped, exchanged, by_key, cell, written, in_turns, kept_aside, logged, logged_whole, kept_in_another,
    given_back, not_always, beside_another, both,
]  # fmt: skip


class Holder(torch.nn.Module):
    """A module that keeps the state itself."""

    def __init__(self, step: Step, held: dict[str, Any]) -> None:
        super().__init__()
        self.step = step
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def fresh(step: Step | None = None) -> Any:
    tensors = [torch.arange(2.0) + n for n in range(5)]
    held: dict[str, Any] = {"t": tuple(tensors[:2]), "u": tuple(tensors[2:4]), "d": {"t": (tensors[4],)}}
    held |= {"old": None, "log": [], "n": 0, "other": None}
    return SimpleNamespace(**held) if step is None else Holder(step, held)


def new_tensors(s: Any) -> None:
    s.t = tuple(v * 1 + 1 for v in s.t)


def one_other(s: Any) -> None:
    s.t = (s.t[0], s.t[1] * 3)


def same_twice(s: Any) -> None:
    s.t = (s.t[0], s.t[0])


def shared_with_another(s: Any) -> None:
    s.u = (s.t[0], s.u[1])


def the_very_tuple(s: Any) -> None:
    s.u = s.t


def shared_with_a_dict(s: Any) -> None:
    s.d["t"] = (s.t[1],)


def other_type(s: Any) -> None:
    s.t = tuple(v.double() for v in s.t)


def other_size(s: Any) -> None:
    s.t = (s.t[0], torch.ones(1))


def longer(s: Any) -> None:
    s.t = (*s.t, torch.ones(2))


def a_list(s: Any) -> None:
    s.t = list(s.t)


def follows_gradients(s: Any) -> None:
    s.t = (s.t[0].clone().requires_grad_(), s.t[1])


def counted(s: Any) -> None:
    s.n += 1


def in_place(s: Any) -> None:
    s.t[1].mul_(2)


CHANGES = [
    new_tensors, one_other, same_twice, shared_with_another, the_very_tuple, shared_with_a_dict, other_type, other_size, longer,
    a_list, follows_gradients, counted, in_place,
]  # fmt: skip


def picture(s: Any, result: Any) -> Any:
    """The values, and which of the places hold one and the same tensor or list."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, (Tensor, list, tuple)):
            place = next((i for i, one in enumerate(found) if one is value), len(found))
            found.extend([] if isinstance(value, tuple) else [value])
            if isinstance(value, Tensor):
                return place, str(value.dtype), value.requires_grad, value.tolist()
            return type(value).__name__, place * isinstance(value, list), [look(item) for item in value]
        if isinstance(value, dict):
            return {key: look(item) for key, item in value.items()}
        return value

    return look(result), look({name: getattr(s, name) for name in vars(fresh())})


@pytest.mark.parametrize("how", ["closed", "argument", "module outside"])
@pytest.mark.parametrize(("step", "change"), [*itertools.product(STEPS, CHANGES)])
def test_a_tuple_of_tensors_is_state(step: Step, change: Callable[[Any], None], how: str) -> None:
    ours, theirs = (fresh(step if "module" in how else None) for _ in range(2))
    jitted: Any = tfn.jit(step) if how == "argument" else tfn.jit(lambda x: step(ours, x))
    for call in range(6):
        if call == 3:
            change(ours)
            change(theirs)
        x = torch.full((2,), call + 1.0)
        try:
            want = step(theirs, x.clone())
        except (RuntimeError, TypeError, ValueError) as error:  # eager refuses it
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                jitted(*((ours, x) if how == "argument" else (x,)))
            assert error is not None
            return
        found = jitted(*((ours, x) if how == "argument" else (x,)))
        assert picture(ours, found) == picture(theirs, want), call


@pytest.mark.parametrize("how", ["closed", "module outside"])
@pytest.mark.parametrize("step", [summed, unpacked, mapped, exchanged, by_key, cell, in_turns])
def test_the_function_is_traced_once(step: Step, how: str) -> None:
    s = fresh(step if "module" in how else None)
    jitted = tfn.jit(lambda x: step(s, x))
    for call in range(5):
        jitted(torch.full((2,), call + 1.0))
        new_tensors(s)
    assert tfn.cache_info(jitted).misses == 1


def test_an_argument_that_is_a_part_of_the_state() -> None:
    ours, theirs = fresh(), fresh()
    jitted = tfn.jit(lambda x: summed(ours, x))
    for call in range(5):
        mine, its = (ours.t[0], theirs.t[0]) if call % 2 else (torch.ones(2), torch.ones(2))
        assert picture(ours, jitted(mine)) == picture(theirs, summed(theirs, its))
