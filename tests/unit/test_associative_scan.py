"""associative_scan and map: sizes, dims, direction, pytrees, error texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.errors import TraceTypeError

Tensor = torch.Tensor


def traced(f: Any, *args: Any) -> Any:
    tfn.check(tfn.trace(f, *args))
    return tfn.jvp(f, args, args)[0]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefixes_of_any_size(size: int, reverse: bool) -> None:
    xs = torch.linspace(0.5, 1.5, 2 * size, dtype=torch.float64).reshape(2, size)

    def f(xs: Tensor) -> Tensor:
        return tfn.associative_scan(torch.mul, xs, 1, reverse)

    want = xs.flip(1).cumprod(1).flip(1) if reverse else xs.cumprod(1)
    torch.testing.assert_close(f(xs), want)
    torch.testing.assert_close(traced(f, xs), want)


@pytest.mark.parametrize("mode", ["generic", "pointwise"])
def test_a_function_that_is_not_elementwise(mode: str) -> None:
    xs = torch.eye(3, dtype=torch.float64) * 0.5 + torch.linspace(0, 1, 63, dtype=torch.float64).reshape(7, 3, 3)
    want = [xs[0]]
    for x in xs[1:]:
        want.append(x @ want[-1])

    def f(xs: Tensor) -> Tensor:
        return tfn.associative_scan(lambda a, b: {"m": b["m"] @ a["m"]}, {"m": xs}, combine_mode=mode)["m"]

    torch.testing.assert_close(f(xs), torch.stack(want))
    torch.testing.assert_close(traced(f, xs), torch.stack(want))


def test_few_calls() -> None:
    xs = torch.ones(64)
    calls = []

    def combine(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a.shape)
        return a + b

    tfn.associative_scan(combine, xs, combine_mode="pointwise")
    assert len(calls) == 11, "two for each halving, one for the last pair"


def test_errors() -> None:
    xs = torch.ones(3, 2)
    for text, call in {
        "'pointwise' or 'generic', given 'fast'": lambda: tfn.associative_scan(torch.mul, xs, combine_mode="fast"),
        "xs[0]: 3\n  xs[1]: 2": lambda: tfn.associative_scan(torch.mul, (xs, xs[:2])),
        "xs is f32[3, 2] and has no dim 2": lambda: tfn.associative_scan(torch.mul, xs, 2),
        "xs[1] is of type int": lambda: tfn.associative_scan(torch.mul, (xs, 1)),
        "the value must keep its structure": lambda: tfn.associative_scan(lambda a, b: (a, b), xs),
    }.items():
        with pytest.raises(TraceTypeError) as raised:
            call()
        assert text in message_of(raised.value)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 9])
@pytest.mark.parametrize("size", [0, 2, 5])
def test_map_some_at_a_time(size: int, batch_size: int) -> None:
    xs = {"x": torch.linspace(-1, 1, 3 * size).reshape(3, size)}

    def f(xs: Any, **options: int) -> Any:
        return tfn.map(lambda x, y: (x["x"] * y, x["x"].sum()), xs, torch.arange(3), dim=-1, **options)

    for g in (f, lambda xs, **options: traced(lambda x: f({"x": x}, **options), xs["x"])):
        torch.testing.assert_close(g(xs, batch_size=batch_size), f(xs) if size else (xs["x"], xs["x"][0]))


def test_map_some_at_a_time_asks_for_tensors() -> None:
    for f, given, text in (
        (torch.sin, 0, "a positive int, given 0"),
        (lambda x: 1.0, 2, r"^map: the result is of type float, and only tensors can be stacked"),
        (lambda x: 1.0, None, r"^map: the result is of type float, and only tensors can be stacked"),
        (lambda x: (x, {"a": "s"}), 2, r"map: the result\[1\]\['a'\] is of type str(.|\n)*Return a tensor"),
        (3, None, "map: f must be a function, not an int"),
    ):
        with pytest.raises(TraceTypeError, match=text):
            tfn.map(f, torch.ones(3), batch_size=given)
        with pytest.raises(TraceTypeError, match=text):
            tfn.trace(lambda x, f=f, given=given: tfn.map(f, x, batch_size=given), torch.ones(3))
    for given in (None, 2):
        assert tfn.map(torch.sin, [], batch_size=given) == []
        with pytest.raises(TraceTypeError, match=r"^map: xs has no tensor"):
            tfn.map(torch.sin, None, batch_size=given)
        with pytest.raises(TraceTypeError, match=r"^map: xs is f32\[3\] and has no dim 1"):
            tfn.map(torch.sin, torch.ones(3), dim=1, batch_size=given)
    with pytest.raises(TraceTypeError, match=r"xs\[1\]: 2"):
        tfn.map(lambda x: x[0], (torch.ones(3), torch.ones(2)), batch_size=2)


def test_map_along_a_dim_with_further_arguments() -> None:
    xs = torch.arange(6.0).reshape(2, 3)

    def f(xs: Tensor, y: Tensor) -> Any:
        return tfn.map(lambda x, y: {"a": x * y, "b": x.sum()}, xs, y, dim=1)

    want = {"a": xs * 2, "b": xs.sum(0)}
    torch.testing.assert_close(f(xs, torch.tensor(2.0)), want)
    torch.testing.assert_close(traced(f, xs, torch.tensor(2.0)), want)


def gated(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def test_a_trace_captures_the_function_once_and_equal_calls_share_a_body() -> None:
    calls: list[Any] = []

    def combine(left: Any, right: Any) -> Any:
        calls.append(left[0].shape)
        return gated(left, right)

    def f(a: Tensor, b: Tensor) -> Any:
        a, b = tfn.associative_scan(combine, (a, b), 1)
        return tfn.associative_scan(combine, (b, a), 1)

    trace = tfn.trace(f, torch.rand(2, 9), torch.rand(2, 9))
    assert calls == [(2,), (2,)], "once for each call"
    scans = [equation for equation in trace.equations if equation.op.name == "associative_scan"]
    assert len(scans) == 2 and scans[0].body is scans[1].body


def test_inside_a_trace_autograd_and_torch_func_go_through_it() -> None:
    a, b = torch.rand(3, 7, dtype=torch.float64), torch.rand(3, 7, dtype=torch.float64)
    weight = torch.rand(3, dtype=torch.float64, requires_grad=True)

    def closing(a: Tensor, b: Tensor) -> Tensor:
        scale = lambda x, y: (x[0] * y[0] * weight, gated(x, y)[1])
        return tfn.associative_scan(scale, (a, b), 1)[1].pow(2).sum()

    def twice(a: Tensor, b: Tensor) -> Any:
        a = a.detach().requires_grad_()
        (first,) = torch.autograd.grad(closing(a, b), a, create_graph=True)
        return first, torch.autograd.grad(first.pow(2).sum(), (a, weight))

    torch.testing.assert_close(tfn.jit(twice)(a, b), twice(a, b))
    expected = torch.autograd.grad(closing(a, b), weight)
    torch.testing.assert_close(torch.autograd.grad(tfn.jit(closing)(a, b), weight), expected)

    def inside(a: Tensor, b: Tensor) -> Any:
        scan = lambda a, b: tfn.associative_scan(gated, (a, b), 0)[1]
        return torch.func.vmap(scan)(a, b), torch.func.vmap(torch.func.grad(lambda a, b: scan(a, b).sum()))(a, b)

    torch.testing.assert_close(tfn.jit(inside)(a, b), inside(a, b))


def test_a_function_that_writes_is_called_for_each_size() -> None:
    count = torch.zeros(())

    def combine(left: Tensor, right: Tensor) -> Tensor:
        count.add_(1)
        return left + right

    xs = torch.arange(6.0)
    assert tfn.jit(lambda xs: tfn.associative_scan(combine, xs))(xs).equal(xs.cumsum(0))
    assert count == 4, "for 3, 1, 1 and 2 pairs"
