"""Reports of the branches of some code that run: by `sys.monitoring` and by `settrace` they are one."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from thunder_fn.testing.branches import Branches
from thunder_fn.testing.vocabulary import named_in, own_code

TRIED = """
def tried(x, rows, z):
    if x is None:
        return 1
    if rows is not None and not z:
        return 2
    kept = [row for row in rows if row > 1 if not row == 7]
    while x < 3:
        x += 1
    assert x
    for item in z and kept:
        x += item
    with memoryview(b''):
        pass
    try:
        {}[x]
    except KeyError:
        pass
    match x:
        case tuple():
            return 4
    return kept and x if z else rows
"""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function whose assertions pytest leaves alone."""
    (tmp_path / "some_branches.py").write_text(TRIED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_branches", raising=False)
    return importlib.import_module("some_branches").tried


WANTED = [
    "`x is None` was never true",
    "`rows is None` was never true",
    "`row == 7` was never true",
    "`z` was never false",
    "`tuple()` was never true",
    "`kept` was never false",
    "`z` was never false",
]


@pytest.mark.parametrize("by", ["monitoring", "settrace"])
def test_tests_that_come_out_alike(by: str, tried: Any) -> None:
    if (by == "monitoring") != hasattr(sys, "monitoring"):
        pytest.skip("Python 3.12 has sys.monitoring, and does not tell a trace function of all opcodes")
    ran = Branches(own_code([tried]))
    with ran.watching():
        tried(1, (1, 2), 0)
        tried(1, (1, 2), 5)
    first = tried.__code__.co_firstlineno
    assert [str(test).partition(": ")[2] for test in ran.one_sided()] == WANTED
    assert ran.never_ran() == [
        f"some_branches.py:{first + n}: {text}" for n, text in ((2, "return 1"), (19, "return 4"))
    ]
    seen = len(ran)
    with ran.watching():
        tried(None, (), 0)
    assert len(ran) > seen and sys.gettrace() is None
    assert "`x is None`" not in str(list(map(str, ran.one_sided())))


ALPHA = "sub.Tensor"


def test_ops_that_a_test_names() -> None:
    assert list(named_in("equation.op.name == ALPHA and other", [test_ops_that_a_test_names])) == ["aten.sub.Tensor"]
    assert list(named_in("not python )", [test_ops_that_a_test_names])) == []
