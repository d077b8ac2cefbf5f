"""Weights split over ranks that work on one batch together: by columns, rows, vocabulary or sequence.

Every rank sees whole activations between layers and computes its share inside of them. What crosses the border of a layer is
said by three functions, each the adjoint of another as Megatron-LM has them: `copied` (nothing forwards, a sum backwards),
`summed` (a sum forwards, nothing backwards) and `gathered_dim`. Which share is a rank's is a part, `w.rank`, so that all ranks
run the same trace.

Sources: Megatron-LM (arXiv:1909.08053), sequence parallelism (arXiv:2205.05198).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.rewrite import Representation
from thunder_fn.rewrites.distributed import Ddp, Group, collectives, divided_gradient, reduced
from thunder_fn.rewrites.steps import EMBEDDING, LINEAR, in_precision, traced
from thunder_fn.rules import memo
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.trace import Equation, Literal, TensorType, Trace, Var, python_arg, static_shape, type_of_value

STYLES = ("column", "row", "embedding", "sequence")
LAYER_NORM, RMS_NORM = "torch.nn.functional.layer_norm", "torch.nn.functional.rms_norm"
RANK = "rank"

_NAMES = {
    LINEAR: ("input", "weight", "bias"),
    EMBEDDING: ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse"),
    LAYER_NORM: ("input", "normalized_shape", "weight", "bias", "eps"),
    RMS_NORM: ("input", "normalized_shape", "weight", "eps"),
}


# ---- what crosses the border of a layer ----


def copied(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x; gradients of all ranks are added, since each rank knows those of its share only."""
    type = type_of_value(x)
    assert isinstance(type, TensorType), "a tensor has a tensor's type"
    return reduced(Ddp(group, "each", "sum"), (type,), (x,))[0]


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over ranks. Its gradient is the same on all ranks, and each one's own."""

    @custom_vjp
    def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group.name))

    sum_over_ranks.defvjp(lambda x: (sum_over_ranks(x), None), lambda _, ct: (ct,))
    return sum_over_ranks(x)


def gathered_dim(x: torch.Tensor, group: Group, dim: int, size: int) -> torch.Tensor:
    """The shares of all ranks beside each other along a dim, without padding beyond a size."""
    first = divided_gradient(x.movedim(dim, 0).contiguous(), group.size)  # all ranks add one and the same gradient
    whole = collectives.wait_tensor(collectives.all_gather_into_tensor(first, group.size, group.name))
    return whole[:size].movedim(0, dim)


