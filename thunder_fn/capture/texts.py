"""The texts of tracers: `print(x)`, `f"{x}"`. A trace has no values, so they say the type.

A program has the text as a constant, whose values would be missing. So a text may be printed while
tracing, and is refused where the program would hand it on. Where a function runs in parts if it is
refused, as under `compile`, it is refused when it is asked for.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch

from thunder_fn.errors import UnsupportedCall, UnsupportedOutput
from thunder_fn.version import FOLDER

_OURS = (FOLDER, os.path.dirname(str(torch.__file__)))
_OF_LOGS = os.path.dirname(logging.__file__)
"""A handler of logs writes errors in the place of a text, and goes on."""
_MARK = "Tracer("
_FIX = (
    "Return or store the tensor, and make the text outside of the traced function. To print values,"
    ' write `tfn.debug.print("{}", x)`.'
)


class Texts:
    """The texts of tracers that a capture was asked for."""

    def __init__(self) -> None:
        self.is_wary = False
        """Set where a function that is refused runs in parts."""
        self.is_asked = False

    def ask(self, asker: str = "") -> None:
        """Note that a tracer's text is asked for, by the code in a file.

        Raises:
            UnsupportedCall: the user's code asks, and parts of the function can run without a
                trace.
        """
        asker = asker or _asker()
        if asker.startswith(_OURS):
            return
        if self.is_wary and not asker.startswith(_OF_LOGS):
            what = "the text of a traced tensor, whose values are not known while tracing"
            raise UnsupportedCall(f"Python asked for {what}", fix=_FIX)
        self.is_asked = True

    def check(self, value: Any, where: str) -> None:
        """Refuse a string with the text of a tracer, also in a container.

        Raises:
            UnsupportedOutput: it has one.
        """
        if not self.is_asked:
            return
        if isinstance(value, (list, tuple, dict)):
            for one in value.values() if isinstance(value, dict) else value:
                self.check(one, where)
        if isinstance(value, str) and _MARK in value:
            what = f"{where} the text of a traced tensor, which has no values: {value[:60]!r}"
            raise UnsupportedOutput(what, fix=_FIX)


def _asker() -> str:
    """The file of the code that asks for the text of a tracer."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.endswith(_WRITERS):
        frame = frame.f_back
    return FOLDER if frame is None else frame.f_code.co_filename


_WRITERS = tuple(
    os.path.join(FOLDER, *name)
    for name in (
        ("capture", "texts.py"),
        ("capture", "supported.py"),
        ("capture", "numbers", "known_values.py"),
        ("torch_internals", "tracers.py"),
    )
)
