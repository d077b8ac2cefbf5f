"""Weights split over ranks that work on one batch together: by columns, rows, vocabulary or
sequence.

Every rank computes its share of a layer. The result of a column layer stays a share (`shares.py`)
through activation functions and heads, and a row layer takes it as it is. Such a pair sends one sum
forwards and one backwards, which all column layers on one value share. If an op needs whole
activations, they are gathered. The functions at the border of a layer are in `crossings.py`. The
number of a rank's share is a part, `w.rank`, so that all ranks run the same trace.

If a plan has norms of a sequence, ranks have shares of the positions between the pairs, too. Then a
row layer scatters its sum, and a column layer gathers what it is given: as many bytes travel, and a
rank stores and computes a part of what lies between.

Sources: Megatron-LM (arXiv:1909.08053), sequence parallelism (arXiv:2205.05198).
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from thunder_fn.distributed.groups import Group
from thunder_fn.errors import RewriteError, kind_of
from thunder_fn.interpreters.rewriting.part_calls import EMBEDDING, LINEAR, in_precision
from thunder_fn.interpreters.rewriting.representation import Asked, Kept, Representation
from thunder_fn.interpreters.rewriting.tracing import traced, traced_on_parts
from thunder_fn.interpreters.tensor_parallel.crossings import (
    chunks_of,
    copied,
    gathered_dim,
    joined_chunks,
    scattered,
    share,
    summed,
)
from thunder_fn.interpreters.tensor_parallel.shares import (
    RANK,
    Copies,
    OnShares,
    copies,
    divides,
    shares,
)
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, python_arg, static_shape

STYLES: Mapping[str, tuple[int, ...]] = {
    "column": (1, 2),
    "row": (2,),
    "embedding": (2,),
    "sequence": (1,),
}
"""The number of dims of parameters that are split so. Biases that a plan does not call columns are
whole on every rank.
"""
LAYER_NORM, RMS_NORM = "torch.nn.functional.layer_norm", "torch.nn.functional.rms_norm"

_NAMES = {
    LINEAR: ("input", "weight", "bias"),
    EMBEDDING: ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    LAYER_NORM: ("input", "normalized_shape", "weight", "bias", "eps"),
    RMS_NORM: ("input", "normalized_shape", "weight", "eps"),
}


# ---- layers on shares ----

Given = Mapping[str, Any]
Parts = tuple[torch.Tensor, torch.Tensor]


def column_share(
    given: Given, group: Group, shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results that this rank has, and which those are."""
    (weight, rank), bias, chunks = given["weight"], given.get("bias"), given["input"]
    own = (
        bias[0]
        if isinstance(bias, tuple)
        else None
        if bias is None
        else share(bias, rank, group, 0)
    )
    results = [F.linear(x, weight, own) for x in chunks]
    return results[0] if len(chunks) == 1 else joined_chunks(results, group), rank


