"""cudagraphs: a whole program as one CUDA graph.

The first call runs the program and records it, and later calls replay it. An input that lies at the
same address in each call, as parameters and donated arguments do, is read and written where it
lies. A replay checks its address. If an input moves, the program is recorded again, with a buffer
into which it is copied. Results in the graph's own memory are handed out as copies. Nothing of it
holds on to an argument.

A program that cannot be recorded (it asks for values, or works on other devices too) goes on as it
is, with a warning. So does one that a replay would repeat wrongly: it prints, calls Python, or
draws random numbers on the CPU. A program of symbolic sizes is recorded for each size.

Tested: the logic of the buffers on CPU, with a stand-in for the recording; all of it on an H100.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from thunder_fn.errors import ExecutorError, RegionWarning
from thunder_fn.extend import Executor
from thunder_fn.extend.regions import Program
from thunder_fn.ir import ops
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import TensorType, Trace, subtraces

Run = Callable[..., tuple[Any, ...]]

SEEDING = tuple(
    f"thunder_fn.{name}.default" for name in ("manual_seed", "seed_generator", "set_rng_state")
)
"""Ops that a recording would do once."""

MAX_SIZES = 8
"""A program of symbolic sizes is recorded for so many; calls with others run as they are."""

MAX_MOVES = 3
"""After so many recordings whose inputs then lay elsewhere, all inputs are copied."""


class Recording(Protocol):
    """The abilities of a device: run a function once and replay its launches, on the same
    memory.
    """

    def missing(self) -> str | None:
        """The reason why there is no such device, None if there is one."""
        ...

    def takes(self, tensor: torch.Tensor) -> bool:
        """Test whether the tensor is where it can be recorded."""
        ...

    def record(
        self, run: Run, buffers: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Record a run. Returns the function that replays it, and its results, which a replay
        overwrites.
        """
        ...


