"""Each row of the table in docs/concepts/outside.md, in thunder_fn and in torch.compile."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from tests.unit.outside_kinds import ROWS, Row, X, forget
from thunder_fn import cache_info, jit
from thunder_fn.errors import ThunderError

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "outside.md"
TABLE = re.findall(r"^\|[^|]*\| `(\w+)` \| ([\w ]+) \| ([\w ]+) \|$", PAGE.read_text(), re.MULTILINE)


def large_array():
    a = np.ones(2000, dtype=np.float32)
    return (lambda x: x * torch.from_numpy(a).sum()), lambda: a.__setitem__(0, 5.0)


def iterator():
    numbers = iter([2.0, 2.0, 2.0, 3.0, 4.0, 5.0])
    return (lambda x: x * next(numbers)), lambda: None


KNOWN: dict[str, Row] = {row.__name__: row for row in (*ROWS, large_array, iterator)}


def outcome(row: Row, count: Callable[[], int], compiled: Callable[..., Any], change: Callable[[], Any], f: Any) -> str:
    try:
        compiled(X), compiled(X)
        before = count()
        change()
        found = compiled(X)
    except ThunderError:
        return "error"
    if row is not iterator and not torch.equal(found, f(X)):
        return "stale"
    return "new trace" if count() > before else "same program"


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TFN_K", raising=False)
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = benchmark
    forget()


def test_the_table_is_read() -> None:
    assert len(TABLE) > 25 and {name for name, *_ in TABLE} <= KNOWN.keys()


@pytest.mark.parametrize(("name", "expected"), [(name, ours) for name, ours, _ in TABLE])
def test_ours(name: str, expected: str) -> None:
    f, change = KNOWN[name]()
    jitted = jit(f)
    assert outcome(KNOWN[name], functools.partial(misses, jitted), jitted, change, f) == expected


def reached_by_c():
    k = 2.0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * k

    def change() -> None:
        nonlocal k
        k = 5.0

    globals()["scaled_by_a_cell"] = scaled
    return (lambda x: globals()["scaled_by_a_cell"](x)), change


def test_ours_with_objects_that_the_collector_has_frozen() -> None:
    """A program may call `gc.freeze` once its modules are there: who holds a function is found as before."""
    rows = {name: (KNOWN[name], ours) for name, ours, _ in TABLE[::6]} | {"reached by C": (reached_by_c, "new trace")}
    found = {}
    for name, (row, _) in rows.items():
        f, change = row()
        gc.freeze()
        try:
            jitted = jit(f)
            found[name] = outcome(row, functools.partial(misses, jitted), jitted, change, f)
        finally:
            gc.unfreeze()
    assert found == {name: ours for name, (_, ours) in rows.items()}


def misses(jitted: Any) -> int:
    return cache_info(jitted).misses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "expected"), [(name, theirs) for name, _, theirs in TABLE])
def test_torch_compile(name: str, expected: str) -> None:
    torch._dynamo.reset()
    f, change = KNOWN[name]()
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(f, backend=backend)
    found = outcome(KNOWN[name], lambda: len(graphs), compiled, change, f)
    if name == "class_attribute" and TorchVersion(torch.__version__) < "2.13":
        assert found in (expected, "stale")  # torch.compile did not guard it in 2.11
    else:
        assert found == expected
    torch._dynamo.reset()
