"""The bytes that a fusing executor moves: values that stay inside of one kernel are not among them.

An estimate: neighbours between two matrix products, collectives or gathers are one kernel if each
is pointwise, a reduction or a view. Their results that nobody else reads stay in registers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from thunder_fn.inspect.costs import FREE, Cost, cost_of
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import last_uses
from thunder_fn.ir.trace import Equation, Trace, Type

_FUSIBLE = facts.REDUCES | facts.MOVES | facts.RESHAPES | facts.LIKE | facts.PARAMETERS_MAY_BE_WIDER


def is_fusible(equation: Equation) -> bool:
    """Test whether an equation may be part of a larger kernel."""
    if equation.op.kind != "leaf" or ops.is_collective(equation.op):
        return False
    op = equation.op
    return ops.is_pointwise(op) or ops.is_view(op) or op in _FUSIBLE


def fused_costs(trace: Trace) -> Iterator[tuple[Equation, Cost]]:
    """The cost of each equation if neighbours that can be one kernel are one.

    The first equation of a kernel has the bytes of the kernel, the others none.
    """
    last = last_uses(trace)
    pending: list[tuple[int, Equation]] = []
    for position, equation in enumerate(trace.equations):
        if is_fusible(equation):
            pending.append((position, equation))
            continue
        yield from _kernel(pending, last)
        pending = []
        yield equation, FREE if equation.bodies else cost_of(equation)
    yield from _kernel(pending, last)


def _kernel(
    group: Sequence[tuple[int, Equation]], last: Sequence[int]
) -> Iterator[tuple[Equation, Cost]]:
    if not group:
        return
    costs = [cost_of(equation) for _, equation in group]
    whole = sum(costs, FREE)
    moved = min(whole.num_bytes, _crossing(group, last))
    first = next((at for at, cost in enumerate(costs) if cost != FREE), 0)
    for at, ((_, equation), cost) in enumerate(zip(group, costs, strict=True)):
        yield equation, Cost(cost.flops, moved if at == first and whole != FREE else 0)


def _crossing(group: Sequence[tuple[int, Equation]], last: Sequence[int]) -> int:
    """The bytes of values that a kernel reads from others or leaves to others; a view is the value
    that it is a view of.
    """
    end = group[-1][0]
    roots: dict[int, int] = {}
    sizes: defaultdict[int, int] = defaultdict(int)
    made: set[int] = set()

    def crosses(index: int, type: Type) -> None:
        root = roots.get(index, index)
        sizes[root] = max(sizes[root], bytes_of(type))

    for _, equation in group:
        if ops.is_view(equation.op) and equation.operands:
            source = equation.operands[0].index
            roots.update((var.index, roots.get(source, source)) for var in equation.outputs)
            continue
        for var in equation.operands:
            if roots.get(var.index, var.index) not in made:
                crosses(var.index, var.type)
        made.update(var.index for var in equation.outputs)
    for _, equation in group:
        for var in equation.outputs:
            if last[var.index] > end and roots.get(var.index, var.index) in made:
                crosses(var.index, var.type)
    return sum(sizes.values())
