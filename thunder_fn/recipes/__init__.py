"""Recipes: the options, transforms and executors that a model needs, in one value for `compile`.

`recipe.py` defines recipes and their sum, `entry.py` is `compile`, `dynamo.py` the bridge for code
that is no single trace. `huggingface.py`, `vision.py` and `plugins.py` are written as a third party
would write them. A new family of models is one recipe, registered by name and class.
"""

from __future__ import annotations

from thunder_fn.recipes import command, huggingface, plugins, vision
from thunder_fn.recipes.default import Default
from thunder_fn.recipes.dynamo import backend
from thunder_fn.recipes.entry import compile
from thunder_fn.recipes.recipe import Assembly, Config, Recipe
from thunder_fn.recipes.registry import for_model, get, list_recipes, register

list = list_recipes

__all__ = [
    "Assembly",
    "Config",
    "Default",
    "Recipe",
    "backend",
    "command",
    "compile",
    "for_model",
    "get",
    "huggingface",
    "list",
    "plugins",
    "register",
    "vision",
]
