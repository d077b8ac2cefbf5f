"""Activations of which each rank has a share along a dim, until an op needs all of them.

A column of a layer computes such a share. Ops that treat the places along the dim alike work on
shares as they are. These are pointwise ops, views that keep the dim's ranks apart, and attention
whose heads are split. So a column layer, an activation function and a row layer send one sum, as
Megatron-LM's pairs do. Heads are split where the matrices before and after them are. An op that is
not in the table here gets the gathered value, which is always right.

Shares are even: a dim that the ranks do not divide is gathered where it is computed.

Source: Megatron-LM, section 3 (arXiv:1909.08053).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn.distributed.collectives import divided_gradient
from thunder_fn.distributed.groups import Group
from thunder_fn.interpreters.rewriting.representation import Kept, Representation
from thunder_fn.interpreters.rewriting.tracing import traced, traced_on_parts
from thunder_fn.interpreters.tensor_parallel.crossings import (
    chunks_of,
    collected,
    copied,
    gathered_dim,
    joined_chunks,
    share,
)
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace, Var, python_arg, static_shape

RANK = "rank"
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
_CALLS: Mapping[str, Callable[..., Any]] = {
    ATTENTION: F.scaled_dot_product_attention,
    "torch.matmul": torch.matmul,
}
"""Composites that have rules, and what they call: their bodies put together dims that are split."""
Dims = Mapping[int, int]
"""The dim along which each operand is split, by the operand's index; others are whole."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an op on shares.

    Args:
        dim: along which its results are split.
        align: whole operands that have this dim, counted from the end, are cut along it; others are
            taken as they are.
        changed: other values for arguments, by position.
    """

    dim: int
    align: int | None = None
    changed: Mapping[int, Any] | None = None


@memo(4096)
def shares(group: Group, type: TensorType, dim: int) -> Representation:
    """A value of this type of which each rank has a share along a dim."""
    shape = static_shape(type)
    local = replace(type, shape=_cut(shape, dim, group.size))
    rank = TensorType(torch.int64, (), type.device)

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.full((), group.rank, device=x.device)
        return share(x, place, group, dim), place

    def decode(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        return gathered_dim(x, rank, group, dim, shape[dim])

    return Representation(
        "shares",
        type,
        ("", RANK),
        traced(encode, type),
        traced(decode, local, rank),
        rule=OnShares(group, dim),
        of_results=True,
    )


@memo(4096)
def copies(group: Group, type: TensorType, chunks: int = 1) -> Representation:
    """A value of this type that all ranks have, of whose gradient each knows a part. In chunks of
    its positions, each of which is a part of the representation.
    """
    cut = lambda x: chunks_of(x, group, chunks) if chunks > 1 else (x,)
    joined = lambda parts: joined_chunks(parts, group) if chunks > 1 else parts[0]
    encode = traced(lambda x: cut(copied(x, group)), type)
    parts = (part for part in encode.output_types if isinstance(part, TensorType))
    whole = lambda *parts: divided_gradient(joined(parts), group.size)
    suffixes = ("",) if chunks == 1 else tuple(map(str, range(chunks)))
    decode, rule = traced(whole, *parts), Copies(group, chunks)
    return Representation(
        "copies", type, suffixes, encode, decode, rule=rule, converted=rule.converted
    )


@dataclass(frozen=True)
class Copies:
    """The rule: only column layers take such a value as it is; see `_Layers`."""

    group: Group
    chunks: int = 1

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> None:
        return None

    def converted(self, kept: Representation) -> Trace | None:
        """Convert shares: collecting them adds up the gradients of all ranks. Chunks of positions
        are collected one by one.
        """
        if not isinstance(kept.rule, OnShares) or kept.rule.group != self.group:
            return None
        group, dim, chunks = self.group, kept.rule.dim, self.chunks
        shape = static_shape(kept.type)
        size = shape[dim]

        def collect(x: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if chunks > 1 and dim != len(shape) - 2:
                return chunks_of(collected(x, rank, group, dim, size), group, chunks)
            parts = x.chunk(chunks, dim)
            return tuple(collected(part, rank, group, dim, size // chunks) for part in parts)

        types = (one for one in kept.part_types if isinstance(one, TensorType))
        return traced(collect, *types)


def divides(group: Group, type: Any, dim: int) -> bool:
    """Test whether each rank has as much of a dim."""
    if not isinstance(type, TensorType) or not -len(type.shape) <= dim < len(type.shape):
        return False
    return static_shape(type)[dim] % group.size == 0


@dataclass(frozen=True)
class OnShares:
    """The rule: ops that work on shares along a dim as they are."""

    group: Group
    dim: int

    def __call__(self, equation: Equation, kept: tuple[Representation | None, ...]) -> Kept | None:
        dims: dict[int, int] = {}
        for var, one in zip(equation.operands, kept, strict=True):
            if one is not None:
                if not isinstance(one.rule, OnShares) or one.rule.group != self.group:
                    return None
                dims[var.index] = one.rule.dim
        types = equation.output_types
        answer = _answer(equation, dims, self.group.size)
        if answer is None or not all(divides(self.group, type, answer.dim) for type in types):
            return None
        results = tuple(
            shares(self.group, type, answer.dim) for type in types if isinstance(type, TensorType)
        )
        trace = self.on_shares(equation, kept, answer)
        as_expected = trace.output_types == tuple(
            type for one in results for type in one.part_types
        )
        return Kept(trace, results) if as_expected else None

    def on_shares(
        self, equation: Equation, kept: tuple[Representation | None, ...], answer: Answer
    ) -> Trace:
        """The op on this rank's operands; the rank goes with each result."""
        function = _CALLS.get(equation.op.name) or ops.overload(equation.op)
        arguments = {**dict(enumerate(equation.args)), **(answer.changed or {})}

        def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            supply, found, ranks = iter(values), dict[int, torch.Tensor](), list[torch.Tensor]()
            for var, one in zip(equation.operands, kept, strict=True):
                found[var.index] = next(supply)
                if one is not None:
                    ranks.append(next(supply))
            for var, one in zip(equation.operands, kept, strict=True):
                if one is None:
                    found[var.index] = self.aligned(found[var.index], answer.align, ranks[0])
            read: Callable[[Var], torch.Tensor] = lambda var: found[var.index]
            results = function(
                *(python_arg(arguments[at], read) for at in range(len(equation.args))),
                **{key: python_arg(value, read) for key, value in equation.kwargs},
            )
            return tuple(
                item for result in ops.flatten_result(results) for item in (result, ranks[0])
            )

        return traced_on_parts(call, equation, kept)

    def aligned(self, x: torch.Tensor, align: int | None, rank: torch.Tensor) -> torch.Tensor:
        """The part of a whole operand that this rank needs; gradients of all ranks are added."""
        if align is not None and x.dim() >= -align and x.shape[align] != 1:
            return share(x, rank, self.group, align)
        return copied(x, self.group) if x.is_floating_point() or x.is_complex() else x