class CudaRecording:
    """PyTorch's CUDA graphs."""

    def missing(self) -> str | None:
        """The reason why there is no such device, None if there is one."""
        return None if torch.cuda.is_available() else "there is no CUDA device"

    def takes(self, tensor: torch.Tensor) -> bool:
        """Test whether the tensor is where it can be recorded."""
        return tensor.is_cuda

    def record(
        self, run: Run, buffers: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        """Record a run. Returns the function that replays it, and its results, which a replay
        overwrites.

        The graph is of the device that the buffers are on, whichever is the current one.
        Recording computes nothing, and leaves the generator as it was, so that a replay draws the
        numbers that eager would.
        """
        device = buffers[0].device if buffers else torch.device("cuda")
        with torch.cuda.device(device):
            return self._recorded(run, buffers)

    def _recorded(
        self, run: Run, buffers: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        state = torch.cuda.get_rng_state()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(*buffers)
        torch.cuda.set_rng_state(state)
        return graph.replay, results


class CudaGraphs(Executor):
    """Records whole programs. See the module's docstring."""

    only_gpu = True

    def __init__(self, name: str = "cudagraphs", recording: Recording | None = None) -> None:
        super().__init__(name, version=torch.__version__, numerics="bitwise")
        self.recording: Recording = recording or CudaRecording()

    def finish(self, program: Program) -> Program:
        """The program, recorded when it is first called.

        Raises:
            ExecutorError: there is no device that records.
        """
        missing = self.recording.missing()
        if missing is not None:
            raise ExecutorError(
                f"{self.name}: {missing}\nLeave the executor {self.name!r} out on this machine."
            )
        run = _Recorded(self.name, program.run, self.recording, is_symbolic(program.trace))
        reason = _unrepeatable(program.trace)
        if reason is not None:
            run.refuse(reason)
        return replace(program, run=run)


def _unrepeatable(trace: Trace) -> str | None:
    """The reason why a replay would not do again what the program does; None if it would."""
    if ops.calls_back(trace):
        return "it prints or calls Python in each call"
    if any(one.op.name in SEEDING for inner in subtraces(trace) for one in inner.equations):
        return "it seeds a random number generator"
    if any(_draws_on_cpu(inner) for inner in subtraces(trace)):
        return "it draws random numbers on the CPU"
    return None


def _draws_on_cpu(trace: Trace) -> bool:
    """Test for random numbers that the CPU makes, not for the seeds that a GPU's ops give."""
    return any(
        ops.draws(equation)
        and any(
            isinstance(var.type, TensorType) and var.type.device.type == "cpu"
            for var in equation.outputs
        )
        and not any(
            isinstance(var.type, TensorType) and var.type.device.type != "cpu"
            for var in equation.operands
        )
        for equation in trace.equations
    )


Place = tuple[int, tuple[int, ...]]
"""The address of an input, and its strides."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """A result that lies in an input's memory."""

    place: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result, of the inputs of a call."""
        source = inputs[self.place].detach()
        if (self.offset, self.size, self.strides) == (0, source.shape, source.stride()):
            return source  # no view, so that it may be given away
        return source.as_strided(self.size, self.strides, source.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording: the buffers that it reads, or the places of inputs that it reads where they
    lie, and the results that a replay overwrites.
    """

    buffers: tuple[torch.Tensor | Place, ...]
    replay: Callable[[], None]
    results: tuple[Any, ...]

    def fits(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Test that inputs lie where the graph reads them."""
        return all(
            isinstance(buffer, torch.Tensor) or _place(value) == buffer
            for buffer, value in zip(self.buffers, inputs, strict=True)
        )

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        for buffer, value in zip(self.buffers, inputs, strict=True):
            if isinstance(buffer, torch.Tensor):
                buffer.copy_(value)
        self.replay()
        return tuple(self.result(value, inputs) for value in self.results)

    def result(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """A result of a call."""
        if isinstance(value, _Shown):
            return value.of(inputs)
        return value.clone() if isinstance(value, torch.Tensor) else value


class _Calls:
    """The calls with inputs of one size: where they lay, and the recording, if there is one."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        # To copy a number costs nothing, and it is seldom where it was.
        self.places: tuple[Place | None, ...] = tuple(
            _place(value) if value.dim() else None for value in inputs
        )
        self.graph: _Graph | None = None
        self.moves = 0

    def settle(self, inputs: Sequence[torch.Tensor]) -> None:
        """Note which inputs lie where they lay in all calls before."""
        now = tuple(map(_place, inputs))
        self.moves += 1
        is_over = self.moves > MAX_MOVES
        self.places = tuple(
            old if old == new and not is_over else None
            for old, new in zip(self.places, now, strict=True)
        )


class _Recorded:
    """A program and, once it was called, its recordings: one for each size of its inputs."""

    def __init__(self, name: str, run: Run, recording: Recording, is_symbolic: bool) -> None:
        self.name, self.run, self.recording = name, run, recording
        self.is_symbolic, self.lock = is_symbolic, threading.Lock()
        self.known: dict[Any, _Calls] = {}
        self.refused = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.refused:
            return self.run(*inputs)
        with self.lock:
            key = tuple(map(_size, inputs)) if self.is_symbolic else ()
            calls = self.known.get(key)
            if calls is None:
                return self.first_call(key, inputs)
            if calls.graph is None or not calls.graph.fits(inputs):
                calls.settle(inputs)
                calls.graph = self.start(inputs, calls.places)
            return self.run(*inputs) if calls.graph is None else calls.graph(inputs)

    def first_call(self, key: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run the program, and record it for inputs that lie where these do."""
        is_ours = len(self.known) < MAX_SIZES and self.may_record(inputs)
        results = self.run(*inputs)
        if is_ours:
            calls = self.known[key] = _Calls(inputs)
            calls.graph = self.start(inputs, calls.places)
        return results

    def may_record(self, inputs: Sequence[Any]) -> bool:
        """Test that all inputs are where a recording can read them."""
        other = next(
            (x for x in inputs if not isinstance(x, torch.Tensor) or not self.recording.takes(x)),
            None,
        )
        if other is None:
            return True
        self.refuse(
            f"an input is on {getattr(other, 'device', 'no device')}\n"
            "Move it to the GPU. An optimizer has its step count there with `capturable=True`."
        )
        return False

    def start(
        self, inputs: Sequence[torch.Tensor], places: Sequence[Place | None]
    ) -> _Graph | None:
        """Record the program on inputs that stay where they are and on buffers like the others,
        unless that cannot be.
        """
        buffers = tuple(
            x.detach() if place is not None else x.detach().clone()
            for x, place in zip(inputs, places, strict=True)
        )
        try:
            replay, results = self.recording.record(self.run, buffers)
        except RuntimeError as error:
            self.refuse(f"{type(error).__name__}: {error}")
            return None
        lying = {
            buffer.untyped_storage().data_ptr(): i
            for i, (buffer, place) in enumerate(zip(buffers, places, strict=True))
            if place is not None and buffer.numel()
        }
        kept = (place or buffer for buffer, place in zip(buffers, places, strict=True))
        return _Graph(
            tuple(kept), replay, tuple(_shown(value, buffers, lying) for value in results)
        )

    def refuse(self, reason: str) -> None:
        """Leave the program as it is, and say why."""
        self.refused = True
        warnings.warn(
            f"{self.name}: a program cannot be recorded and runs as it is: {reason}",
            RegionWarning,
            stacklevel=5,
        )


def _shown(value: Any, inputs: Sequence[torch.Tensor], lying: dict[int, int]) -> Any:
    """A result; in an input's memory, how it lies there."""
    place = (
        lying.get(value.untyped_storage().data_ptr()) if isinstance(value, torch.Tensor) else None
    )
    if place is None:
        return value
    offset = int(value.storage_offset() - inputs[place].storage_offset())
    return _Shown(place, tuple(value.shape), value.stride(), offset)


def _place(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.stride()


def _size(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


EXECUTOR = CudaGraphs()
