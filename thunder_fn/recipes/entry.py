"""`compile`: a model or function, and a recipe or none, in one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from typing_extensions import ParamSpec, Unpack

from thunder_fn.errors import RecipeError, kind_of
from thunder_fn.executors.base import Executor
from thunder_fn.ir.text import shown
from thunder_fn.jitted import jit
from thunder_fn.jitted.options import JitOptions
from thunder_fn.jitted.transforms import Transform
from thunder_fn.recipes import registry
from thunder_fn.recipes.default import Default
from thunder_fn.recipes.dynamo import through_dynamo, with_breaks
from thunder_fn.recipes.questions import Frontend
from thunder_fn.recipes.recipe import Assembly, Model, Recipe

Choice = None | str | Recipe | Sequence["Recipe | str"]


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


class CompileOptions(JitOptions, total=False):
    """The options of `compile`, as its callers write them."""

    operators: Sequence[Executor] | Executor
    frontend: Frontend | None


@overload
def compile(model: M, recipe: Choice = None, **options: Unpack[CompileOptions]) -> M: ...
@overload
def compile(
    model: Callable[P, R], recipe: Choice = None, **options: Unpack[CompileOptions]
) -> Callable[P, R]: ...
def compile(model: Model, recipe: Choice = None, **options: Unpack[CompileOptions]) -> Any:
    """Make a model or function fast, with this machine's executors and the recipe for the model.

    Law: ``compile(f)(*xs)`` is ``f(*xs)``, as exactly as the transforms and executors say that were
        chosen.

    Args:
        model: a module or any PyTorch callable.
        recipe: None for what suits every model, or "auto" for the recipe of the model's class. Or a
            name, a `Recipe`, or a list of them, which is their sum. The machine's executors come
            after those of the recipe.
        options: as in `Recipe.with_`: `transforms`, `executors`, `lookasides`, `frontend`, and
            options of `jit`.

    Returns:
        A module of the same class on the same state, or a function.

    Raises:
        RecipeError: there is no such recipe, or recipes contradict each other.
        Exception: what the recipe's `validate` raises.

    Example:
        >>> import torch
        >>> compile(lambda x: torch.sin(x) * 2, executors="torch")(torch.zeros(2))
        tensor([0., 0.])
    """
    assembly = chosen(model, recipe).with_(**options).assemble(model)
    for transform in assembly.on_model:
        model = _transformed(model, transform)
    compiled = _compiled(model, assembly)
    for transform in assembly.on_compiled:
        compiled = _transformed(compiled, transform)
    return compiled


def _compiled(model: Model, assembly: Assembly) -> Any:
    if assembly.frontend == "dynamo":
        return through_dynamo(model, assembly.options)
    if assembly.frontend == "direct":
        return jit(model, **assembly.options)
    return with_breaks(model, assembly.options)


def _transformed(model: Model, transform: Transform) -> Model:
    made = transform(model)
    if not callable(made):
        what = (
            f"the transform {transform.name!r} of the model returned {kind_of(made)}, not a module"
            " or function"
        )
        raise RecipeError(what, fix="Return the model, also where it is changed in place.")
    return made


def chosen(model: Model, recipe: Choice) -> Recipe:
    """The recipe that is meant for the model.

    Raises:
        RecipeError: it is none.
    """
    if not callable(model):
        raise RecipeError(
            f"compile: expected a module or function, given {kind_of(model)}: {shown(model, 60)}"
        )
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise RecipeError(
            f"compile: expected a module, given the class {model.__name__}; make an instance of it"
        )
    if recipe is None:
        return Default()
    given: Sequence[Any] = (
        [recipe] if isinstance(recipe, str | Recipe) or not isinstance(recipe, Sequence) else recipe
    )
    parts = [_read(model, one) for one in given]
    whole = parts[0] if parts else Default()
    for part in parts[1:]:
        whole += part
    return whole


def _made(recipe: type[Recipe]) -> Recipe:
    """A recipe without arguments."""
    try:
        inspect.signature(recipe.__init__).bind(None)
    except TypeError as error:
        what = f"compile: the recipe {recipe.name!r} cannot be made without arguments: {error}"
        raise RecipeError(what, fix=f"Give the recipe itself, `{recipe.__name__}(...)`.") from error
    return recipe()


def _read(model: Model, one: Any) -> Recipe:
    if isinstance(one, Recipe):
        return one
    if one == "auto":
        found = registry.for_model(model)
        return Default() if found is None else _made(found)
    if isinstance(one, str):
        return _made(registry.get(one))
    hint = "; make an instance of it" if isinstance(one, type) and issubclass(one, Recipe) else ""
    raise RecipeError(f"compile: a recipe is a name or a `Recipe`, given {shown(one, 60)}{hint}")
