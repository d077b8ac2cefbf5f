"""The user's line: the innermost frame that belongs neither to Python, PyTorch nor this package."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import FrameType
from urllib.parse import quote

from thunder_fn.version import FOLDER

OWN_PROGRAMS = ("thunder_fn.demo", "thunder_fn.benchmarks", "thunder_fn.testing")
"""Modules of this package that are programs, as a user's."""

OWN_FILES = tuple(os.path.join(FOLDER, name.partition(".")[2]) for name in OWN_PROGRAMS)
"""Their files and folders."""

_COMMANDS = os.path.join(FOLDER, "commands.py")
_STDLIB = sysconfig.get_paths()["stdlib"]
_TYPED_IN = ("<stdin>", "<string>", "<ipython", "<doctest", "<cell")


@functools.lru_cache(maxsize=4096)
def is_internal(file: str) -> bool:
    """Test for a file of PyTorch, optree, Python or this package, except those of the package that
    are programs of their own.
    """
    if file.startswith(_STDLIB):
        return "site-packages" not in file
    return file.startswith((*_folders(), "<")) and not file.startswith((*OWN_FILES, *_TYPED_IN))


def _folders() -> tuple[str, ...]:
    others = filter(None, map(sys.modules.get, ("torch", "optree")))  # no others have frames
    return (FOLDER, *(os.path.dirname(str(one.__file__)) for one in others))


def editor() -> str:
    """The link that opens a line of code, of a path and a line. The environment variable
    THUNDER_FN_EDITOR names another.
    """
    return os.environ.get("THUNDER_FN_EDITOR", "vscode://file/{path}:{line}")


def editor_link(file: str, line: int) -> str:
    """The link to a line of code."""
    return editor().replace("{path}", quote(file)).replace("{line}", str(line))


def user_frame() -> FrameType | None:
    """Return the user's innermost frame, None if there is none."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and (is_internal(frame.f_code.co_filename) or _is_made(frame)):
        frame = _caller(frame)
    return frame


def calling_frame() -> FrameType | None:
    """Return the frame that called this package, which may be a program of its own, from outside;
    None if there is none.
    """
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and (_is_ours(frame) or is_internal(frame.f_code.co_filename)):
        frame = _caller(frame)
    return frame


def _caller(frame: FrameType) -> FrameType | None:
    """Return the frame that called a frame. Nobody calls a command: below it is the script that
    `pip` wrote.
    """
    code = frame.f_code
    is_command = code.co_name == "run_command" and code.co_filename == _COMMANDS
    return None if is_command else frame.f_back


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(FOLDER) or _is_made(frame)


def _is_made(frame: FrameType) -> bool:
    """Test for a method that `dataclasses` wrote for a class of this package."""
    is_text = frame.f_code.co_filename == "<string>"
    return is_text and str(frame.f_globals.get("__name__")).startswith("thunder_fn.")
