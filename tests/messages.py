"""The text of an error without the line of the user's call, which every error has."""

from __future__ import annotations

from thunder_fn.errors import ThunderError


def message_of(error: BaseException) -> str:
    """Return the text of an error; its line only where that is an equation's or a function's."""
    return error.without_call() if isinstance(error, ThunderError) else str(error)
