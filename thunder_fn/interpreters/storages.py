"""Storages of a trace's values: the trace runs on tensors without values, which share storages
as real ones do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, python_args


def values_without_numbers(mode: Any, trace: Trace, inputs: Sequence[Any]) -> list[Any]:
    """The variables of a trace, by index, as fake tensors of the mode; those of bodies are kept
    alive in the end.

    An op that takes values, or that has no rule for fake tensors, gives new memory for each result.
    """
    env, inside = list(inputs), list[Any]()
    for constant in trace.constants:
        env.append(internals.fake_like(mode, constant.tensor))
    for equation in trace.equations:
        if ops.computes_body(equation.op):
            body = values_without_numbers(
                mode, equation.body, [env[var.index] for var in equation.operands]
            )
            inside += body
            env += [
                None if isinstance(atom, Literal) else body[atom.index]
                for atom in equation.body.outputs
            ]
        else:
            env += results_on_fakes(mode, equation, env)
    return env + inside


def results_on_fakes(mode: Any, equation: Equation, env: Sequence[Any]) -> tuple[Any, ...]:
    """Compute an equation's results by PyTorch's rules for views and layouts, or by its types where
    that takes values.
    """
    if equation.op.kind == "leaf":
        try:
            return _on_fakes(mode, equation, env)
        except Exception:  # noqa: BLE001  # data-dependent, or an op without a fake implementation
            pass
    return tuple(fake_of(mode, var) for var in equation.outputs)


def fake_of(mode: Any, var: Var) -> Any:
    """New memory for a variable; None for a number."""
    return internals.fake_of_type(mode, var.type) if isinstance(var.type, TensorType) else None


def _on_fakes(mode: Any, equation: Equation, env: Sequence[Any]) -> tuple[Any, ...]:
    read: Callable[[Var], Any] = lambda var: env[var.index]
    args, kwargs = python_args(equation, read)
    with internals.only_mode(mode), torch.no_grad():
        result = internals.call_on_fakes(ops.overload(equation.op), *args, **kwargs)
    found = ops.flatten_result(result)
    if len(found) != len(equation.outputs):
        raise ValueError("the traces have different numbers of results")
    return found
