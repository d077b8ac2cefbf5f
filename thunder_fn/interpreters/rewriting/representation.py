"""Representations: the form in which `rewrite` stores each parameter, and the step that decides
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thunder_fn.ir.trace import Equation, TensorType, Trace, Type

Rule = Callable[[Equation, "tuple[Representation | None, ...]"], "Trace | Kept | Asked | None"]


def _no_rule(equation: Equation, kept: tuple[Representation | None, ...]) -> Trace | None:
    return None


def _no_conversion(kept: Representation) -> Trace | None:
    return None


@dataclass(frozen=True, slots=True)
class Representation:
    """The form in which a parameter is stored.

    Law: ``decode(encode(w))`` is w within what the representation promises.

    Args:
        label: a word that names calls on the parts, such as `int8` in `int8_linear`.
        type: of the parameter that it stands for.
        suffixes: one per part: `values` makes the part of `fc.weight` `fc.weight.values`, an empty
            one `fc.weight`.
        encode: the parameter to its parts.
        decode: the parts to the value that computations see.
        restore: the parts to the parameter that the user gets back; None for `decode`.
        rule: asked with an equation and the representation of each of its operands, None for those
            that are what they are. It gives a trace over the operands, with parts in the
            parameters' places; or it asks for operands in other forms. None says that going into
            the body is best.
        codes: the parts encode a weight.
        in_bodies: the parts go into the bodies of loops and branches. Not so where decoding or a
            rule asks other ranks.
        of_results: what equations compute is stored so. It is decoded once for all that need it
            whole.
        converted: from the representation that a value has to this one, where it is shorter than
            decoding and encoding.
        slices: of what is stored by itself at each place along dim 0, how it is stored there, in
            slices of the parts. The steps of a loop take it so.
    """

    label: str
    type: TensorType
    suffixes: tuple[str, ...]
    encode: Trace
    decode: Trace
    restore: Trace | None = None
    rule: Rule = _no_rule
    codes: bool = False
    in_bodies: bool = False
    of_results: bool = False
    converted: Callable[[Representation], Trace | None] = _no_conversion
    slices: Representation | None = None

    @property
    def part_types(self) -> tuple[Type, ...]:
        """The types of the parts."""
        return self.encode.output_types


@dataclass(frozen=True, slots=True)
class Kept:
    """A trace whose results are stored as parts: what a rule may answer.

    Args:
        trace: its outputs are the parts of each result, in order.
        results: one per result; None for one that is what it is.
        decoded: for each operand, whether the trace needs its value.
        asked: for each operand, the form in which all that read it want it. The trace converts it,
            but once outside is better, for others that want it too.
    """

    trace: Trace
    results: tuple[Representation | None, ...]
    decoded: tuple[bool, ...] = ()
    asked: tuple[Representation | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """The forms in which a rule wants operands before it answers; None for those that are right.
    They are converted once for all that want the same.
    """

    forms: tuple[Representation | None, ...]


Step = Callable[[str, TensorType], Representation | None]
"""The decision of a rewriting transform for each parameter, by name and type; None leaves a
parameter as it is.

A step whose attribute `of_weights` is true is not asked about parts that encode a weight.
"""
