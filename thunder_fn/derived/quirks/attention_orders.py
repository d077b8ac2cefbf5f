"""Derivatives of attention of the second order, with memory linear in the length.

With weights p = softmax(s), s = factor q k' + mask, and the result o = p v, a prime on the right
being the transpose and D the derivative along the tangents:

    tangent            Do = Dp v + p Dv        Dp = p * (Ds - rowsum(p * Ds))
    pullback           dq = factor z k         z = p * (c - rowsum(p * c)),  c = do v'
                       dk = factor z' q
                       dv = p' do
    pullback tangent   D of these

Each is an op of ours. It takes a block of queries at a time, so it never holds all weights. The
three are closed under first derivatives: <do, Do> is linear in the tangents, and its gradient in
q, k, v is the pullback tangent, since second derivatives are symmetric. What differentiates a
pullback tangent, or a tangent in forward mode, uses the formulas on all queries at once.

Source: T. Dao, "FlashAttention-2", 2023, for the pullback; the others follow from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from thunder_fn import torch_internals as internals

ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
"""The number of weights in a block, by device: a block of 4 MB stays near a CPU core, and a GPU
wants few launches. A block has one row at least.
"""


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of attention: [batch, heads, length, size]. Neighbouring heads of the queries
    share keys and values if these have fewer heads.

    `grad` is the cotangent of the result. A tangent that is None is zero. `first` is the place of
    the first query among all of them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    grad: Tensor | None = None
    query_tangent: Tensor | None = None
    key_tangent: Tensor | None = None
    value_tangent: Tensor | None = None
    grad_tangent: Tensor | None = None
    first: int = 0

    @property
    def factor(self) -> Any:
        """The factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def shared(self) -> Any:
        """The number of heads of the queries that share keys and values."""
        return self.query.shape[-3] // self.key.shape[-3]

    def prepared(self) -> Attention:
        """The same in float32 at least, with keys and values for each head of the queries, and
        queries that are scaled.
        """
        of_keys = {
            name: self._of_each_head(getattr(self, name))
            for name in ("key", "value", "key_tangent", "value_tangent")
        }
        of_rows = {
            name: _wide(getattr(self, name))
            for name in ("query", "grad", "query_tangent", "grad_tangent")
        }
        for name in ("query", "query_tangent"):
            of_rows[name] = _times(of_rows[name], self.factor)
        return replace(self, **of_keys, **of_rows, scale=self.factor)

    def _of_each_head(self, x: Tensor | None) -> Tensor | None:
        wide = _wide(x)
        if wide is None or self.query.shape[-3] == self.key.shape[-3]:
            return wide
        return wide.repeat_interleave(self.shared, -3)

    def of_keys(self, grad: Tensor, like: Tensor) -> Tensor:
        """The sum of a gradient over the heads that share keys, if some do."""
        heads = like.shape[-3]
        return grad if grad.shape[-3] == heads else grad.unflatten(-3, (heads, -1)).sum(-3)

    def weights(self) -> Tensor:
        """The weight of each value for each query. If a mask hides all keys from a query, its
        weights are zero.
        """
        scores = self.query @ self.key.mT
        if self.is_causal:
            ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(ahead.triu(1 + self.first), float("-inf"))
        if self.mask is None:
            return scores.softmax(-1)
        scores = (
            scores.masked_fill(~self.mask, float("-inf"))
            if self.mask.dtype is torch.bool
            else scores + _wide(self.mask)
        )
        alone = (scores == float("-inf")).all(-1, keepdim=True)
        return scores.masked_fill(alone, 0.0).softmax(-1).masked_fill(alone, 0.0)

    def weights_tangent(self, weights: Tensor) -> Tensor | None:
        """The tangent of the weights, None for zero."""
        moved = _sum_of_products(
            (self.query_tangent, self.key.mT), (self.query, _mt(self.key_tangent))
        )
        if moved is None:
            return None
        weighted = weights * moved
        return torch.addcmul(weighted, weights, weighted.sum(-1, keepdim=True), value=-1)


def _wide(x: Tensor | None) -> Any:
    return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32))


