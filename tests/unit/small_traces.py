"""Small traces, built by hand, for the tests of the data layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_fn.ir import ops
from thunder_fn.ir.rules import TABLES
from thunder_fn.ir.trace import Literal, NoneType, Source, TensorType, Trace, TraceBuilder

aten = torch.ops.aten


def register_rules(monkeypatch: pytest.MonkeyPatch, name: str, **rules: Any) -> None:
    """Give a structured op some rules, by table, for the time of a test."""
    for table in TABLES:
        if table.interpreter in rules:
            monkeypatch.setitem(table.by_name, name, rules[table.interpreter])


ADD = ops.leaf(aten.add.Tensor)
MUL = ops.leaf(aten.mul.Tensor)
SIN = ops.leaf(aten.sin.default)
OWNED = torch.tensor([1.0, 2.0, 3.0, 4.0])
WEIGHT = torch.nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))


def f32(*shape: int) -> TensorType:
    return TensorType(torch.float32, shape)


def leaves() -> Trace:
    """Two leaves, an unused result, a forwarded input and a number as an output."""
    b = TraceBuilder()
    x, y = b.input(f32(2, 3)), b.input(f32(3))
    (product,) = b.add(MUL, (x, y), (f32(2, 3),))
    b.add(SIN, (product,), (f32(2, 3),))
    return b.build((product, x, Literal(1.0)))


def layer_norm() -> Trace:
    b = TraceBuilder("layer_norm")
    x, weight = b.input(f32(2, 4)), b.input(f32(4))
    args = (x, (Literal(4),), weight, Literal(None), Literal(1e-05))
    out, _, _ = b.add(ops.leaf(aten.native_layer_norm.default), args, (f32(2, 4), f32(2, 1), f32(2, 1)))
    return b.build((out,))


def block() -> Trace:
    """A composite inside, and a closed-over parameter."""
    b = TraceBuilder("Block")
    x, weight = b.input(f32(2, 4)), b.input(f32(4))
    args = (x, Literal((4,)), weight)
    (h,) = b.add(ops.composite("torch.nn.functional.layer_norm"), args, (f32(2, 4),), bodies=(layer_norm(),))
    (h,) = b.add(ADD, (h, b.constant(WEIGHT)), (f32(2, 4),))
    return b.build((h,))


def blocks(count: int = 2) -> Trace:
    """The same block again and again, called from different modules; then a layer_norm called with keywords."""
    b = TraceBuilder()
    x, weight = b.input(f32(2, 4)), b.input(f32(4))
    for i in range(count):
        source = Source("model.py", 41, "forward", f"h.{i}")
        (x,) = b.add(ops.composite("model.Block"), (x, weight), (f32(2, 4),), bodies=(block(),), source=source)
    kwargs = (("normalized_shape", (Literal(4),)), ("weight", b.constant(OWNED, owned=True)))
    op = ops.composite("torch.nn.functional.layer_norm")
    (x,) = b.add(op, (x,), (f32(2, 4),), kwargs=kwargs, bodies=(layer_norm(),))
    return b.build((x,))


def splits() -> Trace:
    """Lists as results: of two, of one, and used as a list again."""
    b = TraceBuilder()
    x = b.input(f32(4, 2))
    split = ops.leaf(aten.split.Tensor)
    top, bottom = b.add(split, (x, Literal(2)), (f32(2, 2), f32(2, 2)))
    (same,) = b.add(split, (top, Literal(2)), (f32(2, 2),))
    cat, dim = ops.leaf(aten.cat.default), ("dim", Literal(0))
    (joined,) = b.add(cat, ((bottom, same, bottom),), (f32(6, 2),), kwargs=(dim,))
    return b.build((joined, same))


def masked_gradients() -> Trace:
    """A result that is None, returned as well."""
    b = TraceBuilder()
    grad, x, weight = b.input(f32(1, 2, 3, 3)), b.input(f32(1, 2, 5, 5)), b.input(f32(2, 2, 3, 3))
    pairs = tuple((Literal(n), Literal(n)) for n in (1, 0, 1, 0))
    stride, padding, dilation, output_padding = pairs
    mask = (Literal(False), Literal(True), Literal(True))
    args = (grad, x, weight, (Literal(2),), stride, padding, dilation, Literal(False), output_padding, Literal(1), mask)
    op = ops.leaf(aten.convolution_backward.default)
    none, d_weight, d_bias = b.add(op, args, (NoneType(), f32(2, 2, 3, 3), f32(2)))
    return b.build((d_weight, none, d_bias))


def literals() -> Trace:
    """Every kind of literal that an op takes."""
    b = TraceBuilder()
    x = b.input(f32(3))
    for value in (float("nan"), float("inf"), float("-inf"), -0.0, 1e-300, True, 7):
        dtype = ("dtype", Literal(torch.float32))
        (full,) = b.add(ops.leaf(aten.full.default), ((), Literal(value)), (f32(),), kwargs=(dtype,))
        (x,) = b.add(ops.leaf(aten.fmax.default), (x, full), (f32(3),))
    c64 = TensorType(torch.complex64, (3,))
    (z,) = b.add(ops.leaf(aten.mul.Scalar), (x, Literal(complex(0.0, float("inf")))), (c64,))
    where = b.constant(torch.tensor([2, 0]), owned=True)
    (i,) = b.add(ops.leaf(aten.index.Tensor), (z, (where,)), (TensorType(torch.complex64, (2,)),))
    (d,) = b.add(ops.leaf(aten.div.Tensor_mode), (x, x), (f32(3),), kwargs=(("rounding_mode", Literal("floor")),))
    kwargs = (("dtype", Literal(torch.float64)), ("memory_format", Literal(torch.contiguous_format)))
    (d,) = b.add(ops.leaf(aten._to_copy.default), (d,), (TensorType(torch.float64, (3,)),), kwargs=kwargs)
    return b.build((i, d, Literal(float("nan")), Literal(True), Literal(None)))


def nested_lists() -> Trace:
    """Several lists in one result: an optimizer's step."""
    b = TraceBuilder()
    groups = [tuple(b.input(f32(2)) for _ in range(2)) for _ in range(2)]
    scalars = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    kwargs = tuple((key, Literal(value)) for key, value in {**scalars, "is_first_step": True}.items())
    momenta = tuple(b.input(f32(2)) for _ in range(2))
    outputs = b.add(ops.leaf(aten._fused_sgd.default), (*groups, momenta), (f32(2),) * 6, kwargs=kwargs)
    return b.build(outputs)


def example_inputs(trace: Trace) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(type.shape, generator=generator) for type in trace.input_types]


TRACES = (leaves, layer_norm, block, blocks, splits, masked_gradients, literals, nested_lists)
"""The functions that build them, to parametrize tests."""


def same_bits(a: object, b: object) -> bool:
    """Equal results: tensors bit for bit, numbers with their types, NaN equal to NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [x.numpy(force=True).tobytes() for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0] == bits[1]
    return type(a) is type(b) and repr(a) == repr(b)
