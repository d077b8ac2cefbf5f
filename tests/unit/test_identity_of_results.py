"""Containers and objects from outside in a result: they are the very objects, as in eager mode."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import register_pytree_node

import thunder_fn as tfn

Tensor = torch.Tensor
Program = Callable[[Any, Tensor, list[Any]], Any]


@dataclasses.dataclass
class Record:
    """A dataclass from outside."""

    a: Tensor


class Place(torch.nn.Module):
    """A module with containers among its attributes."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.fill()

    def fill(self) -> None:
        one = torch.ones(2)
        self.items, self.numbers, self.empty = [one], [1, 2], []
        self.d, self.od, self.dd = {"a": one}, OrderedDict(a=one), defaultdict(list, a=[one])
        self.dq, self.record, self.space = deque([one]), Record(one), SimpleNamespace(a=one)
        self.pair, self.deep = (one, [1]), (1, ({"k": one},))
        self.last = self.other = None

    def forward(self, x: Tensor, given: list[Any]) -> Any:
        return self.program(self, x, given)


NAMES = ["items", "numbers", "empty", "d", "od", "dd", "dq", "record", "space", "pair", "deep"]
"""The attributes that hold containers."""


def place(program: Program) -> SimpleNamespace:
    found = SimpleNamespace(program=program)
    own: Any = found
    found.fill = lambda: Place.fill(own)
    found.fill()
    found.forward = lambda x, given: program(found, x, given)
    return found


OUTSIDE: dict[str, Program] = {
    **{name: lambda o, x, given, name=name: getattr(o, name) for name in NAMES},
    **{f"{name}, inside": lambda o, x, given, name=name: {"x": x + 1, "l": [getattr(o, name)]} for name in NAMES},
    "appended to": lambda o, x, given: (o.items.append(x * 2), o.items)[1],
    "filled": lambda o, x, given: (o.d.update(b=x * 2), (x, [o.d]))[1],
    "emptied and filled": lambda o, x, given: (o.items.clear(), o.items.append(x), o.items)[2],
    "a list in a tuple filled": lambda o, x, given: (o.pair[1].append(x), o.pair)[1],
    "a record changed": lambda o, x, given: (setattr(o.record, "a", x * 2), o.record)[1],
    "a deque filled": lambda o, x, given: (o.dq.append(x * 2), o.dq)[1],
    "put into another": lambda o, x, given: (o.empty.append(o.items), o.empty)[1],
    "swapped": lambda o, x, given: (setattr(o, "last", o.items), setattr(o, "items", o.numbers), o.last)[2],
    "replaced": lambda o, x, given: (o.items, setattr(o, "items", [x]))[0],
    "beside an argument": lambda o, x, given: (given, o.items, [o.d]),
    "put into an argument": lambda o, x, given: (given.append(o.items), x)[1],
    "put into an argument that is returned": lambda o, x, given: (given.append(o.d), given)[1],
    "twice": lambda o, x, given: (o.items, {"k": o.items}, o.pair[1]),
    "by a jitted function": lambda o, x, given: tfn.jit(lambda y: [o.items, y])(x),
    "from a dict that makes it": lambda o, x, given: o.dd["a"],
}


def picture(root: Any) -> Any:
    """The content of a value: values, and which of them are one object."""
    known: dict[int, tuple[int, Any]] = {}

    def walk(value: Any) -> Any:
        if value is None or isinstance(value, (int, str)):
            return value
        if id(value) in known:
            return known[id(value)][0]
        known[id(value)] = len(known), value
        if isinstance(value, Tensor):
            return value.tolist()
        items = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        found = value if items is None else [(key, walk(item)) for key, item in items.items()]
        return type(value), *(found if items is not None else map(walk, value))

    return walk(root)


def held(o: Any) -> dict[str, Any]:
    return {name: vars(o)[name] for name in (*NAMES, "last", "other")}


