"""TorchScript: a function, or a method of a module, as a function of all that it reads."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.jit._fuser import optimized_execution
from torch.utils._python_dispatch import TorchDispatchMode


class NotClosed(Exception):
    """The method does more with a module than read its attributes."""


_CALL: Callable[..., Any] = torch._C.ScriptFunction.__call__  # which a capture replaces
_LIBRARY = torch.library.Library("thunder_fn", "FRAGMENT")
_LIBRARY.define("script_detach(Tensor(a) x) -> Tensor(a)")
_LIBRARY.define("script_detach_(Tensor(a!) x) -> Tensor(a!)")
_LIBRARY.impl("script_detach", torch.Tensor.detach, "CompositeImplicitAutograd")
_LIBRARY.impl("script_detach_", torch.Tensor.detach_, "CompositeImplicitAutograd")
_DETACHES = {
    "aten::detach": "thunder_fn::script_detach",
    "aten::detach_": "thunder_fn::script_detach_",
    "prim::data": "thunder_fn::script_detach",
}


def closed_script(called: Any) -> tuple[Callable[..., Any], tuple[Callable[[], Any], ...]]:
    """A script function, or a method of a script module, as a function of its arguments and of the
    values that it reads.

    There is a question for each value that it reads: an attribute, or a constant that holds
    tensors. The function detaches by Python's `detach`, since autograd calls ATen's for its own
    purposes.

    Raises:
        NotClosed: it writes to an attribute, or calls a method that is known only when it runs.
    """
    graph = called.graph.copy()
    torch._C._jit_pass_inline(graph)
    _detach_in_python(graph)
    asked: list[Callable[[], Any]] = []
    if isinstance(called, torch._C.ScriptMethod):
        _close(graph, called.owner, asked)
    for node in graph.findAllNodes("prim::Constant"):
        value = node.outputsAt(0).toIValue() if "Tensor" in str(node.outputsAt(0).type()) else None
        if isinstance(value, (torch.Tensor, list, tuple, dict)):  # `x * 2` has a tensor that is 2
            _give(graph, node, functools.partial(_same, value), asked)
    return torch._C._create_function_from_graph(called.name, graph), tuple(asked)


def _detach_in_python(graph: Any) -> None:
    for kind, instead in _DETACHES.items():
        for node in graph.findAllNodes(kind):
            out = node.outputsAt(0)
            called = graph.create(instead, [node.inputsAt(0)], 1)
            called.insertBefore(node)
            called.outputsAt(0).setType(out.type())
            out.replaceAllUsesWith(called.outputsAt(0))
            node.destroy()


def _close(graph: Any, owner: Any, asked: list[Callable[[], Any]]) -> None:
    """Give the attributes that a method reads as inputs, instead of its module."""
    written = graph.alias_db()
    module = next(iter(graph.inputs()))
    holders = {module.debugName(): owner}
    submodules: list[Any] = []
    for node in graph.findAllNodes("prim::GetAttr"):
        out, name = node.outputsAt(0), node.s("name")
        kind = out.type().kind()
        if (holder := holders.get(node.inputsAt(0).debugName())) is None:
            continue  # an attribute of an object that the method makes
        if kind == "ClassType":
            holders[out.debugName()] = holder.getattr(name)
            submodules.append(node)
        elif kind in ("ListType", "DictType") and written.has_writers(out):
            raise NotClosed
        else:
            _give(graph, node, functools.partial(holder.getattr, name), asked)
    for node in reversed(submodules):
        if node.hasUses():
            raise NotClosed
        node.destroy()
    if module.uses():
        raise NotClosed
    graph.eraseInput(0)


def _give(graph: Any, node: Any, ask: Callable[[], Any], asked: list[Callable[[], Any]]) -> None:
    """Make the result of a node an input."""
    out, given = node.outputsAt(0), graph.addInput()
    given.setType(out.type())
    out.replaceAllUsesWith(given)
    node.destroy()
    asked.append(ask)


def _same(value: Any) -> Any:
    return value


def script_state(asked: tuple[Callable[[], Any], ...]) -> tuple[Any, ...]:
    """The values that a script reads, as one that can be compared: tensors by identity."""
    return tuple(_described(ask()) for ask in asked)


def _described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), *map(_described, value)
    if isinstance(value, dict):
        return dict, *((key, _described(item)) for key, item in value.items())
    is_plain = value is None or isinstance(value, (bool, int, float, str, torch.device))
    return (type(value), value) if is_plain else id(value)


def bound_script(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call in their order, with defaults; None if they do not fit."""
    wanted = called.schema.arguments[isinstance(called, torch._C.ScriptMethod) :]
    rest = wanted[len(args) :]
    if len(args) > len(wanted) or not kwargs.keys() <= {one.name for one in rest}:
        return None
    if not all(one.name in kwargs or one.has_default_value() for one in rest):
        return None
    return *args, *(kwargs.get(one.name, one.default_value) for one in rest)


def called_script(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a script as it is written: its optimizer compares constants, which modes would see. Its
    error has as cause what an op raised in Python, which C++ drops.
    """
    with optimized_execution(False), _Raised() as raised:
        try:
            return _CALL(function, *args)
        except RuntimeError as error:
            raise error from raised.error


class _Raised(TorchDispatchMode):
    """Keeps the exception of an op."""

    error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def failed_in_script(error: Exception) -> tuple[str, int, str] | None:
    """The file, line and function of a script that failed; None for another error."""
    text = str(error)
    if not text.startswith("The following operation failed in the TorchScript interpreter"):
        return None
    lines = re.findall(r'^  File "(.*)", line (\d+), in (.*)$', text, re.MULTILINE)
    return (lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else ("<script>", 0, "script")
