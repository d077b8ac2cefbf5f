"""Bounds on the difference of two computations of the same values: from the dtype, the sizes and
the depth, never from one machine.

A sum of n rounded terms is off by some `sqrt(n)` units of its dtype, whatever the order is in which
a processor adds them up (Higham and Mary, A new approach to probabilistic rounding error analysis,
SIAM J. Sci. Comput. 41, 2019). Each operation adds its own error, and a difference of large numbers
keeps the error of those: errors are relative to the largest number.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from thunder_fn.capture import pytree

CERTAINTY = 8
"""The factor of the probabilistic bound: beyond it lies one sum of 1e13."""


def rounding(dtype: torch.dtype, *, terms: int = 1, depth: int = 1, scale: float = 1.0) -> dict[str, float]:
    """The `rtol` and `atol` that rounding explains.

    Args:
        dtype: the least precise dtype that the values go through.
        terms: length of the longest sum, such as the inner size of a product.
        depth: number of operations, one after the other, that round.
        scale: largest magnitude on the way to the result.

    Example:
        >>> rounding(torch.float64, terms=64, depth=2, scale=10.0)["atol"] < 1e-12
        True
    """
    relative = CERTAINTY * torch.finfo(dtype).eps * math.sqrt(max(terms, 1)) * depth
    return {"rtol": relative, "atol": relative * scale}


def assert_rounded_alike(
    found: Any,
    expected: Any,
    *,
    terms: int = 1,
    depth: int = 1,
    scale: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that two trees of tensors differ by rounding only, relative to the largest number
    among them or to `scale` if that is larger.

    Raises:
        AssertionError: of `torch.testing.assert_close`.
    """
    floats = [leaf for leaf in pytree.flatten(expected)[0] if isinstance(leaf, torch.Tensor) and _is_inexact(leaf)]
    if not floats:
        return torch.testing.assert_close(found, expected)
    sizes = [float(leaf.detach().abs()[leaf.isfinite()].amax()) for leaf in floats if bool(leaf.isfinite().any())]
    coarsest = dtype or max((leaf.dtype for leaf in floats), key=lambda kind: torch.finfo(kind).eps)
    bounds = rounding(coarsest, terms=terms, depth=depth, scale=max([scale, *sizes]))
    return torch.testing.assert_close(found, expected, rtol=bounds["rtol"], atol=bounds["atol"], equal_nan=True)


def _is_inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
