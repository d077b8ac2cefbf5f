"""Emitters of reductions, of ops that move elements, and of those that make tensors from
nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.executors.nvfuser.writer import (
    Emitter,
    Number,
    Operand,
    Refused,
    Writer,
    computed_in,
    dims_of,
    emits,
    number,
)
from thunder_fn.ir.trace import TensorType

# ---- reductions ----


def _reduced(w: Writer, name: str, val: Any, x: Operand, dims: Any, keepdim: bool) -> Any:
    """A tensor reduced over dims; a scalar stays itself."""
    return getattr(w.ops, name)(val, dims_of(dims, x.rank), keepdim) if x.rank else val


def _reduction(name: str, given: Callable[[Writer, TensorType, Operand], Any]) -> Emitter:
    """Reduce over dims what is made of the operand."""

    def emit(
        w: Writer, out: TensorType, x: Operand, dims: Any = None, keepdim: bool = False, **_: Any
    ) -> Any:
        return _reduced(w, name, given(w, out, x), x, dims, keepdim)

    return emit


def _in_result(w: Writer, out: TensorType, x: Operand) -> Any:
    return w.value(x, computed_in(out.dtype))


def _compared(w: Writer, out: TensorType, x: Operand) -> Any:
    if x.dtype is torch.bool:
        raise Refused("nvFuser compares numbers")
    return w.value(x, computed_in(x.dtype))


_sum = emits("aten.sum.default", "aten.sum.dim_IntList")(_reduction("sum", _in_result))
emits("aten.prod.default", "aten.prod.dim_int")(_reduction("prod", _in_result))
emits("aten.amax.default", "aten.max.default")(_reduction("max", _compared))
emits("aten.amin.default", "aten.min.default")(_reduction("min", _compared))


@emits("aten.mean.default", "aten.mean.dim")
def _mean(
    w: Writer, out: TensorType, x: Operand, dims: Any = None, *options: Any, **more: Any
) -> Any:
    count = math.prod(x.shape[dim] for dim in dims_of(dims, x.rank))
    return w.ops.div(_sum(w, out, x, dims, *options, **more), number(count, torch.float64))


def _truth(name: str) -> Emitter:
    """The largest or smallest of zeros and ones."""

    def emit(
        w: Writer, out: TensorType, x: Operand, dims: Any = None, keepdim: bool = False
    ) -> Any:
        if dims == []:
            raise Refused("over no dims")
        flags = w.cast(w.value(x, torch.bool), torch.int32)
        return w.ops.gt(_reduced(w, name, flags, x, dims, keepdim), 0)

    return emit


emits("aten.any.default", "aten.any.dim", "aten.any.dims")(_truth("max"))
emits("aten.all.default", "aten.all.dim", "aten.all.dims")(_truth("min"))


def _spread(name: str) -> Emitter:
    """A variance with a count and a correction that nvFuser can compute."""

    def emit(
        w: Writer,
        out: Any,
        x: Operand,
        dims: Any = None,
        *,
        correction: Any = None,
        keepdim: bool = False,
    ) -> Any:
        correction, dims = 1 if correction is None else correction, dims_of(dims, x.rank)
        count = math.prod(x.shape[dim] for dim in dims)
        if x.rank == 0 or correction != int(correction) or not 0 <= correction < count:
            raise Refused(f"the variance of {count} elements with the correction {correction}")
        dtype = (out[0] if isinstance(out, tuple) else out).dtype
        val = w.value(x, computed_in(dtype))
        return getattr(w.ops, name)(val, dims, int(correction), keepdim)

    return emit


_var = emits("aten.var.correction")(_spread("var"))
emits("aten.var_mean.correction")(_spread("var_mean"))


@emits("aten.std.correction")
def _std(w: Writer, out: TensorType, x: Operand, dims: Any = None, **options: Any) -> Any:
    return w.ops.sqrt(_var(w, out, x, dims, **options))


# ---- shapes ----


@emits("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
def _reshape(w: Writer, out: TensorType, x: Operand, shape: Any) -> Any:
    return w.ops.reshape(x.val, list(w.shape(out))) if x.type.shape != out.shape else x.val


@emits("aten.permute.default")
def _permute(w: Writer, out: TensorType, x: Operand, dims: list[int]) -> Any:
    order = [dim % x.rank for dim in dims]
    return w.ops.permute(x.val, order) if order != list(range(x.rank)) else x.val


@emits("aten.transpose.int")
def _transpose(w: Writer, out: TensorType, x: Operand, first: int, second: int) -> Any:
    order = list(range(x.rank))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permute(w, out, x, order)


@emits("aten.t.default")
def _t(w: Writer, out: TensorType, x: Operand) -> Any:
    return _permute(w, out, x, list(range(x.rank))[::-1])


@emits("aten.unsqueeze.default")
def _unsqueeze(w: Writer, out: TensorType, x: Operand, dim: int) -> Any:
    return w.ops.broadcast(x.val, [place == dim % (x.rank + 1) for place in range(x.rank + 1)])


@emits("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _squeeze(w: Writer, out: TensorType, x: Operand, dims: Any = None) -> Any:
    gone = [
        dim
        for dim in dims_of(range(x.rank) if dims is None else dims, x.rank)
        if dims != [] and x.rank
    ]
    gone = [dim for dim in gone if x.shape[dim] == 1]
    return w.ops.squeeze(x.val, gone) if gone else x.val


@emits("aten.expand.default")
def _expand(w: Writer, out: TensorType, x: Operand, shape: Any, *, implicit: bool = False) -> Any:
    return w.value(x, x.dtype, out)


def _span(start: Any, end: Any, size: Any) -> tuple[Any, Any]:
    """The start and end of a slice, as `slice.indices` computes them for numbers."""
    begin = 0 if start is None else _place(start, size)
    return begin, (
        size if end is None or (isinstance(end, int) and end >= sys.maxsize) else _place(end, size)
    )


def _place(index: Any, size: Any) -> Any:
    index = index + size if index < 0 else index
    return 0 if index < 0 else size if index > size else index


def _part(w: Writer, x: Operand, dim: int, start: int, end: int) -> Any:
    """The elements from start to end of one dim."""
    starts, ends = [0] * x.rank, list(x.shape)
    starts[dim], ends[dim] = start, end
    return w.ops.slice(x.val, starts, ends) if (start, end) != (0, x.shape[dim]) else x.val


@emits("aten.slice.Tensor")
def _slice(
    w: Writer,
    out: TensorType,
    x: Operand,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if step != 1:
        raise Refused("nvFuser slices in steps of one")
    begin, stop = _span(start, end, x.shape[dim])
    return _part(w, x, dim % x.rank, begin, stop)


@emits("aten.select.int")
def _select(w: Writer, out: TensorType, x: Operand, dim: int, index: int) -> Any:
    dim, index = dim % x.rank, _place(index, x.shape[dim])
    if not isinstance(index, int):
        return w.ops.select(x.val, index, dim)
    return w.ops.squeeze(_part(w, x, dim, index, index + 1), [dim])


def _cut(w: Writer, x: Operand, dim: int, lengths: list[int]) -> list[Any]:
    ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    return [
        _part(w, x, dim % x.rank, end - length, end)
        for end, length in zip(ends, lengths, strict=True)
    ]


@emits("aten.split.Tensor", "aten.split_with_sizes.default")
def _split(w: Writer, out: Any, x: Operand, lengths: Any, dim: int = 0) -> Any:
    types = out if isinstance(out, tuple) else (out,)
    parts = _cut(w, x, dim, [w.shape(type)[dim] for type in types])
    return parts if isinstance(out, tuple) else parts[0]


@emits("aten.unbind.int")
def _unbind(w: Writer, out: Any, x: Operand, dim: int = 0) -> Any:
    dim %= x.rank
    count = len(out) if isinstance(out, tuple) else 1
    parts = [w.ops.squeeze(part, [dim]) for part in _cut(w, x, dim, [1] * count)]
    return parts if isinstance(out, tuple) else parts[0]


@emits("aten.cat.default")
def _cat(w: Writer, out: TensorType, tensors: list[Operand], dim: int = 0) -> Any:
    rank = len(out.shape)
    if any(x.rank != rank for x in tensors):
        raise Refused("with a tensor of other rank, which PyTorch leaves out")
    vals = [w.value(x, out.dtype) for x in tensors]
    return w.ops.cat(vals, dim % rank) if len(vals) > 1 else w.ops.set(vals[0])


@emits("aten.stack.default")
def _stack(w: Writer, out: TensorType, tensors: list[Operand], dim: int = 0) -> Any:
    rank = len(out.shape)
    flags = [place == dim % rank for place in range(rank)]
    vals = [w.ops.broadcast(w.value(x, out.dtype), flags) for x in tensors]
    return w.ops.cat(vals, dim % rank) if len(vals) > 1 else vals[0]


def _padded(
    w: Writer, val: Any, rank: int, around: dict[int, tuple[int, int]], value: Number
) -> Any:
    """Elements put around a tensor: so many before and after, by dim. nvFuser takes the last dim
    first.
    """
    widths = [width for dim in reversed(range(rank)) for width in around.get(dim, (0, 0))]
    if any(width < 0 for width in widths):
        raise Refused("negative padding")
    return w.ops.pad(val, widths, value)


@emits("aten.constant_pad_nd.default")
def _pad(w: Writer, out: TensorType, x: Operand, pad: list[int], value: Number = 0) -> Any:
    around = {
        x.rank - 1 - place: (pad[2 * place], pad[2 * place + 1]) for place in range(len(pad) // 2)
    }
    return _padded(w, x.val, x.rank, around, number(value, out.dtype))


@emits("aten.slice_backward.default")
def _slice_backward(
    w: Writer,
    out: TensorType,
    grad: Operand,
    sizes: list[int],
    dim: int,
    start: int,
    end: int,
    step: int,
) -> Any:
    if step != 1:
        raise Refused("nvFuser slices in steps of one")
    dim, size = dim % grad.rank, w.shape(out)[dim]
    begin, stop = _span(start, end, size)
    return _padded(w, grad.val, grad.rank, {dim: (begin, size - max(begin, stop))}, 0.0)


@emits("aten.select_backward.default")
def _select_backward(
    w: Writer, out: TensorType, grad: Operand, sizes: list[int], dim: int, index: int
) -> Any:
    rank, size = len(out.shape), w.shape(out)[dim]
    dim, index = dim % rank, _place(index, size)
    val = w.ops.broadcast(grad.val, [place == dim for place in range(rank)])
    return _padded(w, val, rank, {dim: (index, size - index - 1)}, 0.0)


# ---- elements by their numbers ----


def _check_index(index: Operand) -> None:
    if index.dtype not in (torch.int32, torch.int64):
        raise Refused("an index of another dtype")


@emits("aten.index_select.default")
def _index_select(w: Writer, out: TensorType, x: Operand, dim: int, index: Operand) -> Any:
    _check_index(index)
    if index.rank != 1 or x.rank == 0:
        raise Refused("an index that is no list")
    return w.ops.index_select(x.val, index.val, dim % x.rank)


@emits("aten.gather.default")
def _gather(
    w: Writer, out: TensorType, x: Operand, dim: int, index: Operand, *, sparse_grad: bool = False
) -> Any:
    _check_index(index)
    if x.rank == 0 or index.rank != x.rank:
        raise Refused("the ranks differ")
    return w.ops.gather(x.val, index.val, dim % x.rank)


@emits("aten.embedding.default")
def _embedding(
    w: Writer, out: TensorType, weight: Operand, index: Operand, *options: Any, **more: Any
) -> Any:
    _check_index(index)
    if index.rank == 1:
        return w.ops.index_select(weight.val, index.val, 0)
    rows = w.ops.index_select(weight.val, w.ops.reshape(index.val, [math.prod(index.shape)]), 0)
    return w.ops.reshape(rows, list(w.shape(out)))


# ---- from nothing ----


def _filled(w: Writer, out: TensorType, value: Number) -> Any:
    dtype = computed_in(out.dtype)
    return w.ops.full(list(w.shape(out)), number(value, dtype), w.dtype(dtype))


@emits("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default")
def _zeros(w: Writer, out: TensorType, *args: Any, **options: Any) -> Any:
    return _filled(w, out, 0)


@emits("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def _ones(w: Writer, out: TensorType, *args: Any, **options: Any) -> Any:
    return _filled(w, out, 1)


@emits("aten.full.default", "aten.full_like.default", "aten.new_full.default", "aten.fill.Scalar")
def _full(w: Writer, out: TensorType, *args: Any, **options: Any) -> Any:
    value = args[-1]  # after a shape, a tensor, or both
    if not isinstance(value, Number):
        raise Refused("filled with something else than a number")
    return _filled(w, out, value)


@emits("aten.scalar_tensor.default")
def _scalar_tensor(w: Writer, out: TensorType, value: Number, **options: Any) -> Any:
    return _filled(w, out, value)


@emits("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(w: Writer, out: TensorType, *bounds: Number, **options: Any) -> Any:
    start, step = (0 if len(bounds) == 1 else bounds[0]), (bounds[2] if len(bounds) == 3 else 1)
    if (
        out.dtype not in (torch.int32, torch.int64)
        or not isinstance(start, int | torch.SymInt)
        or not isinstance(step, int)
    ):
        raise Refused("nvFuser counts in integers as PyTorch does")
    return w.ops.iota(w.shape(out)[0], start, step, w.dtype(out.dtype))
