"""Callees of a program beside ops: structured ops by their evaluation rule, bodies lowered when
they are first run; regions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

from thunder_fn import torch_internals as internals
from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.base import Executor, FusionExecutor, RunFunction
from thunder_fn.executors.claims import Claim
from thunder_fn.ir.constraints import close_symbols
from thunder_fn.ir.symbols import symbols_of, symbols_of_options, symbols_read
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.structured.shared.running import bodies_compiled_by


def numbers_read(equation: Equation) -> tuple[str, ...]:
    """The symbols from outside that the function of a structured equation computes with."""
    found = {
        str(symbol) for body in equation.bodies for symbol in symbols_read(body) & symbols_of(body)
    }
    return tuple(sorted(found.union(map(str, symbols_of_options(equation)))))


def run_compiled(
    rule: Callable[..., Any],
    bodies: tuple[Trace, ...],
    numbers: tuple[Any, ...],
    executors: tuple[Executor, ...],
    below_autograd: bool,
) -> Callable[..., Any]:
    """A structured op's evaluation rule, its bodies lowered when they are first run.

    If bodies read symbols from outside, their values are the first argument.
    """

    def run(values: Mapping[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lowered = partial(_body_function, executors=executors, values=values)
        with (
            bodies_compiled_by(lowered),
            internals.below_autograd() if below_autograd else nullcontext(),
        ):
            return rule(bodies, *args, **kwargs)

    if not numbers:
        return lambda *args, **kwargs: run({}, args, kwargs)
    return lambda values, *args, **kwargs: run(
        dict(zip(numbers, values, strict=True)), args, kwargs
    )


def _body_function(
    body: Trace, executors: tuple[Executor, ...], values: Mapping[Any, Any]
) -> Callable[..., tuple[Any, ...]]:
    """The body's program, given the values of its symbols."""
    if not values:
        return _lower_body(body, executors)
    closed, numbers = close_symbols(body)
    run, given = _lower_body(closed, executors), tuple(values[number.value] for number in numbers)
    return lambda *inputs: run(*inputs, *given)


@lru_cache(maxsize=4096)
def _lower_body(body: Trace, executors: tuple[Executor, ...]) -> Callable[..., tuple[Any, ...]]:
    from thunder_fn.executors.torch_executor import lower

    return lower(body, executors=executors, whole=False).run


def compiled_region(claim: Claim) -> RunFunction:
    """The function of a region. One that its executor cannot compile runs on the torch executor,
    with a warning.
    """
    region, executor = claim.closed_region, claim.executor
    assert region is not None and isinstance(executor, FusionExecutor), (
        "a claim has a function or a region"
    )
    try:
        return executor.compiled(region)
    except Exception as error:  # noqa: BLE001  # the program runs without the compiler
        return not_compiled(executor, region, claim.name, error)


def not_compiled(executor: Executor, region: Trace, name: str, error: Exception) -> RunFunction:
    """The function of a region that its executor failed to compile, on the torch executor; with
    a warning.
    """
    from thunder_fn.executors.torch_executor import lower

    source = next((equation.source for equation in region.equations if equation.source), None)
    what = (
        f"{executor.name} could not compile the region {name} of {len(region.equations)}"
        " equations, "
    )
    what += f"which runs on the torch executor instead\n{type(error).__name__}: {error}"
    fix = (
        f"The results are right. Leave {executor.name} out of `executors` to run without this"
        " warning."
    )
    warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=3)
    return lower(region).run
