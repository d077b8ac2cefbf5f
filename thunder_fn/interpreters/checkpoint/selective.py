"""Policies of `torch.utils.checkpoint.create_selective_checkpoint_contexts`, as policies of ours.

PyTorch asks such a policy about each op that runs, with the op's arguments and results, once in a
forward, so that it may count. Here it is asked about the leaves of a body, in order, on tensors
without values. Contexts are made anew for each walk over a body, since there is one for each
question about its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from thunder_fn import torch_internals as internals
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Equation, TensorType, Type, Var, python_args

ContextFn = Callable[[], Any]


@dataclass(frozen=True)
class Selective:
    """A `context_fn` whose contexts have a policy."""

    context_fn: ContextFn

    @property
    def __name__(self) -> str:
        return getattr(policy_of_contexts(self.context_fn), "__name__", "context_fn")

    def walk(self) -> Callable[[Equation], Any]:
        """The answers about the equations of one body, asked in order."""
        policy, mode = policy_of_contexts(self.context_fn), internals.fake_mode()

        def example(type: Type) -> Any:
            return internals.fake_in(mode, type) if isinstance(type, TensorType) else None

        def answer(equation: Equation) -> Any:
            if (
                equation.op.kind != "leaf"
                or ops.overload(equation.op) in torch_checkpoint.SAC_IGNORED_OPS
            ):
                return False
            read: Callable[[Var], Any] = lambda var: example(var.type)
            args, kwargs = python_args(equation, read)
            results = tuple(example(var.type) for var in equation.outputs)
            context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False)
            context.op_output = results[0] if len(results) == 1 else results
            with internals.isolated(), internals.no_torch_function():
                return _as_ours(policy(context, ops.overload(equation.op), *args, **kwargs))

        answer.__name__ = self.__name__
        return answer


def policy_of_contexts(context_fn: ContextFn) -> Any:
    """The policy of the contexts that it makes; None where they only run code around the
    function.
    """
    contexts = context_fn()
    return (
        getattr(contexts[0], "policy_fn", None)
        if isinstance(contexts, tuple) and contexts
        else None
    )


def _as_ours(answer: Any) -> Any:
    """MUST_ and PREFER_ are one."""
    if not isinstance(answer, torch_checkpoint.CheckpointPolicy):
        return answer
    _, _, what = answer.name.partition("_")
    return {"SAVE": "save", "RECOMPUTE": "recompute", "CPU_OFFLOAD": "offload"}[what]
