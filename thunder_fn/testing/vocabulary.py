"""The ops that a transform's code names: in strings, as overloads, as keys of its tables.

A transform does something special for some ops only. Its code names them, or it has a table of
rules for them. So its code says on which ops it should be tried.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from thunder_fn.capture.instructions import instructions
from thunder_fn.ir.rules import Rules
from thunder_fn.ir.trace import Op
from thunder_fn.testing.drawn_programs import BODIES
from thunder_fn.testing.schemas import is_callable
from thunder_fn.torch_internals import OpOverload, OpOverloadPacket

MOST = 40
"""The number of ops of a vocabulary that are drawn at most."""

_NAME = re.compile(r"(?:(?:aten|torch\.ops\.aten)\.)?([a-z_]\w*)(?:\.([A-Za-z]\w*))?")
"""An op in a string: `aten.sub.Tensor`, `sub.Tensor`, `aten.sub` or `sub`."""


def functions_of(transform: Callable[..., Any]) -> list[FunctionType]:
    """The functions of a transform's own package that it may call, itself first."""
    found: dict[CodeType, FunctionType] = {}
    todo = list(_functions(transform))
    homes = {_home(function.__module__) for function in todo}
    while todo:
        function = todo.pop()
        if function.__code__ in found:
            continue
        found[function.__code__] = function
        for value in _referred(function):
            for inner in _functions(value):
                if _home(inner.__module__) in homes:
                    todo.append(inner)
    return list(found.values())


def _home(module: str) -> str:
    """The package of a user's module; of this package each module is its own."""
    return module if module.startswith("thunder_fn.") else module.partition(".")[0]


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions behind a callable: of a partial, a method, a class or an object."""
    value = getattr(value, "__wrapped__", value)
    if isinstance(value, functools.partial):
        yield from _functions(value.func)
        for argument in (*value.args, *value.keywords.values()):
            yield from _functions(argument)
    elif isinstance(value, FunctionType):
        yield value
    elif isinstance(value, types.MethodType):
        yield from _functions(value.__func__)
    elif isinstance(value, type) and value.__module__ in sys.modules:
        yield from (inner for inner in vars(value).values() if isinstance(inner, FunctionType))
    elif callable(value) and isinstance(vars(type(value)).get("__call__"), FunctionType):
        yield from _functions(type(value))


Functions = Sequence[FunctionType]


def own_code(functions: Functions) -> frozenset[CodeType]:
    """The code of some functions, and of those inside of them."""
    return frozenset(code for function in functions for code in codes_of(function.__code__))


def named_in(source: str, functions: Functions) -> Iterator[str]:
    """The overloads that an expression in some of the functions names."""
    try:
        nodes = list(ast.walk(ast.parse(source, mode="eval")))
    except SyntaxError:
        return
    scopes = {id(function.__globals__): function.__globals__ for function in functions}
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield from _named_by(node.value, 1)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            first, *rest = ast.unparse(node).split(".")
            for scope in scopes.values():
                value = functools.reduce(
                    lambda owner, name: getattr(owner, name, None), rest, scope.get(first)
                )
                yield from _named_by(value, 2)


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _referred(function: FunctionType) -> Iterator[Any]:
    """The values that a function names: constants, globals, cells, defaults."""
    for code in codes_of(function.__code__):
        yield from code.co_consts
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()


def vocabulary(transform: Callable[..., Any]) -> tuple[str, ...]:
    """The overloads that a transform, or its postcondition, names, sorted, at most `MOST`."""
    found: dict[str, None] = {}
    for function in functions_of(transform):
        for value in _referred(function):
            found.update(dict.fromkeys(_named_by(value, 3)))
        for code in codes_of(function.__code__):
            found.update(dict.fromkeys(_attributes_of_aten(code)))
    return tuple(sorted(found))[:MOST]


def structures(transform: Callable[..., Any]) -> tuple[str, ...]:
    """The steps with bodies whose op a transform names, sorted."""
    found = set[str]()
    for value in (v for function in functions_of(transform) for v in _referred(function)):
        items = value if isinstance(value, (tuple, list, set, frozenset, dict)) else (value,)
        names = (item.name if isinstance(item, Op) else item for item in items)
        found.update(name for name in names if isinstance(name, str) and name in BODIES)
    return tuple(sorted(found))


def _attributes_of_aten(code: CodeType) -> Iterator[str]:
    """The overloads that a code names as attributes: `aten.add.Tensor`; all of `aten.add`."""
    names = list[str]()
    for instruction in (*instructions(code), None):
        if instruction is not None and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(instruction.argval)
            continue
        if "aten" in names:
            packet, *variant = names[names.index("aten") + 1 :][:2] or [""]
            known = _overloads(packet)
            exact = [name for name in known if name == ".".join(("aten", packet, *variant))]
            yield from exact or known
        is_name = instruction is not None and instruction.opname.startswith("LOAD_")
        names = [str(instruction.argval)] if instruction is not None and is_name else []


def overloads_of(ops: Iterable[Any]) -> tuple[str, ...]:
    """The overloads of ops that a user names: strings, overloads, packets, or ops of traces."""
    return tuple(dict.fromkeys(name for op in ops for name in _named_by(op, 1)))


def _named_by(value: Any, depth: int) -> Iterator[str]:
    """The overloads that a value names, in a container of this depth at most."""
    if isinstance(value, (Op, OpOverload)):
        name = value.name if isinstance(value, Op) else str(value)
        if is_callable(name):
            yield name
    elif isinstance(value, OpOverloadPacket):
        yield from _overloads(value.__name__)
    elif isinstance(value, str):
        yield from _in_text(value)
    elif isinstance(value, Rules):
        yield from _named_by(tuple(value.by_name), depth)
    elif depth and isinstance(value, Mapping):
        for key in value:
            yield from _named_by(key, depth - 1)
    elif depth and isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from _named_by(item, depth - 1)


def _in_text(text: str) -> Iterator[str]:
    match = _NAME.fullmatch(text)
    if match is None:
        return
    name, variant = match.groups()
    if variant is None:
        yield from _overloads(name)
    elif is_callable(f"aten.{name}.{variant}"):
        yield f"aten.{name}.{variant}"


@functools.cache
def _overloads(name: str) -> tuple[str, ...]:
    """The callable overloads of an op of ATen."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, OpOverloadPacket):
        return ()
    names = (f"aten.{name}.{variant}" for variant in packet.overloads())
    return tuple(name for name in names if is_callable(name))
