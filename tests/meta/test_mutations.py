"""The tests of the tests: each planted bug is caught by the law that it names, and by nothing when it is gone."""

from __future__ import annotations

import dataclasses
import os

import pytest

from thunder_fn.ir.rules import TABLES
from thunder_fn.testing.mutations import (
    EXAMPLES,
    KNOWN,
    MUTATIONS,
    Mutation,
    OutdatedMutation,
    counterexample,
    planted,
    print_table,
)

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

pytestmark = pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug.replace(" ", "_"))
def test_a_planted_bug_is_caught(mutation: Mutation) -> None:
    found = counterexample(KNOWN[mutation.law], mutation)
    assert found is not None, f"{mutation.law} does not see that {mutation.bug}"


@pytest.mark.parametrize("law", sorted({mutation.law for mutation in MUTATIONS}))
def test_without_a_bug_nothing_is_caught(law: str) -> None:
    """The laws have tests of their own, with more traces; the thorough profile looks at every case of a rewrite."""
    assert counterexample(KNOWN[law], count=EXAMPLES if THOROUGH else 3) is None


def test_each_bug_has_a_name_of_its_own() -> None:
    assert len({mutation.bug for mutation in MUTATIONS}) == len(MUTATIONS)


def test_planting_leaves_no_trace() -> None:
    before = [dict(table.by_name) for table in TABLES]
    for mutation in MUTATIONS:
        with planted(mutation):
            pass
    assert before == [table.by_name for table in TABLES]


def test_a_mutation_that_no_longer_fits_says_so() -> None:
    outdated = dataclasses.replace(MUTATIONS[0], before="no such code")
    with pytest.raises(OutdatedMutation, match="has no 'no such code' any more"), planted(outdated):
        pass


def test_the_table_says_which_law_catches_which_bug(capsys: pytest.CaptureFixture[str]) -> None:
    harmless = dataclasses.replace(MUTATIONS[0], bug="nothing is wrong", before="zip(asked, ", after="zip(asked, ")
    assert print_table([MUTATIONS[0], harmless], count=1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == MUTATIONS[0].bug and lines[0].endswith(MUTATIONS[0].law)
    assert lines[1].endswith("ESCAPED") and lines[3].startswith("1 of 2 bugs caught, in ")
