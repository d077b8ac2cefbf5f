"""`python -m thunder_fn explain NAME`: the page of an error, in the terminal.

The pages are `docs/errors/` in a checkout. A wheel has a copy of them beside this module.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path

from thunder_fn import errors

KINDS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
)
"""Every exception and warning of `thunder_fn.errors`, in the order in which they are written."""

PACKAGE = Path(__file__).parent
FOLDERS = (PACKAGE / "error_pages", PACKAGE.parent / "docs" / "errors")
"""The pages in an installed wheel, and in a checkout."""

LINK = re.compile(r"\[([^]\n]+)\]\((?:\.\./|\w+\.md)[^)\s]*\)")
"""A link to another page, of which a terminal shows the words."""


def page(name: str) -> str:
    """The text of an error's page; its docstring where no page was installed."""
    found = (folder / f"{name}.md" for folder in FOLDERS)
    text = next((path.read_text(encoding="utf-8") for path in found if path.is_file()), None)
    return text or f"# {name}\n\n{inspect.getdoc(getattr(errors, name))}\n"


def main(argv: Sequence[str]) -> int:
    """Print the page of an error, or a line for each of them."""
    parser = argparse.ArgumentParser(
        prog="python -m thunder_fn explain",
        description=(
            "Print the page of an error: its meaning, an example, and the fix. Without a name, list"
            " all of them."
        ),
    )
    parser.add_argument(
        "name", nargs="?", help="the error's name, such as CaptureError, in any case"
    )
    wanted = parser.parse_args(argv).name
    known = {kind.__name__: kind for kind in KINDS}
    if wanted is None:
        width = max(map(len, known))
        for name, kind in known.items():
            first = summary(kind).partition(". ")[0].rstrip(".")
            print(f"{name:<{width}}  {first}.")
        return 0
    lower = {name.lower(): name for name in known}
    key = wanted.rpartition(".")[2].lower()
    if key not in lower:
        near = difflib.get_close_matches(key, lower, n=1)
        meant = f"; did you mean {lower[near[0]]}?" if near else "."
        parser.error(f"there is no error {wanted!r}{meant} Without a name, all are listed")
    print(LINK.sub(r"\1", page(lower[key])), end="")
    return 0


def summary(kind: type[Exception]) -> str:
    """The first paragraph of an error's docstring, in one line."""
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
