"""The cost of an equation in floating-point operations and bytes: estimates from types, by
PyTorch's own formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch.utils.flop_counter import flop_registry

from thunder_fn.ir import ops
from thunder_fn.ir.check import types_in
from thunder_fn.ir.memos import kept
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Type

_SAME_AS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Ops for which PyTorch has no formula, and those that compute the same."""

FLOPS_PER_BYTE = 16
"""The number of operations that take as long as moving a byte: about right for a CPU core, and
low for a GPU.
"""


def bytes_of(type: Type) -> int:
    """The size of a value; a size that is symbolic counts as one."""
    if not isinstance(type, TensorType):
        return 0
    count = 1
    for dim in type.shape:
        count *= dim if isinstance(dim, int) else 1
    return count * type.dtype.itemsize


def live_bytes(spans: Iterable[tuple[int, int, int]], count: int) -> list[int]:
    """The bytes that live at each of so many places. A span is the first place where some live, the
    last one, and how many they are.
    """
    change = [0] * (count + 1)
    for first, last, size in spans:
        change[first] += size
        change[min(last, count - 1) + 1] -= size
    return [*accumulate(change[:count])]


def cost_of(equation: Equation) -> int:
    """The time that an equation takes, in floating-point operations. A view takes one."""
    if equation.bodies:
        return max(map(_cost_of_body, equation.bodies))
    if equation.op.kind != "leaf" or ops.is_view(equation.op):
        return 1
    values = (*equation.operands, *equation.outputs)
    return flops_of(equation) + FLOPS_PER_BYTE * sum(bytes_of(var.type) for var in values) + 1


@kept(4096)
def _cost_of_body(trace: Trace) -> int:
    return sum(map(cost_of, trace.equations))


def flops_of(equation: Equation) -> int:
    """The operations of a matrix product, a convolution or an attention; zero for everything
    else.
    """
    if equation.op == ops.LINEAR:
        return _flops_of_linear(*equation.operand_types[:2])
    packet = ops.overload(equation.op).overloadpacket
    packet = _SAME_AS.get(packet, packet)
    if packet not in flop_registry:
        return 0
    args, kwargs = types_in(equation)
    shapes = [_shape(arg) for arg in args]
    try:
        return int(
            flop_registry[packet](
                *shapes, **{key: _shape(arg) for key, arg in kwargs}, out_val=_out(equation)
            )
        )
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0


def _flops_of_linear(x: Type, weight: Type) -> int:
    if not isinstance(x, TensorType) or not isinstance(weight, TensorType):
        return 0
    sizes = (*x.shape, weight.shape[0])
    return 2 * math.prod(size if isinstance(size, int) else 1 for size in sizes)


def _shape(arg: object) -> object:
    match arg:
        case TensorType(_, shape, _):
            return shape
        case Literal():
            return arg.value
        case tuple():
            return [_shape(item) for item in arg]
        case _:
            return arg


def _out(equation: Equation) -> object:
    shapes = [var.type.shape for var in equation.outputs if isinstance(var.type, TensorType)]
    return shapes[0] if len(shapes) == 1 else tuple(shapes)
