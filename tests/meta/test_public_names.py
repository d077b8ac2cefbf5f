"""The public surface is a list: tests/golden/public_names.txt. A name joins or leaves it on purpose."""

from __future__ import annotations

import importlib
import inspect
import operator
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import thunder_fn
from docs.tools import api, errors
from thunder_fn import spellings


def public_names() -> dict[str, object]:
    """The names that `import thunder_fn as tfn` offers; submodules are listed where they are imported on purpose."""
    return {name: getattr(thunder_fn, name) for name in thunder_fn.__all__}


def test_public_names_are_the_committed_list(golden: Callable[[str, str], None]) -> None:
    functions = (name for name, value in public_names().items() if not isinstance(value, ModuleType))
    golden("public_names", "\n".join(sorted(functions)))


def test_public_names_say_what_they_do() -> None:
    missing = [name for name, value in public_names().items() if callable(value) and not inspect.getdoc(value)]
    assert not missing


def test_help_of_the_package_has_every_public_name() -> None:
    functions = {name for name, value in public_names().items() if not isinstance(value, ModuleType)}
    assert not functions - set(re.findall(r"\w+", thunder_fn.__doc__ or ""))


def test_every_public_name_is_on_an_api_page() -> None:
    """A new name has its place in `docs/tools/api.py`."""
    text = "\n".join(api.pages().values())
    headings = re.findall(r"(?:heading: |^## )tfn\.(\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(api.public_names())


def test_every_error_has_a_page() -> None:
    """A new class has one in `docs/errors/`, whose example raises it; `make golden` writes what it prints."""
    pages = {path.stem for path in (Path(__file__).parents[2] / "docs" / "errors").glob("*.md")}
    assert pages == {kind.__name__ for kind in errors.KINDS}


def test_names_of_other_packages_are_told_in_names_that_exist() -> None:
    """`tfn.remat` raises and says `tfn.checkpoint`."""
    made: dict[str, Any] = {
        "custom_jvp": thunder_fn.custom_jvp(torch.sin),
        "Jitted": thunder_fn.jit(torch.sin),
        "Lowered": thunder_fn.jit(torch.sin).lower(torch.ones(2)),
    }
    for owner, names in spellings.ELSEWHERE.items():
        module, _, kind = owner.partition(":")
        room = importlib.import_module(module)
        place = made[kind] if kind in made else getattr(room, kind) if kind else room
        for name, fix in names.items():
            with pytest.raises(AttributeError, match=f"{name!r}\n"):
                getattr(place, name)
            for dotted in re.findall(r"\b(tfn|torch)((?:\.\w+)+)", fix):
                operator.attrgetter(dotted[1][1:])({"tfn": thunder_fn, "torch": torch}[dotted[0]])
