"""Executors, operators and derivatives of your own.

    myex = OperatorExecutor("myex", version="0.1")
    multimul = myex.register_operator("multimul", like=multimul_like, fn=multimul_impl)
    jit(f, executors=[myex])

An executor's registrations apply in functions that are jitted with it and nowhere else.
`tutorials/08_extend.py` goes through all of it.
"""

from __future__ import annotations

from thunder_fn.executors.base import Executor, FusionExecutor
from thunder_fn.executors.grad_transforms import get_grad, put_grad, put_grads
from thunder_fn.executors.operator_executor import OperatorExecutor
from thunder_fn.executors.operators import Operator
from thunder_fn.executors.registry import (
    deregister_executor,
    get_executor,
    list_executors,
    register_executor,
)

__all__ = [
    "Executor",
    "FusionExecutor",
    "Operator",
    "OperatorExecutor",
    "deregister_executor",
    "get_executor",
    "get_grad",
    "list_executors",
    "put_grad",
    "put_grads",
    "register_executor",
]
