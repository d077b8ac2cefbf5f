"""The profile hook of a capture, on Python 3.11, and where it is off.

The hook sees each Python call and call of C of its thread. It is off while PyTorch's and our own
code run, which nobody hears of. On later versions code that is passed over costs nothing, and
nothing here does anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def as_hook(hook: F) -> F:
    """Mark a profile hook as that of a capture."""
    hook.is_ours = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def pause() -> Any:
    """Mark the start of machinery in this thread. Returns an argument for `resume`; None if
    nothing was watched.
    """
    hook = sys.getprofile()
    if hook is None or not hasattr(hook, "is_ours"):
        return None
    sys.setprofile(None)
    return hook


def resume(hook: Any) -> None:
    """Mark the end of machinery: the user's code goes on."""
    if hook is not None:
        sys.setprofile(hook)


def machinery(f: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that runs no code of the user's, except by `frames.running`."""

    @wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        hook = pause()
        try:
            return f(*args, **kwargs)
        finally:
            resume(hook)

    return call
