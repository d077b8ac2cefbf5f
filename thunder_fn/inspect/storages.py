"""Where the variables of a program lie: a program is run on tensors without values, which share storages as real ones do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_fn import ops, torch_internals as internals
from thunder_fn.executors import Program, claim
from thunder_fn.executors.reuse import last_uses
from thunder_fn.interpreters.simplify import dce
from thunder_fn.interpreters.storages import fake_of, results_on_fakes
from thunder_fn.structured.cost import bytes_of
from thunder_fn.trace import Equation, Literal, Op, Source, TensorType, Trace, Type, Var

WAIT = Op("leaf", "_c10d_functional.wait_tensor.default")
"""Returns its operand, whatever fake tensors say."""


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


@dataclass
class Run:
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
            self.bind(var, fake_of(mode, var), self.start, "input", name)
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
        """All memory of the program."""
        return [*self.made.values(), *self.scratch]

    def storages(self, atoms: Iterable[Any]) -> set[int]:
        """The storages of some of the trace's variables."""
        found = (self.storage.get(atom.index) for atom in atoms if isinstance(atom, Var))
        return {storage for storage in found if storage is not None}

    def bind(self, var: Var, value: Any, at: int, kind: str, what: str, equation: Equation | None = None) -> None:
        """A variable's value, and its storage if that is new."""
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
        """Run one equation."""
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
        return results_on_fakes(mode, equation, self.env)

    def finish(self) -> None:
        """When each storage is freed: after the last use of any variable in it."""
        last, end = last_uses(self.trace), len(self.trace.equations)
        for index, storage in self.storage.items():
            buffer = self.made[storage]
            dies = self.start + last[index] if last[index] >= 0 else buffer.born
            kind = "output" if last[index] == end and buffer.kind == "intermediate" else buffer.kind
            self.made[storage] = replace(buffer, dies=max(buffer.dies, dies), kind=kind)


def _scratch_of(equation: Equation) -> int:
    """What PyTorch's CPU kernels are known to allocate beside their results, and give back; zero where nothing is known.

    oneDNN computes convolutions in layouts of its own: operands and results are there twice for a while.
    """
    types = [var.type for var in equation.operands]
    if equation.op.kind != "leaf" or not types or not isinstance(types[0], TensorType) or types[0].device.type != "cpu":
        return 0
    match equation.op.name:
        case "aten.native_batch_norm_backward.default":
            return bytes_of(equation.outputs[0].type)  # the gradient is made twice
        case "aten.convolution.default":
            copies, result = _reordered(types[0]) + bytes_of(types[1]), bytes_of(equation.outputs[0].type)
            return copies + result if _is_transposed(equation, 6) else max(copies, result)
        case "aten.convolution_backward.default":
            copies = bytes_of(types[0]) + _reordered(types[1])
            return copies + bytes_of(equation.outputs[0].type) if _is_transposed(equation, 7) else copies
        case _:
            return 0


def _reordered(type: Type) -> int:
    """The bytes of oneDNN's copy of an image; none for a few channels, which it reads as they are."""
    is_blocked = isinstance(type, TensorType) and len(type.shape) > 1 and type.shape[1] not in range(1, 8)
    return bytes_of(type) if is_blocked else 0


def _is_transposed(equation: Equation, place: int) -> bool:
    flag = equation.args[place]
    return isinstance(flag, Literal) and bool(flag.value)


def _inner_peak(equation: Equation) -> int:
    """What a loop or a choice needs while it runs, beside what it returns: the most that one of its bodies needs."""
    if equation.op.kind != "structured":
        return 0
    return max(map(peak_of, equation.bodies), default=0)


def peak_of(trace: Trace) -> int:
    """The most bytes that live at a time of what a trace computes, by the torch executor."""
    trace = claim(dce(trace), below_autograd=True).trace
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
