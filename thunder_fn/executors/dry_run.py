"""Effects of executors on memory, without computing anything."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from thunder_fn.executors.base import FusionExecutor
from thunder_fn.executors.claims import Claimed
from thunder_fn.executors.running import CheckedRegion
from thunder_fn.executors.taking import donating
from thunder_fn.executors.torch_executor import lower
from thunder_fn.ir.trace import Equation, Trace


@runtime_checkable
class HasDryRun(Protocol):
    """A compiled region that can say what it allocates.

    Law: on tensors without values `dry_run` allocates, keeps and frees the same memory as a call on
        tensors with values.
    """

    def dry_run(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs, tensors without values like the inputs."""
        ...


def dry_run_of(
    claimed: Claimed, equation: Equation, given: tuple[int, ...] = ()
) -> Callable[..., tuple[Any, ...]] | None:
    """The function that runs a claimed equation on tensors without values.

    It may write to the operands that it is `given`, by place.

    None for code that is not PyTorch calls to the last, such as an operator's `fn`: its effect is
    unknown.
    """
    claim = claimed.claim_of(equation)
    region = claim.closed_region
    if (
        claim.numbers
        or equation.kwargs
        or region is None
        or not isinstance(claim.executor, FusionExecutor)
    ):
        return None
    run = claim.executor.known(region)
    if run is None:  # it could not be compiled
        return _on_torch(region)
    run = donating(run.run if isinstance(run, CheckedRegion) else run, given)
    if isinstance(run, HasDryRun):
        return run.dry_run
    is_ours = isinstance(run, types.FunctionType) and run.__code__.co_filename.startswith(
        "<thunder_fn"
    )
    return run if is_ours else None


def _on_torch(region: Trace) -> Callable[..., tuple[Any, ...]]:
    return lower(region).run
