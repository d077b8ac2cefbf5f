"""Quantisation schemes: a weight as numbers of few bits, and back.

A scheme is a pair of traceable functions with a promise on the error. Codes lie along dim 0 of a weight, the output
channels of a linear layer; all other dims are flattened. Sources: LLM.int8() (arXiv:2208.07339), GPTQ's group-wise int4
(arXiv:2210.17323), QLoRA's nf4 with double quantisation (arXiv:2305.14314), FP8 formats (arXiv:2209.05433).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from thunder_fn.errors import RewriteError, located

Parts = dict[str, torch.Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """How a floating weight is stored.

    Law: ``(decode(encode(w)) - w).abs() <= bound(w)``, element by element.

    Args:
        name: names the calls on quantised weights in traces, such as `int8_linear`.
        encode: `encode(w)` gives the parts by name. Traceable.
        decode: `decode(parts, shape, dtype)` gives the weight. Traceable.
        bound: `bound(w)` gives the greatest error of each element, in w's shape.
        linear: `linear(x, parts, bias, shape)` in place of decoding and multiplying; differentiable in x.
        embedding: `embedding(indices, parts, dtype)` in place of decoding and looking up.
    """

    name: str
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, Shape, torch.dtype], torch.Tensor]
    bound: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, Parts, torch.Tensor | None, Shape], torch.Tensor] | None = field(default=None)
    embedding: Callable[[torch.Tensor, Parts, torch.dtype], torch.Tensor] | None = field(default=None)


def _rows(w: torch.Tensor) -> torch.Tensor:
    return w.reshape(w.shape[0], -1)


def _column(values: torch.Tensor, rank: int) -> torch.Tensor:
    """One number for each row, to multiply a tensor of this rank with."""
    return values.reshape(-1, *(1,) * (rank - 1))


def _scales(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Steps that map [-amax, amax] onto [-largest, largest]; rows of zeros keep a step that is not zero."""
    return torch.clamp(amax.float() / largest, min=torch.finfo(torch.float32).tiny * 1024)


def _rounding(w: torch.Tensor) -> torch.Tensor:
    """What arithmetic in float32 and the cast back to the weight's dtype may add."""
    return w.abs().float() * (2 * torch.finfo(w.dtype).eps + 4 * torch.finfo(torch.float32).eps)


# ---- int8 ----


def _int8_scales(w: torch.Tensor) -> torch.Tensor:
    return _scales(_rows(w).abs().amax(1), 127)


def _int8_encode(w: torch.Tensor) -> Parts:
    scales = _int8_scales(w)
    codes = torch.round(w.float() / _column(scales, w.dim())).clamp(-127, 127)
    return {"values": codes.to(torch.int8), "scales": scales}


