"""The cost of equations: operations, bytes, and their place under the roofline. Estimates from
types.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from thunder_fn.errors import spelled
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.machines import Machine, checked_machine, known_machine
from thunder_fn.inspect.tables import bytes_text, count_text, plain, rich_table
from thunder_fn.interpreters.checkpoint.cost import bytes_of, flops_of
from thunder_fn.interpreters.simplify import dce, inline
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.text import escaped
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations, bytes read and written, and bytes that go to other ranks.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> spent = tfn.inspect.cost(torch.mm, torch.ones(2, 3), torch.ones(3, 4)).total
        >>> spent
        Cost(flops=48, num_bytes=104, sent=0)
    """

    flops: int = 0
    num_bytes: int = 0
    sent: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops, self.num_bytes + other.num_bytes, self.sent + other.sent
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.num_bytes * times, self.sent * times)

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    def seconds(self, machine: Machine) -> float:
        """The least time that a machine takes."""
        return machine.seconds(self.flops, self.num_bytes)


FREE = Cost()
_COPIES = facts.MOVES | facts.GATHERS
_FREE = ("aten.reshape.default", "_c10d_functional.wait_tensor.default")
COLLECTIVES = (
    "_c10d_functional.",
    "_dtensor.",
    "c10d_functional.",
    "thunder_fn.send",
    "thunder_fn.receive",
)


def is_collective(name: str) -> bool:
    """Test whether the op of this name moves values between ranks.

    Law: no op of ATen is one.

    Example:
        >>> is_collective("aten.mm.default"), is_collective("_c10d_functional.all_reduce.default")
        (False, True)
    """
    return name.startswith(COLLECTIVES) and not name.endswith("wait_tensor.default")


def cost_of(equation: Equation) -> Cost:
    """The cost of an equation. Views are free; a pointwise op or a sum is one operation for each
    element.

    A composite costs its body, a loop its body for each known step, a choice the dearest branch.
    """
    if equation.op.kind != "leaf":
        return _cost_of_bodies(equation)
    if ops.is_view(equation.op) or equation.op.name in _FREE:
        return FREE
    sizes = sum(bytes_of(var.type) for var in dict.fromkeys(equation.operands))
    sizes += sum(bytes_of(var.type) for var in equation.outputs)
    if is_collective(equation.op.name):
        return Cost(0, sizes, sum(bytes_of(var.type) for var in equation.operands))
    return Cost(flops_of(equation) or _elements(equation), sizes)


