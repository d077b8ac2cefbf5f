"""sdpa: `scaled_dot_product_attention` on the kernel that suits its arguments, chosen when the
program is made.

    (v3,) = attention(v0, v1, v2, None, True, None, kernel='flash')

PyTorch chooses among its kernels at every call, and says nothing. Here the choice is data:
`choose_kernel` looks at types only, and the program shows what it said. Gradients are those of
PyTorch's function, which record the fused backward.

Tested: the CPU kernels. The choice for CUDA is tested as a function of types.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html
"""

from __future__ import annotations

from typing import Any, Literal as Choice, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from thunder_fn.extend import OperatorExecutor

Kernel = Choice["flash", "efficient", "math"]

BACKENDS: dict[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_SIZE = 256
"""Flash attention on CUDA takes heads up to this size."""


def choose_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> Kernel:
    """The fastest kernel that takes such tensors. It looks at types, and never at values.

    Law: PyTorch accepts the call with this kernel alone.
    """
    fourfold = query.dim() == key.dim() == value.dim() == 4
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    filled = 0 not in (*query.shape, *key.shape)
    if not (fourfold and same and filled and query.dtype.is_floating_point):
        return "math"
    heads_agree = query.shape[1] == key.shape[1] == value.shape[1]
    if query.device.type == "cpu":
        plain_mask = mask is None or (
            mask.dim() in (2, 4) and mask.dtype in (torch.bool, query.dtype)
        )
        return "flash" if heads_agree and plain_mask else "math"
    if query.device.type == "cuda" and heads_agree:
        size = query.shape[-1]
        if query.dtype in HALF and mask is None and size <= FLASH_HEAD_SIZE and size % 8 == 0:
            return "flash"
        if (
            query.dtype in (*HALF, torch.float32)
            and size % 8 == 0
            and (mask is None or mask.dtype == query.dtype)
        ):
            return "efficient"
    return "math"


def _like(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any, *, kernel: Kernel
) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


def _run(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: Any, *, kernel: Kernel
) -> torch.Tensor:
    with sdpa_kernel(BACKENDS[kernel]):
        return scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)


class _Call(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def _check(*args: Any, **kwargs: Any) -> bool:
    call = _Call(*args, **kwargs)
    return (
        call.dropout_p == 0.0
        and not call.enable_gqa
        and not (call.is_causal and call.attn_mask is not None)
    )


def _transform(*args: Any, **kwargs: Any) -> torch.Tensor:
    query, key, value, mask, _, causal, scale, _ = _Call(*args, **kwargs)
    return attention(
        query, key, value, mask, causal, scale, kernel=choose_kernel(query, key, value, mask)
    )


EXECUTOR = OperatorExecutor("sdpa", version=torch.__version__, numerics="reassociating")
attention = EXECUTOR.register_operator("attention", like=_like, fn=_run)
EXECUTOR.register_implementation(
    scaled_dot_product_attention, checker=_check, execution_transform=_transform
)
