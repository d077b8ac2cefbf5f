"""Decisions about each kind of equation while a trace is claimed."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_fn.executors.base import Answer, Fuse, Instead, Refused, Run

TOO_SMALL = "the region would be too small"
IN_ITSELF = "inside its own transform"
INSTEAD = "computes something else instead"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one kind of equation: who took it, and why those that were asked before
    did not.

    `taken_by` is None for a composite that was unfolded; `times` counts equations; `depth` is how
    deep in composites they were.
    """

    op: str
    depth: int
    source: str
    taken_by: str | None
    how: str
    refusals: tuple[tuple[str, str], ...]
    times: int = 1

    @property
    def place(self) -> str:
        """The user's line alone, without the module."""
        return self.source.rpartition(" (")[0] if self.source.endswith(")") else self.source


def how(answer: Answer) -> str:
    """Describe in words the executor's decision, or its reason to refuse."""
    match answer:
        case Run(name):
            return f"runs it as {name}"
        case Instead():
            return INSTEAD
        case Fuse():
            return "fuses it"
        case Refused(reason):
            return reason
