"""Boolean dataflow: one solver for activity, usefulness, liveness and dependence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal as Choice, TypeAlias

from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Mask, Rules
from thunder_fn.ir.trace import Equation, Trace, Var, num_vars

Port: TypeAlias = tuple[str, int] | tuple[str, int, int]
"""A place where values enter or leave: ("operand", i), ("result", i), ("in", body, i) or ("out",
body, i).
"""


@dataclass(frozen=True)
class Wiring:
    """The ways of values through the bodies of a structured equation: one row for each op, for
    every flow.

    Args:
        values: pairs of ports; the value at the first may be the value at the second.
        control: operands, or outputs of bodies, that choose which values go where.

    Example:
        >>> from thunder_fn.ir import Wiring
        >>> through = ((("operand", 1), ("in", 0, 0)), (("out", 0, 0), ("result", 0)))
        >>> Wiring(through, control=(("operand", 0),)).control  # a choice by its first operand
        (('operand', 0),)
    """

    values: tuple[tuple[Port, Port], ...]
    control: tuple[Port, ...] = ()


WIRINGS: Rules[Callable[[Equation], Wiring]] = Rules("wiring")
"""`rule(equation)` gives the wiring of a structured equation."""
wiring = WIRINGS.rule
Answer: TypeAlias = Callable[[Equation, Mask], Mask]
"""Flags of the operands to flags of the results; backward, the other way."""


def body_ports(equation: Equation, body: int, first: int = 0) -> tuple[tuple[Port, Port], ...]:
    """Wire one body: its inputs are the operands from `first` on, its outputs the results.

    Law: each input of the body, and each result, is the end of exactly one wire.

    Raises:
        IndexError: the equation has no such body.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> (call,) = tfn.trace(tfn.checkpoint(torch.sin), torch.ones(2)).equations
        >>> tfn.ir.body_ports(call, 0)
        ((('operand', 0), ('in', 0, 0)), (('out', 0, 0), ('result', 0)))
    """
    trace = equation.bodies[body]
    return (
        *((("operand", first + i), ("in", body, i)) for i in range(len(trace.inputs))),
        *((("out", body, i), ("result", i)) for i in range(len(equation.outputs))),
    )


@dataclass(frozen=True, eq=False)
class Flow:
    """A boolean question about every variable of a trace, answered by the least fixpoint.

    Args:
        leaf: forward, flags of the operands to flags of the results; backward, the other way. It
            must be monotone.
        rules: answers of single ops, by name, before everything else.
        opens: whether a composite or a structured op answers by its bodies; otherwise `leaf`
            answers.
        only: which variables may have the flag at all.
        from_nothing: whether a leaf may set flags on one side without any on the other.
        control: whether control counts. Forward, what chooses has the flag: so have all results.
            Backward, a result has it: so has what chooses.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.ir import Flow
        >>> depends = Flow("forward", lambda equation, flags: (any(flags),) * len(equation.outputs))
        >>> trace = tfn.trace(lambda x, y: (x.sin(), y.cos()), torch.ones(2), torch.ones(2))
        >>> depends.everywhere(trace, (True, False))  # x and x.sin()
        (True, False, True, False)
    """

    direction: Choice["forward", "backward"]
    leaf: Answer
    rules: Rules[Answer] = field(default_factory=lambda: Rules("flow"))
    opens: Callable[[Equation], bool] = lambda equation: True
    only: Callable[[Var], bool] = lambda var: True
    from_nothing: bool = False
    control: bool = False
    everywhere: Callable[..., Mask] = field(init=False)
    """(trace, flags, among) -> one flag for each variable, by index. `flags` are those of the
    inputs, or backward those of the outputs. `among` says which variables may have the flag at
    all, in place of `only`.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "everywhere", memo(16384)(self._everywhere))

    def cache_clear(self) -> None:
        """Forget all answers."""
        self.everywhere.cache_clear()  # type: ignore[attr-defined]

    def _everywhere(self, trace: Trace, flags: Mask, among: Mask | None = None) -> Mask:
        only = self.only if among is None else lambda var: among[var.index]
        found = [False] * num_vars(trace)
        is_forward = self.direction == "forward"
        for atom, flag in zip(trace.inputs if is_forward else trace.outputs, flags, strict=True):
            if flag and isinstance(atom, Var) and only(atom):
                found[atom.index] = True
        for equation in trace.equations if is_forward else reversed(trace.equations):
            near, far = equation.operands, equation.outputs
            if not is_forward:
                near, far = far, near
            given = tuple([found[var.index] for var in near])
            if not self.from_nothing and True not in given:
                continue
            for var, flag in zip(far, self.through(equation, given), strict=True):
                if flag and only(var):
                    found[var.index] = True
        return tuple(found)

    def over(self, trace: Trace, flags: Mask) -> Mask:
        """Take flags of the inputs to flags of the outputs; backward, the other way."""
        found = self.everywhere(trace, flags)
        ends = trace.outputs if self.direction == "forward" else trace.inputs
        return tuple([isinstance(atom, Var) and found[atom.index] for atom in ends])

    def through(self, equation: Equation, flags: Mask) -> Mask:
        """Take flags of the operands to flags of the results; backward, the other way."""
        rule = self.rules.find(equation.op)
        if rule is not None:
            return rule(equation, flags)
        if equation.bodies and self.opens(equation):
            if equation.op.kind == "composite":
                return self.over(equation.body, flags)
            wires = WIRINGS.find(equation.op)
            if wires is not None:
                return self._wired(equation, wires(equation), flags)
        return self.leaf(equation, flags)

    def _wired(self, equation: Equation, wires: Wiring, flags: Mask) -> Mask:
        marked, is_forward = self.ports(equation, wires, flags), self.direction == "forward"
        if self.control and is_forward and any(port in marked for port in wires.control):
            return (True,) * len(equation.outputs)
        ends, sink = (equation.outputs, "result") if is_forward else (equation.operands, "operand")
        return tuple([(sink, i) in marked for i in range(len(ends))])

    def ports(self, equation: Equation, wires: Wiring, flags: Mask) -> set[Port]:
        """Find the ports that have the flag: a carry takes it from an output of a body to an
        input, until nothing is new.
        """
        is_forward = self.direction == "forward"
        source = "operand" if is_forward else "result"
        enters, leaves = ("in", "out") if is_forward else ("out", "in")
        marked: set[Port] = {(source, i) for i, flag in enumerate(flags) if flag}
        if self.control and not is_forward and any(flags):
            marked.update(wires.control)
        while True:
            before = len(marked)
            for first, second in wires.values:
                start, end = (first, second) if is_forward else (second, first)
                if start in marked:
                    marked.add(end)
            for place, body in enumerate(equation.bodies):
                ends = body.inputs if is_forward else body.outputs
                given = tuple([(enters, place, i) in marked for i in range(len(ends))])
                marked.update(
                    (leaves, place, i) for i, flag in enumerate(self.over(body, given)) if flag
                )
            if len(marked) == before:
                return marked
