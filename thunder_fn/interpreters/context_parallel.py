"""Context parallelism: each rank has a part of the positions, and attention is computed together.

Two ways, both in place of each `scaled_dot_product_attention` of a trace. A ring sends keys and
values around, and adds up the attention to each part with the softmax's running maximum and sum.
The whole is one checkpoint, so that a backward sends them around again in place of storing them.
The other way sends heads for positions and back (all-to-all): then a rank has all positions of
some heads.

In the balanced order a rank has a part from the front of the sequence and one from its end
(zig-zag). So in each step of a causal ring every rank computes as much, half of what a ring without
causality computes. In the plain order the last rank does all the work, and the others wait.

Everything else in the function has to act on each position alone.

Sources: ring attention (arXiv:2310.01889), DeepSpeed-Ulysses (arXiv:2309.14509), the running
softmax of FlashAttention (arXiv:2205.14135), the order of Llama 3 (arXiv:2407.21783, 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn.capture.replaced.lookasides import Lookaside
from thunder_fn.capture.scopes import composite
from thunder_fn.derived.quirks.attention import KERNELS
from thunder_fn.distributed.collectives import all_gathered, collectives
from thunder_fn.distributed.groups import Group
from thunder_fn.errors import RewriteError
from thunder_fn.interpreters.checkpoint.policies import nothing_saveable
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.interpreters.tensor_parallel.shares import ATTENTION
from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Atom, Equation, Literal, TensorType, Trace, TraceBuilder, Var
from thunder_fn.ir.walking import put, rewritten
from thunder_fn.structured.checkpoint import alone

Tensor = torch.Tensor
_NAMES = (*("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"), "enable_gqa")


# ---- the positions of a rank ----


@dataclass(frozen=True)
class Positions:
    """The positions that each rank of a group has.

    Args:
        balanced: of twice as many parts as there are ranks, rank r has the r-th and the r-th from
            the end. Otherwise it has the r-th of as many parts as there are ranks.
    """

    group: Group
    balanced: bool

    def numbers(self, rank: int) -> tuple[int, ...]:
        """The parts that a rank has, in the order of positions."""
        return (rank, 2 * self.group.size - 1 - rank) if self.balanced else (rank,)

    @property
    def parts(self) -> int:
        """The number of parts of a sequence."""
        return self.group.size * (1 + self.balanced)

    def part(self, x: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """A rank's part of a dim that has all positions; this rank's, unless one is given.

        Raises:
            RewriteError: the positions do not divide.
        """
        if x.shape[dim] % self.parts:
            what = f"context_parallel: {x.shape[dim]} positions are no {self.parts} equal parts"
            raise RewriteError(what, fix="Pad the sequence.")
        parts = x.chunk(self.parts, dim)
        own = [parts[at] for at in self.numbers(self.group.rank if rank is None else rank)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the parts of all ranks to all positions: the inverse of `part`."""
        if not self.balanced:
            return torch.cat(list(parts), dim)
        front, back = zip(*(part.chunk(2, dim) for part in parts), strict=True)
        return torch.cat([*front, *reversed(back)], dim)


# ---- masks ----


