"""Jobs become functions: from memory, from disk, or by compiling them, all that are missing at
once.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_fn.executors.torchinductor import store
from thunder_fn.executors.torchinductor.codegen import (
    Code,
    Job,
    Kernel,
    RegionError,
    output_strides,
)
from thunder_fn.executors.torchinductor.loop_plan import is_loop
from thunder_fn.executors.torchinductor.loops import generate
from thunder_fn.executors.torchinductor.native import build, build_module, check_compiler, load
from thunder_fn.extend.regions import guarded, memory_is_checked
from thunder_fn.progress import Progress, progress

Function = Callable[..., Any]
Functions = Mapping[str, Function]


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why a job could not be compiled."""

    reason: str


_known: dict[Job, Function] = {}
_kernels: dict[str, Function] = {}
_written: dict[tuple[Kernel, ...], Functions | Failed] = {}
_lock = threading.RLock()


def forget() -> None:
    """Forget entries in memory; those on disk stay."""
    with _lock:
        _known.clear()
        _kernels.clear()
        _written.clear()


def find(jobs: Iterable[Job]) -> dict[Job, Function]:
    """Find the jobs that need no compiler: they have been compiled by this process, or are on
    disk.
    """
    found = dict[Job, Function]()
    with _lock:
        for job in jobs:
            function = _known.get(job)
            if function is None and (kept := store.read(job, _kernels)) is not None:
                function = _ready(job, kept)
            if function is not None:
                found[job] = _known[job] = function
    return found


def _ready(job: Job, function: Function) -> Function:
    """The function of a job; in the mode for tests, one that looks after its memory."""
    if not memory_is_checked():
        return function
    if job.symbols:
        return guarded(function, job.donated, (), ())
    results = () if is_loop(job.region) else output_strides(job)
    return guarded(function, job.donated, job.strides, results)


def compile_jobs(jobs: Iterable[Job]) -> dict[Job, Function | Failed]:
    """A function for every job, or why there is none."""
    jobs = tuple(dict.fromkeys(jobs))
    with _lock:
        results: dict[Job, Function | Failed] = dict(find(jobs))
        missing = [job for job in jobs if job not in results]
        if missing:
            with progress(GENERATING, len(missing)) as found:
                results |= _compile(missing, found)
    return results


def functions_of_kernels(kernels: tuple[Kernel, ...]) -> Functions | Failed:
    """Kernels that Inductor has not written, as functions by their keys: from memory, from disk,
    or compiled in one module.
    """
    with _lock:
        if kernels not in _written:
            _written[kernels] = store.read_kernels(kernels) or _functions_of(kernels)
        return _written[kernels]


def _functions_of(kernels: tuple[Kernel, ...]) -> Functions | Failed:
    try:
        with tempfile.TemporaryDirectory(
            prefix="thunder_fn_", ignore_cleanup_errors=True
        ) as folder:
            path = build_module(kernels, Path(folder))
            store.write_kernels(kernels, path)
            return load(path.read_bytes(), path.stem)
    except (OSError, ImportError, RegionError) as error:
        return Failed(f"{type(error).__name__}: {error}")


GENERATING, BUILDING = "generating code of regions", "running the C++ compiler"


def _compile(jobs: Sequence[Job], found: Progress) -> dict[Job, Function | Failed]:
    codes = dict[Job, Code]()
    results = dict[Job, Function | Failed]()
    try:
        check_compiler()
    except RegionError as error:
        return dict.fromkeys(jobs, Failed(str(error)))
    for turn, job in enumerate(jobs, 1):
        try:
            codes[job] = generate(job)
        except Exception as error:  # noqa: BLE001  whatever goes wrong in Inductor, the region runs on torch
            results[job] = Failed(f"{type(error).__name__}: {error}")
        found.advance(BUILDING if turn == len(jobs) else GENERATING)
    try:
        return results | _built(codes)
    except RegionError as error:
        if len(codes) < 2:
            return results | dict.fromkeys(codes, Failed(str(error)))
    for job, code in codes.items():  # one of them breaks the compiler: each on its own
        try:
            results |= _built({job: code})
        except RegionError as error:
            results[job] = Failed(str(error))
    return results


def _built(codes: dict[Job, Code]) -> dict[Job, Function | Failed]:
    """Compile the kernels of several regions together, and keep the regions on disk.

    Raises:
        RegionError: the compiler, or the disk, does not do it.
    """
    kernels: list[Kernel] = [kernel for code in codes.values() for _, kernel in code.kernels]
    try:
        with tempfile.TemporaryDirectory(
            prefix="thunder_fn_", ignore_cleanup_errors=True
        ) as folder:
            alone = (kernel for kernel in kernels if kernel.alone)
            places = {
                kernel.key: path for kernel in alone if (path := store.kept((kernel,))) is not None
            }
            missing = {kernel: None for kernel in kernels if kernel.key not in places}
            places |= build(tuple(missing), Path(folder)) if missing else {}
            for path in sorted(set(places.values())):
                functions = load(path.read_bytes(), path.stem)
                _kernels.update(
                    {key: functions[key] for key, place in places.items() if place == path}
                )
            for kernel in missing:
                if kernel.alone:
                    store.write_kernels((kernel,), places[kernel.key])
            for job, code in codes.items():
                store.write(job, code, places)
    except (OSError, ImportError) as error:
        raise RegionError(f"{type(error).__name__}: {error}") from error
    for job, code in codes.items():
        functions = {name: _kernels[kernel.key] for name, kernel in code.kernels}
        try:
            _known[job] = _ready(job, store.function_of(code.text, functions, dict(code.constants)))
        except Exception as error:  # kernels of a GPU are compiled here
            raise RegionError(f"{type(error).__name__}: {error}") from error
    return {job: _known[job] for job in codes}
