"""Batch norm with `momentum=None` inside a traced function: the mean over all batches, whose number
is unbacked.

PyTorch's module asks for that number as a Python number, and its op takes momentum as one. Here the
op gives the statistics of the batch, and traced ops put these into the running ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.lookasides import divert, original_of


def batch_norm(module: Any, input: torch.Tensor) -> torch.Tensor:
    """The module's `forward`; running statistics are updated in double precision, as PyTorch's
    kernel does it.
    """
    averages = module.momentum is None and module.training and module.track_running_stats
    if not averages or module.num_batches_tracked is None:
        return original_of(internals.higher_order_function("batch norm"))(module, input)
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    running: tuple[torch.Tensor, ...] = (module.running_mean, module.running_var)
    mean, var = batch = [torch.zeros_like(one) for one in running]
    result = F.batch_norm(input, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    share = 1.0 / module.num_batches_tracked.double()
    with torch.no_grad():
        for old, new in zip(running, batch, strict=True):
            old.copy_(share * new.double() + (1 - share) * old.double())
    return result


divert("batch norm", batch_norm)
