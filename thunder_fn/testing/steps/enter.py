"""How a function becomes a step."""

from __future__ import annotations

from collections.abc import Callable

from thunder_fn.testing.programs import Draft, register


def step(family: str) -> Callable[[Callable[[Draft], object]], Callable[[Draft], object]]:
    """Enter a function as a step of a family, under its own name."""

    def enter(f: Callable[[Draft], object]) -> Callable[[Draft], object]:
        register(family, f.__name__.strip("_"), lambda draft, _: void(f(draft)))
        return f

    return enter


def void(_: object) -> None:
    """Forget a result."""
    return
