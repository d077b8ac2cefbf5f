"""Symbols: numbers that a trace does not know, such as a tensor's size, and expressions over them.

    f32[s0, 2*s1]          a type
    aten.expand.default(v0, (s0, 4))          an argument
    where s0 > 5           a constraint

**The types of a trace's inputs bind its symbols.** The first input with a bare `s0` among its sizes
binds it, or the first that is the number `s0` itself. An equation whose result has a size that
depends on data binds a symbol of its own, `u0`. Symbols are in scope in the bodies of equations, as
type variables of a function are in functions inside it. So no interpreter has to hand numbers from
trace to trace.

A symbol knows the number that it stood for when its trace was made, its `hint`. When a rule is
derived and PyTorch asks whether `s0 > 2`, the hint answers and the answer becomes a constraint of
the trace. Traces that were made of other numbers have other symbols, so nothing that is remembered
of one is taken for the other.

An equation that finds a size in data stays while anything may read the symbol, and is never merged.
It stands at the top of its trace, so scopes around it dissolve. Rules take such a size to be two or
more, as PyTorch does. A body that is written out twice finds two numbers (`u0`, `u0_1`). A capture
that meets one starts again with symbols on, so static captures pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import sympy

from thunder_fn.errors import InvalidTrace, TraceTypeError
from thunder_fn.ir.memos import fact, kept
from thunder_fn.ir.trace import (
    Equation,
    Expr,
    Literal,
    NumberType,
    TensorType,
    Trace,
    Type,
    Var,
    all_args,
    as_dim,
    subtraces,
    symbols_of_type,
)
from thunder_fn.torch_internals.numbers import as_number, number_said

Number = bool | int | float
Values = Mapping[sympy.Basic, Number]


Bounds = tuple[float | None, float | None]
"""The least and the greatest number that a symbol can be; None where it has no such bound."""

UNBOUND: Bounds = (None, None)


class Symbol(sympy.Symbol):
    """A number that a trace takes, its value when the trace was made, and its bounds. Two are
    equal if all are.
    """

    __slots__ = ("_content", "bounds", "hint")
    hint: Number
    bounds: Bounds
    _content: tuple[Any, ...]

    def __new__(
        cls, name: str, hint: Number, bounds: Bounds = UNBOUND, **assumptions: bool
    ) -> Symbol:
        """Assumptions are sympy's."""
        self = sympy.Symbol.__xnew__(cls, name, **assumptions)
        self.hint, self.bounds = hint, bounds
        known = tuple(sorted(self.assumptions0.items()))
        self._content = name, repr(hint), bounds, known
        return self

    def _hashable_content(self) -> tuple[Any, ...]:
        return self._content

    def __getnewargs_ex__(self) -> Any:
        return (self.name, self.hint, self.bounds), self._assumptions_orig


def size_symbol(index: int, hint: int, bounds: Bounds = UNBOUND) -> Symbol:
    """A size of at least two: sizes 0 and 1 broadcast or hold nothing, and are never symbols."""
    return Symbol(f"s{index}", hint, bounds, integer=True, positive=True)


def number_symbol(index: int, hint: float, bounds: Bounds = UNBOUND) -> Symbol:
    """A number that the function is called with: an int or a float."""
    if isinstance(hint, int):
        return Symbol(f"s{index}", hint, bounds, integer=True)
    return Symbol(f"zf{index}", hint, bounds, real=True)


# ---- expressions as Python ----


@kept(65536)
def compiled(expr: Expr) -> tuple[tuple[sympy.Basic, ...], Callable[..., Any]]:
    """The symbols of an expression, and a function of their values."""
    symbols = tuple(sorted(expr.value.free_symbols, key=str))
    text = f"lambda {', '.join(map(str, symbols))}: {expr}"
    return symbols, eval(text, {"math": math})


def compute(expr: Expr, values: Values) -> Number:
    """The value of an expression.

    Raises:
        InvalidTrace: one of its symbols has no value.
    """
    symbols, function = compiled(expr)
    try:
        return function(*(values[symbol] for symbol in symbols))
    except KeyError as error:
        raise InvalidTrace(f"the symbol {error} in {expr} has no value") from None


