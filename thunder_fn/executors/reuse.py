"""Reuse of memory: equations that may overwrite an operand instead of filling new memory.

A functionalised optimizer step allocates where the user's code worked in place. `plan_reuse` finds
equations with two properties: their first operand is not needed any more and lies in memory that
nobody else sees. Their op has an in-place form with bitwise equal results. It also finds such
operands of regions, whose memory a compiler may write results to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import last_uses, operands_in
from thunder_fn.ir.memory import (
    Aliases,
    RegionOf,
    find_aliases,
    is_fresh,
    is_over_lists,
    no_region,
)
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.trace import Equation, Op, TensorType, Trace, Var, vars_in
from thunder_fn.ir.walking import merged

COPY = ops.leaf(torch.ops.aten.copy.default)
CLONE = ops.leaf(torch.ops.aten.clone.default)
"""Ops that copy a value; if nobody reads the value afterwards, they need no copy."""


@kept_of_ops()
def in_place(op: Op) -> Op | None:
    """The op that writes the same bits over its first operand, if there is one."""
    if op.kind != "leaf" or not is_fresh(op) or ops.is_random(op):
        return None
    namespace, name, variant = op.name.split(".")
    if not (ops.is_pointwise(op) or op in facts.SOME_OVERWRITTEN or is_over_lists(op)):
        return None
    try:
        written = Op("leaf", f"{namespace}.{name}_.{variant}")
        mine, its = (internals.schema_of(ops.overload(form)).arguments for form in (op, written))
    except InvalidTrace:
        return None
    same = [(a.name, a.type, a.kwarg_only) for a in mine] == [
        (a.name, a.type, a.kwarg_only) for a in its
    ]
    only_first = [a.alias_info is not None and a.alias_info.is_write for a in its] == [True] + [
        False
    ] * (len(its) - 1)
    return written if same and only_first else None


def drop_copies(trace: Trace) -> tuple[Trace, tuple[int, ...]]:
    """Replace `copy(x, y)` by `y` where y is a pointwise function of x first, of x's type, that
    nothing else reads.

    Capture leaves that of `x.copy_(f(x))`. Such a y has x's layout, so nothing can tell the two
    apart.

    Returns:
        The trace, and the positions of the equations that are gone.
    """
    uses = Counter(var.index for var in operands_in(trace.equations))
    uses.update(atom.index for atom in trace.outputs if isinstance(atom, Var))
    makers: dict[int, Equation] = {}

    def same(equation: Equation) -> tuple[Var, ...] | None:
        if equation.op == COPY and _is_layout_kept(equation, makers):
            source = equation.operands[1]
            if uses[source.index] == 1:
                uses[source.index] = uses[equation.outputs[0].index]
                return (source,)
        makers.update((var.index, equation) for var in equation.outputs)
        return None

    return merged(trace, same)


def _is_layout_kept(copy: Equation, makers: Mapping[int, Equation]) -> bool:
    """Test whether the second operand was made by a pointwise op that takes the first one first,
    and has its type.
    """
    if len(copy.args) != 2 or not all(isinstance(arg, Var) for arg in copy.args):
        return False
    target, source = copy.operands
    maker = makers.get(source.index)
    if (
        maker is None
        or not is_fresh(maker.op)
        or torch.Tag.pointwise not in ops.overload(maker.op).tags
    ):
        return False
    same_place = bool(maker.args) and maker.args[0] == target
    return same_place and source.type == target.type == copy.outputs[0].type


@dataclass(frozen=True, slots=True)
class Reuse:
    """A program's plan for memory whose value nobody needs any more."""

    in_place: frozenset[int]
    """The equations, by position, that run over their first operand."""
    given: Mapping[int, tuple[int, ...]]
    """The operands, by place, whose memory a region may write to, by the region's position. Equal
    regions are given the same, so that they are compiled once.
    """

    def targets(self, trace: Trace) -> Iterator[Var]:
        """The variables whose memory is written to."""
        for position in self.in_place:
            yield from overwritten(trace.equations[position])
        for position, places in self.given.items():
            yield from (trace.equations[position].operands[place] for place in places)


NO_REUSE = Reuse(frozenset(), {})
"""The plan of a program whose values autograd keeps."""


def overwritten(equation: Equation) -> tuple[Var, ...]:
    """The operands over which an equation in place writes, one for each result."""
    return tuple(vars_in(equation.args[0]))


def plan_reuse(
    trace: Trace,
    donated: Collection[int] = (),
    writes: Mapping[int, int] | None = None,
    region_of: RegionOf = no_region,
) -> Reuse:
    """The equations that may run in place.

    Law: running them so changes no output's bits, and no memory but that of donated and written
        variables. A region may do anything with given memory but keep it: a result that it writes
        there is in nobody else's memory.

    Args:
        trace: leaves, structured ops, and composites that executors run.
        donated: inputs, by variable, whose memory is the program's to use. No other input shares
            it.
        writes: variables (inputs or constants) whose memory will hold another variable's value when
            the program has run. No other input shares it.
        region_of: see `find_aliases`.
    """
    plan = _Plan(trace, writes or {}, {*donated, *(writes or ())}, region_of)
    in_place, regions = set[int](), dict[Op, list[tuple[int, set[int]]]]()
    for position, equation in enumerate(trace.equations):
        if region_of(equation) is not None:
            found = plan.given(equation, position)
            regions.setdefault(equation.op, []).append((position, found))
        elif _has_form(equation) and plan.runs_in_place(equation, position):
            in_place.add(position)
    given = dict[int, tuple[int, ...]]()
    for calls in regions.values():
        common = set[int].intersection(*(places for _, places in calls))
        given.update((position, tuple(sorted(common))) for position, _ in calls if common)
    return Reuse(frozenset(in_place), given)


