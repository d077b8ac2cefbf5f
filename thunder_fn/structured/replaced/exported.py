"""PyTorch's higher-order operators themselves, which exported graph modules call:
`torch.ops.higher_order.cond(...)`.

They take and give flat lists, and pass what a body closes over as further operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.structured.cond import cond
from thunder_fn.structured.loop_functions import map as map_slices, scan
from thunder_fn.structured.while_loop import while_loop

F = Callable[..., Any]


def _cond(_: Any, pred: Any, true_fn: F, false_fn: F, operands: Sequence[Any]) -> Any:
    return cond(pred, true_fn, false_fn, tuple(operands))


def _while_loop(
    _: Any,
    cond_fn: F,
    body_fn: F,
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    **options: Any,
) -> Any:
    condition = lambda *carry: cond_fn(*carry, *additional_inputs)
    body = lambda *carry: tuple(body_fn(*carry, *additional_inputs))
    return while_loop(condition, body, tuple(carried_inputs))


def _scan(
    _: Any, combine_fn: F, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]
) -> Any:
    def step(carry: Sequence[Any], slices: Sequence[Any]) -> Any:
        results = combine_fn(*carry, *slices, *additional_inputs)
        return list(results[: len(init)]), list(results[len(init) :])

    carry, ys = scan(step, list(init), list(xs))
    return [*carry, *ys]


def _map(_: Any, f: F, xs: Sequence[Any], pos_args: Sequence[Any]) -> Any:
    return map_slices(lambda slices: list(f(*slices, *pos_args)), list(xs))


def _strict_mode(_: Any, callable: F, operands: Sequence[Any]) -> Any:
    return callable(*operands)


for _name, _replacement in (
    ("cond operator", _cond),
    ("while_loop operator", _while_loop),
    ("scan operator", _scan),
    ("map operator", _map),
    ("strict_mode operator", _strict_mode),
):
    divert(_name, _replacement)
