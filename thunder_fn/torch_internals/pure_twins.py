"""Pure twins of custom ops that write to their arguments.

    mylib::scale_(Tensor(a!) x, float by) -> ()
    thunder_fn_pure_mylib::scale_(Tensor x, float by) -> Tensor

The twin copies what the op would change, calls the op and returns its results followed by the
copies. It is an op like any other. A call of `mylib::scale_` in a traced function becomes an
equation of the twin and a copy to x. Twins are defined when they are first needed, from PyTorch's
schema, in a library whose name says which op is meant.

PyTorch's `auto_functionalized` is a higher-order op, which no interpreter would know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.torch_internals import OpOverload, has_own_functionalization, schema_of

PREFIX = "thunder_fn_pure_"
_schemas: dict[str, torch.library.Library] = {}
"""The definition of each twin, and its derivative, which reads where the definition has tensors."""
_kernels: dict[str, torch.library.Library] = {}
"""The other kernels of each twin. They outlive a definition: PyTorch frees an op that has neither,
and programs may still hold it.
"""
_meant: dict[str, OpOverload] = {}
"""The op that each twin calls: the latest of the name, as a notebook's cell may define it anew."""


@cache
def pure_call(overload: OpOverload) -> Callable[..., Any] | None:
    """Write a call of a custom op that changes its arguments with its twin; None for all other
    ops.
    """
    schema = schema_of(overload)
    if (
        not schema.is_mutable
        or overload.namespace in ("aten", "prims")
        or has_own_functionalization(overload)
    ):
        return None
    return partial(_call_twin, overload)


def _call_twin(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    schema = schema_of(overload)
    given = _complete(schema, args, kwargs)
    found = twin_of(overload)(*given)
    values = list(found) if len(_results(schema)) > 1 else [found]
    written = _written(schema)
    for position, new in zip(written, values[len(values) - len(written) :], strict=True):
        for target, value in zip(_tensors(given[position]), _tensors(new), strict=True):
            target.copy_(value)
    fresh = iter(values)
    returned = tuple(
        next(fresh) if item.alias_info is None else given[_position_of(item, schema)]
        for item in schema.returns
    )
    return returned if len(returned) > 1 else returned[0] if returned else None


@cache
def twin_of(overload: OpOverload) -> OpOverload:
    """The pure twin, which takes every argument by position; defined now if it is not yet."""
    schema = schema_of(overload)
    namespace, name, variant = str(overload).split(".")
    full = name if variant == "default" else f"{name}.{variant}"
    qualified = f"{PREFIX}{namespace}::{full}"
    before, _meant[qualified] = _meant.get(qualified), overload
    if before is None or str(schema_of(before)) != str(schema) or before.tags != overload.tags:
        if before is not None:
            _schemas[qualified]._destroy()  # pyright: ignore[reportPrivateUsage]
        arguments = re.sub(
            r"\(\w+!?\)|\*, ", "", str(schema).split("(", 1)[1].rsplit(") -> ", 1)[0]
        )
        library = _schemas[qualified] = torch.library.Library(PREFIX + namespace, "FRAGMENT")
        library.define(
            f"{full}({arguments}) -> ({', '.join(map(_type_text, _results(schema)))})",
            tags=overload.tags,
        )
        torch.library.register_autograd(qualified, partial(_refuse, qualified), lib=library)
        if before is None:
            _define_kernels(PREFIX + namespace, qualified)
    return getattr(getattr(getattr(torch.ops, PREFIX + namespace), name), variant)


def _define_kernels(namespace: str, qualified: str) -> None:
    def run(*args: Any) -> Any:
        overload = _meant[qualified]
        schema = schema_of(overload)
        given = _complete(schema, args, {})
        for position in _written(schema):
            given[position] = _copied(given[position])
        copies = [given[position] for position in _written(schema)]
        call = list(zip(schema.arguments, given, strict=True))
        named = {item.name: value for item, value in call if item.kwarg_only}
        returned = overload(*(value for item, value in call if not item.kwarg_only), **named)
        values = returned if len(schema.returns) > 1 else [returned] * len(schema.returns)
        fresh = [
            value
            for item, value in zip(schema.returns, values, strict=True)
            if item.alias_info is None
        ]
        results = [*fresh, *copies]
        return tuple(results) if len(results) > 1 else results[0]

    library = _kernels[qualified] = torch.library.Library(namespace, "FRAGMENT")
    library.impl(qualified.split("::")[1], run, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, run, lib=library)


def _refuse(qualified: str, *_: Any) -> Any:
    raise MissingRule(
        f"{_meant[qualified]} writes to its arguments, and PyTorch has no derivative for such"
        " custom ops"
    )


def _complete(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments by position; PyTorch leaves out those that have their default value."""
    rest = schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _written(schema: Any) -> list[int]:
    """The positions of the arguments that are changed in place."""
    return [
        i
        for i, item in enumerate(schema.arguments)
        if item.alias_info is not None and item.alias_info.is_write
    ]


def _results(schema: Any) -> list[Any]:
    """The results of the twin: those of the op that are no arguments, then the changed
    arguments.
    """
    fresh = [item for item in schema.returns if item.alias_info is None]
    return [*fresh, *(schema.arguments[position] for position in _written(schema))]


def _position_of(returned: Any, schema: Any) -> int:
    """The position of the argument that a result is."""
    names = returned.alias_info.before_set
    return next(i for i in _written(schema) if schema.arguments[i].alias_info.before_set == names)


def _type_text(item: Any) -> str:
    """A type as a schema writes it."""
    return re.sub(r"List\[(.*)\]", r"\1[]", re.sub(r"Optional\[(.*)\]", r"\1?", str(item.type)))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [] if value is None else [value] if isinstance(value, torch.Tensor) else list(value)


def _copied(value: Any) -> Any:
    return (
        value.clone()
        if isinstance(value, torch.Tensor)
        else value and [tensor.clone() for tensor in value]
    )
