"""Questions about equations in a row: the variables that they bind and read, and those that are
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from thunder_fn.ir.trace import Equation, Trace, Var, num_vars


class Row(Protocol):
    """The interface of an equation and of its record: it binds and reads variables."""

    @property
    def outputs(self) -> tuple[Var, ...]:
        """The variables that it binds."""
        ...

    @property
    def operands(self) -> tuple[Var, ...]:
        """The variables that it reads."""
        ...


E = TypeVar("E", bound=Row)


def bound(equations: Iterable[Row]) -> Iterator[Var]:
    """The variables that equations bind, in order."""
    return (var for equation in equations for var in equation.outputs)


def operands_in(equations: Iterable[Row]) -> Iterator[Var]:
    """The variables that equations read, in order, with repeats."""
    return (var for equation in equations for var in equation.operands)


def makers(equations: Iterable[Equation]) -> dict[int, tuple[Equation, int]]:
    """The equation that binds each variable, by index, and the place among its outputs."""
    return {
        var.index: (equation, place)
        for equation in equations
        for place, var in enumerate(equation.outputs)
    }


def last_uses(trace: Trace) -> list[int]:
    """The last equation that reads each variable: -1 if none does, one past the last if it is an
    output.
    """
    found = [-1] * num_vars(trace)
    for position, equation in enumerate(trace.equations):
        for var in equation.operands:
            found[var.index] = position
    for atom in trace.outputs:
        if isinstance(atom, Var):
            found[atom.index] = len(trace.equations)
    return found


def made_at(equations: Iterable[Row]) -> dict[int, int]:
    """The position of the equation that binds each variable, by index."""
    return {var.index: at for at, equation in enumerate(equations) for var in equation.outputs}


def free(equations: Sequence[Row]) -> dict[int, Var]:
    """The variables that equations read and do not bind, by index, in order of first reading."""
    own = {var.index for var in bound(equations)}
    return {var.index: var for var in operands_in(equations) if var.index not in own}


def needed(
    equations: Sequence[E], wanted: set[int], keep: Callable[[E], bool] = lambda equation: False
) -> list[E]:
    """The equations that variables need, in order.

    Args:
        wanted: indices of the variables; those that the equations read are added.
        keep: the equations that stay though nothing needs them.
    """
    found: list[E] = []
    for equation in reversed(equations):
        if keep(equation) or any(var.index in wanted for var in equation.outputs):
            found.append(equation)
            wanted.update(var.index for var in equation.operands)
    return found[::-1]
