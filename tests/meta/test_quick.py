"""The table of families that `pytest --quick` thins."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests import quick
from tests.quick import EVERY, left_out

TESTS = Path(__file__).parents[1]


def test_families_exist() -> None:
    files = {file: (TESTS / file).read_text() for file in {family.partition("::")[0] for family in EVERY}}
    named = {family: family.partition("[")[0].partition("::") for family in EVERY}
    assert not [family for family, (file, _, name) in named.items() if f"def {name}(" not in files[file]]


def test_one_of_n_members_stays() -> None:
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


@pytest.mark.parametrize("sizes", [(3, 15), (15, 3), (2, 15, 8), (12, 15, 2)], ids=str)
def test_all_values_of_parameters_stay(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: one member has each value, whatever divides n and the numbers of values."""
    members = ["-".join(map(str, one)) for one in itertools.product(*map(range, sizes))]
    for every in range(2, len(members) // max(sizes) // 2 + 1):
        monkeypatch.setitem(quick.EVERY, "unit/test_x.py::test_f", every)
        left = left_out(f"unit/test_x.py::test_f[{one}]" for one in members)
        kept = [one for one in members if f"unit/test_x.py::test_f[{one}]" not in left]
        values = {place for one in kept for place in enumerate(one.split("-"))}
        assert len(kept) == -(-len(members) // every)
        assert len(values) == sum(sizes), every
