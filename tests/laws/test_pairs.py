"""The pair matrix: every two transforms, in both orders, on random traces. Non-laws are in `test_nonlaws.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, note, settings

import thunder_fn as tfn
from thunder_fn.testing.drawn_programs import FAMILIES
from thunder_fn.testing.laws.pairs import PAIRS, TRANSFORMS, remembering
from thunder_fn.testing.strategies import SINGLE, Case, cases, smooth_cases

pytestmark = pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")

CERTAIN = tuple(family for family in FAMILIES if family != "random")


FEW = settings(max_examples=12 if settings().derandomize else settings().max_examples)


@pytest.mark.parametrize("strategy", [cases(families=CERTAIN, max_steps=10), smooth_cases()], ids=["any", "smooth"])
def test_pairs(strategy: Any) -> None:
    """One law speaks of both orders of a pair, so each is checked once."""
    laws = {id(law): (pair, law) for pair, law in PAIRS.items() if "autocast" not in pair}

    @settings(FEW)
    @given(case=strategy)
    def test(case: Case) -> None:
        inputs = case.inputs
        with remembering():
            for pair, law in laws.values():
                note(f"{pair[0]} and {pair[1]}")
                law(case.trace, inputs)

    test()


@given(case=cases(families=CERTAIN, max_steps=8, dtypes=SINGLE))
@settings(FEW)
def test_pairs_with_autocast(case: Case) -> None:
    inputs = case.inputs
    with remembering():
        for name in TRANSFORMS:
            note(f"autocast and {name}")
            PAIRS["autocast", name](case.trace, inputs)


def test_the_matrix_is_full() -> None:
    assert PAIRS.keys() == {(a, b) for a in TRANSFORMS for b in TRANSFORMS}


def test_vmap_keeps_stop_gradient() -> None:
    x = torch.ones(3, 2)
    stopped = tfn.grad(lambda x: tfn.vmap(lambda x: x.detach() * x)(x).sum())(x)
    assert torch.equal(stopped, x)


def test_forward_mode_twice_through_layer_norm_is_its_hessian() -> None:
    """Wrong in torch.func: its forward derivative takes the saved mean for constant."""
    x = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.native_layer_norm(x, (2,), None, None, 0.1)[0].sin().sum()

    torch.testing.assert_close(tfn.jacfwd(tfn.jacfwd(loss))(x), tfn.hessian(loss)(x))
    assert not torch.allclose(torch.func.jacfwd(torch.func.jacfwd(loss))(x), torch.func.hessian(loss)(x))
