"""Structured ops that run by their evaluation rule, their bodies lowered when they are first run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.executors.base import Executor
from thunder_fn.structured.running import bodies_compiled_by
from thunder_fn.symbols import close_symbols, symbols_in, symbols_of, symbols_read
from thunder_fn.trace import Equation, Trace


def numbers_read(equation: Equation) -> tuple[str, ...]:
    """The symbols from outside that the function of a structured equation computes with."""
    found = {str(symbol) for body in equation.bodies for symbol in symbols_read(body) & symbols_of(body)}
    own = symbols_in(tuple(arg for _, arg in equation.kwargs))
    return tuple(sorted(found.union(map(str, own))))


def run_compiled(
    rule: Callable[..., Any],
    bodies: tuple[Trace, ...],
    numbers: tuple[Any, ...],
    executors: tuple[Executor, ...],
    below_autograd: bool,
) -> Callable[..., Any]:
    """A structured op's evaluation rule, its bodies lowered when they are first run.

    Where bodies read symbols from outside, their values are the first argument.
    """

    def run(values: Mapping[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lowered = partial(_body_function, executors=executors, values=values)
        with bodies_compiled_by(lowered), internals.below_autograd() if below_autograd else nullcontext():
            return rule(bodies, *args, **kwargs)

    if not numbers:
        return lambda *args, **kwargs: run({}, args, kwargs)
    return lambda values, *args, **kwargs: run(dict(zip(numbers, values, strict=True)), args, kwargs)


def _body_function(
    body: Trace, executors: tuple[Executor, ...], values: Mapping[Any, Any]
) -> Callable[..., tuple[Any, ...]]:
    """The body's program, given what its symbols are."""
    if not values:
        return _lower_body(body, executors)
    closed, numbers = close_symbols(body)
    run, given = _lower_body(closed, executors), tuple(values[number.value] for number in numbers)
    return lambda *inputs: run(*inputs, *given)


@lru_cache(maxsize=4096)
def _lower_body(body: Trace, executors: tuple[Executor, ...]) -> Callable[..., tuple[Any, ...]]:
    from thunder_fn.executors.torch_executor import lower

    return lower(body, executors=executors, whole=False).run
