"""Regions in parts that repeat: an optimizer's update of a hundred parameters is a few updates,
many times.

First come the numbers: values computed from tensors without dims alone, such as an optimizer's bias
corrections. The rest of a region falls into parts that no variable connects, inputs and numbers
aside. Parts that are equal are compiled once; the rest of the region stays together, since
equations side by side may share reads of an input. On a GPU a region stays whole: Inductor has
kernels side by side in one launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_fn.ir.equations import bound, free
from thunder_fn.ir.text import program_text, run_text
from thunder_fn.ir.trace import Atom, TensorType, Trace, Var, cut
from thunder_fn.ir.types import is_scalar

MIN_EQUATIONS = 4
MIN_TIMES = 3
"""The least size and number of equal parts that are compiled on their own."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a region, as a trace, and the region's variables that its inputs and outputs
    are, by index.
    """

    trace: Trace
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def parts_of(region: Trace) -> tuple[Part, ...]:
    """The region's parts in an order in which they can run: those that repeat, and one for all the
    rest.

    Law: every variable that a part reads is an input of the region or an output of a part before
        it; the region's outputs are outputs of parts.
    """
    if not is_on_cpu(region):
        return (_whole(region),)
    everything = range(len(region.equations))
    numbers = _numbers(region)
    first = {var.index for position in numbers for var in region.equations[position].outputs}
    groups = _connected(
        region, [position for position in everything if position not in numbers], first
    )
    readers = _readers(region)
    parts = [_part(region, group, readers) for group in groups]
    times = Counter(part.trace for part in parts)
    alone = [
        len(part.trace.equations) >= MIN_EQUATIONS and times[part.trace] >= MIN_TIMES
        for part in parts
    ]
    if not any(alone) or any(
        atom.index < len(region.inputs) for atom in region.outputs if isinstance(atom, Var)
    ):
        return (_whole(region),)
    rest = sorted(
        position
        for group, apart in zip(groups, alone, strict=True)
        if not apart
        for position in group
    )
    repeated = (part for part, apart in zip(parts, alone, strict=True) if apart)
    others = (_part(region, group, readers) for group in (sorted(numbers), rest))
    front, back = others
    return tuple(part for part in (front, *repeated, back) if part.trace.equations)


def _whole(region: Trace) -> Part:
    return Part(region, tuple(range(len(region.inputs))), _indices(region.outputs))


def is_on_cpu(trace: Trace) -> bool:
    """Test whether all tensors of the trace are on the CPU, those inside of bodies aside."""
    variables = (*trace.inputs, *bound(trace.equations))
    return all(
        var.type.device.type == "cpu" for var in variables if isinstance(var.type, TensorType)
    )


def _numbers(region: Trace) -> set[int]:
    """The positions of equations that compute tensors without dims from such alone."""
    plain = {var.index for var in region.inputs if is_scalar(var.type)}
    found = set[int]()
    for position, equation in enumerate(region.equations):
        operands = equation.operands
        if (
            operands
            and all(var.index in plain for var in operands)
            and all(is_scalar(var.type) for var in equation.outputs)
        ):
            found.add(position)
            plain.update(var.index for var in equation.outputs)
    return found


def _connected(region: Trace, positions: Iterable[int], given: Collection[int]) -> list[list[int]]:
    """Equations in groups that share variables, those that are `given` aside; each group in
    program order.
    """
    leader: dict[int, int] = {}

    def find(position: int) -> int:
        while leader[position] != position:
            leader[position] = position = leader[leader[position]]
        return position

    maker: dict[int, int] = {}
    for position in positions:
        equation = region.equations[position]
        leader[position] = position
        for var in equation.operands:
            if var.index >= len(region.inputs) and var.index not in given:
                leader[find(position)] = find(maker[var.index])
        maker.update((var.index, position) for var in equation.outputs)
    groups: dict[int, list[int]] = {}
    for position in leader:
        groups.setdefault(find(position), []).append(position)
    return list(groups.values())


def _readers(region: Trace) -> dict[int, list[int]]:
    """The positions of the equations that read each variable, and one past the last where it is
    an output.
    """
    found: dict[int, list[int]] = {}
    for position, equation in enumerate(region.equations):
        for var in equation.operands:
            found.setdefault(var.index, []).append(position)
    for index in _indices(region.outputs):
        found.setdefault(index, []).append(len(region.equations))
    return found


def _part(region: Trace, positions: Sequence[int], readers: Mapping[int, Sequence[int]]) -> Part:
    inside = set(positions)
    equations = tuple(region.equations[position] for position in positions)
    read = free(equations)
    given = tuple(
        var for var in bound(equations) if not inside.issuperset(readers.get(var.index, ()))
    )
    trace = cut(region, inputs=read.values(), equations=equations, outputs=given)
    return Part(trace, tuple(read), tuple(var.index for var in given))


def _indices(atoms: Iterable[Atom]) -> tuple[int, ...]:
    return tuple(atom.index for atom in atoms if isinstance(atom, Var))


def join(
    region: Trace, parts: Sequence[Part], functions: Mapping[Part, Callable[..., Any]]
) -> Callable[..., Any]:
    """The region as one function of its inputs that calls a function for each part."""
    if len(parts) == 1:
        return functions[parts[0]]
    header = f"def region({', '.join(map(str, region.inputs))}):"
    lines, context = [header], dict[str, Any]()
    for number, part in enumerate(parts):
        context[f"part{number}"] = functions[part]
        results = "".join(f"v{index}, " for index in part.outputs)
        lines.append(
            f"    {results}= part{number}({', '.join(f'v{index}' for index in part.inputs)})"
        )
    lines.append(f"    return ({''.join(f'{atom}, ' for atom in region.outputs)})")
    run_text(program_text(lines), "inductor region", context)
    return context.pop("region")
