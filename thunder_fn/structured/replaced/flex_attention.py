"""flex_attention inside a traced function: attention by its definition, made of traced ops.

PyTorch's own eager definition runs in place of its higher-order op. It computes the scores, the
user's `score_mod` and `mask_mod` batched over index tensors by vmap, and a softmax that is safe for
rows without entries. So every transform knows it, and captured tensors in the user's functions have
gradients like any others.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.lookasides import divert


def flex_attention(_: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the results of PyTorch's op: values, and the logarithm of the sum and the largest of
    the scores, in base 2.
    """
    return internals.math_attention(*args, *kwargs.values())


divert("flex_attention", flex_attention)


def _index(_: Any, values: torch.Tensor, indices: Any) -> torch.Tensor:
    """`values[q_idx]` in the user's functions; PyTorch hides it in an autograd function, the op
    itself says more.
    """
    return torch.ops.aten.index.Tensor(values, indices)


divert("flex_attention index", _index)


def _no_warning(*args: Any, **kwargs: Any) -> None:
    """Silence PyTorch's warning that its eager definition is slow; here it is not what runs."""


divert("flex_attention warning", _no_warning)
# it refuses what requires a gradient on a CPU, which ops have
divert("flex_attention device", _no_warning)
