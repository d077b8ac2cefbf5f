"""Memory over a program: what lives when, computed from the trace.

A program is run on tensors without values, which share storages as real ones do, so views and copies are told apart
by PyTorch itself. A storage lives from the equation that makes it to the last one that reads it, which is where the
program deletes it; what runs in place makes none. Inputs are the caller's and are counted apart.

    memory of step: peak 17.6 MiB at equation 146 of 452 (aten.gelu_backward.default in blocks.0); residuals ...

What a kernel allocates inside and gives back is not in a trace. How far the computed peak is from the measured one is
tested (`tests/unit/test_inspect_memory.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from thunder_fn import ops, torch_internals as internals
from thunder_fn.executors import Program, claim
from thunder_fn.executors.reuse import last_uses
from thunder_fn.inspect.chain import Chain, Step, chain
from thunder_fn.inspect.tables import bytes_text, plain, rich_table
from thunder_fn.interpreters.simplify import dce
from thunder_fn.structured.cost import bytes_of
from thunder_fn.trace import Equation, NoneType, Op, Source, TensorType, Trace, Var, python_arg


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory: made at an equation, freed after another one (one past the last if it outlives the program).

    `what` says what fills it: an op's name, or "argument x". `kind` is "input" for what the caller holds, "residual" for
    what is kept for the backward, "output" for what is returned, "scratch" for what an equation needs while it runs,
    "intermediate" for the rest.
    """

    born: int
    dies: int
    num_bytes: int
    kind: str
    what: str
    module: str
    source: Source | None
    program: int
    var: int


