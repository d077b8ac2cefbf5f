"""Arguments whose sizes and values are symbols.

A place of a call is a leaf with one of its dims, or with None for a number. `symbolic_leaves` gives
each dynamic place a symbol; everything else is baked in. Sizes 0 and 1 stay numbers: they broadcast
or hold nothing, so that programs for them differ from those of larger sizes. Strides that a
tensor's sizes explain are expressions of these, others symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from thunder_fn.capture.numbers.arithmetic import is_plain
from thunder_fn.capture.recorded import Decision, Layout
from thunder_fn.ir.constraints import product
from thunder_fn.ir.symbols import UNBOUND, Bounds, Symbol, number_symbol, size_symbol
from thunder_fn.ir.trace import Dim, Expr

Place = tuple[int, int | None]
"""A leaf of a call by position, and one of its dims; None for a number."""


def has_own_input(place: Place) -> bool:
    """Test for a number or a stride, which no tensor's type has."""
    return place[1] is None or place[1] < 0


@dataclass(frozen=True, slots=True)
class Symbolic:
    """The arguments of a call with symbols in them.

    `places` says where each symbol is read from: a leaf with its dim, a number with None, a stride
    with -1 - dim. `decisions` are what the bounds of symbols ask of them.
    """

    layouts: Mapping[int, Layout]
    numbers: Mapping[int, Expr]
    places: Mapping[Symbol, Place]
    decisions: tuple[Decision, ...] = ()

    @property
    def inputs(self) -> tuple[tuple[Symbol, Place], ...]:
        """The symbols that are inputs of their own, since no tensor's type has them: numbers and
        strides.
        """
        return tuple((symbol, at) for symbol, at in self.places.items() if has_own_input(at))


def symbolic_leaves(
    leaves: Sequence[Any], dynamic: Collection[Place], bounds: Mapping[Place, Bounds] | None = None
) -> Symbolic:
    """Symbols for the dynamic places of a call's leaves, numbered in order; some have bounds."""
    layouts, numbers, places = dict[int, Layout](), dict[int, Expr](), dict[Symbol, Place]()
    given = bounds or {}
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if (index, None) in dynamic:
                symbol = number_symbol(
                    len(places), leaf, _around(leaf, given.get((index, None), UNBOUND))
                )
                numbers[index], places[symbol] = Expr(symbol), (index, None)
            continue
        shape: list[Dim] = []
        for dim, size in enumerate(leaf.shape):
            if (index, dim) in dynamic and size > 1:
                symbol = size_symbol(
                    len(places), size, _around(size, given.get((index, dim), UNBOUND))
                )
                places[symbol] = (index, dim)
                shape.append(Expr(symbol))
            else:
                shape.append(size)
        if any(isinstance(size, Expr) for size in shape):
            layouts[index] = Layout(tuple(shape), _strides(leaf, shape, index, places))
    asked = (
        decision
        for symbol, place in places.items()
        for decision in _asked(symbol, given.get(place, UNBOUND))
    )
    return Symbolic(layouts, numbers, places, tuple(asked))


def _around(value: float, bounds: Bounds) -> Bounds:
    """The bounds that hold for a value."""
    low, high = bounds
    return low if low is not None and value >= low else None, (
        high if high is not None and value <= high else None
    )


def _asked(symbol: Symbol, bounds: Bounds) -> Iterator[Decision]:
    """Return the questions that bounds ask of a symbol, with the answers."""
    low, high = bounds
    relations = (
        sympy.Ge(symbol, low) if low is not None else None,
        sympy.Le(symbol, high) if high is not None else None,
    )
    for relation, holds in zip(
        relations,
        (low is None or symbol.hint >= low, high is None or symbol.hint <= high),
        strict=True,
    ):
        if relation is not None and relation.free_symbols:
            yield Decision(Expr(relation), holds)


def stride_pattern(shape: Sequence[int], stride: Sequence[int]) -> tuple[int | None, ...]:
    """Explain the stride of each dim: the dim whose size times stride it is, -1 for 1, -2 for 0, or
    None.
    """
    pattern: list[int | None] = [None] * len(shape)
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim] != 1, -dim))
    done: list[int] = []
    for dim in order:
        if stride[dim] in (0, 1):
            pattern[dim] = stride[dim] - 2
        else:
            pattern[dim] = next(
                (it for it in reversed(done) if shape[it] * stride[it] == stride[dim]), None
            )
        done.append(dim)
    return tuple(pattern)


def _strides(
    tensor: torch.Tensor, shape: Sequence[Dim], index: int, places: dict[Symbol, Place]
) -> tuple[Dim, ...]:
    def unexplained(dim: int) -> Dim:
        symbol = size_symbol(len(places), tensor.stride(dim))
        places[symbol] = (index, -1 - dim)
        return Expr(symbol)

    return strides_of(stride_pattern(tensor.shape, tensor.stride()), shape, unexplained)


def strides_of(
    pattern: Sequence[int | None], shape: Sequence[Dim], unexplained: Callable[[int], Dim]
) -> tuple[Dim, ...]:
    """Compute strides from a pattern and sizes; `unexplained` has those that the pattern does not
    explain.
    """
    found: dict[int, Dim] = {}

    def stride(dim: int) -> Dim:
        if dim not in found:
            explained = pattern[dim]
            if explained is None:
                found[dim] = unexplained(dim)
            else:
                found[dim] = (
                    explained + 2 if explained < 0 else product(shape[explained], stride(explained))
                )
        return found[dim]

    return tuple(stride(dim) for dim in range(len(shape)))


def is_number(leaf: Any) -> bool:
    """Test for a number that a symbol can stand for. PyTorch's expressions hold ints below
    2**62.
    """
    return (type(leaf) is int and -(2**62) < leaf < 2**62) or (
        type(leaf) is float and is_plain(leaf)
    )


def value_at(leaves: Sequence[Any], place: Place) -> Any:
    """The value of a symbol that is read from this place, for these leaves."""
    index, dim = place
    if dim is None:
        return leaves[index]
    return leaves[index].shape[dim] if dim >= 0 else leaves[index].stride()[-1 - dim]
