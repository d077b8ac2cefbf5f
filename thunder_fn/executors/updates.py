"""Updates in place: what overwrites some elements of a tensor that the program writes to stays out
of regions.

    v5 = index_copy(v0, 2, v3, v4)      # will be written to the input v0: a cache gets one row more

The torch executor writes that row where v0 lies (`reuse.py`), however large v0 is. A region would
make all of it anew, and all of it would be copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import made_at
from thunder_fn.ir.trace import Atom, Equation, TensorType, Trace, Var

Written = tuple[tuple[int, int], ...]
"""An input, and the output that will be written to it, by position, for each input that is
written to.
"""

IN_PLACE = "it overwrites some elements of a tensor, where that lies"
"""The reason why a region has no such equation."""

WORTH_BYTES = 1 << 14
"""Less is copied in the time that one more call takes."""


@dataclass(frozen=True, slots=True)
class Updates:
    """The equations that overwrite elements of written inputs, by position; for composites in
    which others do, what is written of their operands.
    """

    equations: frozenset[int]
    inside: Mapping[int, Written]


@dataclass(slots=True)
class _Path:
    """The input that a value is, but for elements that were overwritten on the way, and the
    equations on the way.
    """

    home: int = -1
    equations: list[int] = field(default_factory=list[int])
    inside: list[tuple[int, tuple[int, int]]] = field(
        default_factory=list[tuple[int, tuple[int, int]]]
    )


def written_by(trace: Trace, writes: Sequence[int | None]) -> Written:
    """Find what a program writes; its last outputs are written to the inputs `writes`, or
    elsewhere where it is None.
    """
    first = len(trace.outputs) - len(writes)
    return tuple(
        (target, first + place) for place, target in enumerate(writes) if target is not None
    )


def updates(trace: Trace, written: Written) -> Updates:
    """Find the equations that give written inputs new values, element by element."""
    makers = made_at(trace.equations) if written else {}
    equations, inside = set[int](), dict[int, Written]()
    for target, place in written:
        path = _path_to(trace, trace.outputs[place], makers)
        if path is not None and path.home == target:
            equations.update(path.equations)
            for position, pair in path.inside:
                inside[position] = (*inside.get(position, ()), pair)
    return Updates(frozenset(equations), inside)


def _path_to(trace: Trace, atom: Atom, makers: Mapping[int, int]) -> _Path | None:
    """The way from an input to a value, None if there is none."""
    path = _Path()
    while isinstance(atom, Var) and atom.index >= len(trace.inputs):
        position = makers.get(atom.index)
        if position is None:
            return None
        equation = trace.equations[position]
        if _overwrites(equation):
            path.equations.append(position)
            atom = equation.operands[0]
            continue
        if equation.op.kind != "composite" or ops.is_operator(equation.op):
            return None
        body, place = equation.body, equation.outputs.index(atom)
        inner = _path_to(body, body.outputs[place], made_at(body.equations))
        if inner is None:
            return None
        path.inside.append((position, (inner.home, place)))
        atom = equation.operands[inner.home]
    path.home = atom.index if isinstance(atom, Var) else -1
    return path


def _overwrites(equation: Equation) -> bool:
    """Test whether the equation gives its first operand with other elements here and there, and
    that is large.
    """
    if equation.op not in facts.SOME_OVERWRITTEN:
        return False
    type = equation.outputs[0].type
    if equation.operands[0].type != type:
        return False
    assert isinstance(type, TensorType), "these ops give a tensor"
    sizes = [size for size in type.shape if isinstance(size, int)]
    return len(sizes) < len(type.shape) or math.prod(sizes) * type.dtype.itemsize >= WORTH_BYTES
