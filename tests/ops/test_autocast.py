"""autocast against `torch.autocast`, operator by operator on the CPU: bitwise, dtypes included.

The operators with a policy, and every fourth of the others; `OPS_SAMPLES=all` takes all.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

import thunder_fn as tfn
from tests.ops.agreement import SEED, compare, tensors_in
from tests.ops.samples import OPS, cases, seed
from thunder_fn import torch_internals as internals

DOT = "eager keeps dot and mv in float32 on the CPU but not the matmul that is one; in a trace both are one op"
WHOLE = "one op in a trace, whose inner matrix products eager casts"
UNINITIALISED = "returns memory that nobody has written to"

EXCEPTIONS: dict[str, str] = {
    **dict.fromkeys(("dot", "mv", "inner", "tensordot"), DOT),
    **dict.fromkeys(("linalg_pinv", "linalg_pinv_hermitian", "nn_functional_bilinear", "linalg_vecdot"), WHOLE),
    "nn_functional_linear_cross_entropy": WHOLE,
    "nn_functional_linear_cross_entropy_chunked": WHOLE,
    "nn_functional_linear_cross_entropy_chunked_none": WHOLE,
    "nn_functional_embedding_bag": "sums in the order of memory",
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"), UNINITIALISED),
    "new_empty_strided": UNINITIALISED,
}
"""Operators whose values or dtypes may differ, and why."""

SUPPORTED = [name for name, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")]
CASTING = [name for name in SUPPORTED if OPS[name].aten_name in internals.autocast_ops("cpu") or name in EXCEPTIONS]
OTHERS = [name for name in SUPPORTED if name not in CASTING]


@pytest.mark.parametrize("name", [*CASTING, *(OTHERS if os.environ.get("OPS_SAMPLES") == "all" else OTHERS[::4])])
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_torch_autocast(name: str) -> None:
    for case in cases(name, torch.float32, 1, kinds=("plain",)):
        seed(SEED)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                expected = case.function(*case.args, **case.kwargs)
            with warnings.catch_warnings():
                tfn.trace(case.function, *case.args, **case.kwargs)
        except Exception:  # noqa: BLE001
            continue  # eager refuses the lower precision, or what cannot be traced is tested elsewhere
        seed(SEED)
        found = tfn.autocast(case.function)(*case.args, **case.kwargs)
        outcome = compare(tensors_in(found), tensors_in(expected), "result")
        assert outcome.status == "passed" or name in EXCEPTIONS, f"{case}: {outcome}"


def test_exceptions_are_of_operators() -> None:
    assert EXCEPTIONS.keys() <= OPS.keys()
