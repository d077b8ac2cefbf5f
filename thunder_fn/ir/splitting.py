"""Split: cut a trace into a first and a second half, with residuals between them.

Reverse mode, partial evaluation, custom rules and the grad transforms of executors are all this
function. They differ in which variables are late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from thunder_fn.ir.equations import makers
from thunder_fn.ir.flow import Flow
from thunder_fn.ir.rules import Mask, Residual, Split
from thunder_fn.ir.trace import Atom, Equation, Trace, TraceBuilder, Var, cut


def split(
    trace: Trace | TraceBuilder,
    late: Collection[int],
    outputs: Sequence[Sequence[Atom]],
    *,
    equations: Sequence[Equation] | None = None,
    again: Callable[[Equation], bool] = lambda equation: False,
    names: tuple[str, str] | None = None,
) -> Split:
    """Cut a trace into two halves.

    Before: trace: inputs -> ...; the variables in `late` are inputs and results that belong to the
            second half.
    After:  forward:  early inputs -> early outputs, extra residuals
            backward: residuals, late inputs -> late outputs
            Each residual is an input of forward, one of its outputs, or an extra output.

    Law: the second half, given the residuals of the first, computes what the trace does.

    Args:
        late: indices of variables, closed under "is computed from".
        outputs: of the forward and of the backward, as atoms of the trace.
        equations: those of the trace by default; or the same, with some divided into an early and a
            late one.
        again: early equations that the second half computes again, in place of residuals. Each
            stands before its first reader.
        names: of both halves.

    Raises:
        InvalidTrace: an early equation or output reads a late variable.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x, y: x.sin() * y, torch.ones(2), torch.ones(2))
        >>> halves = tfn.ir.split(trace, {1, 3}, ((), trace.outputs))  # y and the product
        >>> print(halves.backward)
        def program_backward(v0, v1):
            # v0: f32[2]
            # v1: f32[2]
            v2 = aten.mul.Tensor(v0, v1)  # f32[2]
            return (v2,)
    """
    early_outputs, late_outputs = tuple(outputs[0]), tuple(outputs[1])
    whole = trace.equations if equations is None else equations
    early_inputs = tuple(var for var in trace.inputs if var.index not in late)
    early = [equation for equation in whole if not is_late(equation, late)]
    second, carried = late_half(trace, whole, late, late_outputs, again)
    extras, residuals = _places(carried, early_inputs, early_outputs)
    late_inputs = tuple(var for var in trace.inputs if var.index in late)
    first_name, second_name = names or (f"{trace.name}_forward", f"{trace.name}_backward")
    results, inputs = (*early_outputs, *extras), (*carried.values(), *late_inputs)
    return Split(
        cut(trace, inputs=early_inputs, equations=early, outputs=results, name=first_name),
        cut(trace, inputs=inputs, equations=second, outputs=late_outputs, name=second_name),
        residuals,
        (),
    )


def _places(
    carried: dict[int, Var], early_inputs: Sequence[Var], early_outputs: Sequence[Atom]
) -> tuple[list[Var], tuple[Residual, ...]]:
    """Find what the second half reads of the first: the variables that are extra outputs, and the
    place of each. An input is one before an output.
    """
    inputs = {var.index: i for i, var in reversed(list(enumerate(early_inputs)))}
    numbered = reversed(list(enumerate(early_outputs)))
    results = {atom.index: i for i, atom in numbered if isinstance(atom, Var)}
    extras = [var for index, var in carried.items() if index not in inputs and index not in results]
    places = {
        **{var.index: Residual("extra", i) for i, var in enumerate(extras)},
        **{index: Residual("output", i) for index, i in results.items()},
        **{index: Residual("input", i) for index, i in inputs.items()},
    }
    return extras, tuple(places[index] for index in carried)


def handing_on(halves: Split) -> Trace:
    """Return the first half with every residual as an output, after its own: for a second half
    that sees nothing else.

    Law: its outputs are those of the first half, then the residuals in their order.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x, y: x.sin() * y, torch.ones(2), torch.ones(2))
        >>> halves = tfn.ir.split(trace, {1, 3}, ((), trace.outputs))
        >>> len(tfn.ir.handing_on(halves).outputs)
        1
    """
    first = halves.forward
    count = len(first.outputs) - halves.num_extra
    return cut(
        first,
        outputs=(*first.outputs[:count], *halves.residual_values(first.inputs, first.outputs)),
    )


DEPENDS = Flow(
    "forward",
    lambda equation, flags: (any(flags),) * len(equation.outputs),
    opens=lambda equation: False,
)
"""The flow of dependence: a variable depends on the marked inputs. Composites are taken whole."""


def dependent(trace: Trace, marked_inputs: Mask) -> set[int]:
    """Return the indices of the variables that depend on marked inputs.

    Law: all other variables have the same values, whatever the marked inputs are.

    Raises:
        ValueError: the mask is not one flag for each input.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> trace = tfn.trace(lambda x, y: (x.sin(), y.cos()), torch.ones(2), torch.ones(2))
        >>> found = dependent(trace, (True, False))
        >>> [equation.outputs[0].index in found for equation in trace.equations]
        [True, False]
    """
    return {index for index, flag in enumerate(DEPENDS.everywhere(trace, marked_inputs)) if flag}


def late_half(
    trace: Trace | TraceBuilder,
    equations: Sequence[Equation],
    late: Collection[int],
    outputs: Sequence[Atom],
    again: Callable[[Equation], bool],
) -> tuple[list[Equation], dict[int, Var]]:
    """Return the late equations behind what they compute again, and what they read of the first
    half, by index.

    Both are in the order of first reading.

    Law: given the variables that are read and the late inputs, the equations compute the outputs.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.ir import late_half
        >>> trace = tfn.trace(lambda x, y: x.sin() * y, torch.ones(2), torch.ones(2))
        >>> never = lambda equation: False
        >>> late, read = late_half(trace, trace.equations, {1, 3}, trace.outputs, never)
        >>> [equation.op.name for equation in late], list(read)
        (['aten.mul.Tensor'], [2])
    """
    own = {constant.var.index for constant in trace.constants}
    half = _LateHalf(late, again, makers(equations), own)
    for equation in equations:
        if is_late(equation, late):
            for operand in equation.operands:
                half.read(operand)
            half.equations.append(equation)
    for atom in outputs:
        if isinstance(atom, Var):
            half.read(atom)
    return half.equations, half.carried


@dataclass
class _LateHalf:
    """A second half while it grows: `own` are the variables that it computes again, `carried`
    its residuals.
    """

    late: Collection[int]
    again: Callable[[Equation], bool]
    makers: dict[int, tuple[Equation, int]]
    own: set[int]
    equations: list[Equation] = field(default_factory=list)
    carried: dict[int, Var] = field(default_factory=dict)

    def read(self, wanted: Var) -> None:
        """Make a variable readable: compute it again, or carry it over from the first half."""
        pending = [wanted]  # a stack: what a recomputed equation reads comes before it
        while pending:
            var = pending.pop()
            if self._is_there(var):
                continue
            maker, _ = self.makers.get(var.index, (None, 0))
            if maker is None or not self.again(maker):
                self.carried[var.index] = var
                continue
            if missing := [operand for operand in maker.operands if not self._is_there(operand)]:
                pending += (var, *reversed(missing))
                continue
            self.own.update(result.index for result in maker.outputs)
            self.equations.append(maker)

    def _is_there(self, var: Var) -> bool:
        return var.index in self.late or var.index in self.own or var.index in self.carried


def is_late(equation: Equation, late: Collection[int]) -> bool:
    """Tell whether an equation belongs to the second half. Effects, without results, are early
    unless an operand is late.
    """
    return any(var.index in late for var in equation.outputs or equation.operands)
