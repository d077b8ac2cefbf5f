"""Three transforms in a row, in any order: a few of them here, many in the thorough profile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from thunder_fn.testing import smooth_cases
from thunder_fn.testing.laws.pairs import KEEPERS, TRANSFORMS, law_of_three
from thunder_fn.testing.strategies import Case

pytestmark = pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")

MOVERS = ("vjp", "jvp", "vmap")
NAMES = st.sampled_from((*MOVERS, *MOVERS, *KEEPERS, "autocast"))


def test_the_names_are_those_of_the_matrix() -> None:
    assert {*MOVERS, *KEEPERS} | {"autocast"} == TRANSFORMS.keys()


@settings(max_examples=20 if settings().derandomize else settings().max_examples)
@given(names=st.tuples(NAMES, NAMES, NAMES), case=smooth_cases(max_steps=3, depth=1))
def test_triples(names: tuple[str, str, str], case: Case) -> None:
    law_of_three(names)(case.trace, case.inputs)
