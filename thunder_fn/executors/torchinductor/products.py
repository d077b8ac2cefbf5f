"""Matrix products in regions by a kernel of our own, where the machine's BLAS has none that suits
its processor.

    torch.addmm(arg2, arg0, arg1, out=buf3)
    -> product(arg0, arg1, arg2, buf3, 128, 192, 64, 64, 1, 1, 64, 0, 192, 2)

The BLAS in PyTorch for x86 is MKL, which gives processors that are not Intel's its kernels for
AVX2. On an EPYC 9004 core this one takes 0.9 to 1.0 of MKL's time. For many columns, as in the head
of a language model, it takes 0.6. Its calls go past PyTorch's dispatcher, and a small product calls
no team of threads.

Tiles of ROWS x COLS sums stay in registers while they read a panel of the right matrix. The panel
is packed, so it is read in order. A left matrix that is stored column by column is packed too.
Depth is cut into pieces, so that a panel stays in the cache. Up to DEPTH terms are added one after
the other, which is about twice as far from the exact sum as MKL's.

A few rows by a matrix whose columns lie one after the other in memory, as one token by the weights
of a layer. The time is that of reading these once. Nothing is packed; four columns at a time are
multiplied with all rows.

Source: K. Goto, R. van de Geijn, "Anatomy of high-performance matrix multiplication", 2008.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from thunder_fn.executors.torchinductor.cpp_text import cpp
from thunder_fn.ir.trace import Equation, TensorType, static_shape
from thunder_fn.torch_internals import inductor as internals
from thunder_fn.torch_internals.inductor import ProductCall

NAME = "product"
SOURCE = cpp(Path(__file__).parent, "product.h")
TYPES = ("const float*",) * 3 + ("float*",) + ("const int64_t",) * 10
SMALLEST = (16, 16, 8)
"""Rows, columns and depth from which the kernel is used."""
FEW, SMALLEST_OF_FEW = 4, (1, 16, 64)
"""The most that are a few rows, and from which sizes on these are taken, where columns lie one
after the other.
"""
WORTH_BYTES = 4 << 20
"""A product that reads so much is worth a region of its own."""


@cache
def is_faster_here() -> bool:
    """Test whether the BLAS is MKL, and the processor, not Intel's, has vectors that MKL would
    not use.
    """
    return (
        torch.backends.mkl.is_available()
        and internals.cpu_capability() == "AVX512"
        and "intel" not in internals.processor_name().lower()
    )


def arguments_of(call: ProductCall, threads: int) -> tuple[int, ...] | None:
    """The numbers that the kernel takes for a product: sizes, strides, threads; None if it does
    not compute it.
    """
    (rows, depth), (_, cols) = call.left.sizes, call.right.sizes
    sizes = (rows, cols, depth)
    of_few = rows <= FEW and call.right.strides[0] == 1 and call.left.strides[1] == 1
    if any(
        size < least
        for size, least in zip(sizes, SMALLEST_OF_FEW if of_few else SMALLEST, strict=True)
    ):
        return None
    if 1 not in call.left.strides or 1 not in call.right.strides or call.out.strides[1] != 1:
        return None
    start_row = -1
    if call.start is not None:
        *outer, last = zip(call.start.sizes, call.start.strides, strict=True)
        if last != (cols, 1):
            return None
        start_row = outer[0][1] if outer and outer[0][0] > 1 else 0
    return (
        *sizes,
        *call.left.strides,
        *call.right.strides,
        start_row,
        call.out.strides[0],
        threads,
    )


def is_worth_a_region(equation: Equation) -> bool:
    """Test whether the equation is a product of so large matrices that our kernel gains more than a
    region's call costs. Products of symbolic sizes are the BLAS's.
    """
    if equation.op.name not in ("aten.mm.default", "aten.addmm.default") or not is_faster_here():
        return False
    sizes = [
        static_shape(type)
        for type in equation.operand_types
        if isinstance(type, TensorType)
        and type.dtype == torch.float32
        and all(isinstance(size, int) for size in type.shape)
    ]
    return len(sizes) == len(equation.operands) and sum(map(math.prod, sizes)) * 4 >= WORTH_BYTES


class Products(ast.NodeTransformer):
    """Calls of the kernel in place of `extern_kernels.mm` and `addmm`, by the names of the
    buffers that they fill.
    """

    def __init__(self, arguments: Mapping[str, tuple[int, ...]]) -> None:
        self.arguments = arguments

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """The kernel's call, if it is one of these products."""
        out = next((keyword.value for keyword in node.keywords if keyword.arg == "out"), None)
        match node.func:
            case ast.Attribute(value=ast.Name(id="extern_kernels"), attr="mm" | "addmm") if (
                isinstance(out, ast.Name) and out.id in self.arguments
            ):
                *start, left, right = node.args
                numbers = [ast.Constant(number) for number in self.arguments[out.id]]
                given = [left, right, *(start or [out]), out, *numbers]
                return ast.Call(ast.Name(NAME, ast.Load()), given, [])
            case _:
                return node
