"""Weights that lie on top of each other along dim 0, a layer at each place, as `scan` takes them.
Each layer is stored by itself.

A part of a stack has the layers' parts along its own dim 0. So a step of a loop
that takes a slice of the weight takes slices of the parts. It computes on them as a layer does. Ops
that take a stack apart give such slices, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from thunder_fn.interpreters.rewriting.representation import Kept, Representation
from thunder_fn.interpreters.rewriting.tracing import traced, traced_on_parts
from thunder_fn.ir import facts, ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, static_shape
from thunder_fn.structured.loop_functions import map
from thunder_fn.structured.shared.bind import apply


@memo(4096)
def stack_of(layer: Representation, type: TensorType) -> Representation:
    """A weight of this type, each layer of which is stored in one way.

    Law: the parts at a place, and their decoded value, are those of the layer alone.
    """
    stacked = tuple(
        replace(part, shape=(type.shape[0], *part.shape)) for part in _tensors(layer.part_types)
    )
    return Representation(
        layer.label,
        type,
        layer.suffixes,
        _for_each(layer.encode, (type,)),
        _for_each(layer.decode, stacked),
        layer.restore and _for_each(layer.restore, stacked),
        rule=_taken_apart,
        codes=layer.codes,
        in_bodies=layer.in_bodies,
        slices=layer,
    )


def layer_type(type: TensorType) -> TensorType:
    """The type of a layer of a stack."""
    return replace(type, shape=static_shape(type)[1:])


def _tensors(types: Any) -> tuple[TensorType, ...]:
    return tuple(type for type in types if isinstance(type, TensorType))


def _for_each(trace: Trace, types: tuple[TensorType, ...]) -> Trace:
    """A trace on each slice of its inputs along dim 0."""
    return traced(lambda *xs: map(lambda given: apply(trace.name, trace, given, trace), xs), *types)


def _taken_apart(equation: Equation, kept: tuple[Representation | None, ...]) -> Kept | None:
    """The rule of a stack: ops that take it apart take its parts apart."""
    numbers = [arg.value for arg in equation.args[1:] if isinstance(arg, Literal)] or [0]
    one, is_known = kept[0], len(numbers) == max(len(equation.args) - 1, 1)
    if equation.op not in facts.UNSTACKS or not is_known or one is None or one.slices is None:
        return None
    if numbers[0] % len(static_shape(one.type)) != 0:
        return None
    function = ops.overload(equation.op)

    def apart(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [ops.flatten_result(function(part, 0, *numbers[1:])) for part in parts]
        return tuple(part for layer in zip(*found, strict=True) for part in layer)

    layer = replace(one.slices, of_results=True)
    return Kept(traced_on_parts(apart, equation, kept), (layer,) * len(equation.outputs))
