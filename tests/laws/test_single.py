"""Every law of a single trace, on the traces that the strategies draw. See `thunder_fn.testing.laws`."""

from __future__ import annotations

import zlib
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import example, given, seed, settings

from thunder_fn import evaluate, trace
from thunder_fn.capture import pytree
from thunder_fn.testing import laws
from thunder_fn.testing.drawn_programs import build, source_of
from thunder_fn.testing.mutations.catching import of_run
from thunder_fn.testing.seeds import SEEDS
from thunder_fn.testing.strategies import DTYPES, SINGLE, Case, cases, programs, pytrees, smooth_cases

FIXED = settings().derandomize
"""Whether the traces are the same in each run: then all groups of laws look at the same ones, which are drawn once."""


@pytest.mark.parametrize("run", range(2))
@pytest.mark.parametrize("group", laws.GROUPS)
def test_laws(group: str, run: int) -> None:
    """Traces of any kind; in the second run short ones around structured ops, and those that are always tried."""
    if FIXED and "autocast" not in group:
        for case in chain(() if run == 0 else SEEDS, *(of_run(number) for number in RUNS[run])):
            try:
                laws.check_laws(laws.GROUPS[group], case.trace, case.inputs)
            except Exception as error:
                error.add_note(f"of the trace: build({source_of(case.program)})")
                raise
        return
    dtypes = SINGLE if "autocast" in group else DTYPES

    @settings(max_examples=25 if FIXED else settings().max_examples)
    @given(case=smooth_cases(dtypes=dtypes) if run else cases(dtypes=dtypes))
    def test(case: Case) -> None:
        laws.check_laws(laws.GROUPS[group], case.trace, case.inputs)

    if run:
        for case in SEEDS:
            test = example(case=case)(test)
    (seed(zlib.crc32(f"{group} {run}".encode()))(test) if FIXED else test)()


RUNS = ((1,), (2,))
"""The runs of the corpus of planted bugs that have traces of any kind, and short ones around structured ops."""


@given(program=programs())
def test_build_gives_equal_traces(program: Any) -> None:
    first, second = build(program), build(program)
    assert first == second and hash(first) == hash(second) and str(first) == str(second)


@pytest.mark.parametrize("name", sorted(laws.INTERPRETERS.keys() - laws.UNFOLDING))
def test_work_grows_with_distinct_code(name: str) -> None:
    laws.law_work_grows_with_distinct_code(laws.INTERPRETERS[name])


@given(tree=pytrees())
def test_a_pytree_goes_through_a_trace(tree: Any) -> None:
    leaves, spec = pytree.flatten(tree)
    assert pytree.flatten(pytree.unflatten(spec, leaves))[1] == spec
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    identity = trace(lambda x: x, tree)
    assert all(a is b for a, b in zip(evaluate(identity, tensors), tensors, strict=True))
