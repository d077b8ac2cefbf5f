"""Recipes for diffusers' and timm's models: convolutions and attention on images.

Neither library is imported here, nor by `import thunder_fn`: models are known by the names of their
classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_fn.errors import kind_of
from thunder_fn.jitted.transforms import Transform
from thunder_fn.recipes.recipe import Recipe
from thunder_fn.recipes.registry import register


def _channels_last(model: Any) -> Any:
    """Weights of convolutions in the order in which convolutions are computed fastest, in the
    same parameters.
    """
    if isinstance(model, torch.nn.Module):
        module: Any = model
        module.to(memory_format=torch.channels_last)
    return model


CHANNELS_LAST = Transform(
    _channels_last,
    name="channels_last",
    on="model",
    idempotent=True,
    numerics="reassociating",
    before=("fsdp", "ddp"),
)


class Images(Recipe):
    """Models of one library that compute on images.

    Args:
        channels_last: keep the weights of convolutions in the order of channels last.
    """

    package = ""

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = channels_last

    def validate(self, model: Any) -> None:
        """Check that the model is of the library, or derived from one that is."""
        if not any(cls.__module__.partition(".")[0] == self.package for cls in type(model).__mro__):
            raise ValueError(
                f"the recipe {self.name} is for models of {self.package}, given {kind_of(model)}"
            )

    def setup_transforms(self) -> Sequence[Transform]:
        """The order of weights, if asked for."""
        return (CHANNELS_LAST,) if self.channels_last else ()


@register
class Diffusers(Images):
    """Diffusion models: UNets, transformers and autoencoders. Pass the time step as a tensor, so
    that one program serves all.
    """

    name, package = "diffusers", "diffusers"
    models = ("diffusers.ModelMixin",)


@register
class Timm(Images):
    """Image models of timm."""

    name, package = "timm", "timm"
    models = ("timm.*",)
