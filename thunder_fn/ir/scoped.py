"""Context variables that have a value for a while: in this thread, and nowhere else."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Generator[None]:
    """Give a context variable a value inside; afterwards it has the one from before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
