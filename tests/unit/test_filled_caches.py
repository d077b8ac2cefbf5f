"""Tables that a function fills while it is traced and reads at later calls: each transform answers as without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

SHAPES = ((3, 2), (4, 2), (3, 4), (3, 2), (4, 3))


def in_a_dict(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    held: dict[int, torch.Tensor] = {}

    def table(n: int) -> torch.Tensor:
        if n not in held:
            held[n] = make(n)
        return held[n]

    return table


def in_an_attribute(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    class Owner:
        held: torch.Tensor | None = None

        def __call__(self, n: int) -> torch.Tensor:
            if self.held is None or self.held.shape[0] < n:
                self.held = make(n)
            return self.held[:n]

    return Owner()


def in_a_list(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    held: list[torch.Tensor] = []

    def table(n: int) -> torch.Tensor:
        found = [one for one in held if one.shape[0] == n]
        if not found:
            held.append(make(n))
        return (found or held)[-1]

    return table


def in_a_buffer(make: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
    class Positions(nn.Module):
        def forward(self, n: int) -> torch.Tensor:
            name = f"table{n}"
            if not hasattr(self, name):
                self.register_buffer(name, make(n), persistent=False)
            return getattr(self, name)

    return Positions()


CACHES = {
    "dict": in_a_dict,
    "attribute": in_an_attribute,
    "list": in_a_list,
    "buffer": in_a_buffer,
    "lru_cache": lambda make: functools.lru_cache(maxsize=None)(make),
}
USES: dict[str, Callable[[torch.Tensor, Callable[[int], torch.Tensor]], torch.Tensor]] = {
    "right of +": lambda x, table: x * x + table(x.shape[-1]),
    "left of *": lambda x, table: table(x.shape[-1]) * x,
    "argument": lambda x, table: torch.addcmul(x, table(x.shape[-1]), x),
    "view": lambda x, table: x @ table(x.shape[-1]).unsqueeze(-1).mT.reshape(-1, 1) * x,
    "index": lambda x, table: x[table(x.shape[-1]).long() % x.shape[0]] * x,
    "in place on it": lambda x, table: x * table(x.shape[-1]).clone().mul_(2),
    "list of them": lambda x, table: torch.stack([x, table(x.shape[-1]) + 0 * x]).prod(0),
    "condition": lambda x, table: torch.where(table(x.shape[-1]) > 1, x * x, x),
    "method": lambda x, table: table(x.shape[-1]).add(x).sin(),
}


def table_of(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32) + 1


TRANSFORMS: dict[str, Callable[[Any, Callable[..., torch.Tensor]], Callable[..., Any]]] = {
    "vmap": lambda api, f: api.vmap(f),
    "grad": lambda api, f: api.grad(lambda x: f(x[0]).sum()),
    "vjp": lambda api, f: lambda x: (lambda out, pull: pull(torch.ones_like(out)))(*api.vjp(lambda y: f(y[0]), x)),
    "jvp": lambda api, f: lambda x: api.jvp(lambda y: f(y[0]), (x,), (x.cos(),)),
    "vmap of grad": lambda api, f: api.vmap(api.grad(lambda x: f(x).sum())),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("cache", CACHES)
def test_filled_caches(cache: str, use: str) -> None:
    """Each transform on its own fresh cache, plain, and jitted; several sizes in turns. The oracle has no cache."""
    for transform, wrap in TRANSFORMS.items():
        theirs = wrap(torch.func, functools.partial(USES[use], table=table_of))
        for name, around in (("plain", lambda f: f), ("jit", tfn.jit)):
            mine = around(wrap(tfn, functools.partial(USES[use], table=CACHES[cache](table_of))))
            for shape in SHAPES:
                x = torch.linspace(0.1, 1, shape[0] * shape[1]).reshape(shape)
                torch.testing.assert_close(mine(x), theirs(x), msg=lambda text: f"{transform}, {name}, {shape}: {text}")


BODIES: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "scan": lambda f, x: tfn.scan(lambda c, s: (c, f(x * s)), x, torch.ones(2))[1][0],
    "cond": lambda f, x: tfn.cond(x.sum() > 0, f, f, (x,)),
    "checkpoint": lambda f, x: tfn.checkpoint(f)(x),
}


@pytest.mark.parametrize("within", BODIES)
def test_bodies_that_fill_a_table_make_tensors_from_data(within: str) -> None:
    held: dict[int, list[int]] = {}

    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in held:
            held[x.shape[0]] = [1, 0]
        return x[held[x.shape[0]]] + torch.tensor([0.5, 1.5])

    for x in (torch.ones(3, 2), torch.arange(8.0).view(4, 2), torch.ones(3, 2)):
        assert torch.equal(tfn.jit(functools.partial(BODIES[within], f))(x), x[[1, 0]] + torch.tensor([0.5, 1.5]))


CACHING: dict[str, Callable[[Any], Any]] = {
    "bounded": functools.lru_cache(maxsize=2, typed=True),
    "unbounded": functools.cache,
}
KEYS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "size": lambda x, g: x * g(x.shape[0])[0],
    "shape": lambda x, g: x * g(x.shape)[0],
    "sizes": lambda x, g: x.reshape(*g((x.shape[1], "a", x.shape[0]))[1]),
    "keyword": lambda x, g: x + g("b", of=x.shape[1] * 2)[0],
    "computed": lambda x, g: x.repeat(g(x.shape[0] // 2 + 1)[0], 1),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("caching", CACHING)
def test_cached_functions_of_sizes(caching: str, key: str) -> None:
    """A cached function of PyTorch's sizes answers with plain data, as einops' recipes; eager calls share it."""
    use = KEYS[key]

    def answer(*args: Any, of: int = 1) -> tuple[int, tuple[int, ...]]:
        numbers = [one for arg in args for one in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(one, int)]
        return sum(n % 3 + 1 for n in numbers) + of % 5 + of * 2, tuple(numbers)

    for wrap in (lambda f: f, lambda f: lambda x: tfn.vmap(f)(x[None])):
        cached = CACHING[caching](answer)
        f, plain = wrap(lambda x, cached=cached: use(x, cached)), wrap(lambda x: use(x, answer))
        jitted = tfn.jit(f)
        for shape in ((4, 6), (5, 6), (1, 2), (4, 6), (7, 9)):
            x = torch.rand(shape)
            for way in (jitted, f, jitted):
                torch.testing.assert_close(way(x), plain(x))


def appends(log: list[int], box: dict[str, int], n: int) -> int:
    log.append(n)
    return n * 2


def counts(log: list[int], box: dict[str, int], n: int) -> int:
    box["calls"] += 1
    return n * 2


def registers(log: list[int], box: dict[str, int], n: int) -> int:
    box[f"made {n}"] = len(log)
    return n * 2


def reads(log: list[int], box: dict[str, int], n: int) -> int:
    made = [*log]
    made.append(n)
    return sum(made) + box["calls"]


@pytest.mark.parametrize("body", (appends, counts, registers, reads))
@pytest.mark.parametrize("is_filled", (False, True))
def test_cached_functions_that_change_objects(body: Callable[..., int], is_filled: bool) -> None:
    """They do so in the first call; a trace would do it in each. One that only reads is traced."""
    results = list[Any]()
    for way in (lambda f: f, lambda f: tfn.jit(f), lambda f: tfn.grad(lambda x: f(x).sum())):
        log, box = [1], {"calls": 1}
        kept = functools.lru_cache(lambda n, log=log, box=box: body(log, box, n))
        if is_filled:
            kept(3)
        f = way(lambda x, kept=kept: x * kept(3))
        try:
            got = [f(torch.ones(2)).tolist() for _ in range(3)]
        except UnsupportedCall:
            assert body is not reads and not is_filled
            got = results[-1][0]
            log, box = results[-1][1:]
        results.append((got, log, box))
    assert results[0] == results[1] == results[2]
