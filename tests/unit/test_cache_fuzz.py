"""The cache never serves a call with a program that was made for other calls: random signatures against eager PyTorch."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from thunder_fn.capture import pytree
from thunder_fn.jit import cache_info, jit

CALLS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 40
"""How many calls of each function, in each mode; what they cost is the programs, which calls share more and more."""


def _branches(x: torch.Tensor, y: torch.Tensor, n: Any) -> Any:
    size = x.shape[0]
    if x.shape == y.shape:
        x = x + y
    if size > 3 and size % 2 == 0:
        x = x.reshape(2, -1)
    if isinstance(n, (int, float)) and n > 2:
        return x.sum() * n, x.shape[0] * n
    return x * 2, size if n else None


def _sizes(x: torch.Tensor, y: torch.Tensor, n: Any) -> Any:
    flat = torch.cat([x.flatten(), y.flatten()])
    half = flat.numel() // 2
    return flat[:half] - flat[flat.numel() - half :], flat.narrow(0, 0, half).sum(), flat.numel() + x.dim()


def _layout(x: torch.Tensor, y: torch.Tensor, n: Any) -> Any:
    return (x if x.is_contiguous() else -x), x.stride(), torch.zeros(y.shape).t() if y.dim() == 2 else y.sum()


def _numbers(x: torch.Tensor, y: torch.Tensor, n: Any) -> Any:
    key = {1: "one", 2: "two", None: "none", "a": "letter"}.get(n, "other")
    if key in ("none", "letter"):
        return x, key
    return x * n + (n // 2 if n >= 0 else -n), key, n.__class__.__name__, f"{n}"


def _broadcast(x: torch.Tensor, y: torch.Tensor, n: Any) -> Any:
    if x.dim() and y.dim() and (x.shape[-1] == y.shape[-1] or 1 in (x.shape[-1], y.shape[-1])):
        return x.flatten(0, -2).sum(0) * y.flatten(0, -2).sum(0) if min(x.dim(), y.dim()) > 1 else x.sum() * y
    return x.mean() if x.numel() else x.sum()


FUNCTIONS: list[Callable[..., Any]] = [_branches, _sizes, _layout, _numbers, _broadcast]


def _tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.choice((0, 1, 2, 3, 4, 4, 5, 6, 8)) for _ in range(draw.choice((1, 2, 2, 2, 3)))]
    x = torch.randn(shape, dtype=draw.choice((torch.float32, torch.float32, torch.float32, torch.float64)))
    kind = draw.choice(("plain", "plain", "plain", "transposed", "sliced", "expanded"))
    if kind == "transposed":
        return x.transpose(0, -1)
    if kind == "sliced":
        return torch.randn([size * 2 for size in shape], dtype=x.dtype)[tuple(slice(0, size) for size in shape)]
    return x[..., :1].expand(shape) if kind == "expanded" and shape[-1] else x


def _number(draw: random.Random) -> Any:
    return draw.choice((0, 1, 2, 3, 5, 7, -1, True, False, 1.0, 0.0, 2.5, -0.5, None, "a", draw.randint(-9, 9)))


def _same(mine: Any, its: Any) -> bool:
    if type(mine) is not type(its):
        return False
    if not isinstance(mine, torch.Tensor):
        return mine == its
    same = (mine.dtype, mine.shape, mine.stride()) == (its.dtype, its.shape, its.stride()) or mine.shape == its.shape
    return same and mine.dtype == its.dtype and torch.allclose(mine, its, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("mode", ["constant values", "symbolic values"])
@pytest.mark.parametrize("f", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::thunder_fn.jit.RetraceWarning")
def test_no_call_gets_the_program_of_another(f: Callable[..., Any], mode: str) -> None:
    draw, g = random.Random(f"{f.__name__} {mode}"), jit(f, cache=mode)
    torch.manual_seed(0)
    for _ in range(CALLS):
        args = _tensor(draw), _tensor(draw), _number(draw)
        mine, its = (pytree.flatten(run(*args)) for run in (g, f))
        assert mine[1] == its[1] and all(map(_same, mine[0], its[0])), (args, mine, its)
    info = cache_info(g)
    assert info.hits + info.misses == CALLS
