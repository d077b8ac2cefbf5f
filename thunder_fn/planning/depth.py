"""Plans of deep models from two shallow ones: equal layers cost equally.

Operations, bytes, launches and collectives are linear in the number of equal layers. So is time, as
soon as streams run in step, and so is the peak, as soon as it lies at the same place. On GPTs and
Llamas both hold from three layers on; on tiny models the peak is some percents off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from thunder_fn.errors import InspectError
from thunder_fn.planning.plans import Plan, planned
from thunder_fn.planning.rates import Hardware
from thunder_fn.planning.streams import Timeline

SHALLOW = (3, 5)
"""The layers of the models that are captured; the first and the last may differ from the others."""


def plan_layers(
    make: Callable[[int], tuple[Callable[..., Any], Sequence[Any]]],
    layers: int,
    hardware: Hardware | str | Path = "h100",
    world: int | None = None,
    **options: Any,
) -> Plan:
    """Predict the cost of a step of many equal layers from steps of few.

    Law: in operations, launches, bytes and collectives it is ``plan(*make(layers), ...)``.

    Args:
        make: `make(n)` returns the step of a model of n layers, and its arguments.
        layers: of the model.
        hardware, world, options: as for `plan`.

    Raises:
        InspectError: there are fewer layers than one.

    Example:
        >>> import torch
        >>> from thunder_fn.planning import plan_layers
        >>> def make(layers):
        ...     weights = [torch.ones(8, 8) for _ in range(layers)]
        ...     def step(x, *weights):
        ...         for w in weights:
        ...             x = torch.tanh(x @ w)
        ...         return x
        ...     return step, (torch.ones(2, 8), *weights)
        >>> found = plan_layers(make, 96, world=1)
        >>> found.model_flops == 96 * 2 * 2 * 8 * 8
        False
    """
    if layers < 1:
        what = f"plan_layers: a model has one layer or more, given {layers}"
        raise InspectError(what, fix="Give the number of the model's layers.")
    if layers <= SHALLOW[1]:
        return planned(*make(layers), hardware, world, **options)
    first, second = (planned(*make(count), hardware, world, **options) for count in SHALLOW)
    return extended(first, second, (layers - SHALLOW[1]) / (SHALLOW[1] - SHALLOW[0]))


def extended(first: Plan, second: Plan, times: float) -> Plan:
    """Add to the second plan `times` the difference of the two."""
    on = lambda a, b: b + times * (b - a)
    total = lambda a, b: round(on(a, b))
    return replace(
        second,
        timeline=_extended(first.timeline, second.timeline, on),
        held_bytes=total(first.held_bytes, second.held_bytes),
        live_bytes=total(first.live_bytes, second.live_bytes),
        model_flops=on(first.model_flops, second.model_flops),
    )


def _extended(first: Timeline, second: Timeline, on: Callable[[float, float], float]) -> Timeline:
    seconds = _table(
        ((one, took) for one, _, took in first.collectives),
        ((one, took) for one, _, took in second.collectives),
        on,
    )
    times = _table(
        ((one, count) for one, count, _ in first.collectives),
        ((one, count) for one, count, _ in second.collectives),
        on,
    )
    by_op = _table(first.by_op, second.by_op, on)
    flops = _table(first.flops_by_dtype, second.flops_by_dtype, on)
    return Timeline(
        on(first.seconds, second.seconds),
        on(first.computing, second.computing),
        on(first.communicating, second.communicating),
        round(on(first.launches, second.launches)),
        round(on(first.num_bytes, second.num_bytes)),
        tuple(by_op.items()),
        tuple((one, round(times[one]), took) for one, took in seconds.items()),
        tuple((dtype, round(count)) for dtype, count in flops.items()),
    )


def _table(
    first: Iterable[tuple[Any, float]],
    second: Iterable[tuple[Any, float]],
    on: Callable[[float, float], float],
) -> dict[Any, float]:
    """Extend each entry of a table, largest first."""
    known: defaultdict[Any, float] = defaultdict(float, first)
    found = {key: on(known[key], value) for key, value in second}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
