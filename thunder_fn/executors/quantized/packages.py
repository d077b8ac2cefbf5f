"""Packages that executors need and that thunder_fn does not."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

from thunder_fn.extend import OperatorExecutor
from thunder_fn.extras import extra


def imported(package: str, module: str | None = None) -> Any:
    """A package, or a module of it.

    Raises:
        MissingExtra: it is not installed.
    """
    return extra(module or package, f"the executor {package}")


def executor_of(package: str) -> OperatorExecutor:
    """An executor without operators yet, named as the package is."""
    version = importlib.metadata.version(package)
    return OperatorExecutor(package, version=version, numerics="precision-changing")


def made_when_asked(make: Callable[[], OperatorExecutor]) -> Callable[[str], OperatorExecutor]:
    """The `__getattr__` of a module whose `EXECUTOR` is made when it is first asked for.

    Raises:
        MissingExtra: its package is not installed.
    """

    def attribute(name: str) -> OperatorExecutor:
        if name == "EXECUTOR":
            return make()
        raise AttributeError(name)

    return attribute