@composite
def attention_to_all(  # noqa: PLR0913 - the signature of PyTorch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention whose mask has columns for the keys of all ranks. A rank that is alone takes its
    own keys for those of the others.
    """
    ranks = attn_mask.shape[-1] // key.shape[-2]
    key, value = (torch.cat([x] * ranks, -2) for x in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


TO_ALL = attention_to_all.__composite__  # type: ignore[attr-defined]


def seeing_all(group: Group) -> Lookaside:
    """The lookaside with which a function is captured whose masks have columns for all ranks'
    keys: PyTorch knows the keys of one.
    """

    def attention(  # noqa: PLR0913 - the signature of PyTorch's
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        keys = key.shape[-2]
        if attn_mask is not None and keys < attn_mask.shape[-1] == group.size * keys:
            return attention_to_all(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return Lookaside(F.scaled_dot_product_attention, attention)


# ---- the interpreter ----


@memo(64)
def context_parallel(trace: Trace, positions: Positions, kind: str) -> Trace:
    """Replace each attention of a trace by one over the positions of all ranks.

    Law: if everything else acts on each position alone, rank r computes ``positions.part`` of what
        the trace computes on all positions.

    Raises:
        RewriteError: an attention has dropout, a mask, or numbers of positions or heads that do not
            fit; names the user's line.
    """

    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> Sequence[Atom]:
        if equation.op.name in (ATTENTION, TO_ALL):
            body = _attention(equation, positions, kind)
            op = ops.composite("context_parallel_attention")
            types, source = equation.output_types, equation.source
            return builder.add(op, operands, types, bodies=(body,), source=source)
        if equation.op.name in KERNELS:
            _refuse(equation, f"{equation.op} is called without scaled_dot_product_attention")
        bodies = tuple(context_parallel(body, positions, kind) for body in equation.bodies)
        if bodies == equation.bodies:
            return put(builder, equation, operands)
        if equation.op.kind != "composite":
            return put(builder, equation, operands, bodies=bodies)
        op, types = ops.composite(ops.short_name(equation.op)), equation.output_types
        return builder.add(op, operands, types, bodies=bodies, source=equation.source)

    return rewritten(trace, step)


def _attention(equation: Equation, positions: Positions, kind: str) -> Trace:
    """The attention of an equation, over the positions of all ranks.

    Inputs: the equation's operands. Outputs: its result.
    """
    named = dict(zip(_NAMES, equation.args, strict=False)) | dict(equation.kwargs)
    values = {name: arg.value for name, arg in named.items() if isinstance(arg, Literal)}
    vars = {name: arg for name, arg in named.items() if isinstance(arg, Var)}
    types = {name: var.type for name, var in vars.items() if isinstance(var.type, TensorType)}
    if values.get("dropout_p"):
        _refuse(equation, "attention drops weights")
    if not {"query", "key", "value"} <= types.keys() <= {*_NAMES[:4]} or len(types) < len(vars):
        _refuse(equation, "attention of other things than a query, keys and values")
    ring = Attention(
        positions,
        is_causal=bool(values.get("is_causal")),
        scale=values.get("scale"),
        grouped=bool(values.get("enable_gqa")),
    )
    ring.check(equation, types, kind)
    order = tuple(vars[name].index for name in types)

    def run(*operands: Tensor) -> Tensor:
        found = {var.index: x for var, x in zip(equation.operands, operands, strict=True)}
        q, k, v, *mask = (found[index] for index in order)
        return _KINDS[kind](ring, q, k, v, mask[0] if mask else None)

    given = (type for type in equation.operand_types if isinstance(type, TensorType))
    body = traced(run, *given)
    return alone(body, nothing_saveable) if kind == "ring" else body


def _refuse(equation: Equation, why: str, fix: str = "") -> None:
    fix = fix or 'Use `F.scaled_dot_product_attention(q, k, v, is_causal=...)`, or kind="ring".'
    raise RewriteError(f"context_parallel: {why}", source=equation.source, fix=fix)


@dataclass(frozen=True)
class Attention:
    """The options of an attention over the positions of all ranks."""

    positions: Positions
    is_causal: bool
    scale: float | None
    grouped: bool

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.positions.group

    @property
    def is_cut(self) -> bool:
        """True if queries and keys of a rank are two parts, of which some see no others."""
        return self.is_causal and self.positions.balanced

    def check(self, equation: Equation, types: Mapping[str, TensorType], kind: str) -> None:
        """Refuse numbers of positions or heads that do not fit, and masks of other positions."""
        query, key, size = types["query"], types["key"], self.group.size
        own, others = query.shape[-2], key.shape[-2]
        if self.is_causal and own != others:
            _refuse(equation, "causal attention to another number of positions")
        if self.positions.balanced and any(isinstance(n, int) and n % 2 for n in (own, others)):
            _refuse(equation, f"{own} positions of a rank are no two parts", "Pad the sequence.")
        if kind == "all_to_all" and any(
            len(types[name].shape) < 3
            or not isinstance(heads := types[name].shape[-3], int)
            or heads % size
            for name in ("query", "key", "value")
        ):
            _refuse(equation, f"the numbers of heads are no multiples of {size} ranks")
        mask = types.get("attn_mask")
        if mask is None:
            return
        rows, columns = (1, 1, *mask.shape)[-2:]
        if not isinstance(others, int) or not isinstance(columns, int):
            return
        if rows not in (1, own) or columns not in (1, others * size):
            _refuse(
                equation,
                f"a mask of {rows} rows and {columns} columns for {own} queries of this rank and"
                f" {others * size} keys of all ranks",
                "Give this rank's rows of the mask, with columns for the keys of all ranks in the"
                " order of positions.",
            )


# ---- a ring ----


def passed_on(x: Tensor, group: Group) -> Tensor:
    """The values of the rank before this one."""
    sizes = [[0] * group.size for _ in range(2)]
    sizes[0][(group.rank - 1) % group.size] = x.numel()
    sizes[1][(group.rank + 1) % group.size] = x.numel()
    flat = collectives.all_to_all_single(x.reshape(-1), *sizes, group.name)
    return collectives.wait_tensor(flat).reshape(x.shape)


def ring_attention(one: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, which go around."""
    group, wide = one.group, torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide) * (1 / math.sqrt(q.shape[-1]) if one.scale is None else one.scale)
    rows = _halves(queries, one.is_cut)
    sums: list[Sums | None] = [None] * len(rows)
    for step in range(group.size):
        source = (group.rank - step) % group.size
        keys, values = (_halves(_for_heads(x, q, one.grouped).to(wide), one.is_cut) for x in (k, v))
        for row, column, seen in _blocks(one, source, rows, mask):
            sums[row] = _added(sums[row], rows[row], keys[column], values[column], seen)
        if step + 1 < group.size:
            k, v = passed_on(k, group), passed_on(v, group)
    return torch.cat([_result(part, mask) for part in sums], -2).to(q.dtype)


