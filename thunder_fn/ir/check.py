"""Check that a trace keeps the rules of its grammar. All tests run this after every interpreter.

Variables are bound once and before use, with one type. Bodies are closed and agree with their
equations. The types of a leaf's outputs are those that PyTorch's own meta functions give on fake
tensors. Constants agree with their variables. Constraints are over symbols that the trace binds.

Types with symbols agree if they are equal for all numbers that the trace's constraints allow.
Relations of sizes that an op takes for granted, such as equality, have to follow from the
constraints too.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.errors import InvalidTrace, TraceTypeError, located
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import counterexample, equality, premises_of
from thunder_fn.ir.memos import kept
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.rules import CHECK
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.symbols import made_by, symbols_in
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Expr,
    Literal,
    NumberType,
    Op,
    TensorType,
    Trace,
    Type,
    Var,
    check_is_trace,
    map_args,
    subtraces,
    type_of,
    type_of_value,
)
from thunder_fn.torch_internals import (
    DATA_DEPENDENT_SHAPE,
    DATA_DEPENDENT_VALUE,
    RecordingMode,
    UnsupportedOperatorException,
    call_on_fakes,
    isolated,
    no_autocast,
    no_torch_function,
    symbolic_dispatch,
)

_premises: ContextVar[tuple[Expr, ...]] = ContextVar("thunder_fn_premises", default=())
"""Relations that hold of the symbols of the trace that is being checked."""


def check(trace: Trace, *, leaves: bool = True) -> None:
    """Raise if a trace, or a trace inside it, breaks a rule.

    Law: every interpreter maps checked traces to checked traces.

    Args:
        trace: any trace.
        leaves: also ask PyTorch for the types that each leaf gives, which takes most of the time.

    Raises:
        InvalidTrace: a variable is unbound, a body is missing, a constraint has unknown symbols.
        TraceTypeError: `trace` is no trace; or two types disagree: names the equation and the
            user's line.
        MissingRule: there are no rules for a structured op.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> check(tfn.trace(torch.sin, torch.ones(2)))  # nothing to say
    """
    check_is_trace("check", trace)
    with setting(_premises, premises_of(trace)):
        for current in subtraces(trace):
            _check_trace(current, leaves=leaves)
    _check_constraints(trace)


def _check_trace(trace: Trace, *, leaves: bool) -> None:
    bound = [*trace.inputs, *(constant.var for constant in trace.constants)]
    for constant in trace.constants:
        found = type_of_value(constant.tensor)
        if found != constant.var.type:
            what = f"constant {constant.var} is {constant.var.type}, but its tensor is {found}"
            raise TraceTypeError(f"{trace.name}: {what}")
    for equation in trace.equations:
        for var in equation.operands:
            _check_bound(var, bound, trace, equation)
        if leaves or equation.op.kind != "leaf":
            _check_equation(equation)
        bound.extend(equation.outputs)
    for atom in trace.outputs:
        if isinstance(atom, Var):
            _check_bound(atom, bound, trace, None)
        type_of(atom)


def _check_bound(var: Var, bound: list[Var], trace: Trace, equation: Equation | None) -> None:
    use = f"{trace.name}: {var} is used" if equation else f"{trace.name}: {var} is returned"
    if not 0 <= var.index < len(bound):
        fix = "Bodies are closed: pass what they use as inputs."
        raise InvalidTrace(_at(f"{use} before it is bound", equation, fix))
    known = bound[var.index].type
    if known != var.type:
        raise TraceTypeError(_at(f"{use} as {var.type}, but it is bound as {known}", equation))


def _at(what: str, equation: Equation | None, fix: str | None = None) -> str:
    if equation is None:
        return what
    return located(what, equation=format_equation(equation), source=equation.source, fix=fix)


def _check_constraints(trace: Trace) -> None:
    variables = (trace.inputs, tuple(equation.outputs for equation in trace.equations))
    known = set(symbols_in(variables))
    for constraint in trace.constraints:
        unknown = sorted(str(symbol) for symbol in constraint.value.free_symbols - known)
        if unknown:
            what = f"the constraint {constraint} is over {', '.join(unknown)}, which nothing binds"
            raise InvalidTrace(f"{trace.name}: {what}")


def _check_equation(equation: Equation) -> None:
    match equation.op.kind:
        case "leaf":
            _check_leaf(equation)
        case "composite":
            _check_composite(equation)
        case "structured":
            CHECK.of(equation)(equation)


def _check_leaf(equation: Equation) -> None:
    ops.overload(equation.op)
    if equation.bodies:
        what = f"{equation.op}: a leaf has no bodies, but this one has {len(equation.bodies)}"
        raise InvalidTrace(_at(what, equation))
    fix = "Take the types of outputs from the op: `check.fake_result_types(equation)` gives them."
    try:
        types, decided = _found_types(equation) if _has_types(equation) else (None, ())
    except Exception as error:
        what = f"{equation.op}: the op rejects its operands: {error}"
        raise TraceTypeError(_at(what, equation, "Look at the types of the operands.")) from error
    if types is not None:
        _check_decisions(equation, decided)
        check_types(equation, types, "the op gives", fix)


def _check_decisions(equation: Equation, decided: tuple[Expr, ...]) -> None:
    """Check that a constraint states each relation of symbolic sizes that the op takes for
    granted.
    """
    for relation in decided:
        broken = counterexample(relation, _premises.get())
        if broken is not None:
            what = (
                f"{equation.op}: the op gives these types where {relation}, which no constraint"
                f" says{_where(broken)}"
            )
            raise TraceTypeError(
                _at(
                    what, equation, "Require it: `builder.require` takes the constraints of a rule."
                )
            )


def _check_composite(equation: Equation) -> None:
    if len(equation.bodies) != 1:
        what = f"{equation.op}: a composite has one body, but this one has {len(equation.bodies)}"
        raise InvalidTrace(_at(what, equation))
    check_operands(equation, equation.operands, equation.body)
    fix = "Build the equation from its body's output types."
    check_types(equation, equation.body.output_types, "the body returns", fix)


def check_operands(equation: Equation, operands: tuple[Var, ...], body: Trace) -> None:
    """Raise unless a body takes exactly these operands."""
    fix = "A body has one input for each operand, in order, with repeats."
    if len(operands) != len(body.inputs):
        what = (
            f"{equation.op}: the body takes {len(body.inputs)} inputs, but there are"
            f" {len(operands)} operands"
        )
        raise InvalidTrace(_at(what, equation, fix))
    for var, parameter in zip(operands, body.inputs, strict=True):
        difference = _difference(var.type, parameter.type, ())
        if difference is not None:
            what = (
                f"{equation.op}: the body takes {parameter}: {parameter.type}, but the operand"
                f" {var} is {var.type}{difference}"
            )
            raise TraceTypeError(_at(what, equation, fix))


def check_types(
    equation: Equation, types: tuple[Type, ...], giver: str, fix: str | None = None
) -> None:
    """Raise unless the outputs of an equation have these types."""
    if len(types) != len(equation.outputs):
        what = (
            f"{equation.op}: the equation has {len(equation.outputs)} outputs, but {giver}"
            f" {len(types)}"
        )
        raise InvalidTrace(_at(what, equation, fix))
    made = made_by(equation)
    for position, (var, type) in enumerate(zip(equation.outputs, types, strict=True)):
        difference = _difference(var.type, type, made)
        if difference is not None:
            what = (
                f"{equation.op}: output {position} ({var}) is {var.type}, but {giver}"
                f" {type}{difference}"
            )
            raise TraceTypeError(_at(what, equation, fix))


def _difference(a: Type, b: Type, made: Collection[Any]) -> str | None:
    """None for types that are equal wherever the constraints hold; otherwise numbers for which they
    are not, if any are.

    Only data says the value of a size that the equation itself finds.
    """
    if a == b:
        return None
    if (
        isinstance(a, NumberType)
        and isinstance(b, NumberType)
        and a.kind is b.kind
        and a.value is not None
    ):
        return None if a.value.value in made else ""
    if (
        not isinstance(a, TensorType)
        or not isinstance(b, TensorType)
        or replace(a, shape=b.shape) != b
    ):
        return ""
    if len(a.shape) != len(b.shape):
        return ""
    for size, its in zip(a.shape, b.shape, strict=True):
        if isinstance(size, Expr) and size.value in made:
            continue
        if isinstance(size, Expr) or isinstance(its, Expr):
            broken = counterexample(equality(size, its), _premises.get())
            if broken is not None:
                return _where(broken)
        elif size != its:
            return ""
    return None


def _where(point: dict[str, int]) -> str:
    return f", as where {', '.join(f'{name} = {number}' for name, number in point.items())}"


def fake_result_types(equation: Equation) -> tuple[Type, ...] | None:
    """The types that a leaf gives for the types of its operands, or None where types alone do not
    tell.

    They do not where an operand is a number, or where the result depends on data or on strides. Nor
    do custom ops without a fake implementation.
    """
    return _found_types(equation)[0] if _has_types(equation) else None


def _found_types(equation: Equation) -> tuple[tuple[Type, ...] | None, tuple[Expr, ...]]:
    """The types, and the relations of symbolic sizes from which they follow."""
    find = getattr(_fake_result_types, "__wrapped__" if equation.op.is_foreign else "__call__")
    return find(equation.op, *types_in(equation))


def _has_types(equation: Equation) -> bool:
    return not any(isinstance(var.type, NumberType) for var in equation.operands)


def types_in(equation: Equation) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The args and kwargs of an equation, with types in place of variables."""
    return map_args(lambda var: var.type, equation)


