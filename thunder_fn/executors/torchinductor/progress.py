"""A progress bar on standard error, for people who wait for a compiler longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

PATIENCE_SECONDS = 1.0


class Progress:
    """Shows how many of the jobs are done, from the first second on, where standard error is a
    terminal.
    """

    def __init__(self, jobs: Sequence[Any], stream: TextIO | None = None) -> None:
        self.total, self.done = len(jobs), 0
        self.stream = stream or sys.stderr
        self.over = threading.Event()
        self.start = time.monotonic()
        self.thread = (
            threading.Thread(target=self._show, daemon=True) if self.stream.isatty() else None
        )

    def __enter__(self) -> Progress:
        if self.thread is not None:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()

    def advance(self) -> None:
        """Count one more job as done but for the C++ compiler."""
        self.done += 1

    def text(self) -> str:
        """The line as it is now."""
        width = 24
        filled = width * self.done // self.total
        what = "running the C++ compiler" if self.done == self.total else "generating code"
        seconds = time.monotonic() - self.start
        bar = "#" * filled + "." * (width - filled)
        return (
            f"thunder_fn: compiling regions [{bar}] {self.done}/{self.total} {what} {seconds:.0f} s"
        )

    def _show(self) -> None:
        shown = ""
        if self.over.wait(PATIENCE_SECONDS):
            return
        while not self.over.wait(0.2):
            text = self.text()
            self.stream.write(f"\r{text}{' ' * (len(shown) - len(text))}")
            self.stream.flush()
            shown = text
        self.stream.write(f"\r{' ' * len(shown)}\r")
        self.stream.flush()
