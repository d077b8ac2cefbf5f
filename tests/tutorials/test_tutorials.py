"""Every tutorial runs as a script, and every claim in it is asserted there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from docs.tools import tutorial
from tests.forks import Scripts

TUTORIALS = Path(__file__).parents[2] / "tutorials"
FILES = sorted(TUTORIALS.glob("*.py"))


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path_factory.mktemp("scripts"))
    yield scripts
    scripts.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tutorial(path: Path, scripts: Scripts) -> None:
    """Each is a program of its own, where every warning is an error. `make docs` takes the page that it makes."""
    done = scripts.keep(path)
    assert done.returncode == 0, done.text[-3000:]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_notebook_has_the_tutorials_cells(path: Path) -> None:
    made = nbformat.reads(tutorial.notebook(path), as_version=4)
    nbformat.validate(made)
    assert made.cells[0].cell_type == "markdown" and made.cells[0].source.startswith("# ")
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    rest = path.read_text()
    for source in code:
        assert source in rest
        rest = rest.partition(source)[2]
    assert not any(cell.outputs for cell in made.cells if cell.cell_type == "code")


def test_a_tutorial_runs_as_a_script(scripts: Scripts) -> None:
    done = scripts.run(TUTORIALS / "01_traces.py")
    assert done.returncode == 0 and "def " in done.text, done.text[-3000:]


def test_notebook_runs(scripts: Scripts, tmp_path: Path) -> None:
    """As cells of a process that knows nothing but the notebook's file."""
    file = tmp_path / "traces.ipynb"
    file.write_text(tutorial.notebook(TUTORIALS / "01_traces.py"))
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER.format(str(file)))
    done = scripts.run(runner)
    assert done.returncode == 0, done.text[-3000:]
    assert "def " in done.text


RUNNER = """
import linecache
import nbformat

namespace = {{"__name__": "__main__"}}
for number, cell in enumerate(nbformat.read({!r}, as_version=4).cells):
    if cell.cell_type == "code":
        name = f"<cell {{number}}>"
        linecache.cache[name] = len(cell.source), None, cell.source.splitlines(keepends=True), name
        exec(compile(cell.source, name, "exec"), namespace)
"""
"""Runs a notebook as Jupyter does: a cell is a file of its own, whose text Python's linecache knows."""


def test_tutorials_are_short() -> None:
    assert FILES
    limits = {path.name: 700 if path.stem == "teach" else 200 for path in FILES}
    assert {path.name for path in FILES if len(path.read_text().splitlines()) >= limits[path.name]} == set()


def test_tutorials_are_numbered_in_order() -> None:
    numbered = [path.stem for path in FILES if path.stem != "teach"]
    assert [int(stem.partition("_")[0]) for stem in numbered] == list(range(1, len(numbered) + 1))


IN_ORDER = (
    "traces, write_an_interpreter, gradients, vmap, control_flow, checkpoint, laws, extend, executor, write_a_recipe, quantize, "
    "fsdp, symbolic_numbers, from_torch_func, from_jax, from_lightning_thunder, force_field"
)


def test_tutorials_build_on_each_other() -> None:
    """Each of these needs those before it, and nothing after."""
    names = [path.stem.partition("_")[2] for path in FILES]
    assert [name for name in names if name in IN_ORDER.split(", ")] == IN_ORDER.split(", ")
