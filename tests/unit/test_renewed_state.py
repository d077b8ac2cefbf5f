"""A container of tensors outside that a jitted function replaces: traced once, and as in Python, whoever holds its parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import thunder_fn as tfn

Tensor = torch.Tensor
Step = Callable[[Any, Tensor], Any]


class Named(NamedTuple):
    """A state of two tensors."""

    h: Any
    c: Any


class Pair:
    """An object of a plain class."""

    def __init__(self, h: Any, c: Any) -> None:
        self.h, self.c = h, c

    def __getitem__(self, index: int) -> Any:
        return (self.h, self.c)[index]


@dataclasses.dataclass
class Record(Pair):
    """A dataclass with plain data beside its tensors."""

    h: Any
    c: Any
    note: str = "one"


@dataclasses.dataclass(frozen=True)
class Kind:
    """The maker of a state of two tensors, and the way to its parts."""

    make: Callable[[Any, Any], Any]
    at: Callable[[Any, int], Any] = lambda t, index: t[index]


KINDS = {
    "tuple": Kind(lambda h, c: (h, c)),
    "list": Kind(lambda h, c: [h, c]),
    "named": Kind(Named),
    "dict": Kind(lambda h, c: {0: h, 1: c}),
    "ordered": Kind(lambda h, c: OrderedDict(h=h, c=c), lambda t, index: t["hc"[index]]),
    "object": Kind(Pair),
    "slots and plain data": Kind(Record),
    "numbers beside": Kind(lambda h, c: (h, [3, c]), lambda t, index: t[1][1] if index else t[0]),
    "lists in a dict": Kind(lambda h, c: {"a": [h], "b": (c, None)}, lambda t, index: t["ab"[index]][0]),
}


def summed(s: Any, x: Tensor) -> Any:
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) * 2)
    return s.at(s.t, 0) * 1


def read_first(s: Any, x: Tensor) -> Any:
    old = s.t
    a, b = s.at(old, 0), s.at(old, 1)
    s.t = s.make(a + x, b * 2 + a)
    return a + b


def exchanged(s: Any, x: Tensor) -> Any:
    s.t = s.make(s.at(s.t, 1) + x, s.at(s.t, 0))
    return s.at(s.t, 0) * 2


def by_key(s: Any, x: Tensor) -> Any:
    s.d["t"] = s.make(s.at(s.d["t"], 0) + x, s.at(s.d["t"], 1))
    return x * 2


def cell(s: Any, x: Tensor) -> Any:
    h, c = s.at(s.t, 0), s.at(s.t, 1)
    for _ in range(2):
        h, c = torch.tanh(h + x), c * 0.5 + h
    s.t = s.make(h.detach(), c.detach())
    return h


def written(s: Any, x: Tensor) -> Any:
    s.at(s.t, 0).add_(x)
    s.t = s.make(s.at(s.t, 0) * 2, s.at(s.t, 1))
    return s.at(s.t, 0) + 1


def in_turns(s: Any, x: Tensor) -> Any:
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    s.t = s.make(s.at(s.t, 0) * 2, s.at(s.t, 1) + 1)
    return s.at(s.t, 0) - s.at(s.t, 1)


def kept_aside(s: Any, x: Tensor) -> Any:
    s.old = s.t
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) + 1)
    return s.at(s.old, 0) * 3


def logged(s: Any, x: Tensor) -> Any:
    s.log.append(s.at(s.t, 0))
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    return s.at(s.t, 1) * 1


def logged_whole(s: Any, x: Tensor) -> Any:
    s.log.append(s.t)
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    return s.at(s.log[-1], 0) * 1


def kept_in_another(s: Any, x: Tensor) -> Any:
    s.d["t"], s.other = s.t, [x * 2, (s.t, s.u)]
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) * 2)
    return s.at(s.d["t"], 1) + s.at(s.other[1][0], 0)


def kept_within(s: Any, x: Tensor) -> Any:
    old = s.t
    s.t = s.make(s.at(old, 0) + x, s.at(old, 1) * 2)
    s.log.append((x * 1, [old]))
    return s.at(old, 0) * 1


def given_back(s: Any, x: Tensor) -> Any:
    old = s.t
    s.t = s.make(s.at(old, 0) + x, s.at(old, 1))
    return s.at(old, 0), s.at(old, 1)


def not_always(s: Any, x: Tensor) -> Any:
    if s.n % 2 == 0:
        s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) + 2)
    return s.at(s.t, 0) * 1


def beside_another(s: Any, x: Tensor) -> Any:
    y = s.at(s.t, 0) * s.at(s.u, 0)
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    return y


def both(s: Any, x: Tensor) -> Any:
    s.t, s.u = s.make(s.at(s.t, 0) + x, s.at(s.u, 0)), s.make(s.at(s.u, 0) * 2, s.at(s.t, 1))
    return s.at(s.t, 0) + s.at(s.u, 0)


def put(t: Any, value: Tensor) -> None:
    """Change a container, if it is one that can be changed."""
    if isinstance(t, Pair):
        t.h = value
    elif isinstance(t, (dict, list)):
        first = next(iter(t)) if isinstance(t, dict) else 0
        if isinstance(t[first], list):
            t = t[first]
        t[first if isinstance(t, dict) else 0] = value


def changed_before(s: Any, x: Tensor) -> Any:
    put(s.t, x * 3)
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    return s.at(s.t, 0) * 1


def changed_after(s: Any, x: Tensor) -> Any:
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1))
    put(s.t, s.at(s.t, 1) + x)
    return s.at(s.t, 0) * 1


def changes_another(s: Any, x: Tensor) -> Any:
    put(s.u, x * 3)
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) * 2)
    return s.at(s.t, 0) * 1


def asked_for(s: Any, x: Tensor) -> Any:
    if s.t is None or s.t is s.u:
        return x * 5
    s.t = s.make(s.at(s.t, 0) + x, s.at(s.t, 1) * 2)
    return s.at(s.t, 0) * 1


def begun(s: Any, x: Tensor) -> Any:
    s.old = s.make(x * 0, x) if s.old is None else s.make(s.at(s.old, 0) + x, s.at(s.old, 1) * 2)
    return s.at(s.old, 0) * 1


ONCE: list[Step] = [summed, read_first, exchanged, by_key, cell, in_turns, changed_after]
STEPS: list[Step] = [
    *ONCE, written, kept_aside, logged, logged_whole, kept_in_another, kept_within, given_back, not_always, beside_another,
    both, changed_before, changes_another, asked_for, begun,
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


def fresh(kind: Kind, step: Step | None = None) -> Any:
    tensors = [torch.arange(2.0) + n for n in range(6)]
    held: dict[str, Any] = {
        "t": kind.make(*tensors[:2]),
        "u": kind.make(*tensors[2:4]),
        "d": {"t": kind.make(*tensors[4:])},
    }
    held |= {"old": None, "log": [], "n": 0, "other": None, "make": kind.make, "at": kind.at}
    return SimpleNamespace(**held) if step is None else Holder(step, held)


def new_tensors(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0) * 1 + 1, s.at(s.t, 1) * 1 + 1)


def one_other(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0), s.at(s.t, 1) * 3)


def same_twice(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0), s.at(s.t, 0))


def shared_with_another(s: Any) -> None:
    s.u = s.make(s.at(s.t, 0), s.at(s.u, 1))


def the_very_container(s: Any) -> None:
    s.u = s.t


def shared_with_a_dict(s: Any) -> None:
    s.d["t"] = s.make(s.at(s.t, 1), s.at(s.d["t"], 1))


def held_by_a_dict(s: Any) -> None:
    s.d["t"] = s.t


def other_type(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0).double(), s.at(s.t, 1).double())


def other_size(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0), torch.ones(1))


def follows_gradients(s: Any) -> None:
    s.t = s.make(s.at(s.t, 0).clone().requires_grad_(), s.at(s.t, 1))


def counted(s: Any) -> None:
    s.n += 1


def in_place(s: Any) -> None:
    s.at(s.t, 1).mul_(2)


def put_in(s: Any) -> None:
    put(s.t, torch.full((2,), 7.0))


def longer(s: Any) -> None:
    if isinstance(s.t, list):
        s.t.append(torch.ones(2))
    if isinstance(s.t, dict):
        s.t["more"] = 1
    if isinstance(s.t, Pair):
        vars(s.t)["more"] = 1


def plain_data(s: Any) -> None:
    if isinstance(s.t, Record):
        s.t.note = "two"
    if isinstance(s.t, tuple) and isinstance(s.t[1], list):
        s.t[1][0] = 4


CHANGES = [
    new_tensors, one_other, same_twice, shared_with_another, the_very_container, shared_with_a_dict, held_by_a_dict, other_type,
    other_size, follows_gradients, counted, in_place, put_in, longer, plain_data,
]  # fmt: skip


def picture(s: Any, result: Any) -> Any:
    """The values, and which of the places hold one and the same tensor or container."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, (Tensor, list, dict, Pair)):
            place = next((i for i, one in enumerate(found) if one is value), len(found))
            found.append(value)
            if isinstance(value, Tensor):
                return place, str(value.dtype), value.requires_grad, value.tolist()
            items = (
                value if isinstance(value, list) else vars(value).items() if isinstance(value, Pair) else value.items()
            )
            return type(value).__name__, place, [look(item) for item in items]
        if isinstance(value, tuple):
            return type(value).__name__, [look(item) for item in value]
        return value

    return look(result), look({name: getattr(s, name) for name in ("t", "u", "d", "old", "log", "n", "other")})


