"""Rules that run functions of the user's: formulas of custom ops, rules of custom functions.

They may read what changes. So what they return is remembered while the capture lasts, and no
longer; the guards of the capture check what they read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from thunder_fn.capture.outside.frames import running
from thunder_fn.ir.memos import with_cache_of, within_run


class MayHaveForeign(Protocol):
    """A trace, or the rule of a custom function."""

    @property
    def has_foreign(self) -> bool:
        """Test whether its rules run functions of the user's."""
        ...


Of = TypeVar("Of", bound=MayHaveForeign)
P = ParamSpec("P")
R = TypeVar("R")


def remembered_unless_foreign(
    f: Callable[Concatenate[Of, P], R],
    remembered: Callable[Concatenate[Of, P], R],
    context: Callable[[], Any] = lambda: None,
) -> Callable[Concatenate[Of, P], R]:
    """Derive rules by f, or by the memo of it if the first argument has nothing of the user's.

    Args:
        context: gives the part of the memo's key that is no argument.
    """

    def watched(of: Of, *args: P.args, **kwargs: P.kwargs) -> R:
        with running():
            return f(of, *args, **kwargs)

    @wraps(f)
    def asked(of: Of, *args: P.args, **kwargs: P.kwargs) -> R:
        if of.has_foreign:
            return within_run(watched, context(), (of, *args), tuple(kwargs.items()))
        return remembered(of, *args, **kwargs)

    return with_cache_of(remembered, asked)
