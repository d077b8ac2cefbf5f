"""Spelling of an equation as a call that Python makes fast.

`torch.add(a, b)` takes half the time of `torch.ops.aten.add.Tensor(a, b)`: its arguments are parsed
by generated code. A C-bound function of the op's name is used if it reaches the dispatcher with the
very overload and arguments of the equation. That is tried once for each distinct call, without
running any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.running import Watched
from thunder_fn.ir import ops
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import Arg, Literal, Op, TensorType, Type, Var

_COMPOSED = (ops.RESHAPE, ops.LINEAR)
"""Ops that PyTorch makes of others, and whose first one tells them from all else."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """A function that computes an op: its name, its module, and whether its lists may be tuples."""

    name: str
    home: str
    function: Callable[..., Any]

    @property
    def is_overload(self) -> bool:
        """Test whether it is called as the op's own overload."""
        return self.home == "torch.ops"


@dataclass(frozen=True, slots=True)
class _Operand:
    """Stand-in for a variable in a call: the facts that decide how its arguments are parsed."""

    dtype: torch.dtype | None
    dims: int


def spell(op: Op, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Spelling:
    """The fastest function whose call with these arguments is the op's call."""
    if ops.is_collective(op):
        return replace(overload_spelling(op), function=_watched(op))
    if op == ops.CONTIGUOUS:  # the method does not dispatch where there is nothing to do
        return Spelling("contiguous", "torch.Tensor", torch.Tensor.contiguous)
    return _spell(op, _skeleton(args), tuple((key, _skeleton(arg)) for key, arg in kwargs))


@lru_cache(64)
def _watched(op: Op) -> Watched:
    return Watched(ops.program_call(op))


def overload_spelling(op: Op) -> Spelling:
    """The op's own overload."""
    return Spelling(op.name.replace(".", "_"), "torch.ops", ops.program_call(op))


def _skeleton(arg: Any) -> Any:
    if isinstance(arg, Var):
        return _operand(arg.type)
    if isinstance(arg, Literal):
        return Literal(hint_of(arg.value))
    return tuple(map(_skeleton, arg)) if isinstance(arg, tuple) else arg


def _operand(type: Type) -> _Operand:
    return (
        _Operand(type.dtype, len(type.shape)) if isinstance(type, TensorType) else _Operand(None, 0)
    )


@kept_of_ops(16384)
def _spell(op: Op, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Spelling:
    own = overload_spelling(op)
    if ops.is_random(op) or not _is_known((args, tuple(arg for _, arg in kwargs))):
        return own
    python_args, python_kwargs = tuple(map(_value, args)), {key: _value(arg) for key, arg in kwargs}
    wanted = internals.first_op(own.function, python_args, python_kwargs)
    if wanted is None or (wanted[0] is not own.function and op not in _COMPOSED):
        return own
    _, name, _ = op.name.split(".")
    for home, function in internals.c_functions(name):
        found = internals.first_op(function, python_args, python_kwargs)
        if found is not None and found[0] is wanted[0] and _same(found[1:], wanted[1:]):
            return Spelling(name, home, function)
    return own


def _is_known(arg: Any) -> bool:
    """Test that everything in a skeleton has a value to try: numbers that are variables have
    none.
    """
    if isinstance(arg, tuple):
        return all(map(_is_known, arg))
    return not isinstance(arg, _Operand) or arg.dtype is not None


def _value(arg: Any) -> Any:
    """A Python value for a skeleton: a meta tensor for each operand."""
    if isinstance(arg, tuple):
        return tuple(map(_value, arg))
    return (
        torch.empty((2,) * arg.dims, dtype=arg.dtype, device="meta")
        if isinstance(arg, _Operand)
        else arg.value
    )


def _same(a: Any, b: Any) -> bool:
    """Compare arguments: the same tensor objects, equal numbers of equal types, lists or tuples
    alike.
    """
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return (
        Literal(a) == Literal(b)
        if isinstance(a, (bool, int, float, complex))
        else type(a) is type(b) and a == b
    )
