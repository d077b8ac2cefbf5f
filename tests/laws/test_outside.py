"""Law: after any change outside, a jitted function is the function, whatever transform stands between them.

Each kind of read that is left out breaks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import thunder_fn as tfn
from tests.unit.outside_kinds import ROWS, Row, X, forget
from thunder_fn.capture.outside import evaluating
from thunder_fn.errors import ThunderError

F = Callable[[torch.Tensor], torch.Tensor]
BETWEEN: dict[str, Callable[[F], F]] = {
    "grad": lambda f: tfn.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: tfn.vmap(lambda y: f(x * 1) + y * 0)(torch.stack([x, x])),
    "scan": lambda f: lambda x: tfn.scan(lambda c, s: (f(x).to(c.dtype) + c * 0, s), x * 0, torch.stack([x, x]))[0],
    "cond": lambda f: lambda x: tfn.cond(x.sum() > 0, lambda y: f(y).float(), lambda y: y * 1.0, (x,)),
    "checkpoint": lambda f: tfn.checkpoint(f),
    "grad of checkpoint": lambda f: tfn.grad(lambda x: tfn.checkpoint(f)(x).sum()),
    "jit in jit": lambda f: tfn.jit(f),
    "composite": lambda f: tfn.composite(lambda x: f(x)),
}
CASES = list(zip(ROWS, itertools.cycle(BETWEEN), strict=False))
"""Each row below one transform; the next ones follow in turn."""


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TFN_K", "TFN_J", "TFN_L"):
        monkeypatch.delenv(name, raising=False)
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    forget()


def is_stale(row: Row, between: Callable[[F], F]) -> bool:
    f, change = row()
    jitted = tfn.jit(between(f))
    jitted(X)
    change()
    return not torch.equal(jitted(X), between(f)(X))


@pytest.mark.parametrize(("row", "name"), CASES, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_a_change_is_seen_below_a_transform(row: Row, name: str) -> None:
    assert not is_stale(row, BETWEEN[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_change_is_seen_by_a_transform_without_jit(row: Row) -> None:
    f, change = row()
    between = (lambda f: tfn.grad(lambda x: f(x).sum())) if f(X).is_floating_point() else tfn.vmap
    of = between(f)
    of(X), of(X)
    change()
    found = of(X)
    assert torch.equal(found, between(f)(X))


@pytest.mark.parametrize("kind", ["global", "cell", "local", "attr", "item", "each", "call", "whole", "given", "any"])
def test_without_one_kind_of_read_a_change_is_missed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluating.RULES, kind, lambda *_: iter(()))

    def is_caught(row: Row) -> bool:
        try:
            return is_stale(row, lambda f: f)
        except ThunderError:
            return True

    assert any(map(is_caught, ROWS))
