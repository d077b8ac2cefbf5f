"""Wrong arguments of public functions: the error names the function, the argument, and what to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import errors

X, KEY = torch.ones(3), tfn.random.key(0)
SINE = tfn.trace(torch.sin, X)
RIGHT: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "vjp": (tfn.vjp, (torch.sin, X)),
    "jvp": (tfn.jvp, (torch.sin, (X,), (X,))),
    "linearize": (tfn.linearize, (torch.sin, X)),
    "cond": (tfn.cond, (X.sum() > 0, torch.sin, torch.cos, (X,))),
    "switch": (tfn.switch, (torch.tensor(0), [torch.sin, torch.cos], (X,))),
    "scan": (tfn.scan, (lambda c, x: (c + x, c), torch.tensor(0.0), X)),
    "map": (tfn.map, (torch.sin, X)),
    "fori_loop": (tfn.fori_loop, (0, 2, lambda i, v: v, X)),
    "associative_scan": (tfn.associative_scan, (torch.add, X, 0)),
    "checkpoint": (tfn.checkpoint, (torch.sin,)),
    "saved_residuals": (tfn.saved_residuals, (torch.sin, X)),
    "trace": (tfn.trace, (torch.sin, X)),
    "simplify": (tfn.simplify, (SINE,)),
    "roll": (tfn.roll, (SINE,)),
    "unroll": (tfn.unroll, (SINE,)),
    "evaluate": (tfn.evaluate, (SINE, (X,))),
    "check": (tfn.check, (SINE,)),
    "load": (tfn.load, ("program",)),
    "export": (tfn.export, (torch.sin, (X,))),
    "explain_claims": (tfn.explain_claims, (torch.sin, X)),
    "key": (tfn.random.key, (0,)),
    "split": (tfn.random.split, (KEY, 2)),
    "fold_in": (tfn.random.fold_in, (KEY, 1)),
    "bits": (tfn.random.bits, (KEY, (3,))),
    "uniform": (tfn.random.uniform, (KEY, (3,), torch.float32, 0.0, 1.0)),
    "normal": (tfn.random.normal, (KEY, (3,), torch.float32)),
    "bernoulli": (tfn.random.bernoulli, (KEY, 0.5, (3,))),
    "randint": (tfn.random.randint, (KEY, (3,), 0, 5, torch.int64)),
    "categorical": (tfn.random.categorical, (KEY, X, -1)),
    "permutation": (tfn.random.permutation, (KEY, X, 0)),
    "debug.check": (tfn.debug.check, (X > 0, "text")),
    "chain": (tfn.inspect.chain, (torch.sin, X)),
    "TensorType": (tfn.ir.TensorType, (torch.float32, (3,), torch.device("cpu"))),
}
ANYTHING = {
    *("args", "primals", "init", "xs", "operands", "condition"),  # pytrees, and what has a truth
}

WITHOUT = {("dim", "categorical"), ("dtype", "uniform"), ("dtype", "normal"), ("shape", "bernoulli")}
"""What None may stand for."""


def wrong(value: Any) -> list[Any]:
    """Values that stand in no place where this one does."""
    others = [None, object(), {"a": 1}, [object()]]
    return [
        other for other in others if not isinstance(value, (list, tuple, dict)) or not isinstance(other, (list, dict))
    ]


CASES = [
    pytest.param(function, args, place, value, id=f"{name}-{parameter}-{type(value).__name__}")
    for name, (function, args) in RIGHT.items()
    for place, parameter in enumerate(list(inspect.signature(function).parameters)[: len(args)])
    if parameter not in ANYTHING
    for value in wrong(args[place])
    if value is not None or (parameter, name) not in WITHOUT
]


@pytest.mark.parametrize(("function", "args", "place", "value"), CASES)
def test_an_argument_of_another_type_is_an_error_of_ours(
    function: Callable[..., Any], args: tuple[Any, ...], place: int, value: Any
) -> None:
    with pytest.raises(errors.ThunderError) as info:
        function(*args[:place], value, *args[place + 1 :])
    text = message_of(info.value)
    assert function.__name__ in text or "expected a function" in text


TEXTS: dict[str, Callable[[], object]] = {
    "random.randint: expected low < high, given low=5 and high=0": lambda: tfn.random.randint(KEY, (3,), 5, 0),
    "random.randint: expected integers as low and high, given 0.5": lambda: tfn.random.randint(KEY, (3,), 0.5, 2),  # type: ignore[arg-type]
    "random.uniform: expected low < high, given low=1.0 and high=0": lambda: tfn.random.uniform(
        KEY, (3,), None, 1.0, 0
    ),
    "random.bernoulli: expected a probability from 0 to 1, given 2": lambda: tfn.random.bernoulli(KEY, 2),
    "random.uniform: dtype must be a dtype or None, given a list\nWrite `uniform(key, shape=(), dtype=None, low=0.0,": (
        lambda: tfn.random.uniform(KEY, (3,), [1])  # type: ignore[arg-type]
    ),
    "TensorType: expected a dtype, a tuple and a device, given a str, a tuple, a device": (
        lambda: tfn.ir.TensorType("float32", (3,))  # type: ignore[arg-type]
    ),
    "associative_scan: expected a function, given a Tensor\nWrite `associative_scan(combine_fn, xs)`.": (
        lambda: tfn.associative_scan(X, torch.add)  # type: ignore[arg-type]
    ),
    "load: path must be a str or a PathLike, given None\nWrite `load(path, *, classes=())`.": (
        lambda: tfn.load(None)  # type: ignore[arg-type]
    ),
    "scan: reverse must be True or False, given a Tensor": lambda: tfn.scan(torch.add, X, X, reverse=X > 0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    with pytest.raises(errors.ThunderError) as info:
        TEXTS[text]()
    assert message_of(info.value).startswith(text)


def test_errors_of_the_users_function_are_its_own() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("mine")

    with pytest.raises(AttributeError, match="mine") as info:
        tfn.checkpoint(f)(X)
    assert not isinstance(info.value, errors.TraceTypeError)
    with pytest.raises(AttributeError, match="mine") as info:
        tfn.vjp(f, X)
    assert not isinstance(info.value, errors.TraceTypeError)


def test_keywords_of_the_users_function_are_its_own() -> None:
    f = lambda x, fn: fn(x)
    assert tfn.inspect.chain(f, X, fn=torch.sin) is not None
    assert tfn.explain_claims(f, X, fn=torch.sin) is not None