def rebuild(o: Any) -> None:
    """Bind equal containers of the same tensors."""
    for name in ("items", "numbers", "empty"):
        setattr(o, name, [*getattr(o, name)])
    o.d, o.pair, o.deep = {**o.d}, (o.pair[0], [*o.pair[1]]), (o.deep[0], ({**o.deep[1][0]},))


CHANGES: dict[str, Callable[[Any], None]] = {
    "nothing": lambda o: None,
    "others": lambda o: o.fill(),
    "equal ones": rebuild,
    "their content": lambda o: (o.items.append(torch.zeros(1)), o.d.update(z=torch.zeros(1)), o.pair[1].append(5))[0],
}


def forms(program: Program) -> list[tuple[Any, Callable[..., Any]]]:
    """Places with what is called: a method of an object, jitted and compiled, and jitted modules."""
    plain, other, module = place(program), place(program), Place(program)
    return [
        (plain, tfn.jit(plain.forward)),
        (other, tfn.compile(other.forward)),
        (module, tfn.jit(module)),
    ]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_container_from_outside_is_the_result_itself(name: str, change: str) -> None:
    for own, call in forms(OUTSIDE[name]):
        eager = place(OUTSIDE[name])
        for step in range(4):
            x = torch.full((2,), float(step))
            expected, found = [x], [x]
            wanted = picture((eager.forward(x, expected), held(eager), expected))
            assert picture((call(x, found), held(own), found)) == wanted, (type(own), step)
            if step:
                CHANGES[change](own)
                CHANGES[change](eager)


OWN: dict[str, Program] = {
    "a list": lambda o, x, given: (setattr(o, "last", [x]), o.last)[1],
    "a list by its own name": lambda o, x, given: (lambda own: (setattr(o, "last", own), own)[1])([x]),
    "plain data": lambda o, x, given: (setattr(o, "last", [1]), o.last)[1],
    "a record": lambda o, x, given: (setattr(o, "last", Record(x)), [o.last])[1],
    "an object": lambda o, x, given: (setattr(o, "last", SimpleNamespace(a=x)), o.last)[1],
    "an object of plain data": lambda o, x, given: (setattr(o, "last", SimpleNamespace(a=1)), o.last)[1],
    "two places": lambda o, x, given: (setattr(o, "last", [x]), setattr(o, "other", o.last))[1],
    "two places of plain data": lambda o, x, given: (setattr(o, "last", {1: 2}), setattr(o, "other", [o.last]))[1],
    "an item": lambda o, x, given: (lambda own: (o.empty.append(own), own)[1])({"k": x}),
    "an item twice": lambda o, x, given: (lambda own: (o.empty.append(own), o.empty.append(own)))([x])[0],
    "an entry": lambda o, x, given: (o.d.setdefault("l", []).append(x), o.d["l"])[1],
    "an entry of plain data": lambda o, x, given: o.d.setdefault("l", []),
    "a list of a default dict": lambda o, x, given: (o.dd["k"].append(x), o.dd["k"])[1],
    "a part of what is stored": lambda o, x, given: (setattr(o, "last", {"k": [x]}), [o.last["k"], x])[1],
}
"""Containers that the function makes, stores outside, and returns or stores again."""


@pytest.mark.parametrize("change", ["nothing", "others"])
@pytest.mark.parametrize("name", OWN)
def test_a_container_that_is_stored_and_returned_is_one_object(name: str, change: str) -> None:
    for own, call in forms(OWN[name])[:2]:
        eager, kept = place(OWN[name]), list[Any]()
        for step in range(4):
            x = torch.full((2,), float(step))
            wanted, found = eager.forward(x, []), call(x, [])
            kept.append((wanted, found))
            assert picture((found, held(own))) == picture((wanted, held(eager))), (type(own), step)
            if step:
                CHANGES[change](own)
                CHANGES[change](eager)
        assert picture([found for _, found in kept]) == picture([wanted for wanted, _ in kept])


