"""Quantisation schemes, and what they share.

A scheme is a pair of traceable functions with a promise on the error. Codes lie along dim 0 of a
weight, the output channels of a linear layer; all other dims are flattened. Sources: LLM.int8()
(arXiv:2208.07339), GPTQ's group-wise int4 (arXiv:2210.17323), QLoRA's nf4 with double quantisation
(arXiv:2305.14314), FP8 formats (arXiv:2209.05433).

A linear layer on codes is a `@composite` of the scheme's, whose body decodes and multiplies. That
is what it means; an executor may have a kernel for it (`thunder_fn.executors.quantized.kernels`).

In fp16 scales are applied to weights, because sums of raw codes overflow. The layer's body is a
`checkpoint`, so its backward decodes again and the forward stays the call that kernels know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

from thunder_fn.capture import named_composite
from thunder_fn.derived.leaf_autocast import LAYERS, Layer
from thunder_fn.interpreters.vmap import ROWS
from thunder_fn.structured.checkpoint import checkpoint

Parts = dict[str, torch.Tensor]
Shape = tuple[int, ...]
Bias = torch.Tensor | None
F = TypeVar("F", bound=Callable[..., Any])
NAMESPACE = "quantized"
"""The namespace of composites that work on codes. They bring the executors that have kernels for
them.
"""
INPUT_SCALE = "input_scale"
"""The part that has the step of the activations that a weight is multiplied with: it comes from
samples, not from the weight.
"""


@dataclass(frozen=True)
class Scheme:
    """The form in which a floating weight is stored.

    Law: ``(decode(encode(w)) - w).abs() <= bound(w)``, element by element, where the bound is
        finite. NaN and infinities are decoded to values that are not finite.

    Args:
        name: names the calls on quantised weights in traces, such as `int8_linear`.
        encode: `encode(w)` gives the parts by name. Traceable.
        decode: `decode(parts, shape, dtype)` gives the weight. Traceable.
        bound: `bound(w)` gives the greatest error of each element, in w's shape.
        linear: `linear(x, parts, bias, shape)` in place of decoding and multiplying; differentiable
            in x.
        embedding: `embedding(indices, parts, dtype)` in place of decoding and looking up.
        bits: a weight takes, its share of scales and the like included; None where nothing is
            promised.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> half = tfn.parameters.Scheme(
        ...     "half",
        ...     encode=lambda w: {"half": w.half()},
        ...     decode=lambda parts, shape, dtype: parts["half"].to(dtype),
        ...     bound=lambda w: w.abs() / 1024 + 1e-7,
        ... )
        >>> tfn.quantize(lambda params: params["w"].sum(), half).prepare({"w": torch.ones(2, 3)})
        Prepared(w.half: f16[2, 3])
    """

    name: str
    encode: Callable[[torch.Tensor], Parts]
    decode: Callable[[Parts, Shape, torch.dtype], torch.Tensor]
    bound: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, Parts, Bias, Shape], torch.Tensor] | None = field(default=None)
    embedding: Callable[[torch.Tensor, Parts, torch.dtype], torch.Tensor] | None = field(
        default=None
    )
    bits: float | None = None


@dataclass(frozen=True)
class Method:
    """A function with its first argument. Two are equal if both are, which of bound methods is
    true of one object's only.
    """

    function: Callable[..., Any]
    own: Any

    def __call__(self, *args: Any) -> Any:
        return self.function(self.own, *args)


def rows_of(w: torch.Tensor) -> torch.Tensor:
    """The weight with one row for each output channel."""
    return w.reshape(w.shape[0], -1)


def as_column(values: torch.Tensor, rank: int) -> torch.Tensor:
    """One number for each row, to multiply a tensor of this rank with."""
    return values.reshape(-1, *(1,) * (rank - 1))


def scales_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Steps that map [-amax, amax] onto [-largest, largest]. Rows of zeros keep a step that is
    not zero. Rows with an infinity have none: NaN, which no code makes a plausible number of.
    """
    steps = torch.clamp(amax.float() / largest, min=torch.finfo(torch.float32).tiny * 1024)
    return torch.where(steps.isinf(), float("nan"), steps)


def scales_in_bfloat16(scales: torch.Tensor) -> torch.Tensor:
    """Steps in the precision in which PyTorch's kernels take them, rounded up. Values out of reach
    are so by less than a quarter of a step, and weights that were decoded have the steps that they
    had.
    """
    bits = (scales * (1 - 2.0**-9)).view(torch.int32)
    return torch.where(
        scales.isnan(), scales, ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)
    ).bfloat16()


def rounding(w: torch.Tensor) -> torch.Tensor:
    """The error that arithmetic in float32 and the cast back to the weight's dtype may add."""
    info = torch.finfo(w.dtype)
    relative = w.abs().float() * (2 * info.eps + 4 * torch.finfo(torch.float32).eps)
    # the steps between numbers next to zero
    return relative + max(info.tiny * info.eps, torch.finfo(torch.float32).tiny)


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoded weights in their dtype; the greatest may be a little too great for it. NaN stays."""
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp(-largest, largest).to(dtype)


def in_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Narrow, like `narrowed`, where numbers of a weight's size may be too great."""
    return narrowed(values, dtype) if dtype == torch.float16 else values.to(dtype)


def padded(flat: torch.Tensor, size: int) -> torch.Tensor:
    """The last dim padded with zeros to a multiple of size, and split into groups of it."""
    short = -flat.shape[-1] % size
    return torch.nn.functional.pad(flat, (0, short)).reshape(*flat.shape[:-1], -1, size)


def flat_size(shape: Shape) -> int:
    """The number of weights in a row."""
    return math.prod(shape[1:])


def plus(y: torch.Tensor, bias: Bias) -> torch.Tensor:
    """Add the bias, where there is one."""
    return y if bias is None else y + bias


def rounded_rows(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of activations in units of a step of their own, and the steps. No gradient flows."""
    flat = x.detach().reshape(-1, x.shape[-1])
    steps = scales_of(flat.abs().amax(1, keepdim=True), largest)
    return flat.float() / steps, steps


def of_codes(f: F) -> F:
    """A function of codes is a composite, `quantized.nf4_weights` say, which executors know."""
    return cast(F, named_composite(f, f"{NAMESPACE}.{f.__name__}"))


def on_codes(f: F) -> F:
    """A linear layer on codes, `quantized.int8_linear` say. Its backward decodes the weight
    again: kept from the forward, it would take the memory that its codes do not. Autocast lowers
    its activations, and its bias; a batch of activations is more of them.
    """
    found, name = of_codes(cast(F, checkpoint(f))), f"{NAMESPACE}.{f.__name__}"
    LAYERS[name], ROWS[name] = Layer(found, ("x", "bias")), "x"
    return found
