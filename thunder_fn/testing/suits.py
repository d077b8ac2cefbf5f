"""Tests whether a variable suits a place in a step."""

from __future__ import annotations

import torch

from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.ir.trace import Var
from thunder_fn.testing.drawn_programs import Suits, dtype_of, shape_of


def is_any(_: Var) -> bool:
    """Accept anything."""
    return True


def is_inexact(var: Var) -> bool:
    """Test for a floating or complex dtype."""
    return is_differentiable(var.type)


def is_real(var: Var) -> bool:
    """Test for a floating dtype."""
    return dtype_of(var).is_floating_point


def is_complex(var: Var) -> bool:
    """Test for a complex dtype."""
    return dtype_of(var).is_complex


def is_ordered(var: Var) -> bool:
    """Test for a real or integer dtype: it can be compared."""
    return not dtype_of(var).is_complex and dtype_of(var) is not torch.bool


def is_number(var: Var) -> bool:
    """Test for a dtype other than bool."""
    return dtype_of(var) is not torch.bool


def is_integer(var: Var) -> bool:
    """Test for int64, the dtype of indices."""
    return dtype_of(var) is torch.int64


def is_mask(var: Var) -> bool:
    """Test for bool."""
    return dtype_of(var) is torch.bool


def has_rank(*ranks: int) -> Suits:
    """Test for one of these ranks."""
    return lambda var: len(shape_of(var)) in ranks


def both(*conditions: Suits) -> Suits:
    """Require all of these."""
    return lambda var: all(condition(var) for condition in conditions)


def has_dims(var: Var) -> bool:
    """Test for a tensor that is no scalar."""
    return len(shape_of(var)) > 0


def has_elements(var: Var) -> bool:
    """Test that no size is 0."""
    return 0 not in shape_of(var)


def broadcasts_with(*others: Var) -> Suits:
    """Test whether its shape broadcasts with theirs."""

    def suits(var: Var) -> bool:
        try:
            torch.broadcast_shapes(shape_of(var), *map(shape_of, others))
        except RuntimeError:
            return False
        return True

    return suits


def has_type_of(other: Var) -> Suits:
    """Test for the same type."""
    return lambda var: var.type == other.type


def same_dtype(other: Var) -> Suits:
    """Test for the same dtype."""
    return lambda var: dtype_of(var) == dtype_of(other)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> torch.Size | None:
    """The shape that two shapes broadcast to, None if they do not."""
    try:
        return torch.broadcast_shapes(a, b)
    except RuntimeError:
        return None
