"""One run, or two to compare, as the compact data that the page reads.

A second run's steps are compared with those of the first that have the same part in it. Everything
that repeats is in a table and has a number there: types, ops, sources, modules, costs,
claims and bodies. Bodies are as shared in the data as they are in the traces. The page unfolds them
the way `flat.py` does, so leaves and values have the same numbers on both sides.
"""

from __future__ import annotations

import linecache
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_fn.executors import Decision
from thunder_fn.inspect.chains import Chain, Step
from thunder_fn.inspect.costs import cost_of
from thunder_fn.inspect.diffs import Diff, Pairs, diff_flat, paired
from thunder_fn.inspect.flat import unfolded
from thunder_fn.inspect.machines import Machine
from thunder_fn.inspect.measured import Measured
from thunder_fn.inspect.memory_use import Memory
from thunder_fn.interpreters.checkpoint.cost import bytes_of
from thunder_fn.ir.text import literal_text, object_name
from thunder_fn.ir.trace import Equation, Literal, Source, Trace, Type, Var
from thunder_fn.lines import editor, is_internal

CONTEXT = 3
"""The number of lines of source that are shown before and after the user's line."""
KINDS = ("leaf", "composite", "structured")
LETTERS = {"same": "s", "changed": "c", "added": "a"}


class _Table:
    """A table of things with numbers, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.entries: list[Any] = []

    def number(self, key: Hashable, entry: Any) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.entries)
            self.entries.append(entry)
        return self.numbers[key]


@dataclass(frozen=True, slots=True)
class Run:
    """A chain with what is known of it: each step's memory, the machine's peaks, and what was
    measured.
    """

    name: str
    found: Chain
    memories: tuple[Memory, ...]
    machine: Machine | None = None
    measured: Measured | None = None


def _measured(found: Measured) -> list[Any]:
    count = sum(one.count for one in found.kernels)
    return [found.seconds, found.calls, found.profile, found.device_seconds, count]


class _Encoding:
    def __init__(self) -> None:
        self.types, self.ops, self.files, self.modules = _Table(), _Table(), _Table(), _Table()
        self.sources, self.costs, self.claims, self.tensors = _Table(), _Table(), _Table(), _Table()
        self.bodies, self.known = list[Any](), dict[Hashable, int]()
        self.decisions = dict[tuple[str, str], Decision]()
        self.steps, self.order = list[dict[str, Any]](), list[Step]()
        self.timelines = _Table()
        self.modules.number("", "")

    def type(self, type: Type) -> int:
        return self.types.number(type, [str(type), bytes_of(type)])

    def op(self, equation: Equation) -> int:
        op = equation.op
        return self.ops.number(op, [op.name, KINDS.index(op.kind)])

    def module(self, name: str) -> int:
        return self.modules.number(name, name)

    def source(self, source: Source | None) -> int:
        if source is None:
            return -1
        name = "" if is_internal(source.file) else source.file  # no line of the user's
        file = self.files.number(name, name)
        inside = -1 if source.around is None else self.module(source.inside)
        entry = file, source.line, source.function, self.module(source.module), inside
        return self.sources.number(entry, list(entry))

    def claim(self, equation: Equation) -> int:
        decision = self.decisions.get(
            (equation.op.name, equation.source.place if equation.source else "")
        )
        if decision is None:
            return -1
        entry = [
            decision.taken_by,
            decision.how,
            list(map(list, decision.refusals)),
            decision.times,
        ]
        return self.claims.number(decision, entry)

    def body(self, trace: Trace) -> int:
        key = (trace, trace.origin)
        if key not in self.known:
            equations = [self.equation(equation) for equation in trace.equations]
            constants = [
                [self.type(one.var.type), self.tensors.number(id(one.tensor), None)]
                for one in trace.constants
            ]
            inputs = [self.type(var.type) for var in trace.inputs]
            outputs = [_arg(atom) for atom in trace.outputs]
            self.known[key] = len(self.bodies)
            self.bodies.append([trace.name, inputs, constants, equations, outputs])
        return self.known[key]

    def equation(self, equation: Equation) -> list[Any]:
        body = unfolded(equation)
        own = (
            []
            if body is not None and equation.op.kind == "composite"
            else [self.body(one) for one in equation.bodies]
        )
        spent = cost_of(equation)
        return [
            self.op(equation),
            [_arg(arg) for arg in equation.args],
            [[key, _arg(arg)] for key, arg in equation.kwargs] or 0,
            [self.type(var.type) for var in equation.outputs],
            self.source(equation.source),
            -1 if body is None else self.body(body),
            own or 0,
            self.costs.number(spent, [spent.flops, spent.num_bytes, spent.sent]),
            self.claim(equation),
        ]

    def run(self, run: Run, number: int, others: Sequence[Step | None]) -> dict[str, Any]:
        """A run, whose steps are appended. `others` has the steps that they are compared with."""
        found, first = run.found, len(self.steps)
        self.decisions, self.known = dict(_decisions(found)), {}
        for position, (step, other) in enumerate(zip(found.steps, others, strict=True)):
            timeline = self.timeline(run.memories[position])
            entry = self.step(found, position, first) | {"run": number, "memory": timeline}
            if other is not None:
                diff = diff_flat(other.flat, step.flat)
                before = next(at for at, one in enumerate(self.order) if one is other)
                entry["across"] = self.changes(diff, before, paired(diff.before, diff.after))
            self.steps.append(entry)
        self.order += found.steps
        machine = run.machine
        return {
            "name": run.name,
            "arguments": list(found.arguments),
            "leftOut": list(map(list, found.left_out)),
            "saved": [list(pair) for pair in found.saved],
            "memory": self.timeline(run.memories[-1]),
            "machine": machine
            and [machine.name, machine.flops_per_second, machine.bytes_per_second],
            "measured": run.measured and _measured(run.measured),
        }

    def step(self, found: Chain, position: int, first: int) -> dict[str, Any]:
        step, diff = found.steps[position], found.diff(position)
        entry: dict[str, Any] = {
            "name": step.name,
            "kind": step.kind,
            "ms": round(step.seconds * 1e3, 3),
            "body": self.body(step.trace),
            "modules": [self.module(name) for name in found.modules(position)],
        }
        split = found.split
        if split is not None and step.name.startswith("forward"):
            entry["results"] = len(split.forward.outputs) - split.num_extra
        if step.program is not None:
            entry["inPlace"] = sorted(step.program.reuse.in_place)
            entry["text"] = step.program.text
        if diff is not None and step.before is not None:
            pairs = paired(diff.before, diff.after) if step.inputs is None else step.inputs
            entry["own"] = self.changes(diff, first + step.before, pairs)
        return entry

    def changes(self, diff: Diff, before: int, pairs: Pairs) -> dict[str, Any]:
        return {
            "before": before,
            "matches": [-1 if at is None else at for at in diff.matches],
            "status": "".join(LETTERS[status] for status in diff.status),
            "whys": {position: why for position, why in enumerate(diff.whys) if why},
            "removed": [
                [leaf, place] for leaf, place in zip(diff.removed, _anchors(diff), strict=True)
            ],
            "inputs": [list(pair) for pair in pairs],
            "counts": diff.counts,
        }

    def lines(self) -> dict[str, dict[str, str]]:
        """The user's lines with those around them, by file and line."""
        wanted: dict[int, set[int]] = {}
        for file, line, *_ in self.sources.entries:
            wanted.setdefault(file, set()).update(range(max(1, line - CONTEXT), line + CONTEXT + 1))
        found: dict[str, dict[str, str]] = {}
        for file, numbers in wanted.items():
            texts = {
                str(line): linecache.getline(self.files.entries[file], line)
                for line in sorted(numbers)
            }
            found[str(file)] = {line: text.rstrip() for line, text in texts.items() if text}
        return found

    def timeline(self, memory: Memory) -> int:
        """The number of a timeline. Steps have one in common if they run one after the other, or
        are equal.
        """
        if id(memory) not in self.timelines.numbers:
            return self.timelines.number(id(memory), self.memory(memory))
        return self.timelines.numbers[id(memory)]

    def memory(self, memory: Memory) -> dict[str, Any]:
        names, kinds = _Table(), _Table()
        return {
            "starts": list(memory.starts),
            "length": len(memory.names),
            "peak": memory.peak,
            "unknown": memory.unknown,
            "unseen": memory.unseen,
            "peakAt": memory.peak_at,
            "inputs": memory.input_bytes,
            "residuals": memory.residual_bytes,
            "outputs": memory.output_bytes,
            "buffers": [
                [
                    *(one.born, one.dies, one.num_bytes, kinds.number(one.kind, one.kind)),
                    *(
                        names.number(one.what, one.what),
                        self.module(one.module),
                        one.program,
                        one.var,
                    ),
                ]
                for one in memory.buffers
            ],
            "names": names.entries,
            "kinds": kinds.entries,
        }


