"""Walk: run an interpreter over a trace, into a builder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import sympy

from thunder_fn.errors import ThunderError, TraceTypeError
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import equality, renamed
from thunder_fn.ir.memos import fact
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.symbols import finders, symbols_in
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Expr,
    Literal,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    cut,
    map_arg,
    map_args,
    supplying,
)

V = TypeVar("V")
Step: TypeAlias = Callable[[Equation, tuple[V, ...]], Sequence[V]]
"""An interpreter: an equation and the values of its operands, to one value for each output."""


def walk(
    builder: TraceBuilder,
    trace: Trace,
    arguments: Sequence[V],
    step: Step[V],
    *,
    lift: Callable[[Atom], V] = lambda atom: atom,  # type: ignore[assignment,return-value]
    call: Source | None = None,
) -> tuple[V, ...]:
    """Run an interpreter over a trace, into a builder.

    Before: `arguments` holds one value for each input of the trace.
    After: returns one value for each output. The builder holds the constants and the constraints of
        the trace.

    Law: with `put` as its step, the builder builds the trace again: `==` holds.

    Args:
        step: gives one value for each output of an equation. It reads types from the equation it is
            given, since unbacked sizes are renamed where the builder has a size of that name.
        lift: gives the value of a constant or a literal.
        call: the source of the call whose body the trace is.

    Raises:
        TraceTypeError: `arguments` are more or fewer than the inputs, or the step gives more or
            fewer values than the equation has outputs; names the equation.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x.sin() + 1, torch.ones(2))
        >>> builder = tfn.ir.TraceBuilder("copy")
        >>> def step(equation, operands):
        ...     print(equation.op.name)
        ...     return tfn.ir.put(builder, equation, operands)
        >>> outputs = tfn.ir.walk(builder, trace, builder.take(trace.input_types), step)
        aten.sin.default
        aten.add.Tensor
        >>> builder.build(outputs) == trace
        True
    """
    trace = _with_own_names(builder, trace)
    _check_count(f"{trace.name} takes", trace.inputs, "inputs", arguments)
    builder.require(trace.constraints)
    env: dict[int, V] = {
        var.index: value for var, value in zip(trace.inputs, arguments, strict=True)
    }
    for constant in trace.constants:
        env[constant.var.index] = lift(
            builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
        )
    for equation in trace.equations:
        if call is not None:
            equation = at(equation, call)
        try:
            results = step(equation, tuple([env[var.index] for var in equation.operands]))
        except ThunderError as error:
            error.locate(equation.source)
            raise
        if len(results) != len(equation.outputs):
            _check_count("the step must return", equation.outputs, "values", results, equation)
        for var, value in zip(equation.outputs, results, strict=True):
            env[var.index] = value
    return tuple(
        [env[atom.index] if isinstance(atom, Var) else lift(atom) for atom in trace.outputs]
    )


def _check_count(
    what: str,
    expected: Sequence[Var],
    noun: str,
    given: Sequence[object],
    equation: Equation | None = None,
) -> None:
    if len(expected) != len(given):
        text = f"{what} {len(expected)} {noun}, given {len(given)}"
        if equation is None:
            raise TraceTypeError(text)
        raise TraceTypeError(text, equation=format_equation(equation), source=equation.source)


def put(
    builder: TraceBuilder,
    equation: Equation,
    operands: Sequence[Atom],
    *,
    bodies: tuple[Trace, ...] | None = None,
    types: tuple[Type, ...] | None = None,
) -> tuple[Var, ...]:
    """Append an equation on other operands, one for each of its own, in order: the default step.

    Law: the new equation computes from its operands what the old one computed from its own.

    Raises:
        TraceTypeError: the operands are more or fewer than those of the equation.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x.sin() + 1, torch.ones(2))
        >>> builder = tfn.ir.TraceBuilder("copy")
        >>> values = dict(zip(trace.inputs, builder.take(trace.input_types)))
        >>> for equation in trace.equations:
        ...     new = tfn.ir.put(builder, equation, [values[var] for var in equation.operands])
        ...     values.update(zip(equation.outputs, new))
        >>> builder.build(tuple(values[var] for var in trace.outputs)) == trace
        True
    """
    if len(operands) != len(equation.operands):
        _check_count("put: the equation reads", equation.operands, "operands", operands, equation)
    return builder.copy(equation, supplying(operands), bodies=bodies, types=types)


def begun_with(trace: Trace) -> tuple[TraceBuilder, tuple[Atom, ...]]:
    """A builder with the inputs and equations of a trace, and the trace's outputs in it."""
    builder = TraceBuilder(trace.name)
    return builder, inline_into(builder, trace, builder.take(trace.input_types))


def inline_into(
    builder: TraceBuilder, trace: Trace, arguments: Sequence[Atom], source: Source | None = None
) -> tuple[Atom, ...]:
    """Append a trace's equations and return the atoms of its outputs.

    The source is that of the call whose body the trace is. Modules are named as seen from there,
    and equations without a source get it.

    Law: what is built evaluates to ``evaluate(trace, arguments)`` there.

    Errors as in `walk`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(torch.sin, torch.ones(2))
        >>> builder = tfn.ir.TraceBuilder("twice")
        >>> (x,) = builder.take(trace.input_types)
        >>> for _ in range(2):
        ...     (x,) = tfn.ir.inline_into(builder, trace, (x,))
        >>> print(builder.build((x,)))
        def twice(v0):
            # v0: f32[2]
            v1 = aten.sin.default(v0)  # f32[2]
            v2 = aten.sin.default(v1)  # f32[2]
            return (v2,)
    """
    return walk(builder, trace, arguments, partial(put, builder), call=source)


