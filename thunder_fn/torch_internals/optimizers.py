"""Questions to PyTorch's optimizers beside their steps."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
from typing import Any

import torch


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step makes before it updates anything, for gradients of the
    parameters' types.
    """
    initialise: Any = optimizer._init_group
    lists = len(inspect.signature(initialise).parameters) - 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach()
        initialise(group, *([] for _ in range(lists)))
