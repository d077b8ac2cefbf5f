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
from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import ops
from thunder_fn.ir.memos import fact
from thunder_fn.ir.trace import Dim, Equation, Literal, Trace, Var, python_args

Layouts = tuple[internals.Layout | None, ...]
"""The layouts of tensors; None for one that is contiguous as far as is known, and for a number."""

_WRAPPERS = ("call", "checkpoint")


def strides_of_outputs(
    trace: Trace, inputs: Sequence[torch.Tensor]
) -> tuple[tuple[Dim, ...] | None, ...]:
    """The strides of a trace's outputs on these tracers; None for one whose layout is unknown."""
    given = tuple(internals.layout_of(internals.inner_fake(one)) for one in inputs)
    with internals.isolated(), internals.no_torch_function(), internals.autocast_off():
        found = _layouts(trace, given)
    return tuple(one and one.stride for one in found)


@fact
def _layouts(trace: Trace, given: Layouts) -> Layouts:
    constants = (constant.tensor for constant in trace.constants)
    mode = internals.fake_mode()
    env = [*given, *(internals.layout_of(internals.fake_like(mode, one)) for one in constants)]
    for equation in trace.equations:
        if equation.op.kind == "composite" or equation.op.name in _WRAPPERS:
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
