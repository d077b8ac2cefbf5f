"""cudagraphs: a whole program as one CUDA graph.

The first call runs the program some times, and records it on input buffers that stay where they
are. Later calls copy their inputs into the buffers, replay, and hand out copies of the results.
Nothing of it holds on to an argument.

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

MAX_SIZES = 8
"""A program of symbolic sizes is recorded for so many; calls with others run as they are."""


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

    warmups = 3

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
        Runs before the first replay leave the generator as it was, so that a replay draws the
        numbers that eager would.
        """
        device = buffers[0].device if buffers else torch.device("cuda")
        with torch.cuda.device(device):
            return self._recorded(run, buffers)

    def _recorded(
        self, run: Run, buffers: Sequence[torch.Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        state = torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.warmups):
                run(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run(*buffers)
        torch.cuda.set_rng_state(state)
        return graph.replay, results


class CudaGraphs(Executor):
    """Records whole programs. See the module's docstring."""

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


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recording: the buffers that it reads, and the results that a replay overwrites."""

    buffers: tuple[torch.Tensor, ...]
    replay: Callable[[], None]
    results: tuple[Any, ...]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        for buffer, value in zip(self.buffers, inputs, strict=True):
            buffer.copy_(value)
        self.replay()
        return tuple(
            value.clone() if isinstance(value, torch.Tensor) else value for value in self.results
        )


class _Recorded:
    """A program and, once it was called, its recordings: one for each size of its inputs."""

    def __init__(self, name: str, run: Run, recording: Recording, is_symbolic: bool) -> None:
        self.name, self.run, self.recording = name, run, recording
        self.is_symbolic, self.lock = is_symbolic, threading.Lock()
        self.known: dict[Any, _Graph] = {}
        self.refused = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.refused:
            return self.run(*inputs)
        with self.lock:
            key = tuple(map(_size, inputs)) if self.is_symbolic else ()
            graph = self.known.get(key)
            if graph is None and len(self.known) < MAX_SIZES:
                graph = self.start(inputs)
                if graph is not None:
                    self.known[key] = graph
            return self.run(*inputs) if graph is None else graph(inputs)

    def start(self, inputs: Sequence[Any]) -> _Graph | None:
        """Record the program on buffers like these inputs, unless that cannot be."""
        other = next(
            (x for x in inputs if not isinstance(x, torch.Tensor) or not self.recording.takes(x)),
            None,
        )
        if other is not None:
            self.refuse(
                f"an input is on {getattr(other, 'device', 'no device')}\n"
                "Move it to the GPU. An optimizer has its step count there with `capturable=True`."
            )
            return None
        buffers = tuple(x.detach().clone() for x in inputs)
        try:
            return _Graph(buffers, *self.recording.record(self.run, buffers))
        except RuntimeError as error:
            self.refuse(f"{type(error).__name__}: {error}")
            return None

    def refuse(self, reason: str) -> None:
        """Leave the program as it is, and say why."""
        self.refused = True
        warnings.warn(
            f"{self.name}: a program cannot be recorded and runs as it is: {reason}",
            RegionWarning,
            stacklevel=5,
        )


def _size(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


EXECUTOR = CudaGraphs()
