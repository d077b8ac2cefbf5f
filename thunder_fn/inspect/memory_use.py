"""Memory over a program: what lives when, computed from the trace.

A program is run on tensors without values, which share storages as real ones do, so views and
copies are told apart by PyTorch itself. A storage lives from the equation that makes it to the last
one that reads it, which is where the program deletes it. Equations in place make none. Inputs are
the caller's and are counted apart.

    memory of step: peak 17.6 MiB at equation 146 of 452 (aten.gelu_backward.default in blocks.0);
    residuals ...

Memory allocated and given back inside an equation is its scratch: oneDNN's, that of a loop's step,
and that of a compiled region. The last is found by running its code without kernels (`scratch.py`).
Of code that does not say, a user's operator among it, nobody knows; the summary says how often. A
test compares the computed peak with the measured one (`tests/unit/test_inspect_memory.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from thunder_fn.errors import spelled
from thunder_fn.inspect.chains import Chain, Step, chain
from thunder_fn.inspect.flat import only_leaves
from thunder_fn.inspect.storages import Buffer, Run, live_of
from thunder_fn.inspect.tables import bytes_text, plain, rich_table
from thunder_fn.ir.notebook import Shown
from thunder_fn.ir.text import escaped
from thunder_fn.ir.trace import Source


@dataclass(frozen=True, repr=False)
class Memory(Shown):
    """The lifetimes of buffers. Positions count the equations of the forward program, then those of
    the backward.

    Attributes:
        buffers: all memory, in the order in which it is made.
        starts: where each program begins; programs are the forward and the backward where there are
            two.
        names: what runs at each position.
        unknown: how many buffers have a size that depends on data, each unknown dim of which is
            counted as 1.
        unseen: how many equations run in code that does not say what it allocates while it runs,
            which is not counted.
        elsewhere: of a program that computes on another device, the buffers in the CPU's memory,
            such as offloaded ones. They are not among `buffers`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> found = tfn.inspect.memory(lambda x: x.sin().cos(), torch.ones(256))
        >>> found.peak, found.names
        (1024, ('aten.sin.default', 'aten.cos.default'))
    """

    function: str
    buffers: tuple[Buffer, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    starts: tuple[int, ...] = (0,)
    unknown: int = 0
    unseen: int = 0
    elsewhere: tuple[Buffer, ...] = field(default=(), repr=False)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes that live while each equation runs, beside what the caller holds."""
        return self.live_of(lambda buffer: buffer.kind != "input")

    def live_of(self, wanted: Callable[[Buffer], bool]) -> tuple[int, ...]:
        """The bytes of some of the buffers that live while each equation runs."""
        return live_of(filter(wanted, self.buffers), len(self.names))

    @property
    def peak(self) -> int:
        """The most bytes that live at a time, beside what the caller holds."""
        return max(self.live, default=0)

    @property
    def peak_at(self) -> int:
        """The position of the equation where most lives."""
        return max(range(len(self.live)), key=self.live.__getitem__, default=0)

    @property
    def input_bytes(self) -> int:
        """Bytes that the caller holds: arguments and closed-over tensors."""
        return self._sum("input")

    @property
    def residual_bytes(self) -> int:
        """Bytes that the forward keeps for the backward, arguments left out."""
        return self._sum("residual")

    @property
    def output_bytes(self) -> int:
        """Bytes of the results."""
        return self._sum("output")

    def _sum(self, kind: str) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.kind == kind)

    def at_peak(self) -> list[Buffer]:
        """The buffers that live at the peak, largest first."""
        found = [
            one
            for one in self.buffers
            if one.kind != "input" and one.born <= self.peak_at <= one.dies
        ]
        return sorted(found, key=lambda buffer: -buffer.num_bytes)

    def by_module(self, depth: int = 2) -> dict[str, int]:
        """The bytes that live at the peak, by the module that made them, largest first."""
        found: defaultdict[str, int] = defaultdict(int)
        for buffer in self.at_peak():
            found[".".join(buffer.module.split(".")[:depth]) or "(no module)"] += buffer.num_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def summary(self) -> str:
        """The report in one line."""
        if not self.names:
            return escaped(f"memory of {self.function}: nothing runs")
        at = self.peak_at
        where = f" in {self.modules[at]}" if self.modules[at] else ""
        return escaped(
            f"memory of {self.function}: peak {bytes_text(self.peak)} at equation {at} of"
            f" {len(self.names)} ({self.names[at]}{where}); residuals"
            f" {bytes_text(self.residual_bytes)}, outputs {bytes_text(self.output_bytes)}, held by"
            f" the caller {bytes_text(self.input_bytes)}"
            + (
                f"; {self.unknown} sizes depend on data, a dim of those counted as 1"
                if self.unknown
                else ""
            )
            + (
                f"; without what {_calls(self.unseen)} inside, which is unknown"
                if self.unseen
                else ""
            )
        )

    def rows(self, limit: int = 12) -> list[tuple[str, ...]]:
        """The buffers at the peak: bytes, kind, maker, module, the user's line."""
        known = self.at_peak()
        found = [
            (bytes_text(one.num_bytes), one.kind, one.what, one.module, _line(one.source))
            for one in known[:limit]
        ]
        rest = known[limit:]
        if rest:
            found.append(
                (bytes_text(sum(one.num_bytes for one in rest)), "", f"{len(rest)} more", "", "")
            )
        return found

    def __str__(self) -> str:
        return "\n".join([self.summary, "at the peak:", plain(_HEADER, self.rows())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(
            Text(self.summary, style="bold"), rich_table(_HEADER, self.rows(), "at the peak")
        )

    def save(self, path: str | Path) -> Path:
        """Write the timeline as a picture, PNG or what else matplotlib knows by the path's ending.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        from thunder_fn.inspect.pictures import memory_picture

        return memory_picture(self, Path(path))

    def _repr_png_(self) -> bytes:
        from thunder_fn.inspect.pictures import memory_png

        return memory_png(self)


_HEADER = ("live", "kind", "made by", "module", "line")


def _calls(count: int) -> str:
    return (
        "1 call of an executor allocates" if count == 1 else f"{count} calls of executors allocate"
    )


def _line(source: Source | None) -> str:
    return f"{Path(source.file).name}:{source.line}" if source is not None else ""


@spelled()
def memory(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Memory:
    """The memory that `jit(f)(*args, **kwargs)` takes, over its program. Nothing is run.

    If an argument requires a gradient the backward follows the forward on the same axis.

    Law: on the CPU the peak is within 10% of the measured one, on the GPT and the CNN of the tests.

    Errors as in `chain`.

    Example:
        >>> import torch
        >>> found = memory(lambda x: (x.sin() @ x.t()).sum(), torch.ones(64, 64))
        >>> found.peak, found.names[found.peak_at]
        (32768, 'aten.mm.default')
    """
    return memory_of(chain(f, *args, **kwargs))


def memory_of(found: Chain) -> Memory:
    """The memory of the programs of a chain."""
    return _memory(found, found.programs)


def memories_of(found: Chain) -> tuple[Memory, ...]:
    """The memory of each step of a chain.

    A step before the programs runs equation by equation and reuses nothing. The halves of a split,
    as both programs, have one timeline.
    """
    known = dict[Hashable, Memory]()
    made = list[Memory]()
    for step in found.steps:
        drawn = _drawn(found, step)
        key = tuple(_sameness(found, one) for one in drawn)
        if key not in known:
            known[key] = _memory(found, drawn)
        made.append(known[key])
    return tuple(made)


def _drawn(found: Chain, step: Step) -> tuple[Step, ...]:
    """The steps that share a timeline with a step, itself among them."""
    if step.kind not in ("split", "program"):
        return (step,)
    return tuple(other for other in found.steps if other.kind == step.kind)


def _sameness(found: Chain, step: Step) -> Hashable:
    """A key that steps of equal memory have in common."""
    if step.program is not None:
        return id(step.program)
    return only_leaves(step.trace), _modules(found, step)


def _memory(found: Chain, steps: Sequence[Step]) -> Memory:
    """The memory of steps that run one after the other."""
    runs: list[Run] = []
    start = 0
    for number, step in enumerate(steps):
        names = found.arguments if number == 0 else ()
        trace = only_leaves(step.trace) if step.program is None else step.trace
        runs.append(Run(trace, number, start, names, _modules(found, step), step.program))
        start += len(trace.equations)
    buffers = [buffer for run in runs for buffer in run.buffers]
    if len(runs) == 2:
        buffers = _joined(runs[0], runs[1], found)
    devices = {one.device for one in buffers if one.kind != "scratch"}
    is_here = lambda one: one.kind == "scratch" or devices == {"cpu"} or one.device != "cpu"
    names = tuple(equation.op.name for run in runs for equation in run.trace.equations)
    modules = tuple(module for run in runs for module in run.modules)
    return Memory(
        found.name,
        tuple(filter(is_here, buffers)),
        names,
        modules,
        tuple(run.start for run in runs),
        unknown=sum(run.unknown for run in runs),
        unseen=sum(run.unseen for run in runs),
        elsewhere=tuple(one for one in buffers if not is_here(one)),
    )


def _modules(found: Chain, step: Step) -> tuple[str, ...]:
    """The module of each equation that runs: of a program's, the common part of its leaves'."""
    leaves = found.modules(found.steps.index(step))
    if step.program is None:
        return leaves
    inside: list[list[str]] = [[] for _ in step.trace.equations]
    for leaf, module in zip(step.flat.leaves, leaves, strict=True):
        inside[leaf.path[0]].append(module)
    return tuple(map(common_module, inside))


def common_module(modules: Sequence[str]) -> str:
    """The innermost module that these are in."""
    parts = [module.split(".") for module in modules]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in same)


def _joined(forward: Run, backward: Run, found: Chain) -> list[Buffer]:
    """Join both programs on one axis: a residual lives until the backward has read it last, and
    is no input of that.
    """
    assert found.split is not None, "two programs are two halves"
    end = backward.start + len(backward.trace.equations)
    results = len(found.split.forward.outputs)
    atoms = found.split.residual_values(forward.trace.inputs, forward.trace.outputs[:results])
    saved = forward.storages(atoms)
    returned = forward.storages(forward.trace.outputs[: results - found.split.num_extra])
    freed = dict.fromkeys(returned, end)
    for atom, var in zip(atoms, backward.trace.inputs, strict=False):
        for storage in forward.storages([atom]):
            read_last = backward.made[backward.storage[var.index]].dies
            freed[storage] = max(freed.get(storage, 0), read_last)
    merged: list[Buffer] = []
    for storage, buffer in forward.made.items():
        kind = "residual" if storage in saved - returned and buffer.kind != "input" else buffer.kind
        merged.append(replace(buffer, kind=kind, dies=freed.get(storage, buffer.dies)))
    merged += forward.scratch
    given = {backward.storage[var.index] for var in backward.trace.inputs[: len(atoms)]}
    merged += [buffer for storage, buffer in backward.made.items() if storage not in given]
    return merged + backward.scratch
