"""The cost of capture, transforms and lowering as programs grow: chains of equations and stacks of
layers, beside `jax.make_jaxpr`, `jax.jit` and `make_fx`.

Time and memory should be linear in both. A stack of equal layers is one body. What is made of the
trace should cost little more for more of them.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from functorch import make_fx

import thunder_fn as tfn
from thunder_fn.benchmarks.harness import OURS, Result, once, single

EQUATIONS, LAYERS = (1_000, 10_000, 100_000), (10, 100, 1_000)
PEERS_UP_TO = 10_000
WIDTH = 8
MAKE_FX, MAKE_JAXPR = "make_fx", "jax.make_jaxpr"


def run(quick: bool = False) -> Iterator[Result]:
    """Chains and stacks of growing length; with `quick`, short ones."""
    first: dict[str, float] = {}
    for count in (8, *((100, 200) if quick else EQUATIONS)):
        for what, seconds in chains(count).items():
            per = seconds[OURS] / count
            if count == 8:  # PyTorch's own machinery is warm now
                first.pop(what, None)
                continue
            growth = per / first.setdefault(what, per)
            notes = [f"{1e6 * per:.0f} us an equation, {growth:.2f} x that of the shortest chain"]
            if what == "capture":
                notes.append(f"{memory(count) / count:,.0f} bytes an equation at the peak")
            target = "linear; at most jax's"
            yield single(f"growth: {what} of {count} equations", seconds, target, tuple(notes))
    for depth in (2, 4) if quick else LAYERS:
        yield from stacks(depth)


def chain(count: int, module: Any) -> Callable[[Any, Any], Any]:
    """A function of so many pointwise ops, four kinds in turn; `module` has sin and cos."""

    def f(x: Any, y: Any) -> Any:
        for _ in range(count // 4):
            x = module.cos(module.sin(x) * y + 1.0)
        return x

    return f


def chains(count: int) -> dict[str, dict[str, float]]:
    """Seconds of capture, of the gradient's trace and of the first call of a jitted function."""
    args, f = (torch.randn(4), torch.randn(4)), chain(count, torch)
    summed = lambda x, y: f(x, y).sum()
    found = {
        "capture": {OURS: once(lambda: tfn.trace(f, *args))},
        "gradient": {OURS: once(lambda: tfn.trace(tfn.grad(summed), *args))},
        "first call": {OURS: once(lambda: tfn.jit(f)(*args))},
    }
    if count <= PEERS_UP_TO:
        found["capture"][MAKE_FX] = once(lambda: make_fx(f, tracing_mode="fake")(*args))
        _beside_jax(count, found)
    return found


def _beside_jax(count: int, found: dict[str, dict[str, float]]) -> None:
    try:
        import jax  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    args, f = (jax.numpy.ones(4), jax.numpy.ones(4)), chain(count, jax.numpy)
    summed = lambda x, y: f(x, y).sum()
    found["capture"][MAKE_JAXPR] = once(lambda: jax.make_jaxpr(f)(*args))
    found["gradient"][MAKE_JAXPR] = once(lambda: jax.make_jaxpr(jax.grad(summed))(*args))
    found["first call"]["jax.jit"] = once(lambda: jax.jit(f)(*args).block_until_ready())


def memory(count: int) -> int:
    """The most bytes that Python holds while a chain is captured."""
    args = torch.randn(4), torch.randn(4)
    tracemalloc.start()
    try:
        tfn.trace(chain(count, torch), *args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def stacks(depth: int) -> Iterator[Result]:
    """Equal layers: capture grows with them, what is made of the trace hardly."""
    layer = lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
    model = torch.nn.Sequential(*(layer() for _ in range(depth)))
    params = dict(model.named_parameters())
    x = torch.randn(2, WIDTH)
    loss = lambda params, x: torch.func.functional_call(model, params, (x,)).sum()
    seconds = {
        OURS: once(lambda: tfn.trace(tfn.grad(loss), params, x)),
        "capture": once(lambda: tfn.trace(loss, params, x)),
        "first call": once(lambda: tfn.jit(tfn.grad(loss))(params, x)),
    }
    notes = (
        f"{OURS} is the trace of the gradient",
        f"{1e6 * seconds[OURS] / depth:.0f} us a layer",
    )
    parts = ("capture", "first call")
    yield single(f"growth: gradient of {depth} layers", seconds, "linear", notes, parts)
