"""Elementwise ops, reductions, matrix products, normalisation."""

from __future__ import annotations

import torch

from thunder_fn.ir.trace import Var
from thunder_fn.testing.drawn_programs import Draft, Step, Suits, register, shape_of
from thunder_fn.testing.steps.enter import call, one_dim, step, void
from thunder_fn.testing.suits import (
    both,
    broadcast,
    broadcasts_with,
    has_dims,
    has_elements,
    has_rank,
    is_any,
    is_inexact,
    is_mask,
    is_number,
    is_ordered,
    is_real,
    same_dtype,
)

aten = torch.ops.aten


def _unary(name: str, suits: Suits) -> None:
    overload = getattr(aten, name).default
    register("unary", name, lambda draft, _: void(draft.leaf(overload, draft.var(suits))))


def _binary(name: str, suits: Suits, variant: str = "Tensor") -> None:
    overload = getattr(getattr(aten, name), variant)

    def rule(draft: Draft, _: Step) -> None:
        x = draft.var(suits)
        draft.leaf(overload, x, draft.var(both(suits, broadcasts_with(x))))

    register("mask" if suits in (is_mask, is_ordered) else "binary", name, rule)


for _name in ("sin", "neg", "cos", "tanh", "sigmoid", "exp"):
    _unary(_name, is_inexact)
for _name in ("add", "mul"):
    _binary(_name, is_number)
for _name in ("sub", "div"):
    _binary(_name, is_inexact)
for _name in ("relu", "silu", "gelu", "erf", "softplus", "abs"):
    _unary(_name, is_real)
for _name, _variant in (("maximum", "default"), ("minimum", "default"), ("atan2", "default")):
    _binary(_name, is_real, _variant)
for _name in ("gt", "le", "ne"):
    _binary(_name, is_ordered)
for _name in ("logical_and", "bitwise_xor"):
    _binary(_name, is_mask, "default" if _name == "logical_and" else "Tensor")


@step("arithmetic")
def _add_scaled(d: Draft) -> object:
    x = d.var(is_inexact)
    y = d.var(both(is_inexact, broadcasts_with(x)))
    return d.leaf(aten.add.Tensor, x, y, alpha=(2, 0, -3)[d.number(3)])


_WITH_NUMBERS = (
    *(aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar),
    *(aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor, aten.sub.Tensor),
)
"""Ops that take a number; a capture of `x * 2` has the overload for tensors."""


@step("arithmetic")
def _scalar(d: Draft) -> object:
    x = d.var(is_inexact)
    overload = _WITH_NUMBERS[d.number(len(_WITH_NUMBERS))]
    return d.leaf(overload, x, (2.0, -0.5, 3)[d.number(3)])


@step("arithmetic")
def _power(d: Draft) -> object:
    return d.leaf(aten.pow.Tensor_Scalar, d.var(is_inexact), (2, 3, 1, 0)[d.number(4)])


@step("arithmetic")
def _add_both(d: Draft) -> object:
    """Two equations that differ in a keyword argument alone."""
    x = d.var(is_inexact)
    y = d.var(both(is_inexact, broadcasts_with(x)))
    return d.leaf(aten.add.Tensor, x, y, alpha=2), d.leaf(aten.add.Tensor, x, y, alpha=-3)


@step("unary")
def _clamp(d: Draft) -> object:
    bounds = ((-0.5, 0.5), (None, 0.25), (0.0, None))[d.number(3)]
    return d.leaf(aten.clamp.default, d.var(is_real), *bounds)


@step("arithmetic")
def _lerp(d: Draft) -> object:
    x = d.var(is_real)
    y = d.var(both(same_dtype(x), broadcasts_with(x)))
    return d.leaf(aten.lerp.Tensor, x, y, d.var(both(same_dtype(x), broadcasts_with(x, y))))


# reductions


def _dims(d: Draft, var: Var) -> list[int]:
    """One dim, all of them, or the two outermost."""
    rank = len(shape_of(var))
    return ([d.dim(var)] if rank else [], list(range(rank)), [0, rank - 1] if rank > 1 else [])[
        d.number(3)
    ]


def _dims_and_kept(d: Draft, x: Var) -> tuple[object, ...]:
    return _dims(d, x), d.number(2) == 1


call("reduction", "sum", aten.sum.dim_IntList, is_any, _dims_and_kept)
call("reduction", "sum_all", aten.sum.default, is_any)
call("reduction", "mean", aten.mean.dim, both(is_inexact, has_elements), _dims_and_kept)
call("reduction", "amax", aten.amax.default, both(is_real, has_elements), _dims_and_kept)


@step("reduction")
def _variance(d: Draft) -> object:
    x = d.var(both(is_real, has_elements))
    return d.leaf(aten.var.correction, x, _dims(d, x), correction=0, keepdim=True)


_IN_A_DIM = both(is_real, has_elements, has_dims)
call("reduction", "max_along", aten.max.dim, _IN_A_DIM, one_dim)
call("reduction", "cumsum", aten.cumsum.default, both(is_inexact, has_dims), one_dim)
call(
    *("reduction", "sort", aten.sort.default, both(is_real, has_dims)),
    lambda d, x: (d.dim(x), d.number(2) == 1),
)
call("reduction", "logsumexp", aten.logsumexp.default, _IN_A_DIM, lambda d, x: ([d.dim(x)],))


# matrix products


def _matrix(d: Draft, like: Var | None = None) -> Var:
    return d.var(both(is_inexact, has_rank(2), is_any if like is None else same_dtype(like)))


@step("matmul")
def _mm(d: Draft) -> object:
    x = _matrix(d)
    d.leaf(aten.t.default, _matrix(d, x))
    y = d.var(both(same_dtype(x), has_rank(2), lambda var: shape_of(var)[0] == shape_of(x)[1]))
    return d.leaf(aten.mm.default, x, y)


@step("matmul")
def _addmm(d: Draft) -> object:
    x = _matrix(d)
    y = d.var(both(same_dtype(x), has_rank(2), lambda var: shape_of(var)[0] == shape_of(x)[1]))
    shape = (shape_of(x)[0], shape_of(y)[1])
    bias = d.var(
        both(same_dtype(x), lambda var: torch.Size(shape) == broadcast(shape_of(var), shape))
    )
    return d.leaf(aten.addmm.default, bias, x, y)


@step("matmul")
def _bmm(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(3)))
    (turned,) = d.leaf(aten.transpose.int, x, 1, 2)
    return d.leaf(aten.bmm.default, *((x, turned) if d.number(2) else (turned, x)))


# normalisation


@step("normalise")
def _softmax(d: Draft) -> object:
    x = d.var(both(is_real, has_dims))
    return d.leaf(
        (aten._softmax.default, aten._log_softmax.default)[d.number(2)], x, d.dim(x), False
    )


@step("normalise")
def _layer_norm(d: Draft) -> object:
    x = d.var(both(is_real, has_dims, has_elements))
    is_weight = both(same_dtype(x), lambda var: shape_of(var) == shape_of(x)[-1:])
    weights = [d.var(is_weight), d.var(is_weight)] if d.number(2) else [None, None]
    return d.leaf(aten.native_layer_norm.default, x, [shape_of(x)[-1]], *weights, 0.1)
