"""Structures of arguments and results as data. A file names no class that is looked up: a container
beyond tuples, lists and dicts is one of the classes that the reader passes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from thunder_fn.capture import pytree
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.portable.numbers import NumberReader
from thunder_fn.portable.values import read_literal, text

_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": collections.OrderedDict}


def name_of(cls: type) -> str:
    """The name under which a file knows a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_data(tree: Any, literal: Any) -> Any:
    """A tree with places of leaves in it, as data; `literal` gives the data of keys.

    Raises:
        PortableError: a container is of a kind that has no form in a file.
    """
    inner = lambda child: tree_data(child, literal)
    if isinstance(tree, int):
        return tree
    if tree is None:
        return {"none": None}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: list(map(inner, tree))}
    if type(tree) in _DICTS.values():
        items = [[literal(key), inner(value)] for key, value in tree.items()]
        return {type(tree).__name__: items}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {"named tuple": [name_of(type(tree)), list(map(inner, tree))]}
    if dataclasses.is_dataclass(tree):
        fields = [[one.name, inner(getattr(tree, one.name))] for one in dataclasses.fields(tree)]
        return {"dataclass": [name_of(type(tree)), fields]}
    what = f"{pytree.describe(pytree.flatten(tree)[1])} among the arguments or results"
    raise refused(
        f"{what} has no form in a file",
        fix="Pass and return tuples, lists, dicts, named tuples or dataclasses.",
    )


def read_tree(data: Any, numbers: NumberReader, classes: Mapping[str, type]) -> Any:
    """A tree with places of leaves in it.

    Raises:
        PortableError: a class of it is not among those that were passed.
    """
    if type(data) is int:
        return data
    ((kind, parts),) = data.items()
    inner = lambda child: read_tree(child, numbers, classes)
    match kind:
        case "none":
            return None
        case "tuple" | "list":
            made = list(map(inner, parts))
            return made if kind == "list" else tuple(made)
        case "dict" | "OrderedDict":
            items = [(read_literal(key, numbers), inner(value)) for key, value in parts]
            return _DICTS[kind](items)
        case "named tuple":
            return tuple.__new__(_class(parts[0], classes), tuple(map(inner, parts[1])))
        case "dataclass":
            cls = _class(parts[0], classes)
            if [one.name for one in dataclasses.fields(cls)] != [name for name, _ in parts[1]]:
                raise unreadable(f"{parts[0]} has other fields than when the program was saved")
            value = object.__new__(cls)
            for name, child in parts[1]:
                object.__setattr__(value, text(name), inner(child))
            return value
        case _:
            raise unreadable(f"{kind!r} is not a kind of container")


def _class(name: str, classes: Mapping[str, type]) -> Any:
    if name not in classes:
        raise unreadable(
            f"arguments or results are of the class {name}, which was not given",
            f"Pass the class: `load(path, classes=[{text(name).rpartition('.')[2]}])`.",
        )
    return classes[name]


def by_name(classes: Iterable[type]) -> dict[str, type]:
    """The classes by the names under which files know them."""
    return {name_of(cls): cls for cls in classes}


__all__ = ["by_name", "read_tree", "tree_data"]
