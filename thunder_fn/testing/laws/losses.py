"""Traces made of traces: a loss of what a trace returns."""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.check import fake_result_types
from thunder_fn.ir.trace import (
    Equation,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    as_arg,
    as_kwargs,
    subtraces,
)
from thunder_fn.testing.laws.comparing import LawBroken, wanted_outputs

aten = torch.ops.aten


def emit(builder: TraceBuilder, overload: Any, *args: Any, **kwargs: Any) -> Var:
    """Append a leaf of one result; its type from running it on fake tensors."""
    op, new_args = ops.leaf(overload), tuple(map(as_arg, args))
    new_kwargs = as_kwargs(kwargs)
    types = fake_result_types(Equation(op, new_args, new_kwargs, ()))
    if types is None:
        raise LawBroken(f"{op} has no static type")
    return builder.add(op, new_args, types, kwargs=new_kwargs)[0]


def add_inner(builder: TraceBuilder, total: Var | None, a: Var, b: Var) -> Var:
    """total + the real inner product of a and b, in float64."""
    if is_complex(a):
        a = emit(builder, aten.view_as_real.default, a)
        b = emit(builder, aten.view_as_real.default, b)
    term = emit(
        builder, aten.sum.default, emit(builder, aten.mul.Tensor, a, b), dtype=torch.float64
    )
    return term if total is None else emit(builder, aten.add.Tensor, total, term)


def is_complex(var: Var) -> bool:
    """Test for a complex tensor."""
    return isinstance(var.type, TensorType) and var.type.dtype.is_complex


def scalarised(trace: Trace) -> Trace:
    """A loss: half the sum of the squares of the differentiable outputs, by a composite call of
    the trace.
    """
    builder = TraceBuilder(f"loss_of_{trace.name}")
    for inner in subtraces(
        trace
    ):  # also where the loss depends on nothing, and the call is dropped
        builder.require(inner.constraints)
    inputs = builder.take(trace.input_types)
    op = ops.composite("Model")
    outputs = builder.add(op, inputs, trace.output_types, bodies=(trace,))
    total: Var | None = None
    for var, wanted in zip(outputs, wanted_outputs(trace), strict=True):
        if wanted:
            total = add_inner(builder, total, var, var)
    if total is None:
        total = emit(builder, aten.full.default, (), 1.0, dtype=torch.float64)
    return builder.build((emit(builder, aten.mul.Scalar, total, 0.5),))
