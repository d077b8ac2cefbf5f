"""The least fixpoint over the carries of a loop: which are active, batched, used?"""

from __future__ import annotations

from collections.abc import Callable

from thunder_fn.ir.rules import Mask
from thunder_fn.ir.trace import Trace
from thunder_fn.structured.shared.bodies import body_activity


def carry_fixpoint(step: Callable[[Mask], Mask], init: Mask) -> Mask:
    """The least mask that contains `init` and that one more step of the loop does not enlarge.

    Args:
        step: from what holds of the carries before a step to what holds of them after it. Monotone.
        init: what holds of the initial carries.

    Law: ``carry_fixpoint(s, m) == carry_fixpoint(s, m) | s(carry_fixpoint(s, m))``.

    Source: the loop that JAX writes in each rule of scan and while; it ends after at most one step
        for each carry.
    """
    mask = init
    while True:
        larger = tuple(old or new for old, new in zip(mask, step(mask), strict=True))
        if larger == mask:
            return mask
        mask = larger


def active_carry(body: Trace, consts: Mask, carry: Mask, xs: Mask = ()) -> Mask:
    """Tell which carries are active in some step, given the active operands of a loop."""
    return carry_fixpoint(
        lambda mask: body_activity(body, (*consts, *mask, *xs))[: len(carry)], carry
    )
