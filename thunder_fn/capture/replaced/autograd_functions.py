"""`torch.autograd.Function` inside a traced function.

A trace has the equations of `forward`. PyTorch runs `forward` with gradients off, and the user's
`backward` is not part of what it records. So the results of `forward` pass through
`thunder_fn::autograd_function`, a copy that nobody can differentiate. PyTorch's own autograd inside
the traced function does not meet it: it calls `backward`. The results of a `once_differentiable`
`backward` pass through `thunder_fn::once_differentiable`.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.ir import ops


def _without_derivative(op: str, why: str, fix: str) -> Any:
    """A copy of a tensor, named by a class, that raises `MissingRule` when it is differentiated."""

    def copy(x: torch.Tensor, name: str) -> torch.Tensor:
        return x.clone()

    def batched(
        info: Any, in_dims: tuple[int | None, None], x: torch.Tensor, name: str
    ) -> tuple[Any, int | None]:
        return copied(x, name), in_dims[0]

    def keep_name(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
        ctx.name = inputs[1]

    def refuse(ctx: Any, cotangent: torch.Tensor) -> Any:
        raise MissingRule(f"the backward of the autograd function {ctx.name} {why}", fix=fix)

    copied: Any = torch.library.custom_op(f"thunder_fn::{op}", copy, mutates_args=())
    copied.register_fake(lambda x, name: torch.empty_like(x))
    copied.register_vmap(batched)
    copied.register_autograd(refuse, setup_context=keep_name)
    return copied


autograd_function = _without_derivative(
    "autograd_function",
    "is not part of the trace, so nothing can be differentiated through it",
    "Write its forward as a plain function, or use `torch.autograd.grad` inside the traced"
    " function.",
)
once = _without_derivative(
    "once_differentiable",
    "is marked as once_differentiable, so it has no derivative",
    "Take the mark away, if backward is made of ops that have derivatives.",
)
AUTOGRAD_FUNCTION = ops.leaf(torch.ops.thunder_fn.autograd_function.default)
