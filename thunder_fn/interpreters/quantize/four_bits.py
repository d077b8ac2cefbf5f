"""Schemes of four bits: group-wise integers, and nf4 with double quantisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import linear

from thunder_fn.errors import RewriteError, is_int
from thunder_fn.interpreters.quantize.scheme import (
    Bias,
    Method,
    Parts,
    Scheme,
    Shape,
    flat_size,
    in_dtype,
    narrowed,
    of_codes,
    on_codes,
    padded,
    rounding,
    rows_of,
    scales_in_bfloat16,
    scales_of,
)

# ---- int4, group-wise ----

GROUPS = (256, 128, 64, 32)
"""The group sizes that PyTorch's kernel takes, and ours well."""


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers below 16 in one byte, the first in the lower half."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@of_codes
def int4_weights(
    values: torch.Tensor, scales_and_zeros: torch.Tensor, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """A padded matrix, and the number of columns that are no padding."""
    return in_dtype(_grouped_decode(_unpack(values), scales_and_zeros)[:, :columns], dtype)


@on_codes
def int4_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    bias: Bias = None,
    *,
    columns: int,
) -> torch.Tensor:
    """The weight is decoded."""
    return linear(x, int4_weights(values, scales_and_zeros, columns, x.dtype), bias)


def _grouped_decode(codes: torch.Tensor, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    groups, rows, _ = scales_and_zeros.shape
    scales, zeros = scales_and_zeros.float().transpose(0, 1).unsqueeze(-1).unbind(2)
    return ((codes.reshape(rows, groups, -1).float() - 8) * scales + zeros).flatten(1)


@dataclass(frozen=True)
class _Int4:
    """Codes 0 to 15 stand for `(code - 8) * scale + zero`; scales and zeros are bf16."""

    group: int

    def group_of(self, columns: int) -> int:
        """The group size for rows of this length: what divides them rather than what pads them."""
        choices = (self.group, *(size for size in GROUPS if size < self.group))
        return next(
            (size for size in choices if columns % size == 0),
            min(self.group, columns + columns % 2),
        )

    def ranges(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The weights in groups, [row, group, weight], and for each group the step and the value
        of code 8.
        """
        rows = rows_of(w).float()
        groups = padded(rows, self.group_of(rows.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        zeros = (low + (high - low) * (8 / 15)).bfloat16()
        reach = torch.maximum((high - zeros.float()) / 7, (zeros.float() - low) / 8)
        return groups, scales_in_bfloat16(scales_of(reach, 1)), zeros

    def encode(self, w: torch.Tensor) -> Parts:
        groups, scales, zeros = self.ranges(w)
        codes = (
            torch.round((groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)) + 8
        )
        codes = codes.clamp(0, 15).flatten(1)
        both = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous()
        return {"values": packed_codes(codes), "scales_and_zeros": both}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        both, columns = parts["scales_and_zeros"], flat_size(shape)
        w = int4_weights(parts["values"], both, columns, torch.float32)
        return narrowed(w.reshape(shape), dtype)

    def bound(self, w: torch.Tensor) -> torch.Tensor:
        groups, scales, zeros = self.ranges(w)
        step = scales.float() * 0.5 + zeros.float().abs() * 4 * torch.finfo(torch.float32).eps
        each = step.unsqueeze(-1).expand(groups.shape).flatten(1)[:, : flat_size(tuple(w.shape))]
        return each.reshape(w.shape) + rounding(w)

    def linear(self, x: torch.Tensor, parts: Parts, bias: Bias, shape: Shape) -> torch.Tensor:
        return int4_linear(x, parts["values"], parts["scales_and_zeros"], bias, columns=shape[1])


def int4(group: int = 256) -> Scheme:
    """Groups of weights of a row share a step and a zero point, both bf16; two codes lie in a byte.

    Rows that the group does not divide have groups of 128, 64 or 32 where those do.

    Law: as for every `Scheme`.

    Raises:
        RewriteError: the group is no even number.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.quantize(lambda params: params["w"].sum(), tfn.parameters.int4(group=32))
        >>> q.prepare({"w": torch.ones(2, 32)})
        Prepared(w.values: u8[2, 16], w.scales_and_zeros: bf16[1, 2, 2])
    """
    if not is_int(group, 2) or group % 2:
        raise RewriteError(f"int4: a group is an even number of weights, given {group!r}")
    own = _Int4(group)
    encode, decode, bound, call = (
        Method(f, own) for f in (_Int4.encode, _Int4.decode, _Int4.bound, _Int4.linear)
    )
    return Scheme("int4", encode, decode, bound, call, bits=4 + 32 / group)


# ---- nf4 with double quantisation ----

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
"""Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix
E).
"""
_STEP = max(b - a for a, b in pairwise(NF4_VALUES)) / 2
NF4_BLOCK, _OUTER = 64, 256


def _blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights in blocks, the greatest of each block, and the mean and the steps that those are
    stored with.
    """
    blocks = padded(w.float().reshape(-1), NF4_BLOCK)
    amax = blocks.abs().amax(-1)
    mean = amax.mean()
    return blocks, amax, mean, scales_of(padded(amax - mean, _OUTER).abs().amax(-1), 127)


def _nf4_encode(w: torch.Tensor) -> Parts:
    """Two codes lie in a byte, the first in the upper half, as bitsandbytes has it."""
    blocks, amax, mean, steps = _blocks(w)
    inner = (
        torch.round(padded(amax - mean, _OUTER) / steps.unsqueeze(-1))
        .clamp(-127, 127)
        .to(torch.int8)
    )
    table = torch.tensor(NF4_VALUES, dtype=torch.float32, device=w.device)
    codes = torch.bucketize(
        blocks / torch.clamp(amax, min=1e-30).unsqueeze(-1), (table[1:] + table[:-1]) / 2
    )
    swapped = codes.reshape(*codes.shape[:-1], -1, 2).flip(-1).flatten(-2)
    return {
        "values": packed_codes(swapped),
        "scales": inner.flatten()[: amax.shape[0]],
        "steps": steps,
        "mean": mean,
    }


def nf4_scales(scales: torch.Tensor, steps: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The greatest weight of each block, from its eight bits."""
    return (padded(scales.float(), _OUTER) * steps.unsqueeze(-1)).flatten()[
        : scales.shape[0]
    ] + mean


@of_codes
def nf4_weights(
    values: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
    count: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode so many weights, one after the other. The table has the sixteen values; both codes of
    a byte are looked up at once, as one number of twice the width.
    """
    amax = nf4_scales(scales, steps, mean)
    found = dtype if dtype == torch.bfloat16 else torch.float32
    seen, twice = table.to(found), torch.int32 if found == torch.bfloat16 else torch.int64
    pairs = torch.stack((seen.repeat_interleave(16), seen.repeat(16)), -1).view(twice).flatten()
    units = (
        pairs.index_select(0, values.flatten().int()).view(found).reshape(amax.shape[0], NF4_BLOCK)
    )
    return in_dtype((units * amax.to(found).unsqueeze(-1)).flatten()[:count], dtype)


def _nf4_decode(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    table = torch.tensor(NF4_VALUES, dtype=torch.float32, device=parts["mean"].device)
    own = (parts["values"], parts["scales"], parts["steps"], parts["mean"], table)
    return narrowed(nf4_weights(*own, math.prod(shape), torch.float32).reshape(shape), dtype)


def _nf4_bound(w: torch.Tensor) -> torch.Tensor:
    blocks, amax, mean, steps = _blocks(w)
    off = (steps * 0.5).unsqueeze(-1).expand(-1, _OUTER).flatten()[: amax.shape[0]] + mean * 1e-6
    each = (amax * (_STEP + 1e-6) + off).unsqueeze(-1).expand(blocks.shape)
    return each.flatten()[: w.numel()].reshape(w.shape) + rounding(w)


@on_codes
def nf4_linear(  # noqa: PLR0913 - a part of the answer each
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    steps: torch.Tensor,
    mean: torch.Tensor,
    table: torch.Tensor,
    bias: Bias = None,
    *,
    rows: int,
) -> torch.Tensor:
    """The weight is decoded; the table has the sixteen values."""
    columns = x.shape[-1]
    w = nf4_weights(values, scales, steps, mean, table, rows * columns, x.dtype)
    return linear(x, w.reshape(rows, columns), bias)


def _nf4_call(x: torch.Tensor, parts: Parts, bias: Bias, shape: Shape) -> torch.Tensor:
    table = torch.tensor(NF4_VALUES, dtype=torch.float32, device=x.device)
    scales, steps, mean = parts["scales"], parts["steps"], parts["mean"]
    return nf4_linear(x, parts["values"], scales, steps, mean, table, bias, rows=shape[0])


NF4 = Scheme(
    "nf4",
    _nf4_encode,
    _nf4_decode,
    _nf4_bound,
    _nf4_call,
    bits=4 + 8 / NF4_BLOCK + 32 / NF4_BLOCK / _OUTER,
)
