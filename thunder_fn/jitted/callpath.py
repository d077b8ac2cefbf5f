"""The call path: Python text that takes a call apart, guards it, runs the program and puts the
result together.

    def call(args, kwargs):             # guards.py
        ...
        return execute(l0, l1)

    def execute(l0, l1):                # program.py
        r0, = program(l0, l1)
        return r0

PyTorch's C++ guards check the prologue trace where they reach, generated Python does elsewhere. A
generic flatten of a hundred tensors takes twice as long as all their checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.outside.reads import is_object
from thunder_fn.ir.text import literal_text, program_text, run_text, tuple_text
from thunder_fn.ir.trace import Expr, Literal, is_compared_by_fields


class _Miss:
    def __repr__(self) -> str:
        return "MISS"


MISS = _Miss()
"""The result of a call path for a call that it was not made for."""

Structure = Any
"""A pytree whose leaves are `Leaf`s."""


class Leaf:
    """The place of a leaf in a structure, by its position."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Namespace:
    """Names for the values that a text mentions."""

    def __init__(self, **values: Any) -> None:
        self.values: dict[str, Any] = {"torch": torch, **values}

    def bind(self, value: Any, wanted: str = "c") -> str:
        """A name for a value."""
        name = f"{wanted}{len(self.values)}"
        self.values[name] = value
        return name

    def literal(self, value: Any) -> str:
        """An expression for a value: as Python writes it, or by name."""
        is_spelled = type(value) in (type(None), bool, int, float, complex, str, bytes, Expr)
        return literal_text(value, self.bind) if is_spelled else self.bind(value)

    def function(self, name: str, lines: Sequence[str]) -> Any:
        """Compile the text of one function. Nothing refers from the names back to it."""
        context = {"torch": torch, **self.values}
        run_text(program_text(lines), name, context)
        return context.pop(name)


def skeleton(spec: pytree.PyTreeSpec) -> Structure:
    """The structure with its leaves numbered."""
    return pytree.unflatten(spec, [Leaf(index) for index in range(spec.num_leaves)])


# ---- taking arguments apart ----


def is_plain(structure: Structure) -> bool:
    """Test for tuples, lists, dicts and None only, which generated code takes apart itself."""
    if isinstance(structure, Leaf) or structure is None:
        return True
    if type(structure) is dict:
        return all(map(is_plain, structure.values()))
    return type(structure) in (tuple, list) and all(map(is_plain, structure))


def take_apart(
    structure: Structure, name: str, names: Namespace, *, checked: bool = True
) -> Iterator[str]:
    """Lines that bind the leaves of the value called `name` to `l0, l1, ...`, or return MISS.

    `checked` says that the type of the value has been seen to already.
    """
    kind = type(structure)
    parts = list(structure.values()) if kind is dict else list(structure)
    targets = [
        f"l{part.index}" if isinstance(part, Leaf) else f"{name}_{i}"
        for i, part in enumerate(parts)
    ]
    if not checked:
        yield f"    if type({name}) is not {kind.__name__}: return MISS"
    yield f"    if len({name}) != {len(parts)}: return MISS"
    if kind is dict and parts:
        given, keys = f"*{name},", (*structure,)
        is_named = {*map(type, structure)} <= {str, int, bool}
        if not is_named:
            given = f"*map({names.bind(pytree.Key, 'key_of')}, {name}),"
            keys = (*map(pytree.Key, structure),)
        yield f"    if ({given}) != {names.bind(keys, 'keys')}: return MISS"
        if is_named and name != "kwargs":
            yield (
                f"    if (*map(type, {name}),) != {names.bind((*map(type, structure),), 'types')}:"
                " return MISS"
            )
        yield f"    {', '.join(targets)}, = {name}.values()"
    elif parts:
        yield f"    {', '.join(targets)}, = {name}"
    for part, target in zip(parts, targets, strict=True):
        if part is None:
            yield f"    if {target} is not None: return MISS"
        elif not isinstance(part, Leaf):
            yield from take_apart(part, target, names, checked=False)


def static_check(target: str, value: Any, names: Namespace) -> str:
    """An expression that is true where the value called `target` is this value, type and all."""
    if value is None or value is True or value is False:
        return f"{target} is {value}"
    same_type = f"type({target}) is {names.bind(type(value), 'Type')}"
    match value:
        case float() if not value or math.isnan(value):
            return f"{same_type} and {names.bind(Literal(value), 'literal')} == Literal({target})"
        case complex() | np.generic() | slice() | range():
            return f"{same_type} and {names.bind(Literal(value), 'literal')} == Literal({target})"
        case int() | float() | str() | bytes():
            return f"{same_type} and {target} == {names.bind(value)}"
        case _:
            known = names.bind(value)
            if is_object(value) or isinstance(value, type):
                return f"{target} is {known}"
            if isinstance(value, (tuple, frozenset)) or is_compared_by_fields(value):
                literal = names.bind(Literal(value), "literal")
                return f"({target} is {known} or {literal} == Literal({target}))"
            return f"({target} is {known} or ({same_type} and {target} == {known}))"


# ---- putting results together ----


def put_together(
    structure: Structure,
    values: Sequence[str],
    names: Namespace,
    spec: pytree.PyTreeSpec,
    repeated: Sequence[tuple[int, int]] = (),
) -> str:
    """An expression for the structure with these values as leaves. `repeated` nodes are in the
    dict `made`.
    """
    if is_plain(structure) and not repeated:
        return _expression(structure, values, names)
    unflatten = names.bind(pytree.unflatten, "unflatten")
    again = f", {names.bind(repeated, 'repeated')}, made" if repeated else ""
    return f"{unflatten}({names.bind(spec, 'spec')}, [{', '.join(values)}]{again})"


def _expression(structure: Structure, values: Sequence[str], names: Namespace) -> str:
    if structure is None:
        return "None"
    if isinstance(structure, Leaf):
        return values[structure.index]
    if isinstance(structure, dict):
        items = [
            f"{names.literal(key)}: {_expression(value, values, names)}"
            for key, value in structure.items()
        ]
        return f"{{{', '.join(items)}}}"
    parts = [_expression(part, values, names) for part in structure]
    if isinstance(structure, list):
        return f"[{', '.join(parts)}]"
    return tuple_text(parts)
