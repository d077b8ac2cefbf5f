"""Objects of the user's own classes: a trace asks them for nothing that the function does not ask for."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import ThunderError

FIELDS: dict[str, Any] = {"scale": 2.0, "table": {"a": 1.0}, "weight": None, "secret": 7.0}
METHODS = (
    *(
        "__eq__",
        "__hash__",
        "__bool__",
        "__len__",
        "__iter__",
        "__contains__",
        "__getitem__",
        "__copy__",
        "__deepcopy__",
    ),
    *("__getattr__", "__repr__", "__reduce_ex__", "__getstate__", "__call__", "__index__", "__float__", "__array__"),
)


def kinds() -> dict[str, Any]:
    """Classes of objects with the same four attributes, by how they hold them."""

    class Plain:
        def __init__(self, **fields: Any) -> None:
            for name, value in fields.items():
                object.__setattr__(self, name, value)

    class Slotted(Plain):
        __slots__ = tuple(FIELDS)

    types_of = [(name, Any, dataclasses.field(default=None)) for name in FIELDS]
    return {
        "plain": Plain,
        "slots": Slotted,
        "dataclass": dataclasses.make_dataclass("Data", types_of, eq=False),
        "frozen": dataclasses.make_dataclass("Frozen", types_of, frozen=True),
        "slots of a dataclass": dataclasses.make_dataclass("Slots", types_of, slots=True, eq=False),
        "namespace": types.SimpleNamespace,
    }


def made(kind: Any, log: list[str]) -> Any:
    """An object of a subclass that notes what it is asked for, and does not give `secret` to anyone."""

    def asked(self: Any, name: str) -> Any:
        log.append(name)
        if name == "secret":
            raise PermissionError("nobody may read this")
        return kind.__getattribute__(self, name)

    def noted(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            log.append(name)
            raise PermissionError(f"nobody may call {name}")

        return method

    methods = {name: noted(name) for name in METHODS}
    fields = {**FIELDS, "table": dict(FIELDS["table"]), "weight": torch.ones(3)}
    with_slots = {"__slots__": ()} if kind.__name__ in ("Slotted", "Slots") else {}
    made = type("Users", (kind,), {"__getattribute__": asked, **methods, **with_slots})(**fields)
    log.clear()
    return made


def fields_of(held: Any) -> dict[str, Any]:
    return {name: object.__getattribute__(held, name) for name in FIELDS}


BODIES: dict[str, Any] = {
    "nothing": lambda held, x: x * 2,
    "identity": lambda held, x: x * (3 if held is None else 2),
    "read": lambda held, x: x * held.scale,
    "read a tensor": lambda held, x: x * held.weight,
    "read an entry": lambda held, x: x * held.table["a"],
    "write": lambda held, x: object.__setattr__(held, "scale", 3.0) or x * 2,
    "write a tensor": lambda held, x: object.__setattr__(held, "weight", x * 2) or x * 2,
    "write an entry": lambda held, x: held.table.update(a=3.0) or x * 2,
    "result": lambda held, x: (held, x * 2)[1:],
    "refused": lambda held, x: held.table.update(a=5.0) or (x if x.sum() > 0 else x * 2),
}


@pytest.mark.parametrize("way", ["closure", "attribute", "list", "module"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("name", kinds())
def test_an_object_is_asked_for_nothing_else(name: str, body: str, way: str) -> None:
    kind, log = kinds()[name], list[str]()
    first, second = made(kind, log), made(kind, log)

    def function(held: Any) -> Any:
        if way == "closure":
            return lambda x: BODIES[body](held, x)
        if way == "list":
            several = [held]
            return lambda x: BODIES[body](several[0], x)
        self = types.SimpleNamespace() if way == "attribute" else torch.nn.Module()
        self.held = held
        return lambda x: BODIES[body](self.held, x)

    f, jitted = function(first), tfn.jit(function(second))
    for call in range(4):
        x = torch.full((3,), call + 1.0)
        before = str(fields_of(second))
        log.clear()
        expected = f(x)
        asked = set(log)
        log.clear()
        try:
            found = jitted(x)
        except ThunderError:
            assert body in ("refused", "write a tensor") and str(fields_of(second)) == before
        else:
            torch.testing.assert_close(found, expected)
            assert str(fields_of(second)) == str(fields_of(first))
        assert set(log) - {"__class__"} <= asked, call  # `isinstance` asks, PyTorch's own too
        if call == 1:
            for held in (first, second):
                object.__setattr__(held, "scale", 5.0)
