"""The law of second derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.interpreters import grad as reverse
from thunder_fn.ir.trace import TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into
from thunder_fn.testing.drawn_programs import random_tensor
from thunder_fn.testing.laws.comparing import (
    Inputs,
    chosen,
    close,
    holds,
    is_tame,
    run,
    tolerance,
    wanted_inputs,
)
from thunder_fn.testing.laws.losses import add_inner, emit, scalarised
from thunder_fn.testing.laws.reverse import inner, norm, partial

aten = torch.ops.aten


# ---- second order ----


def directional(trace: Trace, wanted: tuple[bool, ...]) -> Trace:
    """The derivative of a scalar trace along directions: a trace of the inputs, then a direction
    for each wanted.
    """
    gradient = reverse.grad_and_value(trace, wanted)
    builder = TraceBuilder("directional")
    inputs = builder.take(trace.input_types)
    directions = tuple(builder.input(var.type) for var in chosen(trace.inputs, wanted))
    found = inline_into(builder, gradient, inputs)
    total: Var | None = None
    for direction, atom in zip(directions, found, strict=False):
        if isinstance(atom, Var):
            total = add_inner(builder, total, atom, direction)
    if total is None:
        total = emit(builder, aten.full.default, (), 0.0, dtype=torch.float64)
    return builder.build((total,))


def law_second_order_is_symmetric(trace: Trace, inputs: Inputs) -> None:
    """For a loss and directions u and v, ``u H v == v H u``, and ``H v`` is torch.autograd's,
    where it has one.
    """
    loss = scalarised(trace)
    wanted = wanted_inputs(loss)
    if not any(wanted):
        return
    slope = directional(loss, wanted)
    hessian = reverse.grad_and_value(slope, (*wanted, *(False for wish in wanted if wish)))
    primals, count = chosen(inputs, wanted), wanted.count(True)
    generator = torch.Generator().manual_seed(3)
    u, v = (
        tuple(random_tensor(TensorType(x.dtype, tuple(x.shape)), generator) for x in primals)
        for _ in range(2)
    )
    hu, hv = (run(hessian, (*inputs, *direction))[:count] for direction in (u, v))
    f, _ = partial(loss, inputs)
    want = hessian_product_by_autograd(lambda *xs: f(*xs)[0], primals, v)
    if not is_tame((*hu, *hv, *(want or ()), *run(trace, inputs))):
        return
    if want is not None:
        close(hv, want, 10 * tolerance(trace), "the Hessian's product with a vector", trace=trace)
    left, right = inner(u, hv), inner(v, hu)
    scale = 1 + norm(u) * norm(hv) + norm(v) * norm(hu)
    holds(
        abs(left - right) <= 10 * tolerance(trace) * scale,
        f"u H v is {left}, but v H u is {right}",
        trace=trace,
    )


def hessian_product_by_autograd(
    f: Callable[..., torch.Tensor], primals: Inputs, v: Inputs
) -> Inputs | None:
    """PyTorch's Hessian-vector product, by its reverse mode twice; None where it lacks a third
    derivative.

    A backward that is written out in a custom rule has a derivative in PyTorch, but not always a
    second one.
    """
    zeros = tuple(torch.zeros_like(x) for x in primals)
    leaves = tuple(x.detach().clone().requires_grad_() for x in primals)
    value = f(*leaves)
    if not value.requires_grad:
        return zeros
    grads: tuple[Any, ...] = torch.autograd.grad(
        value, leaves, create_graph=True, allow_unused=True
    )
    pairs = [
        (grad, direction)
        for grad, direction in zip(grads, v, strict=True)
        if grad is not None and grad.requires_grad
    ]
    if not pairs:
        return zeros
    ys, cts = zip(*pairs, strict=True)
    try:
        found: tuple[Any, ...] = torch.autograd.grad(ys, leaves, cts, allow_unused=True)
    except RuntimeError as error:
        if not re.fullmatch("derivative for .* is not implemented", str(error)):
            raise
        return None
    return tuple(zero if grad is None else grad for zero, grad in zip(zeros, found, strict=True))
