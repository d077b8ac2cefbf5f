"""`requires_grad`, `is_leaf` and `grad_fn` as torch.func answers them inside of a transform.

A level of `grad` or `vjp` follows what it differentiates, and nothing from outside of it. Forward
mode follows nothing, and `vmap` nothing that is batched. A trace is the same for all levels, so
tracers follow every tensor that requires grad at some level. The function is told about its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorded import leaves_of

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder

Tensor = torch.Tensor

_CLASS: Any = Tensor
UNFOLLOWED: dict[Any, Any] = {
    _CLASS.requires_grad.__get__: False,
    _CLASS.is_leaf.__get__: True,
    **dict.fromkeys((one.__get__ for one in internals.GRAD_FNS), None),
}
"""The answers about a tensor that the level of the function does not follow."""

_FOLLOW_NOTHING_MORE = ("grad", "vjp", "jvp")
"""Levels that do not follow what comes from outside of them."""


def is_followed(recorder: Recorder, tensor: Tensor) -> bool:
    """Test whether the level of the function that asks follows a tracer."""
    while recorder.outer is not None and not recorder.owns(tensor):
        recorder = recorder.outer
    with internals.no_torch_function():
        return not tensor.requires_grad or not recorder.inside or _requires_grad(recorder, tensor)


def _requires_grad(recorder: Recorder, tensor: Tensor, *, is_result: bool = False) -> bool:
    if recorder.transform == "vmap" and _is_batched(recorder, tensor):
        return False
    is_result = is_result or id(tensor) not in recorder.properties.given
    return any(_counts(recorder, one, is_result=is_result) for one in _sources(recorder, tensor))


def _counts(recorder: Recorder, source: Tensor | None, *, is_result: bool) -> bool:
    """Test whether the level follows a tensor where a history begins: one from outside by its
    tracer, None for one that the function made. A result is followed at its own level alone.
    """
    if source is None or id(source) in recorder.properties.differentiated:
        return True
    if recorder.transform in _FOLLOW_NOTHING_MORE:
        return False
    outside, outer = recorder.properties.given[id(source)][1], recorder.outer
    while outer is not None:
        if isinstance(outside, internals.Tracer) and outer.owns(outside):
            return outside.requires_grad and _requires_grad(outer, outside, is_result=is_result)
        if is_result and outer.transform in _FOLLOW_NOTHING_MORE:
            return False
        outer = outer.outer
    return True


def _sources(recorder: Recorder, tensor: Tensor) -> Iterator[Tensor | None]:
    """The tracers from outside where the history of a tensor begins; None for another leaf."""
    begin = {node: tracer for tracer, node, _ in recorder.results_from_outside}
    given = recorder.properties.given
    root = internals.node_of(tensor)
    if root is None:
        yield tensor if id(tensor) in given else None
    pending, seen = [] if root is None else [root], {root}
    while pending:
        node = pending.pop()
        if node in begin:
            yield begin[node]
            continue
        if internals.is_result_from_outside(node):
            yield None
            continue
        if (leaf := internals.leaf_of(node)) is not None:
            yield leaf if id(leaf) in given else None
            continue
        following = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= following
        pending += following


def _is_batched(recorder: Recorder, tensor: Tensor) -> bool:
    """Test whether a tensor depends on an argument that `vmap` batches."""
    var = recorder.var_of(tensor)
    batched = {one.index for one in recorder.inputs if one.index in recorder.batched}
    for leaf, _ in leaves_of(recorder.root):
        if not batched.isdisjoint(one.index for one in leaf.operands):
            batched.update(one.index for one in leaf.outputs)
    return var is not None and var.index in batched
