"""Records of a capture: calls that become composites, the equations in them, and decisions about
symbols.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import sympy

from thunder_fn.ir.trace import Arg, Dim, Expr, Op, Source, Type, Var, all_args, vars_in


@dataclass(slots=True)
class Leaf:
    """One recorded op: an equation whose variables are still provisional."""

    op: Op
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Var, ...]
    source: Source | None
    bodies: tuple[Any, ...] = ()

    @property
    def operands(self) -> tuple[Var, ...]:
        """The variables in args and kwargs, in order, with repeats."""
        return tuple(vars_in(all_args(self)))

    @property
    def output_types(self) -> tuple[Type, ...]:
        """The types of the outputs, in order."""
        return tuple([var.type for var in self.outputs])


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes and strides of an argument, some of which are symbols."""

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A question of Python or PyTorch about symbols while tracing, the answer, and the user's line.

    The trace holds for all numbers that give this answer.
    """

    question: Expr
    answer: bool | float
    source: Source | None = field(default=None, compare=False)

    @property
    def relation(self) -> Expr:
        """The relation that it demands of the symbols, such as `s0 > 5` or `s0 % 2 == 1`."""
        value = self.question.value
        if self.answer is True:
            return self.question
        return Expr(sympy.Not(value) if self.answer is False else sympy.Eq(value, self.answer))


@dataclass(slots=True, eq=False)
class Scope:
    """A call that becomes a composite: a torch function, a module or a `@composite` function.

    `args`, `kwargs` and `results` are the call as the user wrote it, None where it cannot be
    written with variables and literals. `is_cast`: autocast is on where the call is made.
    """

    name: str
    kind: str
    parent: Scope | None
    depth: int
    source: Source | None = None
    module: str = ""
    items: list[Leaf | Scope] = field(default_factory=list)
    args: tuple[Arg, ...] | None = None
    kwargs: tuple[tuple[str, Arg], ...] | None = None
    results: tuple[Var, ...] | None = None
    detached: dict[int, Var] = field(default_factory=dict)
    is_cast: bool = False


def leaves_of(scope: Scope) -> Iterator[tuple[Leaf, Scope]]:
    """All ops recorded in a scope, in order, each with the innermost scope that it is in."""
    for item in scope.items:
        if isinstance(item, Scope):
            yield from leaves_of(item)
        else:
            yield item, scope
