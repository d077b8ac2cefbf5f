"""Constraints: relations over symbols that must hold for a trace, a rule, or two types to fit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import facts
from thunder_fn.ir.memos import kept
from thunder_fn.ir.symbols import (
    UNBOUND,
    Substitution,
    Symbol,
    compute,
    hint_of,
    made_by,
    symbols_in,
    symbols_of,
    unbound_symbols,
)
from thunder_fn.ir.trace import (
    Dim,
    Equation,
    Expr,
    Literal,
    NumberType,
    TensorType,
    Trace,
    Type,
    Var,
    all_args,
    cut,
    subtraces,
)
from thunder_fn.torch_internals.numbers import as_number


def equals_hint(expr: Expr) -> Expr:
    """The constraint that an expression has its value of when its trace was made."""
    return Expr(sympy.Eq(expr.value, sympy.sympify(hint_of(expr))))


def constraints_of(trace: Trace) -> tuple[Expr, ...]:
    """The constraints of a trace and of all bodies in it, over symbols of the trace."""
    known = symbols_of(trace)
    found = (constraint for inner in subtraces(trace) for constraint in inner.constraints)
    return tuple(
        dict.fromkeys(constraint for constraint in found if constraint.value.free_symbols <= known)
    )


def premises_of(trace: Trace) -> tuple[Expr, ...]:
    """Return what holds wherever a trace does: its constraints, those of its bodies, and facts
    about unbacked sizes.
    """
    found: dict[Expr, None] = {}
    for inner in subtraces(trace):
        found.update(dict.fromkeys(inner.constraints))
        found.update(
            (known, None) for equation in inner.equations for known in _known_of_data(equation)
        )
    return tuple(found)


def _known_of_data(equation: Equation) -> Iterator[Expr]:
    """The assertions of an equation, and the bounds of the sizes that it finds."""
    first = equation.args[0] if equation.args else None
    if (
        equation.op in facts.ASSERTS
        and isinstance(first, Literal)
        and isinstance(first.value, Expr)
    ):
        yield first.value
    if equation.op in facts.FINDS and isinstance(first, Var) and isinstance(first.type, TensorType):
        count = sympy.prod([number_of(size) for size in first.type.shape])
        yield from (Expr(sympy.Le(symbol, count)) for symbol in made_by(equation))


def equality(one: Dim, other: Dim) -> Expr:
    """The relation that two sizes are equal."""
    return Expr(sympy.Eq(number_of(one), number_of(other)))


def number_of(dim: Dim) -> Any:
    """The size as sympy has it."""
    return dim.value if isinstance(dim, Expr) else sympy.Integer(dim)


def product(one: Dim, other: Dim) -> Dim:
    """The product of two sizes."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    return Expr(number_of(one) * number_of(other))


def equations_between(types: Sequence[Type], others: Sequence[Type]) -> tuple[Expr, ...] | None:
    """Return the equations that make two types equal, given that they are equal for the hints; None
    where they are not.
    """
    found: list[Expr] = []
    for one, other in zip(types, others, strict=True):
        if one == other:
            continue
        if (
            not isinstance(one, TensorType)
            or not isinstance(other, TensorType)
            or len(one.shape) != len(other.shape)
        ):
            return None
        if replace(one, shape=other.shape) != other or _is_unknown(one) or _is_unknown(other):
            return None
        for size, its in zip(one.shape, other.shape, strict=True):
            if hint_of(size) != hint_of(its):
                return None
            if size != its:
                found.append(equality(size, its))
    return tuple(dict.fromkeys(found))


def _is_unknown(type: Type) -> bool:
    """Test whether a size of the type depends on data, so that there is no number of the moment."""
    return isinstance(type, TensorType) and any(map(is_in_data, type.shape))


def is_in_data(size: Dim) -> bool:
    """Test whether a size depends on data."""
    return not isinstance(size, int) and any(
        not isinstance(symbol, Symbol) for symbol in size.value.free_symbols
    )


