"""The cache never serves a call with a program that was made for other calls: random signatures against eager PyTorch."""

from __future__ import annotations

import dataclasses
import enum
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from thunder_fn.capture import pytree
from thunder_fn.jitted import cache_info, jit

CALLS = 2000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 40
"""The number of calls of each function, in each mode; programs are the cost, which calls share more and more."""


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
@pytest.mark.filterwarnings("ignore::thunder_fn.jitted.RetraceWarning")
def test_no_call_gets_the_program_of_another(f: Callable[..., Any], mode: str) -> None:
    draw, g = random.Random(f"{f.__name__} {mode}"), jit(f, cache=mode)
    torch.manual_seed(0)
    for _ in range(CALLS):
        args = _tensor(draw), _tensor(draw), _number(draw)
        mine, its = (pytree.flatten(run(*args)) for run in (g, f))
        assert mine[1] == its[1] and all(map(_same, mine[0], its[0])), (args, mine, its)
    info = cache_info(g)
    assert info.hits + info.misses == CALLS


# ---- signatures: how arguments are passed, what holds them, and what no type says of them ----

SIGNATURES = 240 if CALLS > 1000 else 18
"""The number of signatures drawn; calls are drawn among these, so that some find a program and some find another's."""

DETAILS = 6
"""The number of them that differ in details only."""


class Kind(enum.StrEnum):
    A = "a"


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    x: Any
    scale: Any = 2


def _describe(value: Any) -> Any:
    """All that a function can see of an argument, with a tensor that depends on it."""
    if isinstance(value, torch.Tensor):
        seen = (
            value.storage_offset(),
            value.is_leaf,
            value._is_view(),
            isinstance(value, nn.Parameter),
            value.requires_grad,
        )
        more = getattr(value, "tag", None), value.stride(), str(value.dtype), value.is_neg(), value.is_inference()
        return value.sin().sum() * (1 + sum(map(bool, seen))), seen, more
    if isinstance(value, dict):
        return type(value).__name__, [(type(key).__name__, str(key), _describe(item)) for key, item in value.items()]
    if isinstance(value, Settings):
        return "Settings", _describe(value.x), _describe(value.scale)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_describe(item) for item in value]
    return type(value).__name__, str(value)


EQUAL: dict[Any, tuple[Any, ...]] = {
    1: (1, True, 1.0),
    0: (0, False, 0.0, -0.0),
    "a": ("a", Kind.A),
    "b": ("b",),
    2: (2, 2.0),
}
"""Keys and values that are equal, and are not the same."""


@dataclasses.dataclass
class Drawing:
    """Draws calls: `form` what they look like from afar, which several have in common, `detail` the rest."""

    form: random.Random
    detail: random.Random

    def leaf(self) -> Any:
        if self.form.random() < 0.5:
            return self.detail.choice(EQUAL[self.form.choice([*EQUAL])])
        if self.form.random() < 0.2:
            return self.form.choice((None, torch.float32, 1j, slice(1, 2), torch.Size([1])))
        base = torch.arange(1.0, 13.0).view(3, 4)
        tagged = base.clone()
        tagged.tag = self.detail.choice((1, True, "a"))  # type: ignore[attr-defined]
        kinds: list[Callable[[], Any]] = [
            *(lambda: base.clone(), lambda: torch.arange(24.0)[12:].view(3, 4), lambda: tagged, lambda: base[:]),
            *(lambda: base.clone().requires_grad_(), lambda: base.clone().requires_grad_() * 2, lambda: base.double()),
            *(lambda: torch.complex(base, base).conj().imag, lambda: base.t(), lambda: nn.Parameter(base.clone())),
        ]
        return self.detail.choice(kinds)()

    def argument(self, depth: int = 2) -> Any:
        kinds = ("leaf", "leaf", "leaf", "dict", "ordered", "list", "tuple", "pair", "settings")
        kind = self.form.choice(kinds) if depth else "leaf"
        inner: Callable[[], Any] = lambda: self.argument(depth - 1)
        if kind in ("dict", "ordered"):
            known = self.form.choice((["a", "b"], [1, 0], [1, "a", 2]))
            pairs = [(self.detail.choice(EQUAL[key]), inner()) for key in known[: self.form.randint(1, 3)]]
            self.detail.shuffle(pairs)
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        if kind in ("list", "tuple"):
            items = [inner() for _ in range(self.form.randint(0, 2))]
            return items if kind == "list" else tuple(items)
        ways = {"leaf": self.leaf, "pair": lambda: Pair(inner(), inner()), "settings": lambda: Settings(inner())}
        return ways[kind]()

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.form.sample(["y", "n", "self", "args", "f"], self.form.randint(0, 3))
        args = tuple(self.argument() for _ in range(self.form.randint(1, 3)))
        pairs = [(name, self.argument(1)) for name in names]
        self.detail.shuffle(pairs)
        return args, dict(pairs)


def _everything(x: Any, /, *args: Any, y: Any = 1, n: Any = None, **kwargs: Any) -> Any:
    return _describe((x, args, y, n, kwargs))


def _all(mine: Any, its: Any) -> bool:
    if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
        return mine.dtype is its.dtype and torch.allclose(mine, its, rtol=1e-4, atol=1e-4)
    if isinstance(mine, (list, tuple)) and type(mine) is type(its) and len(mine) == len(its):
        return all(map(_all, mine, its))
    return type(mine) is type(its) and mine == its


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.filterwarnings("ignore::thunder_fn.jitted.RetraceWarning")
def test_calls_of_every_signature_are_told_apart(static: bool) -> None:
    """With `thorough`, 2,000 calls take less than a minute of one core."""
    g = jit(_everything, static_argnames=("n",) if static else ())
    draw = random.Random(static)
    for _ in range(CALLS):
        seed = draw.randrange(SIGNATURES)
        args, kwargs = Drawing(random.Random(seed // DETAILS), random.Random(seed)).call()
        if static and any(isinstance(leaf, (torch.Tensor, slice)) for leaf in pytree.flatten(kwargs.get("n"))[0]):
            kwargs["n"] = "static"
        elif static and not isinstance(kwargs.get("n"), Hashable):
            kwargs["n"] = 1.0
        mine, its = g(*args, **kwargs), _everything(*args, **kwargs)
        assert _all(mine, its), (seed, args, kwargs, mine, its)
