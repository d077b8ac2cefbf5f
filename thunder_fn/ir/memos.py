"""Memos: what pure functions of traces returned.

A memo keeps the traces that it was asked about. `clear_caches` lets go of all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

from thunder_fn.ir.hooks import pause, resume
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.trace import Trace

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_of_traces: weakref.WeakSet[Any] = weakref.WeakSet()
"""The memos of functions of whole programs."""
_of_ops: weakref.WeakSet[Any] = weakref.WeakSet()
"""The memos of facts about ops, and of derived rules: functions of a single equation."""


def clear_caches(*, rules: bool = True) -> None:
    """Forget what transforms remember of traces, as `jax.clear_caches` does.

    Law: results stay what they were; the next transform of a trace works anew. Programs that
        jitted functions have made stay with these functions.

    Args:
        rules: also forget the rules that were derived for ops.

    Example:
        >>> clear_caches()
    """
    for memos in (_of_traces, _of_ops) if rules else (_of_traces,):
        for remembered in tuple(memos):
            remembered.cache_clear()


def clears(remembered: T) -> T:
    """Let `clear_caches` clear something that remembers traces: it has a method `cache_clear`."""
    _of_traces.add(remembered)
    return remembered


def kept(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a function returns for arguments that are equal, as `functools.lru_cache`
    does, until `clear_caches`.
    """
    return _kept_among(_of_traces, maxsize)


def kept_of_ops(maxsize: int | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember facts about ops and the rules derived for single equations: `kept`, apart."""
    return _kept_among(_of_ops, maxsize)


def _kept_among(
    memos: weakref.WeakSet[Any], maxsize: int | None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        remembered = lru_cache(maxsize)(_unwatched(f))
        memos.add(remembered)
        return remembered  # type: ignore[return-value]

    return decorate


_of_callers: list[ContextVar[Any]] = []


def unset_in_memos(variable: ContextVar[T | None]) -> ContextVar[T | None]:
    """Let a context variable be None while a memo computes, whose answers depend on nothing but
    the arguments.
    """
    _of_callers.append(variable)
    return variable


def _unwatched(f: Callable[P, R]) -> Callable[P, R]:
    """Compute without the observers of callers, such as the profile hook of a capture, which sees
    each Python call and call of C.

    A memo answers later questions without computing, so what a computation reads from outside must
    not count, and nobody has to see it. A capture inside has an observer of its own.
    """

    @wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tokens = [(variable, variable.set(None)) for variable in _of_callers]
        hook = pause()
        try:
            return f(*args, **kwargs)
        finally:
            for variable, token in tokens:
                variable.reset(token)
            resume(hook)

    return call


def is_closed(trace: Trace) -> bool:
    """Test whether a trace closes over no tensor of the user, which a memo would keep alive."""
    return all(constant.owned for constant in trace.constants)


_of_run: ContextVar[dict[Any, Any] | None] = ContextVar("thunder_fn_memo_of_run", default=None)
"""Answers of this run: since the outermost question, or in the capture that runs."""


def forgetting() -> AbstractContextManager[None]:
    """Forget afterwards what `within_run` finds inside. What it has found before is not known.

    Each capture begins so: its guards know all that the formulas of custom ops read.
    """
    return setting(_of_run, {})


def within_run(f: Callable[..., R], *key: Any) -> R:
    """Answer a question with `f(*args, **dict(kwargs))`, and remember the answer while the
    outermost such question or the capture lasts.

    Args:
        f: the function.
        key: what traces hide from equality, args, and kwargs.
    """
    known = _of_run.get()
    if known is None:
        with forgetting():
            return within_run(f, *key)
    if (f, key) not in known:
        _, args, kwargs = key
        known[f, key] = f(*args, **dict(kwargs))
    return known[f, key]


def memo(maxsize: int, *, derives: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember what a pure function of traces returns.

    Two traces that are equal but for names and sources have answers of their own. Names in print
    and lines in errors are those of the trace that was asked about. A trace that closes over
    tensors of the user, or calls custom ops, is remembered while the outermost question or the
    capture lasts. Its bodies, where the work is, are closed.

    Args:
        maxsize: remember so many answers, the latest.
        derives: f may derive rules of ops. If it does not, answers about custom ops are kept.

    Law: ``memo(n)(f)(t)`` is ``f(t)``.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> @tfn.ir.memo(maxsize=16)
        ... def count(trace):
        ...     print("counting")
        ...     return len(trace.equations)
        >>> trace = tfn.trace(torch.sin, torch.ones(2))
        >>> count(trace) + count(trace)
        counting
        2
    """

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        @kept(maxsize)
        def remembered(origins: tuple[int, ...], *args: P.args, **kwargs: P.kwargs) -> R:
            return f(*args, **kwargs)

        @wraps(f)
        def asked(*args: P.args, **kwargs: P.kwargs) -> R:
            traces = [arg for arg in args if isinstance(arg, Trace)]
            origins = tuple(trace.origin for trace in traces)
            is_foreign = derives and any(getattr(arg, "has_foreign", False) for arg in args)
            if is_foreign or not all(map(is_closed, traces)):
                return within_run(f, origins, args, tuple(kwargs.items()))
            return remembered(origins, *args, **kwargs)

        return with_cache_of(remembered, asked)

    return decorate


def fact(f: Callable[P, R]) -> Callable[P, R]:
    """Remember a fact about a trace that its names and sources have no part in.

    The trace is the first argument. One that closes over tensors of the user is not remembered.
    """
    remembered = kept(16384)(f)

    @wraps(f)
    def asked(*args: P.args, **kwargs: P.kwargs) -> R:
        trace, *_ = args
        assert isinstance(trace, Trace), "the first argument is a trace"
        return remembered(*args, **kwargs) if is_closed(trace) else f(*args, **kwargs)

    return with_cache_of(remembered, asked)


def with_cache_of(remembered: Any, asked: Callable[P, R]) -> Callable[P, R]:
    """A function that shows the memo inside of it as `functools.lru_cache` shows its own."""
    asked.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    asked.cache_info = remembered.cache_info  # type: ignore[attr-defined]
    return asked
