"""The tables: what interpreters know of structured ops, and the data that rules return.

A structured op owns bodies and has one rule for each interpreter, all in its own file under `structured/`. A rule takes
an equation and a question and returns a trace over the equation's operands, so an interpreter treats it as it treats
the derived rule of a leaf. Leaf rules are derived (`derive*.py`), composites are their bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Literal as Choice, ParamSpec, TypeVar

from thunder_fn.errors import MissingRule, located
from thunder_fn.trace import Dim, Equation, Trace, Var

P = ParamSpec("P")
R = TypeVar("R")
Mask = tuple[bool, ...]


def memo(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a pure function of traces returns.

    Two traces that are equal but for names and sources have answers of their own: what is printed, and the line that an
    error names, are those of the trace that was asked about. A trace that closes over tensors of the user is not
    remembered, since that would keep them alive; its bodies, where the work is, are closed.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        @lru_cache(maxsize)
        def remembered(origins: tuple[int, ...], *args: P.args, **kwargs: P.kwargs) -> R:
            return f(*args, **kwargs)

        @wraps(f)
        def asked(*args: P.args, **kwargs: P.kwargs) -> R:
            traces = [arg for arg in args if isinstance(arg, Trace)]
            if any(not constant.owned for trace in traces for constant in trace.constants):
                return f(*args, **kwargs)
            return remembered(tuple(trace.origin for trace in traces), *args, **kwargs)

        asked.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
        asked.cache_info = remembered.cache_info  # type: ignore[attr-defined]
        return asked

    return decorate


@dataclass(frozen=True, slots=True)
class Residual:
    """Where the backward finds a value of the forward: an input or an output that is passed again, or an extra output."""

    kind: Choice["input", "output", "extra"]
    index: int


@dataclass(frozen=True, slots=True)
class Split:
    """A trace in two: what runs forward, and what runs backward on residuals and cotangents.

    `forward` maps the inputs to the outputs and the extra residuals. `backward` maps the residuals, then one cotangent
    for each wanted output, to gradients; `gradients` says for each wanted input which one is its own, None for zero.
    """

    forward: Trace
    backward: Trace
    residuals: tuple[Residual, ...]
    gradients: tuple[int | None, ...]

    @property
    def num_extra(self) -> int:
        """How many of the forward's outputs, the last ones, are residuals."""
        return sum(residual.kind == "extra" for residual in self.residuals)

    def residual_values(self, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """The residuals, given the values of the forward's inputs and all its outputs."""
        extra = results[len(results) - self.num_extra :]
        places = {"input": inputs, "output": results, "extra": extra}
        return tuple(places[residual.kind][residual.index] for residual in self.residuals)


@dataclass(frozen=True, slots=True)
class JvpRule:
    """A trace from inputs, then tangents of the active inputs, to outputs, then tangents of the active outputs."""

    trace: Trace
    active_outputs: Mask


@dataclass(frozen=True, slots=True)
class StructuredOp:
    """All rules of one structured op.

    - `check(equation)` raises where types and bodies disagree.
    - `evaluate(bodies, *args, **kwargs)` gives the values of the outputs; args are runtime values.
    - `activity(equation, active)`: which outputs depend, differentiably, on the active operands?
    - `jvp(equation, active)`: the rule on primals and tangents.
    - `split(equation, wanted_inputs, wanted_outputs)`: forward with residuals, and backward.
    - `batch(equation, batched, size, randomness)`: the trace on batches (batch dim first), and which outputs are batched.
    - `dce(equation, wanted)`: the equation cut down to the wanted outputs, and the operands it reads.
    - `lower(equation)`: what it is once no transform follows, as a trace over its operands; None, as the rule or as its
      answer, where executors run the op itself.
    - `divide(equation, known, flags)`: for an op whose one body, on the operands, may be cut in two, the halves: from the
      known operands to the outputs that the flags mark and residuals, and from residuals and the other operands to the
      rest. `partial_eval` makes an equation of each. None for ops that are not divided.
    - `constants(equation)`: for an op whose bodies take some operands as they are, at every step and in every branch, which
      those are; the last operands are the bodies' inputs. A loop counts them in `num_consts`. None for other ops.
    - `slices(equation)`: for a loop, the operands of which each step takes a slice along dim 0. None for other ops.
    - `keeps_types`: the types of its outputs are tied to those of its operands or rules, as a carry's are. Otherwise
      they are what its bodies give, or without bodies those of the operands.
    """

    name: str
    check: Callable[[Equation], None]
    evaluate: Callable[..., Sequence[Any]]
    activity: Callable[[Equation, Mask], Mask]
    jvp: Callable[[Equation, Mask], JvpRule]
    split: Callable[[Equation, Mask, Mask], Split]
    batch: Callable[[Equation, Mask, Dim, str], tuple[Trace, Mask]]
    dce: Callable[[Equation, Mask], tuple[Equation, tuple[Var, ...]]]
    lower: Callable[[Equation], Trace | None] | None = None
    divide: Callable[[Equation, Mask, Mask], tuple[Trace, Trace]] | None = None
    constants: Callable[[Equation], Mask] | None = None
    slices: Callable[[Equation], Mask] | None = None
    keeps_types: bool = True


STRUCTURED: dict[str, StructuredOp] = {}


def register(op: StructuredOp) -> StructuredOp:
    """Enter a structured op into the table; each name once."""
    if op.name in STRUCTURED:
        raise MissingRule(f"the structured op {op.name} is registered already")
    STRUCTURED[op.name] = op
    return op


def rules_of(equation: Equation) -> StructuredOp:
    """The rules of a structured equation."""
    try:
        return STRUCTURED[equation.op.name]
    except KeyError:
        raise MissingRule(
            located(
                f"there are no rules for the structured op {equation.op}",
                source=equation.source,
                fix="Import the module that defines it, or register a StructuredOp.",
            )
        ) from None


def lowered(equation: Equation) -> Trace | None:
    """What an equation stands for once no transform follows; None for leaves and ops that run by themselves."""
    match equation.op.kind:
        case "leaf":
            return None
        case "composite":
            return equation.body
        case "structured":
            rule = rules_of(equation).lower
            return rule(equation) if rule is not None else None


def keep_all(equation: Equation, wanted: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """The dce rule of ops whose outputs come together."""
    return equation, equation.operands
