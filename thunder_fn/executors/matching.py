"""Matching of equations: from users' registrations to equations, and from equations to the calls
that users' functions see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import current
from thunder_fn.capture.apply import bind_equation, operands_of
from thunder_fn.capture.replaced.lookasides import Lookaside
from thunder_fn.capture.scopes import function_name
from thunder_fn.errors import ExecutorError, located
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Var
from thunder_fn.structured.shared.custom_calls import signature_of

Key: TypeAlias = str
"""The name of an op, or of a leaf without its overload: `aten.mul`."""


def keys_of(op: Any, where: str) -> tuple[Key, ...]:
    """The names under which an op appears in traces.

    A torch function is a composite of its name, or where it is one ATen op, that op. A composite is
    known by its function, a module by its class.

    Raises:
        ExecutorError: it is no op.
    """
    match op:
        case str():
            function = _function_named(op)
            return (op,) if function is None else keys_of(function, where)
        case internals.OpOverload():
            return (str(op),)
        case internals.OpOverloadPacket():
            return (str(op),)
        case type() if issubclass(op, torch.nn.Module):
            return (op.__name__,)
        case _:
            pass
    name = getattr(op, "__composite__", None) or internals.custom_op_name(op)
    if name is not None:
        return (name,)
    if getattr(op, "__module__", None) == "_operator":  # `operator.mul` is the method
        op = getattr(torch.Tensor, f"__{op.__name__.strip('_')}__", op)
    name = function_name(op) if callable(op) and hasattr(op, "__name__") else None
    if name is None:
        raise ExecutorError(
            f"{where}: {getattr(op, '__qualname__', repr(op))} is not an op of a trace",
            fix=(
                "Give an ATen op (`torch.ops.aten.mul.Tensor`), a torch function (`torch.mul`),"
                " a `@composite` function, a module class, an operator that `register_operator`"
                " returned, or the name of one."
            ),
        )
    short = name.rsplit(".", 1)[-1]
    packets = [
        candidate for candidate in (short, f"_{short}") if hasattr(torch.ops.aten, candidate)
    ]
    return (name, *(f"aten.{packet}" for packet in packets))


def _function_named(name: str) -> Callable[..., Any] | None:
    """The torch function of a name; None if there is none."""
    found: Any = torch
    for part in name.split(".")[1:] if name.startswith("torch.") else ():
        found = getattr(found, part, None)
    return found if found is not torch and callable(found) else None


@dataclass(frozen=True, slots=True)
class FakeCall:
    """An equation's arguments as a user's function sees them: tensors without values, numbers as
    they are.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mode: Any
    op: str = ""

    def mismatch(self, function: Callable[..., Any]) -> str | None:
        """The reason why Python would not pass these arguments to the function; None if it
        would, or cannot tell.
        """
        signature = signature_of(function)
        if signature is None:
            return None
        try:
            signature.bind(*self.args, **accepted(function, self.op, self.kwargs))
        except TypeError as error:
            return str(error)
        return None

    def apply(self, function: Callable[..., Any]) -> Any:
        """Call the function."""
        with internals.isolated(), internals.no_torch_function(), self.mode, torch.no_grad():
            return function(*self.args, **accepted(function, self.op, self.kwargs))


def apply_to(function: Callable[..., Any], equation: Equation, *tensors: Any) -> Any:
    """Call a function with an equation's arguments, the tensors in place of its operands."""
    supply = iter(tensors)
    args, kwargs = python_values(equation, lambda _: next(supply))
    return function(*args, **accepted(function, equation.op.name, kwargs))


def accepted(function: Callable[..., Any], op: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments without those that the function does not take and that say what goes
    without saying.

    PyTorch's functions record all their arguments: `cross_entropy(x, y)` has `weight=None` and
    `label_smoothing=0.0` too.
    """
    signature = signature_of(function)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return kwargs
    defaults = _defaults_of(op)
    return {
        key: value
        for key, value in kwargs.items()
        if key in signature.parameters
        or key not in defaults
        or Literal(value) != Literal(defaults[key])
    }


@cache
def _defaults_of(op: str) -> dict[str, Any]:
    """The default arguments of a torch function."""
    function = _function_named(op)
    signature = signature_of(function) if function is not None else None
    if signature is None:
        return {}
    return {key: p.default for key, p in signature.parameters.items() if p.default is not p.empty}


def fake_call(equation: Equation) -> FakeCall:
    """The equation's call with fake tensors."""
    mode = internals.fake_mode()
    fakes: dict[int, Any] = {}

    def read(var: Var) -> Any:
        if not isinstance(var.type, TensorType):
            return None
        if var.index not in fakes:
            fakes[var.index] = internals.fake_in(mode, var.type)
        return fakes[var.index]

    args, kwargs = python_values(equation, read)
    return FakeCall(args, kwargs, mode, equation.op.name)


def python_values(
    equation: Equation, read: Callable[[Var], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an equation as Python has them: see `python_value`."""
    args = tuple(python_value(arg, read) for arg in equation.args)
    return args, {key: python_value(arg, read) for key, arg in equation.kwargs}


def python_value(arg: Any, read: Callable[[Var], Any]) -> Any:
    """An argument as Python has it: variables read, literals unwrapped, tuples as tuples."""
    match arg:
        case Var():
            return read(arg)
        case Literal():
            return arg.value
        case _:
            return tuple(python_value(item, read) for item in arg)


def located_in(what: str, equation: Equation, fix: str | None = None) -> str:
    """The text of an error about an equation."""
    from thunder_fn.ir.pretty import format_equation

    return located(what, equation=format_equation(equation), source=equation.source, fix=fix)


def _contiguous(
    x: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """An equation: how a tensor lies in memory is known when the program runs, not when it is
    made.
    """
    recorder = current()
    operands = None if recorder is None else operands_of(recorder, [x])
    if recorder is None or operands is None or memory_format != torch.contiguous_format:
        return x.contiguous(memory_format=memory_format)
    return bind_equation(recorder, ops.CONTIGUOUS, operands, (), (operands[0].type,))[0]


LAYOUT_IS_UNKNOWN = (Lookaside(torch.Tensor.contiguous, _contiguous),)
"""The message for functions that are captured from types alone."""
