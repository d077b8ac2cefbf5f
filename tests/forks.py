"""Processes that begin with everything imported: to import PyTorch and thunder_fn takes three seconds, to fork none.

`python -W error -m tests.forks` imports them and runs scripts, each in a fork of its own: see `Scripts`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]

torch.ones((), requires_grad=True).backward()
"""The first backward of a process starts autograd's threads, one for each device. A CUDA build without a GPU counts
eight devices as soon as there are fake tensors, and no fork may run autograd beside such threads.
"""


class Done(NamedTuple):
    """The end of a process: its exit status, negative for a signal, and its output."""

    returncode: int
    text: str


SECONDS = 240
"""A fork that runs longer says where it is, and ends with status 1."""


def start(run: Callable[[], object], written: Path, seconds: float = SECONDS) -> int:
    """Run a function in a fork of this process, what it writes in a file; its process id.

    The fork ends as a program does: with the status of SystemExit, or a traceback and 1.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which PyTorch has and which all wait
        pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(written, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        run()
    except Exception:  # noqa: BLE001 - as a program that ends so
        traceback.print_exc()
        sys.exit(1)
    sys.exit()


def wait(pid: int, written: Path) -> Done:
    """Wait until a fork has ended."""
    return Done(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.read_text())


class Scripts:
    """Runs scripts, one after the other, each as a program of its own where every warning is an error."""

    def __init__(self, folder: Path) -> None:
        self._written = folder / "written.txt"
        self._server = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.forks", str(self._written)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def run(self, path: Path, keeps: bool = False) -> Done:
        """Run a script in the project's root."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps([str(path), keeps]), file=self._server.stdin, flush=True)
        return Done(*json.loads(self._server.stdout.readline()))

    def keep(self, path: Path) -> Done:
        """Run a tutorial, and keep its page for the site (`docs/tools/kept.py`)."""
        return self.run(path, keeps=True)

    def close(self) -> None:
        """End the process that forks."""
        self._server.communicate()


def _serve(written: Path) -> None:
    for line in sys.stdin:
        path, keeps = json.loads(line)
        sys.argv = [path]
        as_script = lambda path=path: runpy.run_path(path, run_name="__main__")
        as_page = lambda path=path: kept.keep(Path(path))
        print(json.dumps(wait(start(as_page if keeps else as_script, written), written)))
        sys.stdout.flush()


if __name__ == "__main__":
    import thunder_fn
    from docs.tools import kept

    for _name in thunder_fn.__all__:  # each loads what it needs when it is first asked for
        getattr(thunder_fn, _name)
    _serve(Path(sys.argv[1]))
