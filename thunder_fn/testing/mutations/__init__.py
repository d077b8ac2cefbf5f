"""Tests of the tests: bugs that we plant, each of which a law must catch.

A mutation is a small edit of one function's source. `planted` runs with it; `python -m thunder_fn
laws` prints which law catches which bug. When the source of a function changes, the edit that no
longer fits says so.

Source: mutation testing (DeMillo, Lipton, Sayward 1978).
"""

from __future__ import annotations

from thunder_fn.testing.mutations.catching import (
    EXAMPLES as EXAMPLES,
    KNOWN as KNOWN,
    corpus as corpus,
    counterexample as counterexample,
    counterexample_in as counterexample_in,
    print_table as print_table,
)
from thunder_fn.testing.mutations.control import CONTROL
from thunder_fn.testing.mutations.plain import PLAIN
from thunder_fn.testing.mutations.planting import (
    Mutation as Mutation,
    OutdatedMutation as OutdatedMutation,
    planted as planted,
)
from thunder_fn.testing.mutations.rewriting import REWRITING
from thunder_fn.testing.mutations.symbolic import SYMBOLIC
from thunder_fn.testing.mutations.transforms import TRANSFORMS

MUTATIONS: tuple[Mutation, ...] = (*PLAIN, *TRANSFORMS, *CONTROL, *SYMBOLIC, *REWRITING)
"""The bugs, by what they edit. Every one is caught by the law that it names, in the fast
profile.
"""