@dataclass(frozen=True)
class Memory:
    """What lives when. Positions count the equations of the forward program, then those of the backward.

    Attributes:
        buffers: all memory, in the order in which it is made.
        starts: where each program begins; programs are the forward and the backward where there are two.
        names: what runs at each position.
        unknown: how many buffers have a size that depends on data, each unknown dim of which is counted as 1.
    """

    function: str
    buffers: tuple[Buffer, ...]
    names: tuple[str, ...]
    modules: tuple[str, ...]
    starts: tuple[int, ...] = (0,)
    unknown: int = 0

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes that live while each equation runs, beside what the caller holds."""
        return self.live_of(lambda buffer: buffer.kind != "input")

    def live_of(self, wanted: Callable[[Buffer], bool]) -> tuple[int, ...]:
        """The bytes of some of the buffers that live while each equation runs."""
        change = [0] * (len(self.names) + 1)
        for buffer in filter(wanted, self.buffers):
            change[buffer.born] += buffer.num_bytes
            change[min(buffer.dies, len(self.names) - 1) + 1] -= buffer.num_bytes
        found, total = list[int](), 0
        for difference in change[:-1]:
            total += difference
            found.append(total)
        return tuple(found)

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
        """What the caller holds: arguments and closed-over tensors."""
        return self._sum("input")

    @property
    def residual_bytes(self) -> int:
        """What the forward keeps for the backward, arguments left out."""
        return self._sum("residual")

    @property
    def output_bytes(self) -> int:
        """What is returned."""
        return self._sum("output")

    def _sum(self, kind: str) -> int:
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.kind == kind)

    def at_peak(self) -> list[Buffer]:
        """What lives at the peak, largest first."""
        found = [one for one in self.buffers if one.kind != "input" and one.born <= self.peak_at <= one.dies]
        return sorted(found, key=lambda buffer: -buffer.num_bytes)

    def by_module(self, depth: int = 2) -> dict[str, int]:
        """The bytes that live at the peak, by the module that made them, largest first."""
        found: defaultdict[str, int] = defaultdict(int)
        for buffer in self.at_peak():
            found[".".join(buffer.module.split(".")[:depth]) or "(no module)"] += buffer.num_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def summary(self) -> str:
        """One line."""
        if not self.names:
            return f"memory of {self.function}: nothing runs"
        at = self.peak_at
        where = f" in {self.modules[at]}" if self.modules[at] else ""
        return (
            f"memory of {self.function}: peak {bytes_text(self.peak)} at equation {at} of {len(self.names)} "
            f"({self.names[at]}{where}); residuals {bytes_text(self.residual_bytes)}, "
            f"outputs {bytes_text(self.output_bytes)}, held by the caller {bytes_text(self.input_bytes)}"
            + (f"; {self.unknown} sizes depend on data, a dim of those counted as 1" if self.unknown else "")
        )

    def rows(self, limit: int = 12) -> list[tuple[str, ...]]:
        """What lives at the peak: bytes, kind, what made it, module, the user's line."""
        known = self.at_peak()
        found = [
            (bytes_text(one.num_bytes), one.kind, one.what, one.module, _line(one.source)) for one in known[:limit]
        ]
        rest = known[limit:]
        if rest:
            found.append((bytes_text(sum(one.num_bytes for one in rest)), "", f"{len(rest)} more", "", ""))
        return found

    def __str__(self) -> str:
        return "\n".join([self.summary, "at the peak:", plain(_HEADER, self.rows())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(Text(self.summary, style="bold"), rich_table(_HEADER, self.rows(), "at the peak"))

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


WAIT = Op("leaf", "_c10d_functional.wait_tensor.default")
"""Returns its operand, whatever fake tensors say."""

_HEADER = ("live", "kind", "made by", "module", "line")


def _line(source: Source | None) -> str:
    return f"{Path(source.file).name}:{source.line}" if source is not None else ""


def memory(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Memory:
    """The memory that `jit(f)(*args, **kwargs)` takes, over its program. Nothing is run.

    Where an argument requires a gradient the backward follows the forward on the same axis.

    Law: on the CPU the peak is within 10% of the measured one, on the GPT and the CNN of the tests.

    Example:
        >>> found = memory(lambda x: (x.sin() @ x.t()).sum(), torch.ones(64, 64))
        >>> found.peak, found.names[found.peak_at]
        (32768, 'aten.mm.default')
    """
    return memory_of(chain(f, *args, **kwargs))


def memory_of(found: Chain) -> Memory:
    """The memory of the programs of a chain."""
    runs: list[_Run] = []
    start = 0
    for number, step in enumerate(found.programs):
        assert step.program is not None, "programs have one"
        names = found.arguments if number == 0 else ()
        runs.append(_Run(step.program, number, start, names, _modules(found, step)))
        start += len(step.trace.equations)
    buffers = [buffer for run in runs for buffer in run.buffers]
    if len(runs) == 2:
        buffers = _joined(runs[0], runs[1], found)
    names = tuple(equation.op.name for run in runs for equation in run.trace.equations)
    modules = tuple(module for run in runs for module in run.modules)
    return Memory(
        found.name, tuple(buffers), names, modules, tuple(run.start for run in runs), sum(run.unknown for run in runs)
    )


def _modules(found: Chain, step: Step) -> tuple[str, ...]:
    """The module of each equation of a program: what the modules of its leaves have in common."""
    inside: list[list[str]] = [[] for _ in step.trace.equations]
    for leaf, module in zip(step.flat.leaves, found.modules(found.steps.index(step)), strict=True):
        inside[leaf.path[0]].append(module)
    return tuple(map(_common, inside))


def _common(modules: list[str]) -> str:
    parts = [module.split(".") for module in modules]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join(names[0] for names in same)


def _joined(forward: _Run, backward: _Run, found: Chain) -> list[Buffer]:
    """Both programs on one axis: what the forward keeps lives until the backward ends, and is no input of that."""
    assert found.split is not None, "two programs are two halves"
    end = backward.start + len(backward.trace.equations)
    results = len(found.split.forward.outputs)
    atoms = found.split.residual_values(forward.trace.inputs, forward.trace.outputs[:results])
    saved = forward.storages(atoms)
    returned = forward.storages(forward.trace.outputs[: results - found.split.num_extra])
    merged: list[Buffer] = []
    for storage, buffer in forward.made.items():
        kind = "residual" if storage in saved - returned and buffer.kind != "input" else buffer.kind
        merged.append(replace(buffer, kind=kind, dies=end if storage in saved | returned else buffer.dies))
    merged += forward.scratch
    given = {backward.storage[var.index] for var in backward.trace.inputs[: len(atoms)]}
    merged += [buffer for storage, buffer in backward.made.items() if storage not in given]
    return merged + backward.scratch


@dataclass
class _Run:
    """One program, run on tensors without values; which storage each of its variables lies in."""

    program: Program
    number: int
    start: int
    arguments: Sequence[str]
    modules: Sequence[str]
    storage: dict[int, int] = field(default_factory=dict)
    made: dict[int, Buffer] = field(default_factory=dict)
    scratch: list[Buffer] = field(default_factory=list)
    unknown: int = 0

    def __post_init__(self) -> None:
        self.trace = self.program.trace
        mode = internals.fake_mode()
        self.env: list[Any] = []
        for position, var in enumerate(self.trace.inputs):
            name = self.arguments[position] if position < len(self.arguments) else f"input {position}"
            self.bind(var, _fake(mode, var), self.start, "input", name)
        for constant in self.trace.constants:
            kind = "intermediate" if constant.owned else "input"
            self.bind(
                constant.var, internals.fake_like(mode, constant.tensor), self.start, kind, "a closed-over tensor"
            )
        for position, equation in enumerate(self.trace.equations):
            self.step(mode, position, equation)
        self.finish()

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.made.values(), *self.scratch]

    def storages(self, atoms: Iterable[Any]) -> set[int]:
        """The storages of some of the trace's variables."""
        found = (self.storage.get(atom.index) for atom in atoms if isinstance(atom, Var))
        return {storage for storage in found if storage is not None}

    def bind(self, var: Var, value: Any, at: int, kind: str, what: str, equation: Equation | None = None) -> None:
        self.env.append(value)
        if not isinstance(value, torch.Tensor):
            return
        storage = internals.storage_id(value)
        self.storage[var.index] = storage
        if storage not in self.made:
            size: Any = value.untyped_storage().nbytes()
            if not isinstance(size, int):  # it depends on data
                size, self.unknown = bytes_of(var.type), self.unknown + 1
            source = equation.source if equation is not None else None
            module = self.modules[at - self.start] if equation is not None else ""
            self.made[storage] = Buffer(at, at, size, kind, what, module, source, self.number, var.index)

    def step(self, mode: Any, position: int, equation: Equation) -> None:
        at = self.start + position
        if position in self.program.in_place:
            values: Sequence[Any] = (self.env[equation.operands[0].index],)
        else:
            values = self.results(mode, equation)
        for var, value in zip(equation.outputs, values, strict=True):
            self.bind(var, value, at, "intermediate", equation.op.name, equation)
        inside = _inner_peak(equation) + _scratch_of(equation)
        if inside:
            self.scratch.append(
                Buffer(
                    at,
                    at,
                    inside,
                    "scratch",
                    equation.op.name,
                    self.modules[position],
                    equation.source,
                    self.number,
                    -1,
                )
            )

    def results(self, mode: Any, equation: Equation) -> Sequence[Any]:
        """What an equation gives, by PyTorch's own rules for views and layouts; by its types where that takes values."""
        if equation.op == WAIT:
            return (self.env[equation.operands[0].index],)
        if equation.op.kind == "leaf":
            try:
                return _on_fakes(mode, equation, self.env)
            except Exception:  # noqa: BLE001  # data-dependent, or an op without a fake implementation
                pass
        return tuple(_fake(mode, var) for var in equation.outputs)

    def finish(self) -> None:
        """When each storage is freed: after the last use of any variable in it."""
        last, end = last_uses(self.trace), len(self.trace.equations)
        for index, storage in self.storage.items():
            buffer = self.made[storage]
            dies = self.start + last[index] if last[index] >= 0 else buffer.born
            kind = "output" if last[index] == end and buffer.kind == "intermediate" else buffer.kind
            self.made[storage] = replace(buffer, dies=max(buffer.dies, dies), kind=kind)


def _fake(mode: Any, var: Var) -> Any:
    return internals.fake_of_type(mode, var.type) if isinstance(var.type, TensorType) else None


def _on_fakes(mode: Any, equation: Equation, env: Sequence[Any]) -> tuple[Any, ...]:
    read: Callable[[Var], Any] = lambda var: env[var.index]
    args = [python_arg(arg, read) for arg in equation.args]
    kwargs = {key: python_arg(arg, read) for key, arg in equation.kwargs}
    with internals.only_mode(mode), torch.no_grad():
        result = internals.call_on_fakes(ops.overload(equation.op), *args, **kwargs)
    found = ops.flatten_result(result)
    if len(found) != len(equation.outputs):
        raise ValueError("results of another number")
    return found


def _scratch_of(equation: Equation) -> int:
    """What PyTorch's CPU kernels are known to allocate beside their results, and give back."""
    type = equation.outputs[0].type if equation.outputs else None
    if equation.op.kind != "leaf" or not isinstance(type, TensorType | NoneType):
        return 0
    first = equation.operands[0].type if equation.operands else None
    if not isinstance(first, TensorType) or first.device.type != "cpu":
        return 0
    match equation.op.name:
        case "aten.native_batch_norm_backward.default" | "aten.convolution.default":
            return bytes_of(type)  # the gradient is made twice; a result in oneDNN's own layout
        case "aten.convolution_backward.default":
            return bytes_of(first) + bytes_of(type)  # both in oneDNN's own layout
        case _:
            return 0


def _inner_peak(equation: Equation) -> int:
    """What a loop or a choice needs while it runs, beside what it returns: the most that one of its bodies needs."""
    if equation.op.kind != "structured":
        return 0
    return max(map(_peak_of_body, equation.bodies), default=0)


def _peak_of_body(body: Trace) -> int:
    """The most bytes of a body's results that live at a time."""
    trace = claim(dce(body), below_autograd=True).trace
    last, live, peak = last_uses(trace), 0, 0
    freed: defaultdict[int, int] = defaultdict(int)
    for position, equation in enumerate(trace.equations):
        fresh = 0 if ops.is_view(equation.op) else sum(bytes_of(var.type) for var in equation.outputs)
        live += fresh
        peak = max(peak, live + _inner_peak(equation))
        for var in equation.outputs:
            if not ops.is_view(equation.op):
                freed[max(last[var.index], position)] += bytes_of(var.type)
        live -= freed[position]
    return peak
