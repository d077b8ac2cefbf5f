"""The end of a command of this package: an exit code, never a stack trace for a user's mistake."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from thunder_fn.errors import MissingExtra, ThunderError

INTERRUPTED = 130


def run_command(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command's `main` and return its exit code.

    A reader that stops reading (`| head`) ends it quietly with 1, as Python's documentation
    advises; Ctrl-C with 130.
    """
    try:
        code = main(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # text that Python still holds goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MissingExtra as error:
        print(error.without_call(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def failed(command: str, error: Exception, code: int = 1) -> int:
    """Print why a command failed, and return its exit code."""
    text = error.without_call() if isinstance(error, ThunderError) else str(error)
    print(f"thunder_fn {command}: {text}", file=sys.stderr)
    return code


class UserError(Exception):
    """Code that a command was pointed at raised; the text is Python's, from the user's frames
    on.
    """


@contextlib.contextmanager
def users_code() -> Generator[None]:
    """Mark exceptions raised inside as the user's: of the stack, only the frames of the called code
    are of interest.

    Raises:
        UserError: something was raised, or it left by `sys.exit`.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error here is the user's
        frames = traceback.extract_tb(error.__traceback__)
        ours = Path(__file__).parent
        theirs = [
            frame
            for frame in frames
            if ours not in Path(frame.filename).parents and frame.filename[:1] != "<"
        ]
        theirs = [frame for frame in theirs if Path(frame.filename) != Path(importlib.__file__)]
        lines = ["the code that it was given raises", *traceback.format_list(theirs)]
        lines += traceback.format_exception_only(error)
        raise UserError("\n".join(line.rstrip("\n") for line in lines)) from None


def output_folder(text: str) -> Path:
    """The type of an argument that names a folder to write to: made at once, so that nobody waits
    for an error.

    Raises:
        ArgumentTypeError: it cannot be made; says why.
    """
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return Path(text)
