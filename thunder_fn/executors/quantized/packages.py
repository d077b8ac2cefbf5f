"""Packages that executors need and that thunder_fn does not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any

from thunder_fn.errors import ExecutorError, located
from thunder_fn.extend import OperatorExecutor


def imported(package: str, module: str | None = None) -> Any:
    """A package, or a module of it.

    Raises:
        ExecutorError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ExecutorError(
            located(f"the executor {package} needs the package of that name", fix=f"`pip install {package}`.")
        )
    return importlib.import_module(module or package)


def executor_of(package: str) -> OperatorExecutor:
    """An executor without operators yet, named as the package is."""
    version = importlib.metadata.version(package)
    return OperatorExecutor(package, version=version, numerics="precision-changing")
