"""Structured ops for interpreters whose values are pairs: a primal, and a companion where there is
one.

A tangent is such a companion, and so are an error bound, an interval or a moment. One function
takes any structured op with a wiring through such an interpreter; the op's author writes nothing
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from thunder_fn.ir.flow import WIRINGS, Flow
from thunder_fn.ir.rules import Mask, Rules
from thunder_fn.ir.trace import Atom, Equation, Literal, Trace, TraceBuilder, Type

Slots: TypeAlias = tuple[Atom, ...]
"""A primal, then its companion if it has one."""


@dataclass(frozen=True)
class Companion:
    """The value that an interpreter keeps beside a primal.

    Args:
        flow: which values have a companion.
        body: (trace, which inputs have one, which outputs must) -> the trace on slots, one after
            the other.
        zero: the companion of a primal that has none, where a carry or another branch has one.
        types: types of the companion of a primal of this type.

    Example:
        >>> import torch
        >>> from thunder_fn.ir import Companion, Flow, TensorType
        >>> marked = Flow("forward", lambda equation, flags: (any(flags),) * len(equation.outputs))
        >>> def both(trace, inputs, outputs):
        ...     raise NotImplementedError("see `through_bodies`")
        >>> twin = Companion(marked, both, zero=lambda builder, x: (x,), types=lambda type: (type,))
        >>> [str(type) for type in twin.types(TensorType(torch.float32, (2,)))]
        ['f32[2]']
    """

    flow: Flow
    body: Callable[[Trace, Mask, Mask], Trace]
    zero: Callable[[TraceBuilder, Atom], Slots]
    types: Callable[[Type], tuple[Type, ...]]


COUNTS: Rules[Callable[[Equation, Sequence[int]], dict[str, int]]] = Rules("counts of operands")
"""`rule(equation, sizes)`, for ops that count their operands in keyword arguments, gives the new
counts. `sizes` says how many atoms each operand became.
"""


def through_bodies(
    builder: TraceBuilder, equation: Equation, operands: Sequence[Slots], companion: Companion
) -> list[Slots]:
    """Append a structured op on slots, and return the slots of its results.

    Before: operands: primal_0 [companion_0], primal_1 [companion_1], ...
    After:  every carry that becomes one with a companion starts with one, and all branches give
            the same slots.

    Law: the primals are what the op computes without companions.

    Raises:
        MissingRule: the op has no wiring.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.ir import Companion, Flow, TraceBuilder, inline_into, through_bodies
        >>> def both(trace, *_):  # the body on two inputs at once
        ...     builder = TraceBuilder("both")
        ...     x, y = builder.take(trace.input_types * 2)
        ...     (one,) = inline_into(builder, trace, [x])
        ...     return builder.build((one, *inline_into(builder, trace, [y])))
        >>> marked = Flow("forward", lambda equation, flags: (any(flags),) * len(equation.outputs))
        >>> twin = Companion(marked, both, zero=lambda builder, x: (x,), types=lambda type: (type,))
        >>> call = tfn.trace(tfn.checkpoint(torch.sin), torch.ones(2)).equations[0]
        >>> builder = TraceBuilder("twins")
        >>> (slots,) = through_bodies(builder, call, [builder.take(call.operand_types * 2)], twin)
        >>> tfn.evaluate(builder.build(slots), [torch.zeros(2), torch.ones(2)])
        (tensor([0., 0.]), tensor([0.8415, 0.8415]))
    """
    wires = WIRINGS.of(equation)(equation)
    marked = companion.flow.ports(equation, wires, tuple([len(slots) > 1 for slots in operands]))
    wanted = {first for first, second in wires.values if second in marked}
    given: list[Slots] = []
    for i, slots in enumerate(operands):
        has_one = ("operand", i) in wanted
        given.append(
            (slots[0], *(slots[1:] or companion.zero(builder, slots[0]))) if has_one else slots[:1]
        )
    bodies = tuple(
        companion.body(
            body,
            tuple([("in", place, i) in marked for i in range(len(body.inputs))]),
            tuple([("out", place, i) in wanted for i in range(len(body.outputs))]),
        )
        for place, body in enumerate(equation.bodies)
    )
    count = COUNTS.find(equation.op)
    counts = count(equation, list(map(len, given))) if count is not None else {}
    kwargs = tuple(
        (key, Literal(counts[key]) if key in counts else value) for key, value in equation.kwargs
    )
    types = [
        (var.type, *(companion.types(var.type) if ("result", i) in marked else ()))
        for i, var in enumerate(equation.outputs)
    ]
    args = tuple(a for slots in given for a in slots)
    flat = tuple(type for group in types for type in group)
    supply = iter(
        builder.add(equation.op, args, flat, kwargs=kwargs, bodies=bodies, source=equation.source)
    )
    return [tuple(next(supply) for _ in group) for group in types]
