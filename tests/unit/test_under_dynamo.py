"""Our transforms and control flow inside of `torch.compile` and `make_fx`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import thunder_fn as tfn

X = torch.tensor([0.3, 1.2, -0.5])
W = torch.tensor([1.0, 2.0, 3.0])


def loss(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2.0 * x).sum()


def closing(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * W).sum()


@tfn.custom_vjp
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


tripled.defvjp(lambda x: (x * 2, ()), lambda _, g: (g * 3,))

TRANSFORMS: dict[str, Any] = {
    "grad": tfn.grad(closing),
    "grad and value inside": lambda x: tfn.grad_and_value(closing)(x * 2),
    "value and grad": tfn.value_and_grad(loss),
    "vmap of grad": lambda x: tfn.vmap(tfn.grad(loss), in_dims=1)(torch.stack([x, x * 2], 1)),
    "vjp": lambda x: tfn.vjp(loss, x)[1](torch.ones(())),
    "jacrev": tfn.jacrev(lambda x: x.sin() * x),
}
FORWARD: dict[str, Any] = {
    "jvp": lambda x: tfn.jvp(loss, (x,), (x,)),
    "linearize": lambda x: tfn.linearize(loss, x)[1](x),
    "hessian": tfn.hessian(loss),
}
FLOW: dict[str, Any] = {
    "cond": lambda x: tfn.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "scan": lambda x: tfn.scan(lambda c, y: (c + y, c * y), x.sum(), x),
    "while_loop": lambda x: tfn.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)),
    "fori_loop": lambda x: tfn.fori_loop(0, 3, lambda i, x: x * i, x),
    "scan along dim 1": lambda x: tfn.scan(lambda c, y: (c + y, c * y), x.sum() * x, torch.outer(x, x[:2]), dim=1)[1],
    "associative_scan": lambda x: tfn.associative_scan(torch.add, x, 0),
    "map": lambda x: tfn.map(torch.sin, x),
    "checkpoint": lambda x: tfn.checkpoint(torch.sin)(x),
}
BROKEN: dict[str, Any] = {
    "jit": tfn.jit(tfn.grad(closing)),
    "jitted module": tfn.jit(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())),
    "a custom rule": tfn.grad(lambda x: tripled(x).sum()),
    "scan in grad": tfn.grad(lambda x: tfn.scan(lambda c, y: (c * y, c), x.sum(), x)[0]),
    "cond in grad": tfn.grad(lambda x: tfn.cond(x.sum() > 0, loss, lambda x: x.sum(), (x,))),
    "switch": lambda x: tfn.switch(torch.tensor(1), (torch.sin, torch.cos), (x,)),
}


def check(made: Any, f: Any) -> None:
    expected = f(X)
    torch.testing.assert_close(made(X), expected)


@pytest.mark.parametrize("name", [*TRANSFORMS, *FORWARD, *FLOW])
def test_in_one_graph(name: str) -> None:
    f = (TRANSFORMS | FORWARD | FLOW)[name]
    torch._dynamo.reset()
    check(torch.compile(f, backend="eager", fullgraph=True), f)


@pytest.mark.parametrize("name", [*TRANSFORMS, *FORWARD, *FLOW, *BROKEN])
def test_with_breaks(name: str) -> None:
    f = (TRANSFORMS | FORWARD | FLOW | BROKEN)[name]
    torch._dynamo.reset()
    check(torch.compile(f, backend="eager"), f)


def test_what_pytorch_cannot_is_refused() -> None:
    for name in ("scan in grad", "cond in grad"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"inside of a transform; leave `fullgraph=True` out"):
            torch.compile(BROKEN[name], backend="eager", fullgraph=True)(X)
    with pytest.raises(Exception, match=r"traces what it calls by itself: leave `fullgraph=True` out"):
        torch.compile(BROKEN["jit"], backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", [*TRANSFORMS, *FORWARD, *FLOW, "scan in grad", "cond in grad"])
def test_make_fx(name: str, mode: Any) -> None:
    f = (TRANSFORMS | FORWARD | FLOW | BROKEN)[name]
    if mode == "symbolic" and (name in FORWARD or name in ("cond in grad", "scan in grad")):
        with pytest.raises(Exception, match=r"symbols of PyTorch's `make_fx`|functorch|nested|transform"):
            make_fx(f, tracing_mode=mode)(X)
        return
    if mode == "symbolic" and name.startswith("grad"):
        f = tfn.grad(loss)  # PyTorch makes no fake tensors of those that it closes over
    check(make_fx(f, tracing_mode=mode)(X), f)
