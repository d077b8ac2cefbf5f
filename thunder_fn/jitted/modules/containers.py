"""Lists and dicts among the arguments of a jitted function or module, which it may fill.

The traced function gets copies of them. The final content of a copy is a result, which the caller's
own gets after each call. Other containers, such as dataclasses, are not written back, so to change
one is an error; objects known to `register_object` are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.results import is_itself
from thunder_fn.capture.scopes import check_unchanged

KINDS = (list, deque, dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class Argument:
    """Mark, in the content of a container, for the container among the arguments that has this
    number.
    """

    number: int


@dataclass(frozen=True)
class Outside:
    """Mark, in a result with other marks, for a container from outside."""

    container: Any


@dataclass(frozen=True)
class Content:
    """The content of a container. `keys` is None for one without. `gives`: it has marks."""

    keys: tuple[Any, ...] | None
    values: tuple[Any, ...]
    gives: bool = False


Filled = tuple[tuple[int, Content], ...]


@dataclass(frozen=True)
class Made:
    """The result of a function that fills or returns its arguments: `filled` is the content of
    lists and dicts after it. `gives`: the result has marks for some of these.
    """

    result: Any
    filled: Filled
    gives: bool


@dataclass(frozen=True)
class Filling(Made):
    """A jitted function's result. `states` is the content of registered objects after it."""

    states: tuple[Any, ...]


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
        changed, (result, gives) = filled(containers), with_marks(result, containers)
        return (
            Filling(result, changed, gives, tuple(map(pytree.attributes_of, objects)))
            if changed or objects or gives
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
    return fill((args, kwargs), result)


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


def with_marks(result: Any, held: Held) -> tuple[Any, bool]:
    """Put marks for the containers that are part of a result, and say whether there are any."""
    numbers = _numbers(held)
    is_leaf = lambda value: id(value) in numbers or is_itself(value)
    if not any(id(leaf) in numbers for leaf in pytree.flatten_but(result, is_leaf)[0]):
        return result, False
    result = pytree.adorned(result, is_leaf)
    leaves, spec = pytree.flatten_but(result, is_leaf)
    leaves = [Outside(leaf) if is_itself(leaf) else leaf for leaf in _marked(leaves, numbers)]
    return pytree.unflatten(spec, leaves, pytree.repeated_in(result, spec, is_leaf)), True


def _numbers(held: Held) -> dict[int, int]:
    return {id(container): number for number, (container, _) in enumerate(held)}


def _marked(values: Iterable[Any], numbers: dict[int, int]) -> tuple[Any, ...]:
    return tuple(Argument(numbers[id(one)]) if id(one) in numbers else one for one in values)


def _without_marks(result: Any, containers: Sequence[Any]) -> Any:
    """Put containers in the place of their marks in a result."""
    is_mark = lambda value: type(value) in (Argument, Outside)
    result = pytree.adorned(result, is_mark)
    leaves, spec = pytree.flatten_but(result, is_mark)
    repeated = pytree.repeated_in(result, spec, is_mark)
    return pytree.unflatten(spec, [_meant(leaf, containers) for leaf in leaves], repeated)


def _meant(leaf: Any, containers: Sequence[Any]) -> Any:
    """The container that a mark stands for; anything else itself."""
    if type(leaf) is Argument:
        return containers[leaf.number]
    return leaf.container if type(leaf) is Outside else leaf


def filled(before: Held) -> Filled:
    """The new content, by number, of those containers that hold something else than before."""
    changed, numbers = list[tuple[int, Content]](), _numbers(before)
    for number, (container, then) in enumerate(before):
        now = _content(container)
        if now.keys != then.keys or [*map(id, now.values)] != [*map(id, then.values)]:
            values, gives = with_marks(_marked(now.values, numbers), before)
            gives = gives or any(type(value) is Argument for value in values)
            changed.append((number, Content(now.keys, values, gives)))
    return tuple(changed)


def fill(arguments: Any, made: Made) -> Any:
    """Give the containers among the caller's arguments the content of those that were traced.
    Return the result, with the caller's containers as its parts.
    """
    containers = containers_in(arguments) if made.filled or made.gives else ()
    for number, content in made.filled:
        values = content.values
        values = _without_marks(values, containers) if content.gives else values
        container = containers[number]
        container.clear()
        if content.keys is None:
            container.extend(values)
        else:
            container.update(zip(content.keys, values, strict=True))
    return _without_marks(made.result, containers) if made.gives else made.result
