"""Numbers that PyTorch would read out of a tensor.

Eager PyTorch takes a tensor of one element where an op wants a number, `p.addcdiv_(m, v,
value=step_size)`, by reading it. Other functions look at values to check them or on the way to a
result of a known shape. A tracer has no value to read; the same formula without reading needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.capture.recorder import current

Tensor = torch.Tensor


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Tensor) -> Tensor:
    return x + a * value.to(x.dtype) / b


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Tensor) -> Tensor:
    return x + a * value.to(x.dtype) * b


def _add(x: Tensor, a: Tensor, *, alpha: Tensor) -> Tensor:
    return x + a * alpha.to(x.dtype)


def _sub(x: Tensor, a: Tensor, *, alpha: Tensor) -> Tensor:
    return x - a * alpha.to(x.dtype)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "add": _add,
    "sub": _sub,
}


def number_of_constant(value: Tensor) -> Any:
    """The number of a scalar that the traced function made of one, such as `torch.tensor(1)`; any
    other tensor itself.
    """
    recorder = current()
    found = None if recorder is None else recorder.values.constant(value)
    if recorder is None or found is None:
        return value
    with recorder.suspended():
        return found.item()


def _narrow(input: Tensor, dim: int, start: Tensor | int, length: int) -> Tensor:
    start = number_of_constant(start) if isinstance(start, Tensor) else start
    if not isinstance(start, Tensor):
        return torch.narrow(input, dim, start, length)
    start = torch.where(start < 0, start + input.size(dim), start)
    places = start + torch.arange(length, device=input.device)
    take = lambda: input.index_select(dim, places)
    put = lambda copy: input.index_copy_(dim, places, copy)
    recorder = current()
    return take() if recorder is None else recorder.selections.add(input, take, put)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    if r == 0 or input.dim() != 1:
        return torch.combinations(input, r, with_replacement)
    chosen = torch.tensor(
        list(choose(range(input.numel()), r)), dtype=torch.int64, device=input.device
    ).view(-1, r)
    return input.index_select(0, chosen.reshape(-1)).reshape(chosen.shape)


def _check(condition: Tensor, message: str) -> None:
    torch.ops.aten._assert_async.msg(condition, message)


def _check_weights(name: str, given: Tensor, count: int) -> None:
    """Check weights as `torch.cov` does before it looks at their values."""
    kind = "integral" if name == "fweights" else "floating point"
    fits = (given.dtype.is_floating_point, given.dtype == torch.bool) == (
        kind == "floating point",
        False,
    )
    if given.dim() > 1 or not fits or given.numel() != count:
        what = f"{given.dtype} of shape {tuple(given.shape)}"
        raise RuntimeError(
            f"cov(): expected {name} to be {kind}, one for each of {count} observations, but got"
            f" {what}"
        )


def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    if input.dim() > 2:
        return torch.cov(input)
    x = input.view(1, -1) if input.dim() < 2 else input
    weights = None
    for name, given in (("fweights", fweights), ("aweights", aweights)):
        if given is not None:
            _check_weights(name, given, x.size(1))
            _check((given >= 0).all(), f"cov(): {name} cannot be negative")
            weights = given if weights is None else weights * given
    total = (
        torch.scalar_tensor(x.size(1), dtype=torch.int64, device=x.device)
        if weights is None
        else weights.sum()
    )
    if weights is not None:
        _check(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (x if weights is None else x * weights).sum(1) / total
    if weights is not None and aweights is not None and correction != 0:
        count = total - correction * (weights * aweights).sum() / total
    else:
        count = total - correction
    x = x - mean.unsqueeze(1)
    return ((x @ (x if weights is None else x * weights).t().conj()) / count.clamp_min(0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    c = _cov(input)
    if c.dim() == 0:
        return c / c
    d = c.diag()
    deviation = torch.sqrt(torch.real(d) if d.is_complex() else d)
    c = c / deviation.unsqueeze(1) / deviation.unsqueeze(0)
    return (
        torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)
    )


WITHOUT_VALUES: dict[str, Callable[..., Tensor]] = {
    "narrow": _narrow,
    "combinations": _combinations,
    "cov": _cov,
    "corrcoef": _corrcoef,
}
"""Stand-ins, by name, for functions that read values though the shape of their result does not
depend on them.
"""


def with_tensor_scalars(func: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """A function that computes `func` without reading values; None if this call does not read
    any.
    """
    name = getattr(func, "__name__", "")
    if name in WITHOUT_VALUES and func in (getattr(torch, name), getattr(Tensor, name, None)):
        return WITHOUT_VALUES[name]
    if not any(isinstance(kwargs.get(key), Tensor) for key in ("value", "alpha")):
        return None
    formula = FORMULAS.get(name.rstrip("_"))
    if formula is None or not name.endswith("_"):
        return formula
    return lambda x, *args, **options: x.copy_(formula(x, *args, **options))
