"""Questions of a function about the class of a tensor, answered as eager PyTorch answers them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import thunder_fn as tfn
from thunder_fn.errors import UnsupportedCall

TABLE = {Tensor: 2.0, Parameter: 3.0}
HELD = SimpleNamespace(kind=Tensor)


class Box:
    """An object that holds what it is given, and asks."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def factor(self) -> float:
        """A factor for its value."""
        return 2.0 if type(self.value) is Tensor else 5.0


def checked(x: Any) -> Any:
    """Return an argument of a known class."""
    if type(x) is not Tensor and type(x) is not Parameter:
        raise TypeError(f"{type(x)} is no tensor")
    return x


def rebound(x: Any) -> Any:
    """Ask, and bind the name anew."""
    factor = 2.0 if type(x) is Tensor else 5.0
    x = x.sin()
    return x * factor


def in_steps(x: Any) -> Any:
    """Ask by another name of `type`."""
    kind_of = type
    return x * (2.0 if kind_of(x) is Tensor else 5.0)


def is_class_or_same(x: Any, other: Any = len) -> Any:
    """Ask whether something is a class, and compare it with another thing by `is`."""
    if isinstance(other, type) or other is not len:
        return x
    return x * 2


def of_match(x: Any) -> Any:
    """Ask by a pattern."""
    match type(x):
        case torch.Tensor:
            return x * 2
        case torch.nn.Parameter:
            return x * 3
        case _:
            return x * 5


@functools.singledispatch
def dispatched(x: Any) -> Any:
    """Serve a value that is no tensor."""
    return x * 5


@dispatched.register
def _(x: Tensor) -> Any:
    return x * 2


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "is": lambda x: x * (2.0 if type(x) is Tensor else 5.0),
    "is not": lambda x: x * (5.0 if type(x) is not Tensor else 2.0),
    "equals": lambda x: x * (2.0 if type(x) == Tensor else 5.0),  # noqa: E721 - another question
    "differs": lambda x: x * (5.0 if type(x) != Tensor else 2.0),  # noqa: E721
    "among": lambda x: x * (2.0 if type(x) in (Tensor, float) else 5.0),
    "table": lambda x: x * TABLE.get(type(x), 5.0),
    "set": lambda x: x * (2.0 if {type(x)} == {Tensor} else 5.0),
    "map": lambda x: x * (2.0 if list(map(type, [x, x])) == [Tensor, Tensor] else 5.0),
    "comprehension": lambda x: x * (2.0 if all(type(a) is Tensor for a in [x, x]) else 5.0),
    "name": lambda x: x * (2.0 if type(x).__name__ == "Tensor" else 5.0),
    "qualified": lambda x: x * (2.0 if f"{type(x).__module__}.{type(x).__qualname__}" == "torch.Tensor" else 5.0),
    "text": lambda x: x * (2.0 if str(type(x)) == "<class 'torch.Tensor'>" else 5.0),
    "subclass": lambda x: x * (3.0 if issubclass(type(x), Parameter) else 2.0),
    "class": lambda x: x * (2.0 if x.__class__ is Tensor else 5.0),
    "of a result": lambda x: x * (2.0 if type(x.sin()) is Tensor else 5.0),
    "of an item": lambda x: x * (2.0 if type([x, 1][0]) is Tensor else 5.0),
    "of an attribute": lambda x: x * Box(x).factor(),
    "with an attribute": lambda x: x * (2.0 if type(x) is HELD.kind else 5.0),
    "of two": lambda x: x * (2.0 if type(x) is type(TWIN) else 5.0),
    "in a helper": lambda x: checked(x) * 2,
    "in an inner function": lambda x: (lambda y: y * (2.0 if type(y) is Tensor else 5.0))(x + 1),
    "of a class": is_class_or_same,
    "by a pattern": of_match,
    "rebound": rebound,
    "dispatched": dispatched,
}
TWIN = torch.ones(3)
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jit": tfn.jit,
    "vmap": tfn.vmap,
    "grad": lambda f: tfn.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: tfn.jit(tfn.grad(lambda x: f(x).sum())),
    "vmap of jacrev": lambda f: tfn.vmap(tfn.jacrev(f)),
    "jvp": lambda f: lambda x: tfn.jvp(f, (x,), (x,)),
    "scan": lambda f: tfn.jit(lambda x: tfn.scan(lambda c, s: (f(c), s), x, x.expand(2, 3))[0]),
    "cond": lambda f: tfn.jit(lambda x: tfn.cond(x.sum() > 0, f, f, (x,))),
    "checkpoint": lambda f: tfn.jit(tfn.checkpoint(f)),
    "tensor's parameter": lambda f: lambda x: tfn.jit(f)(Parameter(x)),
}
ORACLES: dict[str, Callable[[Any], Any]] = {
    "vmap": torch.func.vmap,
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jit of grad": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "vmap of jacrev": lambda f: torch.func.vmap(torch.func.jacrev(f)),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "scan": lambda f: lambda x: f(f(x)),
    "tensor's parameter": lambda f: lambda x: f(Parameter(x)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_tensor_has_the_class_that_it_has_in_eager_code(question: str, transform: str) -> None:
    f, x = QUESTIONS[question], torch.tensor([0.5, -1.0, 2.0])
    ours, wanted = TRANSFORMS[transform](f), ORACLES.get(transform, lambda f: f)(f)
    for value in (x, x + 1):
        torch.testing.assert_close(ours(value), wanted(value))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_another_name_of_type_is_refused(transform: str) -> None:
    with pytest.raises(UnsupportedCall, match=r"`in_steps` asks by `is` for the class") as found:
        TRANSFORMS[transform](in_steps)(torch.ones(3))
    assert found.type is UnsupportedCall