class _Plan:
    """The memory of a program as it is used from equation to equation. `tenant_of` says whose
    memory a variable lies in that is written to in the end.
    """

    def __init__(
        self, trace: Trace, writes: Mapping[int, int], own: set[int], region_of: RegionOf
    ) -> None:
        self.writes, self.own, self.end = writes, own, len(trace.equations)
        self.aliases, self.last = find_aliases(trace, region_of), last_uses(trace)
        self.members = _Members(self.aliases)
        self.tenant_of = {index: index for index in writes}

    def is_free(self, var: Var, position: int) -> bool:
        """Test that no later equation, and no other operand of this one, reads the memory that
        the variable lies in.
        """
        others = self.members.sharing(var)
        return self.last[var.index] == position and all(
            self.last[index] < position for index in others
        )

    def given(self, equation: Equation, position: int) -> set[int]:
        """The operands, by place, whose memory a region may write its results to."""
        return {
            place
            for place, var in enumerate(equation.operands)
            if (self.aliases.covers[var.index] or var.index in self.own)
            and _has_dims(var)
            and var.index not in self.tenant_of
            and equation.operands.count(var) == 1
            and self.is_free(var, position)
        }

    def runs_in_place(self, equation: Equation, position: int) -> bool:
        """Test whether an equation may write over its first operand; if so, its result lies
        there.
        """
        pairs = tuple(zip(overwritten(equation), equation.outputs, strict=True))
        if not all(self.may_lie_in(*pair, position) for pair in pairs):
            return False
        self.tenant_of.update(
            (target.index, self.tenant_of[source.index])
            for source, target in pairs
            if source.index in self.tenant_of
        )
        return True

    def may_lie_in(self, source: Var, target: Var, position: int) -> bool:
        """Test whether a result may lie in the memory of an operand that nothing reads again."""
        is_ours = self.aliases.whole[source.index] or source.index in self.own
        if not is_ours or not self.is_free(source, position):
            return False
        home = self.tenant_of.get(source.index)
        if home is None:
            return True
        ends = (target.index, *self.members.sharing(target))
        escapes = any(self.last[index] == self.end for index in ends)
        return not escapes or self.writes[home] == target.index


class _Members:
    """The variables that may lie in each buffer. Many may lie in the same ones: results of a region
    in all that it reads.
    """

    def __init__(self, aliases: Aliases) -> None:
        self.aliases = aliases
        self.variables: dict[frozenset[int], list[int]] = {}
        for index, buffers in enumerate(aliases.buffers):
            self.variables.setdefault(buffers, []).append(index)

    @cached_property
    def holding(self) -> dict[int, list[frozenset[int]]]:
        """The sets that a buffer is in. Most programs of regions never ask."""
        found: dict[int, list[frozenset[int]]] = {}
        for buffers in self.variables:
            for buffer in buffers:
                found.setdefault(buffer, []).append(buffers)
        return found

    def sharing(self, var: Var) -> set[int]:
        """The other variables that may share memory with `var`."""
        found = {
            buffers
            for buffer in self.aliases.buffers[var.index]
            for buffers in self.holding[buffer]
        }
        return {index for buffers in found for index in self.variables[buffers]} - {var.index}


def _has_dims(var: Var) -> bool:
    """Test that it is no number: of those there is little to gain."""
    return isinstance(var.type, TensorType) and bool(var.type.shape)


def _has_form(equation: Equation) -> bool:
    """Test whether the op has an in-place form that fits these operands: one tensor of the
    result's type, first, or a list of them.
    """
    if is_over_lists(equation.op):
        return in_place(equation.op) is not None and _fits_lists(equation)
    if len(equation.outputs) != 1 or not equation.args or not isinstance(equation.args[0], Var):
        return False
    source, target = equation.args[0], equation.outputs[0]
    if not isinstance(source.type, TensorType) or source.type != target.type:
        return False
    if equation.op == CLONE:
        return not equation.kwargs
    if in_place(equation.op) is None:
        return False
    repeats = sum(var == source for var in equation.operands)
    return repeats == 1 or equation.op not in facts.SOME_OVERWRITTEN


def _fits_lists(equation: Equation) -> bool:
    """Test that each result has the type of its tensor in the first list, which is in no other
    list, or at the same place.
    """
    lists = [vars_in(arg) for arg in equation.args]
    first = lists[0]
    if tuple(var.type for var in first) != equation.output_types:
        return False
    others = ((place, var) for own in lists[1:] for place, var in enumerate(own))
    return len(set(first)) == len(first) and all(
        var not in first or first[place : place + 1] == [var] for place, var in others
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Test that every element has a place of its own and that there are no gaps: what a donated or
    written tensor must be.
    """
    return is_dense_layout(tensor.shape, tensor.stride())


def is_dense_layout(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Test the same for a tensor with these sizes and strides."""
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
