"""The two errors of programs that leave the process: one cannot be written, or read."""

from __future__ import annotations

from thunder_fn.errors import PortableError
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.trace import Equation


def refused(what: str, equation: Equation | None = None, fix: str | None = None) -> PortableError:
    """The error for what cannot be data."""
    return PortableError(
        f"save: {what}",
        equation=None if equation is None else format_equation(equation),
        source=None if equation is None else equation.source,
        fix=fix,
    )


def unreadable(what: str, fix: str | None = None) -> PortableError:
    """The error for a file that is no program."""
    return PortableError(f"load: {what}", fix=fix)


def not_exported(equation: Equation, why: str) -> PortableError:
    """The error for an op that PyTorch's exported programs do not have."""
    return PortableError(
        f"export: {equation.op} {why}",
        equation=format_equation(equation),
        source=equation.source,
        fix="Save the program with `tfn.save`, or write it with ops of PyTorch.",
    )
