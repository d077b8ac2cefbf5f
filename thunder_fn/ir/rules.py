"""The tables: what interpreters know of structured ops, and the data that rules return.

A structured op owns bodies and has one rule in each table, all registered in its own file under
`structured/`. A rule takes an equation and a question and returns a trace over the equation's
operands. So an interpreter treats it as it treats the derived rule of a leaf. Leaf rules are
derived (`derive*.py`), composites are their bodies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal as Choice, TypeVar, cast

from thunder_fn.errors import MissingRule
from thunder_fn.ir.trace import Dim, Equation, Op, Trace, Var

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Mask = tuple[bool, ...]


def chosen(values: Iterable[T], flags: Iterable[object]) -> tuple[T, ...]:
    """Return the values whose flag is set."""
    return tuple([value for value, flag in zip(values, flags, strict=True) if flag])


def divided(values: Iterable[T], flags: Iterable[object]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Return the values whose flag is set, and the others."""
    sides: tuple[list[T], list[T]] = [], []
    for value, flag in zip(values, flags, strict=True):
        sides[not flag].append(value)
    return tuple(sides[0]), tuple(sides[1])


def interleaved(first: Iterable[T], second: Iterable[T], flags: Iterable[object]) -> tuple[T, ...]:
    """Return values in one order: of the first where a flag is set, and of the second elsewhere.

    The inverse of `divided`.
    """
    sides = iter(first), iter(second)
    return tuple([next(sides[not flag]) for flag in flags])


def scattered(values: Iterable[T], flags: Iterable[object]) -> tuple[T | None, ...]:
    """Return the values where a flag is set, and None elsewhere: the inverse of `chosen`."""
    supply = iter(values)
    return tuple([next(supply) if flag else None for flag in flags])


def union(masks: Iterable[Mask]) -> Mask:
    """Return the union of masks."""
    return tuple(map(any, zip(*masks, strict=True)))


def numbered(flags: Iterable[object]) -> tuple[int | None, ...]:
    """Number the flags that are set: (True, False, True) gives (0, None, 1)."""
    return scattered(itertools.count(), flags)


@dataclass(frozen=True, slots=True)
class Residual:
    """The place of a residual: an input or an output of the forward, which is passed again, or
    an extra output.
    """

    kind: Choice["input", "output", "extra"]
    index: int


