"""A step that ran: the time of a call, and PyTorch's profile of one, which Perfetto opens."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from thunder_fn.capture import pytree
from thunder_fn.executors.torchinductor import wait
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.tables import seconds_text
from thunder_fn.jitted import Jitted, jit

SECONDS = 0.5
"""The time that calls are repeated for."""
CALLS = 100
"""No more calls than these."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The calls of a jitted function, measured.

    Attributes:
        chain: the function's traces.
        seconds: the median of a call, with its backward where a result requires a gradient.
        calls: how many were timed.
        profile: one further call as PyTorch's profiler recorded it, in Chrome's trace format.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> found = tfn.inspect.measure(torch.sin, torch.ones(2))
        >>> found.calls >= 1, "aten::sin" in found.profile
        (True, True)
    """

    chain: Chain
    seconds: float
    calls: int
    profile: str

    def __repr__(self) -> str:
        taken = f"{seconds_text(self.seconds)} a call, the median of {self.calls}"
        return f"<{self.chain.name}: {taken}; `.save(path)` writes the profile of one>"

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file, which https://ui.perfetto.dev opens."""
        Path(path).write_text(self.profile, encoding="utf-8")
        return Path(path)


def measure(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Measured:
    """Run `jit(f)(*args, **kwargs)` and measure it, on the devices that its tensors are on.

    The arguments are copied for each call, so that writes to them and donations change nothing.
    Other changes by `f`, such as those of a module's buffers, are made by each call.

    Args:
        f: any PyTorch callable, as for `chain`.

    Errors as in `chain`.

    Example:
        >>> found = measure(torch.sin, torch.ones(2))
        >>> found.seconds > 0 and "aten::sin" in found.profile
        True
    """
    found = chain(f, *args, **kwargs)
    jitted = f if isinstance(f, Jitted) else jit(f)
    step = lambda: _step(found.name, jitted, _copied((args, kwargs)))
    step()
    wait()  # for what is compiled in the background
    step()
    seconds, end = list[float](), time.perf_counter() + SECONDS
    while not seconds or (len(seconds) < CALLS and time.perf_counter() < end):
        seconds.append(step())
    return Measured(found, statistics.median(seconds), len(seconds), _profiled(step))


def _step(name: str, jitted: Callable[..., Any], call: tuple[Any, Any]) -> float:
    """The seconds of a call, and of its backward where there is one."""
    given = [*pytree.tensors_in(call)]
    if isinstance(jitted, torch.nn.Module):
        given += jitted.parameters()
    leaves = [tensor for tensor in given if tensor.requires_grad]
    _synchronize()
    start = time.perf_counter()
    with record_function(name):
        results = jitted(*call[0], **call[1])
    ends = [tensor for tensor in pytree.tensors_in(results) if tensor.requires_grad]
    if ends and leaves:
        with record_function(f"backward of {name}"):
            ones = [torch.ones_like(tensor) for tensor in ends]
            torch.autograd.grad(ends, leaves, ones, allow_unused=True)
    _synchronize()
    return time.perf_counter() - start


def _profiled(step: Callable[[], object]) -> str:
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=kinds, record_shapes=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found.export_chrome_trace(str(path))
        return path.read_text(encoding="utf-8")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _copied(call: tuple[Any, Any]) -> tuple[Any, Any]:
    leaves, structure = pytree.flatten(call)
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return pytree.unflatten(structure, copies)
