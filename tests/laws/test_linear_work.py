"""Memoisation: what an interpreter does to composites in composites grows with distinct code, not with calls.

Work is counted, not timed: the questions that no memo answers, and the equations of the distinct bodies that come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.derived import activity as activity
from thunder_fn.derived.leaf_vjp import vjp_rule
from thunder_fn.interpreters import grad as reverse, jvp as forward, simplify, vmap as batching
from thunder_fn.ir.trace import subtraces
from thunder_fn.torch_internals import fakes

MEMOS: tuple[Any, ...] = (
    *(reverse.forward_backward, activity.activity, activity.contributions, activity.USEFUL.everywhere),
    *(
        forward.jvp_trace,
        forward._on_slots,
        forward._with_op,
        forward.without_zeros,
        batching.batch,
        simplify.dce_to,
        vjp_rule,
    ),
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


def looped(depth: int, calls: int) -> Function:
    """Scans in scans: each step calls the one inside it so many times, under a choice."""
    f: Function = torch.sin
    for _ in range(depth):

        def body(x: torch.Tensor, f: Function = f) -> torch.Tensor:
            for _ in range(calls):
                x = f(x)
            return x * 0.9

        def outer(x: torch.Tensor, body: Function = body) -> torch.Tensor:
            def chosen(x: torch.Tensor) -> torch.Tensor:
                return tfn.scan(lambda c, _: (body(c), None), x, None, length=3)[0]

            return tfn.cond(x.sum() > 0, chosen, torch.cos, (x,))

        f = outer
    return f


def along(f: Function) -> Function:
    return lambda x: tfn.jvp(f, (x,), (x,))[1]


def sum_of_grad(f: Function) -> Function:
    return lambda x: tfn.grad(lambda x: f(x).sum())(x).sum()


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad of grad": lambda f: tfn.grad(sum_of_grad(f)),
    "jvp of jvp": lambda f: along(along(f)),
    "jvp of jvp of jvp": lambda f: along(along(along(f))),
    "jvp of jvp without grad": lambda f: along(along(torch.no_grad()(f))),
    "jvp of grad": lambda f: along(tfn.grad(lambda x: f(x).sum())),
    "grad of jvp": lambda f: tfn.grad(lambda x: along(f)(x).sum()),
    "vmap of jvp": lambda f: tfn.vmap(along(f)),
    "jvp of vmap": lambda f: along(tfn.vmap(f)),
    "grad of checkpoint": lambda f: tfn.grad(lambda x: tfn.checkpoint(f)(x).sum()),
    "vmap of grad": lambda f: tfn.vmap(tfn.grad(lambda x: f(x).sum())),
    "grad of vmap": lambda f: tfn.grad(lambda x: tfn.vmap(f)(x).sum()),
}


def questions(transform: Callable[[Function], Function], f: Function) -> tuple[tuple[int, ...], int]:
    """Count the questions that each memo had to answer, and the equations that came out."""
    for memo in MEMOS:
        memo.cache_clear()
    trace = tfn.trace(transform(f), torch.ones(2, 3))
    return tuple(memo.cache_info().misses for memo in MEMOS), sum(len(body.equations) for body in subtraces(trace))


def work(transform: Callable[[Function], Function], depth: int, calls: int) -> tuple[int, ...]:
    """The questions of composites in composites, and the equations."""
    asked, equations = questions(transform, nested(depth, calls))
    return *asked, equations


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


@pytest.mark.parametrize("name", TRANSFORMS)
def test_questions_do_not_grow_with_loops(name: str) -> None:
    """Through choices and loops in each other: their residuals grow with the calls, and what is asked does not."""
    short, middle, deep = (questions(TRANSFORMS[name], looped(*of))[0] for of in ((2, 2), (3, 2), (4, 2)))
    assert [b - a for a, b in zip(short, middle, strict=True)] == [b - a for a, b in zip(middle, deep, strict=True)]
    assert questions(TRANSFORMS[name], looped(2, 4))[0] == short


def test_results_of_equal_steps_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the capture of a training step, whose numbers are symbols: PyTorch computes on fakes what takes a number."""
    asked, compute = list[str](), fakes._answer_of_fakes

    def counted(mode: Any, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return compute(mode, func, *rest)

    monkeypatch.setattr(fakes, "_answer_of_fakes", counted)

    def count(layers: int) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(layers)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        jitted, x = tfn.jit(step), torch.randn(3, 5)
        jitted(x)
        asked.clear()
        jitted(x)
        return len(asked)

    count(2)  # asks for all that has not been asked before
    few, many = count(2), count(6)
    assert (many - few) / 8 <= 10, (few, many, sorted(asked))  # for each of eight more parameters
