"""The head of each page about an error: its name, its docstring, and its base classes."""

from __future__ import annotations

import inspect

from thunder_fn.explain import KINDS, summary

FOLDER = "errors"


def head(kind: type[Exception]) -> str:
    """The first lines of the page about an error."""
    return (
        f"# {kind.__name__}\n\n{inspect.getdoc(kind)}\n\nSubclass of"
        f" {' and '.join(map(_link, kind.__bases__))}.\n"
    )


def with_head(kind: type[Exception], page: str) -> str:
    """The page with what its first lines should be."""
    _, fence, rest = page.partition("\n```python\n")
    return f"{head(kind)}{fence}{rest}"


def index() -> str:
    """The page that lists all errors."""
    rows = (f"| {_link(kind)} | {summary(kind)} |" for kind in KINDS)
    return "\n".join(
        [
            "# Errors",
            "",
            (
                "A message says what happened, in which equation, at which line of yours, and what"
                " to write instead."
            ),
            (
                "The last line of a traceback names one of these pages, whose examples are run when"
                " the site is built."
            ),
            "",
            "| error | what it means |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _link(kind: type) -> str:
    return f"[`{kind.__name__}`]({kind.__name__}.md)" if kind in KINDS else f"`{kind.__name__}`"
