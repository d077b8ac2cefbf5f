"""Laws of transforms as functions: they depend on the trace alone, not on what else is going on.

Two threads are tried in order, not by chance. Before each line of the transform's own code another
thread runs the transform on another trace, from beginning to end. So one preemption stands at each
place where a thread can lose the processor, whatever the load of the machine is.

Source: Musuvathi and Qadeer, Iterative context bounding for systematic testing of multithreaded
programs, PLDI 2007: most bugs of threads need one preemption or two.
"""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

from thunder_fn.ir.trace import Trace, cut
from thunder_fn.testing.laws.comparing import Inputs, Law, Transform, holds, law_of

MOST_PREEMPTIONS = 60
"""The number of lines, evenly spread over those that run, before which the other thread runs."""

PATIENCE_SECONDS = 1.0
"""The time for which the other thread is waited for: it may wait for a lock of the first."""


def works_in_threads(transform: Transform, codes: Collection[CodeType]) -> Law:
    """Make the same traces while another thread transforms another trace.

    Args:
        codes: the transform's own code.
    """
    numbers = itertools.count()

    def new(trace: Trace) -> Trace:
        """Make the trace under a name that no memo knows."""
        return transform(trace.renamed(f"{trace.name}_{id(numbers)}_{next(numbers)}"))

    def law(trace: Trace, inputs: Inputs) -> bool:
        if sys.gettrace() is not None or not trace.equations:
            return False
        other = _another(trace)
        lines: list[int] = []
        want = _traced(lambda: new(trace), codes, lambda: lines.append(0)), new(other)
        every = -(-len(lines) // MOST_PREEMPTIONS) or 1
        made, count = list[Trace](), [0]

        def preempt() -> None:
            count[0] += 1
            if count[0] % every == 0:
                thread = threading.Thread(target=lambda: made.append(new(other)), daemon=True)
                thread.start()
                thread.join(PATIENCE_SECONDS)

        have = _traced(lambda: new(trace), codes, preempt)
        holds(have == want[0], "another thread changed the result", first=want[0], second=have)
        for one in made:
            holds(one == want[1], "another thread changed the result", first=want[1], second=one)
        return bool(made)

    return law


def _another(trace: Trace) -> Trace:
    """The trace without its last equation that nothing reads, under another name."""
    kept = trace.equations[:-1]
    known = {var for e in kept for var in e.outputs} | set(trace.inputs)
    known |= {constant.var for constant in trace.constants}
    outputs = [var for e in kept[-1:] for var in e.outputs] or list(trace.inputs)
    outputs += [atom for atom in trace.outputs if atom in known]
    return cut(trace, equations=kept, outputs=outputs, name="other")


def _traced(
    f: Callable[[], Trace], codes: Collection[CodeType], at_line: Callable[[], None]
) -> Trace:
    """Run f in this thread; call something before each line of some code."""

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        return line if frame.f_code in codes else None

    def line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            at_line()
        return line

    sys.settrace(enter)
    try:
        return f()
    finally:
        sys.settrace(None)


@law_of
def depends_on_values(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Make the same trace of a copy, none of whose objects is one of the first trace's: sets and
    dicts by identity come in another order there.
    """
    copy: Trace = pickle.loads(pickle.dumps(trace))
    first, second = transform(trace), transform(copy)
    same = str(first) == str(second)
    holds(same, "a copy of the trace became another trace", first=first, second=second)
    return bool(trace.equations)


def laws_of_functions(transform: Transform, codes: Collection[CodeType]) -> dict[str, Law]:
    """The laws that every transform keeps, as it is a function of a trace."""
    return {
        "depends on the trace alone": depends_on_values(transform),
        "works in threads": works_in_threads(transform, codes),
    }
