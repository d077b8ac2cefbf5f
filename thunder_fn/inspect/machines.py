"""Limits of machines: operations and bytes in a second, from data sheets or measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from thunder_fn.errors import InspectError, kind_of


@dataclass(frozen=True, slots=True)
class Machine:
    """The peaks of a machine. An equation takes no less than either lets it: `seconds`.

    Example:
        >>> import thunder_fn as tfn
        >>> core = tfn.inspect.Machine("a core", flops_per_second=60e9, bytes_per_second=12e9)
        >>> core.ridge, core.seconds(flops=120e9, num_bytes=12e9)
        (5.0, 2.0)

    Source: Williams, Waterman and Patterson, Roofline (2009).
    """

    name: str
    flops_per_second: float
    bytes_per_second: float

    @property
    def ridge(self) -> float:
        """The operations for each byte above which operations are the limit."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The least time that so much work takes."""
        return max(flops / self.flops_per_second, num_bytes / self.bytes_per_second)


KNOWN = {
    "H100 SXM": ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
    "H100 PCIe": ("NVIDIA H100 PCIe", 756e12, 2.0e12),
    "H200": ("NVIDIA H200", 989e12, 4.8e12),
    "A100 80GB": ("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12),
    "A100 40GB": ("NVIDIA A100-SXM4-40GB", 312e12, 1.56e12),
    "L40S": ("NVIDIA L40S", 362e12, 0.864e12),
    "L4": ("NVIDIA L4", 121e12, 0.3e12),
    "T4": ("Tesla T4", 65e12, 0.32e12),
}
"""Dense bfloat16 (T4: float16) tensor-core peaks from NVIDIA's data sheets, by the name that
PyTorch gives the device.
"""


def known_machine(device: torch.device) -> Machine | None:
    """The machine that a device is, where its peaks are known."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (
            Machine(short, flops, rate)
            for short, (long, flops, rate) in KNOWN.items()
            if long == name
        ),
        None,
    )


def checked_machine(where: str, machine: Any) -> Machine | None:
    """The machine, or None.

    Raises:
        InspectError: it is something else.
    """
    if machine is None or isinstance(machine, Machine):
        return machine
    what = f"{where}: expected a machine, given {kind_of(machine)}"
    raise InspectError(what, fix='Write `machine=tfn.inspect.machine_named("L4")`.')


def machine_named(name: str) -> Machine:
    """A machine of `KNOWN`.

    Law: the machine has the name that was asked for.

    Raises:
        InspectError: there is none of this name.

    Example:
        >>> import thunder_fn as tfn
        >>> tfn.inspect.machine_named("L4").bytes_per_second
        300000000000.0
    """
    if name not in KNOWN:
        fix = f"Name one of {', '.join(KNOWN)}, or make a `Machine`."
        raise InspectError(f"there is no machine {name!r}", fix=fix)
    _, flops, rate = KNOWN[name]
    return Machine(name, flops, rate)


def measured_machine(
    dtype: torch.dtype = torch.float32, device: str = "cpu", seconds: float = 0.1
) -> Machine:
    """Measure this machine by the fastest of some matrix products and copies.

    Law: both peaks are rates that this machine has reached.

    Raises:
        RuntimeError: PyTorch's, where it has no such device, or draws no numbers of the dtype.

    Example:
        >>> measured_machine(seconds=0.001).flops_per_second > 0
        True
    """
    size = 512 if device == "cpu" else 8192
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    big = torch.ones(1 << (23 if device == "cpu" else 27), dtype=torch.float32, device=device)
    other = torch.empty_like(big)
    product = fastest(lambda: torch.mm(a, b), seconds, device)
    copy = fastest(lambda: other.copy_(big), seconds, device)
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device == "cpu" else ""
    return Machine(f"this {device}{threads}", 2 * size**3 / product, 2 * big.nbytes / copy)


@cache
def this_processor() -> Machine:
    """The processor at hand, measured once in a process."""
    return measured_machine(seconds=0.02)


def fastest(run: Callable[[], object], seconds: float, device: str, calls: int = 1) -> float:
    """Measure the least time of a call within so many seconds, of `calls` back to back.

    A single thread of the CPU is measured by its own clock, so other processes do not count.
    """
    is_alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = clock()
        for _ in range(calls):
            run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, (clock() - start) / calls)
    return best
