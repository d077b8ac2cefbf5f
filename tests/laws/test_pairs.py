"""The pair matrix: every two transforms, in both orders, on random traces; and witnesses of what does not hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import thunder_fn as tfn
from thunder_fn.testing.laws.pairs import PAIRS, TRANSFORMS
from thunder_fn.testing.programs import FAMILIES
from thunder_fn.testing.strategies import Case, cases

pytestmark = pytest.mark.filterwarnings("ignore::thunder_fn.derive_vmap.LoopWarning")

CERTAIN = tuple(family for family in FAMILIES if family != "random")


@pytest.mark.parametrize("column", TRANSFORMS)
def test_pairs(column: str) -> None:
    @settings(max_examples=20 if settings().derandomize else settings().max_examples)
    @given(case=cases(families=CERTAIN, max_steps=10))
    def test(case: Case) -> None:
        for row in TRANSFORMS:
            PAIRS[row, column](case.trace, case.inputs)

    test()


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
