"""Bodies in evaluation rules: evaluated, or run as the program that an executor has made of
each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Trace

BodyFunction = Callable[..., tuple[Any, ...]]

_compile: ContextVar[Callable[[Trace], BodyFunction] | None] = ContextVar(
    "thunder_fn_compile_body", default=None
)


def body_function(body: Trace) -> BodyFunction:
    """A function of the body's inputs that gives its outputs.

    Law: it computes ``evaluate(body, inputs)``.
    """
    compiled = _compile.get()
    return compiled(body) if compiled is not None else lambda *inputs: evaluate(body, inputs)


def bodies_compiled_by(
    compile_body: Callable[[Trace], BodyFunction],
) -> AbstractContextManager[None]:
    """Run bodies inside by the functions of `compile_body`."""
    return setting(_compile, compile_body)
