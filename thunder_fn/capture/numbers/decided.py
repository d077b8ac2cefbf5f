"""Decisions about symbolic numbers while tracing: questions of Python and PyTorch, and demands
on unbacked sizes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import sympy

from thunder_fn.capture.recorded import Decision, Leaf
from thunder_fn.errors import located
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import constraints_of, is_hinted
from thunder_fn.ir.symbols import Substitution, Symbol, made_by, replaced
from thunder_fn.ir.trace import Expr, Literal, Source, Trace

if TYPE_CHECKING:
    from thunder_fn.capture.recorder import Recorder


class Decisions:
    """The decisions of one recorder, by question; a recorder inside another has the other's
    numbers.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._mode = recorder.mode
        self._around = recorder.outer.mode if recorder.outer is not None else None
        self._made: set[sympy.Basic] = set()
        self.by_question: dict[Expr, Decision] = {}

    def on_decision(self, question: Expr, answer: bool | float) -> None:
        """Note a question of Python or PyTorch, and its answer."""
        if question not in self.by_question:
            self.by_question[question] = Decision(question, answer, self._asked_at())

    def on_assertion(self, relation: Expr) -> None:
        """Note a demand of PyTorch or `torch._check` on sizes that depend on data: the program
        checks it.
        """
        message = located(
            f"{relation} does not hold, where u stands for sizes that depend on data",
            source=self._asked_at(),
        )
        self._recorder.emit(ops.ASSERT, (Literal(relation), Literal(message)), (), ())

    def concerns(self, relation: Expr) -> bool:
        """Test for a demand on sizes that this capture has found.

        PyTorch's knowledge of a size that the op at hand finds is true of the op.
        """
        symbols = relation.value.free_symbols
        found = {symbol for symbol in symbols if not isinstance(symbol, Symbol)}
        return found <= self._made and (bool(found) or self._around is None)

    def recorded(self, leaf: Leaf) -> None:
        """Note the unbacked sizes that an equation finds."""
        self._made.update(made_by(leaf))

    @property
    def has_found(self) -> bool:
        """Test whether some size or number was found in data."""
        return bool(self._made)

    @property
    def constraints(self) -> tuple[Expr, ...]:
        """The decisions so far, as constraints."""
        return self._mode.numbers.constraints if self._mode.shape_env is not None else ()

    def require(self, trace: Trace) -> None:
        """Note what a trace that is recorded is guarded by: its equations may be recorded again
        without it, as those of views are, and those of a call in a call of the same name.
        """
        if self._mode.shape_env is None:
            return
        for constraint in filter(is_hinted, constraints_of(trace)):
            bool(self._mode.size(constraint))
            self.by_question.setdefault(constraint, Decision(constraint, True))

    def settled(self, trace: Trace) -> Trace:
        """Remove the symbols that decisions make redundant: where `s1 == s0`, only `s0` is left."""
        if not self._is_settling:
            return trace
        for constraint in constraints_of(trace):
            if isinstance(constraint.value, sympy.Eq):  # of a rule that holds for one number only
                bool(self._mode.size(constraint))
                self.by_question.setdefault(constraint, Decision(constraint, True))
        new = Substitution(self._simplified)
        trace = dataclasses.replace(trace, constraints=(*trace.constraints, *self.constraints))
        return new.trace(trace)

    def settled_number(self, number: Any) -> Any:
        """Return a number with the symbols that `settled` leaves in a trace."""
        is_open = isinstance(number, Expr) and self._is_settling
        return self._simplified(number) if is_open else number

    @property
    def _is_settling(self) -> bool:
        around = self._around
        return self._mode.shape_env is not None and (around is None or around.shape_env is None)

    def _simplified(self, expr: Expr) -> Any:
        """Simplify an expression. Unbacked sizes keep their names: an equation binds each."""
        given = {symbol for symbol in expr.value.free_symbols if isinstance(symbol, Symbol)}
        if given == expr.value.free_symbols:
            return self._mode.numbers.simplified(expr)
        return replaced(
            expr, {symbol: self._mode.numbers.simplified(Expr(symbol)) for symbol in given}
        )

    def _asked_at(self) -> Source | None:
        return self._recorder.where()

    def forget(self) -> None:
        """End the capture. The decisions stay."""
        del self._recorder
