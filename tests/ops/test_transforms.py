"""Every operator of PyTorch's operator database through jvp, vmap and their compositions with vjp.

One sample in float64 of each operator, through one of the sweeps (which one goes around the table); `OPS_SAMPLES=all`
takes every operator through every sweep, with all samples and dtypes.
`python -m tests.ops.sweep --what transforms --peer` prints the rates, and torch.func's on the same samples.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import thunder_fn as tfn
from tests.ops.compositions import TRANSFORMS
from tests.ops.samples import DTYPES, OPS
from tests.ops.sweep import WITHOUT_GRAD, failures

ALL = os.environ.get("OPS_SAMPLES") == "all"
LIMIT, CHOSEN = (None, DTYPES) if ALL else (1, (torch.float64,))


SWEEPS = tuple(TRANSFORMS)
CASES = [(what, name) for i, name in enumerate(OPS) for what in (SWEEPS if ALL else (SWEEPS[i % len(SWEEPS)],))]


@pytest.mark.parametrize(("what", "name"), CASES)
def test_transform(what: str, name: str) -> None:
    if what in WITHOUT_GRAD or OPS[name].supports_autograd:
        assert not failures(name, what, LIMIT, CHOSEN)


OF_MATRICES = [
    name
    for name, op in OPS.items()
    if "linalg" in name or op.name in ("lu_unpack", "cholesky_solve", "ormqr", "baddbmm")
]


@pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning", "ignore:torch.qr is deprecated")
@pytest.mark.parametrize("name", OF_MATRICES)
def test_examples_with_a_batch_of_one(name: str) -> None:
    """Matrices lie by columns, as LAPACK returns them, and a batch dim of size 1 has any stride."""
    op, sample_of = OPS[name].op, OPS[name].sample_inputs
    samples = islice(zip(*[sample_of("cpu", torch.float64) for _ in range(2)], strict=True), None if ALL else 4)
    for first, second in samples:
        given = [[x for x in (s.input, *s.args) if isinstance(x, Tensor) and x.dim()] for s in (first, second)]
        if not given[0] or [x.shape for x in given[0]] != [x.shape for x in given[1]]:
            continue
        stacks = [torch.stack(pair) for pair in zip(*given, strict=True)]
        by_columns = [x.mT.contiguous().mT if x.dim() > 2 else x for x in stacks]

        def f(*xs: Tensor, sample: Any = first) -> list[Tensor]:
            rest = iter(x[None] for x in xs)
            args = [next(rest) if isinstance(x, Tensor) and x.dim() else x for x in (sample.input, *sample.args)]
            return [y for y in tree_leaves(op(*args, **sample.kwargs)) if isinstance(y, Tensor)]

        try:
            expected = [torch.stack(ys) for ys in zip(*(f(*xs) for xs in zip(*stacks, strict=True)), strict=True)]
        except RuntimeError:
            continue  # eager refuses a batch
        torch.testing.assert_close(tfn.vmap(f)(*by_columns), expected, rtol=1e-6, atol=1e-8)
