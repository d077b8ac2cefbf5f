"""The recipe that suits every model."""

from __future__ import annotations

from thunder_fn.recipes.recipe import Recipe
from thunder_fn.recipes.registry import register


@register
class Default(Recipe):
    """The empty recipe: the executors of this machine, which every recipe gets.

    Example:
        >>> import thunder_fn as tfn
        >>> tfn.recipes.Default()
        Default()
    """

    name = "default"
