"""The text of an error without the line of the user's call, which every error has."""

from __future__ import annotations

from thunder_fn.errors import ThunderError, located


def message_of(error: BaseException) -> str:
    """Return the text of an error; its line only where that is an equation's or a function's."""
    if not isinstance(error, ThunderError) or error._is_located:
        return str(error)
    return located(error.what, equation=error._equation, fix=error._fix)
