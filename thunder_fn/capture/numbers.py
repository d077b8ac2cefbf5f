"""Arguments whose sizes and values are symbols.

A place of a call is a leaf with one of its dims, or with None for a number. `symbolic_leaves` gives each dynamic place a
symbol; everything else is baked in. Sizes 0 and 1 stay numbers: they broadcast or hold nothing, so that programs for
them differ from those of larger sizes. Strides that a tensor's sizes explain are expressions of these, others symbols.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.capture.recorder import Layout
from thunder_fn.symbols import Symbol, number_symbol, size_symbol
from thunder_fn.trace import Dim, Expr

Place = tuple[int, int | None]
"""A leaf of a call by position, and one of its dims; None for a number."""


@dataclass(frozen=True, slots=True)
class Symbolic:
    """The arguments of a call with symbols in them.

    `places` says where each symbol is read from: a leaf with its dim, a number with None, a stride with -1 - dim.
    """

    layouts: Mapping[int, Layout]
    numbers: Mapping[int, Expr]
    places: Mapping[Symbol, Place]

    @property
    def inputs(self) -> tuple[tuple[Symbol, Place], ...]:
        """The symbols that are inputs of their own, since no tensor's type has them: numbers and strides."""
        return tuple((symbol, place) for symbol, place in self.places.items() if place[1] is None or place[1] < 0)


def symbolic_leaves(leaves: Sequence[Any], dynamic: Collection[Place]) -> Symbolic:
    """Symbols for the dynamic places of a call's leaves, numbered in order."""
    layouts, numbers, places = dict[int, Layout](), dict[int, Expr](), dict[Symbol, Place]()
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if (index, None) in dynamic:
                symbol = number_symbol(len(places), leaf)
                numbers[index], places[symbol] = Expr(symbol), (index, None)
            continue
        shape: list[Dim] = []
        for dim, size in enumerate(leaf.shape):
            if (index, dim) in dynamic and size > 1:
                symbol = size_symbol(len(places), size)
                places[symbol] = (index, dim)
                shape.append(Expr(symbol))
            else:
                shape.append(size)
        if any(isinstance(size, Expr) for size in shape):
            layouts[index] = Layout(tuple(shape), _strides(leaf, shape, index, places))
    return Symbolic(layouts, numbers, places)


def stride_pattern(shape: Sequence[int], stride: Sequence[int]) -> tuple[int | None, ...]:
    """For each dim, how its stride is explained: a dim whose size times stride it is, -1 for 1, -2 for 0, or None."""
    pattern: list[int | None] = [None] * len(shape)
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim] != 1, -dim))
    done: list[int] = []
    for dim in order:
        if stride[dim] in (0, 1):
            pattern[dim] = stride[dim] - 2
        else:
            pattern[dim] = next((it for it in reversed(done) if shape[it] * stride[it] == stride[dim]), None)
        done.append(dim)
    return tuple(pattern)


def _strides(tensor: torch.Tensor, shape: Sequence[Dim], index: int, places: dict[Symbol, Place]) -> tuple[Dim, ...]:
    found: dict[int, Dim] = {}
    pattern, strides = stride_pattern(tensor.shape, tensor.stride()), tensor.stride()

    def stride(dim: int) -> Dim:
        if dim not in found:
            explained = pattern[dim]
            if explained is None:
                symbol = size_symbol(len(places), strides[dim])
                places[symbol] = (index, -1 - dim)
                found[dim] = Expr(symbol)
            else:
                found[dim] = explained + 2 if explained < 0 else _product(shape[explained], stride(explained))
        return found[dim]

    return tuple(stride(dim) for dim in range(len(shape)))


def _product(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return Expr((a.value if isinstance(a, Expr) else a) * (b.value if isinstance(b, Expr) else b))  # type: ignore[operator]


def value_at(leaves: Sequence[Any], place: Place) -> Any:
    """What a symbol that is read from this place is for these leaves."""
    index, dim = place
    if dim is None:
        return leaves[index]
    return leaves[index].shape[dim] if dim >= 0 else leaves[index].stride()[-1 - dim]