def _int8_decode(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return (parts["values"].float() * _column(parts["scales"], len(shape))).to(dtype)


def _int8_bound(w: torch.Tensor) -> torch.Tensor:
    return (_column(_int8_scales(w), w.dim()) * 0.5 + _rounding(w)).expand(w.shape)


def _int8_linear(x: torch.Tensor, parts: Parts, bias: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    """The scales are applied to the few results rather than to the many weights."""
    y = torch.matmul(x, parts["values"].to(x.dtype).t()) * parts["scales"].to(x.dtype)
    return y if bias is None else y + bias


def _int8_embedding(indices: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    rows = parts["values"][indices].float()
    return (rows * parts["scales"][indices].unsqueeze(-1)).to(dtype)


def _dynamic_linear(x: torch.Tensor, parts: Parts, bias: torch.Tensor | None, shape: Shape) -> torch.Tensor:
    """An integer matrix product: each row of x has a scale of its own. Gradients are those of the float product."""
    flat = x.reshape(-1, shape[1])
    scales = _scales(flat.detach().abs().amax(1, keepdim=True), 127)
    codes = torch.round(flat.detach().float() / scales).clamp(-127, 127)
    rounded = (codes * scales).to(x.dtype)
    y = torch.matmul(flat + (rounded - flat).detach(), parts["values"].to(x.dtype).t()) * parts["scales"].to(x.dtype)
    y = y.reshape(*x.shape[:-1], shape[0])
    return y if bias is None else y + bias


INT8 = Scheme("int8", _int8_encode, _int8_decode, _int8_bound, _int8_linear, _int8_embedding)
INT8_DYNAMIC = replace(INT8, name="int8_dynamic", linear=_dynamic_linear)


# ---- int4, group-wise ----


def _padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    """The last dim padded with zeros to a multiple of size, and split into groups of it."""
    short = -flat.shape[-1] % size
    return torch.nn.functional.pad(flat, (0, short)).reshape(*flat.shape[:-1], -1, size)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Pairs of numbers below 16 in one byte."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass(frozen=True)
class _Int4:
    group: int

    def ranges(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = _padded(_rows(w).float(), self.group)
        low, high = groups.amin(-1), groups.amax(-1)
        return groups, low, _scales(high - low, 15)

    def encode(self, w: torch.Tensor) -> Parts:
        groups, low, scales = self.ranges(w)
        codes = torch.round((groups - low.unsqueeze(-1)) / scales.unsqueeze(-1)).clamp(0, 15)
        return {"values": _pack(codes), "scales": scales, "zeros": low}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        groups = _unpack(parts["values"]).float() * parts["scales"].unsqueeze(-1) + parts["zeros"].unsqueeze(-1)
        return groups.flatten(1)[:, : math.prod(shape[1:])].reshape(shape).to(dtype)

    def bound(self, w: torch.Tensor) -> torch.Tensor:
        groups, low, scales = self.ranges(w)
        step = scales * 0.5 + low.abs() * 4 * torch.finfo(torch.float32).eps
        each = step.unsqueeze(-1).expand(groups.shape).flatten(1)[:, : math.prod(w.shape[1:])]
        return each.reshape(w.shape) + _rounding(w)


def int4(group: int = 64) -> Scheme:
    """Groups of weights of a row share a step and a zero point; two codes lie in a byte."""
    if group < 2 or group % 2:
        raise RewriteError(f"int4: a group is an even number of weights, given {group}")
    own = _Int4(group)
    return Scheme("int4", own.encode, own.decode, own.bound)


# ---- nf4 with double quantisation ----

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, appendix E)."""
_NF4_STEP = max(b - a for a, b in pairwise(_NF4)) / 2


@dataclass(frozen=True)
class _Nf4:
    block: int = 64
    outer: int = 256

    def blocks(self, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights in blocks, the greatest of each block, and the mean and the steps that those are stored with."""
        blocks = _padded(w.float().reshape(-1), self.block)
        amax = blocks.abs().amax(-1)
        mean = amax.mean()
        steps = _scales(_padded(amax - mean, self.outer).abs().amax(-1), 127)
        return blocks, amax, mean, steps

    def encode(self, w: torch.Tensor) -> Parts:
        blocks, amax, mean, steps = self.blocks(w)
        inner = torch.round(_padded(amax - mean, self.outer) / steps.unsqueeze(-1)).clamp(-127, 127).to(torch.int8)
        table = torch.tensor(_NF4, device=w.device)
        middles = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(blocks / torch.clamp(amax, min=1e-30).unsqueeze(-1), middles)
        return {"values": _pack(codes), "scales": inner.flatten()[: amax.shape[0]], "steps": steps, "mean": mean}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        inner = _padded(parts["scales"].float(), self.outer) * parts["steps"].unsqueeze(-1)
        amax = inner.flatten()[: parts["scales"].shape[0]] + parts["mean"]
        table = torch.tensor(_NF4, device=amax.device)
        blocks = table[_unpack(parts["values"]).int()] * amax.unsqueeze(-1)
        return blocks.flatten()[: math.prod(shape)].reshape(shape).to(dtype)

    def bound(self, w: torch.Tensor) -> torch.Tensor:
        blocks, amax, mean, steps = self.blocks(w)
        off = (steps * 0.5).unsqueeze(-1).expand(-1, self.outer).flatten()[: amax.shape[0]] + mean * 1e-6
        each = (amax * (_NF4_STEP + 1e-6) + off).unsqueeze(-1).expand(blocks.shape)
        return each.flatten()[: w.numel()].reshape(w.shape) + _rounding(w)


_nf4 = _Nf4()
NF4 = Scheme("nf4", _nf4.encode, _nf4.decode, _nf4.bound)


# ---- fp8 ----

_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class _Fp8:
    per_row: bool

    def scales(self, w: torch.Tensor) -> torch.Tensor:
        amax = _rows(w).abs().amax(1) if self.per_row else w.abs().amax().reshape(1)
        return _scales(amax, torch.finfo(_FP8).max)

    def encode(self, w: torch.Tensor) -> Parts:
        scales = self.scales(w)
        return {"values": (w.float() / _column(scales, w.dim())).to(_FP8), "scales": scales}

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return (parts["values"].float() * _column(parts["scales"], len(shape))).to(dtype)

    def bound(self, w: torch.Tensor) -> torch.Tensor:
        """Half a unit in the last of three places; below the smallest normal number, half of 2 ** -9 steps."""
        return w.abs().float() * 2.0**-4 + _column(self.scales(w), w.dim()) * 2.0**-10 + _rounding(w)


def fp8(per_row: bool = True) -> Scheme:
    """Eight-bit floats (e4m3) with one scale for each row, or for the whole weight."""
    own = _Fp8(per_row)
    return Scheme("fp8", own.encode, own.decode, own.bound)


SCHEMES: dict[str, Scheme] = {
    "int8": INT8,
    "int8_dynamic": INT8_DYNAMIC,
    "int4": int4(),
    "nf4": NF4,
    "fp8": fp8(),
    "fp8_tensor": fp8(per_row=False),
}


def scheme_named(scheme: Any) -> Scheme:
    """A scheme by name, or the scheme itself.

    Raises:
        RewriteError: there is no scheme of this name; says which there are.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        near = difflib.get_close_matches(str(scheme), SCHEMES, n=1, cutoff=0.0)[0]
        what = f"quantize: unknown scheme {scheme!r}; did you mean {near!r}?"
        raise RewriteError(located(what, fix=f"There are {', '.join(SCHEMES)}; or pass a `Scheme` of your own."))
    return SCHEMES[scheme]
