"""Kernels as Python functions: many of them in one C++ file, compiled by one run of the compiler.

Reading PyTorch's headers takes the compiler some two seconds, a kernel tenths of one. So kernels
are compiled in as few files as there are processors.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from thunder_fn.errors import ExecutorError
from thunder_fn.executors.torchinductor.codegen import Kernel, RegionError
from thunder_fn.executors.torchinductor.cpp_text import INCLUDE, cpp, filled
from thunder_fn.torch_internals import inductor as internals

_FOLDER = Path(__file__).parent


def module_source(kernels: Sequence[Kernel], name: str) -> str:
    """The source of an extension module with these kernels as functions, each called as its key.
    Kernels that do not include PyTorch's headers do without them.
    """
    with_headers = any(INCLUDE in kernel.source for kernel in kernels)
    names = ("arguments.h", "tanh.h") if with_headers else ("standard.h", "arguments.h")
    parts = [f"{INCLUDE}\n" if with_headers else "", cpp(_FOLDER, *names)]
    for kernel in kernels:
        arguments = ", ".join(f"argument<{type}>(args[{i}])" for i, type in enumerate(kernel.types))
        source = kernel.source.replace(INCLUDE, "").replace('extern "C"', "static", 1)
        source = re.sub(r"\b(\w+)\.tanh\(\)", r"quick_tanh(\1)", source)
        holes = {"key": kernel.key, "source": source, "arguments": arguments}
        parts.append(filled(_FOLDER, "kernel.cpp", count=len(kernel.types), **holes))
    methods = "\n".join(
        f'    {{"{kernel.key}", (PyCFunction)(void*)call_{kernel.key}, METH_FASTCALL, ""}},'
        for kernel in kernels
    )
    return "".join(parts) + filled(_FOLDER, "module.cpp", methods=methods, name=name)


def module_name(kernels: Sequence[Kernel]) -> str:
    """A name for a module of these kernels."""
    return "m" + hashlib.sha256("".join(kernel.key for kernel in kernels).encode()).hexdigest()[:24]


def split_evenly(kernels: Sequence[Kernel], count: int) -> list[list[Kernel]]:
    """The kernels in at most `count` groups that take about as long to compile."""
    groups: list[list[Kernel]] = [[] for _ in range(count)]
    sizes = [0] * count
    for kernel in sorted(kernels, key=lambda kernel: -len(kernel.source)):
        place = sizes.index(min(sizes))
        groups[place].append(kernel)
        sizes[place] += len(kernel.source)
    return [group for group in groups if group]


_ENOUGH = 20_000
"""Characters of kernels that are worth a second run of the compiler beside the first."""


def build(kernels: Sequence[Kernel], folder: Path) -> dict[str, Path]:
    """Compile kernels into modules in a folder; where each kernel is, by its key.

    Raises:
        RegionError: the compiler is missing, fails or is killed; says what it said.
    """
    distinct = list({kernel.key: kernel for kernel in kernels}.values())
    together = [kernel for kernel in distinct if not kernel.alone]
    length = sum(len(kernel.source) for kernel in together)
    count = max(1, min(os.cpu_count() or 1, length // _ENOUGH))
    groups = [*split_evenly(together, count), *([kernel] for kernel in distinct if kernel.alone)]
    running: list[tuple[list[Kernel], Path, subprocess.Popen[str]]] = []
    try:
        for group in groups:
            name = module_name(group)
            source, target = folder / f"{name}.cpp", folder / f"{name}.so"
            source.write_text(module_source(group, name))
            running.append((group, target, _start(_command(source, target))))
        for _, target, process in running:
            _finish(target, process)
    finally:
        for _, _, process in running:
            _end(process)
    return {kernel.key: target for group, target, _ in running for kernel in group}


def build_module(kernels: Sequence[Kernel], folder: Path) -> Path:
    """Compile kernels into one module in a folder.

    Raises:
        RegionError: as `build`.
    """
    name = module_name(kernels)
    source, target = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(module_source(kernels, name))
    process = _start(_command(source, target))
    try:
        _finish(target, process)
    finally:
        _end(process)
    return target


def _command(source: Path, target: Path) -> str:
    try:
        return internals.build_command(source, target)
    except RuntimeError as error:  # Inductor looks for a compiler, and finds none
        raise RegionError(f"no C++ compiler: {error}") from error


def _start(command: str) -> subprocess.Popen[str]:
    words = [word for word in shlex.split(command) if word not in ("-Wall", "-pedantic", "-g1")]
    try:
        return _run([*words, "-w"])
    except OSError as error:
        raise RegionError(f"the C++ compiler {words[0]} cannot be run: {error}") from error


def _run(words: list[str]) -> subprocess.Popen[str]:
    """Start a compiler, which starts processes of its own: in a group that can be ended as a
    whole.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a compiler that still runs, and its children."""
    if process.poll() is not None:
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)


def seconds_to_compile() -> float:
    """The seconds that a compiler may run: `$THUNDER_FN_COMPILE_SECONDS`.

    Raises:
        ExecutorError: that is no positive number.
    """
    given = os.environ.get("THUNDER_FN_COMPILE_SECONDS", "600")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ExecutorError(
            f"THUNDER_FN_COMPILE_SECONDS is a positive number of seconds, given {given!r}"
        )
    return min(seconds, threading.TIMEOUT_MAX)


def _too_long(seconds: float) -> RegionError:
    return RegionError(
        f"the C++ compiler did not end within {seconds:g} s\nTHUNDER_FN_COMPILE_SECONDS sets how"
        " long it may take."
    )


@cache
def check_compiler() -> None:
    """Run the compiler once, since Inductor asks it for its version and waits for the answer
    however long that takes.

    Raises:
        RegionError: it does not answer.
    """
    seconds = seconds_to_compile()
    for name in internals.compilers():
        try:
            process = _run([*shlex.split(name), "--version"])
        except (OSError, ValueError):  # Inductor says what is wrong, or tries the next
            continue
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise _too_long(seconds) from None
        finally:
            _end(process)


def _finish(target: Path, process: subprocess.Popen[str]) -> None:
    seconds = seconds_to_compile()
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise _too_long(seconds) from None
    if process.returncode:
        how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else "failed"
        raise RegionError(f"the C++ compiler {how}:\n{said.strip()[-2000:]}")
    if not target.exists():
        raise RegionError(f"the C++ compiler wrote no {target.name}")


def load(code: bytes, stem: str) -> Mapping[str, Callable[..., Any]]:
    """The functions of a compiled module, by kernel key: of these bytes, from a file that nobody
    else has.

    Raises:
        ImportError: they are not such a module, or not all of it.
        OSError: the disk does not take them.
    """
    if not _is_whole(code):
        raise ImportError(f"the library {stem} is cut short")
    name = stem.partition("-")[0]
    with tempfile.TemporaryDirectory(prefix="thunder_fn_", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"{name}.so"
        path.write_bytes(code)
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None:
            raise ImportError(f"{path} is not a module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    functions = vars(module)
    functions["connect"](internals.data_pointer_function())
    return functions


def _is_whole(code: bytes) -> bool:
    """Test for a whole library in the ELF format, which ends with the table of its sections. One
    that is cut would be mapped, and fault when read.
    """
    if sys.platform != "linux" or (
        code[:4] == b"\x7fELF" and code[4:6] not in (b"", b"\x02", b"\x02\x01")
    ):
        return bool(code)
    if len(code) < 64:
        return False
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count = struct.unpack_from("<HH", code, 0x3A)
    return start + size * count <= len(code)
