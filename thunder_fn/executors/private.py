"""Results that may lie in memory of which others know: that of a program's own constants, the old
values of what it writes to, and operands of choices and loops. They leave as copies.

Law: results share memory with one another as they do in the trace; those of choices and loops have
    memory of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.reuse import CLONE
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir.constraints import is_positive
from thunder_fn.ir.equations import makers
from thunder_fn.ir.memory import RegionOf, find_aliases, is_view_step, view_path
from thunder_fn.ir.trace import Atom, Equation, Op, Trace, TraceBuilder, Var, cut, num_vars
from thunder_fn.ir.walking import put
from thunder_fn.structured.cond import COND, SWITCH
from thunder_fn.structured.shared.scan_parts import SCAN, Loop
from thunder_fn.structured.shared.while_parts import WHILE


def private_variables(trace: Trace, written: Iterable[int], region_of: RegionOf) -> set[int]:
    """The variables that may lie in the memory of an owned constant, or of a variable, by index,
    that is written to.
    """
    roots = {constant.var.index for constant in trace.constants if constant.owned} | set(written)
    return find_aliases(trace, region_of).among(roots) if roots else set()


def with_one_copy(trace: Trace, private: set[int], count: int) -> Trace:
    """Copy private memory once for all of the first `count` outputs that are views of it."""
    known = makers(trace.equations)
    ways = {
        atom: path
        for atom in trace.outputs[:count]
        if (path := view_path(known, atom, None, is_view_step))
        and isinstance(atom, Var)
        and atom.index in private
    }
    number = Counter(root for root, _ in ways.values())
    builder = TraceBuilder(trace.name, num_vars(trace))
    copies = {
        root: builder.add(CLONE, (root,), (root.type,))[0] for root in number if number[root] > 1
    }
    found: dict[Atom, Atom] = {}
    for atom, (root, steps) in ways.items():
        if root in copies:
            found[atom] = copies[root]
            for equation, index in steps:
                found[atom] = put(builder, equation, [found[atom]])[index]
    if not found:
        return trace
    outputs = [found.get(atom, atom) for atom in trace.outputs[:count]]
    return cut(
        trace,
        equations=(*trace.equations, *builder.equations),
        outputs=(*outputs, *trace.outputs[count:]),
    )


# ---- results of choices and loops ----


def own(value: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return a value in memory of its own: a copy, if it lies in the memory of one of the
    others.
    """
    memory = internals.storage_id(value)
    is_shared = any(internals.storage_id(other) == memory for other in others)
    return value.clone() if is_shared else value


def beside(trace: Trace, count: int, region_of: RegionOf) -> dict[Var, tuple[Var, ...]]:
    """The results of choices and loops that the first `count` outputs show and that may lie in
    memory which others see, each with the variables that have such memory.
    """
    known, written = makers(trace.equations), set(trace.outputs[count:])
    paths = {atom: view_path(known, atom, None, is_view_step) for atom in trace.outputs}
    roots = {atom: path[0] for atom, path in paths.items() if path and isinstance(atom, Var)}
    leaving = {roots[atom] for atom in trace.outputs[:count] if atom in roots} - written
    chosen = [one for one in trace.equations if one.op in _MAY_SHARE and leaving & {*one.outputs}]
    if not chosen:
        return {}
    buffers = find_aliases(trace, region_of).buffers
    outside = frozenset(range(len(trace.inputs) + len(trace.constants)))
    found: dict[Var, tuple[Var, ...]] = {}
    for equation in chosen:
        others = (
            buffers[atom.index] for atom, root in roots.items() if root not in equation.outputs
        )
        seen = outside.union(*others)
        given = tuple(var for var in dict.fromkeys(equation.operands) if buffers[var.index] & seen)
        shares = _MAY_SHARE[equation.op](equation)
        for i, var in enumerate(equation.outputs):
            before = (one for j, one in enumerate(equation.outputs[:i]) if j in shares[i])
            among = (*(given if i in shares[i] else ()), *(one for one in before if one in leaving))
            if var in leaving and among:
                found[var] = among
    return found


def _share(bodies: Sequence[Trace], outputs: Sequence[Sequence[Atom]]) -> list[set[int]]:
    """For each output of the bodies those that it may share memory with: itself, if with an
    input.
    """
    shares: list[set[int]] = [set() for _ in outputs[0]]
    for body, atoms in zip(bodies, outputs, strict=True):
        buffers = find_aliases(body).buffers
        given = frozenset(range(len(body.inputs) + len(body.constants)))
        mine = [buffers[atom.index] if isinstance(atom, Var) else frozenset() for atom in atoms]
        mine = [one | given if one & given else one for one in mine]
        for i, one in enumerate(mine):
            shares[i] |= {
                j for j, other in enumerate(mine) if one & other and (i != j or one & given)
            }
    return shares


def _in_branches(equation: Equation) -> list[set[int]]:
    bodies = [inline(body) for body in equation.bodies]
    return _share(bodies, [body.outputs for body in bodies])


def _in_carries(equation: Equation) -> list[set[int]]:
    """A loop returns its first carries if it takes no step. It stacks its other results."""
    loop, body = Loop.of(equation), inline(equation.body)
    carries, stacks = loop.results(body.outputs)
    if not (loop.length if isinstance(loop.length, int) else is_positive(loop.length)):
        return [set(range(len(carries))) for _ in carries] + [set[int]() for _ in stacks]
    return _share([body], [carries]) + [set[int]() for _ in stacks]


def _anywhere(equation: Equation) -> list[set[int]]:
    places = range(len(equation.outputs))
    return [set(places) for _ in places]


_MAY_SHARE: dict[Op, Callable[[Equation], list[set[int]]]] = {
    COND: _in_branches,
    SWITCH: _in_branches,
    SCAN: _in_carries,
    WHILE: _anywhere,
}
"""For each result of a structured op the places of those in whose memory it may lie, with its own
if it may lie in that of an operand.
"""
