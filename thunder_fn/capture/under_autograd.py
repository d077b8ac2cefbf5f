"""Structured equations on tensors that autograd follows.

A traced function may call `torch.autograd.grad` or `backward` itself, and parameters require
gradients, so autograd follows tracers as it follows tensors. An equation is one node of its graph.
Its backward is recorded only when autograd asks for it. Then the split forward replaces the
equation, which is already in the recording, and the backward reads its residuals. If the backward
itself is differentiated (`create_graph=True`), each half is a node in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorded import Leaf, Scope
from thunder_fn.capture.recorder import Recorder
from thunder_fn.derived.activity import ACTIVE
from thunder_fn.ir.rules import VJP, Mask, Split
from thunder_fn.ir.trace import Equation, Trace, Var, map_args

Bind = Callable[[], tuple[Any, ...]]
Apply = Callable[[Trace, Sequence[Any]], tuple[Any, ...]]
SplitRule = Callable[[Equation, Mask, Mask], Split]


def bind_followed(
    recorder: Recorder,
    values: Sequence[torch.Tensor],
    bind: Bind,
    apply: Apply,
    split: SplitRule | None,
) -> tuple[Any, ...]:
    """Bind an equation as one node of autograd's graph. `apply` records a half of its split.

    `split` is the rule of a composite; others have theirs.
    """
    node = _Node(recorder, bind, apply, split)
    with (
        internals.outside_torch_func() if internals.inside_torch_func() else nullcontext()
    ):  # none of the values is in it
        results = _Followed.apply(node, *values)
    return results if isinstance(results, tuple) else (results,)


class _Node:
    """The data of one equation's node: the record of the equation, and its place."""

    def __init__(
        self, recorder: Recorder, bind: Bind, apply: Apply, split: SplitRule | None
    ) -> None:
        self.recorder, self._bind, self.apply, self._split = recorder, bind, apply, split
        self._is_forward_on = internals.is_forward_mode_on()

    def bind(self) -> tuple[Any, ...]:
        forward = internals.forward_mode_on() if self._is_forward_on else nullcontext()
        with torch.enable_grad(), forward:  # the forward of an autograd function has both off
            results = self._bind()
        self.scope: Scope = self.recorder.scope
        leaf = self.scope.items[-1]
        assert isinstance(leaf, Leaf), "the equation has just been recorded"
        self.leaf = leaf
        return results

    @property
    def equation(self) -> Equation:
        leaf = self.leaf
        return Equation(leaf.op, leaf.args, leaf.kwargs, leaf.outputs, leaf.bodies, leaf.source)

    def activity(self, active: Mask) -> Mask:
        return ACTIVE.through(self.equation, active)

    def split(self, wanted_inputs: Mask, wanted_outputs: Mask) -> Split:
        rule = self._split or VJP.of(self.equation)
        return rule(self.equation, wanted_inputs, wanted_outputs)

    def replace(self, split: Split) -> tuple[Any, ...]:
        """Put the split forward in the equation's place, unless it is the same; the values of
        its residuals.
        """
        leaf, operands = self.leaf, self.equation.operands
        if leaf.op.kind == "composite" and split.forward == leaf.bodies[0]:
            return self.tracers(split.residual_values(operands, leaf.outputs))
        names: dict[int, Any] = {
            var.index: atom for var, atom in zip(split.forward.inputs, operands, strict=True)
        }
        results = split.forward.outputs
        names.update(
            (atom.index, var)
            for atom, var in zip(results, leaf.outputs, strict=False)
            if isinstance(atom, Var)
        )
        items: list[Leaf | Scope] = []
        for equation in split.forward.equations:
            outputs = tuple(
                names.setdefault(var.index, self.recorder.fresh(var.type))
                for var in equation.outputs
            )
            args, kwargs = map_args(lambda var: names[var.index], equation)
            items.append(
                Leaf(
                    equation.op,
                    args,
                    kwargs,
                    outputs,
                    equation.source or leaf.source,
                    equation.bodies,
                )
            )
        position = next(i for i, item in enumerate(self.scope.items) if item is leaf)
        self.scope.items[position : position + 1] = items
        values = tuple(
            names[atom.index] if isinstance(atom, Var) else atom.value for atom in results
        )
        return self.tracers(split.residual_values(operands, values))

    def tracers(self, values: Sequence[Any]) -> tuple[Any, ...]:
        with torch.enable_grad():
            return tuple(
                self.recorder.tracer_of(value) if isinstance(value, Var) else value
                for value in values
            )


class _Followed(torch.autograd.Function):
    """The autograd node of one equation."""

    @staticmethod
    def forward(ctx: Any, node: _Node, *values: torch.Tensor) -> Any:
        results = node.bind()
        ctx.node = node
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*values)
        active = node.activity(tuple(ctx.needs_input_grad[1:]))
        constant = (result for result, flag in zip(results, active, strict=True) if not flag)
        ctx.mark_non_differentiable(
            *(result for result in constant if isinstance(result, torch.Tensor))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        node: _Node = ctx.node
        asked = tuple(ctx.needs_input_grad[1:])
        split = node.split(asked, tuple(cotangent is not None for cotangent in cotangents))
        given = [cotangent for cotangent in cotangents if cotangent is not None]
        if torch.is_grad_enabled():
            inputs = ctx.saved_tensors
            residuals = split.residual_values(inputs, node.apply(split.forward, inputs))
        else:
            residuals = node.replace(split)
        found = node.apply(split.backward, (*residuals, *given))
        return (None, *split.gradients_in(found, asked))
