"""Context parallelism: each rank has a part of the positions, and attention is computed together.

Two ways, both in place of each `scaled_dot_product_attention` of a trace. A ring sends keys and
values around, and adds up the attention to each part with the softmax's running maximum and sum.
The whole is one checkpoint, so that a backward sends them around again in place of storing them.
The other way sends heads for positions and back (all-to-all): then a rank has all positions of
some heads.

Everything else in the function has to act on each position alone.

Sources: ring attention (arXiv:2310.01889), DeepSpeed-Ulysses (arXiv:2309.14509), the running
softmax of FlashAttention (arXiv:2205.14135).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from thunder_fn.derived.quirks.attention import KERNELS
from thunder_fn.distributed.collectives import collectives
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
_NAMES = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"),
    "enable_gqa",
)


@memo(64)
def context_parallel(trace: Trace, group: Group, kind: str) -> Trace:
    """Replace each attention of a trace by one over the positions of all ranks.

    Law: if everything else acts on each position alone, rank r computes the r-th part of what the
        trace computes on the positions of all ranks, one after the other.

    Raises:
        RewriteError: an attention has a mask or dropout, or numbers of positions or heads that do
            not fit; names the user's line.
    """

    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> Sequence[Atom]:
        if equation.op.name == ATTENTION:
            return _put_attention(builder, equation, operands, group, kind)
        if equation.op.name in KERNELS:
            _refuse(equation, f"{equation.op} is called without scaled_dot_product_attention")
        bodies = tuple(context_parallel(body, group, kind) for body in equation.bodies)
        if bodies == equation.bodies:
            return put(builder, equation, operands)
        if equation.op.kind != "composite":
            return put(builder, equation, operands, bodies=bodies)
        op, types = ops.composite(ops.short_name(equation.op)), equation.output_types
        return builder.add(op, operands, types, bodies=bodies, source=equation.source)

    return rewritten(trace, step)


def _put_attention(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    group: Group,
    kind: str,
) -> tuple[Atom, ...]:
    given = dict(zip(_NAMES, equation.args, strict=False)) | dict(equation.kwargs)
    values = {name: arg.value for name, arg in given.items() if isinstance(arg, Literal)}
    is_causal, grouped = bool(values.get("is_causal")), bool(values.get("enable_gqa"))
    if isinstance(given.get("attn_mask"), Var):
        _refuse(equation, "attention has a mask")
    if values.get("dropout_p"):
        _refuse(equation, "attention drops weights")
    types = tuple(var.type for var in equation.operands if isinstance(var.type, TensorType))
    if len(types) != 3 or len(operands) != 3:
        _refuse(equation, "attention of other things than a query, keys and values")
    query, key, _ = types
    if is_causal and query.shape[-2] != key.shape[-2]:
        _refuse(equation, "causal attention to another number of positions")
    if kind == "all_to_all" and any(
        len(type.shape) < 3 or not isinstance(heads := type.shape[-3], int) or heads % group.size
        for type in types
    ):
        _refuse(equation, f"the numbers of heads are no multiples of {group.size} ranks")
    scale = values.get("scale")
    body = _attention(group, kind, is_causal, scale, grouped, types)
    op = ops.composite("context_parallel_attention")
    return builder.add(op, operands, equation.output_types, bodies=(body,), source=equation.source)


def _refuse(equation: Equation, why: str) -> None:
    fix = 'Use `F.scaled_dot_product_attention(q, k, v, is_causal=...)`, or kind="ring".'
    raise RewriteError(f"context_parallel: {why}", source=equation.source, fix=fix)


def _attention(
    group: Group,
    kind: str,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
    types: tuple[TensorType, ...],
) -> Trace:
    run = _KINDS[kind]
    body = traced(lambda q, k, v: run(q, k, v, group, is_causal, scale, grouped), *types)
    return alone(body, nothing_saveable) if kind == "ring" else body


# ---- a ring ----


def passed_on(x: Tensor, group: Group) -> Tensor:
    """The values of the rank before this one."""
    sizes = [[0] * group.size for _ in range(2)]
    sizes[0][(group.rank - 1) % group.size] = x.numel()
    sizes[1][(group.rank + 1) % group.size] = x.numel()
    flat = collectives.all_to_all_single(x.reshape(-1), *sizes, group.name)
    return collectives.wait_tensor(flat).reshape(x.shape)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, which go around."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    highest = queries.new_full((*queries.shape[:-1], 1), -math.inf)
    total, result = torch.zeros_like(highest), None
    for step in range(group.size):
        keys, values = _for_heads(k, q, grouped).to(wide), _for_heads(v, q, grouped).to(wide)
        scores = queries @ keys.transpose(-1, -2)
        source = (group.rank - step) % group.size
        if is_causal and source >= group.rank:  # also later ones, lest ranks send different things
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            seen = seen.tril() if source == group.rank else torch.zeros_like(seen)
            scores = scores.masked_fill(~seen, -math.inf)
        new = torch.maximum(highest, scores.amax(-1, keepdim=True).detach())
        weights, kept = (scores - new).exp(), (highest - new).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        added = weights @ values
        result = added if result is None else result * kept + added
        highest = new
        if step + 1 < group.size:
            k, v = passed_on(k, group), passed_on(v, group)
    assert result is not None, "a rank attends to its own positions"
    return (result / total).to(q.dtype)


def _for_heads(x: Tensor, q: Tensor, grouped: bool) -> Tensor:
    """Keys or values, repeated for the heads that share them."""
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if grouped else x


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """Attention of this rank's heads over all positions."""
    q, k, v = (exchanged(x, group, -3, -2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )
    return exchanged(y, group, -2, -3)


_KINDS: Mapping[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "all_to_all": attention_of_heads,
}
KINDS = tuple(_KINDS)
