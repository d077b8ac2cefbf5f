"""Laws of symbolic traces: at sizes that satisfy its constraints, a symbolic trace is the static trace of these sizes,
whatever transforms are applied to both; other sizes are refused."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from thunder_fn.jitted import cache_info, jit
from thunder_fn.testing.laws.symbolic import (
    CHAINS,
    OF_DATA,
    PROMOTED,
    STEPS,
    Calls,
    Promoted,
    Resized,
    Sizes,
    arguments,
    law_a_saved_function_is_the_compiled_one,
    law_hints_change_nothing,
    law_symbolic_is_static,
    program,
)

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXAMPLES = 1000 if THOROUGH else 12

sizes = st.tuples(st.integers(2, 6), st.integers(2, 6), st.integers(2, 5))
numbers = st.sampled_from([0.5, 2.5, 1.0, -3.0])


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not THOROUGH, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(CHAINS),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=2),
    *(sizes, sizes, st.tuples(numbers, numbers)),
)
def test_a_symbolic_trace_is_all_static_ones(
    chain: tuple[str, ...], names: list[str], first: Sizes, second: Sizes, given: tuple[float, float]
) -> None:
    if "vmap" in chain:  # sizes that depend on data differ between examples
        names = [name for name in names if name not in OF_DATA] or ["sin"]
    law_symbolic_is_static(Resized(tuple(names), first, second, given, chain))


@pytest.mark.parametrize("case", PROMOTED, ids=lambda case: case.names[0])
def test_hints_change_nothing(case: Promoted) -> None:
    law_hints_change_nothing(case)


@pytest.mark.parametrize("name", STEPS)
def test_other_sizes_miss(name: str) -> None:
    """A call whose sizes break a constraint is traced anew, and every call is right."""
    f = program([name])
    g = jit(f, cache="symbolic values")
    for rows, others, n in ((2, 5, 0.5), (5, 5, 2.5), (5, 2, 0.5), (4, 2, 2.5)):
        args = arguments((rows, others, 3), n)
        torch.testing.assert_close(g(*args), f(*args), rtol=1e-9, atol=1e-9)
    assert cache_info(g).misses <= 4


CALLED = (((4, 3, 2), 2.5, False), ((5, 3, 2), 0.5, True), ((3, 4, 3), 2.5, False), ((1, 3, 2), 2.5, False))


@pytest.mark.parametrize("first", range(len(STEPS) if THOROUGH else 6))
def test_a_saved_function_is_the_compiled_one(first: int) -> None:
    """Every step is in some program: of one step each, or of as many as there are to each of six."""
    names = sorted(STEPS)[first :: len(STEPS) if THOROUGH else 6]
    law_a_saved_function_is_the_compiled_one(Calls(tuple(names), CALLED))
