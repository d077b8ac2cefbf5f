"""Objects of the user's classes, read without running code of theirs."""

from __future__ import annotations

import types
from typing import Any, TypeGuard, TypeVar

T = TypeVar("T")
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


def is_a(value: Any, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Test the type of an object. `isinstance` would ask the object for its class: code of the
    user may answer.
    """
    return issubclass(type(value), kinds)


def dict_of(value: Any) -> Any:
    """The `__dict__` of an object, or None."""
    return own_of(value, "__dict__", None)


def own_of(value: Any, name: str, default: Any = ABSENT) -> Any:
    """An attribute that an object or its class holds. The class's `__getattribute__` and
    `__getattr__`, which may raise or answer for others, are not asked.
    """
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


def answers_itself(cls: type) -> bool:
    """Test for a class whose own code runs where an attribute of its objects is read."""
    is_of_c = is_a(cls.__getattribute__, types.WrapperDescriptorType)  # as SimpleNamespace's own
    return not is_of_c or hasattr(cls, "__getattr__")


def held_by(value: Any, name: str) -> Any:
    """An attribute of an object. Code of its class does not run, unless it is a descriptor's."""
    return own_of(value, name) if answers_itself(type(value)) else getattr(value, name, ABSENT)


def set_own(value: Any, name: str, it: Any) -> None:
    """Set an attribute of an object or class, or delete it if it is to be absent. Code of its
    class, which may refuse, is not asked.
    """
    how, values = ("__delattr__", ()) if it is ABSENT else ("__setattr__", (it,))
    is_python = is_a(getattr(type(value), how), types.FunctionType)
    plain = type if is_a(value, type) else object
    getattr(plain if is_python else type(value), how)(value, name, *values)