def share(x: torch.Tensor, rank: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's share of a dim, the last ones padded with zeros."""
    dim %= x.dim()
    each = math.ceil(x.shape[dim] / group.size)
    short = each * group.size - x.shape[dim]
    x = F.pad(copied(x, group), (*(0, 0) * (x.dim() - 1 - dim), 0, short))
    return x.unflatten(dim, (group.size, each)).index_select(dim, rank.reshape(1)).squeeze(dim)


# ---- layers on shares ----

Given = Mapping[str, Any]
Parts = tuple[torch.Tensor, torch.Tensor]


def column_linear(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Each rank has some of the results."""
    y = F.linear(copied(given["input"], group), given["weight"][0])
    y = gathered_dim(y, group, -1, shape[0])
    return y if given.get("bias") is None else y + given["bias"]


def row_linear(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Each rank has a part of every sum."""
    weight, rank = given["weight"]
    y = summed(F.linear(share(given["input"], rank, group, -1), weight), group)
    return y if given.get("bias") is None else y + given["bias"]


def vocabulary_embedding(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
    """Each rank has some of the words, and zeros for the others."""
    indices, (weight, rank), padding = given["input"], given["weight"], given.get("padding_idx")
    local = indices - rank * weight.shape[0]
    inside = ((local >= 0) & (local < weight.shape[0])).unsqueeze(-1)
    rows = F.embedding(local.clamp(0, weight.shape[0] - 1), weight)
    if padding is not None and padding >= 0:  # no gradient for it
        rows = torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)
    return summed(torch.where(inside, rows, torch.zeros_like(rows)), group)


def _sequence(norm: Callable[..., torch.Tensor]) -> Callable[[Given, Group, tuple[int, ...]], torch.Tensor]:
    def sequence_norm(given: Given, group: Group, shape: tuple[int, ...]) -> torch.Tensor:
        x = given["input"]
        kept = {name: given[name] for name in ("weight", "bias") if isinstance(given.get(name), tuple)}
        rank = next(iter(kept.values()))[1]
        options = {name: value for name, value in given.items() if name not in ("input", *kept)}
        weights = {name: copied(parts[0], group) for name, parts in kept.items()}
        return gathered_dim(norm(share(x, rank, group, -2), **options, **weights), group, -2, x.shape[-2])

    return sequence_norm


_LAYERS: dict[tuple[str, str], Callable[[Given, Group, tuple[int, ...]], torch.Tensor]] = {
    ("column", LINEAR): column_linear,
    ("embedding", LINEAR): column_linear,  # a head that is tied to an embedding
    ("row", LINEAR): row_linear,
    ("column", EMBEDDING): vocabulary_embedding,
    ("embedding", EMBEDDING): vocabulary_embedding,
    ("sequence", LAYER_NORM): _sequence(F.layer_norm),
    ("sequence", RMS_NORM): _sequence(F.rms_norm),
}


# ---- the step ----


@dataclass(frozen=True)
class TensorParallel:
    """The step of `tensor_parallel`: what each rank keeps of the weights that a plan names."""

    group: Group
    plan: tuple[tuple[str, str], ...]
    of_weights: ClassVar[bool] = True

    def style(self, name: str, type: TensorType) -> str | None:
        """How a parameter is split; None if it is not. Biases of columns and rows are added to whole results."""
        style = next((style for pattern, style in self.plan if fnmatch.fnmatchcase(name, pattern)), None)
        dims = len(static_shape(type))
        if not type.dtype.is_floating_point or 0 in static_shape(type):
            return None
        return style if (dims == 2) != (style == "sequence") and dims in (1, 2) else None

    def split_dim(self, name: str, type: TensorType) -> int | None:
        """The dim of a parameter of which each rank has a share; None if every rank has the whole."""
        style = self.style(name, type)
        return None if style in (None, "sequence") else _dim_of(style)

    def __call__(self, name: str, type: TensorType) -> Representation | None:
        style = self.style(name, type)
        return None if style is None else split(self.group, style, type)


def _dim_of(style: str) -> int:
    return 1 if style == "row" else 0


@memo(4096)
def split(group: Group, style: str, type: TensorType) -> Representation:
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
        return w.clone() if style == "sequence" else gathered_dim(w, group, dim, shape[dim])

    encoded = traced(encode, type)
    parts = tuple(part for part in encoded.output_types if isinstance(part, TensorType))
    return Representation(
        "tensor_parallel", type, ("", RANK), encoded, traced(decode, *parts), rule=_Layers(group, style)
    )


@dataclass(frozen=True)
class _Layers:
    """The rule: layers that each rank computes its share of."""

    group: Group
    style: str

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Trace | None:
        layer, names = _LAYERS.get((self.style, equation.op.name)), _NAMES.get(equation.op.name)
        mine = [one for one in kept if one is not None]
        if layer is None or names is None or any(one.rule != self for one in mine):
            return None
        arguments = dict(zip(names, equation.args, strict=False)) | dict(equation.kwargs)
        if not _fits(equation, arguments, kept):
            return None
        shape, precision = static_shape(mine[0].type), equation.outputs[0].type

        def call(*values: torch.Tensor) -> torch.Tensor:
            supply, found = iter(values), dict[int, Any]()
            for var, one in zip(equation.operands, kept, strict=True):
                given = tuple(next(supply) for _ in (one.part_types if one is not None else (None,)))
                given = tuple(in_precision(value, precision) for value in given)
                found[var.index] = given if one is not None else given[0]
            read = {name: python_arg(arg, lambda var: found[var.index]) for name, arg in arguments.items()}
            return layer(read, self.group, shape)

        types = [
            type
            for var, one in zip(equation.operands, kept, strict=True)
            for type in (one.part_types if one is not None else (var.type,))
            if isinstance(type, TensorType)
        ]
        return traced(call, *types)


def _fits(equation: Equation, arguments: dict[str, Any], kept: tuple[Representation | None, ...]) -> bool:
    """The weights are where weights belong, and an embedding has no options that change its weight."""
    places = {arg.index: name for name, arg in arguments.items() if isinstance(arg, Var)}
    weights = [places.get(var.index) for var, one in zip(equation.operands, kept, strict=True) if one is not None]
    if equation.op.name in (LINEAR, EMBEDDING) and weights != ["weight"]:
        return False
    if not set(weights) <= {"weight", "bias"} or len(set(places)) != len(equation.operands):
        return False
    options = (arguments.get(name) for name in ("scale_grad_by_freq", "sparse"))
    return all(not isinstance(arg, Literal) or not arg.value for arg in options)


def read_plan(plan: Any) -> tuple[tuple[str, str], ...]:
    """Patterns on names and how the parameters are split.

    Raises:
        RewriteError: there is no such way.
    """
    for style in dict(plan).values():
        if style not in STYLES:
            raise RewriteError(f"tensor_parallel: a weight is split by {', '.join(STYLES)}; given {style!r}")
    return tuple(dict(plan).items())
