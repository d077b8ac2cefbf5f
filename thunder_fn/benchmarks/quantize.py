"""Linear layers on codes and a Llama-like block: time per token, bytes and error, beside eager and
the library kernels.

Errors are to the float64 result of the original weights, relative to its largest number; eager in
bf16 has one too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case
from thunder_fn.parameters import SCHEMES

aten = torch.ops.aten
TARGET = "no slower than the library kernel; bytes at the scheme's bits + 5 %"


class Block(nn.Module):
    """Attention over a cache of keys and values, and a gated MLP, as a Llama's layer has them,
    for one new token.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, torch.cat((keys, k), 2), torch.cat((values, v), 2))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def run(quick: bool = False) -> Iterator[Result]:
    """Measure every scheme for one token, and some of them in bf16."""
    size = 128 if quick else 2048
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 32) if dtype == torch.bfloat16 else (1,):
            for scheme in SCHEMES:
                yield run_case(_linear(scheme, size, tokens, dtype), quick)
    for scheme in SCHEMES:
        yield run_case(_block(scheme, size // 4, torch.bfloat16), quick)


def bytes_of(module: Any) -> int:
    """The bytes of a module's matrices as they are stored."""
    parts = module.parts() if hasattr(module, "parts") else dict(module.named_parameters())
    return sum(
        part.numel() * part.element_size()
        for name, part in parts.items()
        if "bias" not in name and "norm" not in name
    )


def _case(
    name: str,
    scheme: str,
    module: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    peers: dict[str, Any],
) -> Case:
    ours = tfn.quantize(tfn.jit(module), scheme)
    if any(name.endswith("input_scale") for name in ours.parts()):
        ours.calibrate([inputs])
    exact = module.double()(*(x.double() for x in inputs))
    module.to(inputs[0].dtype)
    off = lambda found: float((found.double() - exact).abs().max() / exact.abs().max())
    weights = sum(part.numel() for part in module.parameters() if part.dim() > 1)
    stored, promised = bytes_of(ours), SCHEMES[scheme].bits or 0
    notes = (
        (
            f"bytes {stored:,}, {8 * stored / weights:.2f} bits a weight (the scheme's:"
            f" {promised:.2f}); eager {bytes_of(module):,}"
        ),
        f"error {off(ours(*inputs)):.1e}, eager {off(module(*inputs)):.1e}",
    )
    both: dict[str, Callable[[], object]] = {
        OURS: lambda: ours(*inputs),
        "eager": lambda: module(*inputs),
    }
    return Case(name, both | peers, calls=2, span=0.003, rounds=15, target=TARGET, notes=notes)


@torch.no_grad()
def _linear(scheme: str, size: int, tokens: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False, dtype=dtype).requires_grad_(False)
    x = torch.randn(tokens, size).to(dtype)
    name = (
        f"quantize: {scheme}, Linear {size} x {size}, {tokens} token{'s' * (tokens > 1)},"
        f" {str(dtype)[6:]}"
    )
    return _case(name, scheme, layer, (x,), _kernels(scheme, layer.weight, x))


@torch.no_grad()
def _block(scheme: str, width: int, dtype: torch.dtype) -> Case:
    torch.manual_seed(0)
    block = Block(width, 8).to(dtype).requires_grad_(False)
    keys, values = (torch.randn(1, 8, 127, width // 8).to(dtype) for _ in range(2))
    x = torch.randn(1, 1, width).to(dtype)
    return _case(
        f"quantize: {scheme}, Llama-like block of width {width}, one token",
        scheme,
        block,
        (x, keys, values),
        {},
    )


# ---- the kernels of libraries, alone ----


def _kernels(scheme: str, w: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The kernels of PyTorch, torchao and bitsandbytes for a scheme; nothing but the kernel, on the
    bytes that it wants.
    """
    parts = SCHEMES[scheme].encode(w)
    found: dict[str, Callable[[], object]] = {}
    if scheme == "int8":
        scales = parts["scales"].to(x.dtype)
        found["aten._weight_int8pack_mm"] = lambda: aten._weight_int8pack_mm(
            x, parts["values"], scales
        )
    if scheme == "int4" and x.dtype == torch.bfloat16:
        both, low, high = parts["scales_and_zeros"], parts["values"] & 15, parts["values"] >> 4
        packed = aten._convert_weight_to_int4pack_for_cpu(
            torch.stack((low, high), -1).flatten(1).int(), 1
        )
        group = w.shape[1] // both.shape[0]
        found["aten._weight_int4pack_mm_for_cpu"] = lambda: aten._weight_int4pack_mm_for_cpu(
            x, packed, group, both
        )
    if scheme == "fp8_dynamic":
        ones, codes = torch.ones(x.shape[0], 1), x.to(torch.float8_e4m3fn)
        scales = parts["scales"].reshape(1, -1)
        found["aten._scaled_mm"] = lambda: aten._scaled_mm(
            codes, parts["values"].t(), ones, scales, out_dtype=x.dtype
        )
    return found | _torchao(scheme, w, x) | _bitsandbytes(scheme, w, x)


def _torchao(scheme: str, w: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("torchao") is None or scheme not in ("int8", "int8_dynamic"):
        return {}
    from torchao.quantization import (  # type: ignore[import-not-found]
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    inner = nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    inner.weight.data.copy_(w)
    layer = nn.Sequential(inner)
    config: Any = (
        Int8WeightOnlyConfig if scheme == "int8" else Int8DynamicActivationInt8WeightConfig
    )
    quantize_(layer, config())
    return {"torchao": torch.no_grad()(lambda: layer(x))}


def _bitsandbytes(scheme: str, w: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("bitsandbytes") is None or scheme != "nf4":
        return {}
    import bitsandbytes as bnb  # type: ignore[import-not-found]

    codes, state = bnb.functional.quantize_4bit(w, quant_type="nf4", blocksize=64)
    return {
        "bitsandbytes": torch.no_grad()(lambda: bnb.matmul_4bit(x, codes.t(), quant_state=state))
    }