def column_linear(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Compute some of the results on each rank, and put them together."""
    y, rank = column_share(given, group, shape)
    return gathered_dim(y, rank, group, -1, shape[0])


def row_linear(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Compute a part of every sum on each rank, and add the parts."""
    y = summed(_row_part(given, group), group)
    return y if given.get("bias") is None else y + given["bias"]


def row_share(given: Given, group: Group, shape: tuple[int, ...], chunks: int = 1) -> Parts:
    """The positions of the sums that this rank has."""
    (weight, rank), bias = given["weight"], given.get("bias")
    if chunks == 1:
        y = scattered(_row_part(given, group), rank, group, -2)
    else:
        each = chunks_of(_row_input(given, group), group, chunks)
        y = torch.cat([scattered(F.linear(x, weight), rank, group, -2) for x in each], -2)
    return y if bias is None else y + copied(bias, group), rank


def _row_part(given: Given, group: Group) -> torch.Tensor:
    return F.linear(_row_input(given, group), given["weight"][0])


def _row_input(given: Given, group: Group) -> torch.Tensor:
    x = given["input"]
    return x[0] if isinstance(x, tuple) else share(x, given["weight"][1], group, -1)


def vocabulary_embedding(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Look up some of the words on each rank, with zeros for the others."""
    return summed(_own_words(given), group)


def vocabulary_share(given: Given, group: Group, shape: tuple[int, ...]) -> Parts:
    """The positions of the embeddings that this rank has."""
    rank = given["weight"][1]
    return scattered(_own_words(given), rank, group, -2), rank


def _own_words(given: Given) -> torch.Tensor:
    indices, (weight, rank), padding = given["input"], given["weight"], given.get("padding_idx")
    local = indices - rank * weight.shape[0]
    inside = ((local >= 0) & (local < weight.shape[0])).unsqueeze(-1)
    rows = F.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    if padding is not None and padding >= 0:  # no gradient for it
        rows = torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside, rows, torch.zeros_like(rows))


Layer = Callable[[Given, Group, tuple[int, ...]], Any]


def _sequence(norm: Callable[..., torch.Tensor]) -> tuple[Layer, Layer]:
    def norm_share(given: Given, group: Group, shape: tuple[int, ...]) -> Parts:
        x = given["input"]
        kept = {
            name: given[name] for name in ("weight", "bias") if isinstance(given.get(name), tuple)
        }
        rank = next(iter(kept.values()))[1]
        options = {name: value for name, value in given.items() if name not in ("input", *kept)}
        weights = {name: copied(parts[0], group) for name, parts in kept.items()}
        own = x[0] if isinstance(x, tuple) else share(x, rank, group, -2)
        return norm(own, **options, **weights), rank

    def sequence_norm(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
        y, rank = norm_share(given, group, shape)
        return gathered_dim(y, rank, group, -2, given["input"].shape[-2])

    return sequence_norm, norm_share


_LAYERS: dict[tuple[str, str], tuple[Layer, Layer]] = {
    ("column", LINEAR): (column_linear, column_share),
    ("embedding", LINEAR): (column_linear, column_share),  # a head that is tied to an embedding
    ("row", LINEAR): (row_linear, row_share),
    ("column", EMBEDDING): (vocabulary_embedding, vocabulary_share),
    ("embedding", EMBEDDING): (vocabulary_embedding, vocabulary_share),
    ("sequence", LAYER_NORM): _sequence(F.layer_norm),
    ("sequence", RMS_NORM): _sequence(F.rms_norm),
}
"""For each style and function the layer whose result is whole, and the one whose result is this
rank's share: of a column's results, or of the positions.
"""


# ---- the step ----


@dataclass(frozen=True)
class TensorParallel:
    """The step of `tensor_parallel`: what each rank keeps of the weights that a plan names."""

    group: Group
    plan: tuple[tuple[str, str], ...]
    chunks: int = 1
    of_weights: ClassVar[bool] = True

    def check_names(self, names: Sequence[str]) -> None:
        """Check that every pattern of the plan matches a parameter.

        Raises:
            RewriteError: one does not, which would leave weights whole without a word.
        """
        for pattern, _ in self.plan:
            if not fnmatch.filter(names, pattern):
                near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))
                what = f"tensor_parallel: the plan's {pattern!r} matches no parameter"
                raise RewriteError(
                    what, fix=f"There are {near}." if near else "There are no parameters."
                )

    def style(self, name: str, type: TensorType) -> str | None:
        """The style in which a parameter is split; None if it is not."""
        style = next(
            (style for pattern, style in self.plan if fnmatch.fnmatchcase(name, pattern)), None
        )
        if style is None or not type.dtype.is_floating_point or 0 in static_shape(type):
            return None
        return style if len(static_shape(type)) in STYLES[style] else None

    def split_dim(self, name: str, type: TensorType) -> int | None:
        """The dim of a parameter of which each rank has a share; None if every rank has the
        whole.
        """
        style = self.style(name, type)
        return None if style in (None, "sequence") else _dim_of(style)

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        style = self.style(name, type)
        if style is None:
            return None
        return split(self.group, style, type, self.of_positions, self.chunks)

    @property
    def of_positions(self) -> bool:
        """True if ranks have shares of the positions between layers."""
        return any(style == "sequence" for _, style in self.plan)


def _dim_of(style: str) -> int:
    return 1 if style == "row" else 0


@memo(4096)
def split(
    group: Group, style: str, type: TensorType, of_positions: bool = False, chunks: int = 1
) -> Representation:
    """A weight of this type of which every rank keeps a share."""
    shape, dim = static_shape(type), _dim_of(style)
    each = math.ceil(shape[dim] / group.size)

    def encode(w: torch.Tensor) -> Parts:
        rank = torch.full((), group.rank, device=w.device)
        if style == "sequence":
            return w.clone(), rank
        first = w.movedim(dim, 0)
        padding = first.new_zeros((group.size * each - shape[dim], *first.shape[1:]))
        own = torch.cat((first, padding)).reshape(group.size, each, *first.shape[1:])[group.rank]
        return own.movedim(0, dim).contiguous(), rank

    def decode(w: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        return w.clone() if style == "sequence" else gathered_dim(w, rank, group, dim, shape[dim])

    encoded = traced(encode, type)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    return Representation(
        "tensor_parallel",
        type,
        ("", RANK),
        encoded,
        traced(decode, *parts),
        rule=_Layers(group, style, of_positions, chunks),
    )


@dataclass(frozen=True)
class _Layers:
    """The rule: layers that each rank computes its share of."""

    group: Group
    style: str
    of_positions: bool
    chunks: int

    def __call__(
        self, equation: Equation, kept: tuple[Representation | None, ...]
    ) -> Trace | Kept | Asked | None:
        layers, names = _LAYERS.get((self.style, equation.op.name)), _NAMES.get(equation.op.name)
        mine = [one for one in kept if one is not None and one.rule == self]
        if layers is None or names is None or not mine:
            return None
        arguments = equation.named(names)
        if not self.fits(equation, arguments, kept):
            return None
        whole, shared = layers
        if whole is column_linear and not any(map(self.is_copied, kept)):
            return self.asked(equation, arguments)
        (result,) = equation.output_types
        place = self.shared_dim(whole, result)
        shape = static_shape(mine[0].type)
        if place is None or not isinstance(result, TensorType):
            return self.on_parts(whole, equation, arguments, kept, shape)
        if shared is row_share:
            shared = partial(row_share, chunks=self.chunks_in(result))
        trace = self.on_parts(shared, equation, arguments, kept, shape)
        return Kept(trace, (shares(self.group, result, len(static_shape(result)) + place),))

    def shared_dim(self, layer: Layer, result: Any) -> int | None:
        """The dim, from the end, of which each rank keeps its share of a result."""
        place = -1 if layer is column_linear else -2 if self.of_positions else None
        return place if place is not None and divides(self.group, result, place) else None

    def asked(self, equation: Equation, arguments: dict[str, Any]) -> Asked:
        """A column layer's input, with the gradients of all ranks added up once for all layers
        that read it.
        """
        given = arguments["input"]
        return Asked(
            tuple(
                copies(self.group, var.type, self.chunks_in(var.type))
                if var is given and isinstance(var.type, TensorType)
                else None
                for var in equation.operands
            )
        )

    def is_copied(self, one: Representation | None) -> bool:
        """Test for such an input."""
        rule = None if one is None else one.rule
        return isinstance(rule, Copies) and rule.group == self.group

    def chunks_in(self, type: TensorType) -> int:
        """The number of chunks in which the positions of a value travel; 1 if none divide them."""
        divides_them = divides(replace(self.group, size=self.group.size * self.chunks), type, -2)
        return self.chunks if self.of_positions and divides_them else 1

    def on_parts(
        self,
        layer: Layer,
        equation: Equation,
        arguments: dict[str, Any],
        kept: tuple[Representation | None, ...],
        shape: tuple[int, ...],
    ) -> Trace:
        """A layer on the parts of its operands."""
        precision = equation.outputs[0].type

        def call(*values: torch.Tensor) -> Any:
            supply, found = iter(values), dict[int, Any]()
            for var, one in zip(equation.operands, kept, strict=True):
                given = tuple(
                    next(supply) for _ in (one.part_types if one is not None else (None,))
                )
                given = tuple(in_precision(value, precision) for value in given)
                found[var.index] = given if one is not None else given[0]
            read = {
                name: python_arg(arg, lambda var: found[var.index])
                for name, arg in arguments.items()
            }
            return layer(read, self.group, shape)

        return traced_on_parts(call, equation, kept)

    def fits(
        self, equation: Equation, arguments: dict[str, Any], kept: tuple[Representation | None, ...]
    ) -> bool:
        """Test the places of a layer's values. Weights are where weights belong, activations are
        whole or the shares of a row, and an embedding has no options that change its weight.
        """
        places = {arg.index: name for name, arg in arguments.items() if isinstance(arg, Var)}
        weights = list[str | None]()
        for var, one in zip(equation.operands, kept, strict=True):
            if one is not None and one.rule == self:
                weights.append(places.get(var.index))
            elif one is not None and not self.takes(one, places.get(var.index)):
                return False
        if equation.op.name in (LINEAR, EMBEDDING) and (weights or [""])[0] != "weight":
            return False
        if not set(weights) <= {"weight", "bias"} or len(set(places)) != len(equation.operands):
            return False
        options = (arguments.get(name) for name in ("scale_grad_by_freq", "sparse"))
        return all(not isinstance(arg, Literal) or not arg.value for arg in options)

    def takes(self, one: Representation, name: str | None) -> bool:
        """Test for an input that a layer takes as it is kept. A row has the part that its share of
        the weight is multiplied with; a norm has some of the positions; a column asks for copies.
        """
        last = len(static_shape(one.type)) - 1
        if name != "input":
            return False
        if self.style in ("column", "embedding"):
            return isinstance(one.rule, OnShares | Copies) and one.rule.group == self.group
        return one.rule == OnShares(self.group, last - (self.style == "sequence"))


def read_plan(plan: Any) -> tuple[tuple[str, str], ...]:
    """Patterns on names and how the parameters are split.

    Raises:
        RewriteError: there is no such way.
    """
    if not isinstance(plan, Mapping):
        what = (
            "tensor_parallel: a plan is a dict of patterns on names and how the parameters are"
            f" split, given {kind_of(plan)}"
        )
        raise RewriteError(what, fix='Write `{"*.up.weight": "column", "*.down.weight": "row"}`.')
    for style in plan.values():
        if style not in STYLES:
            raise RewriteError(
                f"tensor_parallel: a weight is split by {', '.join(STYLES)}; given {style!r}"
            )
    return tuple(plan.items())