def jit(step: Step, ours: Any, how: str) -> tuple[Any, Callable[[Tensor], Any]]:
    """The jitted function or module, and the step of ours as a function of x."""
    if how == "argument":
        jitted: Any = tfn.jit(step)
        return jitted, lambda x: jitted(ours, x)
    jitted = tfn.jit(ours) if how == "module" else tfn.jit(lambda x: step(ours, x))
    return jitted, jitted


HOW = ["closed", "argument", "module outside", "module"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "change"), [*itertools.product(STEPS, CHANGES)])
def test_a_container_of_tensors_is_state(step: Step, change: Callable[[Any], None], kind: str, how: str) -> None:
    ours, theirs = (fresh(KINDS[kind], step if "module" in how else None) for _ in range(2))
    _, jitted = jit(step, ours, how)
    for call in range(6):
        if call == 3:
            change(ours)
            change(theirs)
        x = torch.full((2,), call + 1.0)
        try:
            want = step(theirs, x.clone())
        except (RuntimeError, TypeError, ValueError) as error:  # eager refuses it
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                jitted(x)
            assert error is not None
            return
        found = jitted(x)
        assert picture(ours, found) == picture(theirs, want), call


@pytest.mark.parametrize("kind", KINDS)
def test_a_container_in_two_places_of_a_module(kind: str) -> None:
    """A program in which two places held one container is none for two that hold two."""
    test_a_container_of_tensors_is_state(beside_another, the_very_container, kind, "module")


