"""Calls with `out=`: what is written to has eager PyTorch's values, shape and strides, or the call is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from thunder_fn import jit
from thunder_fn.errors import ThunderError

ONES, LONG = torch.ones(3), torch.tensor([2, 0, 1])
SQUARE = torch.arange(9.0).reshape(3, 3) - 4
CALLS: dict[str, Callable[[Any], Any]] = {
    "arange": lambda out: torch.arange(3, out=out),
    "arange of a step": lambda out: torch.arange(0, 6, 2, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 3, out=out),
    "logspace": lambda out: torch.logspace(0, 1, steps=3, base=2, out=out),
    "rand": lambda out: torch.rand(3, out=out),
    "rand of a generator": lambda out: torch.rand(3, generator=torch.default_generator, out=out),
    "randn": lambda out: torch.randn((3,), out=out),
    "randint": lambda out: torch.randint(0, 9, (3,), out=out),
    "randperm": lambda out: torch.randperm(3, out=out),
    "bernoulli": lambda out: torch.bernoulli(ONES / 2, out=out),
    "normal": lambda out: torch.normal(SQUARE[0], 1.0, out=out),
    "normal of a std": lambda out: torch.normal(1.0, ONES, out=out),
    "kron": lambda out: torch.kron(SQUARE[0], ONES[:1] * 2, out=out),
    "kron of matrices": lambda out: torch.kron(SQUARE[:, :1], SQUARE[:1], out=out),
    "vector @ matrix": lambda out: torch.matmul(SQUARE[0], SQUARE, out=out),
    "matrix @ vector": lambda out: torch.matmul(SQUARE, SQUARE[0], out=out),
    "vector @ matrices": lambda out: torch.linalg.matmul(SQUARE[0], SQUARE.expand(2, 3, 3), out=out),
    "full": lambda out: torch.full((3,), 2.0, out=out),
    "gather": lambda out: torch.gather(SQUARE[0], 0, LONG, out=out),
    "sum": lambda out: torch.sum(SQUARE, 0, out=out),
    "eye": lambda out: torch.eye(3, out=out),
}
OUTS: dict[str, Callable[[], torch.Tensor]] = {
    "equal": lambda: torch.full((3,), 9.0),
    "empty": lambda: torch.full((0,), 9.0),
    "a row": lambda: torch.full((1, 3), 9.0),
    "a column": lambda: torch.full((3, 1), 9.0),
    "larger": lambda: torch.full((6,), 9.0),
    "square": lambda: torch.full((3, 3), 9.0),
    "every second": lambda: torch.full((6,), 9.0)[::2],
    "one of two": lambda: torch.full((2, 3), 9.0)[1],
    "double": lambda: torch.full((3,), 9.0, dtype=torch.float64),
    "whole numbers": lambda: torch.full((1, 3), 9),
}
SHARED = ("eye", "vector @ matrix")
"""Calls whose results may have other strides than eager PyTorch's."""
GIVEN: dict[str, Callable[[Any, Any], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "given": lambda call, make: (lambda out: (call(out), out), (make(),)),
    "made inside": lambda call, make: (lambda x: (lambda out: (call(out), out + x))(make()), (torch.zeros(()),)),
}


def seeded(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    try:
        return f(*args)
    except (RuntimeError, ThunderError) as error:
        return error


@pytest.mark.filterwarnings(
    "ignore:An output with one or more elements was resized", "ignore:The number of elements in the out tensor"
)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", CALLS)
def test_out(name: str, given: str) -> None:
    for shape, make in OUTS.items():
        its, args = GIVEN[given](CALLS[name], make)
        mine, others = GIVEN[given](CALLS[name], make)
        expected, found = seeded(its, args), seeded(jit(mine), others)
        if isinstance(found, Exception) or isinstance(expected, Exception):
            assert isinstance(found, ThunderError if isinstance(expected, tuple) else Exception), (shape, found)
            continue
        for one, other in zip((*found, *others), (*expected, *args), strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, shape=shape: f"{shape}: {text}")
            assert one.stride() == other.stride() or name in SHARED, shape
