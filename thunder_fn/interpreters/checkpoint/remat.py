"""Rematerialisation: which residuals of a forward are kept, and the trace that computes the others
again.

Given the forward of a split and the values that its backward reads, everything here is a question
of graphs. `recompute` walks back from those values to the kept ones; `cheapest_cut` chooses the
values to keep.

A value that comes from random numbers is never drawn again. The values kept in its place are again
a choice: the cut with the fewest bytes. These are never more than the backward reads, as keeping
just that is one of the cuts.

Source: T. Chen et al., "Training deep nets with sublinear memory cost", 2016; P. Jain et al.,
"Checkmate", 2020; the minimum cut follows min_cut_rematerialization_partition of functorch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import sympy

from thunder_fn.interpreters.checkpoint.cost import bytes_of, cost_of
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.symbols import finders, symbols_in, unbound_symbols
from thunder_fn.ir.trace import Atom, Equation, Trace, Var

PRICES = range(-12, 44)
"""Exponents of two: how many operations a byte is worth, from almost none to almost any."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Equations to run again, in order, and the other values that they and the backward read."""

    equations: tuple[Equation, ...]
    inputs: tuple[Var, ...]
    kept: tuple[Var, ...]

    @property
    def cost(self) -> int:
        """The cost of running the equations again."""
        return sum(map(cost_of, self.equations))

    @property
    def kept_bytes(self) -> int:
        """The size of the kept values."""
        return sum(bytes_of(var.type) for var in self.kept)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among atoms, each once."""
    return list({atom.index: atom for atom in atoms if isinstance(atom, Var)}.values())


def numbers_read(reader: Equation | Trace, found: dict[sympy.Basic, Var]) -> list[Var]:
    """The variables that bind the unbacked numbers that an equation, or a trace after the
    forward, mentions.
    """
    if not found:
        return []
    own = (
        {var.index for var in reader.outputs if isinstance(var, Var)}
        if isinstance(reader, Equation)
        else set[int]()
    )
    used = symbols_in(reader) if isinstance(reader, Equation) else unbound_symbols(reader)
    return variables(
        found[symbol] for symbol in used if symbol in found and found[symbol].index not in own
    )


def recompute(forward: Trace, needed: Collection[Atom], kept: Collection[int]) -> Recomputation:
    """Choose the equations that run again to get the needed values from the inputs and the kept
    ones.
    """
    available = (
        {var.index for var in forward.inputs}
        | {constant.var.index for constant in forward.constants}
        | set(kept)
    )
    reads = {var.index: var for var in variables(needed)}
    wanted = set(reads) - available
    again: list[Equation] = []
    found = finders(forward)
    for equation in reversed(forward.equations):
        if any(var.index in wanted for var in equation.outputs):
            again.append(equation)
            read = (*equation.operands, *numbers_read(equation, found))
            reads.update((var.index, var) for var in read)
            wanted.update(var.index for var in read if var.index not in available)
    inputs = tuple(var for var in forward.inputs if var.index in reads and var.index not in kept)
    held = tuple(var for index, var in sorted(reads.items()) if index in kept)
    return Recomputation(tuple(reversed(again)), inputs, held)


def keep_random(forward: Trace, needed: Collection[Atom], kept: Collection[int]) -> frozenset[int]:
    """The kept values, and as few bytes more as are needed so that nothing random runs again."""
    if not any(map(ops.has_side_effect, recompute(forward, needed, kept).equations)):
        return frozenset(kept)
    total = sum(map(cost_of, forward.equations)) + 1
    return frozenset(kept) | cheapest_cut(
        forward, needed, kept, cost_of, lambda var: bytes_of(var.type) * total
    )


def cheapest_cut(
    forward: Trace,
    needed: Collection[Atom],
    kept: Collection[int],
    cost: Callable[[Equation], int],
    price: Callable[[Var], float],
) -> frozenset[int]:
    """Choose further values to keep, so that recomputation and memory together cost least.

    The graph has a node for each equation and each value. On the sink's side, an equation runs
    again and a value is needed. Cutting source -> equation pays for running it; cutting equation ->
    value pays for keeping the value. An equation that runs again needs its operands, which no cut
    avoids. Random equations cannot be run again.
    """
    import networkx  # takes longer to import than this package

    available = (
        {var.index for var in forward.inputs}
        | {constant.var.index for constant in forward.constants}
        | set(kept)
    )
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    found = finders(forward)
    for position, equation in enumerate(forward.equations):
        node = ("equation", position)
        if ops.has_side_effect(equation):
            graph.add_edge("source", node)
        else:
            graph.add_edge("source", node, capacity=cost(equation))
        for var in equation.outputs:
            if var.index not in available:
                graph.add_edge(node, var.index, capacity=price(var))
        read = (*equation.operands, *numbers_read(equation, found))
        graph.add_edges_from((var.index, node) for var in read if var.index not in available)
    graph.add_edges_from(
        (var.index, "sink") for var in variables(needed) if var.index not in available
    )
    _, (_, again) = networkx.minimum_cut(graph, "source", "sink")
    return frozenset(
        var.index
        for position, equation in enumerate(forward.equations)
        if ("equation", position) not in again
        for var in equation.outputs
        if var.index in again
    )


def within_budget(forward: Trace, needed: Collection[Atom], budget_bytes: int) -> frozenset[int]:
    """Choose values so that recomputation costs little and the kept bytes meet the budget, or
    are as few as can be.
    """
    everything = frozenset(var.index for var in variables(needed)) - {
        var.index for var in forward.inputs
    }
    if recompute(forward, needed, everything).kept_bytes <= budget_bytes:
        return everything
    low, high = 0, len(PRICES) - 1
    best = keep_random(forward, needed, ())
    while low <= high:
        middle = (low + high) // 2
        found = _at_price(forward, needed, PRICES[middle])
        if recompute(forward, needed, found).kept_bytes <= budget_bytes:
            best, high = found, middle - 1
        else:
            low = middle + 1
    return _filled(forward, needed, best, budget_bytes)


def _at_price(forward: Trace, needed: Collection[Atom], exponent: int) -> frozenset[int]:
    scale = 1 << max(0, -exponent)
    return cheapest_cut(
        forward,
        needed,
        (),
        lambda e: cost_of(e) * scale,
        lambda v: (bytes_of(v.type) << max(0, exponent)) + 1,
    )


def _filled(
    forward: Trace, needed: Collection[Atom], kept: frozenset[int], budget_bytes: int
) -> frozenset[int]:
    """Spend the rest of the budget, each time on the value that saves most computation for its
    bytes.
    """
    while True:
        plan = recompute(forward, needed, kept)
        left = budget_bytes - plan.kept_bytes
        candidates = [var for var in bound(plan.equations) if 0 < bytes_of(var.type) <= left]
        gains = [(_gain(forward, needed, kept, plan, var), var) for var in candidates]
        best = max(gains, key=lambda pair: pair[0], default=None)
        if best is None or best[0] <= 0:
            return kept
        kept = kept | {best[1].index}


def _gain(
    forward: Trace, needed: Collection[Atom], kept: frozenset[int], plan: Recomputation, var: Var
) -> float:
    new = recompute(forward, needed, kept | {var.index})
    return (plan.cost - new.cost) / bytes_of(var.type) if var in new.kept else 0.0
