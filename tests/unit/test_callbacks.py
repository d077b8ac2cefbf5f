"""pure_callback: Python functions whose results programs use. `debug` has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from thunder_fn.errors import MissingRule, PortableError, TraceTypeError, UnsupportedInput
from thunder_fn.ir.trace import TensorType

X = torch.linspace(0.1, 1.2, 12).reshape(3, 4)
ROW = TensorType(torch.float32, (4,))


def sine(x: Tensor) -> Tensor:
    return tfn.pure_callback(lambda x: numpy.sin(x.numpy()), x, x)


@tfn.custom_vjp
def known(x: Tensor) -> Tensor:
    return sine(x)


known.defvjp(lambda x: (known(x), x), lambda x, cotangent: (cotangent * x.cos(),))
PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "call": (sine, torch.sin),
    "twice": (lambda x: sine(sine(x)), lambda x: x.sin().sin()),
    "batch": (tfn.vmap(sine), torch.sin),
    "batch of batches": (tfn.vmap(tfn.vmap(sine, in_dims=0), in_dims=1, out_dims=1), torch.sin),
    "a batch among arguments": (
        lambda x: tfn.vmap(lambda a, b: tfn.pure_callback(lambda a, b: a + 2 * b, ROW, a, b), (None, 0))(x[0], x),
        lambda x: x[0] + 2 * x,
    ),
    "scan": (lambda xs: tfn.scan(lambda c, x: (sine(c) + x, c), xs[0], xs)[0], lambda xs: summed(xs)),
    "branch": (lambda x: tfn.cond(x.sum() > 0, sine, torch.cos, (x,)), torch.sin),
    "checkpoint": (tfn.grad(tfn.checkpoint(lambda x: known(x).sum())), torch.cos),
    "derivative": (tfn.vmap(tfn.grad(lambda x: known(x).sum())), torch.cos),
    "second derivative": (lambda x: tfn.hessian(lambda x: known(x).sum())(x[0]), lambda x: torch.diag(-x[0].sin())),
    "arguments of all kinds": (
        lambda x: tfn.pure_callback(
            lambda x, n, *, by: {"a": (x["x"] * n).sum(), "b": by}, kinds(x), {"x": x}, 3, by=2
        ),
        lambda x: {"a": (x * 3).sum(), "b": torch.tensor(2)},
    ),
}


def kinds(x: Tensor) -> dict[str, TensorType]:
    return {"a": TensorType(x.dtype, ()), "b": TensorType(torch.int64, ())}


def summed(xs: Tensor) -> Tensor:
    carry = xs[0]
    for x in xs:
        carry = carry.sin() + x
    return carry


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_function(name: str) -> None:
    f, wanted = PROGRAMS[name]
    torch.testing.assert_close(f(X), wanted(X))
    torch.testing.assert_close(tfn.jit(f)(X), wanted(X))


def test_a_program_calls_it_for_each_size() -> None:
    calls: list[int] = []
    f = tfn.jit(lambda x: tfn.pure_callback(lambda x: calls.append(len(x)) or x * 2, x, x), dynamic=True)
    for size in (3, 4, 5):
        torch.testing.assert_close(f(torch.ones(size)), torch.full((size,), 2.0))
    assert calls == [3, 4, 5] and tfn.cache_info(f).hits == 1


def test_a_result_that_nothing_needs_is_not_asked_for() -> None:
    assert not tfn.trace(lambda x: (sine(x), x)[1], X).equations


@pytest.mark.parametrize(
    "transform", [tfn.grad, tfn.jacfwd, lambda f: tfn.jit(tfn.jacrev(f))], ids=["vjp", "jvp", "jit"]
)
def test_it_has_no_derivative_of_its_own(transform: Callable[..., Any]) -> None:
    with pytest.raises(MissingRule, match="custom_jvp` around"):
        transform(lambda x: sine(x).sum())(X)
    with pytest.raises(MissingRule, match="no derivative of its own"):
        sine(X.clone().requires_grad_()).sum().backward()


def test_what_is_wrong_is_said(tmp_path: Any) -> None:
    with pytest.raises(
        TraceTypeError, match=r"the function returned \(f64\[3, 4\]\), and \(f32\[3, 4\]\) was announced"
    ):
        tfn.jit(lambda x: tfn.pure_callback(lambda x: x.double(), x, x))(X)
    with pytest.raises(UnsupportedInput, match="expected a function, given an int"):
        tfn.pure_callback(3, X)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedInput, match=r"the result has an int in it\n(.*\n)*Pass the types"):
        tfn.pure_callback(torch.sin, (3,), X)
    with pytest.raises(UnsupportedInput, match="unhashable type: 'set'"):
        tfn.pure_callback(lambda x, s: x, X, X, {1})
    with pytest.raises(PortableError, match="calls a Python function, which is not saved"):
        tfn.save(tfn.jit(sine).lower(X), tmp_path / "sine.tfn")
    with pytest.raises(ZeroDivisionError):
        tfn.jit(lambda x: tfn.pure_callback(lambda x: 1 / 0, x, x))(X)
