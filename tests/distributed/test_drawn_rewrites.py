"""The laws of rewrites, of functions, ways, transforms and numbers of ranks that Hypothesis draws. No processes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings, strategies as st

from thunder_fn.parameters import SCHEMES
from thunder_fn.testing.drawn_programs import FAMILIES
from thunder_fn.testing.laws.rewriting import OF_REWRITES, STORED, UNDER, WAYS, Rewriting
from thunder_fn.testing.mutations import counterexample_in, planted
from thunder_fn.testing.mutations.rewriting import REWRITING
from thunder_fn.testing.strategies import SINGLE, cases

SHARDED = tuple(way for way in WAYS if way != "tensor_parallel")  # whose plan is of one module
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "N ranks equal one": (SHARDED, tuple(UNDER)),
    "sharding and quantising commute": (tuple(SCHEMES), ("nothing",)),
    "parts stand for the whole": (tuple(STORED), tuple(UNDER)),
    "adapters and codes commute": (("int8", "nf4"), ("grad", "checkpoint", "vmap of grad")),
    "restoring undoes preparing": ((*SHARDED, *STORED), ("nothing",)),
}
"""Of each law the ways and the transforms that are drawn."""
HEALTH = tuple(HealthCheck)


@st.composite
def rewritings(draw: Any, law: str, least: int = 1, without: tuple[str, ...] = ()) -> Rewriting:
    """Cases of a law, on so many ranks at least, and without some transforms."""
    unders = [under for under in KINDS[law][1] if under not in without] or KINDS[law][1]
    way, under = draw(st.sampled_from(KINDS[law][0])), draw(st.sampled_from(unders))
    families = [name for name in FAMILIES if name != "random"]
    dtypes = SINGLE if "autocast" in under else (torch.float64, torch.float64, torch.int64, torch.bool)
    drawn = draw(cases(max_steps=6, depth=1, families=families, dtypes=dtypes))
    return Rewriting(way, under, draw(st.integers(least, 4)), drawn=drawn)


@pytest.mark.parametrize("name", KINDS)
def test_laws(name: str) -> None:
    @given(case=rewritings(name))
    @settings(max_examples=2, deadline=None, suppress_health_check=HEALTH)
    def holds(case: Rewriting) -> None:
        assume(case.is_tame)
        OF_REWRITES[name][0](case)

    holds()


@functools.lru_cache(maxsize=8)
def corpus(law: str) -> tuple[Rewriting, ...]:
    """Cases of a law on several ranks, of derivatives where it is about these, drawn before any bug is planted."""
    found: list[Rewriting] = []

    @seed(0)
    @settings(max_examples=12, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=HEALTH)
    @given(case=rewritings(law, 2, ("nothing", "vmap", "autocast", "around autocast")))
    def draw(case: Rewriting) -> None:
        found.append(case)

    draw()
    return tuple(found)


CAUGHT = (
    "gradients are not divided by the ranks",
    "all ranks keep the first rows",
    "shards are rounded, not whole weights",
    "an adapter is not scaled in a linear layer",
    "adapters are codes",
)


@pytest.mark.parametrize("bug", CAUGHT)
def test_planted_bugs_are_caught(bug: str) -> None:
    (mutation,) = (mutation for mutation in REWRITING if mutation.bug == bug)
    drawn = [case for case in corpus(mutation.law) if case.is_tame]
    with planted(mutation):
        assert any(counterexample_in(OF_REWRITES[mutation.law][0], case) for case in drawn)
