"""The order in which the rule of a leaf op is looked for: a table of attempts for each transform.

An attempt answers a question about one equation with a rule, or declines and says why. The first
rule is the op's. `tfn.inspect.explain_rule` prints the same tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

from thunder_fn.capture.foreign import Of, remembered_unless_foreign
from thunder_fn.ir.memos import kept_of_ops

Question = TypeVar("Question")
Rule = TypeVar("Rule")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Declined:
    """The reason why an attempt has no rule, and PyTorch's error where it gave one."""

    why: str
    error: Exception | None = None

    @staticmethod
    def by(error: Exception) -> Declined:
        """Decline with the first line of PyTorch's error."""
        return Declined(f"{type(error).__name__}: {error}".splitlines()[0], error)


@dataclass(frozen=True, slots=True)
class Attempt(Generic[Question, Rule]):
    """One place to look for a rule.

    Args:
        name: of the place, as reports print it.
        find: takes the question and gives a rule, or declines.
    """

    name: str
    find: Callable[[Question], Rule | Declined]


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Rule]):
    """The answer of a table.

    Attributes:
        rule: the first rule that was found, None if every attempt declined.
        found_by: the name of its attempt, empty if there is none.
        declined: the attempts before it and their reasons, in order.
    """

    rule: Rule | None
    found_by: str
    declined: tuple[tuple[str, Declined], ...]


def first_rule(attempts: Sequence[Attempt[Question, Rule]], question: Question) -> Outcome[Rule]:
    """Ask the attempts in order until one has a rule."""
    declined: list[tuple[str, Declined]] = []
    for attempt in attempts:
        found = attempt.find(question)
        if not isinstance(found, Declined):
            return Outcome(found, attempt.name, tuple(declined))
        declined.append((attempt.name, found))
    return Outcome(None, "", tuple(declined))


def kept_rules(
    maxsize: int,
) -> Callable[[Callable[Concatenate[Of, P], Rule]], Callable[Concatenate[Of, P], Rule]]:
    """Remember what was derived for single equations, but for those of custom ops."""
    return lambda f: remembered_unless_foreign(f, kept_of_ops(maxsize)(f))
