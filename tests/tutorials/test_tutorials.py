"""Every tutorial runs as a script, and every claim in it is asserted there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Each is a program of its own, where every warning is an error."""
    done = scripts.run(path)
    assert done.returncode == 0, done.text[-3000:]


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
