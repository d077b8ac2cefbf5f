"""Executors: the last interpreters, from a trace or parts of one to a program that runs.

`base.py` defines the answers of an executor, `claims.py` asks for them, `torch_executor.py` runs
what nobody claimed. `torchinductor/`, `nvfuser/`, `triton/`, `quantized/`, `cudagraphs.py` and
`sdpa.py` are executors.

A new executor is one file that subclasses `Executor`. It must answer from the equation alone, and
compute what `evaluate` computes, up to its label.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from thunder_fn.executors.base import NUMERICS, Executor, FusionExecutor, Numerics, any_fuses
from thunder_fn.executors.claims import Claimed, Decision, claim
from thunder_fn.executors.eligibility import TORCH
from thunder_fn.executors.registry import (
    deregister_executor,
    get_executor,
    list_executors,
    register_executor,
)
from thunder_fn.executors.torch_executor import Program, lower

if TYPE_CHECKING:  # imported when they are first asked for, as executors by name are
    from thunder_fn.executors.torchinductor import backend, bisect, inductor, wait

__all__ = [
    "NUMERICS",
    "TORCH",
    "Claimed",
    "Decision",
    "Executor",
    "FusionExecutor",
    "Numerics",
    "Program",
    "any_fuses",
    "backend",
    "bisect",
    "claim",
    "deregister_executor",
    "get_executor",
    "inductor",
    "list_executors",
    "lower",
    "register_executor",
    "wait",
]


def __getattr__(name: str) -> object:
    """Import the inductor executor when something of it is first asked for."""
    if name in ("backend", "bisect", "inductor", "wait"):
        room = importlib.import_module("thunder_fn.executors.torchinductor")
        return getattr(room, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
