"""Refuse writes to memory that the same op reads or writes elsewhere.

In eager mode their results depend on the order of a loop. PyTorch refuses some of them, and
computes others without notice. A trace has values and no memory, so all are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import AliasedMutation
from thunder_fn.ir import facts, ops
from thunder_fn.ir.trace import Source

WORK = 100_000
"""The number of steps after which two tensors count as disjoint."""


def check_overlaps(  # noqa: PLR0913 - the call, and what is known of memory
    func: Any,
    changed: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    args: Sequence[Any],
    given: Sequence[torch.Tensor],
    linked: Callable[[int], set[int]],
    laid_out: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None],
    source: Source | None,
) -> None:
    """Reject an op that changes tensors in place if several of their elements are one, or are read
    as other elements.

    Args:
        func: the op.
        changed: the tracers that it changes.
        others: the other tracers that it is given.
        args: its positional arguments.
        given: the tracers of arguments and of tensors from outside.
        linked: the memories that have the values of a memory, both by their id.
        laid_out: two tensors as they lie in one memory; None if they do not.
        source: the user's line.

    Raises:
        RuntimeError: elements of a changed tensor overlap, as in eager mode, which lets a few ops
            such as `fill_` do so.
        AliasedMutation: the op reads what it writes at another place, or in another order.
    """
    if torch.Tag.inplace_view in func.tags:
        return
    name = func._schema.name.rpartition("::")[2]
    for number, tensor in enumerate(changed):
        pairs = (laid_out(tensor, other) for other in changed[:number])
        _check_written_once(name, pairs, source)
        memories = linked(internals.memory_id(tensor))
        wholes = (
            one for one in given if one is not tensor and internals.memory_id(one) in memories
        )
        if overlaps(tensor) or any(map(overlaps, wholes)):
            raise RuntimeError(
                f"`{name}` writes to an expanded tensor, several of whose elements share memory;"
                " write to the tensor that is expanded, or to a clone"
            )
        for place, other in enumerate(others):
            # an op on lists computes each tensor from those beside it
            is_beside = name.startswith("_foreach_") and place % len(changed) == number
            is_beside &= len(others) % len(changed) == 0
            pair = laid_out(tensor, other)
            is_elementwise = is_beside or _is_in_place(func) or _is_copied_first(name, args, other)
            if pair is not None and _is_read_late(*pair, is_elementwise=is_elementwise):
                what = (
                    f"`{name}` writes to memory that it reads at another place, in an order that"
                    " PyTorch leaves open"
                )
                fix = "Pass a clone of the operand, or write to another tensor."
                raise AliasedMutation(what, source=source, fix=fix)


def _check_written_once(
    name: str, pairs: Iterable[tuple[torch.Tensor, torch.Tensor] | None], source: Source | None
) -> None:
    """Reject an op two of whose changed tensors have an element in common."""
    if any(pair is not None and share_elements(*pair) for pair in pairs):
        what = f"`{name}` writes to the same memory by several of its tensors"
        fix = "Call it for one tensor at a time."
        raise AliasedMutation(what, source=source, fix=fix)


def _is_copied_first(name: str, args: Sequence[Any], other: torch.Tensor) -> bool:
    """Test for the operand of an op that is copied to the result before anything else is read."""
    return bool(args) and other is args[0] and f"aten.{name}" in facts.COPIES_FIRST


def _is_read_late(changed: torch.Tensor, read: torch.Tensor, *, is_elementwise: bool) -> bool:
    """Test whether an element may be read after it was written: in its own place that is so for
    some ops only.
    """
    with internals.no_torch_function():
        if [_layout(changed), changed.dtype] == [_layout(read), read.dtype]:
            return not is_elementwise and changed.numel() != 0
    return share_elements(changed, read)


def share_elements(*tensors: torch.Tensor) -> bool:
    """Test whether two tensors in one memory have an element in common."""
    with internals.no_torch_function():
        arrays = [_as_array(*_numbers(tensor), tensor.element_size()) for tensor in tensors]
    try:
        return np.shares_memory(*arrays, max_work=WORK)  # pyright: ignore[reportArgumentType]  # its stub says -1 or 0
    except np.exceptions.TooHardError:
        return False


@functools.cache
def _is_in_place(func: Any) -> bool:
    """Test for an op that reads each element before it writes to its place. PyTorch tags some
    pointwise ops in their out-of-place form only.
    """
    name = func._schema.name.rpartition("::")[2]
    packets = (func.overloadpacket, getattr(ops.aten, name.removesuffix("_"), None))
    found = (getattr(one, overload) for one in packets if one for overload in one.overloads())
    return (
        any(torch.Tag.pointwise in overload.tags for overload in found)
        or f"aten.{name}" in facts.READS_BEFORE_WRITES
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _numbers(tensor: torch.Tensor) -> tuple[list[int], list[int], int]:
    """The sizes, strides and offset; of symbols the numbers that they have in this call."""
    return (
        [*map(number, tensor.shape)],
        [*map(number, tensor.stride())],
        number(tensor.storage_offset()),
    )


def number(item: Any) -> int:
    """The number that a size has in this call; one that is found in data is unknown, and counts
    as 2.
    """
    return item if type(item) is int else item.node.hint if _is_known(item) else 2


def _is_known(item: Any) -> bool:
    return type(item) is int or item.node.has_hint()


def _as_array(shape: list[int], strides: list[int], offset: int, itemsize: int) -> Any:
    """An array of the same layout, whose memory is nobody's and is not read."""
    if 0 in shape:
        return np.empty(0, np.int8)
    interface = {
        "shape": tuple(shape),
        "strides": tuple(stride * itemsize for stride in strides),
        "typestr": f"|V{itemsize}",
        "data": (WORK + offset * itemsize, True),
        "version": 3,
    }
    return np.asarray(type("Layout", (), {"__array_interface__": interface})())


def overlaps(tensor: torch.Tensor) -> bool:
    """Test whether two elements of a tensor are one. Comparisons of symbols become decisions of the
    trace.

    Sizes found in data are unknown, and count as 2.
    """
    sizes = [2 if type(size) is not int else size for size in tensor.shape]
    if 0 in sizes or tensor.is_contiguous():
        return False
    dims = [
        (stride, size)
        for size, stride, known in zip(tensor.shape, tensor.stride(), sizes, strict=True)
        if known > 1
    ]
    if any(type(stride) is int and stride == 0 for stride, _ in dims):
        return True
    if not all(_is_known(item) for dim in dims for item in dim):
        return False
    dims.sort(key=lambda dim: tuple(map(number, dim)))
    reach, apart = 0, True
    for stride, size in dims:
        apart, reach = apart and bool(stride > reach), reach + stride * (size - 1)
    if apart:
        return False
    numbers = [(int(stride), int(size)) for stride, size in dims]
    places = functools.reduce(
        lambda found, dim: {at + i * dim[0] for at in found for i in range(dim[1])}, numbers, {0}
    )
    return len(places) < math.prod(size for _, size in numbers)
