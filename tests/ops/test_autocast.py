"""autocast against `torch.autocast`, operator by operator: bitwise, dtypes included.

On the CPU in both lower precisions, by values; for CUDA by the dtypes of fake tensors, which need no such device.
The operators with a policy, and every other one of the others; `OPS_SAMPLES=all` takes all.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import thunder_fn as tfn
from tests.ops.agreement import SEED, compare, tensors_in
from tests.ops.samples import OPS, cases, seed
from thunder_fn import torch_internals as internals
from thunder_fn.ir.trace import TensorType

UNINITIALISED = "returns memory that nobody has written to"

EXCEPTIONS: dict[str, str] = {
    "nn_functional_embedding_bag": "sums in the order of memory",
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"), UNINITIALISED),
    "new_empty_strided": UNINITIALISED,
}
"""Operators whose values may differ, and why."""
WHOLE = ("linalg_pinv", "linalg_pinv_hermitian", "linalg_pinv_singular", "nn_functional_bilinear")
"""Operators without a rule, whose kernels call ops that have one. Fake kernels do not cast there."""

SUPPORTED = [name for name, op in OPS.items() if torch.float32 in op.supported_dtypes("cpu")]
CASTING = [
    name
    for name in SUPPORTED
    if name in (*EXCEPTIONS, *WHOLE)
    or any(OPS[name].aten_name in internals.autocast_ops(device) for device in ("cpu", "cuda"))
]
OTHERS = [name for name in SUPPORTED if name not in CASTING]
SOME = OTHERS if os.environ.get("OPS_SAMPLES") == "all" else OTHERS[::2]


def questions(*dtypes: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """The operators with these dtypes; those without a policy with the first."""
    return [*((name, dtype) for name in CASTING for dtype in dtypes), *((name, dtypes[0]) for name in SOME)]


@pytest.mark.parametrize(("name", "dtype"), questions(torch.bfloat16, torch.float16), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_values_are_those_of_torch_autocast(name: str, dtype: torch.dtype) -> None:
    for case in cases(name, torch.float32, 1, kinds=("plain",)):
        seed(SEED)
        try:
            with torch.autocast("cpu", dtype):
                expected = case.function(*case.args, **case.kwargs)
            with warnings.catch_warnings():
                tfn.trace(case.function, *case.args, **case.kwargs)
        except Exception:  # noqa: BLE001
            continue  # eager refuses the lower precision, or what cannot be traced is tested elsewhere
        seed(SEED)
        found = tfn.autocast(case.function, dtype)(*case.args, **case.kwargs)
        outcome = compare(tensors_in(found), tensors_in(expected), "result")
        assert outcome.status == "passed" or name in EXCEPTIONS, f"{case}: {outcome}"
        assert [x.dtype for x in tensors_in(found)] == [x.dtype for x in tensors_in(expected)], str(case)


@pytest.mark.parametrize(("name", "given"), questions(torch.bfloat16, torch.float32), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_dtypes_are_those_of_torch_autocast_on_cuda(name: str, given: torch.dtype) -> None:
    """The policy of another device than this machine's, for what is given in full and in lower precision."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def on_cuda(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return torch.device("cuda:0") if isinstance(x, torch.device) else x
        dtype = given if x.dtype is torch.float32 else x.dtype
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="cuda:0")

    for case in cases(name, torch.float32, 1, kinds=("plain",)):
        try:
            args, kwargs = torch.utils._pytree.tree_map(on_cuda, (tuple(case.args), dict(case.kwargs)))
            with mode, internals.autocast_on(torch.bfloat16):
                expected = case.function(*args, **kwargs)
            with warnings.catch_warnings():
                tfn.trace(case.function, *args, **kwargs)
        except Exception:  # noqa: BLE001
            continue  # no fake kernel, or what cannot be traced is tested elsewhere
        try:
            trace = tfn.trace(tfn.autocast(case.function), *args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" in str(error):
                continue  # a fake tensor is written to
            raise
        found = [type.dtype for type in trace.output_types if isinstance(type, TensorType)]
        assert name in WHOLE or found == [x.dtype for x in tensors_in(expected)], f"{case}\n{trace}"


def test_exceptions_are_of_operators() -> None:
    assert EXCEPTIONS.keys() <= OPS.keys()


@pytest.mark.parametrize("size", [(2, 1, 3, 4), (2, 1, 1, 4), (2, 1, 3, 4, 5)])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.filterwarnings("ignore:Since version 1.3.0")
def test_affine_grid(size: tuple[int, ...], align_corners: bool) -> None:
    """It has no samples, and its kernel multiplies matrices."""
    theta = torch.randn(2, len(size) - 2, len(size) - 1)
    f = lambda theta: torch.nn.functional.affine_grid(theta, list(size), align_corners)

    def inside(theta: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return f(theta)

    for found in (tfn.autocast(f)(theta), tfn.jit(inside)(theta)):
        assert compare([found], [inside(theta)], "result").status == "passed"
