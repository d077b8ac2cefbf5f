"""Attention in Triton: its result, gradients, tangents and second derivatives.

One program takes a block of queries over all keys (`_rows_kernel`, `_queries_kernel`), or a block
of keys over all queries (`_keys_kernel`). Weights are computed again from the log-sum-exp of each
row, so memory is linear in the length. The formulas are those of
`derived/quirks/attention_orders.py`; a tangent that is None is zero.

They have run in Triton's interpreter. Their blocks are not tuned.

Source: T. Dao, "FlashAttention-2", 2023; the tangent beside the running maximum follows from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_fn.executors.triton.kernels import kernel, launched, tl, triton

LARGEST = 256
"""The largest size of a head."""


@kernel
def _tile(base, rows, columns, length, size):  # type: ignore[no-untyped-def]
    """Rows of a matrix, zero outside of it."""
    inside = (rows[:, None] < length) & (columns[None, :] < size)
    return tl.load(base + rows[:, None] * size + columns[None, :], mask=inside, other=0.0)


@kernel
def _dot(a, b, ACC: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=ACC)


@kernel
def _end(length, M: tl.constexpr, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of keys that a block of queries sees."""
    end = length
    if CAUSAL:
        end = tl.minimum(length, (tl.program_id(0) + 1) * M)
    return end


@kernel
def _pushed(q, k, qt, kt, factor, ACC: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tangents of the scores of a block."""
    found = _dot(qt, tl.trans(k), ACC, PRECISION) + _dot(q, tl.trans(kt), ACC, PRECISION)
    return found * factor


@kernel
def _pair_of_tiles(a, b, rows, columns, others, length, size, width):  # type: ignore[no-untyped-def]
    """Keys and values, or queries and cotangents."""
    return _tile(a, rows, columns, length, size), _tile(b, rows, others, length, width)


@kernel
def _numbers(a, b, rows, length, other: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two numbers for each row; those of the first are `other` outside."""
    inside = rows < length
    return tl.load(a + rows, mask=inside, other=other), tl.load(b + rows, mask=inside, other=0.0)


@kernel
def _scores(q, k, masks, rows, keys, queries, length, along_rows, along_keys, factor, CAUSAL: tl.constexpr, MASK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """The scores of a block, -inf for pairs that are hidden or outside."""
    scores = _dot(q, tl.trans(k), ACC, PRECISION) * factor
    inside = (rows[:, None] < queries) & (keys[None, :] < length)
    seen = inside
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None])
    if MASK != 0:
        at = masks + rows[:, None] * along_rows + keys[None, :] * along_keys
        if MASK == 1:
            seen = seen & (tl.load(at, mask=inside, other=0) != 0)
        else:
            scores += tl.load(at, mask=inside, other=0.0).to(ACC)
    return tl.where(seen, scores, float("-inf"))


