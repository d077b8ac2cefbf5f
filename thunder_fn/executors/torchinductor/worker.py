"""A process that compiles for another one, which goes on meanwhile.

    python -I -c "...; from thunder_fn.executors.torchinductor.worker import main; main()"

It imports Python's own modules, installed ones, and the parent's thunder_fn and PyTorch. It imports
nothing from the current folder, from that of a script, or from PYTHONPATH. It is given the key of
`trusted.py`. Then it reads batches of jobs from standard input, and compiles them into the folder
of `store.py`. With each batch comes the parent's environment, which names the folder and the
compiler, and may have changed since the process was started. It answers each batch with one line
of JSON: for each job null, or the reason why it failed. It ends when its input does.

It is a process and not a thread, because Inductor holds the GIL for seconds and keeps its state in
globals.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

from thunder_fn.executors.torchinductor import trusted
from thunder_fn.executors.torchinductor.codegen import Job
from thunder_fn.executors.torchinductor.compiling import Failed, Function, compile_jobs, find
from thunder_fn.version import FOLDER

Results = dict[Job, "Function | Failed"]

_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of compilers are no answer
    trusted.take_key(sys.stdin.buffer.read(trusted.SIZE))
    compiler: Callable[[Sequence[Job]], Results] = compile_jobs
    while True:
        batch = _read(sys.stdin.buffer)
        if batch is None:
            return
        environment, jobs = batch
        os.environ.clear()
        os.environ.update(environment)
        results = compiler(jobs)
        reasons = [
            result.reason if isinstance(result, Failed) else None
            for result in map(results.get, jobs)
        ]
        try:
            answers.write(json.dumps(reasons) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody is there any more
            os._exit(0)


def _read(stream: BinaryIO) -> tuple[dict[str, str], list[Job]] | None:
    """Read the next batch: the environment to compile in, and what to compile."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(_LENGTH.unpack(header)[0]))


class Worker:
    """The process as those see it who have something to compile. It is started when `start` or
    `submit` is called.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: after a fork there is no thread here, and the process is the parent's."""
        self.owner = os.getpid()
        self.batches: queue.SimpleQueue[tuple[list[Job], Future[Results]]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, if it does not run."""
        if self.owner != os.getpid():
            self.forget()
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.stop()
                self.process = _spawn()
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._serve, name="thunder_fn compiler", daemon=True
                )
                self.thread.start()

    def stop(self) -> None:
        """End the process. It is started again when there is something to compile."""
        process, self.process = self.process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.kill()
            process.wait()

    def submit(self, jobs: Sequence[Job]) -> Future[Results]:
        """Compile jobs: a function for each, or why there is none."""
        if self.owner != os.getpid():
            self.forget()
        future: Future[Results] = Future()
        if jobs:
            self.start()
        elif self.thread is None:
            future.set_result({})
            return future
        self.batches.put((list(jobs), future))
        return future

    def _serve(self) -> None:
        while True:
            jobs, future = self.batches.get()
            try:
                future.set_result(self._compile(jobs))
            except Exception as error:  # noqa: BLE001  whoever waits hears of it
                future.set_result(dict.fromkeys(jobs, Failed(f"{type(error).__name__}: {error}")))

    def _compile(self, jobs: list[Job]) -> Results:
        missing = [job for job in jobs if job not in find([job])]
        reasons: dict[Job, str | None] = {}
        if missing:
            self.start()
            process = self.process
            assert process is not None and process.stdin is not None and process.stdout is not None
            data = pickle.dumps((dict(os.environ), missing))
            try:
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = b""
            if not line:
                died = Failed(
                    f"the process that compiles in the background ended with code {process.wait()}"
                )
                return dict.fromkeys(jobs, died) | dict(find(jobs))
            reasons = dict(zip(missing, json.loads(line), strict=True))
        found = find(jobs)
        lost = (
            "what was compiled in the background is not in"
            f" {os.environ.get('THUNDER_FN_CACHE_DIR', 'the cache')}"
        )
        return {job: found.get(job) or Failed(reasons.get(job) or lost) for job in jobs}


_START = """
import sys
own, others = sys.argv[1], sys.argv[2:]
packages = ("site-packages", "dist-packages")
installed = (i for i, path in enumerate(sys.path) if path.endswith(packages))
sys.path.insert(next(installed, len(sys.path)), own)
sys.path += [path for path in others if path not in sys.path]
from thunder_fn.executors.torchinductor.worker import main
main()
"""
"""The folder of this package stands behind Python's own modules, so nothing beside it hides one
of those.
"""

_NEEDED = (
    "torch",
    "sympy",
    "mpmath",
    "numpy",
    "networkx",
    "jinja2",
    "markupsafe",
    "filelock",
    "fsspec",
    "typing_extensions",
)
"""Packages that compiling imports, which may lie in a folder that an isolated Python does not
look into.
"""


def _spawn() -> subprocess.Popen[bytes]:
    roots = dict.fromkeys(filter(None, map(_root, _NEEDED)))
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, os.path.dirname(FOLDER), *roots],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None, "as it was asked for"
    process.stdin.write(trusted.key())
    return process


def _root(name: str) -> str | None:
    """The folder where this process finds a package that it has imported."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return None
    path = Path(file).absolute()
    return str(path.parents[1] if path.stem == "__init__" else path.parent)


WORKER = Worker()
"""The one of this process."""
