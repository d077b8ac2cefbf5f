"""The cost of a step on many ranks, before anything runs.

`plans.py` captures the step of one rank on tensors without values. `streams.py` times its equations
on a `Hardware` (`rates.py`, `hardware/*.toml`), and collectives by `links.py`. Operations, bytes
and memory are those of `inspect`.
"""

from __future__ import annotations

from thunder_fn.planning.cuts import Way
from thunder_fn.planning.depth import plan_layers
from thunder_fn.planning.entry import plan
from thunder_fn.planning.links import Collective, collective_seconds
from thunder_fn.planning.plans import Plan
from thunder_fn.planning.rates import Hardware, Link, hardware_named
from thunder_fn.planning.search import Search
from thunder_fn.planning.worlds import fake_world

__all__ = [
    "Collective",
    "Hardware",
    "Link",
    "Plan",
    "Search",
    "Way",
    "collective_seconds",
    "fake_world",
    "hardware_named",
    "plan",
    "plan_layers",
]
