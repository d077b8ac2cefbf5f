"""Timing: interleaved rounds, medians, ratios, and a JSON record of each result."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OURS = "thunder_fn"


@dataclass(frozen=True)
class Case:
    """One thing to measure: peers that do the same, each a function without arguments that returns
    when it is done.

    `calls` are made back to back in each round, more where they would take less than `span`
    seconds. The figure is seconds for one of them. `target` states the goal in words.
    """

    name: str
    peers: dict[str, Callable[[], object]]
    calls: int = 1
    span: float = 0.0
    rounds: int = 15
    warmup: int = 3
    target: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """Median seconds for each peer, and the median ratio of ours to each other one."""

    name: str
    seconds: dict[str, float]
    ratios: dict[str, float]
    target: str
    command: str
    machine: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Peak bytes for each peer above what its process held before, and the seconds that it took."""

    name: str
    peaks: dict[str, int]
    seconds: dict[str, float]
    target: str
    machine: dict[str, str]
    notes: tuple[str, ...] = ()


def run_case(case: Case, quick: bool = False) -> Result:
    """Run all peers in interleaved rounds, in another order each.

    A call that is not timed goes before those that are: nobody pays for what another peer left in
    caches and threads.
    """
    for peer in case.peers.values():
        for _ in range(case.warmup):
            peer()
    names = list(case.peers)
    calls = {
        name: case.calls if quick else max(case.calls, _calls_in(case.span, peer))
        for name, peer in case.peers.items()
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(3 if quick else case.rounds):
        for name in random.Random(index).sample(names, len(names)):
            case.peers[name]()
            times[name].append(_time(case.peers[name], calls[name]))
    seconds = {name: statistics.median(values) for name, values in times.items()}
    ratios = {
        name: statistics.median(
            mine / theirs for mine, theirs in zip(times[OURS], values, strict=True)
        )
        for name, values in times.items()
        if name != OURS and OURS in times
    }
    return Result(case.name, seconds, ratios, case.target, command(), machine(), case.notes)


def _calls_in(seconds: float, peer: Callable[[], object]) -> int:
    """The number of calls that take so long, threads and clocks being what they are after as
    long a time.
    """
    if not seconds:
        return 0
    calls, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        peer()
        calls += 1
    return math.ceil(seconds / _time(peer, calls))


def _time(peer: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        peer()
    return (time.perf_counter() - start) / calls


def once(peer: Callable[[], object]) -> float:
    """Seconds for one call, for things that happen once, such as a first trace; the garbage
    collector waits meanwhile.
    """
    gc.collect()
    gc.disable()
    try:
        return _time(peer, 1)
    finally:
        gc.enable()


def single(
    name: str,
    seconds: dict[str, float],
    target: str = "",
    notes: tuple[str, ...] = (),
    parts: tuple[str, ...] = (),
) -> Result:
    """A result of things that happen once. `parts` of ours are shown without a ratio."""
    ours = seconds.get(OURS)
    ratios = {
        peer: ours / value for peer, value in seconds.items() if ours and peer not in (OURS, *parts)
    }
    return Result(name, seconds, ratios, target, command(), machine(), notes)


def in_process(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> Any:
    """Run a module of this folder in a process of its own, and read the JSON in the last line that
    it prints. Its children end with it.

    Raises:
        subprocess.TimeoutExpired: it takes more than so many seconds.
        RuntimeError: it fails.
    """
    words = [sys.executable, "-W", "ignore", "-m", f"thunder_fn.benchmarks.{module}", *arguments]
    with subprocess.Popen(
        words,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        code = f"ended with code {process.returncode}"
        raise RuntimeError(f"{module} {' '.join(arguments)} {code}: {errors[-2000:]}")
    return json.loads(out.splitlines()[-1])


CACHES = ("THUNDER_FN_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""The variables that name where compiled programs are kept."""
FREEING_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""The variables of a heap that hands back whatever is freed."""


@contextlib.contextmanager
def empty_caches() -> Generator[dict[str, str]]:
    """Give the variables of processes whose compilers have empty caches."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield {name: f"{folder}/{name}" for name in CACHES}


def command() -> str:
    """The command that is running, without folders of this machine."""
    words, program = sys.argv[1:], Path(sys.argv[0])
    if "--json" in words:
        words = words[: words.index("--json")] + words[words.index("--json") + 2 :]
    package = "thunder_fn.benchmarks" if program.parent.name == "benchmarks" else "thunder_fn"
    return " ".join(
        [f"python -m {package}" if program.name == "__main__.py" else program.name, *words]
    )


def machine() -> dict[str, str]:
    """Versions, hardware and how busy the machine is, for the record."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["jax"] = importlib.metadata.version("jax")
    found["threads"] = str(torch.get_num_threads())
    found["cores"] = str(os.cpu_count())
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    found["load"] = f"{os.getloadavg()[0]:.1f}"
    return found


def _processor() -> str:
    """The processor's name for itself, as far as the system tells."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return (
            next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
        )
    return platform.processor() or platform.machine()


def show(result: Result | Memory) -> str:
    """A result as lines of text."""
    if isinstance(result, Memory):
        return _show_memory(result)
    width = max(map(len, result.seconds), default=0)
    lines = [result.name + (f"   (to reach: {result.target})" if result.target else "")]
    for name, value in result.seconds.items():
        ratio = f"   ours / it = {result.ratios[name]:.2f}" if name in result.ratios else ""
        lines.append(f"  {name:<{width}}  {_unit(value):>10}{ratio}")
    return "\n".join([*lines, *(f"  {note}" for note in result.notes)])


def _show_memory(result: Memory) -> str:
    width, ours = max(map(len, result.peaks), default=0), result.peaks.get(OURS)
    lines = [f"{result.name}   (to reach: {result.target})"]
    for name, peak in result.peaks.items():
        ratio = f"   ours / it = {ours / peak:.2f}" if name != OURS and ours is not None else ""
        lines.append(
            f"  {name:<{width}}  {peak / 1e6:8.1f} MB  {_unit(result.seconds[name]):>10}{ratio}"
        )
    return "\n".join([*lines, *(f"  {note}" for note in result.notes)])


def _unit(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"


def save(result: Result | Memory, folder: Path) -> Path:
    """Write a result as JSON; the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{''.join(c if c.isalnum() else '_' for c in result.name)}.json"
    path.write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n")
    return path
