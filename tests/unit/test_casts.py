"""Writes to a tensor of another dtype, in place or with `out=`: eager PyTorch's numbers, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.ops.samples import op_db

DTYPES = (torch.float64, torch.int64, torch.complex128, torch.bool)
WITH_OUT = [
    op for op in op_db if op.supports_out and torch.float32 in op.supported_dtypes("cpu") and not op.variant_test_name
]
IN_PLACE = [
    op for op in op_db if op.inplace_variant and torch.int64 in op.supported_dtypes("cpu") and not op.variant_test_name
]
DRAWS = ("bernoulli", "multinomial", "normal", "cauchy", "exponential", "geometric", "log_normal", "uniform")


def attempt(f: Any, *args: Any) -> Any:
    """The result of a function; None if it raises."""
    try:
        return f(*args)
    except Exception:  # noqa: BLE001  # of which kind is another question
        return None


def agree(f: Any, *args: Any, instead: Any = None) -> None:
    """Compare a function that is jitted with eager PyTorch, or with what is right where that refuses; jitted, it may be
    refused.
    """
    wanted, found = attempt(f, *args), attempt(tfn.jit(f, executors=["torch"]), *args)
    wanted = instead if wanted is None else wanted
    assert found is None or wanted is not None, f"eager PyTorch refuses what gives {found}"
    if found is not None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore")  # PyTorch's samples warn of themselves
@pytest.mark.parametrize("op", WITH_OUT, ids=lambda op: op.name)
def test_out_of_another_dtype(op: Any) -> None:
    sample = next(iter(op.sample_inputs("cpu", torch.float32)))
    plain = attempt(lambda: op.op(sample.input, *sample.args, **sample.kwargs))
    if not isinstance(plain, torch.Tensor) or op.name.startswith(DRAWS):
        pytest.skip("no tensor, or a random one")
    for dtype in DTYPES:
        out = torch.zeros(plain.shape, dtype=dtype)
        cast = plain.to(dtype) if torch.can_cast(plain.dtype, dtype) else None
        agree(lambda x, out: op.op(x, *sample.args, **sample.kwargs, out=out), sample.input, out, instead=cast)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", IN_PLACE, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_of_another_dtype_in_place(op: Any, dtype: torch.dtype) -> None:
    sample = next(iter(op.sample_inputs("cpu", torch.int64)))
    cast = lambda one: one.to(dtype) * 1 if isinstance(one, torch.Tensor) else one * 1.5 if type(one) is int else one
    args = [cast(one) if dtype.is_floating_point or isinstance(one, torch.Tensor) else one for one in sample.args]
    if op.name.startswith(DRAWS):
        pytest.skip("random numbers")
    agree(lambda x, *args: op.inplace_variant(x.clone(), *args, **sample.kwargs), sample.input, *args)
