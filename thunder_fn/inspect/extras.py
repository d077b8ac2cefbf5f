"""Packages that only pictures need, imported when a picture is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from thunder_fn.errors import MissingExtra, located


def extra(module: str, what: str) -> Any:
    """An optional package.

    Raises:
        MissingExtra: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        fix = "Install it with `pip install thunder_fn[inspect]`."
        raise MissingExtra(located(f"{what} needs {package}, which is not installed", fix=fix)) from error
