"""Results whose graph a `backward()` inside the jitted function has freed."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after"
    " they have already been freed). Saved intermediate values of the graph are freed when you call"
    " .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the"
    " graph a second time or if you need to access saved tensors after calling backward."
)


class _Freed(torch.autograd.Function):
    """A node whose backward has run."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(_AGAIN)


def freed(value: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """The value as eager mode leaves it: it requires grad, and a backward from it raises, whichever
    of the inputs it goes to.
    """
    tensors = (one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)
    return _Freed.apply(value, torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-any-return]
