"""`torch.autograd.Function` inside a traced function.

A trace has the equations of `forward`. PyTorch runs `forward` with gradients off, and the user's
`backward` is not part of what it records. So the results of `forward` pass through
`thunder_fn::autograd_function`, a copy that nobody can differentiate. PyTorch's own autograd inside
the traced function does not meet it: it calls `backward`. The results of a `once_differentiable`
`backward` pass through `thunder_fn::once_differentiable`. The results of a function inside a
capture, whose graph a `backward()` in it has freed, pass through `thunder_fn::freed_graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.ir import ops


def _without_derivative(op: str, what: str, fix: str) -> Any:
    """A copy of a tensor that raises `MissingRule` when it is differentiated, or one of the tensors
    that it depends on in eager mode. `what` has a place for a name.
    """

    def copy(x: torch.Tensor, name: str, of: Sequence[torch.Tensor]) -> torch.Tensor:
        return x.clone()

    def batched(
        info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, name: str, of: Sequence[torch.Tensor]
    ) -> tuple[Any, int | None]:
        return copied(x, name, of), in_dims[0]

    def keep_name(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.name = inputs[1]

    def refuse(ctx: Any, cotangent: torch.Tensor) -> Any:
        raise MissingRule(what.format(ctx.name), fix=fix)

    copied: Any = torch.library.custom_op(f"thunder_fn::{op}", copy, mutates_args=())
    copied.register_fake(lambda x, name, of: torch.empty_like(x))
    copied.register_vmap(batched)
    copied.register_autograd(refuse, setup_context=keep_name)
    return copied


autograd_function = _without_derivative(
    "autograd_function",
    "the backward of the autograd function {} is not part of the trace, so nothing can be"
    " differentiated through it",
    "Write its forward as a plain function, or use `torch.autograd.grad` inside the traced"
    " function.",
)
once = _without_derivative(
    "once_differentiable",
    "the backward of the autograd function {} is marked as once_differentiable, so it has no"
    " derivative",
    "Take the mark away, if backward is made of ops that have derivatives.",
)
freed_graph = _without_derivative(
    "freed_graph",
    "a result of {} is differentiated, and a backward() inside of it has freed what that reads",
    "Write `backward(retain_graph=True)` there, or return the detached result.",
)
AUTOGRAD_FUNCTION = ops.leaf(torch.ops.thunder_fn.autograd_function.default)
FREED_GRAPH = ops.leaf(torch.ops.thunder_fn.freed_graph.default)
