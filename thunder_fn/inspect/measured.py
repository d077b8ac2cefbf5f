"""A step that ran: the time of a call, and PyTorch's profile of one, which Perfetto opens."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from thunder_fn.capture import pytree
from thunder_fn.errors import spelled
from thunder_fn.executors.torchinductor import wait
from thunder_fn.inspect.chains import Chain, chain
from thunder_fn.inspect.costs import device_of
from thunder_fn.inspect.tables import plain, seconds_text
from thunder_fn.jitted import Jitted, jit

SECONDS = 0.5
"""The time that calls are repeated for."""
CALLS = 100
"""No more calls than these."""
ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
"""The categories of what runs on a device, in Kineto's profiles; other events are the host's."""
ROWS = 20
"""The number of kernels that a table shows."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The launches of a kernel, or of copies of one kind, in a profiled call.

    Example:
        >>> from thunder_fn.inspect.measured import kernels_of
        >>> event = {"ph": "X", "cat": "kernel", "name": "add", "ts": 7.0, "dur": 2.0}
        >>> kernels_of({"traceEvents": [event, event]})
        (Kernel(name='add', count=2, seconds=4e-06),)
    """

    name: str
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The calls of a jitted function, measured.

    Attributes:
        chain: the function's traces.
        seconds: the median of a call, with its backward where a result requires a gradient.
        calls: how many were timed.
        profile: one further call as PyTorch's profiler recorded it, in Chrome's trace format.
        kernels: the kernels and copies that the profile has of a device, those that take longest
            first. There are none on a CPU, nor where the profiler may not look at the device.
        device_seconds: the time in which the device ran at least one of them.

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

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels and copies of the profiled call, longest first."""
        return kernels_of(json.loads(self.profile))

    @property
    def device_seconds(self) -> float:
        """The time in which the device was busy in the profiled call."""
        return busy_seconds(json.loads(self.profile))

    def __repr__(self) -> str:
        taken = f"{seconds_text(self.seconds)} a call, the median of {self.calls}"
        device = f"; {said}" if (said := self._of_device()) else ""
        return f"<{self.chain.name}: {taken}{device}; `.save(path)` writes the profile of one>"

    def _of_device(self) -> str:
        if kernels := self.kernels:
            count, busy = sum(one.count for one in kernels), seconds_text(self.device_seconds)
            return f"{count} kernels and copies keep the device busy for {busy}"
        is_host = device_of(self.chain).type in ("cpu", "meta")
        return "" if is_host else "the profiler recorded nothing of the device"

    def __str__(self) -> str:
        kernels = self.kernels
        rows = [(one.name[:60], str(one.count), seconds_text(one.seconds)) for one in kernels]
        table = plain(("on the device", "times", "time"), rows[:ROWS]) if rows else ""
        more = f"and {len(rows) - ROWS} others" if len(rows) > ROWS else ""
        return "\n".join(part for part in (repr(self), table, more) if part)

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file, which https://ui.perfetto.dev opens."""
        Path(path).write_text(self.profile, encoding="utf-8")
        return Path(path)


@spelled()
def measure(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Measured:
    """Run `jit(f)(*args, **kwargs)` and measure it, on the devices that its tensors are on.

    The arguments are copied for each call, so that writes to them and donations change nothing.
    Other changes by `f`, such as those of a module's buffers, are made by each call.

    Law: the arguments are afterwards what they were before.

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
    known = (ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU)
    kinds = [kind for kind in known if kind in supported_activities()]
    if len(kinds) > 1:
        _recorded(kinds, step)  # the first look at a device takes long, inside of the call
    return _recorded(kinds, step)


def _recorded(kinds: list[ProfilerActivity], step: Callable[[], object]) -> str:
    # PyTorch 2.11 warns that a second run would clear the events, in each first one.
    with profile(activities=kinds, record_shapes=True, acc_events=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        found.export_chrome_trace(str(path))
        return path.read_text(encoding="utf-8")


def _events(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a device, those with a duration."""
    events = profile.get("traceEvents", ())
    return [one for one in events if one.get("ph") == "X" and one.get("cat") in ON_DEVICE]


def kernels_of(profile: dict[str, Any]) -> tuple[Kernel, ...]:
    """The kernels and copies of a profile in Chrome's trace format, longest first."""
    found = defaultdict[str, list[float]](list)
    for event in _events(profile):
        found[event["name"]].append(event["dur"] * 1e-6)
    kernels = [Kernel(name, len(each), sum(each)) for name, each in found.items()]
    return tuple(sorted(kernels, key=lambda one: -one.seconds))


def busy_seconds(profile: dict[str, Any]) -> float:
    """The time in which a device ran something, however many streams ran at once."""
    total, end = 0.0, float("-inf")
    for event in sorted(_events(profile), key=lambda one: one["ts"]):
        start, stop = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total * 1e-6


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _copied(call: tuple[Any, Any]) -> tuple[Any, Any]:
    leaves, structure = pytree.flatten(call)
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return pytree.unflatten(structure, copies)
