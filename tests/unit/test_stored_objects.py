"""Objects that a jitted function makes and stores outside: made anew in each call, or refused if they lead to its tensors."""

from __future__ import annotations

import functools
import operator
import queue
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

Tensor = torch.Tensor


class Note:
    """An object of plain data."""

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, [n]


class Outer(Note):
    """An object of plain data that holds another one."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.inner = Note(n + 1)


class Slot:
    """An object with a slot."""

    __slots__ = ("value",)


class Own:
    """An object that no one but its class can make."""

    def __new__(cls, value: Any) -> Own:
        return object.__new__(cls)

    def __init__(self, value: Any) -> None:
        self.value = value


class Place(torch.nn.Module):
    """A module that runs a program on itself."""

    def __init__(self, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.store, self.log, self.d, self.slot = store, [], {}, Slot()
        self.slot.value = self.a = None

    def forward(self, x: Tensor) -> Tensor:
        self.store(self, x * 2)
        return x + 1


def place(store: Callable[[Any, Tensor], None]) -> SimpleNamespace:
    found = SimpleNamespace(log=[], d={}, slot=Slot(), a=None)
    found.slot.value = None
    found.forward = lambda x: (store(found, x * 2), x + 1)[1]
    return found


ANEW: list[Callable[[Any, Tensor], None]] = [
    lambda o, y: setattr(o, "a", Note(3)),
    lambda o, y: o.log.append(Note(1)),
    lambda o, y: o.log.extend([Note(1), 2, Outer(3)]),
    lambda o, y: o.log.insert(0, Outer(1)),
    lambda o, y: operator.setitem(o.d, "a", Note(2)),
    lambda o, y: operator.setitem(o.d, "a", {"n": Note(2), "y": y}),
    lambda o, y: setattr(o, "a", [Outer(8), y]),
    lambda o, y: setattr(o, "a", {1, 2}),
    lambda o, y: setattr(o, "a", (y, {1, 2}, bytearray(b"a"))),
    lambda o, y: setattr(o.slot, "value", Note(7)),
    lambda o, y: (o.log.append(Note(1)), setattr(o, "a", Note(2)), o.d.update(a=Note(3)))[1],
]


def picture(o: Any) -> Any:
    """The content of the places: values, and which of them are one object."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, (Note, list, dict, set, bytearray)):
            number = next((i for i, one in enumerate(found) if one is value), len(found))
            found.append(value)
            items = vars(value) if isinstance(value, Note) else value
            items = items.items() if isinstance(items, dict) else items
            return type(value).__name__, number, [look(item) for item in items]
        if isinstance(value, Tensor):
            return value.tolist()
        return [look(item) for item in value] if isinstance(value, tuple) else value

    return look([o.a, o.log, o.d, o.slot.value])


