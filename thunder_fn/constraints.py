"""Constraints: what has to hold of symbols for a trace, a rule, or two types to fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import sympy

from thunder_fn.symbols import Substitution, Symbol, hint_of, symbols_of
from thunder_fn.trace import Expr, TensorType, Trace, Type, subtraces, symbols_of_type


def equals_hint(expr: Expr) -> Expr:
    """The constraint that an expression is what it was when its trace was made."""
    return Expr(sympy.Eq(expr.value, sympy.sympify(hint_of(expr))))


def constraints_of(trace: Trace) -> tuple[Expr, ...]:
    """The constraints of a trace and of all bodies in it, over symbols of the trace."""
    known = symbols_of(trace)
    found = (constraint for inner in subtraces(trace) for constraint in inner.constraints)
    return tuple(dict.fromkeys(constraint for constraint in found if constraint.value.free_symbols <= known))


def equations_between(types: Sequence[Type], others: Sequence[Type]) -> tuple[Expr, ...] | None:
    """What must hold for these types to be equal, where they are for the moment's numbers; None where they are not."""
    found: list[Expr] = []
    for one, other in zip(types, others, strict=True):
        if one == other:
            continue
        if not isinstance(one, TensorType) or not isinstance(other, TensorType) or len(one.shape) != len(other.shape):
            return None
        if replace(one, shape=other.shape) != other or _is_unknown(one) or _is_unknown(other):
            return None
        for size, its in zip(one.shape, other.shape, strict=True):
            if hint_of(size) != hint_of(its):
                return None
            if size != its:
                found.append(Expr(sympy.Eq(*(dim.value if isinstance(dim, Expr) else dim for dim in (size, its)))))
    return tuple(dict.fromkeys(found))


def _is_unknown(type: Type) -> bool:
    """A size of the type depends on data, so that there is no number of the moment."""
    return any(not isinstance(symbol, Symbol) for symbol in symbols_of_type(type))


def names_of(types: Sequence[Type], wanted: Sequence[Type]) -> dict[sympy.Basic, Expr]:
    """For the sizes found in data that these types have, what they are called in the wanted types of the same results."""
    found: dict[sympy.Basic, Expr] = {}
    for one, other in zip(types, wanted, strict=False):
        if isinstance(one, TensorType) and isinstance(other, TensorType):
            for size, its in zip(one.shape, other.shape, strict=True):
                if size != its and isinstance(size, Expr) and isinstance(its, Expr) and not is_hinted(size):
                    found[size.value] = its
    return found


def renamed(names: Mapping[sympy.Basic, Expr]) -> Callable[[Trace], Trace]:
    """A function that gives symbols other names."""
    return Substitution(lambda expr: Expr(expr.value.xreplace({old: new.value for old, new in names.items()}))).trace


def is_hinted(expr: Expr) -> bool:
    """Nothing in the expression is found in data."""
    return all(isinstance(symbol, Symbol) for symbol in expr.value.free_symbols)


def fixes_numbers(trace: Trace) -> bool:
    """A rule holds for one number only: what it was derived from took a symbol for the number of the moment."""
    return any(isinstance(constraint.value, sympy.Eq) for constraint in trace.constraints)
