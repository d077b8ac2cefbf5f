"""Optional packages, and the extra of this package that brings each."""

from __future__ import annotations

import importlib
from typing import Any

from thunder_fn.errors import MissingExtra

EXTRAS = {
    "bitsandbytes": "bitsandbytes",
    "hypothesis": "testing",
    "igraph": "inspect",
    "matplotlib": "inspect",
    "rich": "inspect",
    "safetensors": "save",
    "torchao": "torchao",
    "transformers": "transformers",
}
"""Package, and its extra in pyproject.toml."""


def extra(module: str, what: str) -> Any:
    """Import an optional package, or a module of it.

    Raises:
        MissingExtra: the package is not installed; names its extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module.partition(".")[0], what, error) from error


def missing(package: str, what: str, error: ImportError) -> MissingExtra:
    """The error that says what needs a package, and which extra brings it."""
    why = "is not installed" if error.name in (None, package) else f"cannot be imported: {error}"
    fix = (
        f'Install it with `pip install "thunder_fn[{EXTRAS[package]}]"`.'  # zsh globs what is bare
    )
    return MissingExtra(f"{what} needs {package}, which {why}", fix=fix)
