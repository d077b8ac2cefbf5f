"""Memoisation: what an interpreter does to composites in composites grows with distinct code, not with calls.

Work is counted, not timed: the questions that no memo answers, and the equations of the distinct bodies that come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn import derive_activity as activity
from thunder_fn.derive import vjp_rule
from thunder_fn.interpreters import jvp as forward, simplify, vjp as reverse, vmap as batching
from thunder_fn.trace import subtraces

MEMOS: tuple[Any, ...] = (
    *(reverse.split_vjp, activity.activity, forward.push_forward, batching.batch, simplify.dce_to),
    vjp_rule,
)
Function = Callable[[torch.Tensor], torch.Tensor]


def nested(depth: int, calls: int) -> Function:
    """Composites in composites: each calls the one inside it so many times, and does something of its own."""
    f: Function = torch.sin
    for level in range(depth):

        def outer(x: torch.Tensor, f: Function = f) -> torch.Tensor:
            for _ in range(calls):
                x = f(x)
            return x * 0.9

        outer.__qualname__ = f"level_{level}"
        f = tfn.composite(outer)
    return f


def sum_of_grad(f: Function) -> Function:
    return lambda x: tfn.grad(lambda x: f(x).sum())(x).sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad of grad": lambda f: tfn.grad(sum_of_grad(f)),
    "jvp of jvp": lambda f: lambda x: tfn.jvp(lambda x: tfn.jvp(f, (x,), (x,))[1], (x,), (x,))[1],
    "vmap of grad": lambda f: tfn.vmap(tfn.grad(lambda x: f(x).sum())),
    "grad of vmap": lambda f: tfn.grad(lambda x: tfn.vmap(f)(x).sum()),
}


def work(transform: Callable[[Function], Function], depth: int, calls: int) -> tuple[int, ...]:
    """How many questions each memo had to answer, and how many equations came out."""
    for memo in MEMOS:
        memo.cache_clear()
    trace = tfn.trace(transform(nested(depth, calls)), torch.ones(2, 3))
    equations = sum(len(body.equations) for body in subtraces(trace))
    return *(memo.cache_info().misses for memo in MEMOS), equations


@pytest.mark.parametrize("name", TRANSFORMS)
def test_work_is_linear_in_depth(name: str) -> None:
    """Twelve composites deep."""
    short, middle, deep = (work(TRANSFORMS[name], depth, 1) for depth in (4, 8, 12))
    assert [b - a for a, b in zip(short, middle, strict=True)] == [b - a for a, b in zip(middle, deep, strict=True)]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_work_does_not_grow_with_calls(name: str) -> None:
    """Each composite calls the one inside it twice: the leaf is called 2, 4, ..., 64 times."""
    short, middle, deep = (work(TRANSFORMS[name], depth, 2) for depth in (2, 4, 6))
    assert [b - a for a, b in zip(short, middle, strict=True)] == [b - a for a, b in zip(middle, deep, strict=True)]
