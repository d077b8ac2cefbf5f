"""The kernel of interpreters: walk a trace, ask a boolean question about it, cut it in two.

    walk    run an interpreter over a trace, into a builder; `put` is the default step
    cut     take another selection of a trace's inputs, equations or outputs
    split   cut a trace into a first and a second half, with residuals between them
    Flow    answer a boolean question about every variable, forward or backward

These are the only ways to make a trace from a trace. Constants, constraints, sources and the names of unbacked sizes are
carried here, so no interpreter can forget them. Nothing in this folder knows an op by its name.

Change a file here only with the law `carries facts` in view (`testing/laws/interpreters.py`).
"""

from thunder_fn.ir.flow import (
    WIRINGS as WIRINGS,
    Flow as Flow,
    Port as Port,
    Wiring as Wiring,
    body_ports as body_ports,
    wiring as wiring,
)
from thunder_fn.ir.pairs import (
    COUNTS as COUNTS,
    Companion as Companion,
    Slots as Slots,
    through_bodies as through_bodies,
)
from thunder_fn.ir.split import (
    dependent as dependent,
    handing_on as handing_on,
    late_half as late_half,
    split as split,
)
from thunder_fn.ir.walk import (
    Step as Step,
    at as at,
    inline_into as inline_into,
    put as put,
    rewritten as rewritten,
    walk as walk,
)
from thunder_fn.trace import cut as cut
