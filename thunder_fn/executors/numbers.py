"""Numbers beside tensors: `x + 1` makes a tensor of 1 at every call, which costs more than a small
addition.

A program holds that tensor if this changes no bit. Beside a float32 or float64 tensor on the CPU,
an elementwise op converts the number to the tensor's dtype before it computes. This does so, too.
"""

from __future__ import annotations

import re

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.ir.trace import Equation, Literal, Op, TensorType, Var

CONVERTING = frozenset(
    Op("leaf", f"aten.{name}{in_place}.Tensor")
    for name in ("add", "sub", "mul", "div")
    for in_place in ("", "_")
)
"""Ops that take a tensor and a number as a tensor, and convert both to the dtype of the result."""

EXACT = 2**53


def stands_for_number(equation: Equation) -> bool:
    """Test whether a tensor of the result's dtype may stand for the number that an equation's last
    argument is.
    """
    if equation.op not in CONVERTING or equation.kwargs or len(equation.args) != 2:
        return False
    operand, number = equation.args
    type = equation.outputs[0].type
    if not isinstance(operand, Var) or operand.type != type or not isinstance(number, Literal):
        return False
    if (
        not isinstance(type, TensorType)
        or type.device.type != "cpu"
        or type.dtype not in (torch.float32, torch.float64)
    ):
        return False
    value = number.value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and not (isinstance(value, int) and abs(value) > EXACT)


def number_tensor(value: float, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that stands for a number in a program."""
    with internals.isolated(), internals.no_torch_function():
        return torch.tensor(value, dtype=dtype)


def number_name(value: float) -> str:
    """The name in a program of a number's tensor: `number_0_5`."""
    return "number_" + re.sub(r"\W", "_", repr(value).replace("-", "minus_"))
