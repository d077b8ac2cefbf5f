"""Reports on a function: its traces step by step, its memory and its cost.

Each report is a frozen value: `print` gives plain text, `rich.print` colours it, notebooks draw
those with a picture. `chains.py` collects the traces as they are made; nothing is rebuilt for show.
`page.py` writes the HTML page, whose JavaScript is in `inspector/`. A new report is one file that
reads a `Chain`.
"""

from __future__ import annotations

from thunder_fn.inspect.chains import Chain, Step, chain
from thunder_fn.inspect.chrome import chrome_trace
from thunder_fn.inspect.costs import Cost, CostReport, cost, is_collective
from thunder_fn.inspect.diffs import Diff, diff
from thunder_fn.inspect.graphs import Picture, graph
from thunder_fn.inspect.lowered import Lowered
from thunder_fn.inspect.machines import Machine, machine_named, measured_machine
from thunder_fn.inspect.measured import Measured, measure
from thunder_fn.inspect.memory_use import Buffer, Memory, memory
from thunder_fn.inspect.page import Page, compare, show
from thunder_fn.inspect.residual_tables import Residuals, residuals
from thunder_fn.inspect.rules_of_ops import RuleReport, RuleRow, explain_rule, rule_order

__all__ = [
    "Buffer",
    "Chain",
    "Cost",
    "CostReport",
    "Diff",
    "Lowered",
    "Machine",
    "Measured",
    "Memory",
    "Page",
    "Picture",
    "Residuals",
    "RuleReport",
    "RuleRow",
    "Step",
    "chain",
    "chrome_trace",
    "compare",
    "cost",
    "diff",
    "explain_rule",
    "graph",
    "is_collective",
    "machine_named",
    "measure",
    "measured_machine",
    "memory",
    "residuals",
    "rule_order",
    "show",
]
