"""A function that is traced in several attempts, or refused, changes nothing twice."""

from __future__ import annotations

import array
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.errors import GraphBreakWarning, ThunderError, UnsupportedCall


def state() -> types.SimpleNamespace:
    torch.manual_seed(0)
    return types.SimpleNamespace(
        numbers=numpy.arange(4.0),
        bytes=bytearray(b"abc"),
        array=array.array("i", [1, 2]),
        net=nn.Sequential(nn.Linear(3, 3)),
        parts=nn.ModuleDict({"a": nn.Linear(2, 2)}),
        weights=nn.ParameterList([nn.Parameter(torch.ones(2))]),
        log=[1, [2]],
        cache=torch.zeros(3),
        count=0,
    )


def view(s: Any) -> Any:
    """All that a change of these may change, as plain data."""
    modules = {name: sorted(map(str, one.__dict__)) for name, one in s.net.named_modules()}
    hooks = [len(s.net._forward_hooks), len(s.net._forward_pre_hooks)]
    held = s.numbers.tolist(), bytes(s.bytes), list(s.array), [*s.parts], len(s.weights), s.log
    return modules, hooks, [*dict(s.net.named_buffers())], [one.training for one in s.net.modules()], held, s.count


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda s: None,
    "an array in place": lambda s: s.numbers.__iadd__(1),
    "a part of an array": lambda s: s.numbers.__setitem__(slice(2), s.numbers[:2] * 2 + 1),
    "a sorted array": lambda s: s.numbers[::-1].sort(),
    "bytes": lambda s: s.bytes.extend(b"z"),
    "an item of bytes": lambda s: s.bytes.__setitem__(0, s.bytes[0] + 1),
    "an array of Python's": lambda s: s.array.append(7),
    "a hook": lambda s: s.net.register_forward_hook(lambda *_: None) and None,
    "a hook before": lambda s: s.net[0].register_forward_pre_hook(lambda *_: None) and None,
    "a buffer": lambda s: s.net.register_buffer("b", torch.ones(1)),
    "a layer": lambda s: s.net.append(nn.Linear(3, 3)) and None,
    "a part by name": lambda s: s.parts.__setitem__("b", nn.Linear(1, 1)),
    "a parameter": lambda s: s.weights.append(nn.Parameter(torch.ones(1))) and None,
    "a mode": lambda s: s.net.eval() and None,
    "a nested list": lambda s: s.log[1].append(3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_refused_function_has_changed_nothing(name: str) -> None:
    s = state()
    before = str(view(s))

    def f(x: torch.Tensor) -> torch.Tensor:
        CHANGES[name](s)
        return x if x.sum() > 0 else x * 2

    with pytest.raises(ThunderError):
        tfn.jit(f)(torch.ones(3))
    if name != "a mode":  # which is the same after two runs
        assert str(view(s)) == before


@pytest.mark.parametrize("name", [name for name in CHANGES if "array" in name or "bytes" in name or "list" in name])
def test_several_attempts_change_once(name: str) -> None:
    """The numbers and tensors that the function changes are made inputs, for which it is traced again."""

    def make(s: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def f(x: torch.Tensor) -> torch.Tensor:
            CHANGES[name](s)
            s.cache, s.count = s.cache + x, s.count + 1
            return s.cache * s.count

        return f

    ours, theirs = state(), state()
    jitted, f = tfn.jit(make(ours)), make(theirs)
    for _ in range(3):
        torch.testing.assert_close(jitted(torch.ones(3)), f(torch.ones(3)))
        assert str(view(ours)) == str(view(theirs))


@pytest.mark.parametrize("name", ["an array in place", "a hook", "a layer", "a part by name"])
def test_what_compile_runs_in_parts_changes_once(name: str) -> None:
    def make(s: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def f(x: torch.Tensor) -> torch.Tensor:
            CHANGES[name](s)
            return x if x.sum() > 100 else x * 2

        return f

    ours, theirs = state(), state()
    with pytest.warns(GraphBreakWarning):
        tfn.compile(make(ours))(torch.ones(3))
    make(theirs)(torch.ones(3))
    assert str(view(ours)) == str(view(theirs))


def counted() -> Iterator[int]:
    yield from range(9)


ITERATORS: dict[str, Callable[[], Any]] = {
    "generator": counted,
    "list": lambda: iter([*range(9)]),
    "map": lambda: map(int, range(9)),
    "zip": lambda: (one for one, _ in zip(range(9), range(9), strict=True)),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([0, 1, 2]),
    "loader": lambda: iter(torch.utils.data.DataLoader(torch.arange(9))),  # type: ignore[arg-type]
}
DRAWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "next": lambda s, x: x * next(s.it),
    "a loop": lambda s, x: next(x * one for one in s.it),
    "two": lambda s, x: x * next(s.it) + next(s.it),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", ITERATORS)
def test_what_is_drawn_is_not_drawn_twice(name: str, draw: str) -> None:
    """An iterator cannot be put back, so the function is refused before it draws."""
    s = types.SimpleNamespace(it=ITERATORS[name]())
    with pytest.raises(UnsupportedCall, match=r"draws from s\.it, .* from outside"):
        tfn.jit(lambda x: DRAWS[draw](s, x))(torch.ones(3))
    if draw != "a loop":  # in a generator of its own
        assert int(next(s.it)) == 0


@pytest.mark.parametrize("branches", [False, True])
def test_compile_draws_what_eager_mode_draws(branches: bool) -> None:
    def make() -> Callable[[torch.Tensor], torch.Tensor]:
        it = counted()

        def f(x: torch.Tensor) -> torch.Tensor:
            return x * next(it) if branches and len(x) == 3 else x * next(it) * 2

        return f

    f, x = make(), torch.ones(3)
    with pytest.warns(GraphBreakWarning):
        compiled = tfn.compile(make())
        for _ in range(3):
            torch.testing.assert_close(compiled(x), f(x))


def test_a_draw_that_does_not_happen() -> None:
    it, new = counted(), types.SimpleNamespace(it=counted())

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * next(it) if len(x) == 2 else x * 2

    def g(x: torch.Tensor) -> torch.Tensor:
        new.it = iter([2.0, 3.0])
        return x * next(new.it)

    x = torch.ones(3)
    for one in (f, g):
        jitted = tfn.jit(one)
        assert all(torch.equal(jitted(x), 2 * x) for _ in range(2))
    assert torch.equal(tfn.jit(lambda x: x * next(itertools.repeat(2.0)))(x), 2 * x)
    assert next(it) == 0
