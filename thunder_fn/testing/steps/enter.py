"""Registration of functions as steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_fn.ir.trace import Var
from thunder_fn.testing.drawn_programs import Draft, Step, Suits, register
from thunder_fn.torch_internals import OpOverload


def step(family: str) -> Callable[[Callable[[Draft], object]], Callable[[Draft], object]]:
    """Enter a function as a step of a family, under its own name."""

    def enter(f: Callable[[Draft], object]) -> Callable[[Draft], object]:
        register(family, f.__name__.strip("_"), lambda draft, _: void(f(draft)))
        return f

    return enter


def call(
    family: str, name: str, overload: OpOverload, suits: Suits, *others: object, **options: object
) -> None:
    """Enter a step that calls an op on a variable of some kind and on other arguments, or on those
    that a function picks for the variable.
    """

    def rule(draft: Draft, _: Step) -> None:
        x = draft.var(suits)
        pick: Any = others[0] if others else None
        picked: Any = pick(draft, x) if callable(pick) else others
        draft.leaf(overload, x, *picked, **options)

    register(family, name, rule)


def one_dim(draft: Draft, x: Var) -> tuple[object, ...]:
    """Pick a dim of a variable."""
    return (draft.dim(x),)


def structured(
    family: str, bodies: int
) -> Callable[[Callable[[Draft, Step], None]], Callable[[Draft, Step], None]]:
    """Enter a function as a step of a family that appends a structured op with so many bodies,
    under its own name.
    """

    def enter(f: Callable[[Draft, Step], None]) -> Callable[[Draft, Step], None]:
        register(family, f.__name__.strip("_"), f, bodies)
        return f

    return enter


def void(_: object) -> None:
    """Forget a result."""
    return
