"""Every operator of PyTorch's operator database through jvp, vmap and their compositions with vjp.

One sample in float64 of each operator, through one of the sweeps (which one goes around the table); `OPS_SAMPLES=all`
takes every operator through every sweep, with all samples and dtypes.
`python -m tests.ops.sweep --what transforms --peer` prints the rates, and torch.func's on the same samples.
"""

from __future__ import annotations

import os

import pytest
import torch

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
