"""Functionalization of one op, as FunctionalTensorMode does it, without asking again what
depends on the op alone.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import get_alias_info, return_and_correct_aliasing

_KEYS = torch._C.DispatchKey
_FUNCTIONALIZE = torch._C.DispatchKeySet(_KEYS.Functionalize)
_LIFT_FRESH = torch.ops.aten.lift_fresh.default


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of an op that functionalization needs.

    `is_simple`: the kernel does it all. `has_aliases`: results are arguments, or views of them.
        `written` are the positions and the names of the arguments that it changes in place.
    """

    is_simple: bool
    has_aliases: bool
    has_effects: bool
    written: frozenset[int | str]


@functools.cache
def traits_of(op: Any) -> Traits:
    """The traits of an op, found once."""
    if not isinstance(op, OpOverload):
        return Traits(False, True, has_effects(op), frozenset())
    arguments = op._schema.arguments
    written = frozenset(
        key for i, item in enumerate(arguments) if item.is_write for key in (i, item.name)
    )
    if (
        op.namespace not in ("aten", "prims")
        or op in FunctionalTensor.metadata_fns
        or op is _LIFT_FRESH
    ):
        return Traits(False, True, has_effects(op), written)
    is_composite = (
        _KEYS.CompositeImplicitAutograd in op.py_kernels
        or torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), _KEYS.CompositeImplicitAutograd
        )
    )
    info = get_alias_info(op)
    is_simple = not is_composite and not info.is_inplace_view_op and not has_effects(op)
    has_aliases = bool(info.read_only_alias_match_indexes) or info.outs_write_aliases is not None
    return Traits(is_simple, has_aliases, has_effects(op), written)


def functionalized(
    mode: FunctionalTensorMode, op: Any, args: Any, kwargs: Any, *, has_aliases: bool
) -> Any:
    """A simple op on functional tensors: the C++ kernel on what they wrap, wrapped again."""
    inner, named = _unwrapped(args), {key: _unwrapped_one(value) for key, value in kwargs.items()}
    included = torch._C._dispatch_tls_local_include_set() | _FUNCTIONALIZE
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(_KEYS.Functionalize)
    with torch._C._ForceDispatchKeyGuard(
        included, excluded - FunctionalTensor._extra_dispatch_keys
    ):
        before = torch._functionalize_enable_reapply_views(True)
        try:
            result = op._op_dk(_KEYS.Functionalize, *inner, **named)
        finally:
            torch._disable_functionalization()
            torch._functionalize_enable_reapply_views(before)
    wrapped = _wrapped(mode, result)
    is_view = (
        has_aliases and bool(args) and not isinstance(args[0], (int, float, complex))
    )  # PyTorch takes conj of a number
    return return_and_correct_aliasing(op, args, kwargs, wrapped) if is_view else wrapped


def _unwrapped(values: Any) -> tuple[Any, ...]:
    return tuple([_unwrapped_one(value) for value in values])


def _unwrapped_one(value: Any) -> Any:
    if isinstance(value, FunctionalTensor):
        return value.elem
    return [_unwrapped_one(item) for item in value] if type(value) in (list, tuple) else value


def _wrapped(mode: FunctionalTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return FunctionalTensor(value, mode) if torch._is_functional_tensor(value) else value
    if type(value) in (list, tuple):
        return type(value)([_wrapped(mode, item) for item in value])
    return value
