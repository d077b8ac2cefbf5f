"""The tests of the tests: each planted bug is caught by the law that it names, and by nothing when it is gone."""

from __future__ import annotations

import dataclasses

import pytest

from thunder_fn.testing.laws import LAWS
from thunder_fn.testing.mutations import MUTATIONS, Mutation, OutdatedMutation, counterexample, planted


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug.replace(" ", "_"))
def test_a_planted_bug_is_caught(mutation: Mutation) -> None:
    with planted(mutation):
        assert counterexample(LAWS[mutation.law]) is not None, f"{mutation.law} does not see that {mutation.bug}"


@pytest.mark.parametrize("law", sorted({mutation.law for mutation in MUTATIONS}))
def test_without_a_bug_nothing_is_caught(law: str) -> None:
    assert counterexample(LAWS[law], count=50) is None


def test_a_mutation_that_no_longer_fits_says_so() -> None:
    outdated = dataclasses.replace(MUTATIONS[0], before="no such code")
    with pytest.raises(OutdatedMutation, match="has no 'no such code' any more"), planted(outdated):
        pass
