"""Progress of work that takes longer than a second, as a bar of `rich` on standard error.

It is shown in a terminal and in a notebook, and nowhere else. Without `rich` a terminal gets one
line. A bar inside the work of another one is not shown.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sized
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""Work that ends sooner shows nothing."""

_shown = threading.Lock()


class Progress:
    """The number of jobs that are done, out of a total."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.bar: Any = None
        self.lock = threading.Lock()

    def advance(self, what: str = "") -> None:
        """Count one more job as done; `what` says what comes next."""
        with self.lock:
            self.done += 1
            self.what = what or self.what
            if self.bar is not None:
                task = self.bar.task_ids[0]
                self.bar.update(task, completed=self.done, description=self.what, refresh=True)


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Generator[Progress]:
    """Show how many of `total` jobs are done, from the first second on."""
    found = Progress(what, total)
    over = threading.Event()

    def show() -> None:
        with found.lock:
            if not over.is_set():
                found.bar = _started(found)

    timer = threading.Timer(PATIENCE_SECONDS, show)
    timer.daemon = True
    is_first = _shown.acquire(blocking=False)
    if is_first:
        timer.start()
    try:
        yield found
    finally:
        if is_first:
            with found.lock:
                over.set()
            timer.cancel()
            if found.bar is not None:
                found.bar.stop()
            _shown.release()


def tracked(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items, and show how many have been."""
    with progress(what, len(items) if isinstance(items, Sized) else None) as found:
        for item in items:
            yield item
            found.advance()


def _started(found: Progress) -> Any:
    """The bar, on the screen; None where there is no screen or no `rich`."""
    if importlib.util.find_spec("rich") is None:
        if sys.stderr.isatty():
            print(f"thunder_fn: {found.what} ...", file=sys.stderr)
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        return None
    bar = Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        console=console,
        transient=True,
        auto_refresh=False,  # no thread runs beside what is measured
        redirect_stdout=sys.stdout.isatty(),  # what goes to a pipe stays there
    )
    bar.add_task(found.what, total=found.total, completed=found.done)
    bar.start()
    bar.refresh()
    return bar
