"""The lines and the branches of some code that run: `sys.monitoring`, or `settrace` before 3.12.

A branch is one side of a conditional jump, so the operands of `and`, conditional expressions and
filters of comprehensions have branches of their own. A jump is named by the source of the value
that it tests: the compiler may write the test of a loop twice.

Source: PEP 669, Low impact monitoring for CPython.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FrameType
from typing import Any

Place = tuple[int, int, int, int]
"""First line, last line, first column, last column of some source."""

_SKIPPED = ("EXTENDED_ARG", "CACHE", "NOT_TAKEN")
"""Parts of instructions."""

_BETWEEN = ("TO_BOOL", "COPY")
"""Instructions between a value and the jump that tests it."""

_OF_PYTHON = ("CHECK_EXC_MATCH", "WITH_EXCEPT_START", "GET_AWAITABLE", "SEND")
"""Instructions that make the values of tests that nobody wrote."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A conditional jump: the source that it tests, and what is true of it if it jumps."""

    place: Place
    after: int
    when_taken: bool
    suffix: str = ""
    is_loop: bool = False


@cache
def jumps_of(code: CodeType) -> dict[int, Jump]:
    """The conditional jumps of some code that a user wrote, by their offsets."""
    listed = [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]
    found: dict[int, Jump] = {}
    for maker, one, following in zip(listed, listed[1:], listed[2:], strict=False):
        if one.opname == "FOR_ITER" or "_IF_" in one.opname:
            maker = _maker(listed, maker, one)
            place = _place(maker)
            is_assertion = following.opname == "LOAD_ASSERTION_ERROR"
            if place is not None and not is_assertion and maker.opname not in _OF_PYTHON:
                found[one.offset] = _jump(maker, one, place, following.offset)
    return found


def _maker(
    listed: list[dis.Instruction], before: dis.Instruction, jump: dis.Instruction
) -> dis.Instruction:
    """The instruction that made the value that a jump tests."""
    if before.opname not in _BETWEEN:
        return before
    earlier = (i for i in listed if i.offset < jump.offset and i.opname not in _BETWEEN)
    return list(earlier)[-1]


def _jump(maker: dis.Instruction, one: dis.Instruction, place: Place, after: int) -> Jump:
    is_loop, is_none = one.opname == "FOR_ITER", "NONE" in one.opname
    when_taken = not is_loop and "FALSE" not in one.opname and "NOT_NONE" not in one.opname
    if maker.opname == "MATCH_CLASS":  # it gives None where nothing matches
        return Jump(place, after, not when_taken)
    return Jump(place, after, when_taken, " is None" * is_none, is_loop)


def _place(instruction: dis.Instruction) -> Place | None:
    at = instruction.positions
    if at is None or at.lineno is None or at.end_lineno is None:
        return None
    if at.col_offset is None or at.end_col_offset is None:
        return None
    return at.lineno, at.end_lineno, at.col_offset, at.end_col_offset


Branch = tuple[CodeType, int, bool]
"""Some code, the offset of a jump in it, and whether the test was true."""

Line = tuple[CodeType, int]


class Branches:
    """The lines and the branches of some code that have run."""

    def __init__(self, codes: Collection[CodeType]) -> None:
        self.codes = frozenset(codes)
        self.lines: set[Line] = set()
        self.taken: set[Branch] = set()

    def __len__(self) -> int:
        return len(self.lines) + len(self.taken)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Note what runs in this block. On Python 3.11 a debugger's `settrace` prevents that. Later
        six tools of `sys.monitoring` do, because trace functions miss branches there.
        """
        monitoring: Any = getattr(sys, "monitoring", None)
        tool = None if monitoring is None else _free_tool(monitoring)
        if tool is not None:
            with self._monitored(monitoring, tool):
                yield
        elif monitoring is not None or sys.gettrace() is not None:
            yield
        else:
            sys.settrace(self._enter)
            try:
                yield
            finally:
                sys.settrace(None)

    def _jumped(self, code: CodeType, offset: int, to: int) -> None:
        jump = jumps_of(code).get(offset)
        if jump is not None:
            was_taken = not offset < to <= jump.after
            self.taken.add((code, offset, was_taken == jump.when_taken))

    @contextmanager
    def _monitored(self, monitoring: Any, tool: int) -> Generator[None]:
        events = monitoring.events
        monitoring.use_tool_id(tool, "thunder_fn.testing")
        on_line: Callable[[CodeType, int], None] = lambda code, line: self.lines.add((code, line))
        monitoring.register_callback(tool, events.LINE, on_line)
        monitoring.register_callback(tool, events.BRANCH, self._jumped)
        try:
            for code in self.codes:
                monitoring.set_local_events(tool, code, events.LINE | events.BRANCH)
            yield
        finally:
            for code in self.codes:
                monitoring.set_local_events(tool, code, 0)
            for event in (events.LINE, events.BRANCH):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        code, jumps = frame.f_code, jumps_of(frame.f_code)
        last = [-1]
        frame.f_trace_opcodes = True

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.lines.add((code, frame.f_lineno))
            elif event == "opcode":
                if last[0] in jumps:
                    self._jumped(code, last[0], frame.f_lasti)
                last[0] = frame.f_lasti
            return step

        return step

    # reports

    def never_ran(self) -> list[str]:
        """The lines that did not run, as `file:line: text`."""
        ran = {(code.co_filename, line) for code, line in self.lines}
        if not ran:
            return []
        missing: set[tuple[str, int]] = set()
        for code in self.codes:
            lines = {line for _, _, line in code.co_lines() if line and line > code.co_firstlineno}
            missing |= {(code.co_filename, line) for line in lines} - ran
        found = ((*place, linecache.getline(*place).strip()) for place in sorted(missing))
        return [f"{_short(file)}:{line}: {text}" for file, line, text in found if text]

    def one_sided(self) -> list[OneSided]:
        """The tests that ran and always came out alike."""
        sides: dict[OneSided, set[bool]] = {}
        for code, offset, side in self.taken:
            jump = jumps_of(code)[offset]
            test = OneSided(code.co_filename, jump.place, jump.suffix, jump.is_loop)
            sides.setdefault(test, set()).add(side)
        found = (replace(test, was=side) for test, (side, *more) in sides.items() if not more)
        return sorted(test for test in found if not (test.is_loop and test.was))


@dataclass(frozen=True, slots=True, order=True)
class OneSided:
    """The source of a test, and how it always came out."""

    file: str
    place: Place
    suffix: str = ""
    is_loop: bool = False
    was: bool = False

    @property
    def text(self) -> str:
        """The source, in one line."""
        first, last, start, end = self.place
        lines = [linecache.getline(self.file, line).rstrip("\n") for line in range(first, last + 1)]
        lines[-1] = lines[-1].encode()[:end].decode()  # columns count bytes
        lines[0] = lines[0].encode()[start:].decode()
        return " ".join(" ".join(lines).split()) + self.suffix

    def __str__(self) -> str:
        what = "never had an item" if self.is_loop else f"was never {not self.was}".lower()
        return f"{_short(self.file)}:{self.place[0]}: `{self.text}` {what}"


def _short(file: str) -> str:
    return os.path.basename(file)


def _free_tool(monitoring: Any) -> int | None:
    """A tool of `sys.monitoring` that nobody uses; None if there is none."""
    return next((tool for tool in (3, 4, 2, 0, 1, 5) if monitoring.get_tool(tool) is None), None)