# ---- which symbols there are ----


def symbols_in(value: Any) -> Iterator[sympy.Basic]:
    """The symbols in types, arguments, equations and traces, with repeats; in bodies, those from
    outside.
    """
    match value:
        case Expr():
            yield from value.value.free_symbols
        case Literal():
            yield from symbols_in(value.value)
        case Var():
            yield from symbols_of_type(value.type)
        case TensorType() | NumberType():
            yield from symbols_of_type(value)
        case tuple() | list():
            for item in value:
                yield from symbols_in(item)
        case Equation():
            yield from symbols_in((all_args(value), value.outputs, value.bodies))
        case Trace():
            yield from symbols_of(value)
        case _ if _is_record(value):
            yield from symbols_in([getattr(value, field.name) for field in fields(value)])
        case _:
            pass


def _is_record(value: Any) -> bool:
    """Test for an object with fields, such as a rule: types and traces among them have symbols."""
    return is_dataclass(value) and not isinstance(value, type)


@fact
def symbols_of(trace: Trace) -> frozenset[sympy.Basic]:
    """The symbols that a trace mentions and that its own equations do not bind."""
    found = set(symbols_in((trace.inputs, trace.outputs, trace.constraints)))
    found.update(symbol for equation in trace.equations for symbol in symbols_in(equation))
    return frozenset(found - finders(trace).keys())


def made_by(equation: Any) -> tuple[sympy.Basic, ...]:
    """The unbacked sizes and numbers that an equation, or the record of one, finds.

    They stand bare in its results, have no hint, and nothing that it is given mentions them.
    """
    found = [
        symbol
        for var in equation.outputs
        for _, symbol in _bare(var.type)
        if not isinstance(symbol, Symbol)
    ]
    if not found:
        return ()
    given = set(symbols_in(all_args(equation)))
    given.update(*(symbols_of(body) for body in equation.bodies if isinstance(body, Trace)))
    return tuple(dict.fromkeys(symbol for symbol in found if symbol not in given))


@fact
def finders(trace: Trace) -> dict[sympy.Basic, Var]:
    """The first variable that binds each unbacked size or number found by a trace's own equations.

    A symbol that is mentioned before is known from around the trace.
    """
    found: dict[sympy.Basic, Var] = {}
    if not any(map(made_by, trace.equations)):
        return found
    known = set(symbols_in(trace.inputs))
    for equation in trace.equations:
        bound = binders(equation.outputs)
        found.update(
            (symbol, bound[symbol][0]) for symbol in made_by(equation) if symbol not in known
        )
        known.update(symbols_in(equation))
    return found


def mentions(equation: Equation, symbols: Collection[sympy.Basic]) -> bool:
    """Test whether the equation computes with one of the symbols, or finds it."""
    return bool(symbols) and any(symbol in symbols for symbol in symbols_in(equation))


@fact
def symbols_read(trace: Trace) -> frozenset[sympy.Basic]:
    """The symbols that a program computes with: those in arguments, also in bodies, and outputs."""
    found = set(symbols_in(tuple(atom for atom in trace.outputs if isinstance(atom, Literal))))
    for equation in trace.equations:
        found.update(symbols_in(without_vars(equation.args)))
        found.update(symbols_of_options(equation))
        for body in equation.bodies:
            found |= symbols_read(body) & symbols_of(body)
            found.update(unbound_symbols(body))
    return frozenset(found)


def symbols_of_options(equation: Equation) -> Iterator[sympy.Basic]:
    """The symbols in an equation's keyword arguments; a loop of so many steps also needs to know
    the sizes of its results, but for those that its own body finds in data.

    It may make none, and then it makes empty stacks.
    """
    own = tuple(symbols_in(without_vars(tuple(arg for _, arg in equation.kwargs))))
    yield from own
    if own and equation.op.kind == "structured":
        found = made_by(equation)
        yield from (symbol for symbol in symbols_in(equation.outputs) if symbol not in found)


