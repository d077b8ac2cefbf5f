"""The mutants that survive although every law is held, each with its reason.

A reason names a rule that a reader can check in the source of the function, without running it. A
survivor that is not here shows a program that is not drawn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

SHORTCUT = "a shortcut: the lines below it compute an equal trace"
NO_SUCH = "the other side of the test is never true of a trace that `check` accepts"
COST = "a limit on memory, not on values: both sides compute the same"
KEY = "a key of a dict: only compared with keys that are made the same way"

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "dce_to condition false: if len(kept) == len(trace.equations)": SHORTCUT,
        "_dce_composite condition false: if body is equation.body": SHORTCUT,
        "_with_folded_bodies condition false: if not equation.bodies": SHORTCUT,
        "_compute condition false: if not wanted": SHORTCUT,
        "_foldable negated condition: found if computed": COST,
        "_foldable comparison: _bytes(var) <= limit_bytes": COST,
        "_foldable dropped condition: _bytes(var) <= limit_bytes": COST,
        "_bytes ": COST,
        "cse swapped items: (equation.op, equation.args": KEY,
        "without_twins swapped items: (equation.op": KEY,
        "same_as dropped condition: equation.op.kind != 'leaf'": (
            "the table of rules has names of leaves with one result only"
        ),
        "sums_along_dims dropped condition: equation.op.name != 'aten.sum.default' or": NO_SUCH,
        "sums_along_dims dropped condition: not isinstance(type, TensorType)": (
            "the operand of a sum is a tensor, and the sum of a scalar over no dims is the scalar"
        ),
        "sums_along_dims operator: not isinstance(type, TensorType)": (
            "the operand of a sum is a tensor, and the sum of a scalar over no dims is the scalar"
        ),
        "scalars_folded swapped items: (equation.args[1], inner.args[1])": (
            "the product of two numbers is the same in both orders"
        ),
        "_dce_composite dropped condition: all(flags) and (all(reads)": (
            "a composite that is no call has a plain name and no keywords: it is built as it was"
        ),
        "_dce_equation negated condition: new if same": (
            "the rules of the structured ops that are drawn cut bodies themselves"
        ),
        "fold_constants dropped filter: for var in bound(folded)": (
            "`cut` drops constants that nothing reads"
        ),
        "_compute dropped keyword: cut(trace, inputs=(), equations=equations": (
            "the name of a trace that is run once and dropped"
        ),
        "leaving_variables dropped filter: for one in trace.equations": (
            "more variables are taken for leaving ones: fewer copies go, none that must stay"
        ),
    }
)
"""The reasons, by the beginning of what names a mutant without its line."""


def reason_of(bug: str) -> str:
    """The reason why a mutant survives, or that nobody has given one."""
    name = re.sub(r":\d+ ", " ", bug, count=1)
    found = (reason for start, reason in REASONS.items() if name.startswith(start))
    return next(found, "UNEXPLAINED: a program that shows it is not drawn")
