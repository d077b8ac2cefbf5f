"""fori_loop for users: a scan over numbers, or a while_loop where only data says how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.numbers.arithmetic import is_found_in_data
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import TraceTypeError, spelled
from thunder_fn.ir.trace import type_of_value
from thunder_fn.structured.loop_functions import scan
from thunder_fn.structured.shared.bodies import check_takes, is_kept_open, standing_for
from thunder_fn.structured.while_loop import while_loop

Tensor = torch.Tensor


@spelled(lower="lo", upper="hi", body_fun="body", init_val="init")
@internals.with_twin(internals.dynamo_fori_loop)
def fori_loop(
    lo: Any, hi: Any, body: Callable[[Tensor, Any], Any], init: Any, *, unroll: int | bool = 1
) -> Any:
    """Run `for i in range(lo, hi): value = body(i, value)`, where i is an int64 scalar tensor.

    Law: equals the Python loop, under every transform.

    Args:
        lo, hi: ints, for a `scan`; or scalar tensors or items, whose values are found in data, for
            a `while_loop`.
        unroll: as in `scan`, if lo and hi are ints.

    Raises:
        TraceTypeError: the value changes its structure or types, or lo or hi is no int.

    Example:
        >>> fori_loop(0, 5, lambda i, total: total + i, torch.tensor(0))
        tensor(10)

    Source: jax.lax.fori_loop.
    """
    for name, bound in (("lo", lo), ("hi", hi)):
        is_scalar = (
            isinstance(bound, Tensor) and bound.numel() == 1 and not bound.is_floating_point()
        )
        if not is_scalar and (
            isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt))
        ):
            given = type_of_value(bound) if isinstance(bound, Tensor) else type(bound).__name__
            raise TraceTypeError(
                f"fori_loop: {name} is an int or a scalar tensor of ints, not {given}",
                source=user_source(),
            )
    check_takes("fori_loop", "the number of the step and the value", 2, body)
    bounds = (lo, hi)
    if any(isinstance(bound, Tensor) or is_found_in_data(bound) for bound in bounds) or any(
        map(is_kept_open, bounds)
    ):
        return _while_counted(lo, hi, body, init)
    steps = torch.arange(lo, max(lo, hi), dtype=torch.int64)

    @standing_for(body)
    def step(value: Any, i: Tensor) -> tuple[Any, None]:
        return body(i, value), None

    step.step_of = "fori_loop"  # type: ignore[attr-defined]
    return scan(step, init, steps, unroll=unroll)[0]


def _while_counted(lo: Any, hi: Any, body: Callable[[Tensor, Any], Any], init: Any) -> Any:
    """A while_loop with a counter, for bounds that only tensors know."""
    first, last = (
        bound.reshape(()).to(torch.int64)
        if isinstance(bound, Tensor)
        else torch.scalar_tensor(bound, dtype=torch.int64)
        for bound in (lo, hi)
    )

    @standing_for(body)
    def step(i: Tensor, value: Any) -> tuple[Tensor, Any]:
        return i + 1, body(i, value)

    return while_loop(lambda i, value: i < last, step, (first, init))[1]
