"""Evaluate a trace: the reference semantics, against which every other interpreter and executor is
tested.

It runs plain PyTorch ops, so autograd, `torch.func` and outer tracers see them as they see any
PyTorch code. An op that autograd cannot differentiate is a node with the rule that transforms use.
Casts are those of the trace: autocast is off. Variables are numbered in binding order, so the
environment is a list that grows: `env[i]` is the value of `vi`.

Source: autodidax part 1 (`eval_jaxpr`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.derived.leaf_vjp import ruled
from thunder_fn.distributed.heartbeat import WAIT, run_collective
from thunder_fn.errors import (
    DistributedError,
    InvalidTrace,
    MissingRule,
    TraceTypeError,
    counted,
    has_note,
    located,
    spelled,
)
from thunder_fn.ir import ops
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.symbols import (
    bind,
    is_symbolic,
    specialize,
    specialize_atom,
    specialize_equation,
)
from thunder_fn.ir.trace import (
    Equation,
    TensorType,
    Trace,
    Type,
    Var,
    check_is_trace,
    python_arg,
    python_args,
    short_dtype,
)


@spelled()
def evaluate(trace: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a trace on values.

    Law: ``evaluate(trace(f, *xs), xs) == f(*xs)``.

    Args:
        trace: closed and checked.
        inputs: one value for each of the trace's inputs.

    Returns:
        One value for each of the trace's outputs.

    Raises:
        TraceTypeError: `trace` is no trace; or the number of inputs, or an input's dtype or shape,
            is not what the trace takes.
        MissingRule: a structured op has no rule; names it and the user's line.
        Exception: what an op raises, with a note that names the equation and the user's line.

    Example:
        >>> from thunder_fn import trace
        >>> evaluate(trace(lambda x: x * 2, torch.ones(2)), [torch.tensor([3.0, 4.0])])
        (tensor([6., 8.]),)
    """
    check_is_trace("evaluate", trace)
    _check_inputs(trace, inputs)
    with internals.autocast_off():
        return _evaluate_symbolic(trace, inputs) if is_symbolic(trace) else _evaluate(trace, inputs)


def _evaluate(trace: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    constants = (constant.tensor for constant in trace.constants)
    env: list[Any] = [*map(internals.plain, (*inputs, *constants))]
    read: Callable[[Var], Any] = lambda var: env[var.index]
    for equation, rule in zip(trace.equations, _rules(trace, env), strict=True):
        args, kwargs = python_args(equation, read)
        env.extend(_apply(equation, env, args, kwargs, rule))
    return tuple(python_arg(atom, read) for atom in trace.outputs)


def _evaluate_symbolic(trace: Trace, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Put the inputs' sizes in place of the symbols; then do the same with each unbacked size
    that an equation finds.
    """
    trace = specialize(trace, bind(trace.inputs, inputs))
    _check_inputs(trace, inputs)
    constants = (constant.tensor for constant in trace.constants)
    env: list[Any] = [*map(internals.plain, (*inputs, *constants))]
    read: Callable[[Var], Any] = lambda var: env[var.index]
    found: dict[Any, Any] = {}
    for equation, rule in zip(trace.equations, _rules(trace, env), strict=True):
        known = specialize_equation(equation, found)
        args, kwargs = python_args(known, read)
        results = _apply(known, env, args, kwargs, rule)
        found.update(bind(known.outputs, results))
        env.extend(results)
    return tuple(python_arg(specialize_atom(atom, found), read) for atom in trace.outputs)


def _rules(trace: Trace, values: Sequence[Any]) -> Sequence[bool]:
    """Tell for each equation whether it is to be a node with its own rule, since autograd or
    torch.func follows the values.
    """
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    if not internals.any_followed(tensors):
        return (False,) * len(trace.equations)
    return ruled(trace)


def _apply(
    equation: Equation, env: list[Any], args: list[Any], kwargs: dict[str, Any], has_rule: bool
) -> Sequence[Any]:
    """The values of the equation's outputs. Errors get a note, once, that names the innermost
    equation.
    """
    try:
        match equation.op.kind:
            case "leaf" if ops.is_collective(equation.op):
                results = _evaluate_collective(equation, env, args, kwargs)
            case "leaf" if has_rule:
                results = _evaluate_ruled(equation, env, args, kwargs)
            case "leaf":
                results = ops.run(equation.op, args, kwargs)
            case "composite":
                results = evaluate(equation.body, [env[var.index] for var in equation.operands])
            case "structured":
                results = EVALUATE.of(equation)(equation.bodies, *args, **kwargs)
        if len(results) != len(equation.outputs):
            raise _other_results(equation, len(results))
        return [value for _, value in zip(equation.outputs, results, strict=True)]
    except (MissingRule, DistributedError):
        raise
    except Exception as error:
        if not has_note(error):
            error.add_note(
                located(
                    "while thunder_fn evaluated", equation=_text(equation), source=equation.source
                )
            )
        raise


def _other_results(equation: Equation, count: int) -> InvalidTrace:
    return InvalidTrace(
        f"{equation.op}: the equation has {counted(len(equation.outputs), 'output')}, but the op"
        f" gives {count}\nTrace the function again, with the op as it is now."
    )


def _evaluate_collective(
    equation: Equation, env: list[Any], args: list[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Run a collective, and its backward, where that sends anything, as equations that are
    watched too.
    """
    from thunder_fn.interpreters.under_autograd import follow  # evaluates

    operands = [env[var.index] for var in equation.operands]
    run = lambda: ops.run(equation.op, args, kwargs)
    plain = lambda: run_collective(run, equation, operands, lambda: _text(equation))
    if equation.op.name == WAIT and not any(map(internals.is_functorch_wrapped, operands)):
        return plain()
    return follow(equation, operands, plain)


def _evaluate_ruled(
    equation: Equation, env: list[Any], args: list[Any], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Run a leaf as one node where a derivative may be taken."""
    from thunder_fn.interpreters.under_autograd import follow  # evaluates

    operands = [env[var.index] for var in equation.operands]
    return follow(equation, operands, lambda: ops.run(equation.op, args, kwargs))


def _check_inputs(trace: Trace, inputs: Sequence[Any]) -> None:
    if len(inputs) != len(trace.inputs):
        raise TraceTypeError(
            f"{trace.name}: expected {counted(len(trace.inputs), 'input')}, given {len(inputs)}",
            fix="Pass them as one tuple: `evaluate(trace, (x, y))`.",
        )
    for position, (var, value) in enumerate(zip(trace.inputs, inputs, strict=True)):
        if not _fits(var.type, value):
            raise TraceTypeError(
                f"{trace.name}: input {position} ({var}) must be {var.type}, given"
                f" {_describe(value)}"
            )


def _fits(type_: Type, value: Any) -> bool:
    """Test that a tensor has the dtype and the static sizes of the type; symbolic sizes fit
    whatever they meet.
    """
    if not isinstance(type_, TensorType):
        return not isinstance(value, torch.Tensor)
    if (
        not isinstance(value, torch.Tensor)
        or value.dtype != type_.dtype
        or value.dim() != len(type_.shape)
    ):
        return False
    sizes = zip(type_.shape, value.shape, strict=True)
    return all(want == have for want, have in sizes if isinstance(want, int) and type(have) is int)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{short_dtype(value.dtype)}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _text(equation: Equation) -> str:
    from thunder_fn.ir.pretty import format_equation

    return format_equation(equation)