def without_vars(arg: Any) -> Any:
    """An argument without its variables: the literals and expressions in it."""
    if isinstance(arg, tuple):
        return tuple(map(without_vars, arg))
    return () if isinstance(arg, Var) else arg


def _bare(type: Type) -> Iterator[tuple[int | None, sympy.Basic]]:
    """The places of a type where a symbol stands alone: a dim, or None where a number is the
    symbol.
    """
    if isinstance(type, TensorType):
        for dim, size in enumerate(type.shape):
            if isinstance(size, Expr) and size.value.is_Symbol:
                yield dim, size.value
    elif isinstance(type, NumberType) and isinstance(type.value, Expr):
        value = type.value.value
        if (
            type.kind is bool and isinstance(value, sympy.Eq) and value.rhs == 1
        ):  # PyTorch's form of a flag
            value = value.lhs
        if value.is_Symbol:
            yield None, value


def binders(variables: Iterable[Var]) -> dict[sympy.Basic, tuple[Var, int | None]]:
    """The variable and the dim that bind each symbol in the types of these variables."""
    found: dict[sympy.Basic, tuple[Var, int | None]] = {}
    for var in variables:
        for dim, symbol in _bare(var.type):
            found.setdefault(symbol, (var, dim))
    return found


def unbound_symbols(trace: Trace) -> tuple[sympy.Basic, ...]:
    """The symbols that the trace takes from around it, by name."""
    return tuple(sorted(symbols_of(trace) - binders(trace.inputs).keys(), key=str))


def bind(variables: Sequence[Var], values: Sequence[Any]) -> dict[sympy.Basic, Number]:
    """Compute the symbols from the values of the variables whose types bind them."""
    place = {var.index: value for var, value in zip(variables, values, strict=True)}
    return {
        symbol: number_said(place[var.index]) if dim is None else place[var.index].shape[dim]
        for symbol, (var, dim) in binders(variables).items()
    }


# ---- putting expressions in place of symbols ----


class Substitution:
    """A substitution of numbers or expressions for symbols, wherever they stand. Equal bodies
    stay one object.
    """

    def __init__(self, change: Callable[[Expr], Expr | Number]) -> None:
        self.change = change
        self._bodies: dict[Trace, Trace] = {}

    def type(self, type: Type) -> Type:
        """Substitute in a type."""
        match type:
            case TensorType() if any(not isinstance(size, int) for size in type.shape):
                return replace(type, shape=tuple(as_dim(self.value(size)) for size in type.shape))
            case NumberType(kind, Expr() as value):
                new = self.change(value)
                return NumberType(kind, new if isinstance(new, Expr) else None)
            case _:
                return type

    def value(self, value: Any) -> Any:
        """Substitute in the value of a literal."""
        match value:
            case Expr():
                return self.change(value)
            case Trace():
                return self.trace(value)
            case TensorType() | NumberType():
                return self.type(value)
            case Literal():
                return self.arg(value)
            case tuple():
                return getattr(value, "_make", tuple)(map(self.value, value))
            case _ if _is_record(value):
                return self._record(value)
            case _:
                return value

    def _record(self, value: Any) -> Any:
        """Substitute in the fields of an object in a literal."""
        parts = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        if not any(True for _ in symbols_in(tuple(parts.values()))):
            return value
        return replace(value, **{name: self.value(part) for name, part in parts.items()})

    def arg(self, arg: Any) -> Any:
        """Substitute in an argument."""
        match arg:
            case Var():
                new = self.type(arg.type)
                return arg if new is arg.type else Var(arg.index, new)
            case Literal():
                new = self.value(arg.value)
                return arg if new is arg.value else Literal(new)
            case _:
                return tuple(map(self.arg, arg))

    def equation(self, equation: Equation) -> Equation:
        """An equation and its bodies."""
        return Equation(
            equation.op,
            tuple(map(self.arg, equation.args)),
            tuple((key, self.arg(arg)) for key, arg in equation.kwargs),
            tuple(map(self.arg, equation.outputs)),
            tuple(map(self.trace, equation.bodies)),
            equation.source,
        )

    def trace(self, trace: Trace) -> Trace:
        """A trace; constraints that come out true are left out."""
        if trace not in self._bodies:
            changed = (self.change(constraint) for constraint in trace.constraints)
            self._bodies[trace] = Trace(
                tuple(map(self.arg, trace.inputs)),
                tuple(map(self.equation, trace.equations)),
                tuple(map(self.arg, trace.outputs)),
                trace.constants,
                tuple(
                    dict.fromkeys(
                        constraint for constraint in changed if isinstance(constraint, Expr)
                    )
                ),
                trace.name,
            )
        return self._bodies[trace]


