"""A tutorial as a page: its prose, its code, and what the code prints, found out by running it.

    python -m docs.tools.tutorial tutorials/01_traces.py        prints the page

A tutorial is also a notebook, which is made from the same cells and has no outputs.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONG = 24
"""Outputs of more lines are folded."""


@dataclass(frozen=True)
class Cell:
    """A piece of a tutorial and the line that it begins in, from 0."""

    is_prose: bool
    text: str
    line: int


def cells(path: Path) -> list[Cell]:
    """The cells of a percent script, or the parts of `teach.py`, whose headings are comments
    between rules.
    """
    lines = path.read_text().splitlines()
    return list(_percent_cells(lines) if "# %% [markdown]" in lines else _parts(lines))


def _percent_cells(lines: list[str]) -> Iterator[Cell]:
    starts = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = lines[start + 1 : end]
        if "[markdown]" in lines[start]:
            yield Cell(
                True,
                "\n".join(line.removeprefix("#").removeprefix(" ") for line in body).strip(),
                start + 1,
            )
        else:
            yield Cell(False, "\n".join(body), start + 1)


def _parts(lines: list[str]) -> Iterator[Cell]:
    docstring = ast.get_docstring(ast.parse("\n".join(lines))) or ""
    title, _, rest = docstring.partition(": ")
    yield Cell(True, f"# {title}\n\n{rest[:1].upper()}{rest[1:]}", 0)
    first = next(i for i, line in enumerate(lines) if i and line.endswith('"""')) + 1
    headings = [i for i, line in enumerate(lines) if re.match(r"# ---- .* -{4,}$", line)]
    yield Cell(False, "\n".join(lines[first : headings[0]]), first)
    for start, end in zip(headings, [*headings[1:], len(lines)], strict=True):
        code = next(i for i in range(start, end) if not lines[i].startswith("#"))
        prose = "\n".join(
            line.removeprefix("#").removeprefix(" ") for line in lines[start + 1 : code]
        )
        yield Cell(True, f"## {lines[start].strip('#- ')}\n{prose}", start)
        yield Cell(False, "\n".join(lines[code:end]), code)


def page(path: Path, run: bool = True) -> str:
    """The page. Code runs as the file that it is in, so that messages name its lines.

    Raises:
        Exception: what a cell raises.
    """
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    if run:
        sys.modules["__main__"] = module
    parts = list[str]()
    for cell in cells(path):
        if cell.is_prose:
            parts.append(cell.text)
        elif cell.text.strip():
            parts.append(f"```python\n{cell.text.strip()}\n```")
            parts += [_output(printed)] if run and (printed := _run(cell, path, module)) else []
    downloads = (
        f"Download it as [a notebook]({path.stem}.ipynb){{ download }} or as"
        f" [a script]({path.name}){{ download }}."
    )
    parts.insert(1, downloads)
    return "\n\n".join(parts) + "\n"


def notebook(path: Path) -> str:
    """Return the tutorial as a Jupyter notebook, in format 4.5."""
    made = list[dict[str, object]]()
    for number, cell in enumerate(cells(path)):
        if not cell.text.strip():
            continue
        kind: dict[str, object] = (
            {"cell_type": "markdown"}
            if cell.is_prose
            else {"cell_type": "code", "execution_count": None, "outputs": []}
        )
        source = cell.text.strip().splitlines(keepends=True)
        made.append({**kind, "id": f"cell-{number}", "metadata": {}, "source": source})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _run(cell: Cell, path: Path, module: types.ModuleType) -> str:
    tree = ast.increment_lineno(ast.parse(cell.text), cell.line)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, str(path), "exec"), module.__dict__)
    return printed.getvalue().strip("\n")


def _output(text: str) -> str:
    count = len(text.splitlines())
    block = f"```text\n{text}\n```"
    if count <= LONG:
        return block
    indented = "\n".join(f"    {line}" if line else "" for line in block.splitlines())
    return f'??? note "Output, {count} lines"\n\n{indented}'


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
