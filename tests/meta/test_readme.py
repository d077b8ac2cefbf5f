"""The README's code runs, and prints what the README says that it prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools.shown import executed
from thunder_fn.benchmarks.chart import read, svg

README = Path(__file__).parents[2] / "README.md"


def test_readme_shows_what_its_code_prints(request: pytest.FixtureRequest) -> None:
    text = README.read_text()
    new = executed(text)
    if request.config.getoption("--update-golden"):
        README.write_text(new)
    assert text == new, "`make golden` rewrites the README's outputs"


def test_readme_names_folders_that_exist() -> None:
    named = re.findall(r"`((?:thunder_fn|tests|tutorials|docs)/[\w/]*)`", README.read_text())
    assert named
    assert not [folder for folder in named if not (README.parent / folder).is_dir()]


def test_the_chart_shows_the_saved_results(request: pytest.FixtureRequest) -> None:
    path, drawn = README.parent / "docs" / "benchmarks.svg", svg(read())
    if request.config.getoption("--update-golden"):
        path.write_text(drawn)
    assert path.read_text() == drawn, "`make chart` draws it anew"
    for row in read():
        assert row.ratios["eager PyTorch"] == 1 and "thunder_fn" in row.ratios and row.measured in drawn
