"""Small recipes that are added to others: ``compile(model, ["auto", "quantize_int8"])``. What cannot apply raises."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from thunder_fn.errors import RecipeError, located
from thunder_fn.jit.transforms import Transform
from thunder_fn.recipes.recipe import Recipe
from thunder_fn.recipes.registry import register
from thunder_fn.rewrites import quantize


class Quantize(Recipe):
    """Weights as numbers of few bits, decoded where they are used. See `quantize`.

    Args:
        filter: which weights, as `quantize` takes it. Left out, all floating parameters of two or more dims.
    """

    scheme: ClassVar[str] = ""

    def __init__(self, filter: Any = None) -> None:
        self.filter = filter

    def validate(self, model: Any) -> None:
        """There is something to quantise."""
        if not isinstance(model, torch.nn.Module):
            what = f"{self.name}: a {type(model).__name__} has no parameters of its own"
            raise RecipeError(
                located(what, fix="Give `compile` the module, or call `quantize` on a function of parameters.")
            )
        if not any(param.is_floating_point() and param.dim() >= 2 for param in model.parameters()):
            raise RecipeError(f"{self.name}: a {type(model).__name__} has no floating parameter of two or more dims")

    def setup_transforms(self) -> Sequence[Transform]:
        """Of the model: other parameters."""
        change = functools.partial(quantize, scheme=self.scheme, filter=self.filter)
        others = tuple(f"quantize_{name}" for name in SCHEMES if name != self.scheme)
        return (
            Transform(
                change,
                name=f"quantize_{self.scheme}",
                after=("caches_as_arguments", "static_cache", "lora"),
                before=("fsdp", "ddp"),
                conflicts=others,
                numerics="precision-changing",
                on="model",
            ),
        )

    def setup_executors(self) -> Sequence[str]:
        """Kernels for layers on codes."""
        return ("quantized",)


SCHEMES = ("int8", "nf4")


@register
class QuantizeInt8(Quantize):
    """Eight bits a weight, one scale a row."""

    name, scheme = "quantize_int8", "int8"


@register
class QuantizeNF4(Quantize):
    """Four bits a weight, in blocks of 64 (QLoRA)."""

    name, scheme = "quantize_nf4", "nf4"
