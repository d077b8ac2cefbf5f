"""Memos of transforms, and that they let go of what they remember."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import torch

import thunder_fn as tfn
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.version import FOLDER


def squares(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def test_caches_are_cleared() -> None:
    trace = tfn.trace(squares, torch.ones(3))
    before = grad_and_value(trace, (True,))
    assert grad_and_value(trace, (True,)) is before
    tfn.clear_caches()
    after = grad_and_value(trace, (True,))
    assert after is not before
    assert after == before


def test_cleared_caches_let_go_of_traces() -> None:
    trace = tfn.trace(squares, torch.ones(3))
    grad_and_value(trace, (True,))
    tfn.evaluate(trace, [torch.ones(3)])
    alive = weakref.ref(trace)
    tfn.clear_caches(rules=False)
    del trace
    gc.collect()
    assert alive() is None


def test_every_memo_of_traces_is_one_of_these() -> None:
    """No file of the rooms that transform traces has a cache that `clear_caches` cannot reach."""
    rooms = ("ir", "derived", "interpreters", "structured")
    files = [file for room in rooms for file in sorted(Path(FOLDER, room).rglob("*.py")) if file.name != "memos.py"]
    own = [
        file.name for file in files if re.search(r"^\s*@(functools\.)?(lru_)?cache\b", file.read_text(), re.MULTILINE)
    ]
    assert not own, "use ir/memos.py"


def test_traces_of_other_shapes_have_other_hashes() -> None:
    """A memo that is asked about many shapes would otherwise compare each trace with all before it."""
    f = tfn.checkpoint(lambda x: x.sin().cos())
    traces = [
        tfn.trace(f, torch.ones(n, 4, dtype=dtype)) for n in range(1, 40) for dtype in (torch.float32, torch.float64)
    ]
    bodies = [equation.body for trace in traces for equation in trace.equations if equation.bodies]
    for known in (traces, bodies):
        assert len(set(map(hash, known))) == len(set(known)) == len(traces)
