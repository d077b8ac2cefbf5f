"""The bridge to PyTorch's autograd: results of a jitted function are differentiable by
`loss.backward()`.

A trace is split into a forward program and a backward. The backward is cut into one piece for each
node that autograd's graph gets (`pieces.py`, `nodes.py`). If the backward is to be differentiated
itself (`create_graph=True`), a bridged trace of its own computes the gradient from the inputs. So
derivatives of any order are right.

That trace draws the random numbers of the forward again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.generators import generators_of, random_state
from thunder_fn.capture.watching import made
from thunder_fn.derived.activity import activity
from thunder_fn.derived.leaf_vjp import is_autograds
from thunder_fn.errors import UnsupportedCall
from thunder_fn.executors import Executor, Program, any_fuses, lower
from thunder_fn.executors.lending import Memory
from thunder_fn.executors.reuse import COPY
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import forward_backward
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import facts, ops
from thunder_fn.ir.constraints import close_symbols, constraints_of
from thunder_fn.ir.equations import bound, makers
from thunder_fn.ir.memory import leaving_variables
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import Split
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Expr,
    Literal,
    TensorType,
    Trace,
    Var,
    type_of,
)
from thunder_fn.ir.walking import unfolded
from thunder_fn.jitted.autograd.nodes import Following, Node, call
from thunder_fn.jitted.autograd.pieces import Pieces, pieces_of
from thunder_fn.structured.custom_vjp import sees_absent_cotangents

Mask = tuple[bool, ...]


def bridge(
    trace: Trace,
    tensors: Sequence[Any],
    writes: Sequence[int | None] = (),
    executors: tuple[Executor, ...] = (),
) -> Bridge | None:
    """Make a differentiable function of these tensors from the trace. Return None if no output
    depends on one that requires grad.

    The last outputs will be written to the inputs `writes`, or elsewhere where it is None. If none
    of them has a gradient, as the statistics of a batch norm, autograd is not told of them. The
    tensors would require grad then.

    Law: the gradients that `backward` leaves are those of the function that was traced.

    Raises:
        UnsupportedCall: eager's gradient would be a sparse tensor.
    """
    wanted = tuple(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
    if not any(wanted):
        return None
    trace = opened(trace, wanted)
    check_dense(trace, wanted)
    outputs = differentiable_outputs(trace, wanted)
    first = len(outputs) - len(writes)
    written = (False,) * first + outputs[first:]
    if any(written) and all(
        place is None for place in forward_backward(trace, wanted, written).gradients
    ):
        outputs = outputs[:first] + (False,) * len(writes)
    overwritten = frozenset(place for place in writes if place is not None and not wanted[place])
    followed = {
        atom.index
        for atom, flag in zip(trace.outputs, outputs, strict=True)
        if flag and isinstance(atom, Var)
    }
    given = [
        (place, atom)
        for place, atom in zip(writes, trace.outputs[first:], strict=True)
        if place is not None and wanted[place] and isinstance(atom, Var) and atom.index in followed
    ]
    changed = frozenset(place for place, _ in given)
    moved = frozenset(
        place for place, atom in given if history_of(trace, atom) != trace.inputs[place]
    )
    fixed = frozenset(place for place in writes if place is not None and wanted[place]) - changed
    return (
        Bridge(trace, wanted, outputs, overwritten, executors, changed, moved, fixed)
        if any(outputs)
        else None
    )


def check_dense(trace: Trace, wanted: Mask) -> None:
    """Check that no gradient would be sparse in eager code, for which a trace has no type.

    Raises:
        UnsupportedCall: one would; names the user's line.
    """
    found = sparse_gradient(trace, wanted)
    if found is not None:
        name = found.op.name.split(".")[1].strip("_")
        _, option = facts.SPARSE_GRADIENT[found.op.name]
        what = f"{name}: its gradient is sparse in eager code ({option}=True), and dense in a trace"
        fix = (
            "Write False for it, with an optimizer for dense gradients, or call it outside of the"
            " jitted function."
        )
        raise UnsupportedCall(what, source=found.source, fix=fix)


@memo(16384)
def sparse_gradient(trace: Trace, wanted: Mask) -> Equation | None:
    """The first equation that has a sparse gradient in eager code, among those that depend on a
    wanted input.
    """
    active = activity(trace, wanted)
    for equation in trace.equations:
        flags = tuple(active[var.index] for var in equation.operands)
        if equation.op.name in facts.SPARSE_GRADIENT and flags[0]:
            place, name = facts.SPARSE_GRADIENT[equation.op.name]
            given = dict(equation.kwargs).get(name)
            if given is None and place is not None and place < len(equation.args):
                given = equation.args[place]
            if given == Literal(True):
                return equation
        for body in equation.bodies if any(flags) else ():
            found = sparse_gradient(
                body, flags if equation.op.kind == "composite" else (True,) * len(body.inputs)
            )
            if found is not None:
                return found
    return None


def opened(trace: Trace, wanted: Mask) -> Trace:
    """Unfold the modules of a trace that occur once and give several results that autograd follows.

    Computations inside that read one of the results then belong to another node than its own.
    """
    active = activity(trace, wanted)
    times = Counter(equation.bodies for equation in trace.equations)
    inside = [
        equation.op.kind == "composite"
        and not (
            ops.is_operator(equation.op) or "." in equation.op.name
        )  # executors may claim these whole
        and times[equation.bodies] == 1
        and sum(active[var.index] for var in equation.outputs) > 1
        for equation in trace.equations
    ]
    if not any(inside) or sum(differentiable_outputs(trace, wanted)) < 2:
        return trace
    flags = iter(inside)
    return opened(unfolded(trace, lambda _: next(flags)), wanted)


def history_of(trace: Trace, atom: Atom) -> Atom:
    """Return the variable with the same gradient as this one, behind all changes made where
    gradients are off.
    """
    known = makers(trace.equations)
    while isinstance(atom, Var) and atom.index in known:
        equation, index = known[atom.index]
        if equation.op in (ops.STRAIGHT_THROUGH, ops.NO_GRAD_WRITE):
            atom = equation.operands[1]
            continue
        source = equation.operands[1:2] if equation.op == COPY else ()  # none for a number
        if source and source[0].type == atom.type:
            atom = source[0]
            continue
        if not ops.computes_body(equation.op):
            break
        inner = history_of(equation.body, equation.body.outputs[index])
        if not isinstance(inner, Var) or inner not in equation.body.inputs:
            break
        atom = equation.operands[equation.body.inputs.index(inner)]
    return atom


def differentiable_outputs(trace: Trace, wanted: Mask) -> Mask:
    """Tell which outputs autograd follows: those that depend on a wanted input and pass through
    it.
    """
    active = activity(trace, wanted)
    pairs = zip(trace.outputs, handed_over(trace), strict=True)
    return tuple(isinstance(atom, Var) and active[atom.index] and flag for atom, flag in pairs)


def handed_over(trace: Trace) -> Mask:
    """Tell which outputs pass through autograd: variables that are not inputs, each once."""
    seen, found = set[int](range(len(trace.inputs))), list[bool]()
    for atom in trace.outputs:
        found.append(isinstance(atom, Var) and atom.index not in seen)
        seen |= {atom.index} if isinstance(atom, Var) else set()
    return tuple(found)


SMALL = 2**14
"""The mean number of elements of a result up to which calling an op takes longer than computing
it.
"""


@memo(16384)
def is_followable(trace: Trace) -> bool:
    """Test whether autograd may follow a trace op by op: its derivatives are those of our rules,
    and the results are small and in memory of their own.
    """
    trace = inline(trace)
    if not _is_small(trace.equations) or any(map(ops.has_side_effect, trace.equations)):
        return False
    given = frozenset(range(len(trace.inputs) + len(trace.constants)))
    are_own = given.isdisjoint(leaving_variables(trace))
    is_leaf = all(equation.op.kind == "leaf" for equation in trace.equations)
    return are_own and is_leaf and is_autograds(trace)


def _is_small(equations: Sequence[Equation]) -> bool:
    types = (var.type for var in bound(equations))
    shapes = [type.shape for type in types if isinstance(type, TensorType)]
    known = [[dim for dim in shape if isinstance(dim, int)] for shape in shapes]
    return list(map(len, known)) == list(map(len, shapes)) and (
        sum(map(math.prod, known)) <= SMALL * len(shapes)
    )


@dataclass(frozen=True)
class Bridge:
    """A trace, called under autograd.

    `wanted` are the inputs that require grad, `active` the outputs that depend on them.
    `overwritten` are the inputs that will not hold their value when the backward runs. `executors`
    run both halves. `changed` are the inputs that require grad and get a value that does: the
    backward reads their old values. `moved` are those of them that get another history too.
    `fixed` are inputs that require grad and get a value that does not.
    """

    trace: Trace
    wanted: Mask
    active: Mask
    overwritten: frozenset[int]
    executors: tuple[Executor, ...] = ()
    changed: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()
    fixed: frozenset[int] = frozenset()
    narrower: dict[Mask, Bridge] = field(
        default_factory=dict[Mask, "Bridge"], repr=False, compare=False
    )

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """The trace's outputs. Those that are inputs come back as the very tensors, and so do
        repeated ones.

        Raises:
            RuntimeError: a leaf that requires grad is to be changed in place, as PyTorch has it.
        """
        if internals.inside_torch_func():  # forward mode, which follows each op
            return evaluate(self.trace, inputs)
        if self.is_plain:
            return call(self, inputs)
        known: dict[int, Any] = dict(enumerate(inputs))
        if self.fixed:
            inputs = tuple(
                value.clone() if place in self.fixed and not value.is_leaf else value
                for place, value in enumerate(inputs)
            )
        if self.unreachable:
            inputs = tuple(
                value.detach() if place in self.unreachable else value
                for place, value in enumerate(inputs)
            )
        if self.changed:
            if any(known[place].is_leaf for place in self.moved):
                raise RuntimeError(
                    "a leaf Variable that requires grad is being used in an in-place operation."
                )
            inputs = tuple(
                value.clone() if place in self.changed else value
                for place, value in enumerate(inputs)
            )
        results = call(self, inputs)
        for atom, value in zip(self.trace.outputs, results, strict=True):
            if isinstance(atom, Var):
                known.setdefault(atom.index, value)
        # a number is an expression in the trace
        outputs = zip(self.trace.outputs, results, strict=True)
        return tuple(
            known[atom.index] if isinstance(atom, Var) else value for atom, value in outputs
        )

    @cached_property
    def is_plain(self) -> bool:
        """Test whether each output is a result of the one node, and no input needs special care."""
        edges = self.pieces.edges
        if not all(self.active) or len(self.nodes) != 1 or len(edges) > len(self.active):
            return False
        (node,) = self.nodes
        in_order = node.piece.takes == tuple(range(len(self.active)))
        return in_order and not (self.fixed or self.unreachable or self.changed)

    @cached_property
    def wanted_places(self) -> tuple[int, ...]:
        """The wanted inputs."""
        return tuple(place for place, flag in enumerate(self.wanted) if flag)

    @cached_property
    def active_places(self) -> tuple[int, ...]:
        """The active outputs."""
        return tuple(place for place, flag in enumerate(self.active) if flag)

    @cached_property
    def unreachable(self) -> frozenset[int]:
        """The wanted inputs that never get a gradient: autograd would go on into the graphs that
        they come from.
        """
        pairs = zip(self.wanted_places, self.split.gradients, strict=True)
        return frozenset(place for place, found in pairs if found is None)

    @cached_property
    def handed_over(self) -> Mask:
        """The outputs that pass through autograd."""
        return handed_over(self.trace)

    @cached_property
    def split(self) -> Split:
        """Split the trace into forward and backward."""
        split = forward_backward(
            self.trace, self.wanted, self.active, fused=any_fuses(self.executors)
        )
        made("split", split.forward, self.trace)
        return split

    @cached_property
    def pieces(self) -> Pieces:
        """The backward in pieces."""
        return pieces_of(self.split, whole=self.sees_absent)

    @cached_property
    def inner_sizes(self) -> tuple[Expr, ...]:
        """The symbolic sizes of the values on a piece's edges."""
        inner = self.pieces.edges[sum(self.active) :]
        return tuple(
            dict.fromkeys(size for type in inner for size in type.shape if isinstance(size, Expr))
        )

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of autograd's graph in the order in which they are made: the last to run
        backward is the first.
        """
        nodes, start = list[Node](), 0
        for piece in self.pieces.pieces:
            nodes.append(Node(self, piece, start))
            start += len(nodes[-1].numbers)
        return tuple(reversed(nodes))

    @cached_property
    def forward(self) -> Program:
        """The trace from the inputs to the outputs, the residuals, numbers that the backward takes,
        and the sizes of its inner edges.
        """
        numbers = [Literal(number) for node in reversed(self.nodes) for number in node.numbers]
        numbers += [Literal(size) for size in self.inner_sizes]
        whole = replace(self.split.forward, outputs=(*self.split.forward.outputs, *numbers))
        return lower(
            whole,
            below_autograd=True,
            executors=self.executors,
            memory=self.memory,
            first_lent=len(self.trace.outputs),
        )

    @cached_property
    def memory(self) -> Memory:
        """The memory that its programs share if they are recorded."""
        return Memory()

    @cached_property
    def backward(self) -> Program:
        """The trace from residuals, cotangents and numbers to gradients: all pieces as one
        program.
        """
        if len(self.nodes) == 1:
            return self.nodes[0].program
        closed, _ = close_symbols(self.split.backward)
        return self.lowered_backward(closed)

    def lowered_backward(self, trace: Trace) -> Program:
        """The program of the backward, or of a piece of it."""
        return lower(
            trace, below_autograd=True, executors=self.executors, taken=True, memory=self.memory
        )

    @cached_property
    def followed(self) -> Program | None:
        """The trace as a program that autograd follows op by op, where that is as right and faster.

        A node written in Python costs as much as ten calls of ops. So it does not pay where calling
        the ops takes longer than computing them.
        """
        cares = (
            self.overwritten or self.fixed or self.changed or self.sees_absent or self.unreachable
        )
        if cares or not all(self.active) or not is_followable(self.trace):
            return None
        if self.executors and self.forward.claimed.claims:
            return None
        program = lower(self.trace, donated=None)
        is_torchs = all(executor.finish(program) is program for executor in self.executors)
        return program if is_torchs else None

    @cached_property
    def draws(self) -> bool:
        """Test whether the forward draws random numbers."""
        return ops.has_effects(self.trace)

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices besides the CPU whose generators it may draw from."""
        atoms = (*self.trace.inputs, *self.trace.outputs)
        devices = {type.device for type in map(type_of, atoms) if isinstance(type, TensorType)}
        return tuple(
            sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)
        )

    def random_state(self) -> Callable[[], None]:
        """The states of all generators that it may draw from, as a function that sets them back."""
        return random_state(generators_of(self.trace), self.devices)

    @cached_property
    def decisions(self) -> tuple[Expr, ...]:
        """The demands of the trace and of the derivative's rules on symbols."""
        found = (
            constraints_of(trace) for trace in (self.trace, self.split.forward, self.split.backward)
        )
        return tuple(dict.fromkeys(decision for decisions in found for decision in decisions))

    @cached_property
    def sees_absent(self) -> bool:
        """Test whether a rule in the trace tells absent cotangents from zeros. Then the backward is
        one piece, made for the cotangents that are given.
        """
        return sum(self.active) > 1 and sees_absent_cotangents(self.trace)

    def narrowed(self, given: Mask) -> Bridge:
        """Return the bridge for the marked active outputs only."""
        if given not in self.narrower:
            places = {place for place, flag in zip(self.active_places, given, strict=True) if flag}
            self.narrower[given] = replace(
                self,
                active=tuple(place in places for place in range(len(self.active))),
                narrower={},
            )
        return self.narrower[given]

    def following(self, trace: Trace, tensors: Sequence[Any]) -> Following:
        """Bridge another trace on the same executors, as a function of tensors like these."""
        found = bridge(trace, tensors, executors=self.executors)
        if found is None:  # ops alone would not stop where the trace says that gradients were off
            constant = torch.no_grad()(lower(trace, executors=self.executors))
            return constant, constraints_of(trace)
        return found, found.decisions