def _elements(equation: Equation) -> int:
    """The elements of the largest floating operand or result, one operation for each."""
    values = (*equation.operands, *equation.outputs)
    types = [var.type for var in values if isinstance(var.type, TensorType)]
    floating = [type for type in types if type.dtype.is_floating_point or type.dtype.is_complex]
    is_copy = equation.op in _COPIES or not equation.operands
    return (
        0
        if is_copy
        else max((bytes_of(type) // type.dtype.itemsize for type in floating), default=0)
    )


def _cost_of_bodies(equation: Equation) -> Cost:
    found = [cost_of_trace(body) for body in equation.bodies]
    if not found:
        return FREE
    if equation.op.kind == "composite":
        return found[0]
    largest = max(found, key=lambda cost: (cost.flops, cost.num_bytes))
    return largest * next(
        (arg.value for key, arg in equation.kwargs if key == "length" and isinstance(arg, Literal)),
        1,
    )


def cost_of_trace(trace: Trace) -> Cost:
    """The cost of all equations of a trace."""
    total = FREE
    for equation in trace.equations:
        total += cost_of(equation)
    return total


@dataclass(frozen=True, repr=False)
class CostReport(Shown):
    """The cost of a function, by op and as a whole.

    Attributes:
        by_op: for each op how often it runs and its cost, dearest first.
        machine: whose peaks place an op under the roofline; None where no peaks are known.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> report = tfn.inspect.cost(torch.mm, torch.ones(2, 3), torch.ones(3, 4))
        >>> report.by_op
        {'aten.mm.default': (1, Cost(flops=48, num_bytes=104, sent=0))}
    """

    function: str
    equations: tuple[tuple[Equation, Cost], ...]
    machine: Machine | None = None

    @cached_property
    def total(self) -> Cost:
        """The sum over all ops."""
        return sum((cost for _, cost in self.equations), FREE)

    @cached_property
    def by_op(self) -> dict[str, tuple[int, Cost]]:
        """The number of runs and the cost of each op, dearest first."""
        found: defaultdict[str, tuple[int, Cost]] = defaultdict(lambda: (0, FREE))
        for equation, cost in self.equations:
            times, known = found[equation.op.name]
            found[equation.op.name] = times + 1, known + cost
        return dict(sorted(found.items(), key=lambda item: self._weight(item[1][1]), reverse=True))

    def _weight(self, cost: Cost) -> tuple[float, float]:
        if self.machine is not None:
            return cost.seconds(self.machine), cost.num_bytes
        return float(cost.flops), cost.num_bytes

    @property
    def summary(self) -> str:
        """The report in one line."""
        total = self.total
        text = (
            f"cost of {self.function}: {count_text(total.flops)} FLOP,"
            f" {bytes_text(total.num_bytes)} moved"
        )
        if total.sent:
            text += f", {bytes_text(total.sent)} sent"
        if self.machine is not None:
            least = sum(cost.seconds(self.machine) for _, cost in self.equations)
            text += f"; at least {least * 1e3:.3f} ms on {self.machine.name}"
        return escaped(text)

    def rows(self, limit: int = 20) -> list[tuple[str, ...]]:
        """The table: op, times, FLOP, bytes, FLOP/byte, and the limiting peak where peaks are
        known.
        """
        return [
            (
                name,
                str(times),
                count_text(cost.flops),
                bytes_text(cost.num_bytes),
                f"{cost.intensity:.1f}",
                *(
                    []
                    if self.machine is None
                    else [f"{cost.seconds(self.machine) * 1e6:.1f}", self._limit(cost)]
                ),
            )
            for name, (times, cost) in list(self.by_op.items())[:limit]
        ]

    def _limit(self, cost: Cost) -> str:
        assert self.machine is not None, "the caller has looked"
        return (
            ""
            if not cost.num_bytes
            else "compute"
            if cost.intensity >= self.machine.ridge
            else "memory"
        )

    @property
    def _header(self) -> tuple[str, ...]:
        more = () if self.machine is None else ("least µs", "bound by")
        return ("op", "times", "FLOP", "moved", "FLOP/B", *more)

    def __str__(self) -> str:
        return "\n".join([self.summary, plain(self._header, self.rows())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.summary, style="bold"), rich_table(self._header, self.rows()))


@spelled()
def cost(
    f: Callable[..., Any], /, *args: Any, machine: Machine | None = None, **kwargs: Any
) -> CostReport:
    """Estimate the operations and bytes of `jit(f)(*args, **kwargs)`, op by op. Nothing is run.

    Law: the total is the sum of the ops.

    Args:
        machine: whose peaks give least times and what limits each op. Left out, the device's where
            they are known; see `measured_machine`.

    Errors as in `chain`.

    Example:
        >>> report = cost(lambda x: x @ x.t(), torch.ones(64, 64))
        >>> report.total.flops == 2 * 64**3
        True
    """
    return cost_of_chain(chain(f, *args, **kwargs), checked_machine("cost", machine))


def cost_of_chain(found: Chain, machine: Machine | None = None) -> CostReport:
    """The cost of the programs of a chain."""
    equations = [equation for trace in unfolded_programs(found) for equation in trace.equations]
    costs = tuple((equation, cost_of(equation)) for equation in equations)
    return CostReport(found.name, costs, machine or machine_of(found))


def unfolded_programs(found: Chain) -> tuple[Trace, ...]:
    """The programs of a chain without composites: their equations are those that have a cost."""
    return tuple(dce(inline(step.trace)) for step in found.programs)


def machine_of(found: Chain) -> Machine | None:
    """The machine that a chain's values are on, where its peaks are known."""
    return known_machine(device_of(found))


def device_of(found: Chain) -> torch.device:
    """The device of the first of a chain's tensors."""
    types = (var.type for var in _variables(found))
    return next(
        (type.device for type in types if isinstance(type, TensorType)), torch.device("cpu")
    )


def _variables(found: Chain) -> list[Var]:
    return [*found.trace.inputs, *bound(found.trace.equations)]
