"""Drop equations that compute one of their operands. These are copies of values that nobody can
write to, reshapes to the same shape, casts to the same dtype, and products with one.

A trace is pure, so a copy matters only where it leaves the trace: results in memory of their own
stay so. Only rewrites that keep every bit are here: `x + 0` is none, as it turns -0.0 into 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.ir import facts, ops
from thunder_fn.ir.memory import is_alias, leaving_variables
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Arg, Equation, Literal, TensorType, Trace, Var
from thunder_fn.ir.walking import merged

Makers = dict[int, Equation]
"""The equation that binds each variable."""


@memo(16384, derives=False)
def drop_noops(trace: Trace) -> Trace:
    """Drop equations whose result is their operand, in bodies too.

    Law: same values, bitwise; what the outputs share memory with stays; idempotent.
    """
    leaving = leaving_variables(trace)
    makers: Makers = {}

    def known(equation: Equation) -> tuple[Var, ...] | None:
        same = same_as(equation, makers)
        if same is not None and (
            is_alias(equation.op) or _may_go(equation.outputs[0], same, leaving, makers)
        ):
            return (same,)
        makers.update((var.index, equation) for var in equation.outputs)
        return None

    return merged(trace, known, drop_noops)[0]


def _may_go(copy: Var, source: Var, leaving: set[int], makers: Makers) -> bool:
    """Test that a copy is not needed: it stays inside, or its source is memory that nothing else
    leaves with.
    """
    if copy.index not in leaving:
        return True
    maker = makers.get(source.index)
    if maker is None or is_alias(maker.op) or source.index in leaving:
        return False
    leaving.add(source.index)
    return True


def same_as(equation: Equation, makers: Makers) -> Var | None:
    """The variable that the equation's only result equals, if one is known."""
    if equation.op.kind != "leaf" or len(equation.outputs) != 1:
        return None
    rule = RULES.get(equation.op.name)
    found = rule(equation, makers) if rule is not None else None
    return found if found is not None and found.type == equation.outputs[0].type else None


def shortened(equation: Equation, makers: Makers) -> Equation:
    """A reshape of what its operand is a reshape of; other equations as they are.

    Law: same values; whether the result is a view may change.
    """
    source = equation.args[0] if equation.op == ops.RESHAPE else None
    while isinstance(source, Var) and (maker := makers.get(source.index)) is not None:
        if maker.op not in facts.KEEPS_ORDER:
            break
        source = maker.args[0]
    if not isinstance(source, Var) or source == equation.args[0]:
        return equation
    return replace(equation, args=(source, *equation.args[1:]))


def without_kept_dims(equation: Equation, makers: Makers, uses: Mapping[int, int]) -> Equation:
    """A reduction that drops its dims, in place of a reshape of one that keeps them for nothing
    else; other equations as they are.

    Law: same values, bitwise.
    """
    # sum: [m, n] -> [1, n], reshape: [1, n] -> [n] become sum: [m, n] -> [n]
    source = equation.args[0] if equation.op == ops.RESHAPE else None
    maker = makers.get(source.index) if isinstance(source, Var) else None
    if maker is None or maker.op not in facts.SUMS_OVER_DIMS or len(maker.args) != 3:
        return equation
    kept, wanted = maker.outputs[0].type, equation.outputs[0].type
    assert isinstance(kept, TensorType) and isinstance(wanted, TensorType)
    _, dims, keeps = maker.args
    gone = _dims_in(dims, len(kept.shape))
    shape = tuple(size for dim, size in enumerate(kept.shape) if dim not in gone)
    if keeps != Literal(True) or shape != wanted.shape or uses[maker.outputs[0].index] > 1:
        return equation
    return replace(maker, args=(*maker.args[:2], Literal(False)), outputs=equation.outputs)


def _dims_in(dims: Arg, rank: int) -> frozenset[int]:
    """The dims of a reduction, counted from the front; none that are not written as numbers."""
    each = dims if isinstance(dims, tuple) else (dims,)
    values = (one.value for one in each if isinstance(one, Literal))
    return frozenset(value % max(rank, 1) for value in values if isinstance(value, int))


# ---- rules: the variable that the result equals if their types are the same ----


def _first(equation: Equation, makers: Makers) -> Var | None:
    """Return the first operand: where the type stays, so does the value (reshape, expand, squeeze,
    a slice, whose step is never negative).
    """
    first = equation.args[0]
    return first if isinstance(first, Var) else None


