"""Values that a function makes of sizes and numbers alone are known while it is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import DataDependentBranch

Tensor = torch.Tensor


def masked(x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[0], 4)
    if not mask.all():
        return x
    mask[0, 0] = 0
    if mask.all() or mask.any().item() is False:
        return x + 1
    steps = torch.tensor([1, 2, 3])
    if torch.equal(steps, torch.arange(1, 4)) and 2 in steps:
        x = x + int(mask.sum())
    return x * steps.float().mean().item() + mask.sum(0).tolist()[1]


@pytest.mark.parametrize("dynamic", [False, True])
def test_python_may_ask_for_them(dynamic: bool) -> None:
    f = tfn.jit(masked, dynamic=dynamic)
    for n in (3, 4, 5, 1):
        x = torch.randn(n)
        assert f(x).equal(masked(x))


def test_they_leave_no_equation() -> None:
    ops = [equation.op.name for equation in tfn.trace(masked, torch.ones(3)).equations]
    assert ops == ["aten.add.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]


def test_masks_on_the_meta_device_are_computed_elsewhere() -> None:
    with torch.device("meta"):
        trace = tfn.trace(lambda x: x + 1 if torch.ones(len(x)).all() else x, torch.ones(3))
        assert [equation.op.name for equation in trace.equations] == ["aten.add.Tensor"]
        with pytest.raises(DataDependentBranch):
            tfn.trace(lambda x: x + 1 if torch.tensor([1, 2]).all() else x, torch.ones(3))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: (torch.ones(3) * x).all(),
        lambda x: torch.rand(3).sum() > 1,
        lambda x: torch.zeros(3).add_(x).any(),
        lambda x: torch.equal(torch.ones(3), x),
    ],
)
def test_what_depends_on_more_is_unknown(ask: Any) -> None:
    with pytest.raises(DataDependentBranch):
        tfn.trace(lambda x: x + 1 if ask(x) else x, torch.ones(3))


def test_a_closed_over_tensor_may_change_and_is_unknown() -> None:
    outside = torch.ones(3)
    with pytest.raises(DataDependentBranch):
        tfn.trace(lambda x: x + 1 if outside.all() else x, torch.ones(3))
