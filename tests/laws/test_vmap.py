"""Promises of vmap beyond the law that it is a loop: of random numbers, and where functorch has it wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.derived.leaf_vmap import LoopWarning


def test_same_numbers_without_a_batching_rule_come_from_a_loop_that_sets_the_generator_back() -> None:
    with pytest.warns(LoopWarning, match=r"aten\.bernoulli\.default has no batching rule"):
        found = tfn.vmap(torch.bernoulli, randomness="same")(torch.full((3, 40), 0.5))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert 0 < found[0].sum() < 40


@pytest.mark.parametrize("draw", [torch.nn.functional.dropout, torch.rand_like, lambda x: torch.rand(4) + x])
def test_same_numbers_are_equal_in_all_examples(draw: object) -> None:
    found = tfn.vmap(draw, randomness="same")(torch.ones(3, 4))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_scalar_index_of_its_own_for_each_example() -> None:
    """functorch's rule for index_select takes whole rows here."""
    xs, index = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0])
    found = tfn.vmap(lambda x, i: torch.index_select(x, 0, i))(xs, index)
    assert torch.equal(found, torch.tensor([[0.0], [3.0], [4.0]]))


def test_a_layout_of_four_dims_for_each_example() -> None:
    xs = torch.randn(2, 3, 4, 5, 6)
    found = tfn.vmap(lambda x: x.to(memory_format=torch.channels_last) * 2)(xs)
    assert torch.equal(found, xs * 2)


def test_an_index_that_a_decomposition_would_have_to_read() -> None:
    xs = torch.randn(4)
    with pytest.warns(LoopWarning, match=r"aten\.take\.default has no batching rule"):
        found = tfn.vmap(lambda x: torch.take(x, torch.tensor(0)))(xs)
    assert torch.equal(found, xs)


@pytest.mark.parametrize("around", [lambda f: f, tfn.jit], ids=["eager", "jit"])
def test_same_numbers_are_equal_in_all_chunks(around: object) -> None:
    draw = tfn.vmap(lambda x: torch.nn.functional.dropout(x + torch.randn(4)), randomness="same", chunk_size=2)
    torch.manual_seed(0)
    found = around(draw)(torch.ones(5, 4))  # type: ignore[operator]
    assert all(torch.equal(found[0], row) for row in found)
    torch.manual_seed(0)
    x = tfn.vmap(lambda x: torch.nn.functional.dropout(x + torch.randn(4)), randomness="same")(torch.ones(5, 4))
    assert torch.equal(x, found) and not torch.equal(torch.rand(3), torch.rand(3))


@pytest.mark.parametrize("wrap", [lambda f: f, tfn.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("value", [1.0, 3, True, 1j, "a", torch.float32])
def test_what_is_no_tensor_has_no_batch_dim(wrap: Any, value: Any) -> None:
    """An error where torch.func has one; what out_dims says None about is given back as it is."""
    x = torch.ones(3, 2)
    f = lambda x: {"loss": x * 2, "rest": [x.sum(), value]}
    for options in ({}, {"out_dims": 0}, {"out_dims": {"loss": 1, "rest": [0, 0]}}, {"chunk_size": 2}):
        for vmap in (torch.func.vmap, lambda f, **options: wrap(tfn.vmap(f, **options))):
            with pytest.raises(ValueError, match="only"):
                vmap(f, **options)(x)
    for dims in ({"loss": 0, "rest": [0, None]}, {"loss": 1, "rest": [-1, None]}):
        found, want = wrap(tfn.vmap(f, out_dims=dims))(x), torch.func.vmap(f, out_dims=dims)(x)
        assert torch.equal(found["loss"], want["loss"]) and torch.equal(found["rest"][0], want["rest"][0])
        assert found["rest"][1] == want["rest"][1] == value
