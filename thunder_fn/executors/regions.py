"""Cutting a flat trace into regions: which equations one executor compiles together.

Regions are convex: no way leads out of a region and back in, so that a region can run as one call.
In program order an equation joins the latest region unless something outside that depends on the
region lies between; then it begins the next one. So no two regions could be one, and values are
made about where the program makes them.

A program may *give* a region what the region reads last and nothing else shows. The given places
are part of the region's job, so equal regions are given the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, free
from thunder_fn.ir.symbols import finders, symbols_in
from thunder_fn.ir.trace import Equation, Source, Trace, Var, canonical, cut

Group = tuple[int, ...]


def partition(trace: Trace, wanted: Sequence[bool]) -> list[Group]:
    """The positions of wanted equations, in regions.

    Law: every wanted equation is in exactly one region; regions are convex, and merging any two of
        them would make a circle. Equations with effects and random numbers stay in order; they are
        never wanted.
    """
    regions: list[list[int]] = []
    inside, behind = set[int](), set[int]()
    after_effect = False
    reads = _reads(trace)
    for position, equation in enumerate(trace.equations):
        operands = reads[position]
        outputs = {var.index for var in equation.outputs}
        if wanted[position] and not ops.has_side_effect(equation):
            if not regions or operands & behind:
                regions.append([])
                inside, behind, after_effect = set(), set(), False
            regions[-1].append(position)
            inside |= outputs
            continue
        kept = ops.has_side_effect(equation)
        if operands & (inside | behind) or (kept and after_effect):
            behind |= outputs
            after_effect = after_effect or kept
    return [tuple(region) for region in regions]


def _reads(trace: Trace) -> list[set[int]]:
    """The variables that each equation reads: its operands, and those that bind the unbacked sizes
    and numbers that it mentions.
    """
    found = {symbol: var.index for symbol, var in finders(trace).items()}
    reads = [{var.index for var in equation.operands} for equation in trace.equations]
    if found:
        for equation, operands in zip(trace.equations, reads, strict=True):
            operands |= {found[symbol] for symbol in symbols_in(equation) if symbol in found}
            operands -= {var.index for var in equation.outputs}
    return reads


def grouped(trace: Trace, groups: Sequence[Group], name: str) -> tuple[Trace, tuple[int, ...]]:
    """The trace with each group as one composite equation of this name, its body a closed trace.

    Returns:
        The trace, and for each of its equations the position of the first equation that it stands
            for.
    """
    group_of = {position: group for group in groups for position in group}
    order = _order(trace, group_of)
    readers = _readers(trace, group_of)
    new: list[Equation] = []
    for item in order:
        equations = [trace.equations[position] for position in item]
        if len(item) == 1 and item[0] not in group_of:
            new += equations
            continue
        source = _common_source(equations)
        around = source.module if source is not None else None
        equations = [
            replace(one, source=one.source and one.source.within(around)) for one in equations
        ]
        inputs, variables, body = _close(trace, item, equations, readers, name)
        new.append(Equation(ops.composite(name), inputs, (), variables, (body,), source))
    return cut(trace, equations=new), tuple(item[0] for item in order)


def bodies_of(trace: Trace, groups: Sequence[Group], name: str) -> list[Trace]:
    """The bodies of the composites that `grouped` would make of these groups."""
    readers = _readers(trace, {position: group for group in groups for position in group})
    equations = ([trace.equations[position] for position in group] for group in groups)
    return [
        _close(trace, group, own, readers, name)[2]
        for group, own in zip(groups, equations, strict=True)
    ]


def _common_source(equations: Sequence[Equation]) -> Source | None:
    """The first line of some equations, in the module that all of them are in."""
    sources = [equation.source for equation in equations if equation.source is not None]
    if not sources:
        return None
    paths = [source.inside.split(".") for source in sources]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return replace(sources[0], inside=".".join(names[0] for names in same), first=None)


def _readers(trace: Trace, group_of: dict[int, Group]) -> dict[int, set[Group]]:
    """The groups and single equations that read each variable; the trace's own reading is the
    empty group.
    """
    found: dict[int, set[Group]] = {}
    for position, operands in enumerate(_reads(trace)):
        for index in operands:
            found.setdefault(index, set()).add(group_of.get(position, (position,)))
    for atom in trace.outputs:
        if isinstance(atom, Var):
            found.setdefault(atom.index, set()).add(())
    return found


def _close(
    trace: Trace,
    group: Group,
    equations: Sequence[Equation],
    readers: dict[int, set[Group]],
    name: str,
) -> tuple[tuple[Var, ...], tuple[Var, ...], Trace]:
    """A group as a closed trace: its inputs and outputs as variables of the trace around, and
    the trace.
    """
    constants = {constant.var.index for constant in trace.constants}
    inputs = tuple(var for index, var in free(equations).items() if index not in constants)
    outputs = tuple(var for var in bound(equations) if readers.get(var.index, set()) - {group})
    # The program around a region is guarded. A region is code for its inputs, so it takes no
    # constraints along.
    return inputs, outputs, canonical(inputs, tuple(equations), outputs, trace.constants, (), name)


def _order(trace: Trace, group_of: dict[int, Group]) -> list[Group]:
    """Groups and single equations so that each comes after its operands, otherwise in program
    order.
    """
    maker: dict[int, Group] = {}
    items: dict[Group, None] = {}
    for position, equation in enumerate(trace.equations):
        item = group_of.get(position, (position,))
        items[item] = None
        maker.update((var.index, item) for var in equation.outputs)
    before: dict[Group, set[Group]] = {item: set() for item in items}
    last_kept: Group | None = None
    reads = _reads(trace)
    for item in items:
        for position in item:
            equation = trace.equations[position]
            before[item] |= {maker[index] for index in reads[position] if index in maker}
            if ops.has_side_effect(equation):
                before[item] |= {last_kept} if last_kept is not None else set()
                last_kept = item
        before[item].discard(item)
    followers: dict[Group, list[Group]] = {item: [] for item in items}
    for item, earlier in before.items():
        for other in earlier:
            followers[other].append(item)
    missing = {item: len(earlier) for item, earlier in before.items()}
    ready = [item for item, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[Group] = []
    while ready:
        item = heapq.heappop(ready)
        order.append(item)
        for follower in followers[item]:
            missing[follower] -= 1
            if missing[follower] == 0:
                heapq.heappush(ready, follower)
    return order
