"""Recipes: the options, transforms and executors that a model needs, in one value for `compile`.

`recipe.py` defines recipes and their sum, `entry.py` is `compile`, `dynamo.py` the bridge for code
that is no single trace. `huggingface.py`, `vision.py` and `plugins.py` are written as a third party
would write them. A new family of models is one recipe, registered by name and class.
"""

from __future__ import annotations

from thunder_fn.recipes import (
    command as command,
    huggingface as huggingface,
    plugins as plugins,
    vision as vision,
)
from thunder_fn.recipes.default import Default as Default
from thunder_fn.recipes.dynamo import backend as backend
from thunder_fn.recipes.entry import compile as compile
from thunder_fn.recipes.recipe import Assembly as Assembly, Config as Config, Recipe as Recipe
from thunder_fn.recipes.registry import (
    for_model as for_model,
    get as get,
    list_recipes,
    register as register,
)

list = list_recipes
