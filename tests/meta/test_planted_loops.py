"""Wrong answers about memory, planted in the torch executor's loops, are noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.executors import loops as executor_loops, lower
from thunder_fn.ir.memory import RegionOf, find_aliases


def every_carry(body: Any, num_consts: int, num_carry: int, region_of: RegionOf) -> tuple[int, ...]:
    return tuple(range(num_consts, num_consts + num_carry))


def carries_without_their_views(body: Any, num_consts: int, num_carry: int, region_of: RegionOf) -> tuple[int, ...]:
    """Looks at what is made anew, and not at who else sees it."""
    whole = find_aliases(body, region_of).whole
    return tuple(num_consts + i for i, atom in enumerate(body.outputs[:num_carry]) if whole[atom.index])


@pytest.mark.parametrize("bug", [every_carry, carries_without_their_views])
def test_a_step_in_memory_that_others_see_is_noticed(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = torch.linspace(-1, 1, 24).reshape(4, 2, 3)

    def step(c: Any, x: Any) -> Any:
        new = c * 2 + x
        return new, new[:, 1:]

    trace = tfn.trace(lambda h, xs: tfn.scan(step, h, xs), xs[0], xs)
    agree = lambda: all(map(torch.equal, lower(trace)(xs[0], xs), tfn.evaluate(trace, (xs[0], xs))))
    assert agree()
    monkeypatch.setattr(executor_loops, "private_carries", bug)
    assert not agree()
