"""Symbolic numbers: PyTorch's ShapeEnv behind the project's expressions."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE, precedence
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    SLoc,
    ValueRangesSLoc,
)
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

from thunder_fn.ir.trace import Expr
from thunder_fn.torch_internals.without_dynamo import without_dynamo

OnDecision = Callable[[Expr, "bool | float"], None]


_NOWHERE = SLoc("", None)


def unknown(symbol: Any) -> None:
    """The number of an unbacked symbol of which nothing is known."""


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Logs for tools of Dynamo. To write the stack into them imports Dynamo and inductor."""


_make_env = without_dynamo(ShapeEnv.__init__)


class Numbers(ShapeEnv):
    """PyTorch's ShapeEnv over symbols of ours: it does the algebra, and tells of each decision that
    depends on hints.

    `on_decision(question, answer)` is told of `s0 > 5` and what the hints say. Or it is told of
    `s0` and the number that it is taken for from now on.
    """

    _init = without_dynamo(ShapeEnv._init)
    _set_replacement = without_dynamo(ShapeEnv._set_replacement, trace_structured=_log_nothing)

    def __init__(self, on_decision: OnDecision | None = None) -> None:
        _make_env(self, duck_shape=False)
        self.on_decision = on_decision
        self.on_assertion: Callable[[Expr], None] | None = None
        self.value_of: Callable[[Any], Any] = unknown
        self.least_size = 0

    def guard_or_defer_runtime_assert(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, orig_expr: Any, msg: str, fx_node: Any = None
    ) -> bool:
        """Record a demand on sizes that depend on data."""
        before = self.num_deferred_runtime_asserts
        result = super().guard_or_defer_runtime_assert(orig_expr, msg, fx_node)
        if self.num_deferred_runtime_asserts > before and self.on_assertion is not None:
            self.on_assertion(Expr(orig_expr))
        return result

    def _get_stack_summary(
        self, is_debug: bool = False, framework_loc: str | None = None
    ) -> tuple[Any, str]:
        """Return no stack: the place in PyTorch's code is never shown, and finding it imports
        `torch.export`.
        """
        return _NOWHERE, ""

    _log_guard = _log_nothing

    def _log_create_unbacked_symbol(self, *args: Any, **kwargs: Any) -> None:
        """Logs for tools of Dynamo, which import `torch.export` too."""

    def number(self, expr: Expr) -> Any:
        """An expression as PyTorch computes with it. Symbols become known when they are first
        seen.
        """
        for symbol in sorted(expr.value.free_symbols, key=str):
            self._know(symbol)
        kind: Any = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[expr.kind]
        return kind(SymNode(expr.value, self, expr.kind, None))

    def computed(self, value: Any, hint: float | None) -> Any:
        """A float that an expression over known symbols computes, and what it is for their
        hints.
        """
        return torch.SymFloat(SymNode(value, self, float, hint))

    def _know(self, symbol: Any) -> None:
        if symbol in self.var_to_range:
            return
        hint = getattr(symbol, "hint", None)
        if hint is None:
            self._know_made(symbol)
            limits = (
                ValueRanges(self.least_size, int_oo)
                if symbol.is_integer
                else ValueRanges(-sympy.oo, sympy.oo)
            )
        elif isinstance(hint, float):
            self.backed_var_to_val[symbol] = sympy.Float(hint)  # pyright: ignore[reportArgumentType]
            limits = _between(symbol.bounds, -sympy.oo, sympy.oo, sympy.Float)
        else:
            self.backed_var_to_val[symbol] = sympy.Integer(hint)
            limits = _between(
                symbol.bounds, 2 if symbol.is_positive else -int_oo, int_oo, sympy.Integer
            )
        self.var_to_range[symbol] = limits
        here = self._get_sloc()
        self.var_to_range_sloc[symbol] = ValueRangesSLoc(here, here)
        self.var_to_sources[symbol] = []

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """An unbacked size of an op."""
        size = super().create_unbacked_symint(*args, **kwargs)
        if self.least_size:
            self.var_to_range[size.node.expr] = ValueRanges(self.least_size, int_oo)
        return size

    def found(self, kind: type) -> Expr:
        """A new symbol for an unbacked number."""
        with self.ignore_fresh_unbacked_symbols():
            number = (
                self.create_unbacked_symfloat() if kind is float else self.create_unbacked_symint()
            )
        return Expr(number.node.expr)

    def found_size(self) -> Expr:
        """A new symbol for an unbacked size."""
        size = self.found(int)
        self.var_to_range[size.value] = ValueRanges(self.least_size, int_oo)  # pyright: ignore[reportArgumentType]
        return size

    def _constrain_range_for_size(
        self, a: Any, min: int | None = None, max: int | None = None
    ) -> None:
        """Bound a size; a rule is derived as if it were two or more, whatever there is room for."""
        super()._constrain_range_for_size(
            a, min, None if max is not None and max < self.least_size else max
        )

    def _know_made(self, symbol: Any) -> None:
        """New symbols get other names than one that depends on data."""
        self.var_to_stack[symbol] = CapturedTraceback.extract()  # an error shows it
        index = int(symbol.name.split("_")[0].lstrip("zufs"))  # u0_1 is a copy of u0
        if symbol.is_integer:
            self.unbacked_symint_counter = max(self.unbacked_symint_counter, index + 1)
        else:
            self.unbacked_symfloat_counter = max(self.unbacked_symfloat_counter, index + 1)

    def _evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(self.guards)
        try:
            result = super()._evaluate_expr(orig_expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            if (known := self._known(orig_expr)) is None:
                raise
            return known
        if len(self.guards) > before and self.on_decision is not None:
            self.on_decision(Expr(orig_expr), as_number(result))
        return result

    def _known(self, expr: Any) -> Any:
        """The value of an expression over unbacked symbols whose numbers are known, or None."""
        values = {symbol: self.value_of(symbol) for symbol in expr.free_symbols}
        unbacked = {symbol: value for symbol, value in values.items() if value is not None}
        hints = {symbol: self.backed_var_to_val.get(symbol) for symbol in values}
        known = {**hints, **unbacked}
        if None in known.values():
            return None
        return expr.xreplace({symbol: sympy.sympify(value) for symbol, value in known.items()})

    @property
    def constraints(self) -> tuple[Expr, ...]:
        """The decisions so far."""
        return tuple(dict.fromkeys(Expr(guard.expr) for guard in self.guards))

    def simplified(self, expr: Expr) -> Any:
        """The expression, or the number that it is known to be, by everything that has been
        decided.
        """
        value = self.simplify(expr.value)
        if value.free_symbols:
            return Expr(value)
        if expr.kind is not float:
            return as_number(value)
        known = {
            str(symbol): as_number(self.simplify(symbol)) for symbol in expr.value.free_symbols
        }
        # sympy has no zero with a sign
        return eval(expression_text(expr.value), {"math": math}, known)

    def holds(self, relation: Any) -> bool:
        """Test whether a relation follows from the decisions."""
        return self._maybe_evaluate_static(relation) == sympy.true


def _between(bounds: Any, least: Any, greatest: Any, kind: Callable[[Any], Any]) -> Any:
    """The range of a symbol with these bounds."""
    low, high = (None if bound is None else kind(bound) for bound in bounds)
    return ValueRanges(
        least if low is None else max(low, least), greatest if high is None else high
    )


def as_number(value: Any) -> bool | int | float:
    """A Python number from sympy's."""
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_integer else float(value)


def number_said(value: Any) -> Any:
    """The number for which a symbol stands where the number that binds it has this value. A flag of
    PyTorch's while it traces is `u0 == 1`.
    """
    if isinstance(value, torch.SymBool):
        relation = value.node.expr
        return Expr(
            relation.lhs if isinstance(relation, sympy.Eq) and relation.rhs == 1 else relation
        )
    return int(value) if isinstance(value, bool) else value


def assumptions_of(symbol: Any) -> dict[str, bool]:
    """The assumptions that a symbol was made with."""
    return dict(symbol._assumptions_orig)


to_float: Callable[[Any], Any] = ToFloat
"""The expression of an int as that of a float."""


def precision_of(value: Any) -> int:
    """The bits of a number of sympy's."""
    return int(value._prec)


class ExpressionPrinter(PythonPrinter):
    """Prints expressions as Python that computes them from Python's numbers."""

    def _print_Add(self, expr: Any, order: Any = None) -> str:
        terms = ((term, self._print(term)) for term in expr.as_ordered_terms())
        first, *rest = (
            f"({text})" if precedence(term) < PRECEDENCE["Add"] else text for term, text in terms
        )
        return first + "".join(
            f" - {term[1:]}" if term.startswith("-") else f" + {term}" for term in rest
        )

    def _print_Mul(self, expr: Any) -> str:
        if expr.as_coeff_Mul()[0].is_negative:
            return f"-{self.parenthesize(-expr, PRECEDENCE['Mul'], strict=True)}"
        return super()._print_Mul(expr)

    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))

    def _print_FloatStepBase(self, expr: Any) -> str:
        return expr.text(self)

    def _print_FloatTrueDiv(self, expr: Any) -> str:
        """A division that PyTorch's C++ made: of a divisor of zero it makes an infinity or NaN,
        where Python raises.
        """
        above, below = (self.parenthesize(arg, PRECEDENCE["Atom"] - 0.5) for arg in expr.args)
        quotient = f"{above} / {below}"
        return (
            f"({quotient})"
            if expr.args[1].is_zero is False
            else f"({quotient} if {below} else {above}*math.inf)"
        )

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _helper_sqrt(self, expr: Any) -> str:
        return f"math.sqrt({self._print(expr)})"


@functools.lru_cache(maxsize=65536)
def expression_text(value: Any) -> str:
    """The expression as Python computes it from variables that are called as its symbols."""
    return ExpressionPrinter().doprint(value)


SYMBOLIC_MATH: dict[str, Callable[[Any], Any]] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan")
}
"""Functions of Python's `math` that PyTorch knows for symbolic numbers."""

SYMBOLIC_FUNCTIONS: tuple[type[sympy.Basic], ...] = tuple(
    value
    for value in vars(sympy_functions).values()
    if isinstance(value, type)
    and issubclass(value, sympy.Basic)
    and value.__module__ == sympy_functions.__name__
)
"""PyTorch's own functions in expressions, such as `FloorDiv`."""

NEEDS_A_NUMBER = GuardOnDataDependentSymNode
"""Exceptions of PyTorch where Python asks about a size that depends on data."""
