"""Catching planted bugs: traces drawn once, and the first of them that breaks a law."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from thunder_fn.progress import tracked
from thunder_fn.testing.laws import LAWS
from thunder_fn.testing.laws.pairs import PAIRS
from thunder_fn.testing.laws.python_numbers import NUMBERS, law_numbers_are_pythons
from thunder_fn.testing.laws.rewriting import OF_REWRITES
from thunder_fn.testing.laws.symbolic import (
    CALLS,
    PROMOTED,
    RESIZED,
    law_hints_change_nothing,
    law_jit_is_eager,
    law_symbolic_is_static,
)
from thunder_fn.testing.mutations.planting import Mutation, planted
from thunder_fn.testing.seeds import SEEDS
from thunder_fn.testing.strategies import SINGLE, Case, cases, drawn_cases, smooth_cases

EXAMPLES = 300
"""The number of traces that a law may look at to catch a bug."""

OF_SYMBOLS: dict[str, tuple[Callable[[Any], None], Sequence[Any]]] = {
    "a symbolic trace is static ones": (law_symbolic_is_static, RESIZED),
    "hints change nothing": (law_hints_change_nothing, PROMOTED),
    "jit is eager": (law_jit_is_eager, CALLS),
    "numbers are Python's": (law_numbers_are_pythons, NUMBERS),
}
"""The laws of traces with symbols, each with the cases in which bugs are looked for."""

KNOWN: dict[str, Any] = {
    **LAWS,
    **{f"{first} and {second}": law for (first, second), law in PAIRS.items()},
    **{name: law for name, (law, _) in (*OF_SYMBOLS.items(), *OF_REWRITES.items())},
}
"""The laws of single traces, of pairs of transforms, of symbols, and of rewrites."""

_CASES: dict[Any, Sequence[Any]] = dict((*OF_SYMBOLS.values(), *OF_REWRITES.values()))


def corpus(count: int, first: int = 0) -> Iterator[tuple[Case, ...]]:
    """Cases as Hypothesis draws them, in runs of 25 from fixed seeds, drawn once and when they are
    asked for.

    As in the tests of laws, some are of any kind, some short and around structured ops, some in
    single precision; the seeds are run 0. Run `first` comes before the others. The traces of a run
    are built with it.
    """
    for run in _first(range(1 + -(-count // 25)), first):
        yield of_run(run)


def of_run(run: int) -> tuple[Case, ...]:
    """The cases of one run."""
    return _seeds() if run == 0 else _drawn(25 * (run - 1))


def _first(items: Sequence[Any], place: int) -> list[Any]:
    """The items, the one at this place before the others."""
    return [*items[place : place + 1], *items[:place], *items[place + 1 :]]


@functools.cache
def _seeds() -> tuple[Case, ...]:
    for case in SEEDS:
        case.trace.renamed("program")
    return SEEDS


_KINDS = (cases(), smooth_cases(), cases(dtypes=SINGLE), smooth_cases())


def _drawn(number: int) -> tuple[Case, ...]:
    """The run of cases that begins with this one."""
    found = drawn_cases(_KINDS[number // 25 % len(_KINDS)], number, 25)
    for case in found:
        case.trace.renamed("program")
    return found


def counterexample_in(law: Callable[..., object], case: Any) -> str | None:
    """The message of a law about a trace, or another case, that breaks it, None if it does not."""
    try:
        law(*((case.trace, case.inputs) if isinstance(case, Case) else (case,)))
    except Exception as error:  # noqa: BLE001 - a planted bug may raise anything
        return f"{type(error).__name__}: {error}"
    return None


def counterexample(
    law: Callable[..., object], mutation: Mutation | None = None, *, count: int = EXAMPLES
) -> str | None:
    """The message of a law, with a bug planted, about the first of so many traces that breaks it;
    None if none of them does.

    Of a law that has cases of its own, `count` of them are looked at, spread evenly. The traces of
    a run are there before the bug: it would get into derivatives that are part of a trace, and
    stay.
    """
    first = mutation.seen_in if mutation is not None else 0
    own = _CASES.get(law)
    runs = corpus(count, first) if own is None else [_first(own, first)[:: -(-len(own) // count)]]
    for drawn in runs:
        with planted(mutation) if mutation is not None else nullcontext():
            found = (counterexample_in(law, case) for case in drawn)
            if (said := next(filter(None, found), None)) is not None:
                return said
    return None


def print_table(
    mutations: Sequence[Mutation], *, every_law: bool = False, count: int = EXAMPLES
) -> int:
    """Print each bug with the law that catches it, or with every law that does; how many escape."""
    start, escaped = time.perf_counter(), 0
    sound = (
        [name for name, law in LAWS.items() if not counterexample(law, count=count)]
        if every_law
        else []
    )
    for mutation in tracked(mutations, "planting bugs"):
        names = sound if every_law else [mutation.law]
        caught = [name for name in names if counterexample(KNOWN[name], mutation, count=count)]
        escaped += not caught
        print(f"{mutation.bug:<62} {', '.join(caught) or 'ESCAPED'}", flush=True)
    seconds = time.perf_counter() - start
    print(f"\n{len(mutations) - escaped} of {len(mutations)} bugs caught, in {seconds:.0f} s")
    return escaped