def _mt(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def _sum_of_products(*pairs: tuple[Tensor | None, Tensor | None]) -> Tensor | None:
    """The sum of products, as one product of matrices side by side."""
    found = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(found) < 2:
        return _product(*found[0]) if found else None
    return torch.cat([a for a, _ in found], -1) @ torch.cat([b for _, b in found], -2)


def _times(a: Tensor | None, b: Any) -> Tensor | None:
    return None if a is None or b is None else a * b


def _plus(*terms: Tensor | None) -> Tensor | None:
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None


def _centred(weights: Tensor, x: Tensor) -> Tensor:
    """x without its mean under the weights."""
    return x - (weights * x).sum(-1, keepdim=True)


# ---- the formulas, on prepared arguments ----


def result(of: Attention) -> tuple[Tensor]:
    """Softmax attention."""
    return (of.weights() @ of.value,)


def tangent(of: Attention) -> tuple[Tensor]:
    """The tangent of the result."""
    weights = of.weights()
    moved = of.weights_tangent(weights)
    found = _plus(_product(moved, of.value), _product(weights, of.value_tangent))
    return (_or_zeros(found, of.query, of.value),)


def pullback(of: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys and values."""
    return pullback_with_mask(of)[:3]


def pullback_with_mask(of: Attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys, values and scores."""
    assert of.grad is not None, "a pullback has a cotangent"
    weights = of.weights()
    scores = weights * _centred(weights, of.grad @ of.value.mT)
    of_query, of_key = scores @ of.key * of.factor, scores.mT @ of.query
    return of_query, of_key, weights.mT @ of.grad, scores


def pullback_tangent(of: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """The tangents of the gradients of the queries, keys and values."""
    assert of.grad is not None, "a pullback has a cotangent"
    weights = of.weights()
    weights_t = of.weights_tangent(weights)
    outer = of.grad @ of.value.mT
    outer_t = _sum_of_products((of.grad_tangent, of.value.mT), (of.grad, _mt(of.value_tangent)))
    centred = _centred(weights, outer)
    scores, mean_t = weights * centred, _plus(_times(weights_t, outer), _times(weights, outer_t))
    centred_t = _plus(outer_t, None if mean_t is None else -mean_t.sum(-1, keepdim=True))
    scores_t = _plus(_times(weights_t, centred), _times(weights, centred_t))
    of_query = _plus(_product(scores_t, of.key), _product(scores, of.key_tangent))
    of_key = _plus(_product(_mt(scores_t), of.query), _product(scores.mT, of.query_tangent))
    of_value = _plus(_product(_mt(weights_t), of.grad), _product(weights.mT, of.grad_tangent))
    return (
        _or_zeros(_times(of_query, of.factor), of.query, of.key),
        _or_zeros(of_key, of.key, of.key),
        _or_zeros(of_value, of.value, of.value),
    )


def _or_zeros(x: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor:
    """x, or zeros with these rows and columns."""
    return rows.new_zeros((*rows.shape[:-1], columns.shape[-1])) if x is None else x


Formula = Callable[[Attention], tuple[Tensor, ...]]


def at_once(formula: Formula, of: Attention) -> tuple[Tensor, ...]:
    """A formula on all queries, of the arguments' types. It has all derivatives."""
    found, likes = formula(of.prepared()), _likes(of, formula)
    return tuple(
        of.of_keys(one, like).to(like.dtype) for one, like in zip(found, likes, strict=True)
    )


def _likes(of: Attention, formula: Formula) -> tuple[Tensor, ...]:
    """The arguments that have the dtypes and the numbers of heads of the results."""
    return (of.query,) if formula in (result, tangent) else (of.query, of.key, of.value)


def gradient_of_mask(of: Attention) -> Tensor:
    """The gradient of a mask that is added to the scores."""
    assert of.mask is not None, "the caller wants the gradient of a mask"
    *_, of_scores = pullback_with_mask(of.prepared())
    return of_scores.sum_to_size(of.mask.shape).to(of.mask.dtype)


# ---- in blocks ----


def in_blocks(formula: Formula, of: Attention) -> tuple[Tensor, ...]:
    """A formula on a block of queries at a time: results by query are written where they belong,
    those by key are added up.
    """
    batch, heads, length = of.key.shape[0], of.key.shape[1], of.query.shape[2]
    likes = _likes(of, formula)
    sizes = [of.value.shape[-1]] if formula is tangent else [like.shape[-1] for like in likes]
    sums = [
        torch.zeros((*like.shape[:-1], size), dtype=_wide(like[:0]).dtype, device=like.device)
        for like, size in zip(likes, sizes, strict=True)
    ]
    room = ELEMENTS.get(of.query.device.type, ELEMENTS["cuda"]) // max(1, of.key.shape[2])
    rows = _within(room, length)
    many = _within(room // max(1, rows * of.shared), heads)
    most = _within(room // max(1, rows * of.shared * many), batch)
    places = (_slices(batch, most), _slices(heads, many), _slices(length, rows))
    for examples, among, queries in itertools.product(*map(tuple, places)):
        part = of_part(of, examples, among, queries)
        found = formula(part.prepared())
        for i, (total, one) in enumerate(zip(sums, found, strict=True)):
            if i == 0:
                wide = slice(among.start * of.shared, among.stop * of.shared)
                total[examples, wide, queries] = one
            else:
                target = total[examples, among, : part.key.shape[2]]
                target += of.of_keys(one, part.key)
    return tuple(total.to(like.dtype) for total, like in zip(sums, likes, strict=True))


def _within(size: int, most: int) -> int:
    return max(1, min(size, most))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def of_part(of: Attention, examples: slice, among: slice, queries: slice) -> Attention:
    """The attention of some queries, for some examples and some heads of the keys. A causal one
    reads the keys up to the last of its queries.
    """
    heads = slice(among.start * of.shared, among.stop * of.shared)
    keys = slice(0, queries.stop) if of.is_causal else slice(None)
    places = {
        **dict.fromkeys(("query", "grad", "query_tangent", "grad_tangent"), (heads, queries)),
        **dict.fromkeys(("key", "value", "key_tangent", "value_tangent"), (among, keys)),
    }
    parts = {
        name: None if (x := getattr(of, name)) is None else x[examples, *place]
        for name, place in places.items()
    }
    mask = of.mask
    if mask is not None:
        wanted = (examples, heads, queries, keys)[-mask.dim() :]
        pairs = zip(wanted, mask.shape, strict=True)
        mask = mask[tuple(slice(None) if size == 1 else place for place, size in pairs)]
    return replace(of, **parts, mask=mask, scale=of.factor, first=queries.start)


# ---- the ops ----

_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? attn_mask"
_TANGENTS = "Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent"
_SETTINGS = "bool is_causal, float? scale"
_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define(f"attention_tangent({_ARGUMENTS}, {_TANGENTS}, {_SETTINGS}) -> Tensor")
_library.define(
    f"attention_pullback(Tensor grad_out, {_ARGUMENTS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"attention_pullback_tangent(Tensor grad_out, {_ARGUMENTS}, Tensor? grad_tangent, {_TANGENTS},"
    f" {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def of_arguments(given: Mapping[str, Any]) -> Attention:
    """The arguments of an op, ours or PyTorch's, by the names in its schema."""
    return Attention(
        given["query"],
        given["key"],
        given["value"],
        given.get("attn_mask", given.get("attn_bias")),
        given.get("is_causal", False),
        given.get("scale"),
        given.get("grad_out", given.get("grad_out_")),
        given.get("query_tangent"),
        given.get("key_tangent"),
        given.get("value_tangent"),
        given.get("grad_tangent"),
    )


def _implementation(formula: Formula, op: Any) -> Callable[..., Any]:
    names = internals.argument_names(op)

    def run(*args: Any) -> Any:
        found = in_blocks(formula, of_arguments(dict(zip(names, args, strict=True))))
        return found[0] if formula is tangent else found

    return run


def _fake(formula: Formula, op: Any) -> Callable[..., Any]:
    names = internals.argument_names(op)

    def run(*args: Any) -> Any:
        of = of_arguments(dict(zip(names, args, strict=True)))
        if formula is tangent:
            return of.query.new_empty((*of.query.shape[:-1], of.value.shape[-1]))
        return tuple(like.new_empty(like.shape) for like in (of.query, of.key, of.value))

    return run


def _save(op: Any) -> Callable[..., None]:
    names = internals.argument_names(op)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        given = dict(zip(names, inputs, strict=True))
        ctx.settings = given.pop("is_causal"), given.pop("scale")
        ctx.save_for_backward(*given.values())

    return save


def _pull_tangent(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_tangent`: linear in the tangents, whose gradients are the
    pullback; those of the others are its tangents.
    """
    *arguments, mask, query_t, key_t, value_t = ctx.saved_tensors
    if grad is None:
        return (None,) * 9
    if ctx.needs_input_grad[3]:
        return _by_formula(ctx, tangent, TANGENT, (grad,))
    settings, wanted = ctx.settings, ctx.needs_input_grad
    none = None, None, None
    of_primals = (
        PULLBACK_TANGENT(grad, *arguments, mask, None, query_t, key_t, value_t, *settings)
        if any(wanted[:3])
        else none
    )
    of_tangents = PULLBACK(grad, *arguments, mask, *settings) if any(wanted[4:7]) else none
    found = *of_primals, None, *of_tangents, None, None
    return tuple(one if flag else None for one, flag in zip(found, wanted, strict=True))


def _pull_pullback(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_pullback`, which is the gradient of <grad_out, result>: the
    tangent of the result, and of the pullback, along the cotangents.
    """
    if all(grad is None for grad in grads):
        return (None,) * 7
    if ctx.needs_input_grad[4]:
        return _by_formula(ctx, pullback, PULLBACK, grads)
    (grad_out, *arguments), settings = ctx.saved_tensors, ctx.settings
    wanted = ctx.needs_input_grad
    of_grad = TANGENT(*arguments, *grads, *settings) if wanted[0] else None
    of_primals = (
        PULLBACK_TANGENT(grad_out, *arguments, None, *grads, *settings)
        if any(wanted[1:4])
        else (None, None, None)
    )
    found = of_grad, *of_primals, None, None, None
    return tuple(one if flag else None for one, flag in zip(found, wanted, strict=True))


def _by_formula(
    ctx: Any, formula: Formula, op: Any, grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients by autograd through the formula on all queries at once."""
    names = internals.argument_names(op)
    given = dict(zip(names, (*ctx.saved_tensors, *ctx.settings), strict=True))
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        values = {
            name: value.view_as(value) if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        results = at_once(formula, of_arguments(values))
    places = [i for i, flag in enumerate(ctx.needs_input_grad) if flag]
    every = tuple(values.values())
    pairs = [(one, grad) for one, grad in zip(results, grads, strict=True) if grad is not None]
    found = iter(
        torch.autograd.grad(
            [one for one, _ in pairs],
            [every[i] for i in places],
            [grad for _, grad in pairs],
            create_graph=again,
            allow_unused=True,
        )
    )
    return tuple(next(found) if i in places else None for i in range(len(every)))


def _pull_pullback_tangent(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if all(grad is None for grad in grads):
        return (None,) * 11
    return _by_formula(ctx, pullback_tangent, PULLBACK_TANGENT, grads)


TANGENT: Any = torch.ops.thunder_fn.attention_tangent.default
PULLBACK: Any = torch.ops.thunder_fn.attention_pullback.default
PULLBACK_TANGENT: Any = torch.ops.thunder_fn.attention_pullback_tangent.default

FORMULAS: dict[str, Formula] = {
    str(TANGENT): tangent,
    str(PULLBACK): pullback,
    str(PULLBACK_TANGENT): pullback_tangent,
}
"""The formulas of our ops, by their names."""

_PRODUCTS = {TANGENT: 6, PULLBACK: 5, PULLBACK_TANGENT: 12}
"""The numbers of matrix products of the size of queries times keys."""


def _flops(products: int, first: int) -> Callable[..., int]:
    def count(*shapes: Any, **_: Any) -> int:
        (batch, heads, length, size), keys = shapes[first], shapes[first + 1][-2]
        return 2 * products * batch * heads * length * keys * size

    return count


for _op, _formula, _pull in (
    (TANGENT, tangent, _pull_tangent),
    (PULLBACK, pullback, _pull_pullback),
    (PULLBACK_TANGENT, pullback_tangent, _pull_pullback_tangent),
):
    _name = _op.overloadpacket._qualified_op_name
    _library.impl(_name, _implementation(_formula, _op), "CompositeExplicitAutograd")
    torch.library.register_fake(_name, _fake(_formula, _op), lib=_library)
    torch.library.register_autograd(_name, _pull, setup_context=_save(_op), lib=_library)
    register_flop_formula(_op.overloadpacket)(_flops(_PRODUCTS[_op], int(_formula is not tangent)))
