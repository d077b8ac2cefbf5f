"""Schemes of eight bits: integers and e4m3 floats, weights alone or activations too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import linear

from thunder_fn.interpreters.quantize.scheme import (
    INPUT_SCALE,
    Bias,
    Method,
    Parts,
    Scheme,
    Shape,
    as_column,
    in_dtype,
    narrowed,
    of_codes,
    on_codes,
    plus,
    rounded_rows,
    rounding,
    rows_of,
    scales_in_bfloat16,
    scales_of,
)

FP8 = torch.float8_e4m3fn
FP8_LARGEST = torch.finfo(FP8).max
_BITS = {
    torch.float16: (torch.int16, 7, 2.0**8),
    torch.bfloat16: (torch.int16, 4, 2.0**120),
    torch.float32: (torch.int32, 20, 2.0**120),
}
"""The place of an e4m3 float's seven bits in a wider float, as an integer, and the factor for the
other bias of exponents.
"""


def floats_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes as floats. On CPUs PyTorch converts e4m3 one by one; shifting the bits to their places
    takes a fifth of that.

    Law: ``floats_of(values, dtype)`` is ``values.to(dtype)``, but for NaN, which codes of finite
        weights are not.
    """
    if values.dtype != FP8 or values.device.type != "cpu" or dtype not in _BITS:
        return values.to(dtype)
    integer, shift, factor = _BITS[dtype]
    width = torch.iinfo(integer).bits
    between = (1 << width - 1) - (1 << shift + 7)  # the sign is extended over these
    return ((values.view(torch.int8).to(integer) << shift) & ~between).view(dtype) * factor


def rounded_to_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Float32 numbers of at most 448 in size, and NaN, to the nearest that e4m3 has.

    Law: ``rounded_to_fp8(x)`` is ``x.to(FP8).float()``, to the bit but for NaN.
    """
    return torch.where(numbers.isnan(), numbers, floats_of(numbers.to(FP8), torch.float32))


@of_codes
def floats(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a whole weight like `floats_of`; executors may have a kernel."""
    return floats_of(values, dtype)


# ---- int8 ----

INT8_LARGEST = 127


def _int8_scales(w: torch.Tensor) -> torch.Tensor:
    """Round scales of bf16 weights to bf16, as PyTorch's kernel takes them."""
    scales = scales_of(rows_of(w).abs().amax(1), INT8_LARGEST)
    return scales_in_bfloat16(scales) if w.dtype == torch.bfloat16 else scales


def _int8_encode(w: torch.Tensor) -> Parts:
    scales = _int8_scales(w)
    codes = torch.round(w.float() / as_column(scales, w.dim())).clamp(-INT8_LARGEST, INT8_LARGEST)
    return {"values": codes.to(torch.int8), "scales": scales}


def _scaled_decode(parts: Parts, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return narrowed(
        floats(parts["values"], torch.float32) * as_column(parts["scales"], len(shape)), dtype
    )


def _int8_bound(w: torch.Tensor) -> torch.Tensor:
    return (as_column(_int8_scales(w).float(), w.dim()) * 0.5 + rounding(w)).expand(w.shape)


def scaled_product(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: Bias,
    floats: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = floats,
) -> torch.Tensor:
    """The scales are applied to the few results rather than to the many weights. In fp16 they
    are applied to the weights: it ends before sums of codes do, and begins after scales do.
    """
    if x.dtype == torch.float16:
        w = floats(values, torch.float32) * as_column(scales, 2)
        return linear(x, in_dtype(w, x.dtype), bias)
    return plus(torch.matmul(x, floats(values, x.dtype).t()) * scales.to(x.dtype), bias)


@on_codes
def int8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """Codes become floats, and are multiplied."""
    return scaled_product(x, values, scales, bias)


@on_codes
def int8_dynamic_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """An integer matrix product: each row of x has a step of its own. Gradients are those of the
    float product.
    """
    codes, steps = rounded_rows(x, INT8_LARGEST)
    seen = (
        (torch.round(codes).clamp(-INT8_LARGEST, INT8_LARGEST) * steps).to(x.dtype).reshape(x.shape)
    )
    return int8_linear(x + (seen - x).detach(), values, scales, bias)


@on_codes
def int8_static_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    input_scale: torch.Tensor,
    bias: Bias = None,
) -> torch.Tensor:
    """Multiply like `int8_dynamic_linear`, with one step for all activations, known beforehand;
    what is beyond its reach is clipped.
    """
    codes = torch.round(x.detach().float() / input_scale).clamp(-INT8_LARGEST, INT8_LARGEST)
    seen = (codes * input_scale).to(x.dtype)
    return int8_linear(x + (seen - x).detach(), values, scales, bias)


