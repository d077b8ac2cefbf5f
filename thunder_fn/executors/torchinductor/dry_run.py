"""Compiled regions on tensors without values: their code with kernels that do nothing, which
shows what it allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from thunder_fn.executors.torchinductor import store
from thunder_fn.executors.torchinductor.codegen import Job
from thunder_fn.executors.torchinductor.loops import generate


@lru_cache(maxsize=256)
def dry_function(job: Job) -> Callable[..., Any]:
    """The function of a job, as it was compiled or would be, without kernels. Nothing is compiled.

    Raises:
        Exception: whatever Inductor raises.
    """
    code = store.code_of(job) or generate(job)
    nothing = dict.fromkeys((name for name, _ in code.kernels), _nothing)
    function = store.function_of(code.text, nothing, dict(code.constants))
    context = function.__globals__
    context.update({name: ours for name, ours in _ALLOCATORS.items() if name in context})
    return function


def _nothing(*_: Any) -> None:
    """Stand in for a kernel, and do nothing."""


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _reinterpreted(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, shape, strides, int(tensor.storage_offset()) + offset)


_ALLOCATORS: Mapping[str, Callable[..., Any]] = {
    "empty_strided_cpu": _empty,
    "empty_strided_cpu_pinned": _empty,
    "reinterpret_tensor": _reinterpreted,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "gemm_address": _nothing,
}
"""Functions of C++ that Inductor's code calls past everything that knows tensors without values."""