def test_a_container_of_another_container_that_is_changed_is_the_one_of_the_call() -> None:
    def fill(o: Any, x: Tensor) -> Tensor:
        o.deep[0][1]["k"] = x
        return x

    mine, eager = SimpleNamespace(deep=((1, {}),)), SimpleNamespace(deep=((1, {}),))
    call = tfn.jit(lambda x: fill(mine, x))
    for step in range(3):
        mine.deep, eager.deep = ((1, {}),), ((1, {}),)
        call(torch.full((2,), float(step)))
        fill(eager, torch.full((2,), float(step)))
        assert picture(mine.deep) == picture(eager.deep)


def test_a_saved_program_has_the_content_of_containers() -> None:
    given = [torch.ones(2), {"a": 3}]
    names = ("x", given)
    saved = tfn.jit(lambda x: (x * 2, given, names)).lower(torch.ones(2)).portable()
    one = torch.ones(2)
    twos, *rest = saved(torch.ones(2))
    assert picture((twos, *rest)) == picture((torch.full((2,), 2.0), [one, {"a": 3}], ("x", [one, {"a": 3}])))


class Pair(NamedTuple("Pair", [("a", Any), ("b", Any)])):
    """A named tuple that takes attributes."""


class Box:
    """A class that is registered as a pytree of PyTorch's, and has an attribute beside."""

    def __init__(self, a: Any) -> None:
        self.a, self.n = a, 0


register_pytree_node(Box, lambda box: ([box.a], None), lambda parts, _: Box(*parts))


def adorned(value: Any, **attributes: Any) -> Any:
    for name, item in attributes.items():
        setattr(value, name, item)
    return value


ADORNED: dict[str, Callable[[Tensor], Any]] = {
    "a named tuple": lambda x: adorned(Pair(x, x + 1), w=x * 2),
    "an ordered dict": lambda x: adorned(OrderedDict(b=x, a=1), w=[x * 2]),
    "one in another order": lambda x: (lambda o: (o.move_to_end("b"), o)[1])(adorned(OrderedDict(b=x, a=1), w=x)),
    "a registered class": lambda x: adorned(Box(x), w=x * 2, name="k"),
    "inside of another": lambda x: [adorned(Pair(adorned(Box(x), w=3), x), w={"k": adorned(Box(x), v=x * 2)})],
    "twice": lambda x: (lambda o: (o, [o]))(adorned(Box(x), w=x)),
    "beside an object": lambda x: adorned(Box(SimpleNamespace(y=x)), w=SimpleNamespace(y=x * 2)),
    "a dataclass": lambda x: adorned(Record(x), w=x),
}
"""Results that are made of a tensor."""


@pytest.mark.parametrize("wrap", [tfn.jit, tfn.compile])
@pytest.mark.parametrize("name", ADORNED)
def test_attributes_that_are_set_on_a_container_are_in_the_result(name: str, wrap: Any) -> None:
    f = ADORNED[name]
    call, x = wrap(f), torch.ones(2)
    for step in range(3):
        x = torch.full((2,), float(step))
        found, wanted = call(x), f(x)
        assert picture(found) == picture(wanted)
        if name == "one in another order":
            assert [*found] == [*wanted]
    call, given = wrap(lambda x, given: [f(x), given]), [torch.ones(1)]
    found = call(x, given)
    assert found[1] is given and picture(found) == picture([f(x), given])


@pytest.mark.parametrize("inner", [lambda acc, y: acc, lambda acc, y: (acc.append(y), acc)[1]])
@pytest.mark.parametrize("made", [lambda x: [x], lambda x: [1]])
def test_a_container_of_the_function_around_is_the_result_itself(made: Any, inner: Any) -> None:
    def f(x: Tensor, wrap: Any) -> Any:
        acc = made(x)
        call = wrap(lambda y: inner(acc, y))
        return call(x) is acc, call(x * 2) is acc, acc

    x = torch.ones(2)
    assert picture(tfn.jit(lambda x: f(x, tfn.jit))(x)) == picture(f(x, lambda inner: inner))
