"""Unbacked numbers of a forward, carried to a backward that runs as a program of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_fn.ir.rules import Residual, Split
from thunder_fn.ir.symbols import binders, finders, unbound_symbols
from thunder_fn.ir.trace import (
    Equation,
    Expr,
    Literal,
    NumberType,
    Op,
    TensorType,
    Trace,
    Var,
    cut,
    num_vars,
)

_AS_TENSOR = Op("leaf", "aten.scalar_tensor.default")
_AS_NUMBER = Op("leaf", "aten._local_scalar_dense.default")
_DTYPES: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}


def self_contained(split: Split) -> Split:
    """The split with a residual for each number from data that its backward uses and that no size
    tells it.

    Law: forward and backward compute the same as those of the split, wherever the backward runs.
    """
    found = finders(split.forward)
    numbers = [Expr(symbol) for symbol in unbound_symbols(split.backward) if symbol in found]
    if not numbers:
        return split
    kinds = [TensorType(_DTYPES[number.kind], (), torch.device("cpu")) for number in numbers]
    return replace(
        split,
        forward=_giving(split, numbers, kinds),
        backward=_taking(split, numbers, kinds),
        residuals=(
            *split.residuals,
            *(Residual("extra", split.num_extra + i) for i in range(len(numbers))),
        ),
    )


def told_by_inputs(split: Split) -> Split:
    """The split with further residuals: the forward's inputs whose types tell the backward sizes
    that none of its own inputs has.

    Law: forward and backward compute the same as those of the split, wherever the backward runs.
    """
    trace, told = split.backward, binders(split.forward.inputs)
    tellers = (told[size][0] for size in unbound_symbols(trace) if size in told)
    places = [split.forward.inputs.index(var) for var in dict.fromkeys(tellers)]
    if not places:
        return split
    first, count = num_vars(trace), len(split.residuals)
    taken = (Var(first + i, split.forward.inputs[at].type) for i, at in enumerate(places))
    inputs = (*trace.inputs[:count], *taken, *trace.inputs[count:])
    more = (Residual("input", at) for at in places)
    return replace(split, backward=cut(trace, inputs=inputs), residuals=(*split.residuals, *more))


def _giving(split: Split, numbers: list[Expr], kinds: list[TensorType]) -> Trace:
    trace, first = split.forward, num_vars(split.forward)
    given = [Var(first + i, kind) for i, kind in enumerate(kinds)]
    made = [
        Equation(_AS_TENSOR, (Literal(number),), (("dtype", Literal(kind.dtype)),), (var,))
        for number, kind, var in zip(numbers, kinds, given, strict=True)
    ]
    outputs = (*trace.outputs, *given)
    return cut(trace, equations=(*trace.equations, *made), outputs=outputs)


def _taking(split: Split, numbers: list[Expr], kinds: list[TensorType]) -> Trace:
    trace, first, count = split.backward, num_vars(split.backward), len(split.residuals)
    taken = [Var(first + i, kind) for i, kind in enumerate(kinds)]
    names = [
        Var(first + len(taken) + i, NumberType(number.kind, number))
        for i, number in enumerate(numbers)
    ]
    found = [
        Equation(_AS_NUMBER, (var,), (), (name,)) for var, name in zip(taken, names, strict=True)
    ]
    inputs = (*trace.inputs[:count], *taken, *trace.inputs[count:])
    return cut(trace, inputs=inputs, equations=(*found, *trace.equations))
