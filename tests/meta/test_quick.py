"""The table of families that `pytest --quick` thins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import EVERY, left_out

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("family", EVERY)
def test_a_family_exists(family: str) -> None:
    file, _, name = family.partition("[")[0].partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()


def test_every_nth_member_stays() -> None:
    law, family = "tests/laws/test_outside.py::test_a_law", "tests/unit/test_symbolic.py::test_programs"
    names = [
        law,
        *(f"{family}[{number}]" for number in range(5)),
        "tests/tutorials/test_tutorials.py::test_tutorial[07_laws]",
    ]
    every = EVERY[family.removeprefix("tests/")]
    assert left_out(names) == {
        *(f"{family}[{number}]" for number in range(5) if number % every),
        "tests/tutorials/test_tutorials.py::test_tutorial[07_laws]",
    }