WAYS: dict[str, Callable[[Any], Callable[[Tensor], Tensor]]] = {
    "closed": lambda o: tfn.jit(lambda x: o.forward(x)),
    "argument": lambda o: functools.partial(tfn.jit(lambda o, x: o.forward(x)), o),
    "module": tfn.jit,
    "module outside": lambda o: tfn.jit(lambda x: o(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("store", ANEW)
def test_plain_objects_are_made_anew(store: Callable[[Any, Tensor], None], way: str) -> None:
    ours, theirs = (Place(store) if "module" in way else place(store) for _ in range(2))
    jitted, kept = WAYS[way](ours), []
    for call in range(4):
        x = torch.full((2,), call + 1.0)
        assert torch.equal(jitted(x), theirs.forward(x))
        assert picture(ours) == picture(theirs)
        kept.append((ours.a, theirs.a))
        if call == 1:  # what is changed is the object of one call
            for o in (ours, theirs):
                for one in (o.a, *o.log, *o.d.values(), o.slot.value):
                    if isinstance(one, Note):
                        one.seen.append(9)
    values = [[a for pair in kept if isinstance(a := pair[side], (Note, set, list))] for side in range(2)]
    assert len(set(map(id, values[0]))) == len(set(map(id, values[1])))


LEADING: dict[str, Callable[[Any, Tensor], Any]] = {
    "a function in a list": lambda o, y: o.log.append(lambda: y),
    "a partial": lambda o, y: setattr(o, "a", functools.partial(torch.add, y)),
    "a view of a dict": lambda o, y: setattr(o, "a", {1: y}.values()),
    "a generator": lambda o, y: setattr(o, "a", (z for z in [y])),
    "a slice": lambda o, y: operator.setitem(o.d, "a", slice(y)),
    "a getter": lambda o, y: operator.setitem(o.d, "a", operator.itemgetter(y)),
    "an object with its own __new__": lambda o, y: setattr(o, "a", Own(y)),
    "a function beside a tensor": lambda o, y: setattr(o, "a", [y, lambda: y]),
    "a method of a tensor": lambda o, y: setattr(o, "a", y.sum),
    "a method of an object": lambda o, y: setattr(o, "a", MethodType(lambda self: self, [y])),
    "a queue": lambda o, y: (q := queue.SimpleQueue(), q.put(y), o.log.append(q)),
}


@pytest.mark.parametrize("way", ["closed", "argument"])
@pytest.mark.parametrize("name", LEADING)
def test_objects_that_lead_to_tensors_are_refused(name: str, way: str) -> None:
    o = place(LEADING[name])
    jitted = WAYS[way](o)
    for _ in range(2):
        with pytest.raises(UnsupportedCall, match="program cannot make"):
            jitted(torch.ones(2))
        assert (o.a, o.log, o.d) == (None, [], {})


@pytest.mark.parametrize("name", LEADING)
@pytest.mark.filterwarnings("ignore")
def test_compile_stores_them_in_each_call(name: str) -> None:
    o = place(LEADING[name])
    compiled = tfn.compile(o.forward)
    for _ in range(3):
        o.a, o.log[:] = None, []
        o.d.clear()
        assert compiled(torch.ones(2)).tolist() == [2, 2]
        assert (o.a is not None) + len(o.log) + len(o.d) == 1


def local() -> Any:
    def inner() -> int:
        return 4

    return inner


def name_of(value: Any) -> Any:
    return [*map(name_of, value)] if isinstance(value, (tuple, list)) else type(value).__name__


OTHERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a function": lambda o, y: setattr(o, "a", lambda: 3),
    "a function in a list": lambda o, y: o.log.append(lambda: 3),
    "a function in a dict": lambda o, y: operator.setitem(o.d, "a", local()),
    "a function beside a tensor": lambda o, y: setattr(o, "a", [y, lambda: 3]),
    "a function of a list": lambda o, y: (lambda own: o.log.append(lambda: own))([1]),
    "a partial": lambda o, y: o.log.append(functools.partial(int, "3")),
    "a method": lambda o, y: o.log.append("a b".split),
    "a class": lambda o, y: o.log.append(type("Z", (), {})),
    "an object of it": lambda o, y: setattr(o, "a", type("Z", (), {})()),
    "an object without attributes": lambda o, y: o.log.append(object()),
    "an iterator": lambda o, y: setattr(o, "a", iter([1, 2])),
    "an array": lambda o, y: operator.setitem(o.d, "a", np.ones(2)),
    "a queue": lambda o, y: o.log.append(queue.SimpleQueue()),
    "a module": lambda o, y: setattr(o, "a", torch.nn.ReLU()),
    "numbers and a function": lambda o, y: o.log.extend([1, lambda: 3]),
}


@pytest.mark.parametrize("way", ["closed", "argument"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_without_tensors_are_stored_in_each_call(name: str, way: str) -> None:
    ours, theirs = place(OTHERS[name]), place(OTHERS[name])
    jitted = WAYS[way](ours)
    for call in range(5):
        x = torch.full((2,), call + 1.0)
        assert torch.equal(jitted(x), theirs.forward(x))
        kinds = [[name_of(one) for one in (o.a, *o.log, *o.d.items())] for o in (ours, theirs)]
        assert kinds[0] == kinds[1]
        for o in (ours, theirs) if call % 2 else ():
            o.a = None
            o.log.clear()
            o.d.clear()


def moved(held: dict[str, Any], key: str, *others: Any) -> None:
    """Take an entry out, put others in, and the entry again."""
    item = held.pop(key)
    held.update(others)
    held[key] = item


def deleted(o: Any, name: str, **others: Any) -> None:
    item = getattr(o, name)
    delattr(o, name)
    for key, other in others.items():
        setattr(o, key, other)
    setattr(o, name, item)


MOVING: dict[str, Callable[[Any, Tensor], Any]] = {
    "an attribute": lambda o, y: deleted(o.n, "x", k=1),
    "an attribute beside a tensor": lambda o, y: deleted(o.n, "x", k=y),
    "two attributes": lambda o, y: (deleted(o.n, "x"), deleted(o.n, "y", k=2)),
    "an attribute alone": lambda o, y: deleted(o.n, "y"),
    "an attribute that is a tensor": lambda o, y: deleted(o.n, "t", k=y),
    "an attribute of the place": lambda o, y: deleted(o, "n", k=y),
    "an entry": lambda o, y: moved(o.d, "x", ("k", 1)),
    "an entry beside a tensor": lambda o, y: moved(o.d, "x", ("k", y)),
    "an entry that is a tensor": lambda o, y: moved(o.d, "t", ("k", y)),
    "an entry that is deleted": lambda o, y: (
        t := o.d["t"],
        operator.delitem(o.d, "t"),
        o.d.update(k=y),
        o.d.update(t=t),
    ),
}


@pytest.mark.parametrize("way", ["closed", "argument"])
@pytest.mark.parametrize("name", MOVING)
def test_entries_and_attributes_have_the_order_of_eager_code(name: str, way: str) -> None:
    def fill(o: Any) -> None:
        tensor = torch.ones(1)
        o.n, o.d = SimpleNamespace(x=1, t=tensor, y=2), {"x": 1, "t": tensor, "y": 2}

    ours, theirs = place(MOVING[name]), place(MOVING[name])
    for o in (ours, theirs):
        fill(o)
    jitted = WAYS[way](ours)
    for call in range(6):
        x = torch.full((2,), call + 1.0)
        assert torch.equal(jitted(x), theirs.forward(x))
        orders = [([*vars(o)], *map(picture_of_dict, (vars(o.n), o.d))) for o in (ours, theirs)]
        assert orders[0] == orders[1], call
        for o in (ours, theirs) if call == 2 else ():
            fill(o)
        for o in (ours, theirs) if call == 3 else ():
            del o.n.y, o.d["y"]
            o.n.y = o.d["y"] = 5


def picture_of_dict(held: dict[str, Any]) -> list[Any]:
    return [(key, item.tolist() if isinstance(item, Tensor) else item) for key, item in held.items()]
