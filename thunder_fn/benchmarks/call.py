"""The cost of a warm call: the time that a program which does almost nothing takes above its
ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Case, Result, run_case
from thunder_fn.executors import Executor, inductor


def small(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Three cheap ops."""
    return torch.sin(a) * b + 1


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A function of many arguments."""
    return sum(tensors[1:], tensors[0])


SETTINGS = SimpleNamespace(**{f"k{i}": 1.0 + i for i in range(10)})
"""Ten values that a function reads from outside."""


def reading(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute as `small` does, with a number made of ten values from outside."""
    s = SETTINGS
    return torch.sin(a) * b + (s.k0 + s.k1 + s.k2 + s.k3 + s.k4 + s.k5 + s.k6 + s.k7 + s.k8 + s.k9)


def run(quick: bool = False) -> Iterator[Result]:
    """`sin(a) * b + 1` on 2x2 tensors, and the sum of a list of 100 tensors, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a, b = torch.randn(2, 2), torch.randn(2, 2)
        yield run_case(
            _case("call: sin(a) * b + 1, 2x2", small, (a, b), 3000, "1.3 x eager, below jax.jit"),
            quick,
        )
        name = "call: sin(a) * b + 1, 2x2, inductor executor"
        target = "0.6 x jax.jit, 0.35 x torch.compile"
        yield run_case(_case(name, small, (a, b), 3000, target, [inductor()]), quick)
        peers: dict[str, Any] = {
            name: tfn.jit(f) for name, f in ((OURS, reading), ("reads nothing", small))
        }
        calls: dict[str, Any] = {name: lambda f=f: f(a, b) for name, f in peers.items()}
        name, target = "call: ten values from outside", "1 us more than what reads nothing"
        yield run_case(Case(name, calls, calls=3000, target=target), quick)
        many = [torch.randn(2, 2) for _ in range(100)]
        yield run_case(
            _case("call: sum of a list of 100 tensors", total, (many,), 200, "1.0 x eager"), quick
        )
        yield from _layers(quick)
        yield from _not_jitted(quick)
    finally:
        torch.set_num_threads(threads)


def _layers(quick: bool) -> Iterator[Result]:
    """Jitted modules of tiny layers under autograd, forward and with the backward."""
    x, cotangent = torch.randn(4, 16), torch.ones(4, 16)
    for count, target in ((1, "1.0 x eager"), (10, "0.9 x eager")):
        layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(count)))
        module = layers if count > 1 else layers[0]
        peers = {OURS: tfn.jit(module), "eager": module}
        name = f"call: {count} Linear(16, 16), 4 rows"
        forward: dict[str, Any] = {who: partial(f, x) for who, f in peers.items()}
        yield run_case(Case(f"{name}, forward", forward, calls=1000, target=target), quick)
        both: dict[str, Any] = {
            who: lambda f=f: f(x).backward(cotangent) for who, f in peers.items()
        }
        yield run_case(Case(f"{name}, with backward", both, calls=500, target=target), quick)


def energy(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A small scalar function."""
    return torch.tanh(x @ w).pow(2).sum()


def step(lib: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss that is defined in each call."""
    return lib.grad(lambda w: energy(w, x))(w)


def _not_jitted(quick: bool) -> Iterator[Result]:
    """Transforms that are called in a Python loop."""
    w, x = torch.randn(8, 8), torch.randn(4, 8)
    calls: dict[str, Any] = {
        "grad(f)(w, x)": lambda lib: lib.grad(energy)(w, x),
        "grad of a loss of its step": lambda lib: step(lib, w, x),
        "vmap(grad(f))": lambda lib: lib.vmap(lib.grad(energy), in_dims=(None, 0))(w, x),
        "jvp(f)": lambda lib: lib.jvp(energy, (w, x), (w, x)),
        "jacrev(f)": lambda lib: lib.jacrev(energy)(w, x),
        "hessian(f)": lambda lib: lib.hessian(energy)(w, x),
    }
    for name, call in calls.items():
        peers = {OURS: partial(call, tfn), "torch.func": partial(call, torch.func)}
        target = "0.5 x torch.func"
        yield run_case(Case(f"call: {name}, not jitted", peers, calls=200, target=target), quick)


def _case(
    name: str,
    f: Any,
    args: tuple[Any, ...],
    calls: int,
    target: str,
    executors: Sequence[Executor] = (),
) -> Case:
    jitted, compiled = tfn.jit(f, executors=executors), torch.compile(f)
    peers: dict[str, Any] = {
        OURS: lambda: jitted(*args),
        "eager": lambda: f(*args),
        "torch.compile": lambda: compiled(*args),
    }
    jax_call = _jax(f, args)
    if jax_call is not None:
        peers["jax.jit"] = jax_call
    return Case(name, peers, calls=calls, target=target)


def _jax(f: Any, args: tuple[Any, ...]) -> Any:
    try:
        import jax  # pyright: ignore[reportMissingImports]
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    converted = jax.tree.map(lambda tensor: jnp.asarray(tensor.numpy()), args)
    g = jax.jit(lambda a, b: jnp.sin(a) * b + 1) if f is small else jax.jit(total)
    return lambda: g(*converted).block_until_ready()
