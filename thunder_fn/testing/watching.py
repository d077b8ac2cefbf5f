"""The record of a search: ops and arguments of traces, and what ran of the transform's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from thunder_fn.ir.trace import Equation, Literal, TensorType, Trace
from thunder_fn.testing.branches import Branches, OneSided
from thunder_fn.testing.vocabulary import Functions, named_in

FEW = 20
"""An op in fewer equations than this has been drawn too rarely."""


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
    one_sided: tuple[OneSided, ...] = ()
    ops_to_pass: tuple[str, ...] = ()
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
            lines.append("lines of the transform that never ran:")
            lines += [f"  {line}" for line in self.never_ran]
        if self.one_sided:
            lines.append("tests in the transform that always came out alike:")
            lines += [f"  {test}" for test in self.one_sided]
        return "\n".join([*lines, *self._to_see_more()])

    def note_branches(self, ran: Branches, functions: Functions) -> None:
        """Note which lines and branches of the transform were not reached."""
        self.never_ran, self.one_sided = tuple(ran.never_ran()), tuple(ran.one_sided())
        named = (name for test in self.one_sided for name in named_in(test.text, functions))
        self.ops_to_pass = tuple(name for name in dict.fromkeys(named) if self.ops[name] < FEW)

    def _to_see_more(self) -> list[str]:
        """Advice: the options with which more of the transform runs."""
        if not self.never_ran and not self.one_sided:
            return []
        lines = ["to see more, pass"]
        if self.ops_to_pass:
            lines.append(f"  ops={list(self.ops_to_pass)}: drawn fewer than {FEW} times")
        return [*lines, "  traces=[tfn.trace(f, *arguments)]: a program in which the test differs"]


def _equations(trace: Trace, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Equation]]:
    for equation in trace.equations:
        yield where, equation
        for body in equation.bodies:
            yield from _equations(body, (*where, equation.op.name))


def _short(value: Any) -> str:
    return str(value.value if isinstance(value, Literal) else value)[:24]
