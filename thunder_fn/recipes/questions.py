"""The questions to recipes: their names, the options that may be set, and the reading of an
answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from thunder_fn.errors import RecipeError, kind_of

Frontend = Literal["direct", "dynamo"]

QUESTIONS = (
    "validate",
    *(f"setup_{what}" for what in ("operators", "lookasides", "transforms", "executors", "config")),
)
"""The methods by which a recipe answers."""
FINAL = ("assemble", "explain", "setup")
"""The methods that put answers together; recipes do not override them."""


def check_names(cls: type) -> None:
    """Raise if a class of recipes overrides the final step, or answers an unknown question."""
    for name in vars(cls):
        if name in FINAL:
            fix = "Override `validate` and the `setup_` methods, whose answers it puts together."
            raise RecipeError(f"{cls.__name__}: `{name}` is not to be overridden", fix=fix)
        near = difflib.get_close_matches(name, QUESTIONS, n=1, cutoff=0.9)
        if near and name not in QUESTIONS:
            raise RecipeError(
                f"{cls.__name__}: there is no question `{name}`; did you mean `{near[0]}`?"
            )


def answer(recipe: Any, question: str) -> Any:
    """Ask a recipe one question.

    Raises:
        RecipeError: it has no method of the question's name.
    """
    method = getattr(recipe, question)
    if not callable(method):
        what = (
            f"{recipe!r}: {question} is a method that returns what is asked for, not"
            f" {kind_of(method)}"
        )
        raise RecipeError(what, fix=f"Write `def {question}(self): return ...`.")
    return method()


def sequence(recipe: Any, question: str) -> Sequence[Any]:
    """Ask a recipe a question whose answer is a sequence.

    Raises:
        RecipeError: the answer is not a sequence.
    """
    said = answer(recipe, question)
    if said is None:  # by a method without `return`
        return ()
    if isinstance(said, str) or not isinstance(said, Sequence):
        raise RecipeError(
            f"{recipe!r}: {question} returns a sequence, not {kind_of(said)}",
            fix="Return `()` for nothing.",
        )
    return said
