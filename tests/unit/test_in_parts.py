"""Code that Dynamo compiles in parts, and gets wrong or fails at: it does what eager code does."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_fn as tfn

X = torch.tensor([0.5, -1.0, 2.0])


class Scaled(Tensor):
    """A tensor of a class of the user's."""

    scale: float

    def doubled(self) -> Tensor:
        return self * 2 * self.scale


class ScaledParameter(Scaled, nn.Parameter):
    """A parameter of the class."""

    def __new__(cls, data: Tensor = X, requires_grad: bool = True) -> ScaledParameter:
        made = Scaled._make_subclass(cls, data, requires_grad)
        made.scale = 3.0
        return made


class OwnParameter(nn.Parameter):
    """A parameter with nothing of its own."""


class Counted(Tensor):
    """Passes on what is called with it, and looks at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = Tensor.__torch_function__(func, (Tensor,), args, kwargs or {})
        return made.as_subclass(Counted) if isinstance(made, Tensor) and made.ndim else made


Program = Callable[[Tensor, Any, Any], Any]


def of_class(x: Tensor, p: Any, optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        for one in group["params"]:
            x = x * (3 if isinstance(one, ScaledParameter | OwnParameter) else 100)
    return x


def of_type(x: Tensor, p: Any, optimizer: Any) -> Any:
    return x * len(type(optimizer.param_groups[0]["params"][0]).__name__)


def by_method(x: Tensor, p: Any, optimizer: Any) -> Any:
    one = optimizer.param_groups[0]["params"][0]
    return x * (one.doubled() if isinstance(one, Scaled) else one)


def by_attribute(x: Tensor, p: Any, optimizer: Any) -> Any:
    one = optimizer.param_groups[0]["params"][0]
    return x * getattr(one, "scale", 7.0)


def stepped(x: Tensor, p: Any, optimizer: Any) -> Any:
    optimizer.zero_grad()
    ((x * p) ** 2).sum().backward()
    with torch.no_grad():
        for one in optimizer.param_groups[0]["params"]:
            one.copy_(one - one.grad * (one.scale if isinstance(one, Scaled) else 100.0))
    optimizer.step()
    return p.detach().clone()


def attribute_deleted(x: Tensor, p: Any, optimizer: Any) -> Any:
    p.noted = x * 2
    torch._dynamo.graph_break()
    found = p.noted + 1
    del p.noted
    return found, hasattr(p, "noted")


def shape_of_counted(x: Tensor, p: Any, optimizer: Any) -> Any:
    counted = x.as_subclass(Counted)
    torch._dynamo.graph_break()
    return (counted.exp() + 1).as_subclass(Tensor), counted.shape[0]


def refused(x: Tensor, p: Any, optimizer: Any) -> Any:
    try:
        return x + torch.ones(2)
    except RuntimeError:
        return x - 1


PROGRAMS: list[Program] = [
    of_class, of_type, by_method, by_attribute, stepped, attribute_deleted, shape_of_counted, refused
]  # fmt: skip


def breaking(program: Program, p: Any, optimizer: Any, x: Tensor) -> Any:
    if x.sum().item() > 100:
        return x
    return program(x, p, optimizer)


COMPILED: dict[str, Callable[[Any], Any]] = {
    "broken": lambda f: tfn.compile(f, executors=["torch"]),
    "dynamo": lambda f: tfn.compile(f, executors=["torch"], frontend="dynamo"),
}


def results(program: Program, kind: Callable[[Tensor], Any], wrap: Callable[[Any], Any]) -> Any:
    p = kind(torch.ones(3))
    optimizer = torch.optim.SGD([p], 0.1, momentum=0.9)
    f = wrap(lambda x: breaking(program, p, optimizer, x))
    return [f(X * k) for k in range(1, 4)], p.detach().clone()


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", (OwnParameter, ScaledParameter))
@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_parts_do_what_eager_code_does(program: Program, compiled: str, kind: Any) -> None:
    torch.compiler.reset()
    wanted = results(program, kind, lambda f: f)
    torch.testing.assert_close(results(program, kind, COMPILED[compiled]), wanted)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "ordered": lambda: OrderedDict(a=1, b=2, c=3),
    "bounded": lambda: deque([1, 2, 3], maxlen=4),
    "set": lambda: {1, 2, 3},
}
STATEMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "the first of a copy": ("ordered", lambda d: (c := d.copy(), c.popitem(last=False), list(c))),
    "the first": ("ordered", lambda d: (d.popitem(last=False), list(d))),
    "to the end": ("ordered", lambda d: (d.move_to_end("a"), list(d))),
    "to the front": ("ordered", lambda d: (d.move_to_end("c", last=False), list(d))),
    "appended": ("bounded", lambda d: (d.append(4), d.append(5), list(d))),
    "extended": ("bounded", lambda d: (d.extendleft([7, 8]), list(d))),
    "appended to a copy": ("bounded", lambda d: (c := d.copy(), c.append(4), c.append(5), list(c), c.maxlen)),
    "bound": ("bounded", lambda d: d.maxlen),
    "repeated": ("bounded", lambda d: list(d * 2)),
    "subtracted": ("set", lambda d: (operator.isub(d, {1}), sorted(d))),
}


@pytest.mark.parametrize("is_outside", (True, False))
@pytest.mark.parametrize("name", STATEMENTS)
def test_containers_do_what_they_do_in_python(name: str, is_outside: bool) -> None:
    kind, change = STATEMENTS[name]
    make = CONTAINERS[kind]

    def f(x: Tensor, given: Any) -> Any:
        made = given if is_outside else make()
        return x * 2, change(made)

    compiled, given, wanted = COMPILED["dynamo"](f), make(), make()
    for k in (1, 2):
        assert repr(compiled(X * k, given)[1]) == repr(f(X * k, wanted)[1])
        assert given == wanted and list(given) == list(wanted)
