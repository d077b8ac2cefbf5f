"""Values in traces as data. A variable is its number, a tuple of arguments is a list, and a literal
is an object with one key that says its kind: `{"float": "0x1.8p+0"}`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from thunder_fn.errors import kind_of
from thunder_fn.interpreters.checkpoint.policies import (
    Budget,
    Named,
    everything_saveable,
    matmuls_saveable,
    nothing_saveable,
)
from thunder_fn.ir.text import object_name
from thunder_fn.ir.trace import Expr
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.portable.numbers import NumberReader, NumberWriter, number, number_data
from thunder_fn.structured.shared.custom_calls import RuleOfBodies


def _names(kind: type) -> dict[str, Any]:
    """PyTorch's values of a kind, by name."""
    found = {str(value): value for value in vars(torch).values() if isinstance(value, kind)}
    return {name.removeprefix("torch."): value for name, value in found.items()}


DTYPES = _names(torch.dtype)
_LAYOUTS = _names(torch.layout)
_FORMATS = _names(torch.memory_format)
_POLICIES: dict[str, Any] = {
    policy.__name__: policy for policy in (nothing_saveable, everything_saveable, matmuls_saveable)
}

Write = Callable[[Any], Any]


def literal_data(value: Any, numbers: NumberWriter) -> dict[str, Any]:
    """The value of a literal as data.

    Raises:
        PortableError: it is code, such as a policy of the user's, or belongs to the process.
    """
    kind, data = _literal_data(value, lambda item: literal_data(item, numbers), numbers)
    return {kind: data}


def _literal_data(value: Any, write: Write, numbers: NumberWriter) -> tuple[str, Any]:
    kind = type(value)
    if kind in _WRITTEN:
        return _WRITTEN[kind][0], _WRITTEN[kind][1](value)
    match value:
        case Expr():
            return "expr", numbers.expression(value)
        case tuple() if kind is tuple:
            return "tuple", list(map(write, value))
        case slice():
            return "slice", [write(part) for part in (value.start, value.stop, value.step)]
        case np.number() | np.bool_():
            return "numpy", [value.dtype.str, value.tobytes().hex()]
        case _:
            return _object_data(value)


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


_WRITTEN: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type(None): ("none", lambda _: None),
    type(...): ("ellipsis", lambda _: None),
    bool: ("bool", number_data),
    int: ("int", number_data),
    float: ("float", float.hex),
    complex: ("complex", lambda value: [value.real.hex(), value.imag.hex()]),
    str: ("str", str),
    range: ("range", lambda value: [value.start, value.stop, value.step]),
    torch.dtype: ("dtype", _short),
    torch.device: ("device", str),
    torch.layout: ("layout", _short),
    torch.memory_format: ("memory_format", _short),
}
"""For each plain kind its name, and the data of a value."""


def _object_data(value: Any) -> tuple[str, Any]:
    """Objects of ours that a file may name."""
    name = str(getattr(value, "__name__", ""))
    if _POLICIES.get(name, ...) is value:
        return "policy", name
    match value:
        case Budget():
            return "budget", value.budget_bytes
        case Named():
            return "named", [list(value.names), value.answer, value.otherwise]
        case RuleOfBodies():
            masks = list(value.is_tensor), list(value.constant)
            return "rule", [value.name, *masks, value.ignores_closures]
        case _:
            raise refused(f"{kind_of(value)} cannot be written as data: {object_name(value)}")


def read_literal(data: Any, numbers: NumberReader) -> Any:
    """The value of a literal from its data."""
    ((kind, item),) = data.items()
    read = lambda part: read_literal(part, numbers)
    if kind in _READ:
        return _READ[kind](item)
    match kind:
        case "expr":
            return numbers.expression(item)
        case "tuple":
            return tuple(map(read, item))
        case "slice":
            return slice(*map(read, item))
        case _:
            return _read_named(kind, item)


def _numpy_dtype(name: str) -> Any:
    dtype = np.dtype(text(name))
    if dtype.kind not in "biufc":
        raise unreadable(f"{name!r} is no dtype of a number")
    return dtype


def _read_named(kind: str, item: Any) -> Any:
    tables = {"dtype": DTYPES, "layout": _LAYOUTS, "memory_format": _FORMATS, "policy": _POLICIES}
    if kind in tables:
        if item not in tables[kind]:
            raise unreadable(f"{item!r} is no {kind} of this version")
        return tables[kind][item]
    match kind:
        case "device":
            return read_device(item)
        case "budget":
            return Budget(number(item, int))
        case "named":
            names, answer, otherwise = item
            if not {answer, otherwise} <= {"save", "offload", "recompute"}:
                raise unreadable(f"{item!r} is no policy")
            return Named(tuple(map(text, names)), answer, otherwise)
        case "rule":
            name, is_tensor, constant, ignores = item
            return RuleOfBodies(
                text(name), _flags(is_tensor), _flags(constant), number(ignores, bool)
            )
        case _:
            raise unreadable(f"{kind!r} is not a kind of value")


def read_device(name: Any) -> torch.device:
    """A device from its name."""
    try:
        return torch.device(text(name))
    except RuntimeError:
        raise unreadable(f"{name!r} is no device of this version") from None


def _flags(data: Any) -> tuple[bool, ...]:
    return tuple(number(flag, bool) for flag in data)


def text(data: Any) -> str:
    """A string."""
    if not isinstance(data, str):
        raise unreadable(f"{data!r} is no string")
    return data


_READ: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "ellipsis": lambda _: ...,
    "bool": lambda item: number(item, bool),
    "int": lambda item: number(item, int),
    "float": float.fromhex,
    "complex": lambda item: complex(*map(float.fromhex, item)),
    "str": text,
    "range": lambda item: range(*(number(part, int) for part in item)),
    "numpy": lambda item: np.frombuffer(bytes.fromhex(item[1]), _numpy_dtype(item[0]))[0],
}

__all__ = ["DTYPES", "literal_data", "read_device", "read_literal", "text"]
