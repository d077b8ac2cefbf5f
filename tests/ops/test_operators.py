"""Every operator of PyTorch's operator database: trace and evaluate, and reverse mode, against eager.

`OPS_SAMPLES=all` takes all samples instead of three plain ones and one of each other kind.
`python -m tests.ops.sweep` prints the rates.
"""

from __future__ import annotations

import os

import pytest

from tests.ops.exceptions import EXEMPTIONS
from tests.ops.samples import KINDS, OPS
from tests.ops.sweep import failures

LIMIT = None if os.environ.get("OPS_SAMPLES") == "all" else 3


@pytest.mark.parametrize("name", OPS)
def test_forward(name: str) -> None:
    assert not failures(name, "forward", LIMIT)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.supports_autograd])
def test_gradient(name: str) -> None:
    assert not failures(name, "gradient", LIMIT)


def test_exceptions_are_of_operators_and_kinds_that_exist() -> None:
    for entry in EXEMPTIONS:
        assert entry.op in OPS and set(entry.kinds) <= set(KINDS) and entry.reason
