"""The state of an optimizer that a traced function has not looked at, and does not depend on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Unread(dict[Any, Any]):
    """Stand for a dict until something uses it: each use calls `look` and goes to the dict it
    returns.
    """

    __slots__ = ("held", "look")

    def __init__(self, held: dict[Any, Any], look: Callable[[], dict[Any, Any]]) -> None:
        super().__init__()
        self.held = held
        self.look = look


def held_in(value: Any) -> Any:
    """Return the dict that a value stands for, or the value, and look at nothing."""
    return value.held if type(value) is Unread else value


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Unread, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.look(), name)(*args, **kwargs)

    return method


_OWN = {name for name in dir(object) if name not in ("__eq__", "__ne__", "__repr__", "__str__")}
for _name in set(dir(defaultdict)) - _OWN | {"__reduce__", "__reduce_ex__", "__sizeof__"}:
    if callable(getattr(defaultdict, _name)):
        setattr(Unread, _name, _forwarded(_name))
