"""Views, lists of tensors, and places: masks and indices."""

from __future__ import annotations

import torch

from thunder_fn.ir.trace import Var
from thunder_fn.testing.drawn_programs import Draft, Skip, Suits, shape_of
from thunder_fn.testing.steps.enter import call, one_dim, step
from thunder_fn.testing.suits import (
    both,
    broadcast,
    broadcasts_with,
    has_dims,
    has_elements,
    has_rank,
    has_type_of,
    is_any,
    is_inexact,
    is_integer,
    is_mask,
    is_ordered,
    is_real,
    same_dtype,
)

aten = torch.ops.aten


# views


@step("view")
def _reshape(d: Draft) -> object:
    x = d.var(is_any)
    shape = shape_of(x)
    shapes = ([torch.Size(shape).numel()], [*shape, 1], [*shape[::-1]], [1, *shape[1:], *shape[:1]])
    return d.leaf(aten.reshape.default, x, shapes[d.number(4)])


call("view", "transpose", aten.transpose.int, has_dims, lambda d, x: (d.dim(x), -1))
call(
    *("view", "permute", aten.permute.default, has_dims),
    lambda d, x: ([*reversed(range(len(shape_of(x))))],),
)


@step("view")
def _expand(d: Draft) -> object:
    x = d.var(is_any)
    like = d.var(lambda var: broadcast(shape_of(x), shape_of(var)) == torch.Size(shape_of(var)))
    return d.leaf(aten.expand.default, x, list(shape_of(like)))


@step("view")
def _expand_front(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.expand.default, x, [(2, 1, 0)[d.number(3)], *shape_of(x)])


@step("view")
def _select(d: Draft) -> object:
    x = d.var(both(has_dims, has_elements))
    dim = d.dim(x)
    return d.leaf(aten.select.int, x, dim, d.number(shape_of(x)[dim]))


@step("view")
def _slice(d: Draft) -> object:
    x = d.var(has_dims)
    start, stop, stride = (
        (0, 1, 1),
        (1, 9223372036854775807, 1),
        (0, 2, 2),
        (1, 1, 1),
        (-2, -1, 1),
    )[d.number(5)]
    return d.leaf(aten.slice.Tensor, x, d.dim(x), start, stop, stride)


call(
    *("view", "unsqueeze", aten.unsqueeze.default, is_any),
    lambda d, x: (d.number(len(shape_of(x)) + 1),),
)
call("view", "squeeze", aten.squeeze.dim, has_dims, one_dim)
call("view", "flip", aten.flip.default, has_dims, lambda d, x: ([d.dim(x)],))
call("view", "diagonal", aten.diagonal.default, has_rank(2))
call("view", "pad", aten.constant_pad_nd.default, both(is_inexact, has_dims), [1, 0], 0.5)


# lists in, lists out


@step("list")
def _cat(d: Draft) -> object:
    x = d.var(has_dims)
    dim = d.dim(x)
    y = d.var(
        lambda var: (
            _without(shape_of(var), dim) == _without(shape_of(x), dim) and same_dtype(x)(var)
        )
    )
    return d.leaf(aten.cat.default, [x, y, x][: 1 + d.number(3)], dim)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    return (*shape[:dim], *shape[dim + 1 :]) if dim < len(shape) else None


@step("list")
def _stack(d: Draft) -> object:
    x = d.var(is_any)
    return d.leaf(aten.stack.default, [x, d.var(has_type_of(x))], d.number(len(shape_of(x)) + 1))


_CUT = both(has_dims, has_elements)
call("list", "split", aten.split.Tensor, _CUT, lambda d, x: (1 + d.number(2), d.dim(x)))
call("list", "unbind", aten.unbind.int, _CUT, one_dim)


# masks and choices


@step("mask")
def _where(d: Draft) -> object:
    mask = d.var(is_mask)
    x = d.var(both(is_inexact, broadcasts_with(mask)))
    return d.leaf(aten.where.self, mask, x, d.var(both(same_dtype(x), broadcasts_with(mask, x))))


@step("mask")
def _masked_fill(d: Draft) -> object:
    x = d.var(is_inexact)
    return d.leaf(aten.masked_fill.Scalar, x, d.var(both(is_mask, broadcasts_with(x))), 0.5)


call("mask", "is_positive", aten.gt.Scalar, is_ordered, 0)
call("mask", "argmax", aten.argmax.default, both(is_real, has_elements, has_dims), one_dim)


# indices: any integers, made valid by their remainder


def _indices(d: Draft, size: int, *conditions: Suits) -> Var:
    if size == 0:
        raise Skip
    (found,) = d.leaf(aten.remainder.Scalar, d.var(both(is_integer, *conditions)), size)
    return found


@step("index")
def _index_select(d: Draft) -> object:
    x = d.var(has_dims)
    dim = d.dim(x)
    return d.leaf(aten.index_select.default, x, dim, _indices(d, shape_of(x)[dim], has_rank(0, 1)))


@step("index")
def _gather(d: Draft) -> object:
    x = d.var(has_rank(1))
    return d.leaf(aten.gather.default, x, 0, _indices(d, shape_of(x)[0], has_rank(1)))


@step("index")
def _embedding(d: Draft) -> object:
    x = d.var(both(is_real, has_rank(2)))
    return d.leaf(aten.embedding.default, x, _indices(d, shape_of(x)[0]))


@step("index")
def _index(d: Draft) -> object:
    x = d.var(has_rank(2))
    return d.leaf(aten.index.Tensor, x, [None, _indices(d, shape_of(x)[1])])


@step("index")
def _scatter_add(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(1)))
    y = d.var(both(same_dtype(x), has_rank(1)))
    place = _indices(d, shape_of(x)[0], lambda var: shape_of(var) == shape_of(y))
    return d.leaf(aten.scatter_add.default, x, 0, place, y)


@step("index")
def _index_put(d: Draft) -> object:
    x = d.var(both(is_inexact, has_rank(1, 2)))
    place = _indices(d, shape_of(x)[0], has_rank(0))
    return d.leaf(
        aten.index_put.default,
        x,
        [place],
        d.var(both(same_dtype(x), has_rank(0))),
        d.number(2) == 1,
    )
