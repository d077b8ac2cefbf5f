"""Tensors that a function keeps in slots and in attributes of classes: each call leaves what eager mode leaves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn

FIELDS = ("t", "last", "n", "items")


class Slotted:
    __slots__ = FIELDS


class Mixed(Slotted):
    """With slots and a `__dict__`."""


class Meta(type):
    """A class of classes, which sees what is stored in them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(cls, name, value)


HOLDERS: dict[str, Callable[[], Any]] = {
    "slots": Slotted,
    "slots and a dict": Mixed,
    "class": lambda: type("Class", (), {}),
    "class of a metaclass": lambda: Meta("Class", (), {}),
}


def keep(h: Any, x: Tensor) -> Any:
    h.last = x * 2
    return x + 1


def keep_the_argument(h: Any, x: Tensor) -> Any:
    h.last = x
    return x


def add(h: Any, x: Tensor) -> Any:
    h.t = h.t + x
    return x + 1


def average(h: Any, x: Tensor) -> Any:
    h.t, h.n = h.t * 0.9 + x * 0.1, h.n + 1
    return h.t * h.n


def difference(h: Any, x: Tensor) -> Any:
    before, h.last = h.last, x.detach()
    return x if before is None else x - before


def in_place(h: Any, x: Tensor) -> Any:
    h.t.add_(x.detach())
    h.last = h.t
    return h.t * 2


def append(h: Any, x: Tensor) -> Any:
    h.items.append(x * 2)
    h.last = h.items[-1]
    return x


def containers(h: Any, x: Tensor) -> Any:
    h.last = [x, {"a": x * 2}]
    h.items = [*h.items, x]
    return sum(h.items)


def exchange(h: Any, x: Tensor) -> Any:
    h.t, h.items[0] = h.items[0], h.t
    return x + h.t


def move(h: Any, x: Tensor) -> Any:
    h.last = h.t
    h.t = h.t + x
    return h.last


def delete(h: Any, x: Tensor) -> Any:
    del h.t
    h.t = x * 2
    return h.t


def decide(h: Any, x: Tensor) -> Any:
    if h.last is not None:
        x = x + h.last
    h.last = x.sum()
    return x


def fail(h: Any, x: Tensor) -> Any:
    h.last = x * 2
    raise ValueError(x.shape)


BODIES = (
    keep,
    keep_the_argument,
    add,
    average,
    difference,
    in_place,
    append,
    containers,
    exchange,
    move,
    delete,
    decide,
    fail,
)


def content(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist(), value.requires_grad, value.is_leaf
    if isinstance(value, dict):
        return {key: content(item) for key, item in value.items()}
    return [*map(content, value)] if isinstance(value, list) else value


def calls(body: Any, make: Callable[[], Any], way: Callable[..., Any], *, requires_grad: bool) -> list[Any]:
    """Note results and objects of five calls, with a change from outside between them."""
    h, found = make(), list[Any]()
    h.t, h.last, h.n, h.items = torch.ones(2), None, 1, [torch.zeros(2)]
    f = way(lambda x: body(h, x))
    for call in range(5):
        x = torch.full((2,), call + 1.0, requires_grad=requires_grad)
        try:
            result = f(x)
        except ValueError:
            result = None
        same = h.last is h.t, h.last is result, h.last is x, h.items[-1] is h.last
        found.append((content(result), [content(getattr(h, name)) for name in FIELDS], same))
        if call == 2:
            h.t, h.last = torch.full((2,), 9.0), None
    return found


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_each_call_leaves_what_eager_mode_leaves(holder: str, body: Any) -> None:
    for requires_grad in (False, True):
        expected = calls(body, HOLDERS[holder], lambda f: f, requires_grad=requires_grad)
        assert calls(body, HOLDERS[holder], tfn.jit, requires_grad=requires_grad) == expected
