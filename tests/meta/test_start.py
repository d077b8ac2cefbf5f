"""`import thunder_fn` loads nothing; the first name that is asked for loads the core, in whichever room it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import thunder_fn as tfn

ROOMS = ("torch_internals", "ir.symbols", "capture", "extend", "executors.torchinductor", "jitted")
FIRST = """
import importlib, os, sys, torch

failed = []
for room in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(f"thunder_fn.{room}")
        except BaseException as error:
            print(room, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    failed += [room] * (os.waitpid(child, 0)[1] != 0)
sys.exit(bool(failed))
"""


def run(*words: str) -> str:
    """Run a Python process and return its output."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True).stdout


def test_the_import_takes_nothing_with_it() -> None:
    assert run("-c", "import sys, thunder_fn; print('torch' in sys.modules)") == "False\n"


def test_editors_see_the_names_that_python_finds() -> None:
    """The stub for type checkers and the table say the same."""
    tree = ast.parse(Path(tfn.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    seen: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module not in ("thunder_fn", "thunder_fn.version"):
            seen.setdefault(str(node.module).removeprefix("thunder_fn."), set()).update(
                name.name for name in node.names
            )
    assert seen == {module: set(names) for module, names in tfn._NAMES.items()}
    assert set(tfn.__all__) <= {*tfn._SUBMODULES, *(name for names in seen.values() for name in names)}


def test_the_first_name_binds_those_of_the_core() -> None:
    """A jitted function may be the first that reads `tfn.constant`; a name that is not bound would not be known."""
    assert run("-c", "import thunder_fn as tfn; tfn.jit; print('constant' in vars(tfn))") == "True\n"


def test_every_room_can_be_the_first() -> None:
    """Files import each other in whatever order, and no package needs that another one came before."""
    assert run("-c", FIRST, *ROOMS) == ""
