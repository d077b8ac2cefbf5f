"""simplify: every interpreter that keeps a trace's values and makes it smaller, until nothing
changes.
"""

from __future__ import annotations

from thunder_fn.errors import spelled
from thunder_fn.interpreters.fold import fold_constants
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.ir.memos import memo
from thunder_fn.ir.trace import Trace, check_is_trace


@spelled()
@memo(1024, derives=False)
def simplify(trace: Trace) -> Trace:
    """Drop dead equations, compute equal ones once, fold constants, drop copies and other no-ops.

    Law: same values, bitwise; idempotent; never more equations. Checkpoints still compute again,
        random numbers are drawn as before, and outputs share no memory that they did not share.

    Raises:
        TraceTypeError: `trace` is no trace.

    Example:
        >>> import torch
        >>> from thunder_fn import trace
        >>> f = lambda x: (x.clone() * 1).view(3) + x.sin() + x.sin()
        >>> len(simplify(trace(f, torch.ones(3))).equations)
        3
    """
    check_is_trace("simplify", trace)
    while True:
        new = dce(cse(fold_constants(drop_noops(dce(trace)))))
        if new == trace:
            return trace
        trace = new