def _copied(equation: Equation, makers: Makers) -> Var | None:
    """A copy in the same layout."""
    formats = [arg for key, arg in equation.kwargs if key == "memory_format"]
    plain = all(arg in (Literal(None), Literal(torch.preserve_format)) for arg in formats)
    source = _first(equation, makers)
    maker = makers.get(source.index) if source is not None else None
    return source if plain and (maker is None or not is_alias(maker.op)) else None


def _written_over(equation: Equation, makers: Makers) -> Var | None:
    """`copy(x, y)` is y."""
    second = equation.args[1]
    return second if isinstance(second, Var) else None


def _with(
    neutral: Callable[[Any, TensorType], bool], *, commutes: bool = False
) -> Callable[[Equation, Makers], Var | None]:
    """The operand, where the number beside it changes nothing."""

    def rule(equation: Equation, makers: Makers) -> Var | None:
        if len(equation.args) != 2 or equation.kwargs:
            return None
        first, second = equation.args
        for kept, beside in ((first, second), (second, first))[: 1 + commutes]:
            if isinstance(kept, Var) and isinstance(kept.type, TensorType):
                value = _number(beside, makers)
                if isinstance(value, int | float) and neutral(value, kept.type):
                    return kept
        return None

    return rule


_FILLED = facts.FULL | facts.SPREADS


def _number(arg: Arg, makers: Makers) -> Any:
    """A number, or the one that a tensor of real numbers holds everywhere; None for others."""
    while isinstance(arg, Var):
        maker = makers.get(arg.index)
        is_real = isinstance(arg.type, TensorType) and not arg.type.dtype.is_complex
        if maker is None or maker.op not in _FILLED or not is_real:
            return None
        arg = maker.args[int(maker.op in facts.FULL)]
    return arg.value if isinstance(arg, Literal) else None


def _is_one(value: Any, type: TensorType) -> bool:
    return value == 1


def _is_zero(value: Any, type: TensorType) -> bool:
    return value == 0 and str(float(value)) == "0.0"


def _is_integer_zero(value: Any, type: TensorType) -> bool:
    return value == 0 and not type.dtype.is_floating_point and not type.dtype.is_complex


def _dims(equation: Equation) -> tuple[Arg, ...]:
    return equation.args[1:]


def _back_again(equation: Equation, makers: Makers) -> Var | None:
    """Two transpositions of the same dims."""
    source = _first(equation, makers)
    before = makers.get(source.index) if source is not None else None
    if before is None or before.op != equation.op or set(_dims(before)) != set(_dims(equation)):
        return None
    return _first(before, makers)


def _unmoved(equation: Equation, makers: Makers) -> Var | None:
    """`permute`, `movedim` and `transpose` that leave every dim where it is."""
    source = _first(equation, makers)
    if source is None or not isinstance(source.type, TensorType):
        return None
    rank = len(source.type.shape) or 1  # a scalar's dims are 0 and -1
    order = _dims(equation)[0] if len(_dims(equation)) == 1 else None
    if isinstance(order, tuple):
        numbers = [arg.value % rank for arg in order if isinstance(arg, Literal)]
        return source if numbers == list(range(len(source.type.shape))) else None
    values = [
        arg.value % rank
        for arg in _dims(equation)
        if isinstance(arg, Literal) and isinstance(arg.value, int)
    ]
    return source if len(values) == 2 and values[0] == values[1] else _back_again(equation, makers)


RULES: dict[str, Callable[[Equation, Makers], Var | None]] = {
    **dict.fromkeys(
        ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"), _first
    ),
    **dict.fromkeys(
        ("aten.expand.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
        _first,
    ),
    "aten.split_with_sizes.default": _first,
    **dict.fromkeys(("aten.clone.default", "aten._to_copy.default"), _copied),
    "aten.copy.default": _written_over,
    "aten.slice.Tensor": _first,
    "aten.t.default": _back_again,
    **dict.fromkeys(("aten.transpose.int", "aten.permute.default", "aten.movedim.int"), _unmoved),
    "aten.mul.Tensor": _with(_is_one, commutes=True),
    **dict.fromkeys(("aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"), _with(_is_one)),
    "aten.pow.Tensor_Scalar": _with(_is_one),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar"), _with(_is_zero)),
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _with(_is_integer_zero)),
}
"""The rules by op. `is_alias` ops may go wherever the rule holds; the others make new memory, which
must not leave the trace.
"""
