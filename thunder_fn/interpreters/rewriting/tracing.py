"""Traces of functions on tensors of given types, from which representations and their rules are
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture import capture
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.ir.trace import Equation, TensorType, Trace, static_shape
from thunder_fn.structured.shared.custom_calls import examples_of, inside_capture


def example(type: TensorType) -> torch.Tensor:
    """A tensor of this type, to capture a function with."""
    with (
        internals.isolated(),
        internals.no_torch_function(),
    ):  # no part of a capture that may be going on
        return torch.empty(static_shape(type), dtype=type.dtype, device=type.device)


def traced(f: Callable[..., Any], *types: TensorType) -> Trace:
    """The trace of a function on tensors of these types, whose sizes may be symbols, whatever
    autocast is around.
    """
    with internals.autocast_off():
        return inside_capture(lambda: capture(f, tuple(examples_of(types))).trace)


def traced_on_parts(
    f: Callable[..., Any], equation: Equation, kept: Sequence[Representation | None]
) -> Trace:
    """The trace of a function of an equation's operands, where a represented one is handed over
    as its parts.
    """
    pairs = zip(equation.operands, kept, strict=True)
    types = (
        type for var, one in pairs for type in (one.part_types if one is not None else (var.type,))
    )
    return traced(f, *(type for type in types if isinstance(type, TensorType)))
