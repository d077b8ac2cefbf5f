"""A compiled program waits for the GPU only where eager PyTorch does: numbers of the CPU are no copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import thunder_fn as tfn


def written(x: Tensor, place: Any, value: Any) -> Tensor:
    y = x.clone()
    y[place] = value
    return y


NUMBER, PINNED = torch.tensor(2.0), list[Tensor]()
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number written": lambda x, i: written(x, (slice(None), 0), 1.0),
    "a number written to rows": lambda x, i: written(x, i, 1.0),
    "a tensor written": lambda x, i: written(x, (slice(None), 0), NUMBER),
    "fill": lambda x, i: x.clone().fill_(NUMBER) + x,
    "mul": lambda x, i: x * NUMBER + 1,
    "maximum": lambda x, i: torch.where(x > NUMBER, x, NUMBER).sin(),
    "masked": lambda x, i: x.masked_fill(x > 0, NUMBER).sin() + x.masked_fill(x > 0, 0.5),
    "pow": lambda x, i: x.abs() ** 2.5 + 2.0**x,
    "lerp": lambda x, i: torch.lerp(x, x + 1, NUMBER).cos(),
    "addcmul": lambda x, i: torch.addcmul(x, x, x, value=3.0) / NUMBER,
    "new": lambda x, i: x + torch.full((8,), 2.0, device="cuda") + torch.arange(8, device="cuda"),
    "rows": lambda x, i: F.embedding(i, x).sin() + x[i] * 2,
    "one hot": lambda x, i: F.cross_entropy(x, i) + F.one_hot(i, 8).float() @ x.t(),
    "pinned": lambda x, i: x.sin() + PINNED[0].to("cuda", non_blocking=True),
}


def waits(run: Callable[..., Any], *args: Tensor) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*args)
    except RuntimeError as error:
        assert "synchroniz" in str(error)
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def that_wait(executor: str) -> list[str]:
    """Name the programs, and gradients, that wait where eager does not."""
    PINNED[:], found = [torch.ones(4, 8).pin_memory()], list[str]()
    x, i = torch.randn(4, 8, device="cuda"), torch.tensor([0, 2, 1, 3], device="cuda")
    for name, f in PROGRAMS.items():
        total = lambda x, i, f=f: f(x, i).sum()
        for g in (total, tfn.grad(total)):
            run = tfn.jit(g, executors=[executor])
            run(x, i)
            if waits(run, x, i) and not waits(f, x, i):
                found.append(name)
    return found


@pytest.mark.parametrize("executor", ["torch", "inductor"])
def test_programs_wait_where_eager_does(executor: str) -> None:
    """In a process whose Triton is compiled: its interpreter waits."""
    command = f"import json, tests.gpu.test_waiting as t; print(json.dumps(t.that_wait({executor!r})))"
    found = subprocess.run(
        [sys.executable, "-c", command],
        env=os.environ | {"NULLGPU_VALUES": "0", "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert json.loads(found.stdout.splitlines()[-1]) == []
