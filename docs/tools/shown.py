"""Markdown whose Python runs: each block's output is what the page says that it prints.

A block of Python is run in the namespace of its page. What it prints, or the error that it ends
with as a traceback's last lines have it, stands in the next block without a language.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import textwrap
import traceback
from pathlib import Path

BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLE = "example.py"
"""The file that messages name as the reader's own."""


def executed(text: str) -> str:
    """The page with the outputs that its blocks have now.

    Law: a page that is up to date is left as it is.

    Raises:
        Exception: a block raised, or printed something, and has no place for it.
    """
    namespace = {"__name__": "example"}
    waiting: str | None = None
    parts, end = list[str](), 0
    for block in BLOCK.finditer(text):
        parts.append(text[end : block.start()])
        end = block.end()
        parts.append(block[0])
        if block["language"] == "python":
            _refuse(waiting)
            waiting = run(block["body"], namespace)
        elif not block["language"] and waiting is not None:
            parts[-1] = f"```\n{waiting}```"
            waiting = None
    _refuse(waiting)
    return "".join([*parts, text[end:]])


FENCED = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)


def outputs_marked(text: str) -> str:
    """The page with a class on each block that shows an output, for the site's styles: a trace is
    highlighted as Python, the lines of an error message break.
    """

    def marked(block: re.Match[str]) -> str:
        if block["language"] not in ("", "text"):
            return block[0]
        body = textwrap.dedent(block["body"])
        kind = ".text .output .no-copy"
        if body.startswith("def "):
            kind = kind.replace("text", "python")
        elif re.search(r"^(Docs|from): ", body, re.MULTILINE):
            kind += " .message"
        return block[0].replace(f"```{block['language']}\n", f"```{{ {kind} }}\n", 1)

    return FENCED.sub(marked, text)


def difference(path: Path, root: Path) -> str:
    """The lines in which a page shows something else than its code prints; empty where it is up
    to date.
    """
    text, name = path.read_text(), path.relative_to(root).as_posix()
    try:
        new = executed(text)
    except ValueError as error:
        return f"{name}: {error}"
    lines = difflib.unified_diff(
        text.splitlines(), new.splitlines(), f"{name}, as it is", f"{name}, as it runs", lineterm=""
    )
    return "\n".join(lines)


def run(code: str, namespace: dict[str, object]) -> str:
    """Run a block. Returns its output, the error that it ends with last."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, EXAMPLE, "exec"), namespace)
        except Exception as error:  # noqa: BLE001 - it is what the page shows
            printed.write("".join(traceback.format_exception_only(error)))
    text = printed.getvalue().strip()
    return f"{text}\n" if text else ""


def _refuse(output: str | None) -> None:
    if output:
        raise ValueError(
            "a block's output is shown nowhere; a block without a language after it is its"
            f" place:\n{output}"
        )


def pages(root: Path) -> list[Path]:
    """The pages of the project whose code runs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
