"""Executors: the last interpreters. Each turns a trace, or parts of one, into a program that runs."""

from __future__ import annotations

from thunder_fn.executors.asking import TORCH
from thunder_fn.executors.base import NUMERICS, Executor, FusionExecutor, Numerics, any_fuses
from thunder_fn.executors.claims import Claimed, Decision, claim
from thunder_fn.executors.compiled import backend, bisect, inductor, wait
from thunder_fn.executors.registry import deregister_executor, get_executor, list_executors, register_executor
from thunder_fn.executors.torch_executor import Program, lower

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