def encode(runs: Sequence[Run]) -> dict[str, Any]:
    """The data of a page: of one run, or of two that are compared."""
    encoding = _Encoding()
    first = runs[0].found.steps
    shown = [
        encoding.run(run, number, counterparts(first, run.found.steps, number))
        for number, run in enumerate(runs)
    ]
    return {
        "runs": shown,
        "steps": encoding.steps,
        "memories": encoding.timelines.entries,
        "types": encoding.types.entries,
        "ops": encoding.ops.entries,
        "modules": encoding.modules.entries,
        "files": [_short(file) for file in encoding.files.entries],
        "folder": Path.cwd().as_posix(),
        "editor": editor(),
        "lines": encoding.lines(),
        "sources": encoding.sources.entries,
        "costs": encoding.costs.entries,
        "claims": encoding.claims.entries,
        "bodies": encoding.bodies,
    }


def counterparts(first: Sequence[Step], steps: Sequence[Step], number: int) -> list[Step | None]:
    """The step of the first run that has the same part in it as each of these: the same kind and
    turn, and for halves and programs the same half. None for all steps of the first run itself.
    """
    if not number:
        return [None] * len(steps)
    known = dict(_parts(first))
    return [known.get(part) for part, _ in _parts(steps)]


def _parts(steps: Sequence[Step]) -> Iterator[tuple[Hashable, Step]]:
    seen = Counter[Hashable]()
    for step in steps:
        half = step.name.partition(" ")[0] if step.kind in ("split", "program") else ""
        part = step.kind, "" if half == "program" else half
        yield (*part, seen[part]), step
        seen[part] += 1


def _short(file: str) -> str:
    """The path from the working directory, where the file is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _arg(arg: Any) -> Any:
    """A variable by its number, a literal by its text, a tuple as a list."""
    match arg:
        case Var():
            return arg.index
        case Literal():
            text = literal_text(arg.value, lambda value: f"<{object_name(value)}>")
            return text if len(text) <= 200 else f"{text[:199]}…"
        case _:
            return [_arg(item) for item in arg]


def _decisions(found: Chain) -> Iterator[tuple[tuple[str, str], Decision]]:
    """The decision about each op at each line, the first time that it was asked about."""
    seen = set[tuple[str, str]]()
    for decision in found.decisions:
        key = decision.op, decision.place
        if key not in seen:
            seen.add(key)
            yield key, decision


def _anchors(diff: Diff) -> list[int]:
    """The leaf of the new trace before which each removed leaf would be."""
    pairs = sorted(
        (match, position) for position, match in enumerate(diff.matches) if match is not None
    )
    places = [match for match, _ in pairs]
    found: list[int] = []
    for leaf in diff.removed:
        at = bisect_left(places, leaf)
        found.append(pairs[at - 1][1] + 1 if at else 0)
    return found
