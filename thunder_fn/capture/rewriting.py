"""Rewrites of every trace that is captured in some context: rules of executors are put in before
any transform.

A `Rewrite` is a hashable function from trace to trace. It belongs to the captures of one thread
that run inside `rewritten_by`, like a lookaside.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from thunder_fn.capture.foreign import MayHaveForeign, remembered_unless_foreign
from thunder_fn.capture.recorded import Scope
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.replaced.lookasides import chosen_lookasides
from thunder_fn.ir.memos import kept, with_cache_of
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Trace

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=MayHaveForeign)


class Rewrite(Hashable, Protocol):
    """A pure function that keeps what a trace computes."""

    def __call__(self, trace: Trace, done: frozenset[Trace]) -> Trace:
        """The new trace. `done` are bodies that were captured before, and are as they are to be."""
        ...


_rewrite: ContextVar[Rewrite | None] = ContextVar("thunder_fn_rewrite", default=None)
_fused: ContextVar[bool] = ContextVar("thunder_fn_fused", default=False)


def rewritten_by(rewrite: Rewrite | None) -> AbstractContextManager[None]:
    """Rewrite captures inside; None for not at all."""
    return setting(_rewrite, rewrite)


def to_be_fused(flag: bool) -> AbstractContextManager[None]:
    """Say whether an executor that fuses will run the captures inside; derivatives choose their
    residuals by that.
    """
    return setting(_fused, flag)


def is_to_be_fused() -> bool:
    """Tell whether an executor will fuse the present capture."""
    return _fused.get()


def rewritten(trace: Trace, recorder: Recorder) -> Trace:
    """The trace as it is to be in this context."""
    rewrite = _rewrite.get()
    return trace if rewrite is None else rewrite(trace, frozenset(_bound_bodies(recorder.root)))


def _bound_bodies(scope: Scope) -> Iterator[Trace]:
    """The bodies that were traces before they were recorded."""
    for item in scope.items:
        if isinstance(item, Scope):
            yield from _bound_bodies(item)
        else:
            yield from item.bodies


def remembered_in_context(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a function that captures returns, apart for each context: lookasides,
    rewrites, fusing.
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        @kept(maxsize)
        def remembered(context: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            return f(*args, **kwargs)

        @wraps(f)
        def asked(*args: P.args, **kwargs: P.kwargs) -> R:
            return remembered(_context(), *args, **kwargs)

        return with_cache_of(remembered, asked)

    return decorate


def rules_in_context(f: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Remember the rules that are captured for calls of custom functions, but for the user's, apart
    for each context.
    """
    return remembered_unless_foreign(f, remembered_in_context(4096)(f), _context)


def _context() -> tuple[Any, ...]:
    return _rewrite.get(), _fused.get(), chosen_lookasides()
