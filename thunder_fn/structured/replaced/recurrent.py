"""`nn.GRU` and `nn.RNN` of packed sequences inside a capture: the size of the batch is unbacked."""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.lookasides import divert, original_of


def check_forward_args(
    module: Any, input: torch.Tensor, hidden: torch.Tensor, batch_sizes: torch.Tensor | None
) -> None:
    """Check like the module, which asks for the batch size as a number of Python's; here the
    program checks it.
    """
    if batch_sizes is None:
        original_of(internals.higher_order_function("recurrent arguments"))(
            module, input, hidden, batch_sizes
        )
        return
    module.check_input(input, batch_sizes)
    layers = module.num_layers * (2 if module.bidirectional else 1)
    expected, found = (layers, batch_sizes[0].item(), module.hidden_size), tuple(hidden.shape)
    text = f"Expected hidden size {expected}, got {list(found)}"
    if len(found) != len(expected):
        raise RuntimeError(text)
    for size, right in zip(found, expected, strict=True):
        internals.demand(size == right, text)


divert("recurrent arguments", check_forward_args)
