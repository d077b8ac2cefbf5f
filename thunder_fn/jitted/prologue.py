"""The prologue: what must hold of a call for a cached program to serve it, as a trace and as a key.

    def prologue(v0, v1):  # v0: f32[2, 2], v1: int
        thunder_fn_prologue.check_state.default('..., grad_mode=True, ...')
        thunder_fn_prologue.check_structure.default('(args, kwargs)', "((*, *, 'relu'), {})")
        thunder_fn_prologue.check_tensor.default(v0, torch.float32, (2, 2), (2, 1), ...)
        thunder_fn_prologue.check_number.default(v1, 3)
        return ()

Its ops are defined with `torch.library`, so the prologue evaluates like any trace and raises where
a check fails. `guards.py` lowers it to PyTorch's C++ guards, with Python for the rest.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import pytree
from thunder_fn.capture.numbers.arguments import Symbolic
from thunder_fn.capture.outside.reads import Same, is_object
from thunder_fn.capture.recorded import Decision, Layout
from thunder_fn.capture.supported import check_supported
from thunder_fn.errors import JitError, UnsupportedInput, kind_of
from thunder_fn.ir import ops
from thunder_fn.ir.text import shown
from thunder_fn.ir.trace import (
    Arg,
    Expr,
    Literal,
    NumberType,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    type_of_value,
)

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """Stand-in for a leaf that is the same tensor as another leaf, so that both are one input of
    the program.

    Sameness of arguments is part of the key. Transforms take arguments for different tensors, as
    torch.func does.
    """

    name: str
    position: int

    def __repr__(self) -> str:
        return self.name


_LIBRARY = torch.library.Library("thunder_fn_prologue", "DEF")
_SCHEMAS = (
    "check_state(str flags) -> ()",
    "check_structure(str what, str structure) -> ()",
    (
        "check_tensor(Tensor x, ScalarType dtype, int[] shape, int[] stride, Device device, bool"
        " requires_grad) -> ()"
    ),
    "check_number(Scalar x, Scalar value) -> ()",
)


class PrologueMiss(JitError):
    """A check of a prologue failed: the program was made for other arguments."""


def _check_tensor(
    x: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    device: torch.device,
    requires_grad: bool,
) -> None:
    found = (x.dtype, list(x.shape), list(x.stride()), x.device, x.requires_grad)
    expected = (dtype, list(shape), list(stride), device, requires_grad)
    if found != expected:
        raise PrologueMiss(f"check_tensor: expected {expected}, given {found}")


def _check_number(x: Any, value: Any) -> None:
    if Literal(x) != Literal(value):
        raise PrologueMiss(f"check_number: expected {value!r}, given {x!r}")


def _check_state(flags: str) -> None:
    found = internals.global_state()[0]
    if found != flags:
        raise PrologueMiss(f"check_state: expected {flags}; now {found}")


def _check_structure(what: str, structure: str) -> None:
    """Check nothing: flat values have no structure left."""


_CHECKS = {
    "check_state": _check_state,
    "check_structure": _check_structure,
    "check_tensor": _check_tensor,
    "check_number": _check_number,
}

for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)
for _name, _check in _CHECKS.items():
    _LIBRARY.impl(_name, _check, "CompositeExplicitAutograd")


# ---- the key of a call ----

_STATIC_TYPES = (bool, int, float, complex, str, bytes, range, type(Ellipsis), slice, np.generic)
_STATIC_TORCH_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.WrapperDescriptorType, types.MethodWrapperType),
)
_BY_IDENTITY = (*_FUNCTIONS, type, torch.Generator)
"""Functions, classes and generators are compared by identity, as objects are (`is_object`): another
one, be it of the same code or state, is another program.
"""


def static_key(leaf: Any) -> Literal | Same:
    """The key of a leaf that is baked in."""
    return Same(leaf) if is_object(leaf) or isinstance(leaf, type) else Literal(leaf)


def leaf_key(leaf: Any, position: int, tree: Any) -> Any:
    """The key of a leaf: a tensor's metadata, or the value of anything else with its type.

    A tensor that was passed before is that one.

    Raises:
        UnsupportedInput: the leaf is neither a tensor that can be traced nor a value that can be
            baked in.
    """
    if isinstance(leaf, torch.Tensor):
        check_supported(leaf, lambda: argument_name(tree, position))
        return (
            internals.class_of(leaf),
            leaf.dtype,
            leaf.shape,
            leaf.stride(),
            leaf.device,
            internals.bits_of(leaf),
            leaf.requires_grad,
        )
    if isinstance(leaf, Repeated):
        return (leaf,)
    static = (*_STATIC_TYPES, *_STATIC_TORCH_TYPES, *_BY_IDENTITY, enum.Enum)
    if isinstance(leaf, static) or is_object(leaf):
        return type(leaf), static_key(leaf)
    name, kind = argument_name(tree, position), kind_of(leaf)
    raise UnsupportedInput(
        f"jit: the argument {name} is {kind}, neither a tensor nor a value to bake in",
        fix=(
            "Convert it: `torch.as_tensor(x)`."
            if hasattr(leaf, "__array__")
            else "If it is hashable, name it in static_argnames, or let the function close over it."
        ),
    )


def argument_name(tree: Any, position: int) -> str:
    """The path of a leaf of `(args, kwargs)`, such as `args[0]['w']`."""
    path = pytree.paths(tree)[position]
    return f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}"


# ---- the trace of the checks ----


def prologue_trace(
    leaves: Sequence[Any],
    structure: str,
    statics: Sequence[tuple[int | str, Any]],
    symbolic: Symbolic | None = None,
    decisions: Sequence[Decision] = (),
) -> Trace:
    """The checks that a call must pass, as a trace on its tensors and numbers.

    Args:
        leaves: of the call's arguments, in order.
        structure: of the arguments, as text.
        statics: the static arguments by position or name.
        symbolic: the symbols of the leaves.
        decisions: what must hold of these symbols.
    """
    builder = TraceBuilder("prologue")
    layouts, numbers = (symbolic.layouts, symbolic.numbers) if symbolic is not None else ({}, {})
    checked: list[tuple[int, Any]] = [
        (i, leaf)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, (torch.Tensor, bool, int, float, complex))
    ]
    inputs = [
        builder.input(_leaf_type(leaf, layouts.get(i), numbers.get(i))) for i, leaf in checked
    ]
    _add(builder, "check_state", Literal(internals.global_state()[0]))
    _add(builder, "check_structure", Literal("(args, kwargs)"), Literal(structure))
    for place, value in statics:
        _add(
            builder,
            "check_structure",
            Literal(f"static argument {place!r}"),
            Literal(shown(value, 200)),
        )
    for var, (index, leaf) in zip(inputs, checked, strict=True):
        if isinstance(var.type, NumberType):
            _add(builder, "check_number", var, Literal(numbers.get(index, _plain(leaf))))
        else:
            known = layouts.get(index) or Layout(tuple(leaf.shape), leaf.stride())
            layout = tuple(map(Literal, known.shape)), tuple(map(Literal, known.stride))
            rest = Literal(leaf.device), Literal(leaf.requires_grad)
            _add(builder, "check_tensor", var, Literal(leaf.dtype), *layout, *rest)
    builder.require(decision.relation for decision in decisions)
    return builder.build(())


def _leaf_type(leaf: Any, layout: Layout | None, number: Expr | None) -> Type:
    if number is not None:
        return NumberType(type(leaf), number)
    return (
        type_of_value(_plain(leaf))
        if layout is None
        else TensorType(leaf.dtype, layout.shape, leaf.device)
    )


def _plain(leaf: Any) -> Any:
    """Return a NumPy scalar or an IntEnum as Python's number."""
    kinds: tuple[Any, ...] = (bool, int, float, complex)
    return next((kind(leaf) for kind in kinds if isinstance(leaf, kind)), leaf)


def _add(builder: TraceBuilder, name: str, *args: Arg) -> None:
    op = ops.leaf(getattr(torch.ops.thunder_fn_prologue, name).default)
    builder.add(op, args, ())


def structure_text(leaves: Sequence[Any], spec: pytree.PyTreeSpec) -> str:
    """The structure as one writes it: `*` for tensors and numbers, other values as they are."""
    marks = [
        _Mark("*") if isinstance(leaf, (torch.Tensor, int, float, complex)) else leaf
        for leaf in leaves
    ]
    return shown(pytree.unflatten(spec, marks))


class _Mark:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text
