"""Classes that are like tensors by `__torch_function__`, as PyTorch's documentation shows them. The oracle is eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn

HANDLED: dict[Any, Callable[..., Any]] = {}


class Diagonal:
    """A multiple of the identity. PyTorch's own example."""

    def __init__(self, n: int, value: Any) -> None:
        self.n, self.value = n, value

    def tensor(self) -> Tensor:
        return self.value * torch.eye(self.n)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HANDLED or not all(issubclass(kind, (Tensor, Diagonal)) for kind in types):
            return NotImplemented
        return HANDLED[func](*args, **(kwargs or {}))


HANDLED[torch.mean] = lambda one: one.value / one.n
HANDLED[torch.add] = lambda a, b: (
    Diagonal(a.n, a.value + b.value) if isinstance(b, Diagonal) else torch.add(a.tensor(), b)
)
HANDLED[torch.nn.functional.linear] = lambda x, w, bias=None: x * w.value


class Tagged:
    """A tensor with a text. PyTorch's own example."""

    def __init__(self, held: Tensor, tag: str = "") -> None:
        self.held, self.tag = held, tag

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = tuple(one.tag for one in args if isinstance(one, Tagged))
        given = [one.held if isinstance(one, Tagged) else one for one in args]
        return Tagged(func(*given, **(kwargs or {})), tags[0])


X = torch.tensor([[0.5, -1.0], [2.0, 3.0]])
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "handled": lambda x: torch.mean(Diagonal(3, x)),
    "two of them": lambda x: torch.add(Diagonal(2, x.sum()), Diagonal(2, x.mean())).tensor(),
    "with a tensor": lambda x: torch.add(Diagonal(2, x.sum()), x),
    "with a tensor from outside": lambda x: torch.add(Diagonal(2, X.sum()), x),
    "of a value from outside": lambda x: torch.mean(Diagonal(3, X)) + x,
    "a function of Python": lambda x: torch.nn.functional.linear(x, Diagonal(2, X[0, 0])),
    "wrapped": lambda x: torch.sin(Tagged(x, "a")).held,
    "wrapped from outside": lambda x: torch.mul(Tagged(X, "a"), x).held,
    "in place": lambda x: torch.add(Tagged(y := x * 2), 1, out=None) and y,
    "nested": lambda x: torch.cos(torch.sin(Tagged(Tagged(x)))).held.held,
}


@pytest.mark.parametrize("what", PROGRAMS)
@pytest.mark.parametrize("transform", [tfn.jit, tfn.compile])
def test_calls_are_answered_by_the_class(transform: Callable[[Any], Any], what: str) -> None:
    f = PROGRAMS[what]
    ours = transform(f)
    for shift in range(3):
        x, y = (X + shift).requires_grad_(), (X + shift).requires_grad_()
        found, expected = ours(x), f(y)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(tfn.grad(lambda x: f(x).sum())(X), torch.func.grad(lambda x: f(x).sum())(X))


@pytest.mark.parametrize("make", [lambda x: Diagonal(2, x.sum()), Tagged])
def test_arguments_and_results(make: Callable[[Tensor], Any]) -> None:
    f = lambda one: torch.add(one, one)
    ours = tfn.jit(f)
    for shift in range(3):
        found, expected = ours(make(X + shift)), f(make(X + shift))
        assert type(found) is type(expected)
        parts = [[part for part in vars(one).values() if isinstance(part, Tensor)] for one in (found, expected)]
        torch.testing.assert_close(*parts)
        assert all(type(part) is Tensor for part in parts[0])


def test_what_no_class_answers_is_eagers_error() -> None:
    f = lambda x: torch.sin(Diagonal(2, x))
    for one in (f, tfn.jit(f)):
        with pytest.raises(TypeError, match=r"no implementation found for .*sin|torch.sin"):
            one(X)


class Like(torch.Tensor):
    """A class of tensors that PyTorch's functions ask."""


class Duck:
    """A class like tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


LIKE, DUCK, PARAMETER = torch.ones(1).as_subclass(Like), Duck(), torch.nn.Parameter(torch.ones(1))
OVERRIDDEN: dict[str, Any] = {
    "a number": lambda x: torch.overrides.has_torch_function_unary(4),
    "a tuple with a number": lambda x: torch.overrides.has_torch_function((4,)),
    "numbers and texts": lambda x: torch.overrides.has_torch_function_variadic(4, "a"),
    "nothing": lambda x: torch.overrides.has_torch_function(()),
    "the argument": lambda x: torch.overrides.has_torch_function_unary(x),
    "what is computed": lambda x: torch.overrides.has_torch_function([torch.ones(2) * 2, 1]),
    "a parameter": lambda x: torch.overrides.has_torch_function_variadic(x, PARAMETER),
    "a class of tensors": lambda x: torch.overrides.has_torch_function((x, LIKE)),
    "a class like tensors": lambda x: torch.overrides.has_torch_function_unary(DUCK),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
@pytest.mark.parametrize("x", [torch.ones(2), torch.ones(2).as_subclass(Like)])
def test_has_torch_function_is_that_of_the_values(x: torch.Tensor, name: str) -> None:
    ask = OVERRIDDEN[name]
    assert tfn.jit(lambda x: (ask(x), x.sin()))(x)[0] is ask(x)


def test_a_mode_of_the_users_counts() -> None:
    def f(x: torch.Tensor) -> Any:
        with torch.overrides.BaseTorchFunctionMode():
            return torch.overrides.has_torch_function_unary(x), x + 1

    assert tfn.jit(f)(torch.ones(1))[0] is f(torch.ones(1))[0] is True
