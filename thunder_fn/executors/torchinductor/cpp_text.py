"""The text of C++ files, which lie in `cpp/` beside the Python that compiles them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from string import Template

INCLUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
"""The line of kernels that need PyTorch's headers."""


@cache
def cpp(folder: Path, *names: str) -> str:
    """The text of the files of these names in `cpp/`, one after the other."""
    return "".join((folder / "cpp" / name).read_text(encoding="utf-8") for name in names)


def filled(folder: Path, file: str, /, **holes: object) -> str:
    """The text of a file whose holes, `${name}`, get these values."""
    return Template(cpp(folder, file)).substitute(holes)
