"""The trace: its data, its text, its checker, its tables of rules, and the only ways to make a
trace from a trace.

    trace, types, sources, ops, symbols, constraints, facts    the data
    pretty, fx, check                          its text, its FX graph, its grammar
    rules                                      tables of rules, one for each interpreter
    scoped                                     context variables that have a value for a while
    walking     `walk` runs an interpreter over a trace, into a builder; `put` is the default step
    splitting   `split` cuts a trace into a first and a second half, with residuals between them
    flow        `Flow` answers a boolean question about every variable, forward or backward

Constants, constraints, sources and names of unbacked sizes are carried by walk, cut and split, so
no interpreter can forget them. These three know no op by its name. Change them only with the law
`carries facts` in view.

An interpreter of a user's own imports what it needs from here: the names below.
"""

from thunder_fn.ir.flow import WIRINGS, Flow, Port, Wiring, body_ports, wiring
from thunder_fn.ir.memos import memo
from thunder_fn.ir.pairs import COUNTS, Companion, Slots, through_bodies
from thunder_fn.ir.rules import Mask, Rules
from thunder_fn.ir.splitting import dependent, handing_on, late_half, split
from thunder_fn.ir.trace import (
    Atom,
    Constant,
    Equation,
    Literal,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    cut,
    python_arg,
    subtraces,
    type_of,
)
from thunder_fn.ir.walking import Step, at, inline_into, put, rewritten, walk

__all__ = [
    "COUNTS",
    "WIRINGS",
    "Atom",
    "Companion",
    "Constant",
    "Equation",
    "Flow",
    "Literal",
    "Mask",
    "Op",
    "Port",
    "Rules",
    "Slots",
    "Source",
    "Step",
    "TensorType",
    "Trace",
    "TraceBuilder",
    "Type",
    "Var",
    "Wiring",
    "at",
    "body_ports",
    "cut",
    "dependent",
    "handing_on",
    "inline_into",
    "late_half",
    "memo",
    "put",
    "python_arg",
    "rewritten",
    "split",
    "subtraces",
    "through_bodies",
    "type_of",
    "walk",
    "wiring",
]
