"""Edges: the reads of values from outside, each as a question that a guard asks again.

    (kind, holder, key) -> value

Paths such as `cfg.lr` are kept for messages only.
"""

from __future__ import annotations

import builtins
import operator
import os
import re
import types
import weakref
from dataclasses import dataclass
from typing import Any

from thunder_fn.capture.objects import ABSENT, dict_of, held_by, is_a, set_own
from thunder_fn.capture.outside.reads import (
    CONTAINERS,
    HOLDERS,
    PLAIN,
    builtin_of,
    drop,
    section_of,
    seen,
)
from thunder_fn.capture.unread import held_in

NAMED = ("key", "attr", "class", "cell")
"""Kinds of edges that are places under a name: entries, slots, attributes of classes, and cells."""
PLACES = ("index", *NAMED)
"""Kinds of edges that are places for one value."""


def is_named(kind: str, holder: Any) -> bool:
    """Test for a place that a holder and a name stand for. In a container with slots, the name
    stands for an entry.
    """
    return kind in NAMED and not (kind == "attr" and is_a(holder, HOLDERS))


@dataclass(slots=True, eq=False)
class Edge:
    """A read: its kind, the question, the value, and a user's way to write it.

    `owner` is the object whose `__dict__` is the holder, or a weak reference to it. It may get
    another `__dict__`, and its class a descriptor that comes first. `is_exact`: another tuple with
    the same items is another value.
    """

    kind: str
    holder: Any
    key: Any
    value: Any
    path: str
    owner: Any = None
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is read in a way that cannot be guarded: the expression, and where."""

    text: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} in {os.path.basename(self.file)}:{self.line}"


def constant(value: Any) -> Any:
    """Bake a value into the program of the traced function in which this is called.

    A jitted function is traced again when a value that it reads from outside changes. A value in
    `constant(...)` is not looked at: the function keeps the value of the trace. It may be what
    cannot be guarded, such as a large NumPy array.

    Law: ``constant(value) is value``.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> settings = {"scale": 2.0}
        >>> f = tfn.jit(lambda x: x * tfn.constant(settings["scale"]))
        >>> f(torch.ones(()))
        tensor(2.)
        >>> settings["scale"] = 3.0
        >>> f(torch.ones(()))
        tensor(2.)
    """
    return value


# ---- the value of an edge ----


def look(kind: str, holder: Any, key: Any) -> Any:  # noqa: C901 - a branch for each kind of edge
    """Read an edge now. No code of the user runs, but for the hash and equality of keys."""
    try:
        match kind:
            case "key":
                found = (dict.get if is_a(holder, dict) else type(holder).get)(holder, key, ABSENT)
                return held_in(found)
            case "builtin":
                found = holder.get(key, ABSENT)
                held = holder.get("__builtins__", builtins)
                held = held if is_a(held, dict) else vars(held)
                return held.get(key, ABSENT) if found is ABSENT else found
            case "names":
                return tuple(holder)
            case "index":
                return holder[key]
            case "cell":
                return holder.cell_contents
            case "attr":
                return held_in(held_by(holder, key))
            case "class":
                return next(
                    (base.__dict__[key] for base in holder.__mro__ if key in base.__dict__), ABSENT
                )
            case "context":
                return holder.get(ABSENT)
            case "answer":
                return holder.ask()
            case "type":
                return type(holder())
            case "entries":
                return entries(holder, key)
            case "dict":
                return dict_of(holder())
            case "alive":
                return holder() is not None
            case _:
                return seen(holder)
    except (LookupError, ValueError, AttributeError, TypeError):
        return ABSENT


def store(kind: str, holder: Any, key: Any, value: Any) -> None:
    """Store a value in the place of an edge; ABSENT for none."""
    match kind:
        case "cell" if value is ABSENT:
            del holder.cell_contents
        case "cell":
            holder.cell_contents = value
        case "key" | "index" if not is_a(holder, CONTAINERS):  # such as os.environ
            of_key = (holder, key) if value is ABSENT else (holder, key, value)
            (operator.delitem if value is ABSENT else operator.setitem)(*of_key)
        case "key" if value is ABSENT:
            drop(holder, key)
        case "key" | "index" if value is not ABSENT:
            builtin_of(holder).__setitem__(holder, key, value)
        case "attr" | "class":
            set_own(holder, key, value)
        case _:  # the content of a container, which its snapshot has
            pass


def place_of(value: Any, name: str) -> tuple[str, Any, str | None]:
    """The place of an attribute, as `look` and `store` take it: in a class, in a cell, in the
    `__dict__` or a section of an object, or in a slot.
    """
    if is_a(value, type):
        return "class", value, name
    if is_a(value, types.CellType):
        return "cell", value, None
    held = dict_of(value)
    is_slot = is_a(look("class", type(value), name), types.MemberDescriptorType)
    return (
        ("attr", value, name)
        if is_slot or type(held) is not dict
        else ("key", section_of(held, name), name)
    )


def entries(held: dict[str, Any], pattern: str) -> tuple[tuple[str, Any], ...]:
    """The entries of a `__dict__` whose names match a pattern, as `seen` describes them."""
    match = re.compile(pattern, re.DOTALL).fullmatch
    return tuple((name, seen(held[name], 0)) for name in tuple(held) if match(name))


def now(edge: Edge) -> Any:
    """Read an edge now."""
    if edge.owner is None:
        return look(edge.kind, edge.holder, edge.key)
    owner = edge.owner() if type(edge.owner) is weakref.ref else edge.owner
    of_class = look("class", type(owner), edge.key)
    return of_class if comes_first(of_class) else look(edge.kind, dict_of(owner), edge.key)


def comes_first(of_class: Any) -> bool:
    """Test for an attribute of a class that hides those of its objects, such as a property."""
    return hasattr(type(of_class), "__set__")


def is_same(now: Any, then: Any, kind: str = "") -> bool:
    """Test whether an edge's value is the old one: an object by identity, plain data by value
    and type.
    """
    if now is then:
        return True
    if kind in ("content", "entries", "names"):
        return now == then
    if type(now) is not type(then) or not is_a(then, (*PLAIN, tuple, frozenset)):
        return False
    return seen(now) == seen(then)
