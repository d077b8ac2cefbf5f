"""cudagraphs: a whole program as one CUDA graph.

The first call runs the program some times, and records it on input buffers that stay where they
are. Later calls copy their inputs into the buffers, replay, and hand out copies of the results.
Nothing of it holds on to an argument.

A program that cannot be recorded (it asks for values, or works on other devices too) goes on as it
is, with a warning. Tested: the logic of the buffers on CPU, with a stand-in for the recording; all
of it on an H100.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from thunder_fn.errors import ExecutorError, RegionWarning
from thunder_fn.extend import Executor
from thunder_fn.extend.regions import Program

Run = Callable[..., tuple[Any, ...]]


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

        Runs before the first replay leave the generator as it was, so that a replay draws the
        numbers that eager would.
        """
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
        return replace(program, run=_Recorded(self.name, program.run, self.recording))


class _Recorded:
    """A program and, once it was called, its recording."""

    def __init__(self, name: str, run: Run, recording: Recording) -> None:
        self.name, self.run, self.recording = name, run, recording
        self.lock = threading.Lock()
        self.buffers: list[torch.Tensor] = []
        self.replay: Callable[[], None] | None = None
        self.results: tuple[Any, ...] = ()
        self.refused = False

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.refused:
            return self.run(*inputs)
        with self.lock:
            if self.replay is None and not self.start(inputs):
                return self.run(*inputs)
            assert self.replay is not None, "just recorded"
            for buffer, value in zip(self.buffers, inputs, strict=True):
                buffer.copy_(value)
            self.replay()
            return tuple(
                value.clone() if isinstance(value, torch.Tensor) else value
                for value in self.results
            )

    def start(self, inputs: Sequence[Any]) -> bool:
        """Record the program on buffers like these inputs, unless that cannot be."""
        other = next(
            (x for x in inputs if not isinstance(x, torch.Tensor) or not self.recording.takes(x)),
            None,
        )
        if other is not None:
            return self.refuse(f"an input is on {getattr(other, 'device', 'no device')}")
        self.buffers = [x.detach().clone() for x in inputs]
        try:
            self.replay, self.results = self.recording.record(self.run, self.buffers)
        except RuntimeError as error:
            self.buffers = []
            return self.refuse(f"{type(error).__name__}: {error}")
        return True

    def refuse(self, reason: str) -> bool:
        self.refused = True
        warnings.warn(
            f"{self.name}: a program cannot be recorded and runs as it is: {reason}",
            RegionWarning,
            stacklevel=4,
        )
        return False


EXECUTOR = CudaGraphs()