@dataclass(frozen=True, slots=True)
class Split:
    """A trace in two: what runs forward, and what runs backward on residuals and cotangents.

    `forward` maps the inputs to the outputs and the extra residuals. `backward` maps the residuals,
    then one cotangent for each wanted output, to gradients. `gradients` says for each wanted input
    which one is its own, None for zero.
    """

    forward: Trace
    backward: Trace
    residuals: tuple[Residual, ...]
    gradients: tuple[int | None, ...]

    @property
    def num_extra(self) -> int:
        """The number of the forward's last outputs that are residuals."""
        return sum(residual.kind == "extra" for residual in self.residuals)

    def places(self, wanted: Mask) -> tuple[int | None, ...]:
        """The place of each input's gradient among those of the backward; None for zero, and for
        inputs that are not wanted.
        """
        return scattered(self.gradients, wanted)

    def gradients_in(self, found: Sequence[T], wanted: Mask) -> tuple[T | None, ...]:
        """The gradient of each input, given the results of the backward."""
        places = self.places(wanted)
        return tuple([None if place is None else found[place] for place in places])

    def residual_values(self, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """The residuals, given the values of the forward's inputs and all its outputs."""
        extra = results[len(results) - self.num_extra :]
        places = {"input": inputs, "output": results, "extra": extra}
        return tuple(places[residual.kind][residual.index] for residual in self.residuals)


@dataclass(frozen=True, slots=True)
class JvpRule:
    """A trace from inputs, then tangents of the active inputs, to outputs, then tangents of the
    active outputs.
    """

    trace: Trace
    active_outputs: Mask

    @property
    def has_foreign(self) -> bool:
        """Test whether derivatives of the rule run functions of the user's."""
        return self.trace.has_foreign


class Rules(Generic[T]):
    """The rules of one interpreter, by op: one line registers one rule.

    Anyone may register a rule for an op of their own, or make a table for an interpreter of their
    own.

    Example:
        >>> from thunder_fn.ir.rules import Rules
        >>> area = Rules("area")
        >>> @area.rule("scan", "while_loop")
        ... def of_loop(equation): ...
        >>> sorted(area.by_name)
        ['scan', 'while_loop']
    """

    def __init__(self, interpreter: str) -> None:
        self.interpreter = interpreter
        self.by_name: dict[str, T] = {}

    def rule(self, *ops: str) -> Callable[[F], F]:
        """Register the decorated rule for ops, by name.

        Law: ``by_name`` has the rule under the name of each op.

        Raises:
            MissingRule: an op has a rule already.

        Example:
            >>> import thunder_fn as tfn
            >>> sizes = tfn.ir.Rules("sizes")
            >>> @sizes.rule("scan")
            ... def scan_sizes(equation):
            ...     return len(equation.outputs)
            >>> sizes.by_name["scan"] is scan_sizes
            True
        """

        def register(rule: F) -> F:
            self.enter(cast(T, rule), *ops)
            return rule

        return register

    def enter(self, rule: T, *ops: str) -> None:
        """Register a rule for ops, by name; each op once."""
        for op in ops:
            if op in self.by_name:
                raise MissingRule(
                    f"{self.interpreter}: {op} has a rule already; one op has one rule"
                )
            self.by_name[op] = rule

    def find(self, op: Op) -> T | None:
        """Return the rule of an op, or None."""
        return self.by_name.get(op.name)

    def of(self, equation: Equation) -> T:
        """Return the rule of an equation's op.

        Raises:
            MissingRule: there is none; names the interpreter, the op and the user's line.
        """
        try:
            return self.by_name[equation.op.name]
        except KeyError:
            raise MissingRule(
                f"{self.interpreter}: there is no rule for the {equation.op.kind} op {equation.op}",
                source=equation.source,
                fix=(
                    "Import the module that defines the op, or register a rule for it"
                    " (`thunder_fn.ir.rules`)."
                ),
            ) from None


CHECK: Rules[Callable[[Equation], None]] = Rules("check")
"""`rule(equation)` raises where types and bodies disagree."""
EVALUATE: Rules[Callable[..., Sequence[Any]]] = Rules("evaluate")
"""`rule(bodies, *args, **kwargs)` gives the values of the outputs; args are runtime values."""
VJP: Rules[Callable[[Equation, Mask, Mask], Split]] = Rules("vjp")
"""`rule(equation, wanted_inputs, wanted_outputs)` gives the forward with residuals, and the
backward.
"""
JVP: Rules[Callable[[Equation, Mask], JvpRule]] = Rules("jvp")
"""`rule(equation, active)` gives the trace on primals and tangents. An op with a wiring needs
none (`ir/pairs.py`).
"""
VMAP: Rules[Callable[[Equation, Mask, Dim, str], tuple[Trace, Mask]]] = Rules("vmap")
"""`rule(equation, batched, size, randomness)` gives the trace on batches, batch dim first, and
which outputs are batched.
"""
DCE: Rules[Callable[[Equation, Mask], tuple[Equation, tuple[Var, ...]]]] = Rules("dce")
"""`rule(equation, wanted)` gives the equation cut down to the wanted outputs, and the operands
that it reads.
"""
LOWER: Rules[Callable[[Equation], Trace | None]] = Rules("lower")
"""`rule(equation)` gives the trace over its operands that an op stands for once no transform
follows. Without a rule, or where it answers None, executors run the op itself.
"""
PARTIAL_EVAL: Rules[Callable[[Equation, Mask, Mask], tuple[Trace, Trace]]] = Rules("partial_eval")
"""`rule(equation, known, flags)` divides the body of an op with one body on its operands. The
first part goes from the known operands to the outputs that the flags mark and to residuals. The
second goes from residuals and the other operands to the rest.
"""
INVARIANT: Rules[Callable[[Equation], Mask]] = Rules("invariant operands")
"""`rule(equation)` marks the operands that all steps and branches take as they are. The last
operands are the bodies' inputs; a loop counts the invariant ones in `num_consts`.
"""
SLICED: Rules[Callable[[Equation], Mask]] = Rules("sliced operands")
"""`rule(equation)` marks the operands of a loop of which each step takes a slice along dim 0."""
FREE_TYPES: Rules[bool] = Rules("free types")
"""Ops whose outputs have the types that their bodies give, or without bodies those of the
operands. The types of other ops are tied, as a carry's are.
"""
TABLES: tuple[Rules[Any], ...] = (
    *(CHECK, EVALUATE, VJP, JVP, VMAP, DCE, LOWER, PARTIAL_EVAL),
    *(INVARIANT, SLICED, FREE_TYPES),
)
"""The tables of rules for structured ops."""


def lowered(equation: Equation) -> Trace | None:
    """Return the trace for which an equation stands once no transform follows; None for leaves and
    ops that run by themselves.
    """
    match equation.op.kind:
        case "leaf":
            return None
        case "composite":
            return equation.body
        case "structured":
            rule = LOWER.find(equation.op)
            return rule(equation) if rule is not None else None


def keep_all(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """The dce rule of ops whose outputs come together."""
    return equation, equation.operands
