"""Facts about memory: the variables that may share it, those in whose memory an output may lie, and
the views between a variable and what it shows.

A trace has values and no memory. Its program has both, and eager mode decides what it looks like:
results of views lie in the memory of their operand. All questions of rewrites and executors about
that are answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import makers, needed
from thunder_fn.ir.memos import kept_of_ops, memo
from thunder_fn.ir.trace import Atom, Equation, Op, Trace, Var

# ---- ops ----


@kept_of_ops()
def is_alias(op: Op) -> bool:
    """Test whether results may lie in the memory of operands."""
    is_view = op in facts.UNTOLD_VIEWS or ops.is_view(op)
    return op.kind != "leaf" or is_view or internals.is_decomposed(ops.overload(op))


@kept_of_ops()
def may_alias(op: Op) -> bool:
    """Test whether results may lie in the memory of operands. Of ops of other libraries schemas
    do not tell.
    """
    return is_alias(op) or ops.is_effectful(op) or ops.overload(op).namespace != "aten"


@kept_of_ops()
def is_fresh(op: Op) -> bool:
    """Test whether the op's results are dense memory that it has just allocated, each its own. A
    list: schemas do not tell.
    """
    if op.kind != "leaf" or ops.is_view(op) or ops.is_effectful(op):
        return False
    overload = ops.overload(op)
    if overload.namespace != "aten" or internals.is_decomposed(overload):
        return False
    return torch.Tag.pointwise in overload.tags or op in facts.ALLOCATES or is_over_lists(op)


@kept_of_ops()
def is_over_lists(op: Op) -> bool:
    """Test whether the op computes a list of tensors from lists, element by element."""
    return op.kind == "leaf" and op.name.startswith("aten._foreach_")


@kept_of_ops()
def is_reshape(op: Op) -> bool:
    """Test whether the op shows every element of its first operand, in memory of it or in a
    copy.
    """
    return op in facts.RESHAPES or op in facts.ALIASES


def reads_layout(equation: Equation) -> bool:
    """Test whether a result depends on where the elements of an operand lie in memory."""
    is_reader = equation.op in facts.ADDRESSES or equation.op.name == "aten.view.dtype"
    return is_reader or any(map(_has_readers, equation.bodies))


@memo(16384, derives=False)
def _has_readers(body: Trace) -> bool:
    return any(map(reads_layout, body.equations))


# ---- outputs ----


def leaving_variables(trace: Trace) -> set[int]:
    """The variables in whose memory an output may lie, or whose layout matters."""
    found = {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    reading = [one for one in trace.equations if is_alias(one.op) or reads_layout(one)]
    needed(reading, found, reads_layout)
    return found


# ---- buffers ----


@dataclass(frozen=True, slots=True)
class Aliases:
    """The buffers that each variable may lie in, and whether it is all of a buffer made for it
    alone.

    One that `covers` its buffer is that, or shows all of such a variable in another shape.
    """

    buffers: tuple[frozenset[int], ...]
    whole: tuple[bool, ...]
    covers: tuple[bool, ...]

    def among(self, roots: Set[int]) -> set[int]:
        """The variables, by index, that may lie in one of these buffers."""
        return {index for index, mine in enumerate(self.buffers) if mine & roots}


RegionOf = Callable[[Equation], Trace | None]
"""The body of an equation whose results lie in memory as those of its body's equations do; of
others nothing is known.
"""


def no_region(equation: Equation) -> None:
    """Return None: of no composite anything is known."""


def find_aliases(trace: Trace, region_of: RegionOf = no_region) -> Aliases:
    """Find the variables that may share memory. A buffer is named by the variable that it was
    made for.
    """
    roots = (*trace.inputs, *(constant.var for constant in trace.constants))
    buffers: list[frozenset[int]] = [frozenset((var.index,)) for var in roots]
    whole, covers = [False] * len(roots), [False] * len(roots)
    for equation in trace.equations:
        region = region_of(equation)
        if region is not None:
            inside = find_aliases(region)
            buffers += _buffers_of_results(equation, region, inside, buffers)
            atoms = [atom if isinstance(atom, Var) else None for atom in region.outputs]
            whole += [atom is not None and inside.whole[atom.index] for atom in atoms]
            covers += [atom is not None and inside.covers[atom.index] for atom in atoms]
            continue
        fresh = is_fresh(equation.op)
        any_of_them = frozenset(var.index for var in equation.outputs)
        if may_alias(equation.op):
            any_of_them = any_of_them.union(*{buffers[var.index] for var in equation.operands})
        for var in equation.outputs:
            buffers.append(frozenset((var.index,)) if fresh else any_of_them)
            whole.append(fresh)
            covers.append(fresh or (is_reshape(equation.op) and covers[equation.operands[0].index]))
    return Aliases(tuple(buffers), tuple(whole), tuple(covers))


def _buffers_of_results(
    equation: Equation, region: Trace, inside: Aliases, buffers: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """The buffers of a region's results: a result in an input's memory lies where its operand
    does.
    """
    outside = {place: buffers[var.index] for place, var in enumerate(equation.operands)}
    found = list[frozenset[int]]()
    for var, atom in zip(equation.outputs, region.outputs, strict=True):
        own = frozenset((var.index,))
        roots = inside.buffers[atom.index] if isinstance(atom, Var) else ()
        found.append(
            frozenset[int]().union(*(outside.setdefault(root, own) for root in roots)) or own
        )
    return found


# ---- views ----


def is_view_step(equation: Equation) -> bool:
    """Test for a view of the one operand, whether autograd follows it or not."""
    return len(equation.operands) == 1 and ops.is_view(equation.op)


def is_tracked_view(equation: Equation) -> bool:
    """Test for an equation that is a view of its one operand and that autograd follows."""
    return is_view_step(equation) and equation.op.name != "aten.detach.default"


def is_layout(equation: Equation) -> bool:
    """Test for an op that may return a view in eager mode and returns a copy in a trace."""
    return is_view_step(equation) or (
        len(equation.operands) == 1 and equation.op in facts.COPIES_OF_VIEWS
    )


def viewed(trace: Trace, atom: Atom, is_step: Callable[[Equation], bool]) -> Var | None:
    """Go back from an atom through equations that are steps, which have one operand, to the first
    variable.
    """
    found = view_path(makers(trace.equations), atom, None, is_step)
    return None if found is None else found[0]


def view_path(
    known: dict[int, tuple[Equation, int]],
    atom: Atom,
    start: Atom | None = None,
    is_step: Callable[[Equation], bool] = is_tracked_view,
) -> tuple[Var, list[tuple[Equation, int]]] | None:
    """Return the variable that an atom is a view of, and the views with the output that is taken of
    each. The variable is `start`, or the first that no view computes.
    """
    steps: list[tuple[Equation, int]] = []
    while isinstance(atom, Var) and atom != start and atom.index in known:
        equation, index = known[atom.index]
        if is_step(equation):
            steps.append((equation, index))
            atom = equation.operands[0]
        elif equation.op.kind == "composite":
            inner = _views_of_inputs(equation.body, is_step)[index]
            if inner is None:
                break
            place, views = inner
            steps += reversed(views)
            atom = equation.operands[place]
        else:
            break
    return (atom, steps[::-1]) if isinstance(atom, Var) else None


@memo(4096, derives=False)
def _views_of_inputs(
    body: Trace, is_step: Callable[[Equation], bool]
) -> tuple[tuple[int, list[tuple[Equation, int]]] | None, ...]:
    """For each output of a body, the place of the input that it is a view of, and the views. None
    for an output that is no view of an input.
    """
    known, places = makers(body.equations), {var.index: i for i, var in enumerate(body.inputs)}
    ways = (view_path(known, atom, None, is_step) for atom in body.outputs)
    return tuple(
        (places[way[0].index], way[1]) if way is not None and way[0].index in places else None
        for way in ways
    )
