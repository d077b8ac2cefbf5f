"""Transforms that change how parameters are stored: quantisation, adapters. See `thunder_fn.interpreters.rewrite`."""

from __future__ import annotations

from thunder_fn.interpreters.rewrite import Rewrite
from thunder_fn.rewrites.functions import Prepared, Rewritten, lora, quantize
from thunder_fn.rewrites.modules import RewrittenModule
from thunder_fn.rewrites.schemes import SCHEMES, Scheme, fp8, int4

__all__ = [
    "SCHEMES",
    "Prepared",
    "Rewrite",
    "Rewritten",
    "RewrittenModule",
    "Scheme",
    "fp8",
    "int4",
    "lora",
    "quantize",
]