def _halves(x: Tensor, is_cut: bool) -> tuple[Tensor, ...]:
    return x.chunk(2, -2) if is_cut else (x,)


def _for_heads(x: Tensor, q: Tensor, grouped: bool) -> Tensor:
    """Keys or values, repeated for the heads that share them."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if grouped else x


def _blocks(
    one: Attention, source: int, rows: Sequence[Tensor], mask: Tensor | None
) -> Iterator[tuple[int, int, Tensor | None]]:
    """The blocks of this rank's queries and another's keys that are computed, and their masks.

    A block of later keys is left out where the order is balanced, because some query sees the keys
    of each rank. In the plain order it is computed and hidden: ranks whose gradients of keys are
    nothing would send none, and others would wait for them.
    """
    if not one.is_causal:
        yield 0, 0, _columns(one.positions, mask, source)
        return
    own, others = one.positions.numbers(one.group.rank), one.positions.numbers(source)
    for row, at in enumerate(own):
        for column, place in enumerate(others):
            length = rows[row].shape[-2]
            ones = torch.ones(length, length, dtype=torch.bool, device=rows[row].device)
            if place <= at:
                yield row, column, ones.tril() if place == at else None
            elif not one.is_cut:
                yield row, column, torch.zeros_like(ones)


def _columns(positions: Positions, mask: Tensor | None, source: int) -> Tensor | None:
    """A mask for the keys of a rank."""
    return mask if mask is None or mask.shape[-1] == 1 else positions.part(mask, -1, source)


Sums = tuple[Tensor, Tensor, Tensor]
"""For each query: the highest score, the sums of weights and of weighted values."""


def _added(
    sums: Sums | None, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Sums:
    """The sums with those of some keys. A mask is of bools, or is added to scores."""
    scores = queries @ keys.transpose(-1, -2)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask
    highest = scores.amax(-1, keepdim=True).detach()
    if sums is not None:
        highest = torch.maximum(highest, sums[0])
    at = highest if mask is None else highest.masked_fill(highest == -math.inf, 0.0)
    weights = (scores - at).exp()  # a query that sees nothing has zeros
    total, result = weights.sum(-1, keepdim=True), weights @ values
    if sums is not None:
        kept = (sums[0] - at).exp()
        total, result = sums[1] * kept + total, sums[2] * kept + result
    return highest, total, result


def _result(sums: Sums | None, mask: Tensor | None) -> Tensor:
    """Weighted values; zeros for a query that sees nothing, as PyTorch has them."""
    assert sums is not None, "a rank attends to its own positions"
    _, total, result = sums
    return result / (total if mask is None else total.masked_fill(total == 0, 1.0))


# ---- heads for positions ----


def exchanged(x: Tensor, group: Group, taken: int, given: int) -> Tensor:
    """All of a dim, and this rank's part of another, in place of the other way round: dim `taken`
    is cut among ranks, and parts of dim `given` come together.
    """
    parts = torch.stack(x.chunk(group.size, taken))
    sizes = [1] * group.size
    sent = collectives.all_to_all_single(parts.contiguous(), sizes, sizes, group.name)
    return torch.cat(collectives.wait_tensor(sent).unbind(), given)


def attention_of_heads(
    one: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention of this rank's heads over all positions."""
    ranks, at = range(one.group.size), one.positions
    rows = None if mask is None else _of_heads(one, mask, q)
    q, k, v = (_in_order(at, exchanged(x, one.group, -3, -2)) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=rows, is_causal=one.is_causal, scale=one.scale, enable_gqa=one.grouped
    )
    parts = torch.cat([at.part(y, -2, rank) for rank in ranks], -2) if at.balanced else y
    return exchanged(parts, one.group, -2, -3)


def _in_order(positions: Positions, x: Tensor) -> Tensor:
    """The parts of all ranks, one after the other, in the order of positions."""
    return positions.joined(x.chunk(positions.group.size, -2), -2) if positions.balanced else x


def _of_heads(one: Attention, mask: Tensor, q: Tensor) -> Tensor:
    """A mask for all queries of this rank's heads, from one for its own queries."""
    group, heads = one.group, mask.shape[-3] if mask.dim() > 2 else 1
    if mask.dim() < 2 or mask.shape[-2] != q.shape[-2]:  # one row for all queries
        return mask if heads == 1 else mask.chunk(group.size, -3)[group.rank]
    sent = mask.to(torch.uint8) if mask.dtype == torch.bool else mask
    if heads == 1:
        first = sent.movedim(-2, 0)
        whole = all_gathered(first.reshape(-1), group).unflatten(0, (-1, *first.shape[1:]))
        found = whole.movedim(0, -2)
    else:
        found = exchanged(sent, group, -3, -2)
    return _in_order(one.positions, found).to(mask.dtype)


_KINDS: Mapping[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "all_to_all": attention_of_heads,
}
KINDS = tuple(_KINDS)
