"""Calls on the parts of a parameter, such as a linear layer on int8 codes: the rule of a
representation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn.derived.leaf_autocast import TO_COPY
from thunder_fn.interpreters.quantize.scheme import Parts
from thunder_fn.interpreters.rewriting.representation import Kept, Representation
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import inline_into

LINEAR, EMBEDDING = "torch.nn.functional.linear", "aten.embedding.default"


@dataclass(frozen=True)
class Calls:
    """The rule of a representation: torch functions that work on the parts as they are.

    `computes` has functions of the call's other tensors by name and of the parts by suffix, by the
    torch function's name.
    """

    computes: tuple[tuple[str, Callable[[dict[str, torch.Tensor], Parts], torch.Tensor]], ...]
    suffixes: tuple[str, ...]
    parts: tuple[TensorType, ...]

    def __call__(
        self, equation: Equation, kept: tuple[Representation | None, ...]
    ) -> Trace | Kept | None:
        if equation.op == TO_COPY:
            return self.cast(equation, kept[0])
        compute = dict(self.computes).get(equation.op.name)
        named = operand_names(equation) if compute is not None else None
        places = [position for position, one in enumerate(kept) if one is not None]
        if (
            compute is None
            or named is None
            or [named[position] for position in places] != ["weight"]
        ):
            return None
        (position,) = places
        precision = equation.outputs[0].type
        end = position + len(self.parts)
        others = (*named[:position], *named[position + 1 :])

        def call(*values: torch.Tensor) -> torch.Tensor:
            parts = dict(zip(self.suffixes, values[position:end], strict=True))
            given = (
                in_precision(value, precision) for value in (*values[:position], *values[end:])
            )
            return in_precision(compute(dict(zip(others, given, strict=True)), parts), precision)

        types = [type for type in equation.operand_types if isinstance(type, TensorType)]
        return traced(call, *types[:position], *self.parts, *types[position + 1 :])

    def cast(self, equation: Equation, kept: Representation | None) -> Kept | None:
        """The weight in another floating dtype, as autocast has it, is stored as it was."""
        type, options = equation.outputs[0].type, [key for key, _ in equation.kwargs]
        if kept is None or not isinstance(type, TensorType) or options != ["dtype"]:
            return None
        same = traced(lambda *parts: parts, *self.parts)
        return Kept(same, (recast(kept, type),)) if type.dtype.is_floating_point else None


@memo(4096)
def recast(kept: Representation, type: TensorType) -> Representation:
    """Recast the parts: the same ones, seen in another dtype."""
    builder = TraceBuilder("decode")
    seen = inline_into(builder, kept.decode, tuple(map(builder.input, kept.part_types)))
    decode = builder.build(
        builder.add(TO_COPY, seen, (type,), kwargs=(("dtype", Literal(type.dtype)),))
    )
    return replace(kept, type=type, decode=decode, of_results=True)


def in_precision(value: torch.Tensor, type: Any) -> torch.Tensor:
    """A floating tensor in the dtype of a type: under autocast a call's result has another dtype
    than its arguments.
    """
    return (
        value.to(type.dtype)
        if value.dtype.is_floating_point and isinstance(type, TensorType)
        else value
    )


_NAMES = {LINEAR: ("input", "weight", "bias"), EMBEDDING: ("weight", "input", "padding_idx")}


def operand_names(equation: Equation) -> tuple[str, ...] | None:
    """The parameter name of each operand of a linear layer or an embedding; None for a call with
    options of effect.

    Those are options that are not None or False. The place of an embedding's padding matters to the
    gradient of its weight only, and parts such as codes have none.
    """
    names = _NAMES[equation.op.name]
    given = equation.named(names)
    options = [
        *equation.args[len(names) :],
        *(value for key, value in given.items() if key not in names),
    ]
    if any(not isinstance(value, Literal) or value.value not in (None, False) for value in options):
        return None
    called = {value.index: key for key, value in given.items() if isinstance(value, Var)}
    named = tuple(called.get(var.index, "") for var in equation.operands)
    return named if sorted(named) == sorted(called.values()) else None
