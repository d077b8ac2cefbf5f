"""TorchScript: the graph of a method of a module, as a function of all that it reads."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


class NotClosed(Exception):
    """The method does more with a module than read its attributes."""


def closed_script(method: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A method of a script module as a function of its arguments and of the values that it reads,
    and a question for each of these: an attribute, or a constant that holds tensors.

    Raises:
        NotClosed: it writes to an attribute, or calls a method that is known only when it runs.
    """
    graph = method.graph.copy()
    torch._C._jit_pass_inline(graph)
    written = graph.alias_db()
    module = next(iter(graph.inputs()))
    holders = {module.debugName(): method.owner}
    asked: list[Callable[[], Any]] = []
    submodules: list[Any] = []
    for node in [*graph.findAllNodes("prim::GetAttr"), *graph.findAllNodes("prim::Constant")]:
        out = node.outputsAt(0)
        kind = out.type().kind()
        if node.kind() == "prim::Constant":
            if "Tensor" not in str(out.type()) or (value := out.toIValue()) is None:
                continue
            ask = functools.partial(_same, value)
        elif (holder := holders.get(node.inputsAt(0).debugName())) is None:
            continue  # an attribute of an object that the method makes
        elif kind == "ClassType":
            holders[out.debugName()] = holder.getattr(node.s("name"))
            submodules.append(node)
            continue
        else:
            ask = functools.partial(holder.getattr, node.s("name"))
        if kind in ("ListType", "DictType") and written.has_writers(out):
            raise NotClosed
        given = graph.addInput()
        given.setType(out.type())
        out.replaceAllUsesWith(given)
        node.destroy()
        asked.append(ask)
    for node in reversed(submodules):
        if node.hasUses():
            raise NotClosed
        node.destroy()
    if module.uses():
        raise NotClosed
    graph.eraseInput(0)
    return torch._C._create_function_from_graph("forward", graph), tuple(asked)


def _same(value: Any) -> Any:
    return value


def script_state(method: Any, asked: tuple[Callable[[], Any], ...]) -> tuple[Any, ...]:
    """The values that a method reads, as one that can be compared: tensors by identity."""
    return tuple(_described(ask()) for ask in asked)


def _described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), *map(_described, value)
    if isinstance(value, dict):
        return dict, *((key, _described(item)) for key, item in value.items())
    is_plain = value is None or isinstance(value, (bool, int, float, str, torch.device))
    return (type(value), value) if is_plain else id(value)


def bound_script(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in their order, with defaults; None if they do not fit."""
    wanted = method.schema.arguments[1:]
    rest = wanted[len(args) :]
    if len(args) > len(wanted) or not kwargs.keys() <= {one.name for one in rest}:
        return None
    if not all(one.name in kwargs or one.has_default_value() for one in rest):
        return None
    return *args, *(kwargs.get(one.name, one.default_value) for one in rest)
