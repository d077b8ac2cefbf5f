"""Filters: the parameters that a step of a rewriting transform chooses, by name and shape.

Weights may lie on top of each other along dim 0, a layer at each place, as `scan` takes them. Each
layer is stored by itself. A part of a stack has the layers' parts along its own dim 0. So a step of
a loop that takes a slice of the weight takes slices of the parts. It computes on them as a layer
does. Ops that take a stack apart give such slices, too.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.quantize.scheme import Shape
from thunder_fn.interpreters.rewriting.representation import Kept, Representation
from thunder_fn.interpreters.rewriting.tracing import traced, traced_on_parts
from thunder_fn.ir import facts, ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, static_shape
from thunder_fn.structured import loop_functions
from thunder_fn.structured.shared.bind import apply

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


# ---- weights on top of each other ----


@memo(4096)
def stack_of(layer: Representation, type: TensorType) -> Representation:
    """A weight of this type, each layer of which is stored in one way.

    Law: the parts at a place, and their decoded value, are those of the layer alone.
    """
    stacked = tuple(
        replace(part, shape=(type.shape[0], *part.shape)) for part in _tensors(layer.part_types)
    )
    return Representation(
        layer.label,
        type,
        layer.suffixes,
        _for_each(layer.encode, (type,)),
        _for_each(layer.decode, stacked),
        layer.restore and _for_each(layer.restore, stacked),
        rule=_taken_apart,
        codes=layer.codes,
        in_bodies=layer.in_bodies,
        slices=layer,
    )


def layer_type(type: TensorType) -> TensorType:
    """The type of a layer of a stack."""
    return replace(type, shape=static_shape(type)[1:])


def _tensors(types: Any) -> tuple[TensorType, ...]:
    return tuple(type for type in types if isinstance(type, TensorType))


def _for_each(trace: Trace, types: tuple[TensorType, ...]) -> Trace:
    """A trace on each slice of its inputs along dim 0."""
    step = lambda given: apply(trace.name, trace, given, trace)
    return traced(lambda *xs: loop_functions.map(step, xs), *types)


def _taken_apart(equation: Equation, kept: tuple[Representation | None, ...]) -> Kept | None:
    """The rule of a stack: ops that take it apart take its parts apart."""
    numbers = [arg.value for arg in equation.args[1:] if isinstance(arg, Literal)] or [0]
    one, is_known = kept[0], len(numbers) == max(len(equation.args) - 1, 1)
    if equation.op not in facts.UNSTACKS or not is_known or one is None or one.slices is None:
        return None
    if numbers[0] % len(static_shape(one.type)) != 0:
        return None
    function = ops.overload(equation.op)

    def apart(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [ops.flatten_result(function(part, 0, *numbers[1:])) for part in parts]
        return tuple(part for layer in zip(*found, strict=True) for part in layer)

    layer = replace(one.slices, of_results=True)
    return Kept(traced_on_parts(apart, equation, kept), (layer,) * len(equation.outputs))