def specialize(trace: Trace, values: Values) -> Trace:
    """The trace with numbers in place of the symbols that have a value.

    Law: ``evaluate(specialize(t, values), xs)`` is ``evaluate(t, xs)`` for inputs of these sizes.

    Raises:
        TraceTypeError: the values break a constraint of the trace.
    """
    return _specialize(trace, _items(values))


def specialize_equation(equation: Equation, values: Values) -> Equation:
    """The equation with numbers in place of symbols."""
    if not values or not any(symbol in values for symbol in symbols_in(equation)):
        return equation
    return Substitution(lambda expr: replaced(expr, values)).equation(equation)


def specialize_atom(atom: Any, values: Values) -> Any:
    """The variable or literal with numbers in place of symbols."""
    return Substitution(lambda expr: replaced(expr, values)).arg(atom) if values else atom


def _items(values: Values) -> tuple[tuple[sympy.Basic, Any], ...]:
    return tuple(
        sorted(
            ((symbol, as_dim(value)) for symbol, value in values.items()),
            key=lambda item: str(item[0]),
        )
    )


@fact
def _specialize(trace: Trace, items: tuple[tuple[sympy.Basic, Any], ...]) -> Trace:
    values = dict(items)
    for symbol, value in items:
        if symbol.is_positive and isinstance(value, int) and value < 2:
            raise TraceTypeError(f"{trace.name}: the size {symbol} is at least 2, given {value}")
    for constraint in (
        constraint for inner in subtraces(trace) for constraint in inner.constraints
    ):
        if replaced(constraint, values) is False:
            given = ", ".join(f"{symbol} = {value}" for symbol, value in items)
            raise TraceTypeError(
                f"{trace.name}: the trace holds where {constraint}, and not where {given}"
            )
    return Substitution(lambda expr: replaced(expr, values)).trace(trace)


def replaced(expr: Expr, values: Values) -> Any:
    """The expression with values, numbers or expressions, in place of symbols: a number where no
    symbol is left.
    """
    used = {
        symbol: as_dim(values[symbol]) for symbol in expr.value.free_symbols if symbol in values
    }
    if len(used) == len(expr.value.free_symbols) and not any(
        isinstance(value, Expr) for value in used.values()
    ):
        return compute(expr, used)
    exact = {
        symbol: value.value if isinstance(value, Expr) else sympy.sympify(value)
        for symbol, value in used.items()
    }
    value = expr.value.xreplace(exact)
    return Expr(value) if value.free_symbols else as_number(value)


@fact
def is_symbolic(trace: Trace) -> bool:
    """Test whether the trace mentions a symbol somewhere."""
    return any(
        next(symbols_in((inner.inputs, inner.outputs, inner.equations)), None) is not None
        for inner in subtraces(trace)
    )


def hint_of(value: Any) -> Any:
    """An expression's value when its trace was made; anything else as it is.

    Sizes that depend on data had none: they count as two.
    """
    if isinstance(value, tuple):
        return tuple(map(hint_of, value))
    if not isinstance(value, Expr):
        return value
    symbols = value.value.free_symbols
    return compute(value, {symbol: getattr(symbol, "hint", 2) for symbol in symbols})
