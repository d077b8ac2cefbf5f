"""Facts about an op that functionalization needs, found once."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import get_alias_info

_KEYS = torch._C.DispatchKey
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

    @property
    def is_pure(self) -> bool:
        """Test for an op that functionalization runs on what is in its arguments, as it is."""
        return self.is_simple and not self.has_aliases and not self.written


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
