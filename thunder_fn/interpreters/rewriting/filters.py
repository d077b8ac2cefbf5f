"""Filters: the parameters that a step of a rewriting transform chooses, by name and shape."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.quantize.scheme import Shape
from thunder_fn.interpreters.rewriting.representation import Representation
from thunder_fn.interpreters.rewriting.stacks import layer_type, stack_of
from thunder_fn.ir.trace import TensorType, static_shape

Filter = Callable[[str, Shape], bool]


ADAPTERS = ("lora_a", "lora_b")


def matrices(name: str, shape: Shape) -> bool:
    """The default filter: weights of two or more dims, adapters left alone."""
    return len(shape) >= 2 and not name.endswith(ADAPTERS)


def read_filter(given: Any, what: str) -> Filter:
    """A predicate on name and shape, or patterns on names such as `layers.*.weight`."""
    if given is None:
        return matrices
    if callable(given):
        return cast(Filter, given)
    patterns = (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    )
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise RewriteError(
            f"{what}: a filter is a pattern on names, some of them, or a function of (name, shape)"
        )
    return Patterns(patterns)


def in_stacks(step: Any, name: str, type: TensorType) -> Representation | None:
    """Decide a weight by a step: each layer by itself, where layers lie on top of each other."""
    if not step.stacked(name, static_shape(type)):
        return step.of_layer(name, type)
    layer = step.of_layer(name, layer_type(type))
    return layer and stack_of(layer, type)


def read_stacked(given: Any, what: str) -> Filter:
    """Read the option like `read_filter`. By default nothing is stacked."""
    return NOTHING if given in (None, ()) else read_filter(given, what)


@dataclass(frozen=True)
class Patterns:
    """A filter: weights of two or more dims whose names match one of the patterns."""

    patterns: tuple[str, ...]

    def __call__(self, name: str, shape: Shape) -> bool:
        return len(shape) >= 2 and any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns
        )

    def check(
        self,
        names: Sequence[str],
        types: Sequence[TensorType],
        what: str,
        most_dims: int | None,
        least_dims: int = 2,
    ) -> None:
        """Check that every pattern chooses something that has as many dims as a step takes.

        Raises:
            RewriteError: one does not, which would leave weights as they are without a word.
        """
        dims = [len(static_shape(type)) for type in types]
        weights = [
            name for name, n in zip(names, dims, strict=True) if least_dims <= n <= (most_dims or n)
        ]
        for pattern in self.patterns:
            if not fnmatch.filter(weights, pattern):
                near = difflib.get_close_matches(pattern, weights, n=3, cutoff=0.0)
                dims_text = "two" if least_dims == 2 else "three"
                dims_text += "" if most_dims == least_dims else " or more"
                raise RewriteError(
                    f"{what}: the filter {pattern!r} matches no parameter of {dims_text} dims",
                    fix=(
                        f"There are {', '.join(near)}." if near else "There are no such parameters."
                    ),
                )


NOTHING = Patterns(())
