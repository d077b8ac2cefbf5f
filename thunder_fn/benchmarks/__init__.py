"""Benchmarks: every peer that is installed, side by side in one process, interleaved.

    python -m thunder_fn.benchmarks [NAME ...] [--json FOLDER] [--quick]

A figure is the median over rounds. In each round every peer runs once, in rotating order, so that
disturbances hit all of them alike. Ratios are medians of the rounds' ratios. Nothing
here asserts: a benchmark is no test.
"""

from __future__ import annotations

from thunder_fn.benchmarks.harness import Case, Result, run_case

__all__ = ["Case", "Result", "run_case"]
