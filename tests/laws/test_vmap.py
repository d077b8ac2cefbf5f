"""What vmap promises beyond the law that it is a loop: of random numbers, and where functorch has it wrong."""

from __future__ import annotations

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import VmapError


def test_same_numbers_that_cannot_be_had_are_an_error_not_other_numbers() -> None:
    with pytest.raises(VmapError, match=r"aten\.bernoulli\.default has no batching rule, and a loop would draw other"):
        tfn.vmap(torch.bernoulli, randomness="same")(torch.full((3, 4), 0.5))


@pytest.mark.parametrize("draw", [torch.nn.functional.dropout, torch.rand_like, lambda x: torch.rand(4) + x])
def test_same_numbers_are_equal_in_all_examples(draw: object) -> None:
    found = tfn.vmap(draw, randomness="same")(torch.ones(3, 4))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_scalar_index_of_its_own_for_each_example() -> None:
    """functorch's rule for index_select takes whole rows here."""
    xs, index = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    found = tfn.vmap(lambda x, i: torch.index_select(x, 0, i))(xs, index)
    assert torch.equal(found, torch.tensor([[0.0], [3.0], [4.0]]))