def _cut(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])


# ---- which ops work on shares ----


def _answer(equation: Equation, dims: Dims, size: int) -> Answer | None:
    if not all(isinstance(var.type, TensorType) for var in (*equation.operands, *equation.outputs)):
        return None
    rule = _RULES.get(equation.op.name)
    if rule is not None:
        return rule(equation, dims, size)
    is_pointwise = (
        ops.is_pointwise(equation.op) and not ops.draws(equation) and len(equation.outputs) == 1
    )
    return _alike(equation, dims, size) if is_pointwise else None


def _shape(var: Any) -> tuple[int, ...]:
    assert isinstance(var.type, TensorType), "a tensor has a tensor's type"
    return static_shape(var.type)


def _alike(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """Pointwise ops: operands are split at the same places, counted from the end, as they are
    broadcast.
    """
    from_end = {
        dims[var.index] - len(_shape(var)) for var in equation.operands if var.index in dims
    }
    if len(from_end) != 1:
        return None
    (align,) = from_end
    (out,) = equation.outputs
    lengths = {_shape(var)[align] for var in equation.operands if var.index in dims}
    return Answer(len(_shape(out)) + align, align) if lengths == {_shape(out)[align]} else None


Rule = Callable[[Equation, Dims, int], Answer | None]
"""`rule(equation, dims, size)` answers for ranks of so many; None if they cannot have shares."""


def _first(equation: Equation, dims: Dims) -> tuple[tuple[int, ...], int] | None:
    """The shape of the first argument and the dim along which it is split; None if that is not
    all that is split.
    """
    first = equation.args[0]
    if not isinstance(first, Var) or len(dims) != 1 or first.index not in dims:
        return None
    return _shape(first), dims[first.index]


def _number(equation: Equation, position: int, default: int = 0) -> int:
    if position >= len(equation.args):
        return default
    arg = equation.args[position]
    return arg.value if isinstance(arg, Literal) and isinstance(arg.value, int) else default


def _numbers(arg: Any) -> list[int] | None:
    found = python_arg(arg, lambda _: None)
    return (
        found if isinstance(found, list) and all(isinstance(item, int) for item in found) else None
    )


def _reshape(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """A dim that begins where the split one does, and that the ranks divide, is split as that
    was.
    """
    first = _first(equation, dims)
    if first is None:
        return None
    (shape, dim), new = first, _shape(equation.outputs[0])
    for at, length in enumerate(new):
        if (
            math.prod(new[:at]) == math.prod(shape[:dim])
            and length % size == 0
            and math.prod(shape)
        ):
            lengths = tuple(map(Literal, _cut(new, at, size)))
            return Answer(at, changed={1: lengths})
    return None


def _moved(place: Callable[[Equation, int, int], int | None]) -> Rule:
    """Ops of one operand: its rank and its split dim say which dim of the result is split, or that
    it cannot be.
    """

    def rule(equation: Equation, dims: Dims, size: int) -> Answer | None:
        first = _first(equation, dims)
        found = None if first is None else place(equation, len(first[0]), first[1])
        return None if found is None else Answer(found)

    return rule


@_moved
def _transpose(equation: Equation, rank: int, dim: int) -> int:
    one, other = (_number(equation, position) % rank for position in (1, 2))
    return {one: other, other: one}.get(dim, dim)


@_moved
def _permute(equation: Equation, rank: int, dim: int) -> int | None:
    order = _numbers(equation.args[1])
    return None if order is None else [place % rank for place in order].index(dim)


@_moved
def _unsqueeze(equation: Equation, rank: int, dim: int) -> int:
    return dim + (_number(equation, 1) % (rank + 1) <= dim)


def _expand(equation: Equation, dims: Dims, size: int) -> Answer | None:
    first, lengths = _first(equation, dims), _numbers(equation.args[1])
    if first is None or lengths is None:
        return None
    shape, dim = first
    dim += len(lengths) - len(shape)
    return Answer(
        dim, changed={1: tuple(map(Literal, _cut(_shape(equation.outputs[0]), dim, size)))}
    )


def _along(position: int) -> Rule:
    """Ops that do something along one dim, which is not the split one and stays where it is."""
    return _moved(
        lambda equation, rank, dim: None if _number(equation, position) % rank == dim else dim
    )


@_moved
def _select(equation: Equation, rank: int, dim: int) -> int | None:
    """The dim that is selected from goes."""
    gone = _number(equation, 1) % rank
    return None if gone == dim else dim - (gone < dim)


def _cat(equation: Equation, dims: Dims, size: int) -> Answer | None:
    rank = len(_shape(equation.outputs[0]))
    split = set(dims.values())
    if len(split) != 1 or any(len(_shape(var)) != rank for var in equation.operands):
        return None
    (dim,) = split
    return Answer(dim, dim - rank) if _number(equation, 1) % rank != dim else None


def _stack(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """A new dim, before the split one or behind it."""
    rank = len(_shape(equation.outputs[0]))
    split = {dims.get(var.index) for var in equation.operands}
    if len(split) != 1 or None in split:
        return None
    (dim,) = set(dims.values())
    return Answer(dim + (_number(equation, 1) % rank <= dim))


def _norm(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """The dims that are normalised are not split."""
    first, normalised = equation.args[0], _numbers(equation.args[1])
    if not isinstance(first, Var) or set(dims) != {first.index} or normalised is None:
        return None
    dim = dims[first.index]
    return Answer(dim) if dim < len(_shape(first)) - len(normalised) else None


@_moved
def _reduce(equation: Equation, rank: int, dim: int) -> int | None:
    """Sums and the like over other dims."""
    over = _numbers(equation.args[1]) if len(equation.args) > 1 else None
    gone = {place % rank for place in over or ()}
    if not gone or dim in gone:
        return None
    keeps = len(_shape(equation.outputs[0])) == rank
    return dim if keeps else dim - sum(place < dim for place in gone)


def _product(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """Matrix products whose batches, rows or columns are split."""
    if len(equation.args) != 2 or len({var.index for var in equation.operands}) != 2:
        return None
    first, second = (len(_shape(var)) for var in equation.operands)
    one, other = (dims.get(var.index) for var in equation.operands)
    out = len(_shape(equation.outputs[0]))
    if first == second == out > 2 and one is not None and one == other and one < out - 2:
        return Answer(one)
    if first == out >= 2 and (one, other) == (out - 2, None) and second in (2, out):
        return Answer(out - 2)
    return Answer(out - 1) if second == out >= 2 and (one, other) == (None, out - 1) else None


def _attention(equation: Equation, dims: Dims, size: int) -> Answer | None:
    """Queries, keys and values are split by heads, a mask too, if it has any; nothing is
    dropped.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    if equation.op.kind == "leaf":
        names = ("query", "key", "value", "dropout_p")
    options = dict(zip(names, equation.args, strict=False))
    options |= dict(equation.kwargs)
    three = [options.get(name) for name in ("query", "key", "value")]
    is_split = all(
        isinstance(one, Var) and dims.get(one.index) == len(_shape(one)) - 3 for one in three
    )
    dropped, mask = options.get("dropout_p"), options.get("attn_mask")
    drops = isinstance(dropped, Literal) and dropped.value != 0
    if not is_split or drops or (isinstance(mask, Var) and mask.index in dims):
        return None
    return Answer(len(_shape(equation.outputs[0])) - 3, -3)


_SAME = (
    "clone.default",
    "detach.default",
    "alias.default",
    "_to_copy.default",
    "contiguous.default",
)
_VIEWS = ("reshape.default", "view.default", "_unsafe_view.default")
_REDUCTIONS = ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default")
_RULES: dict[str, Rule] = {
    ATTENTION: _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    **{f"aten.{name}": _alike for name in _SAME},
    **{f"aten.{name}": _reshape for name in _VIEWS},
    **{f"aten.{name}": _reduce for name in _REDUCTIONS},
    "aten.transpose.int": _transpose,
    "aten.t.default": _moved(lambda equation, rank, dim: rank - 1 - dim),
    "aten.permute.default": _permute,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.expand.default": _expand,
    "aten.select.int": _select,
    "aten.slice.Tensor": _along(1),
    "aten.split.Tensor": _along(2),
    "aten.split_with_sizes.default": _along(2),
    "aten.unbind.int": _select,
    "aten._softmax.default": _along(1),
    "aten._log_softmax.default": _along(1),
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.native_layer_norm.default": _norm,
    "aten._fused_rms_norm.default": _norm,
    "torch.matmul": _product,
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
}
