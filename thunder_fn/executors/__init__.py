"""Executors: the last interpreters. Each turns a trace into a program that runs."""

from __future__ import annotations

from thunder_fn.executors.torch_executor import Program, lower

__all__ = ["Program", "lower"]
