"""Recipes by name, and by the class of a model."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from thunder_fn.errors import RecipeError, kind_of
from thunder_fn.ir.text import shown
from thunder_fn.recipes.recipe import Recipe

R = TypeVar("R", bound=type[Recipe])

_recipes: dict[str, type[Recipe]] = {}


def register(recipe: R) -> R:
    """Make a class of recipes known by its name. A decorator.

    Law: ``get(recipe.name) is recipe``.

    Raises:
        RecipeError: it is no class of recipes, it has no name, or another class has it.

    Example:
        >>> import thunder_fn as tfn
        >>> @tfn.recipes.register
        ... class Plain(tfn.Recipe):
        ...     name = "plain"
        >>> tfn.recipes.get("plain") is Plain
        True
    """
    given: Any = recipe
    if not (isinstance(given, type) and issubclass(given, Recipe)):
        what = f"register: expected a class derived from `Recipe`, given {shown(given, 60)}"
        raise RecipeError(what, fix="Give the class, not a recipe made of it.")
    if not recipe.name:
        raise RecipeError(f"{recipe.__name__} has no `name` to be registered under")
    known = _recipes.get(recipe.name)
    if known is not None and (known.__module__, known.__qualname__) != (
        recipe.__module__,
        recipe.__qualname__,
    ):
        raise RecipeError(
            f"another recipe is registered as {recipe.name!r}:"
            f" {known.__module__}.{known.__qualname__}"
        )
    _recipes[recipe.name] = recipe
    return recipe


def list_recipes() -> list[str]:
    """The names of all recipes that are registered.

    Law: `get` knows each of them.

    Example:
        >>> import thunder_fn as tfn
        >>> "default" in tfn.recipes.list()
        True
    """
    return sorted(_recipes)


def get(name: str) -> type[Recipe]:
    """The class of recipes of a name.

    Law: ``get(recipe.name) is recipe`` for every registered recipe.

    Raises:
        RecipeError: there is none; names the nearest.

    Example:
        >>> import thunder_fn as tfn
        >>> tfn.recipes.get("default")
        <class 'thunder_fn.recipes.default.Default'>
    """
    given: Any = name
    if not isinstance(given, str):
        raise RecipeError(f"a recipe's name is a str, given {kind_of(given)}: {shown(given, 60)}")
    if name not in _recipes:
        near = difflib.get_close_matches(name, _recipes, n=1, cutoff=0.0)
        fix = f"There are {', '.join(list_recipes())}; `recipes.register` adds others."
        raise RecipeError(f"there is no recipe {name!r}; did you mean {near[0]!r}?", fix=fix)
    return _recipes[name]


def for_model(model: Any) -> type[Recipe] | None:
    """The recipe for the model's class, or for the nearest class that it is derived from; None
    if there is none.

    Law: of two recipes for bases of the class, it is that of the base which Python looks at
        first.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> tfn.recipes.for_model(torch.nn.Linear(2, 2)) is None
        True
    """
    by_class = {target: recipe for recipe in _recipes.values() for target in recipe.models}
    for cls in type(model).__mro__:
        package = cls.__module__.partition(".")[0]
        found = by_class.get(f"{package}.{cls.__name__}") or by_class.get(f"{package}.*")
        if found is not None:
            return found
    return None