def rewritten(
    trace: Trace,
    step: Callable[[TraceBuilder, Equation, tuple[Atom, ...]], Sequence[Atom]],
    *,
    types: Sequence[Type] | None = None,
    name: str | None = None,
) -> Trace:
    """Return the trace with something else in place of its equations.

    Law: with `put` as its step, the result is the trace: `==` holds.

    Args:
        step: (builder, equation, operands) -> one atom for each output. `put` leaves the equation
            as it is.
        types: those of the new inputs; the trace's own by default.
        name: of the new trace; the trace's own by default.

    Errors as in `walk`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x: x.sin(), torch.ones(2))
        >>> keep = lambda builder, equation, atoms: tfn.ir.put(builder, equation, atoms)
        >>> rewritten(trace, keep) == trace
        True
    """
    builder = TraceBuilder(trace.name if name is None else name)
    arguments = builder.take(trace.input_types if types is None else types)
    return builder.build(walk(builder, trace, arguments, partial(step, builder)))


def resized(builder: TraceBuilder, value: Var, type: Type, name: str) -> Var:
    """Add a value whose sizes are those of the type, which is asserted in the name of an op."""
    assert isinstance(value.type, TensorType) and isinstance(type, TensorType), "a tensor has sizes"
    for known, size in zip(value.type.shape, type.shape, strict=True):
        if known != size:
            relation = equality(known, size)
            what = Literal(f"{name}: {relation} does not hold")
            builder.add(ops.ASSERT, (Literal(relation), what), ())
    return ops.emit(builder, ops.RESHAPE, (value, type.shape), type)


def unfolded(trace: Trace, is_open: Callable[[Equation], bool]) -> Trace:
    """Return the trace with the bodies of some composites in place of their calls.

    Law: same values, bitwise. Bodies are left as they are.
    """

    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> tuple[Atom, ...]:
        if is_open(equation):
            return inline_into(builder, equation.body, operands, equation.source)
        return put(builder, equation, operands)

    return rewritten(trace, step)


def merged(
    trace: Trace,
    same: Callable[[Equation], Sequence[Var] | Equation | None],
    body: Callable[[Trace], Trace] = lambda body: body,
) -> tuple[Trace, tuple[int, ...]]:
    """Return the trace without equations whose results are known already, and their positions.

    Args:
        same: an equation on what its operands are known as -> the variables that its results are,
            another equation for them, or None to keep it.
        body: what becomes of a body.
    """
    names: dict[int, Var] = {}
    kept, gone = list[Equation](), list[int]()
    read: Callable[[Var], Var] = lambda var: names.get(var.index, var)
    for position, equation in enumerate(trace.equations):
        args, kwargs = map_args(read, equation)
        bodies = tuple(map(body, equation.bodies))
        new = Equation(equation.op, args, kwargs, equation.outputs, bodies, equation.source)
        known = same(new)
        if known is None or isinstance(known, Equation):
            kept.append(known or new)
        else:
            pairs = zip(new.outputs, known, strict=True)
            names.update((var.index, other) for var, other in pairs)
            gone.append(position)
    return cut(trace, equations=kept, outputs=map_arg(read, trace.outputs)), tuple(gone)


def at(equation: Equation, call: Source) -> Equation:
    """Return the equation as it is seen from a call in whose body it stands.

    Law: it computes the same; only its source differs.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> (call,) = tfn.trace(torch.nn.Sequential(torch.nn.Tanh()), torch.ones(2)).equations
        >>> inner = tfn.ir.at(call.bodies[0].equations[0], call.source)
        >>> inner.source.module
        '0'
    """
    where = equation.source.called_from(call) if equation.source else call
    if where is equation.source:
        return equation
    return Equation(
        equation.op, equation.args, equation.kwargs, equation.outputs, equation.bodies, where
    )


def _with_own_names(builder: TraceBuilder, trace: Trace) -> Trace:
    """Rename the unbacked sizes that the builder has already.

    A body that is unfolded twice finds two numbers. Names that its inputs or outputs show stay, as
    the types around it mention them. No two get one new name, and none gets one that a body uses.
    """
    found = finders(trace)
    if not found:
        return trace
    taken = set(symbols_in((builder.inputs, builder.equations)))
    shown = set(symbols_in((trace.inputs, trace.outputs)))
    again = [symbol for symbol in found if symbol in taken and symbol not in shown]
    if not again:
        return trace
    names = dict[sympy.Basic, Expr]()
    taken |= _mentioned(trace)
    for symbol in again:
        copy = _copy_of(symbol, taken)
        names[symbol] = Expr(copy)
        taken.add(copy)
    return renamed(names)(trace)


@fact
def _mentioned(trace: Trace) -> frozenset[sympy.Basic]:
    """Return all symbols of a trace and its bodies, including sizes that bodies find."""
    inside = (_mentioned(body) for equation in trace.equations for body in equation.bodies)
    known = symbols_in((trace.inputs, trace.equations, trace.outputs, trace.constraints))
    return frozenset(known).union(*inside)


def _copy_of(symbol: sympy.Basic, taken: set[sympy.Basic]) -> sympy.Basic:
    """Return a symbol like this one whose name is free: `u0_1`, `u0_2`, ..."""
    name = str(symbol).split("_")[0]
    copies = (sympy.Symbol(f"{name}_{i}", **symbol.assumptions0) for i in itertools.count(1))
    return next(copy for copy in copies if copy not in taken)
