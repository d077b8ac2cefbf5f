"""The law of capture, to check on any function: what the trace computes is what the function does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from thunder_fn.api.calling import tensors_of, write_back
from thunder_fn.capture import Captured, capture, pytree
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Trace

Function = Callable[..., Any]


def call_captured(captured: Captured, args: Any, kwargs: Any = None) -> Any:
    """Call a captured function as its caller would: results out, mutations written back."""
    tensors = tensors_of(captured, args, kwargs or {})
    outputs = evaluate(captured.trace, tensors)
    write_back(captured, tensors, outputs)
    return captured.result(outputs)


def assert_same(a: Any, b: Any) -> None:
    """Equal structures, equal leaves; tensors bit for bit."""
    xs, a_spec = pytree.flatten(a)
    ys, b_spec = pytree.flatten(b)
    assert a_spec == b_spec
    for x, y in zip(xs, ys, strict=True):
        assert same(x, y), (x, y)


def same(x: Any, y: Any) -> bool:
    """Tensors with the same type and the same bits, equal values otherwise."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and (x is y or x == y)
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(a, b)


def agree(f: Function, *args: Any, **kwargs: Any) -> Trace:
    """Assert that f's trace does what f does: results, mutated arguments, random stream. Capture changes nothing."""
    return agree_made(lambda: (f, copy.deepcopy((args, kwargs)), ()))


def agree_made(
    make: Callable[[], tuple[Function, tuple[tuple[Any, ...], dict[str, Any]], Any]], *, is_bitwise: bool = True
) -> Trace:
    """Compare like `agree`, for functions with state: `make` gives a new `(f, (args, kwargs), state)` each time.

    Some processors round products by the alignment of memory: then the results are not compared bit for bit.
    """
    f, (args, kwargs), state = make()
    torch.manual_seed(7)
    expected = f(*args, **kwargs)
    stream = torch.get_rng_state()
    g, (new_args, new_kwargs), new_state = make()
    before = copy.deepcopy((new_args, new_kwargs, new_state))
    torch.manual_seed(7)
    unused = torch.get_rng_state()
    captured = capture(g, new_args, new_kwargs)
    assert torch.equal(torch.get_rng_state(), unused), "capture drew random numbers"
    assert_same(before, (new_args, new_kwargs, new_state))
    check(captured.trace)
    compare = assert_same if is_bitwise else torch.testing.assert_close
    compare(expected, call_captured(captured, new_args, new_kwargs))
    assert torch.equal(torch.get_rng_state(), stream), "the random stream differs from eager's"
    assert_same((args, kwargs, state), (new_args, new_kwargs, new_state))
    return captured.trace
