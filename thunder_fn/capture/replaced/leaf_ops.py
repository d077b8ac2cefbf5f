"""Records of the ops that PyTorch reports: some as another op, some as no equation at all.

Views are recorded as `aten.reshape`, because strides are no part of a type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fn.ir import ops

ALIASES = {"aten.detach.default", "aten.alias.default", "aten.lift.default"}
RESHAPES = {"aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default"}
PHYSICAL = {
    "aten._conj.default": "aten.conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
}
"""Lazy conjugation and negation, bits that a type does not have, and the ops that do it at once."""
SAME: dict[str, Callable[..., tuple[Any, tuple[Any, ...], dict[str, Any]]]] = {
    "prims.conj_physical.default": lambda x: (ops.aten.conj_physical.default, (x,), {}),
    "aten._conj_physical.default": lambda x: (ops.aten.conj_physical.default, (x,), {}),
    "prims.convert_element_type.default": lambda x, dtype: (
        ops.aten._to_copy.default,
        (x,),
        {"dtype": dtype},
    ),
    "prims.clone.default": lambda x, **kwargs: (ops.aten.clone.default, (x,), kwargs),
    "aten._efficientzerotensor.default": lambda size, **kwargs: (
        ops.aten.zeros.default,
        (size,),
        kwargs,
    ),
}
"""Ops that are recorded as another op that does the same. PyTorch's Python decompositions call
ops without a derivative, and forward AD's zero tensors cannot be written to.
"""
LIFTS = {"aten.lift_fresh.default", "aten.lift_fresh_copy.default"}
