"""Every file of this package knows itself as no user's, whatever folder it is in."""

from __future__ import annotations

import os
from pathlib import Path

import thunder_fn
from thunder_fn import lines
from thunder_fn.capture.numbers import python_numbers
from thunder_fn.capture.outside import frames

FILES = sorted(Path(thunder_fn.__file__).parent.rglob("*.py"))
PROGRAMS = ("demo", "benchmarks", "testing")


def test_files_of_this_package_are_no_users() -> None:
    root = Path(thunder_fn.__file__).parent
    assert f"{root}{os.sep}" == frames.ROOT
    for file in FILES:
        is_ours = file.relative_to(root).parts[0].removesuffix(".py") not in PROGRAMS
        assert python_numbers._knows_symbols(str(file)) == is_ours, file
        assert lines.is_internal(str(file)) == is_ours, file


def test_files_of_users_are() -> None:
    for file in ("/home/user/train.py", __file__):
        assert not python_numbers._knows_symbols(file)
        assert not lines.is_internal(file)
