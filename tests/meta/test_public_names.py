"""The public surface is a list: tests/golden/public_names.txt. A name joins or leaves it on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import thunder_fn


def public_names() -> dict[str, object]:
    """What `import thunder_fn as tfn` offers; submodules are listed where they are imported on purpose."""
    return {name: value for name, value in vars(thunder_fn).items() if not name.startswith("_")}


def test_public_names_are_the_committed_list(golden: Callable[[str, str], None]) -> None:
    functions = (name for name, value in public_names().items() if not isinstance(value, ModuleType))
    golden("public_names", "\n".join(sorted(functions)))


def test_public_names_say_what_they_do() -> None:
    missing = [name for name, value in public_names().items() if callable(value) and not inspect.getdoc(value)]
    assert not missing
