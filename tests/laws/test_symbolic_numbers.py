"""Law of symbolic numbers: arithmetic on them is Python's, bit for bit, and so is what it raises."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from thunder_fn.testing.laws.python_numbers import NUMBER_STEPS, NumberCalls, NumberStep, law_numbers_are_pythons

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXAMPLES = 1000 if THOROUGH else 25

ints = st.sampled_from([0, 1, 2, 3, 5, 7, -1, -2, -7, 40, 10**9, 2**62, 2**70])
floats = st.sampled_from([0.0, -0.0, 0.1, 0.7, 1.0, -2.5, 3.0, 1e-20, 1e17, 1e300, math.inf, -math.inf, math.nan])
steps = st.tuples(st.sampled_from(sorted(NUMBER_STEPS)), st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not THOROUGH, suppress_health_check=list(HealthCheck))
@given(
    st.lists(steps, min_size=1, max_size=5), st.lists(st.tuples(ints | floats, ints | floats), min_size=2, max_size=6)
)
@pytest.mark.filterwarnings("ignore::thunder_fn.jitted.RetraceWarning")
def test_numbers_are_those_of_python(steps: list[NumberStep], calls: list[tuple[Any, Any]]) -> None:
    law_numbers_are_pythons(NumberCalls(tuple(steps), tuple(calls)))


@pytest.mark.parametrize("name", NUMBER_STEPS)
def test_each_step(name: str) -> None:
    calls = ((5, 3), (0, 0), (-7, 2), (2.5, 0.1), (-0.0, 0.0), (1e300, 1e300), (3, -2))
    law_numbers_are_pythons(NumberCalls(((name, 0, 1), (name, 1, 2)), calls))
