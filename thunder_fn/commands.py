"""How a command of this package ends: with an exit code, never with a stack trace for what its user did."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

INTERRUPTED = 130


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command's `main` and return its exit code.

    A reader that stops reading (`| head`) ends it quietly with 1, as Python's documentation advises; Ctrl-C with 130.
    """
    try:
        code = main(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python still holds goes nowhere
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def output_folder(text: str) -> Path:
    """The type of an argument that names a folder to write to: made at once, so that nobody waits for an error.

    Raises:
        ArgumentTypeError: it cannot be made; says why.
    """
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return Path(text)
