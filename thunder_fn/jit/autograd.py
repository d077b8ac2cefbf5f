"""The bridge to PyTorch's autograd: results of a jitted function are differentiable by `loss.backward()`.

A trace is split into a forward and a backward program, which run as one `torch.autograd.Function`. Where the backward
is to be differentiated itself (`create_graph=True`), the gradient is computed by a bridged trace of its own, made from
the inputs, so that derivatives of any order are right.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from thunder_fn import ops, torch_internals as internals
from thunder_fn.capture.watching import made
from thunder_fn.derive import Split
from thunder_fn.errors import InvalidTrace, located
from thunder_fn.executors import Executor, Program, lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.vjp import activity, split_vjp, vjp
from thunder_fn.symbols import bind, close_symbols, is_symbolic, replaced
from thunder_fn.trace import Atom, Expr, Literal, NumberType, TensorType, Trace, Var, canonical, type_of

Mask = tuple[bool, ...]


def bridge(
    trace: Trace,
    tensors: Sequence[Any],
    writes: Sequence[int | None] = (),
    executors: tuple[Executor, ...] = (),
) -> Bridge | None:
    """The trace as a differentiable function of these tensors; None if no output depends on what requires grad.

    The last outputs will be written to the inputs `writes`, or elsewhere where it is None. Where none of them has a
    gradient, as the statistics of a batch norm, autograd is not told of them: the tensors would require grad then.

    Law: the gradients that `backward` leaves are those of the function that was traced.
    """
    wanted = tuple(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
    if not any(wanted):
        return None
    outputs = differentiable_outputs(trace, wanted)
    first = len(outputs) - len(writes)
    written = (False,) * first + outputs[first:]
    if any(written) and all(place is None for place in split_vjp(trace, wanted, written).gradients):
        outputs = outputs[:first] + (False,) * len(writes)
    overwritten = frozenset(place for place in writes if place is not None and not wanted[place])
    followed = {atom.index for atom, flag in zip(trace.outputs, outputs, strict=True) if flag and isinstance(atom, Var)}
    given = [
        (place, atom)
        for place, atom in zip(writes, trace.outputs[first:], strict=True)
        if place is not None and wanted[place] and isinstance(atom, Var) and atom.index in followed
    ]
    changed = frozenset(place for place, _ in given)
    moved = frozenset(place for place, atom in given if history_of(trace, atom) != trace.inputs[place])
    return Bridge(trace, wanted, outputs, overwritten, executors, changed, moved) if any(outputs) else None


def history_of(trace: Trace, atom: Atom) -> Atom:
    """The variable that has the gradient of this one, unchanged, behind all changes made where gradients are off."""
    made_by = {var: equation for equation in trace.equations for var in equation.outputs}
    while isinstance(atom, Var) and (equation := made_by.get(atom)) is not None:
        if equation.op == ops.STRAIGHT_THROUGH:
            atom = equation.operands[1]
            continue
        if equation.op.kind != "composite":
            break
        inner = history_of(equation.body, equation.body.outputs[equation.outputs.index(atom)])
        if not isinstance(inner, Var) or inner not in equation.body.inputs:
            break
        atom = equation.operands[equation.body.inputs.index(inner)]
    return atom


def differentiable_outputs(trace: Trace, wanted: Mask) -> Mask:
    """Which outputs autograd is told of: those that depend on a wanted input and pass through it."""
    active = activity(trace, wanted)
    pairs = zip(trace.outputs, handed_over(trace), strict=True)
    return tuple(isinstance(atom, Var) and active[atom.index] and flag for atom, flag in pairs)


def handed_over(trace: Trace) -> Mask:
    """Which outputs pass through autograd: variables that are not inputs, each once."""
    seen, found = set[int](range(len(trace.inputs))), list[bool]()
    for atom in trace.outputs:
        found.append(isinstance(atom, Var) and atom.index not in seen)
        seen |= {atom.index} if isinstance(atom, Var) else set()
    return tuple(found)


@dataclass(frozen=True)
class Bridge:
    """A trace, called under autograd.

    `wanted` are the inputs that require grad, `active` the outputs that depend on them, `overwritten` the inputs that
    will not hold their value when the backward runs. `executors` run both halves. `changed` are the inputs that require grad
    and get a value that does: the backward reads what they were. `moved` are those of them that get another history too.
    """

    trace: Trace
    wanted: Mask
    active: Mask
    overwritten: frozenset[int]
    executors: tuple[Executor, ...] = ()
    changed: frozenset[int] = frozenset()
    moved: frozenset[int] = frozenset()

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """The trace's outputs. Those that are inputs come back as the very tensors, and so do repeated ones.

        Raises:
            RuntimeError: a leaf that requires grad is to be changed in place, as PyTorch has it.
        """
        if internals.inside_torch_func():  # forward mode, which follows each op
            return evaluate(self.trace, inputs)
        known: dict[int, Any] = dict(enumerate(inputs))
        if self.unreachable:
            inputs = tuple(value.detach() if place in self.unreachable else value for place, value in enumerate(inputs))
        if self.changed:
            if any(inputs[place].is_leaf for place in self.moved):
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            inputs = tuple(value.clone() if place in self.changed else value for place, value in enumerate(inputs))
        results = _Function.apply(self, *inputs)  # type: ignore[no-untyped-call]
        for atom, value in zip(self.trace.outputs, results, strict=True):
            if isinstance(atom, Var):
                known.setdefault(atom.index, value)
        return tuple(known[atom.index] if isinstance(atom, Var) else atom.value for atom in self.trace.outputs)

    @cached_property
    def unreachable(self) -> frozenset[int]:
        """The wanted inputs that never get a gradient: autograd would go on into the graphs that they come from."""
        places = (place for place, flag in enumerate(self.wanted) if flag)
        return frozenset(place for place, found in zip(places, self.split.gradients, strict=True) if found is None)

    @cached_property
    def handed_over(self) -> Mask:
        """Which outputs pass through autograd."""
        return handed_over(self.trace)

    @cached_property
    def split(self) -> Split:
        """The trace in two: forward and backward."""
        split = split_vjp(self.trace, self.wanted, self.active)
        made("split", split.forward, self.trace)
        return split

    @cached_property
    def read(self) -> frozenset[int]:
        """The inputs that the backward reads."""
        return frozenset(residual.index for residual in self.split.residuals if residual.kind == "input")

    def reached(self, given: Mask) -> Mask:
        """Which wanted inputs have a gradient, not None, where only some of the active outputs have a cotangent."""
        if all(given):
            return tuple(place is not None for place in self.split.gradients)
        flags = iter(given)
        outputs = tuple(active and next(flags) for active in self.active)
        return tuple(place is not None for place in split_vjp(self.trace, self.wanted, outputs).gradients)

    @cached_property
    def closed_backward(self) -> tuple[Trace, tuple[Expr, ...]]:
        """The backward with the numbers that it takes from the forward as its last inputs."""
        return close_symbols(self.split.backward)

    @cached_property
    def forward(self) -> Program:
        """From the inputs to the outputs, the residuals, and the numbers that the backward takes."""
        trace, numbers = self.split.forward, tuple(map(Literal, self.closed_backward[1]))
        whole = dataclasses.replace(trace, outputs=(*trace.outputs, *numbers))
        return lower(whole, below_autograd=True, executors=self.executors)

    @cached_property
    def backward(self) -> Program:
        """From residuals, cotangents and numbers to gradients."""
        return lower(self.closed_backward[0], below_autograd=True, executors=self.executors, taken=True)

    @cached_property
    def gradient(self) -> Trace:
        """From the inputs and the cotangents of active outputs to the gradients of wanted inputs."""
        full = vjp(self.trace, self.wanted, self.active)
        gradients = full.outputs[len(self.trace.outputs) :]
        return canonical(full.inputs, full.equations, gradients, full.constants, full.constraints, full.name)


class _Function(torch.autograd.Function):
    """Runs the programs of a bridge. The state between forward and backward is autograd's to keep and to free."""

    @staticmethod
    def forward(ctx: Any, owner: Bridge, *inputs: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        count = len(owner.trace.outputs)
        results = owner.forward(*inputs)
        numbers = len(owner.closed_backward[1])
        ctx.numbers, results = results[len(results) - numbers :], results[: len(results) - numbers]
        outputs = tuple(value if flag else None for value, flag in zip(results, owner.handed_over, strict=False))
        if any(isinstance(value, torch.Tensor) and value._is_view() for value in outputs):
            outputs = _own_tensors(outputs, inputs, owner.active)
        places = {"output": results[:count], "extra": results[count:]}
        kept = [places[residual.kind][residual.index] for residual in owner.split.residuals if residual.kind != "input"]
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        ctx.inputs = [value for value in inputs if not isinstance(value, torch.Tensor)]
        saved, ctx.probes = _saved_inputs(owner, inputs)
        ctx.save_for_backward(*saved, *kept)
        marks = zip(outputs, owner.active, strict=True)
        ctx.mark_non_differentiable(*(value for value, flag in marks if isinstance(value, torch.Tensor) and not flag))
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:  # type: ignore[override]
        owner: Bridge = ctx.owner
        count = len(owner.trace.inputs)
        saved = list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()  # where the graph is not retained, only this call holds them from here on
        inputs, kept = saved[:count], saved[count:]
        saved.clear()
        numbers = iter(ctx.inputs)
        inputs = [
            next(numbers) if isinstance(var.type, NumberType) else value
            for var, value in zip(owner.trace.inputs, inputs, strict=True)
        ]
        given = [_cotangent(owner, i, inputs, cotangents[i]) for i, flag in enumerate(owner.active) if flag]
        if torch.is_grad_enabled():
            _check_unchanged(owner, ctx.probes)
            gradients: Sequence[Any] = _differentiable(owner, (*inputs, *given))
        else:
            split, others = owner.split, iter(kept)
            box = [inputs[where.index] if where.kind == "input" else next(others) for where in split.residuals]
            box += [*given, *ctx.numbers]
            batched = any(map(internals.is_batched, given))
            for values in (inputs, kept, given):
                values.clear()
            if batched:
                results = evaluate(owner.closed_backward[0], box)
            else:
                results = owner.backward.take(box)
            gradients = [None if place is None else results[place] for place in split.gradients]
        reached = owner.reached(tuple(cotangents[i] is not None for i, flag in enumerate(owner.active) if flag))
        supply = iter(zip(gradients, reached, strict=True))
        found = (next(supply) if wanted else (None, False) for wanted in owner.wanted)
        return None, *(gradient if flag else None for gradient, flag in found)


def _own_tensors(outputs: tuple[Any, ...], inputs: Sequence[Any], active: Mask) -> tuple[Any, ...]:
    """The outputs, those that are views of nothing else that the caller has no longer views, and constants neither.

    Autograd lets nobody change a view in place that such a function returns, since it does not know of what it is one.
    A view of a result that requires grad would require it too.
    """
    tensors = [value for value in (*outputs, *inputs) if isinstance(value, torch.Tensor)]
    owners = collections.Counter(map(internals.storage_id, tensors))

    def is_alone(value: Any, flag: bool) -> bool:
        if not isinstance(value, torch.Tensor) or not value._is_view():
            return False
        return not flag or owners[internals.storage_id(value)] == 1

    pairs = zip(outputs, active, strict=True)
    return tuple(value.detach() if is_alone(value, flag) else value for value, flag in pairs)


def _saved_inputs(owner: Bridge, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[Any, int]]]:
    """The inputs as autograd keeps them, and probes of those that only a derivative of the backward would read.

    Autograd refuses a backward if a saved tensor was changed. What the backward does not read may change.
    """
    saved: list[Any] = list(inputs)
    probes: list[tuple[Any, int]] = []
    for place, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            saved[place] = None  # a number
        elif place in owner.overwritten:
            saved[place] = tensor.detach().clone()
        elif not owner.wanted[place] and place not in owner.read:
            saved[place] = tensor.data
            probes.append((internals.version_probe(tensor), tensor._version))
    return saved, probes


