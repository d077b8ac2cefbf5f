"""Registration of functions as steps."""

from __future__ import annotations

from collections.abc import Callable

from thunder_fn.testing.drawn_programs import Draft, Step, register


def step(family: str) -> Callable[[Callable[[Draft], object]], Callable[[Draft], object]]:
    """Enter a function as a step of a family, under its own name."""

    def enter(f: Callable[[Draft], object]) -> Callable[[Draft], object]:
        register(family, f.__name__.strip("_"), lambda draft, _: void(f(draft)))
        return f

    return enter


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