@kernel
def _rows_kernel(q, k, v, qt, kt, vt, masks, out, out_t, sums, means, queries, length, size, width, heads, shared, along_batch, along_heads, along_rows, along_keys, factor, TANGENT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """Before: queries and tangents [batch * heads, queries, size], keys and values [batch * heads /
    shared, length, size or width]. After: the result, its tangent, and of each row the log-sum-exp
    of its scores and the mean of their tangents.
    """
    head = tl.program_id(1).to(tl.int64)
    of_keys = head // shared
    masks += (head // heads) * along_batch + (head % heads) * along_heads
    k, v = k + of_keys * length * size, v + of_keys * length * width
    kt, vt = kt + of_keys * length * size, vt + of_keys * length * width
    rows = tl.program_id(0) * M + tl.arange(0, M)
    sizes, widths = tl.arange(0, D), tl.arange(0, W)
    mine = _tile(q + head * queries * size, rows, sizes, queries, size)
    moving = mine
    if TANGENT:
        moving = _tile(qt + head * queries * size, rows, sizes, queries, size)
    top = tl.full([M], float("-inf"), dtype=ACC)
    total = tl.zeros([M], dtype=ACC)
    mean = tl.zeros([M], dtype=ACC)
    result = tl.zeros([M, W], dtype=ACC)
    result_t = tl.zeros([M, W], dtype=ACC)
    for start in range(0, _end(length, M, CAUSAL), N):
        keys = start + tl.arange(0, N)
        key, value = _pair_of_tiles(k, v, keys, sizes, widths, length, size, width)
        scores = _scores(mine, key, masks, rows, keys, queries, length, along_rows, along_keys, factor, CAUSAL, MASK, ACC, PRECISION)  # noqa: E501  # fmt: skip
        new = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key
        decay = tl.exp(top - safe)
        weights = tl.exp(scores - safe[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        result = result * decay[:, None] + _dot(weights.to(value.dtype), value, ACC, PRECISION)
        if TANGENT:
            key_t, value_t = _pair_of_tiles(kt, vt, keys, sizes, widths, length, size, width)
            weighted = weights * _pushed(mine, key, moving, key_t, factor, ACC, PRECISION)
            mean = mean * decay + tl.sum(weighted, axis=1)
            result_t = result_t * decay[:, None] + _dot(
                weighted.to(value.dtype), value, ACC, PRECISION
            )
            result_t += _dot(weights.to(value.dtype), value_t, ACC, PRECISION)
        top = new
    of = head * queries
    _write_rows(result, result_t, top, total, mean, out + of * width, out_t + of * width, sums + of, means + of, rows, widths, queries, width, TANGENT)  # noqa: E501  # fmt: skip


@kernel
def _write_rows(result, result_t, top, total, mean, out, out_t, sums, means, rows, widths, queries, width, TANGENT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """Divide sums by the total of the weights; a row that sees no key is zero, and its log-sum-exp
    makes every weight zero.
    """
    some = tl.where(total == 0.0, 1.0, total)
    result = result / some[:, None]
    inside = (rows[:, None] < queries) & (widths[None, :] < width)
    at = rows[:, None] * width + widths[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    log = tl.where(top == float("-inf"), 0.0, top) + tl.log(some)
    tl.store(sums + rows, tl.where(total == 0.0, float("inf"), log), mask=rows < queries)
    if TANGENT:
        mean = mean / some
        result_t = result_t / some[:, None] - mean[:, None] * result
        tl.store(out_t + at, result_t.to(out_t.dtype.element_ty), mask=inside)
        tl.store(means + rows, mean, mask=rows < queries)


@kernel
def _pair(q, k, v, g, qt, kt, vt, gt, scores, log, mean, dot, dot_t, factor, TANGENT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """The weights of a block and the cotangents of its scores; the tangents of both."""
    weights = tl.exp(scores - log[:, None])
    centred = _dot(g, tl.trans(v), ACC, PRECISION) - dot[:, None]
    pulled = weights * centred
    weights_t, pulled_t = weights, pulled
    if TANGENT:
        pushed = _pushed(q, k, qt, kt, factor, ACC, PRECISION)
        weights_t = weights * (pushed - mean[:, None])
        outer_t = _dot(gt, tl.trans(v), ACC, PRECISION) + _dot(g, tl.trans(vt), ACC, PRECISION)
        pulled_t = weights_t * centred + weights * (outer_t - dot_t[:, None])
    return weights, pulled, weights_t, pulled_t


@kernel
def _queries_kernel(q, k, v, g, qt, kt, vt, gt, masks, sums, means, dots, dots_t, out, queries, length, size, width, heads, shared, along_batch, along_heads, along_rows, along_keys, factor, TANGENT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """After: the gradient of a block of queries, or the tangent of that."""
    head = tl.program_id(1).to(tl.int64)
    of_keys = head // shared
    masks += (head // heads) * along_batch + (head % heads) * along_heads
    k, v = k + of_keys * length * size, v + of_keys * length * width
    kt, vt = kt + of_keys * length * size, vt + of_keys * length * width
    rows = tl.program_id(0) * M + tl.arange(0, M)
    sizes, widths = tl.arange(0, D), tl.arange(0, W)
    at, of = head * queries * size, head * queries * width
    mine, grad = _pair_of_tiles(q + at, g + of, rows, sizes, widths, queries, size, width)
    log, dot = _numbers(sums + head * queries, dots + head * queries, rows, queries, float("inf"))
    moving, grad_t, mean, dot_t = mine, grad, dot, dot
    if TANGENT:
        moving, grad_t = _pair_of_tiles(qt + at, gt + of, rows, sizes, widths, queries, size, width)
        mean, dot_t = _numbers(means + head * queries, dots_t + head * queries, rows, queries, 0.0)
    total = tl.zeros([M, D], dtype=ACC)
    for start in range(0, _end(length, M, CAUSAL), N):
        keys = start + tl.arange(0, N)
        key, value = _pair_of_tiles(k, v, keys, sizes, widths, length, size, width)
        key_t, value_t = key, value
        if TANGENT:
            key_t, value_t = _pair_of_tiles(kt, vt, keys, sizes, widths, length, size, width)
        scores = _scores(mine, key, masks, rows, keys, queries, length, along_rows, along_keys, factor, CAUSAL, MASK, ACC, PRECISION)  # noqa: E501  # fmt: skip
        _, pulled, _, pulled_t = _pair(mine, key, value, grad, moving, key_t, value_t, grad_t, scores, log, mean, dot, dot_t, factor, TANGENT, ACC, PRECISION)  # noqa: E501  # fmt: skip
        total += _dot(pulled_t.to(key.dtype), key, ACC, PRECISION)
        if TANGENT:
            total += _dot(pulled.to(key.dtype), key_t, ACC, PRECISION)
    at = head * queries * size + rows[:, None] * size + sizes[None, :]
    inside = (rows[:, None] < queries) & (sizes[None, :] < size)
    tl.store(out + at, (total * factor).to(out.dtype.element_ty), mask=inside)


@kernel
def _keys_kernel(q, k, v, g, qt, kt, vt, gt, masks, sums, means, dots, dots_t, out, out_v, queries, length, size, width, heads, shared, along_batch, along_heads, along_rows, along_keys, factor, TANGENT: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: E501  # fmt: skip
    """After: the gradients of a block of keys and values, summed over the heads of the queries that
    share them, or the tangents of these.
    """
    of_keys = tl.program_id(1).to(tl.int64)
    k, v = k + of_keys * length * size, v + of_keys * length * width
    kt, vt = kt + of_keys * length * size, vt + of_keys * length * width
    keys = tl.program_id(0) * N + tl.arange(0, N)
    sizes, widths = tl.arange(0, D), tl.arange(0, W)
    key, value = _pair_of_tiles(k, v, keys, sizes, widths, length, size, width)
    key_t, value_t = key, value
    if TANGENT:
        key_t, value_t = _pair_of_tiles(kt, vt, keys, sizes, widths, length, size, width)
    total = tl.zeros([N, D], dtype=ACC)
    total_v = tl.zeros([N, W], dtype=ACC)
    first = 0
    if CAUSAL:
        first = (tl.program_id(0) * N) // M * M  # earlier queries see none of these keys
    for step in range(shared):
        head = of_keys * shared + step
        mask = masks + (head // heads) * along_batch + (head % heads) * along_heads
        at, of, by = head * queries * size, head * queries * width, head * queries
        for start in range(first, queries, M):
            rows = start + tl.arange(0, M)
            mine, grad = _pair_of_tiles(q + at, g + of, rows, sizes, widths, queries, size, width)
            log, dot = _numbers(sums + by, dots + by, rows, queries, float("inf"))
            moving, grad_t, mean, dot_t = mine, grad, dot, dot
            if TANGENT:
                moving, grad_t = _pair_of_tiles(qt + at, gt + of, rows, sizes, widths, queries, size, width)  # noqa: E501  # fmt: skip
                mean, dot_t = _numbers(means + by, dots_t + by, rows, queries, 0.0)
            scores = _scores(mine, key, mask, rows, keys, queries, length, along_rows, along_keys, factor, CAUSAL, MASK, ACC, PRECISION)  # noqa: E501  # fmt: skip
            weights, pulled, weights_t, pulled_t = _pair(mine, key, value, grad, moving, key_t, value_t, grad_t, scores, log, mean, dot, dot_t, factor, TANGENT, ACC, PRECISION)  # noqa: E501  # fmt: skip
            total += _dot(tl.trans(pulled_t).to(mine.dtype), mine, ACC, PRECISION)
            total_v += _dot(tl.trans(weights_t).to(grad.dtype), grad, ACC, PRECISION)
            if TANGENT:
                total += _dot(tl.trans(pulled).to(mine.dtype), moving, ACC, PRECISION)
                total_v += _dot(tl.trans(weights).to(grad.dtype), grad_t, ACC, PRECISION)
    inside = keys[:, None] < length
    at = of_keys * length * size + keys[:, None] * size + sizes[None, :]
    tl.store(out + at, (total * factor).to(out.dtype.element_ty), mask=inside & (sizes[None, :] < size))  # noqa: E501  # fmt: skip
    at = of_keys * length * width + keys[:, None] * width + widths[None, :]
    tl.store(out_v + at, total_v.to(out_v.dtype.element_ty), mask=inside & (widths[None, :] < width))  # noqa: E501  # fmt: skip


class _Sizes(NamedTuple):
    """The arguments that all kernels share: numbers, then constants."""

    numbers: tuple[Any, ...]
    constants: dict[str, Any]


def _sizes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> _Sizes:  # noqa: E501  # fmt: skip
    (batch, heads, queries, size), length, width = q.shape, k.shape[2], v.shape[3]
    strides = (0, 0, 0, 0)
    if mask is not None:
        strides = mask.expand(batch, heads, queries, length).stride()
    factor = size**-0.5 if scale is None else scale
    row = max(size, width, 16) * q.element_size()  # tiles of both have to fit in shared memory
    block = 64 if row <= 128 else 32 if row <= 512 else 16
    wide = q.dtype is torch.float64
    constants = {
        "CAUSAL": is_causal,
        "MASK": 0 if mask is None else 1 if mask.dtype is torch.bool else 2,
        "ACC": tl.float64 if wide else tl.float32,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "M": block,
        "N": block,
        "D": max(16, triton.next_power_of_2(size)),
        "W": max(16, triton.next_power_of_2(width)),
        "num_stages": 1,
    }
    numbers = queries, length, size, width, heads, heads // k.shape[1], *strides, factor
    return _Sizes(numbers, constants)


def _plain(*tensors: Tensor) -> list[Tensor]:
    return [one.contiguous() for one in tensors]


def _moving(of: Tensor, tangent: Tensor | None) -> Tensor:
    return torch.zeros_like(of) if tangent is None else tangent


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    tangents: tuple[Tensor | None, ...] | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, its tangent, and of each query the log-sum-exp of the scores and the mean of
    their tangents. Without tangents the second and the last have no values.
    """
    sizes = _sizes(q, k, v, mask, is_causal, scale)
    given = (q, k, v)
    moved = map(_moving, given, tangents) if tangents is not None else given
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    out_t = torch.empty_like(out) if tangents is not None else out
    sums = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    means = torch.empty_like(sums)
    tensors = (*_plain(q, k, v, *moved), q if mask is None else mask, out, out_t, sums, means)
    grid = triton.cdiv(q.shape[2], sizes.constants["M"]), q.shape[0] * q.shape[1]
    launched(
        _rows_kernel,
        grid,
        *tensors,
        *sizes.numbers,
        **sizes.constants,
        TANGENT=tangents is not None,
    )
    return out, out_t, sums, means


def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, qt: Any, kt: Any, vt: Any, is_causal: bool, scale: Any  # noqa: E501
) -> Tensor:  # fmt: skip
    """The tangent of attention, by one kernel."""
    return attend(q, k, v, mask, (qt, kt, vt), is_causal, scale)[1]


def attention_pullback(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, scale: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, by three kernels."""
    return _pulled(grad, (q, k, v), mask, None, None, is_causal, scale)


def attention_pullback_tangent(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, gt: Any, qt: Any, kt: Any, vt: Any, is_causal: bool, scale: Any  # noqa: E501
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The tangents of the gradients, by three kernels."""
    return _pulled(grad, (q, k, v), mask, (qt, kt, vt), _moving(grad, gt), is_causal, scale)


def _pulled(
    grad: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    tangents: tuple[Tensor | None, ...] | None,
    grad_t: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    result, result_t, sums, means = attend(*given, mask, tangents, is_causal, scale)
    wide = sums.dtype
    dots = dots_t = (grad.to(wide) * result.to(wide)).sum(-1)
    if grad_t is not None:
        dots_t = (grad_t.to(wide) * result.to(wide) + grad.to(wide) * result_t.to(wide)).sum(-1)
    q, k, v = given
    sizes = _sizes(q, k, v, mask, is_causal, scale)
    moved = tuple(map(_moving, given, tangents)) if tangents is not None else given
    tensors = _plain(q, k, v, grad, *moved, grad if grad_t is None else grad_t)
    saved = (q if mask is None else mask, sums, means, dots, dots_t)
    found = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in given]
    options = {**sizes.constants, "TANGENT": tangents is not None}
    rows = triton.cdiv(q.shape[2], options["M"]), q.shape[0] * q.shape[1]
    launched(_queries_kernel, rows, *tensors, *saved, found[0], *sizes.numbers, **options)
    columns = triton.cdiv(k.shape[2], options["N"]), k.shape[0] * k.shape[1]
    launched(_keys_kernel, columns, *tensors, *saved, *found[1:], *sizes.numbers, **options)
    return found[0], found[1], found[2]
