"""The record of a search: ops and arguments of traces, and lines of the transform's own code."""

from __future__ import annotations

import linecache
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace
from thunder_fn.testing.vocabulary import codes_of, functions_of

Arc = tuple[CodeType, int, int]


class Watch:
    """The lines of a transform's own code that have run, and steps from line to line."""

    def __init__(self, transform: Callable[[Trace], Trace]) -> None:
        functions = functions_of(transform)
        self.codes = {code for function in functions for code in codes_of(function.__code__)}
        self.arcs: set[Arc] = set()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Note which lines run. Where a debugger or a coverage tool traces, nothing is noted."""
        if sys.gettrace() is not None:
            yield
            return
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        code, last = frame.f_code, [0]

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.arcs.add((code, last[0], frame.f_lineno))
                last[0] = frame.f_lineno
            return line

        return line

    def never_ran(self) -> list[str]:
        """The lines of the transform that no trace has reached, as `file:line: text`."""
        ran = {(code.co_filename, line) for code, _, line in self.arcs}
        if not ran:
            return []
        missing: set[tuple[str, int]] = set()
        for code in self.codes:
            lines = {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
            missing |= {(code.co_filename, line) for line in lines} - ran
        return [
            f"{os.path.basename(file)}:{line}: {text}"
            for file, line in sorted(missing)
            if (text := linecache.getline(file, line).strip())
        ]


@dataclass
class Coverage:
    """The report of `check_transform`: the ops and arguments that were tried. `print` it.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.testing import Coverage
        >>> found = Coverage()
        >>> found.add(tfn.trace(torch.sin, torch.ones(2)))
        True
        >>> dict(found.ops), found.traces
        ({'aten.sin.default': 1}, 1)
    """

    traces: int = 0
    ops: Counter[str] = field(default_factory=Counter[str])
    arguments: Counter[str] = field(default_factory=Counter[str])
    dtypes: Counter[str] = field(default_factory=Counter[str])
    nestings: Counter[str] = field(default_factory=Counter[str])
    applied: Counter[str] = field(default_factory=Counter[str])
    vocabulary: tuple[str, ...] = ()
    never_ran: tuple[str, ...] = ()
    shapes: set[Any] = field(default_factory=set[Any])

    def add(self, trace: Trace) -> bool:
        """Count what is in a trace. Return whether some of it is new."""
        self.traces += 1
        before = len(self.shapes)
        for where, equation in _equations(trace, ()):
            self._count(where, equation)
        return len(self.shapes) > before

    def _count(self, where: tuple[str, ...], equation: Equation) -> None:
        name = equation.op.name
        self.ops[name] += 1
        if equation.bodies:
            self.nestings[" > ".join((*where, name))] += 1
            self.shapes.add((where, name, len(equation.bodies[0].equations)))
        for key, value in equation.kwargs:
            if equation.op.kind == "leaf":
                self.arguments[f"{name} {key}={_short(value)}"] += 1
        for var in equation.outputs:
            if isinstance(var.type, TensorType):
                self.dtypes[str(var.type.dtype).removeprefix("torch.")] += 1
        self.shapes.add((where[-1:], name, tuple(key for key, _ in equation.kwargs)))

    def laws_that_said_nothing(self) -> list[str]:
        """The laws whose condition held for no trace."""
        return [name for name, count in self.applied.items() if count == 0]

    def never_drawn(self) -> list[str]:
        """The ops that the transform names and that were in no trace."""
        return [name for name in self.vocabulary if name not in self.ops]

    def __str__(self) -> str:
        leaves = [name for name in self.ops if name.count(".") == 2]
        lines = [
            f"{self.traces} traces, {len(leaves)} overloads, {len(self.arguments)} keyword"
            f" arguments, dtypes {', '.join(sorted(self.dtypes))}",
            f"ops that the transform names: {', '.join(self.vocabulary) or 'none found'}",
            f"nestings: {', '.join(name for name, _ in self.nestings.most_common(12))}"
            + (f", and {len(self.nestings) - 12} others" if len(self.nestings) > 12 else ""),
        ]
        if missing := self.never_drawn():
            lines.append(f"never drawn: {', '.join(missing)}. Test them on traces of your own.")
        if silent := self.laws_that_said_nothing():
            lines.append(f"laws that no trace could break: {', '.join(silent)}")
        if self.never_ran:
            lines.append(
                "lines of the transform that never ran (pass `ops=` to draw more of an op):"
            )
            lines += [f"  {line}" for line in self.never_ran]
        return "\n".join(lines)


def _equations(trace: Trace, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Equation]]:
    for equation in trace.equations:
        yield where, equation
        for body in equation.bodies:
            yield from _equations(body, (*where, equation.op.name))


def _short(value: Any) -> str:
    return str(value.value if isinstance(value, Literal) else value)[:24]
