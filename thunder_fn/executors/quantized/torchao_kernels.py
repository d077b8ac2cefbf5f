"""torchao: linear layers of int8 weights and activations by the integer product of that package,
where it is installed.

    import thunder_fn as tfn
    q = tfn.quantize(tfn.jit(model, executors=["torchao"]), "int8_dynamic")

On GPUs its product is a Triton kernel that it tunes (`TORCHAO_AUTOTUNER_ENABLE=1`), on CPUs
PyTorch's, of the kind of integers that the processor multiplies fastest.

Source: https://github.com/pytorch/ao, `torchao.kernel.int_scaled_matmul`.
"""

from __future__ import annotations

from functools import cache

import torch

from thunder_fn.executors.quantized.kernels import int_mm_linear, suits_int_mm
from thunder_fn.executors.quantized.packages import executor_of, imported, made_when_asked
from thunder_fn.extend import OperatorExecutor
from thunder_fn.interpreters.quantize.eight_bits import int8_dynamic_linear
from thunder_fn.interpreters.quantize.scheme import Bias

PACKAGE = "torchao"


@cache
def _executor() -> OperatorExecutor:
    multiply = imported(PACKAGE, "torchao.kernel.intmm").int_scaled_matmul
    executor = executor_of(PACKAGE)

    def linear(
        x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: Bias = None
    ) -> torch.Tensor:
        return int_mm_linear(x, values, scales, bias, multiply)

    operator = executor.register_operator("int8_dynamic", like=int8_dynamic_linear, fn=linear)
    executor.register_implementation(int8_dynamic_linear, operator, checker=suits_int_mm)
    return executor


__getattr__ = made_when_asked(_executor)