@kept(16384)
def _fake_result_types(
    op: Op, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[tuple[Type, ...] | None, tuple[Expr, ...]]:
    """The types, and the relations of symbolic sizes from which they follow."""
    if op in facts.SHAPED_BY_STRIDES:
        return None, ()
    mode, decided = RecordingMode(), list[Expr]()
    if next(symbols_in((args, kwargs)), None) is not None:
        mode.numbers.on_assertion = decided.append
    try:
        result = fake_result(op, args, kwargs, mode)
    except (DATA_DEPENDENT_SHAPE, DATA_DEPENDENT_VALUE, UnsupportedOperatorException):
        return None, ()
    except RuntimeError:
        if op in facts.ADDRESSES:
            return None, ()
        raise
    decided += mode.numbers.constraints if mode.shape_env is not None else ()
    values = () if ops.returns_nothing(op) else ops.flatten_result(result)
    return tuple(map(type_of_value, values)), tuple(decided)


def fake_result(
    op: Op,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    mode: RecordingMode | None = None,
) -> Any:
    """Run a leaf on fake tensors, untouched by the modes and torch.func levels that are on.

    In the arguments, types stand for variables, as `types_in` gives them.
    """
    mode, symbolic = mode or RecordingMode(), next(symbols_in((args, kwargs)), None) is not None
    with (
        isolated(),
        no_torch_function(),
        no_autocast(),
        symbolic_dispatch() if symbolic else nullcontext(),
        mode,
    ):
        operands = [_fake(mode, arg) for arg in args]
        options = {key: _fake(mode, arg) for key, arg in kwargs}
        return call_on_fakes(ops.overload(op), *operands, **options)


def _fake(mode: RecordingMode, arg: Arg | Type) -> Any:
    match arg:
        case TensorType():
            return torch.empty(tuple(map(mode.size, arg.shape)), dtype=arg.dtype, device=arg.device)
        case Literal():
            return mode.size(arg.value) if isinstance(arg.value, Expr) else arg.value
        case tuple():
            return [_fake(mode, item) for item in arg]
        case _:
            return None
