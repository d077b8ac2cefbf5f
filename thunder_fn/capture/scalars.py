"""Numbers that PyTorch would read out of a tensor.

Eager PyTorch takes a tensor of one element where an op wants a number, `p.addcdiv_(m, v, value=step_size)`, by reading
it. A tracer has no value to read; the same formula with the tensor in place of the number needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Tensor) -> Tensor:
    return x + a * value.to(x.dtype) / b


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Tensor) -> Tensor:
    return x + a * value.to(x.dtype) * b


def _add(x: Tensor, a: Tensor, *, alpha: Tensor) -> Tensor:
    return x + a * alpha.to(x.dtype)


def _sub(x: Tensor, a: Tensor, *, alpha: Tensor) -> Tensor:
    return x - a * alpha.to(x.dtype)


FORMULAS: dict[str, Callable[..., Tensor]] = {"addcdiv": _addcdiv, "addcmul": _addcmul, "add": _add, "sub": _sub}


def with_tensor_scalars(func: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """A function that does what `func` does when its number is a tensor; None if this call has no such argument."""
    if not any(isinstance(kwargs.get(key), Tensor) for key in ("value", "alpha")):
        return None
    name = func.__name__
    formula = FORMULAS.get(name.rstrip("_"))
    if formula is None or not name.endswith("_"):
        return formula
    return lambda x, *args, **options: x.copy_(formula(x, *args, **options))
