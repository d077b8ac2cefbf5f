"""Laws of random numbers: a transform that keeps values draws as often, and in the same order.

Each law is about what can be seen from outside: the generator's state afterwards, and the values
under one seed. So they hold for draws in loops, branches and calls, whatever the transform makes
of these.
"""

from __future__ import annotations

import itertools

import torch

from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    Transform,
    Values,
    close,
    draws,
    holds,
    is_inexact,
    is_tame,
    law_of,
    run,
    state_after,
    tolerance,
)

MOST_DRAWS = 64
"""The number of numbers by which two generators are looked for to be apart."""


@law_of
def merges_no_draws(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Keep two outputs that were drawn apart from being one draw."""
    if not draws(trace):
        return False
    new = transform(trace)
    want, have = run(trace, inputs), run(new, inputs)
    for i, j in itertools.combinations(range(len(want)), 2):
        what = f"outputs {i} and {j} are one draw, but were drawn apart"
        merged = _are_alike(have, i, j) and not _are_alike(want, i, j)
        holds(not merged, what, trace=trace, made=new)
    return True


def _are_alike(values: Values, i: int, j: int) -> bool:
    a, b = (values[place] if place < len(values) else None for place in (i, j))
    return (
        isinstance(a, torch.Tensor)
        and isinstance(b, torch.Tensor)
        and a.shape == b.shape
        and a.numel() > 1
        and is_inexact(a)
        and torch.equal(a, b)
    )


@law_of
def keeps_number_of_draws(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Draw as many random numbers: drop none, merge none with another, draw none twice."""
    if not draws(trace):
        return False
    new = transform(trace)
    want, have = state_after(trace, inputs), state_after(new, inputs)
    if not torch.equal(want, have):
        fewer = _is_behind(new, trace, inputs, want)
        what = "fewer random numbers are drawn: a draw is gone, or merged with another"
        if not fewer:
            what = "more random numbers are drawn: a draw is repeated, or runs where none did"
        holds(False, what, trace=trace, made=new)
    return True


def _is_behind(new: Trace, trace: Trace, inputs: Inputs, want: torch.Tensor) -> bool:
    """Test whether the generator after `new` comes to where `trace` leaves it by drawing more."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        evaluate(new, inputs)
        for _ in range(MOST_DRAWS):
            torch.rand((), dtype=torch.float64)
            if torch.equal(torch.get_rng_state(), want):
                return True
    return len(draws(new)) < len(draws(trace))


@law_of
def keeps_order_of_draws(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Keep the values under one seed: each draw gets the numbers that it got before."""
    if not draws(trace):
        return False
    new = transform(trace)
    want = run(trace, inputs)
    if not is_tame(want):
        return False
    have, rtol = run(new, inputs), tolerance(trace)
    what = "under one seed (the draws are in another order, or of another kind)"
    floats = lambda values: [x for x in values if isinstance(x, torch.Tensor)]
    close(_doubles(floats(have)), _doubles(floats(want)), rtol, what, trace=trace, made=new)
    return True


def _doubles(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x if is_inexact(x) else x.double() for x in values]


def laws_of_draws(transform: Transform) -> dict[str, Law]:
    """The laws of random numbers that a transform keeps if it keeps values."""
    return {
        "merges no draws": merges_no_draws(transform),
        "draws as many numbers": keeps_number_of_draws(transform),
        "draws in the same order": keeps_order_of_draws(transform),
    }