def _check_unchanged(owner: Bridge, probes: Sequence[tuple[Any, int]]) -> None:
    if any(probe._version != version for probe, version in probes):
        what = f"{owner.trace.name}: an argument was changed in place before its gradient was differentiated"
        raise RuntimeError(located(what, fix="Pass a clone, or change the tensor after the last derivative."))


def _cotangent(owner: Bridge, position: int, inputs: Sequence[Any], given: torch.Tensor | None) -> torch.Tensor:
    """The cotangent of an output: zeros where autograd has none."""
    if given is not None:
        return given
    type = type_of(owner.trace.outputs[position])
    if not isinstance(type, TensorType):
        raise InvalidTrace(f"output {position} of {owner.trace.name} is {type}, which has no cotangent")
    values = bind(owner.trace.inputs, inputs) if is_symbolic(owner.trace) else {}
    shape = [replaced(size, values) if isinstance(size, Expr) else size for size in type.shape]
    return torch.zeros(shape, dtype=type.dtype, device=type.device)


def _differentiable(owner: Bridge, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """The gradients of a bridge under autograd, from its inputs and the cotangents."""
    again = bridge(owner.gradient, tensors, executors=owner.executors)
    return again(*tensors) if again is not None else lower(owner.gradient, executors=owner.executors)(*tensors)