STATIC_LINEAR = "quantized.int8_static_linear"


def _static_encode(w: torch.Tensor) -> Parts:
    return _int8_encode(w) | {
        INPUT_SCALE: torch.full((), float("nan"), dtype=torch.float32, device=w.device)
    }


def _static_call(x: torch.Tensor, parts: Parts, bias: Bias, shape: Shape) -> torch.Tensor:
    return int8_static_linear(x, parts["values"], parts["scales"], parts[INPUT_SCALE], bias)


@dataclass(frozen=True)
class _OnCodes:
    """A scheme's `linear` by a composite of codes and scales."""

    linear: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, parts: Parts, bias: Bias, shape: Shape) -> torch.Tensor:
        return self.linear(x, parts["values"], parts["scales"], bias)


def _scaled_embedding(indices: torch.Tensor, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
    scales = parts["scales"]
    own = scales[indices].unsqueeze(-1) if scales.shape[0] == parts["values"].shape[0] else scales
    return narrowed(floats_of(parts["values"][indices], torch.float32) * own, dtype)


INT8 = Scheme(
    "int8",
    _int8_encode,
    _scaled_decode,
    _int8_bound,
    _OnCodes(int8_linear),
    _scaled_embedding,
    bits=8,
)
INT8_DYNAMIC = replace(INT8, name="int8_dynamic", linear=_OnCodes(int8_dynamic_linear))
INT8_STATIC = replace(INT8, name="int8_static", encode=_static_encode, linear=_static_call)


# ---- fp8 ----


@on_codes
def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """Multiply like `int8_linear`."""
    return scaled_product(x, values, scales, bias)


@on_codes
def fp8_dynamic_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
) -> torch.Tensor:
    """Multiply like `int8_dynamic_linear`, on floats of eight bits."""
    codes, steps = rounded_rows(x, FP8_LARGEST)
    seen = (rounded_to_fp8(codes) * steps).to(x.dtype).reshape(x.shape)
    return fp8_linear(x + (seen - x).detach(), values, scales, bias)


@dataclass(frozen=True)
class _Fp8:
    per_row: bool

    def scales(self, w: torch.Tensor) -> torch.Tensor:
        amax = rows_of(w).abs().amax(1) if self.per_row else w.abs().amax().reshape(1)
        return scales_of(amax, FP8_LARGEST)

    def encode(self, w: torch.Tensor) -> Parts:
        scales = self.scales(w)
        return {"values": (w.float() / as_column(scales, w.dim())).to(FP8), "scales": scales}

    def bound(self, w: torch.Tensor) -> torch.Tensor:
        """Half a unit in the last of three places; below the smallest normal number, half of 2
        ** -9 steps.
        """
        return (
            w.abs().float() * 2.0**-4 + as_column(self.scales(w), w.dim()) * 2.0**-10 + rounding(w)
        )


def fp8(per_row: bool = True, dynamic: bool = False) -> Scheme:
    """Eight-bit floats (e4m3) with one scale for each row, or for the whole weight; with
    `dynamic`, activations too.

    Law: as for every `Scheme`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.quantize(lambda params: params["w"].sum(), tfn.parameters.fp8(per_row=False))
        >>> q.prepare({"w": torch.ones(2, 3)})
        Prepared(w.values: f8_e4m3fn[2, 3], w.scales: f32[1])
    """
    own = _Fp8(per_row)
    name, layer = ("fp8_dynamic", fp8_dynamic_linear) if dynamic else ("fp8", fp8_linear)
    return Scheme(
        name,
        Method(_Fp8.encode, own),
        _scaled_decode,
        Method(_Fp8.bound, own),
        _OnCodes(layer),
        _scaled_embedding,
        bits=8,
    )
