"""bitsandbytes: nf4 linear layers by the kernels of that package, where it is installed.

    import thunder_fn as tfn
    q = tfn.quantize(tfn.jit(model, executors=["bitsandbytes"]), "nf4")

Its kernel decodes, which is most of the time; on CPUs its product of a row and codes wants them in
bytes of its own.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes, whose nf4 has the same sixteen
values, blocks and bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.functional import linear

from thunder_fn.executors.quantized.kernels import row_count
from thunder_fn.executors.quantized.packages import executor_of, imported, made_when_asked
from thunder_fn.extend import OperatorExecutor
from thunder_fn.interpreters.quantize.four_bits import NF4_BLOCK, nf4_linear, nf4_scales
from thunder_fn.interpreters.quantize.scheme import Bias

PACKAGE = "bitsandbytes"


@cache
def _executor() -> OperatorExecutor:
    imported(PACKAGE)  # the import registers its ops
    executor = executor_of(PACKAGE)
    matmul = executor.register_operator("nf4_matmul", like=nf4_linear, fn=_nf4)
    executor.register_implementation(nf4_linear, matmul, checker=suits)
    return executor


__getattr__ = made_when_asked(_executor)


def suits(x: torch.Tensor, *codes: Any, rows: int, bias: Bias = None) -> bool:
    """Test for whole blocks in each row, and dims that its kernels read in whole vectors."""
    columns = x.shape[-1]
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return columns % 128 == 0 and rows % 32 == 0 and x.dtype in floats and row_count(x) > 0


def _nf4(
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
    amax, packed = nf4_scales(scales, steps, mean), values.reshape(-1, 1)
    w = torch.ops.bitsandbytes.dequantize_4bit(
        packed, amax, NF4_BLOCK, "nf4", [rows, x.shape[-1]], x.dtype
    )
    return linear(x, w, bias)