def names_of(types: Sequence[Type], wanted: Sequence[Type]) -> dict[sympy.Basic, Expr]:
    """Map the unbacked sizes of these types to their names in the wanted types of the same
    results.
    """
    found: dict[sympy.Basic, Expr] = {}
    for one, other in zip(types, wanted, strict=False):
        if (
            isinstance(one, TensorType)
            and isinstance(other, TensorType)
            and len(one.shape) == len(other.shape)
        ):
            for size, its in zip(one.shape, other.shape, strict=True):
                if (
                    size != its
                    and isinstance(size, Expr)
                    and isinstance(its, Expr)
                    and not is_hinted(size)
                ):
                    found[size.value] = its
    return found


def renamed(names: Mapping[sympy.Basic, Expr]) -> Callable[[Trace], Trace]:
    """A function that gives unbacked sizes other names.

    If a name stands for an expression, as `u1` for `min(3, u0)`, the equation that binds it keeps
    the expression.
    """
    exact = {size: name.value for size, name in names.items()}
    bare = {size: name for size, name in exact.items() if size.is_Symbol}
    rename, keep = (
        Substitution(lambda expr, to=to: Expr(expr.value.xreplace(to))) for to in (exact, bare)
    )
    compound = {name for size, name in exact.items() if size not in bare}

    def equations(trace: Trace) -> Iterator[Equation]:
        unbound = compound - set(symbols_in(tuple(map(rename.arg, trace.inputs))))
        for equation in trace.equations:
            new = rename.equation(equation)
            bound = unbound & set(symbols_in(new.outputs))
            unbound -= bound
            yield replace(keep.equation(equation), outputs=new.outputs) if bound else new

    def named(trace: Trace) -> Trace:
        whole = rename.trace(trace)
        return replace(whole, equations=tuple(equations(trace))) if compound else whole

    return named


def is_hinted(expr: Expr) -> bool:
    """Test that no part of the expression is unbacked."""
    return all(isinstance(symbol, Symbol) for symbol in expr.value.free_symbols)


def finds_numbers(trace: Trace) -> bool:
    """Test whether sizes or numbers in the trace are unbacked."""
    return any(
        not isinstance(symbol, Symbol)
        for equation in trace.equations
        for symbol in symbols_in(equation)
    )


def fixes_numbers(trace: Trace) -> bool:
    """Test whether a rule holds for one number only, because its derivation took a symbol for the
    number of the moment.
    """
    return any(isinstance(constraint.value, sympy.Eq) for constraint in trace.constraints)


def pinned(single: Trace) -> Trace | None:
    """The equation with the numbers of the moment for symbols among its scalars, which holds for
    these only.

    For the few formulas of PyTorch's that look at a number, such as the derivative of `x ** n`.
    None if there are none.
    """
    (equation,) = single.equations
    scalars: tuple[Any, ...] = all_args(equation)
    found = dict.fromkeys(arg.value for arg in scalars if _is_symbol(arg))
    if not found or not all(map(is_hinted, found)):
        return None

    def number(arg: Any) -> Any:
        return Literal(hint_of(arg.value)) if _is_symbol(arg) else arg

    args = tuple(map(number, equation.args))
    kwargs = tuple((key, number(arg)) for key, arg in equation.kwargs)
    new = Equation(equation.op, args, kwargs, equation.outputs, source=equation.source)
    constraints = tuple(map(equals_hint, found))
    return Trace(single.inputs, (new,), single.outputs, (), constraints)


def _is_symbol(arg: Any) -> bool:
    return isinstance(arg, Literal) and isinstance(arg.value, Expr)


def is_positive(size: Expr) -> bool:
    """Test for a size of an input, which is no symbol where it is 0 or 1."""
    return size.value.is_Symbol and isinstance(size.value, Symbol) and bool(size.value.is_positive)


def close_symbols(trace: Trace) -> tuple[Trace, tuple[Expr, ...]]:
    """The trace with a further input for each symbol that it takes from around it, and these
    symbols.
    """
    unbound = unbound_symbols(trace)
    if not unbound:
        return trace, ()
    bound = (
        len(trace.inputs)
        + len(trace.constants)
        + sum(len(equation.outputs) for equation in trace.equations)
    )
    numbers = tuple(Expr(symbol) for symbol in unbound)
    extra = tuple(
        Var(bound + i, NumberType(int if number.value.is_integer else float, number))
        for i, number in enumerate(numbers)
    )
    inputs = (*trace.inputs, *extra)
    closed = cut(trace, inputs=inputs)
    return closed, numbers


