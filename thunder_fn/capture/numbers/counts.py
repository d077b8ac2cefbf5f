"""Counts in tensors of kept objects, such as the steps of an optimizer: numbers that are inputs of
the trace, for Python that asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorded import Leaf, leaves_of
from thunder_fn.ir import facts
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import Var, all_args, python_args, vars_in

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

_ITEM = "aten._local_scalar_dense.default"
_COPIES = facts.ALIASES | facts.Leaves("clone")
_SIGNS = {
    "aten.add.Tensor": 1,
    "aten.add.Scalar": 1,
    "aten.sub.Tensor": -1,
    "aten.sub.Scalar": -1,
    "aten._foreach_add.Tensor": 1,
    "aten._foreach_add.Scalar": 1,
}


def _own_values(recorder: Recorder) -> dict[int, torch.Tensor]:
    """The tensors that the function made of numbers, by variable."""
    return {
        constant.var.index: constant.tensor
        for constant in recorder.constants
        if constant.owned and not constant.tensor.is_meta
    }


def _history(
    recorder: Recorder, wanted: list[Var], is_allowed: Callable[[Leaf], bool]
) -> tuple[list[Leaf] | None, set[int]]:
    """Return the equations that compute variables, in order, and the variables that they begin
    with. The equations are None if one is not allowed.
    """
    needed, found = {var.index for var in wanted}, list[Leaf]()
    for leaf in reversed([leaf for leaf, _ in leaves_of(recorder.root)]):
        if any(var.index in needed for var in leaf.outputs):
            if not is_allowed(leaf):
                return None, needed
            found.append(leaf)
            needed -= {var.index for var in leaf.outputs}
            needed.update(var.index for var in vars_in(all_args(leaf)))
    return found[::-1], needed


def _is_count(leaf: Leaf) -> bool:
    """Test for an op that adds to a count or copies it."""
    return leaf.op in _COPIES or leaf.op.name in _SIGNS


def tensors_of_numbers(recorder: Recorder, asked: sympy.Basic) -> list[torch.Tensor]:
    """The tensors from outside whose numbers a question is about, if it is about counts only."""
    found: list[torch.Tensor] = []
    own = _own_values(recorder)
    tensors = {constant.var.index: constant.tensor for constant in recorder.constants}
    for leaf, _ in leaves_of(recorder.root):
        if set(made_by(leaf)) & asked.free_symbols:
            counts = [arg for arg in leaf.args if isinstance(arg, Var)]
            leaves, roots = _history(recorder, counts, _is_count)
            if leaves is None or leaf.op.name != _ITEM or not roots <= set(tensors):
                return []
            found += [tensors[index] for index in roots if index not in own]
    return found


def fed_number(recorder: Recorder, wanted: Var) -> Any:
    """Express the number in a variable by numbers that are inputs of the trace; None if it is no
    count of those.
    """
    kept = recorder.kept
    if kept is None or not kept.fed.items:
        return None
    known, own = kept.counts, _own_values(recorder)
    for constant in recorder.constants:
        if (number := kept.fed.item(constant.tensor)) is not None:
            known[constant.var.index] = number
    leaves, roots = _history(
        recorder, [wanted], lambda leaf: leaf.outputs[0].index in known or _is_count(leaf)
    )
    if leaves is None or roots.isdisjoint(known) or not roots <= {*known, *own}:
        return None
    with internals.isolated(), internals.no_torch_function():
        known.update((index, own[index].item()) for index in roots if index in own)
    for leaf in leaves:
        if leaf.outputs[0].index not in known:
            counts = _counts(leaf, known)
            known.update((var.index, n) for var, n in zip(leaf.outputs, counts, strict=True))
    return known[wanted.index]


def _counts(leaf: Leaf, known: dict[int, Any]) -> list[Any]:
    """Return the numbers that an op computes, each None if the tensor's dtype may not hold it
    exactly.
    """
    args, kwargs = python_args(leaf, lambda var: known[var.index])
    if leaf.op in _COPIES:
        return [args[0]]
    alpha = kwargs.get("alpha", 1)
    is_plain = isinstance(args[1], (int, float)) and isinstance(alpha, (int, float))
    step = args[1] * alpha * _SIGNS[leaf.op.name] if is_plain else None
    numbers = args[0] if isinstance(args[0], list) else [args[0]]
    pairs = zip(numbers, leaf.outputs, strict=True)
    return [_counted(one, step, var.type) for one, var in pairs]


def _counted(number: Any, step: Any, type: Any) -> Any:
    """Return the sum of a number and a step, or None if the dtype cannot hold it."""
    if number is None or step is None or step % 1:
        return None
    is_float = type.dtype.is_floating_point
    most = 2 / torch.finfo(type.dtype).eps if is_float else torch.iinfo(type.dtype).max
    total = number + (float(step) if is_float else int(step))
    return total if total == math.floor(total) and -most <= total <= most else None
