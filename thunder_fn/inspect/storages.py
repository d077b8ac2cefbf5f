"""Storages of a program's variables: the program runs on tensors without values, which share
storages as real ones do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.distributed.ranks import REDUCE
from thunder_fn.executors import FusionExecutor, Program
from thunder_fn.executors.reuse import NO_REUSE, overwritten
from thunder_fn.inspect.scratch import scratch_of, taken_on_fakes
from thunder_fn.interpreters.checkpoint.cost import bytes_of, live_bytes
from thunder_fn.interpreters.storages import fake_of, results_on_fakes
from thunder_fn.ir import ops
from thunder_fn.ir.equations import last_uses, made_at
from thunder_fn.ir.trace import Equation, Op, Source, Trace, Var

WAIT = Op("leaf", "_c10d_functional.wait_tensor.default")
"""Returns its operand, whatever fake tensors say."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory: made at an equation, freed after another one (one past the last if it
    outlives the program).

    `what` names the maker of its content: an op's name, or "argument x". `kind` is "input" for what
    the caller holds, "residual" for what is kept for the backward, and "output" for what is
    returned. It is "scratch" for what an equation needs while it runs, and "intermediate" for the
    rest.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> buffer = tfn.inspect.memory(torch.sin, torch.ones(4)).buffers[-1]
        >>> buffer.what, buffer.kind, buffer.num_bytes
        ('aten.sin.default', 'output', 16)
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
    device: str = "cpu"


def live_of(buffers: Iterable[Buffer], count: int) -> tuple[int, ...]:
    """The bytes of buffers that live while each of so many equations runs."""
    return tuple(live_bytes(((one.born, one.dies, one.num_bytes) for one in buffers), count))


def scratch_at(at: int, num_bytes: int, equation: Equation, module: str, number: int) -> Buffer:
    """The buffer of what an equation needs while it runs."""
    what, source = equation.op.name, equation.source
    return Buffer(at, at, num_bytes, "scratch", what, module, source, number, -1)


@dataclass
class Run:
    """One program, run on tensors without values; which storage each of its variables lies in.

    Without a program it is a trace, whose equations run one by one and write to no operand.
    """

    trace: Trace
    number: int
    start: int
    arguments: Sequence[str]
    modules: Sequence[str]
    program: Program | None = None
    storage: dict[int, int] = field(default_factory=dict)
    made: dict[int, Buffer] = field(default_factory=dict)
    scratch: list[Buffer] = field(default_factory=list)
    unknown: int = 0
    unseen: int = 0

    def __post_init__(self) -> None:
        self.reuse = self.program.reuse if self.program is not None else NO_REUSE
        owners = self.program.claimed.executors.values() if self.program is not None else ()
        fusions = [type(one) for one in owners if isinstance(one, FusionExecutor)]
        self.compiles_loops = any(one.fuse_loop is not FusionExecutor.fuse_loop for one in fusions)
        mode = internals.fake_mode()
        self.env: list[Any] = []
        for position, var in enumerate(self.trace.inputs):
            name = (
                self.arguments[position] if position < len(self.arguments) else f"input {position}"
            )
            self.bind(var, fake_of(mode, var), self.start, "input", name)
        for constant in self.trace.constants:
            kind = "intermediate" if constant.owned else "input"
            self.bind(
                constant.var,
                internals.fake_like(mode, constant.tensor),
                self.start,
                kind,
                "a closed-over tensor",
            )
        for position, equation in enumerate(self.trace.equations):
            self.step(mode, position, equation)
        self.finish()

    @property
    def buffers(self) -> list[Buffer]:
        """Return all buffers of the program."""
        return [*self.made.values(), *self.scratch]

    def storages(self, atoms: Iterable[Any]) -> set[int]:
        """The storages of some of the trace's variables."""
        found = (self.storage.get(atom.index) for atom in atoms if isinstance(atom, Var))
        return {storage for storage in found if storage is not None}

    def bind(
        self, var: Var, value: Any, at: int, kind: str, what: str, equation: Equation | None = None
    ) -> None:
        """Bind a variable's value, and its storage if that is new."""
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
            place = self.number, var.index, value.device.type
            self.made[storage] = Buffer(at, at, size, kind, what, module, source, *place)

    def step(self, mode: Any, position: int, equation: Equation) -> None:
        """Run one equation."""
        at = self.start + position
        inside = scratch_of(equation, has_lists=not self.compiles_loops)
        if position in self.reuse.in_place:
            values: Sequence[Any] = tuple(self.env[var.index] for var in overwritten(equation))
        elif self.program is not None and ops.is_operator(equation.op):
            values, inside = self.taken(mode, self.program, position)
        else:
            values = self.results(mode, equation)
        for var, value in zip(equation.outputs, values, strict=True):
            self.bind(var, value, at, "intermediate", equation.op.name, equation)
        if inside:
            module = self.modules[position]
            self.scratch.append(scratch_at(at, inside, equation, module, self.number))

    def taken(self, mode: Any, program: Program, position: int) -> tuple[Sequence[Any], int]:
        """The results of an executor, and its allocations beside them where they are known."""
        equation, given = self.trace.equations[position], self.reuse.given.get(position, ())
        operands = [self.env[var.index] for var in equation.operands]
        found = taken_on_fakes(mode, program.claimed, equation, operands, given)
        if found is None:
            self.unseen += 1
            return self.results(mode, equation), 0
        return found

    def results(self, mode: Any, equation: Equation) -> Sequence[Any]:
        """The results of an equation, by PyTorch's rules for views and layouts, or by its types
        where that takes values.
        """
        if equation.op == WAIT:
            return (self.env[equation.operands[0].index],)
        return results_on_fakes(mode, equation, self.env)

    def finish(self) -> None:
        """Free each storage after the last use of any variable in it."""
        last, end = last_uses(self.trace), len(self.trace.equations)
        sent = sent_until(self.trace)
        for index, storage in self.storage.items():
            buffer = self.made[storage]
            used = max(last[index], sent.get(index, -1))
            dies = self.start + used if used >= 0 else buffer.born
            kind = "output" if last[index] == end and buffer.kind == "intermediate" else buffer.kind
            self.made[storage] = replace(buffer, dies=max(buffer.dies, dies), kind=kind)


def sent_until(trace: Trace) -> dict[int, int]:
    """For each variable that travels, the wait for its collective, which reads its memory until
    then. An all-reduce works on a copy.
    """
    makers, found = made_at(trace.equations), dict[int, int]()
    for at, equation in enumerate(trace.equations):
        if equation.op == WAIT and equation.operands[0].index in makers:
            sender = trace.equations[makers[equation.operands[0].index]]
            if ops.is_collective(sender.op) and sender.op.name != REDUCE:
                found.update((var.index, at) for var in sender.operands)
    return found