# ---- what follows from constraints ----

_TRIES = 200
"""The number of values that are tried to tell two expressions apart."""


@kept(16384)
def counterexample(relation: Expr, premises: tuple[Expr, ...]) -> dict[str, int] | None:
    """Sizes and numbers that keep the premises and break the relation; None if there are none, or
    none is found.

    A relation that follows by algebra has none. Of anything else the hints are tried first, then
    numbers near them and multiples.
    """
    known = _equalities(premises)
    value = _given(relation.value, known)
    if value == sympy.true:
        return None
    symbols = sorted({*value.free_symbols, *_mentioned(value, premises)} - known.keys(), key=str)
    for point in _points(symbols, known):
        if all(_holds(premise, point) for premise in premises) and not _holds(relation, point):
            return {str(symbol): number for symbol, number in point.items()}
    return None


def _equalities(premises: Iterable[Expr]) -> dict[sympy.Basic, sympy.Basic]:
    """Return what premises such as `s1 == 2*s0` say of single symbols; no right side mentions a
    replaced symbol.
    """
    known: dict[sympy.Basic, sympy.Basic] = {}
    for premise in premises:
        if not isinstance(premise.value, sympy.Eq):
            continue
        left, right = (_given(side, known) for side in premise.value.args)
        for symbol, other in ((left, right), (right, left)):
            if symbol.is_Symbol and symbol not in other.free_symbols:
                known = {name: said.xreplace({symbol: other}) for name, said in known.items()} | {
                    symbol: other
                }
                break
    return known


def _given(value: Any, known: Mapping[sympy.Basic, sympy.Basic]) -> Any:
    value = value.xreplace(known)
    if isinstance(value, (sympy.Eq, sympy.Ne)):
        difference = sympy.expand(value.lhs - value.rhs)  # pyright: ignore[reportOperatorIssue]
        if difference == 0:
            return sympy.true if isinstance(value, sympy.Eq) else sympy.false
    return value


def _mentioned(value: Any, premises: Sequence[Expr]) -> set[Any]:
    """The symbols of premises that have to do with those of a relation."""
    found, before = set(value.free_symbols), -1
    while before != len(found):
        before = len(found)
        for premise in premises:
            if premise.value.free_symbols & found:
                found |= premise.value.free_symbols
    return found


def _points(symbols: Sequence[Any], known: Mapping[Any, Any]) -> Iterator[dict[Any, int]]:
    """Numbers for symbols, from the hints on."""
    draw = random.Random(0)
    for turn in range(_TRIES):
        point = {symbol: _number_for(symbol, draw if turn else None) for symbol in symbols}
        try:
            for symbol, said in known.items():
                if said.free_symbols <= point.keys():
                    point[symbol] = (
                        compute(Expr(said), point) if said.free_symbols else as_number(said)
                    )
        except (ArithmeticError, ValueError):
            continue
        if all(_is_possible(symbol, number) for symbol, number in point.items()):
            yield point


def _number_for(symbol: Any, draw: random.Random | None) -> Any:
    hint = getattr(symbol, "hint", 2)
    if draw is None:
        return hint
    if isinstance(hint, float):
        return draw.choice((hint, hint + 1.5, -hint, hint * 0.5, 3.25))
    return draw.choice(
        (
            hint,
            hint + 1,
            hint - 1,
            2 * hint,
            3 * hint,
            4 * hint,
            draw.randint(2, 9),
            draw.randint(2, 99),
        )
    )


def _is_possible(symbol: Any, number: Any) -> bool:
    low, high = getattr(symbol, "bounds", UNBOUND)
    least = (
        (2 if isinstance(symbol, Symbol) else 0)
        if symbol.is_positive or not isinstance(symbol, Symbol)
        else -math.inf
    )
    return number >= least and (low is None or number >= low) and (high is None or number <= high)


def _holds(relation: Expr, point: Mapping[Any, Any]) -> bool:
    """Test whether a relation holds; a relation that cannot be computed counts as true."""
    try:
        return bool(compute(relation, point))
    except (ArithmeticError, ValueError, InvalidTrace):
        return True
