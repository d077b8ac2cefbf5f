"""The layouts in memory of a trace's outputs, as its ops give them.

A transform that is called inside a capture is one equation there, and eager PyTorch's results of it
need not be contiguous: the gradient of a sum is expanded, that of a product with a transpose is
transposed. Code that asks for strides, and `reshape`, which copies or not, see the same inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arguments import stride_pattern, strides_of
from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import ops
from thunder_fn.ir.memos import fact
from thunder_fn.ir.symbols import hint_of, specialize, symbols_of
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Expr,
    Literal,
    TensorType,
    Trace,
    Var,
    as_dim,
    python_args,
)

Layouts = tuple[internals.Layout | None, ...]
"""The layouts of tensors; None for one that is contiguous as far as is known, and for a number."""


def strides_of_outputs(
    trace: Trace, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[Dim, ...] | None, ...]:
    """Compute the strides of a trace's outputs on these tracers; None for an output whose layout is
    unknown.

    Symbols have the values that they have in this call; strides are explained by sizes.
    """
    given = tuple(map(_layout_in, inputs))
    hints: dict[Any, Any] = {one: getattr(one, "hint", None) for one in symbols_of(trace)}
    if None in given or None in hints.values():  # a size is found in data
        return ()
    with internals.isolated(), internals.no_torch_function(), internals.autocast_off():
        found = _layouts(specialize(trace, hints), given)
    return tuple(map(_strides, found, trace.outputs))


def _layout_in(tracer: torch.Tensor) -> internals.Layout | None:
    """The layout of a tracer's value in this call, with numbers for symbols."""
    with internals.no_torch_function():
        fake = internals.inner_fake(tracer)
        sizes = (*fake.shape, *fake.stride(), fake.storage_offset())
        known = [*map(_known, sizes)]
        shape, stride = tuple(known[: fake.dim()]), tuple(known[fake.dim() : -1])
        if None in known:
            return None
        return internals.the_layout(fake.dtype, shape, stride, known[-1], fake.device)


def _known(size: Any) -> int | None:
    """The size in this call; None if it is found in data."""
    dim = as_dim(size)
    is_found = isinstance(dim, Expr) and any(
        not hasattr(one, "hint") for one in dim.value.free_symbols
    )
    return None if is_found else hint_of(dim)


def _strides(layout: internals.Layout | None, output: Atom) -> tuple[Dim, ...] | None:
    """The strides of an output with symbolic sizes; None if its sizes do not explain them."""
    if layout is None or not isinstance(output, Var) or not isinstance(output.type, TensorType):
        return None
    shape, pattern = output.type.shape, stride_pattern(layout.shape, layout.stride)
    if all(isinstance(size, int) for size in shape):
        return layout.stride
    if None in pattern:
        return None
    return strides_of(pattern, shape, lambda dim: layout.stride[dim])


@fact
def _layouts(trace: Trace, given: Layouts) -> Layouts:
    constants = (constant.tensor for constant in trace.constants)
    mode = internals.fake_mode()
    env = [*given, *(internals.layout_of(internals.fake_like(mode, one)) for one in constants)]
    for equation in trace.equations:
        if ops.computes_body(equation.op):
            env += _layouts(equation.body, tuple(env[var.index] for var in equation.operands))
        else:
            env += _results(mode, equation, env)
    return tuple(None if isinstance(atom, Literal) else env[atom.index] for atom in trace.outputs)


def _results(mode: Any, equation: Equation, env: Sequence[Any]) -> Layouts:
    """The layouts of an equation's results: from memory, or by the op's rule for fake tensors."""
    unknown = (None,) * len(equation.outputs)
    if equation.op.kind != "leaf":
        return unknown
    read: Callable[[Var], Any] = lambda var: env[var.index] or _contiguous(mode, var)
    try:
        args, kwargs = python_args(equation, read)
    except InvalidTrace:  # a symbolic number has no value here
        return unknown
    op = ops.overload(equation.op)
    known = internals.layouts_of_results(op, args, kwargs)
    if known is None:
        known = internals.layouts_on_fakes(mode, op, args, kwargs)
    return known if len(known) == len(unknown) else unknown


def _contiguous(mode: Any, var: Var) -> Any:
    fake = internals.fake_of_type(mode, var.type)  # type: ignore[arg-type]
    return internals.layout_of(fake)
