"""`torch.autograd.Function` inside a traced function.

A trace has what `forward` does. PyTorch runs `forward` with gradients off, and the user's `backward` is not part of
what it records, so the results of `forward` pass through `thunder_fn::autograd_function`: a copy that nobody can
differentiate. PyTorch's own autograd inside the traced function does not meet it: it calls `backward`.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import ops
from thunder_fn.errors import MissingRule, located


@torch.library.custom_op("thunder_fn::autograd_function", mutates_args=())
def autograd_function(x: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of a result of the `torch.autograd.Function` of this name."""
    return x.clone()


@autograd_function.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


@autograd_function.register_vmap
def _(info: Any, in_dims: tuple[int | None, None], x: torch.Tensor, name: str) -> tuple[torch.Tensor, int | None]:
    return autograd_function(x, name), in_dims[0]


def _keep_name(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.name = inputs[1]


def _refuse(ctx: Any, cotangent: torch.Tensor) -> Any:
    raise MissingRule(
        located(
            f"the backward of the autograd function {ctx.name} is not part of the trace, "
            "so nothing can be differentiated through it",
            fix="Write its forward as a plain function, or use `torch.autograd.grad` inside the traced function.",
        )
    )


autograd_function.register_autograd(_refuse, setup_context=_keep_name)

AUTOGRAD_FUNCTION = ops.leaf(torch.ops.thunder_fn.autograd_function.default)


@torch.library.custom_op("thunder_fn::once_differentiable", mutates_args=())
def once(x: torch.Tensor, name: str) -> torch.Tensor:
    """A copy of a gradient by a `backward` that is marked as `once_differentiable`, of the class of this name."""
    return x.clone()


@once.register_fake
def _(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(x)


@once.register_vmap
def _(info: Any, in_dims: tuple[int | None, None], x: torch.Tensor, name: str) -> tuple[torch.Tensor, int | None]:
    return once(x, name), in_dims[0]


def _refuse_twice(ctx: Any, cotangent: torch.Tensor) -> Any:
    raise MissingRule(
        located(
            f"the backward of the autograd function {ctx.name} is marked as once_differentiable, so it has no derivative",
            fix="Take the mark away, if backward is made of ops that have derivatives.",
        )
    )


once.register_autograd(_refuse_twice, setup_context=_keep_name)
