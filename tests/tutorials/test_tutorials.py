"""Every tutorial runs as a script, and every claim in it is asserted there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"
FILES = sorted(TUTORIALS.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tutorial(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=300, cwd=TUTORIALS.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_tutorials_are_short() -> None:
    assert FILES
    limits = {path.name: 600 if path.stem == "teach" else 200 for path in FILES}
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
