"""Functions that draw from an iterator from outside, by any way: eager PyTorch's results, or a refusal before the draw."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

X = torch.ones(2)


def counting() -> Iterator[int]:
    got = 0
    while got < 60:
        got = (yield got) or got + 1


class Counting:
    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> int:
        self.n += 1
        if self.n >= 60:
            raise StopIteration
        return self.n


def started() -> Iterator[int]:
    next(found := counting())
    return found


def without_variables() -> Iterator[int]:
    box = [1]

    def generator() -> Iterator[int]:
        while box[0] < 60:
            yield box[0]
            box[0] += 1

    next(found := generator())
    return found


ITERATORS: dict[str, Callable[[], Iterator[int]]] = {
    "generator": started,
    "generator without variables": without_variables,
    "object": Counting,
    "chain": lambda: itertools.chain(range(1, 60)),
    "list": lambda: iter(list(range(1, 60))),
    "expression": lambda: (i + 1 for i in range(60)),
    "map": lambda: map(abs, range(1, 60)),
    "file": lambda: map(len, io.StringIO("".join("a" * i + "\n" for i in range(60)))),
}


def through(it: Iterator[int]) -> Iterator[int]:
    yield from it


def first(it: Iterator[int]) -> int:
    for i in it:
        return i
    return 0


USES: dict[str, Callable[[Any], Any]] = {
    "next": next,
    "default": lambda it: next(it, 0),
    "method": lambda it: it.__next__(),
    "loop": first,
    "islice": lambda it: sum(itertools.islice(it, 2)),
    "zip": lambda it: sum(a for a, _ in zip(it, (1, 2), strict=False)),
    "unpacked": lambda it: [*itertools.islice(it, 3)][1],
    "another name": lambda it, draw=next: draw(it),
    "partial": lambda it: functools.partial(next, it)(),
    "any": lambda it: any(i > 3 for i in it) + 2,
    "in": lambda it: int(3 in it) + 2,
    "generator": lambda it: next(through(it)),
    "map": lambda it: next(map(int, it)),
    "comprehension": lambda it: [next(it) for _ in range(2)][1],
    "two": lambda it: next(it) * 10 + next(it),
}


def later(it: Any) -> int:
    for _ in [1]:
        pass
    return it.send(0)


OF_GENERATORS: dict[str, Callable[[Any], Any]] = {
    "send": lambda it: it.send(5),
    "send after a loop": lambda it: later(it),
    "throw": lambda it: it.throw(ValueError),
    "close": lambda it: it.close() or 1,
}
CASES = [(make, use) for make in ITERATORS for use in (*USES, *(OF_GENERATORS if make.startswith("generator") else ()))]
COMPILED = [
    case
    for case in CASES
    if case[0] in ("generator", "list") and case[1] in ("islice", "partial", "in", "send", "loop")
]


def play(make: str, use: str, way: Callable[[Any], Any]) -> list[Any]:
    """Call a function three times, and draw once more."""
    it, of, results = ITERATORS[make](), (USES | OF_GENERATORS)[use], list[Any]()
    f = way(lambda x: x * of(it))
    for _ in range(3):
        try:
            results.append(f(X).tolist())
        except UnsupportedCall:
            return ["refused", next(it, None)]
        except (ValueError, StopIteration) as error:
            results.append(type(error).__name__)
    return [*results, next(it, None)]


@pytest.mark.parametrize(("make", "use"), CASES)
def test_jit_is_eager_or_refuses(make: str, use: str) -> None:
    got = play(make, use, tfn.jit)
    assert got[0] == "refused" or got == play(make, use, lambda f: f)


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning")
@pytest.mark.parametrize(("make", "use"), COMPILED)
def test_compile_draws_each_item_once(make: str, use: str) -> None:
    """The parts that run instead would miss the items that an attempt at a trace has drawn."""
    assert play(make, use, tfn.compile) == play(make, use, lambda f: f)


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning")
@pytest.mark.parametrize("way", [tfn.jit, tfn.compile])
def test_an_exception_after_a_draw(way: Callable[[Any], Any]) -> None:
    """It is drawn from once, whether the exception or the refusal is raised."""
    it, items, missing = itertools.count(), [1], dict[str, int]()

    def f(x: torch.Tensor) -> Any:
        for item in items:
            x = x + item
        x = x * next(it)
        return x * missing["key"] if items else x

    jitted = way(f)
    for call in range(2):
        with pytest.raises((KeyError, UnsupportedCall)):
            jitted(X)
        assert next(it) == 2 * call + 1
