"""Lists and dicts among the arguments of a jitted module, which its `forward` may fill.

What is traced has copies of them. What a copy holds in the end is a result, which the caller's own gets after each call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

from thunder_fn.capture import pytree

KINDS = (list, deque, dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Argument:
    """In what a container holds: the container among the arguments that has this number."""

    number: int


@dataclass(frozen=True)
class Content:
    """What a container holds. `keys` is None for one without."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]


Filled = tuple[tuple[int, Content], ...]


def containers_in(arguments: Any) -> tuple[Any, ...]:
    """The containers among the arguments, outermost first."""
    return tuple(node for node in pytree.nodes_in(arguments) if type(node) in KINDS)


Held = tuple[tuple[Any, Content], ...]
"""Containers, and what they held."""


def held_in(arguments: Any) -> Held:
    """The containers among the arguments with what they hold now."""
    return tuple((container, _content(container)) for container in containers_in(arguments))


def _content(container: Any) -> Content:
    keys = tuple(container) if isinstance(container, dict) else None
    return Content(keys, tuple(container if keys is None else container.values()))


def filled(before: Held) -> Filled:
    """What those hold, by number, that hold something else than before."""
    numbers = {id(container): number for number, (container, _) in enumerate(before)}
    changed = list[tuple[int, Content]]()
    for number, (container, then) in enumerate(before):
        now = _content(container)
        if now.keys != then.keys or [*map(id, now.values)] != [*map(id, then.values)]:
            values = (Argument(numbers[id(one)]) if id(one) in numbers else one for one in now.values)
            changed.append((number, Content(now.keys, tuple(values))))
    return tuple(changed)


def fill(arguments: Any, changed: Filled) -> None:
    """Let the containers among the caller's arguments hold what those hold that were traced."""
    containers = containers_in(arguments) if changed else ()
    for number, content in changed:
        values = [containers[one.number] if isinstance(one, Argument) else one for one in content.values]
        container = containers[number]
        container.clear()
        if content.keys is None:
            container.extend(values)
        else:
            container.update(zip(content.keys, values, strict=True))
