"""The interface for executors that compile regions or loops, as torchinductor and nvfuser do.

It adds to `thunder_fn.extend` the reference semantics of a region and the program for what a
compiler refuses. It also has the aliases and layouts of memory, and the parts of loops. Traces
themselves are in `thunder_fn.ir`.
"""

from __future__ import annotations

from thunder_fn.capture.numbers.arguments import stride_pattern, strides_of
from thunder_fn.derived.leaf_vjp import CANNOT, alone, decomposition
from thunder_fn.executors.base import NOT_REGISTERED, Numerics, RunFunction
from thunder_fn.executors.in_front import in_front
from thunder_fn.executors.lending import Memory
from thunder_fn.executors.pruning import drop_dead
from thunder_fn.executors.regions import Group
from thunder_fn.executors.reuse import CLONE, is_dense_layout
from thunder_fn.executors.spoiling import guarded, is_on as memory_is_checked
from thunder_fn.executors.taking import take, taken_from
from thunder_fn.executors.torch_executor import Program, lower, not_compiled
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir.memory import find_aliases
from thunder_fn.structured.shared.scan_parts import SCAN, Loop
from thunder_fn.structured.shared.while_parts import WHILE, While

__all__ = [
    "CANNOT",
    "CLONE",
    "Group",
    "Loop",
    "Memory",
    "NOT_REGISTERED",
    "Numerics",
    "Program",
    "RunFunction",
    "SCAN",
    "WHILE",
    "While",
    "alone",
    "dce",
    "decomposition",
    "drop_dead",
    "evaluate",
    "find_aliases",
    "guarded",
    "in_front",
    "memory_is_checked",
    "is_dense_layout",
    "lower",
    "not_compiled",
    "stride_pattern",
    "strides_of",
    "take",
    "taken_from",
]
