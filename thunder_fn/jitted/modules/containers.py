"""Lists and dicts among the arguments of a jitted function or module, which it may fill.

The traced function gets copies of them. The final content of a copy is a result, which the caller's
own gets after each call. Other containers, such as dataclasses, are not written back, so to change
one is an error; objects known to `register_object` are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.scopes import check_unchanged

KINDS = (list, deque, dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Argument:
    """Mark, in the content of a container, for the container among the arguments that has this
    number.
    """

    number: int


@dataclass(frozen=True)
class Content:
    """The content of a container. `keys` is None for one without."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]


Filled = tuple[tuple[int, Content], ...]


@dataclass(frozen=True)
class Filling:
    """The result of a function that fills its arguments: `states` is the content of registered
    objects after it, `filled` that of lists and dicts.
    """

    result: Any
    states: tuple[Any, ...]
    filled: Filled


def filling(arguments: Any) -> Callable[[Any], Any]:
    """The function that makes of a function's result a `Filling`, if it changes these arguments.

    Raises:
        UnsupportedCall: it changes a container of another kind.
    """
    containers, objects = held_in(arguments), pytree.objects_in(arguments)
    others = pytree.Contents(filter(_may_change, pytree.nodes_in(arguments)))

    def made_of(result: Any) -> Any:
        fix = "Return what is new, or pass a list or a dict."
        check_unchanged(others, "jit: the function", fix)
        changed = filled(containers)
        return (
            Filling(result, tuple(map(pytree.attributes_of, objects)), changed)
            if changed or objects
            else result
        )

    return made_of


def _may_change(node: Any) -> bool:
    """Test whether the node is a container that code can change, and no list or dict."""
    return type(node) not in (*KINDS, type(None)) and not isinstance(node, (tuple, torch.Tensor))


def finish(result: Filling, args: Any, kwargs: Any) -> Any:
    """The function's result, once the caller's containers have the content of the traced ones."""
    for value, state in zip(pytree.objects_in((args, kwargs)), result.states, strict=True):
        pytree.assign(value, state)
    fill((args, kwargs), result.filled)
    return result.result


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
    """The new content, by number, of those containers that hold something else than before."""
    numbers = {id(container): number for number, (container, _) in enumerate(before)}
    changed = list[tuple[int, Content]]()
    for number, (container, then) in enumerate(before):
        now = _content(container)
        if now.keys != then.keys or [*map(id, now.values)] != [*map(id, then.values)]:
            values = (
                Argument(numbers[id(one)]) if id(one) in numbers else one for one in now.values
            )
            changed.append((number, Content(now.keys, tuple(values))))
    return tuple(changed)


def fill(arguments: Any, changed: Filled) -> None:
    """Give the containers among the caller's arguments the content of those that were traced."""
    containers = containers_in(arguments) if changed else ()
    for number, content in changed:
        values = [
            containers[one.number] if isinstance(one, Argument) else one for one in content.values
        ]
        container = containers[number]
        container.clear()
        if content.keys is None:
            container.extend(values)
        else:
            container.update(zip(content.keys, values, strict=True))
