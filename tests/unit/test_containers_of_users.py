"""Containers of the user's own classes: a trace runs no method of theirs that the function does not run."""

from __future__ import annotations

import collections
import types
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import ThunderError

KINDS: dict[str, Any] = {
    "list": (list, [[1.0, 2.0]]),
    "set": (set, [[1.0, 2.0]]),
    "dict": (dict, [{"a": 1.0, "b": 2.0}]),
    "OrderedDict": (collections.OrderedDict, [{"a": 1.0, "b": 2.0}]),
    "defaultdict": (collections.defaultdict, [float, {"a": 1.0, "b": 2.0}]),
    "Counter": (collections.Counter, [{"a": 1, "b": 2}]),
    "deque": (collections.deque, [[1.0, 2.0], 5]),
}
QUIET = ("__class__", "__new__", "__getattribute__", "__init_subclass__", "__subclasshook__", "__del__", "__dir__")
"""What Python itself asks of any object."""


def made(kind: type, args: list[Any], log: list[str]) -> Any:
    """An instance of a class whose every method notes that it runs, and that makes something of each item it is asked for."""

    def noted(name: str) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            log.append(name)
            found = getattr(kind, name)(self, *args, **options)
            return [found] if name == "__getitem__" else found

        return method

    names = [name for name in dir(kind) if callable(getattr(kind, name)) and name not in QUIET]
    methods = {name: noted(name) for name in names if name not in ("fromkeys", "__missing__")}
    made = type("Users", (kind,), methods)(*args)
    log.clear()
    return made


def whole(kind: type, held: Any) -> Any:
    found = list(kind.items(held) if issubclass(kind, dict) else kind.__iter__(held))
    return sorted(found, key=str) if issubclass(kind, set) else found


def store(kind: type, held: Any, key: str, value: Any) -> None:
    if issubclass(kind, dict):
        kind.__setitem__(held, key, value)
    else:
        (kind.add if issubclass(kind, set) else kind.append)(held, value)


def item(kind: type, held: Any) -> Any:
    return kind.__getitem__(held, "a") if issubclass(kind, dict) else next(iter(kind.__iter__(held)))


BODIES: dict[str, Any] = {
    "nothing": lambda kind, held, x: x * (3 if held is None else 2),
    "read": lambda kind, held, x: x * item(kind, held),
    "store": lambda kind, held, x: store(kind, held, "a", 3.0) or x * 2,
    "store a new one": lambda kind, held, x: store(kind, held, "c", x.shape[0]) or x * 2,
    "store a tensor": lambda kind, held, x: store(kind, held, "c", x.sum()) or x * 2,
    "refused": lambda kind, held, x: store(kind, held, "c", 3.0) or (x if x.sum() > 0 else x * 2),
}


def same(one: Any, other: Any) -> bool:
    return str(one) == str(other)


@pytest.mark.parametrize("way", ["closure", "attribute"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", KINDS)
def test_no_method_runs_but_those_that_the_function_runs(name: str, body: str, way: str) -> None:
    (kind, args), log = KINDS[name], list[str]()
    first, second = made(kind, args, log), made(kind, args, log)

    def function(held: Any) -> Any:
        if way == "closure":
            return lambda x: BODIES[body](kind, held, x)
        self = types.SimpleNamespace(held=held)
        return lambda x: BODIES[body](kind, self.held, x)

    f, jitted = function(first), tfn.jit(function(second))
    for call in range(4):
        x = torch.full((3,), call + 1.0)
        before = whole(kind, second)
        try:
            found = jitted(x)
        except ThunderError:
            assert body == "refused" and same(whole(kind, second), before)
        else:
            torch.testing.assert_close(found, f(x))
            assert same(whole(kind, second), whole(kind, first))
        if call == 1:
            store(kind, first, "b", 7.0), store(kind, second, "b", 7.0)
        assert not log, call