@pytest.mark.parametrize("how", ["closed", "module outside", "module"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ONCE)
def test_the_function_is_traced_once(step: Step, kind: str, how: str) -> None:
    s = fresh(KINDS[kind], step if "module" in how else None)
    jitted, call_ours = jit(step, s, how)
    for call in range(5):
        call_ours(torch.full((2,), call + 1.0))
        new_tensors(s)
    assert tfn.cache_info(jitted).misses == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_that_is_a_part_of_the_state(kind: str) -> None:
    ours, theirs = fresh(KINDS[kind]), fresh(KINDS[kind])
    jitted = tfn.jit(lambda x: summed(ours, x))
    for call in range(5):
        mine, its = (one.at(one.t, 0) if call % 2 else torch.ones(2) for one in (ours, theirs))
        assert picture(ours, jitted(mine)) == picture(theirs, summed(theirs, its))


def added(n: int, x: Tensor) -> Any:
    return x * n, n + 1


def sized(n: int, x: Tensor) -> Any:
    return x.sum() * torch.ones(n + 1), n + 1


def looped(n: int, x: Tensor) -> Any:
    for i in range(n):
        x = x * 2 + i
    return x, n + 1


def indexed(n: int, x: Tensor) -> Any:
    return x * [1.0, 2.0, 4.0, 3.0, 5.0, 7.0, 6.0][n], n + 1


def decided(n: int, x: Tensor) -> Any:
    return (x * 2, n + 1) if n % 3 else (x - 1, n + 1)


def reset(n: int, x: Tensor) -> Any:
    return x * n, 0 if n > 2 else n + 1


def named(n: int, x: Tensor) -> Any:
    return x * len(f"{n:03}" + "a" * n), n + 1


def halved(n: int, x: Tensor) -> Any:
    return x * n, n / 2


def fixed(n: int, x: Tensor) -> Any:
    return x * n, 4


COUNTED = {
    "tuple": (lambda h, n: (h, n), lambda t: t),
    "list": (lambda h, n: [h, n], lambda t: t),
    "dict": (lambda h, n: {"h": h, "n": n}, lambda t: t.values()),
    "object": (Pair, lambda t: (t.h, t.c)),
    "record": (Record, lambda t: (t.h, t.c)),
    "nested": (lambda h, n: (None, {"h": [h], "n": (n,)}), lambda t: (t[1]["h"][0], t[1]["n"][0])),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("count", [added, sized, looped, indexed, decided, reset, named, halved, fixed])
def test_a_number_beside_the_tensors(count: Callable[[int, Tensor], Any], kind: str, how: str) -> None:
    make, apart = COUNTED[kind]

    def step(s: Any, x: Tensor) -> Any:
        h, n = apart(s.t)
        y, n = count(n, x + h.sum())
        s.t = make(h * 0.5 + x, n)
        return y

    def begin() -> Any:
        held = {"t": make(torch.zeros(2), 1), "u": None, "d": {}, "old": None, "log": [], "n": 0, "other": None}
        return Holder(step, held) if "module" in how else SimpleNamespace(**held)

    ours, theirs = begin(), begin()
    jitted, call_ours = jit(step, ours, how)
    for call in range(5):
        x = torch.full((2,), call + 1.0)
        assert picture(ours, call_ours(x)) == picture(theirs, step(theirs, x)), call
    if count in (added, fixed):
        assert tfn.cache_info(jitted).misses <= 2
