"""Budgets of launches on the simulated GPU. Of a GPT's, 67 are matrix products and attention, as in eager PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BY_TORCH_COMPILE = 165
"""The module's step by torch.compile of PyTorch 2.13, with the fused AdamW."""

BY_EAGER = 166
"""The same in eager PyTorch, with the AdamW that runs over lists."""

BUDGETS = {
    "module": 8,
    "module without graphs": int(0.9 * BY_TORCH_COMPILE),
    "whole step": 3,
    "whole step by PyTorch's kernels": BY_EAGER + 5,
    "whole step as a graph": 1,
    "scan": 1,
    "gradient of scan": 5,
    "scan of large steps": 5,
    "RNN": 1,
    "gradient of an RNN": 5,
    "while_loop": 1,
    "codes, one row": 4,
    "codes, many rows": 4,
    "codes of activations, one row": 4,
    "codes of activations, many rows": 5,
}
"""The scans are of 100 steps. Codes are layers, one of each scheme."""


@pytest.mark.launches
@pytest.mark.parametrize("name", BUDGETS)
def test_launches(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.launches", name],
        env=os.environ | {"NULLGPU_VALUES": "0", "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1])[name] <= BUDGETS[name]
