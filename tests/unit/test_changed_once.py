"""A function that is traced in several attempts, or refused, changes nothing twice."""

from __future__ import annotations

import array
import types
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import thunder_fn as tfn
from thunder_fn.errors import GraphBreakWarning, ThunderError


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
