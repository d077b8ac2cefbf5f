"""A process that compiles for another one, which goes on meanwhile.

    python -c "from thunder_fn.executors.compiled.worker import main; main()"

It reads batches of jobs from standard input, compiles them into the folder of `store.py`, and answers each batch with
one line of JSON: for each job, null or why it failed. It ends when its input does.
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
from typing import Any, BinaryIO

from thunder_fn.executors.compiled.codegen import Job
from thunder_fn.executors.compiled.compiling import Failed, Function, compile_jobs, find

Results = dict[Job, "Function | Failed"]

_LENGTH = struct.Struct("<Q")


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    compiler: Callable[[Sequence[Job]], Results] = compile_jobs
    while True:
        jobs = _read(sys.stdin.buffer)
        if jobs is None:
            return
        results = compiler(jobs)
        reasons = [result.reason if isinstance(result, Failed) else None for result in map(results.get, jobs)]
        try:
            answers.write(json.dumps(reasons) + "\n")
            answers.flush()
        except BrokenPipeError:  # nobody is there any more
            os._exit(0)


def _read(stream: BinaryIO) -> list[Job] | None:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(_LENGTH.unpack(header)[0]))


class Worker:
    """The process as those see it who have something to compile. It is started when `start` or `submit` is called."""

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
                self.thread = threading.Thread(target=self._serve, name="thunder_fn compiler", daemon=True)
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
            data = pickle.dumps(missing)
            try:
                process.stdin.write(_LENGTH.pack(len(data)) + data)
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = b""
            if not line:
                died = Failed(f"the process that compiles in the background ended with code {process.wait()}")
                return dict.fromkeys(jobs, died) | dict(find(jobs))
            reasons = dict(zip(missing, json.loads(line), strict=True))
        found = find(jobs)
        lost = f"what was compiled in the background is not in {os.environ.get('THUNDER_FN_CACHE_DIR', 'the cache')}"
        return {job: found.get(job) or Failed(reasons.get(job) or lost) for job in jobs}


def _spawn() -> subprocess.Popen[bytes]:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-c", "from thunder_fn.executors.compiled.worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


WORKER = Worker()
"""The one of this process."""
