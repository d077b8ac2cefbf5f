"""Streams and events in traced functions: refused by name.

A capture runs no kernel, so there is nothing to order or to time. The program then runs on the
stream of its caller. Work that eager code would put on another stream would lose its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import current
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import UnsupportedCall


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is an error in captures."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if current() is None or _is_no_stream(name, *args, **kwargs):
            return original(*args, **kwargs)
        raise UnsupportedCall(
            f"`{name}` was called while tracing, but a program runs on the stream of its caller",
            source=user_source(),
            fix="Use streams and events around the call of the traced function.",
        )

    return call


def _is_no_stream(name: str, first: Any = None, *_: Any, **__: Any) -> bool:
    """Test for `with torch.cuda.stream(None)`, which does nothing."""
    if name == "torch.cuda.set_stream":
        return first is None
    return name == "torch.cuda.stream" and getattr(first, "stream", first) is None


FUNCTIONS = {name: partial(_refused, name) for name in internals.STREAM_FUNCTIONS}
"""Replacements in captures of functions and methods of these names."""
