"""Recipes for diffusers and timm, by models that stand where theirs do, and by diffusers' own where it is installed."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import recipes


def of_package(package: str) -> nn.Module:
    """A model whose class says that it is from this package."""
    body = {"__module__": f"{package}.models.small"}
    cls = types.new_class("ModelMixin", (nn.Conv2d,), exec_body=lambda namespace: namespace.update(body))
    return cls(3, 8, 3)


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("package", ("diffusers", "timm"))
def test_found_by_the_package(package: str) -> None:
    model = of_package(package)
    recipe = recipes.for_model(model)
    assert recipe is not None and recipe.name == package and package in recipes.list()
    assert torch.equal(tfn.compile(model, "auto", executors="torch")(X), model(X))
    derived = type("Mine", (type(model),), {"__module__": "mine"})(3, 8, 3)
    assert recipes.for_model(derived) is recipe


def test_channels_last() -> None:
    model = of_package("timm")
    recipe = recipes.get("timm")(channels_last=True)
    compiled = tfn.compile(copy.deepcopy(model), recipe, executors="torch")
    assert compiled.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(compiled(X), model(X))
    assert "1. channels_last (on the model, reassociating)" in recipe.explain(model)


def test_another_library_s_model() -> None:
    with pytest.raises(ValueError) as caught:
        tfn.compile(nn.Linear(2, 2), "timm")
    assert message_of(caught.value) == "the recipe timm is for models of timm, given a Linear"


def test_a_unet() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    options = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": 8,
    }
    model = diffusers.UNet2DModel(**options, **blocks)
    compiled = tfn.compile(copy.deepcopy(model), "auto", executors="torch")
    x = torch.randn(1, 3, 8, 8)
    for step in (3, 7):
        found, known = compiled(x, torch.tensor(step)).sample, model(x, torch.tensor(step)).sample
        torch.testing.assert_close(found, known)
    found.pow(2).mean().backward()
    known.pow(2).mean().backward()
    for mine, its in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-6)
