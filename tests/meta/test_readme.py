"""The README's code runs, and prints what the README says that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SHOWN = re.compile(r"```python\n(?P<code>.*?)```\n(?P<between>.*?)```\n(?P<output>.*?)```\n", re.DOTALL)


def test_readme_shows_what_its_code_prints(request: pytest.FixtureRequest) -> None:
    namespace: dict[str, object] = {}

    def run(shown: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(shown["code"], namespace)
        return f"```python\n{shown['code']}```\n{shown['between']}```\n{printed.getvalue().strip()}\n```\n"

    text = README.read_text()
    assert SHOWN.search(text)
    new = SHOWN.sub(run, text)
    if request.config.getoption("--update-golden"):
        README.write_text(new)
    assert text == new, "`make golden` rewrites the README's outputs"


def test_readme_names_folders_that_exist() -> None:
    named = re.findall(r"`((?:thunder_fn|tests|tutorials)/[\w/]*)`", README.read_text())
    assert named
    assert not [folder for folder in named if not (README.parent / folder).is_dir()]
