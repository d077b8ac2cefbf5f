"""barrier: an identity that keeps equations behind it apart from those in front.

    y = thunder_fn.barrier.default(x, "f_backward")

The operands of a lowered checkpoint pass through it. So no cse, here or in a compiler of FX graphs,
can merge the recomputation of a checkpoint with the forward. The name tells apart the sides; in a
program it is another name for the same tensor.

Source: XLA's optimization-barrier, with which jax.checkpoint does the same.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Literal, TensorType, Trace, TraceBuilder
from thunder_fn.ir.walking import inline_into

_LIBRARY = torch.library.Library("thunder_fn", "FRAGMENT")
_LIBRARY.define("barrier(Tensor(a) x, str name) -> Tensor(a)")


def _barrier(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.view_as(x)


class _Identity(torch.autograd.Function):
    """The barrier under autograd: the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:  # type: ignore[override]
        with internals.below_autograd():
            return torch.ops.thunder_fn.barrier.default(x, name)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0], None


_LIBRARY.impl("barrier", _barrier, "CompositeExplicitAutograd")
_LIBRARY.impl("barrier", _Identity.apply, "Autograd")
BARRIER = ops.leaf(torch.ops.thunder_fn.barrier.default)


def behind_barrier(body: Trace) -> Trace:
    """The body, its inputs passed through barriers of its name."""
    builder = TraceBuilder(body.name)
    inputs = builder.take(body.input_types)
    passed = tuple(
        (
            builder.add(BARRIER, (var, Literal(body.name)), (var.type,))[0]
            if isinstance(var.type, TensorType)
            else var
        )
        for var in inputs
    )
    return builder.build(inline_into(builder, body, passed))
