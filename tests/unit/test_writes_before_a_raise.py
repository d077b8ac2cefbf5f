"""Writes before an exception stay, as in plain Python: to arguments, to objects, to tensors.

Each program writes, raises in some calls, and is called in four ways: alone, as a module, and by a function that catches.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn

WRITES = """
a['n'] += 1
a['l'].append(a['n'])
a['l'][0] = x * 2
a['t'] = x + 1
a['t'].add_(1)
a['q'].append(x.sum())
a['q'].popleft()
a.pop('n')
a['self'] = a['l']
a['x'] = x
x.mul_(2)
b.n += 1
b.l.append(b.n)
b.l.append(x * 3)
b.t = b.t + x
b.t.add_(x)
b.d['k'] = x * b.n
b.p.data.mul_(2)
vars(b)['m'] = 1
torch.rand(2)
""".strip().splitlines()
RAISES = (
    "raise ValueError(b.n)",
    "b.l[99]",
    "b.missing",
    "torch.ones(2) + torch.ones(3)",
    "assert b.n > 99",
    "next(iter(()))",
)


def alone(f: Callable[..., Any], way: Callable[..., Any]) -> Callable[..., Any]:
    return way(f)


def of_a_module(f: Callable[..., Any], way: Callable[..., Any]) -> Callable[..., Any]:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, a: dict[str, Any], is_raised: bool) -> Any:
            return f(x, a, is_raised)

    return way(Net())


def caught(f: Callable[..., Any], way: Callable[..., Any]) -> Callable[..., Any]:
    def g(x: torch.Tensor, a: dict[str, Any], is_raised: bool) -> Any:
        try:
            return f(x, a, is_raised)
        except Exception as error:  # noqa: BLE001 - of any kind
            return x * len(error.args)

    return way(g)


def caught_from_a_program(f: Callable[..., Any], way: Callable[..., Any]) -> Callable[..., Any]:
    return caught(way(f), way)


def plain(value: Any, known: dict[int, int]) -> Any:
    """Data that can be compared, and which objects are the same."""
    if isinstance(value, (int, str)):
        return value
    if id(value) in known:
        return "again", known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, plain(item, known)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [plain(item, known) for item in value]
    return plain(vars(value), known) if isinstance(value, types.SimpleNamespace) else value


def calls(write: str, raising: str, how: Callable[..., Any], way: Callable[..., Any]) -> list[Any]:
    """Note the result or the kind of the exception, and all objects, after each of five calls."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.ones(2))
    b = types.SimpleNamespace(n=1, l=[1], t=torch.zeros(2), d={}, p=p)
    text = f"""
def f(x, a, is_raised):
    {write}
    if is_raised:
        {raising}
    return x * b.n + torch.rand(2)
"""
    names: dict[str, Any] = {"b": b, "torch": torch}
    exec(text, names)
    f, found = how(names["f"], way), list[Any]()
    for call in range(5):
        x, result, error = torch.full((2,), 1.0 + call), None, None
        a = {"n": 0, "l": [1], "t": torch.zeros(2), "q": deque([1, 2])}
        try:
            result = f(x, a, call in (1, 2, 4))
        except Exception as raised:  # noqa: BLE001 - of any kind
            kinds = ValueError, IndexError, AttributeError, AssertionError, StopIteration, RuntimeError
            error = next(kind.__name__ for kind in kinds if isinstance(raised, kind))
        found.append((error, plain([result, x, a, b], {})))
    return found


@pytest.mark.parametrize("how", [alone, of_a_module, caught, caught_from_a_program])
@pytest.mark.parametrize(("number", "write"), [*enumerate(WRITES)])
def test_writes_before_a_raise(number: int, write: str, how: Callable[..., Any]) -> None:
    raising = RAISES[number % len(RAISES)]
    for way in (tfn.jit, tfn.compile):
        assert calls(write, raising, how, way) == calls(write, raising, how, lambda f: f), way


TRANSFORMS: dict[str, Callable[[Any], Callable[[torch.Tensor], Any]]] = {
    "grad": tfn.grad,
    "value_and_grad": lambda f: lambda x: tfn.value_and_grad(f)(x)[1],
    "vjp": lambda f: lambda x: tfn.vjp(f, x)[1](torch.tensor(1.0))[0],
    "jvp": lambda f: lambda x: tfn.jvp(f, (x,), (x,))[1],
    "linearize": lambda f: lambda x: tfn.linearize(f, x)[0],
    "jacrev": tfn.jacrev,
    "jit": tfn.jit,
    "plain": lambda f: f,
}


def transformed(outer: str, inner: str) -> tuple[Any, ...]:
    """Call three times what writes to tensors from outside and raises under two transforms."""
    total, box, raised = torch.zeros(2), {"t": torch.zeros(2)}, list[str]()
    norm = torch.nn.Module()
    norm.register_buffer("mean", mean := torch.zeros(2))

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(x.detach())
        norm.mean.mul_(2).add_(1)  # type: ignore[operator,union-attr]
        box["t"] = box["t"] + torch.rand(2)
        raise ValueError("no")

    def g(x: torch.Tensor) -> torch.Tensor:
        return TRANSFORMS[inner](f)(x).sum()

    torch.manual_seed(0)
    call = TRANSFORMS[outer](g)
    for _ in range(3):
        try:
            call(torch.tensor([1.0, 2.0]))
        except ValueError as error:
            raised.append(str(error).splitlines()[0][-2:])
    return total.tolist(), mean.tolist(), box["t"].tolist(), raised, torch.rand(1).item()


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_tensors_that_a_transformed_function_writes_to(outer: str, inner: str) -> None:
    assert transformed(outer, inner) == transformed("plain", "plain")
