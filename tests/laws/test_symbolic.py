"""Laws of symbolic traces: at sizes that satisfy its constraints, a symbolic trace is the static trace of these sizes,
whatever transforms are applied to both; other sizes are refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.capture.numbers import symbolic_leaves
from thunder_fn.check import check
from thunder_fn.constraints import constraints_of
from thunder_fn.errors import TraceTypeError
from thunder_fn.executors import lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.vjp import grad_and_value
from thunder_fn.interpreters.vmap import vmap
from thunder_fn.jit import cache_info, jit
from thunder_fn.testing.mutations import Mutation, planted
from thunder_fn.trace import Trace

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
EXAMPLES = 1000 if THOROUGH else 12

Tensor = torch.Tensor
Step = Callable[[Tensor, Tensor, float], Tensor]

STEPS: dict[str, Step] = {
    "sin": lambda x, y, n: x.sin(),
    "matmul": lambda x, y, n: (x @ y.t()) @ y / y.shape[0],
    "scale": lambda x, y, n: x * n + x.shape[0],
    "flatten": lambda x, y, n: x.reshape(-1).cumsum(0).view(x.shape),
    "transpose": lambda x, y, n: (x.t() @ y).t().mean(0) + x if x.shape[0] == y.shape[0] else x - y.sum(0),
    "cat": lambda x, y, n: torch.cat([x, y.tanh()])[: x.shape[0]],
    "softmax": lambda x, y, n: x.softmax(0) - y.logsumexp(0),
    "norm": lambda x, y, n: torch.nn.functional.layer_norm(x, (x.shape[1],)),
    "halves": lambda x, y, n: x.view(2, -1, x.shape[1]).sum(0).repeat(2, 1) if x.shape[0] % 2 == 0 else x.flip(0),
    "branch": lambda x, y, n: x * 2 if x.shape[0] > y.shape[0] else x + y.mean(0),
    "number": lambda x, y, n: x + n if n > 1 else x * n,
    "pad": lambda x, y, n: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    "cond": lambda x, y, n: tfn.cond(x.sum() > 0, lambda x: x * x.shape[0], lambda x: x.cos() * n, (x,)),
    "scan": lambda x, y, n: tfn.scan(lambda c, row: ((c + row).tanh(), c * n), y.sum(0), x)[1],
    "mask": lambda x, y, n: x + x[x[:, 0] > 0].sum(0) * n,
    "checkpoint": lambda x, y, n: torch.utils.checkpoint.checkpoint(
        lambda x: (x @ y.t()).tanh() @ y, x, use_reentrant=False
    ),
    "diagonal": lambda x, y, n: x + torch.arange(x.shape[1]) / x.numel() + torch.eye(x.shape[0])[0, 0],
}


def program(names: Sequence[str]) -> Callable[..., Tensor]:
    def f(x: Tensor, y: Tensor, n: float) -> Tensor:
        for name in names:
            x = STEPS[name](x, y, n)
        return x.pow(2).mean(0).sum() + x[0, 0]

    return f


Sizes = tuple[int, int, int]


def arguments(sizes: Sizes, n: float) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(sum(sizes))
    rows, others, columns = sizes
    make = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)
    return make(rows, columns), make(others, columns), n


def symbolic(f: Callable[..., Any], args: tuple[Any, ...]) -> Trace:
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, None)]
    return capture(f, args, symbolic=symbolic_leaves(args, places)).trace


def static(f: Callable[..., Any], args: tuple[Any, ...]) -> Trace:
    """The fresh trace of these sizes, with the number as an input that it does not read."""
    places = [(2, None)]
    return capture(f, args, symbolic=symbolic_leaves(args, places)).trace


def _grad(trace: Trace) -> Trace:
    return grad_and_value(trace, (True, True, False))


def _jvp(trace: Trace) -> Trace:
    return jvp(trace, (True, True, False, *(False for _ in trace.inputs[3:])))


def _vmap(trace: Trace) -> Trace:
    return vmap(trace, (0, *(None for _ in trace.inputs[1:])), 2)[0]


TRANSFORMS: dict[str, Callable[[Trace], Trace]] = {
    "trace": lambda trace: trace,
    "grad": _grad,
    "jvp": _jvp,
    "vmap": _vmap,
}
CHAINS = [
    ("trace",),
    ("grad",),
    ("jvp",),
    ("vmap",),
    ("grad", "jvp"),
    ("grad", "vmap"),
    ("jvp", "vmap"),
    ("vmap", "jvp"),
]


def transformed(trace: Trace, chain: Sequence[str]) -> Trace:
    for name in chain:
        trace = TRANSFORMS[name](trace)
    return trace


def decided(trace: Trace) -> set[str]:
    """What a trace demands, of itself and in its bodies, and the types that it demands it of."""
    return {*map(str, constraints_of(trace)), *(str(var.type) for var in trace.inputs[:3])}


def inputs_for(trace: Trace, args: tuple[Any, ...]) -> list[Any]:
    """Values for the inputs of a transformed trace: the arguments, and further tensors of the types that it asks for."""
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for i, var in enumerate(trace.inputs):
        shape = getattr(var.type, "shape", None)
        fits = i < 3 and (shape is None or len(shape) == args[i].dim())
        if fits:
            values.append(args[i])
        else:
            assert shape is not None, "only the arguments are numbers"
            values.append(torch.randn([int(size) for size in shape], dtype=torch.float64, generator=generator))
    return values


def check_law(
    names: Sequence[str], first: Sizes, second: Sizes, numbers: tuple[float, float], chain: Sequence[str]
) -> None:
    """The symbolic trace of the first sizes at the second ones, transformed, is the static one; or it refuses them."""
    f = program(names)
    whole = symbolic(f, arguments(first, numbers[0]))
    check(whole)
    args = arguments(second, numbers[1])
    fresh = static(f, args)
    mine, its = transformed(whole, chain), transformed(fresh, chain)
    check(mine)
    inputs = inputs_for(its, args)
    try:
        found = evaluate(mine, inputs)
    except TraceTypeError:
        assert decided(mine) != decided(transformed(symbolic(f, args), chain)), (
            "sizes that decide alike are not refused"
        )
        return
    torch.testing.assert_close(found, evaluate(its, inputs), rtol=1e-9, atol=1e-9, equal_nan=True)
    torch.testing.assert_close(tuple(lower(mine)(*inputs)), found, rtol=1e-9, atol=1e-9, equal_nan=True)


sizes = st.tuples(st.integers(2, 6), st.integers(2, 6), st.integers(2, 5))
numbers = st.sampled_from([0.5, 2.5, 1.0, -3.0])


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not THOROUGH, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(CHAINS),
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=2),
    *(sizes, sizes, st.tuples(numbers, numbers)),
)
def test_a_symbolic_trace_is_all_static_ones(
    chain: tuple[str, ...], names: list[str], first: Sizes, second: Sizes, given: tuple[float, float]
) -> None:
    if "vmap" in chain:  # sizes that depend on data differ between examples
        names = [name for name in names if name != "mask"] or ["sin"]
    check_law(names, first, second, given, chain)


@pytest.mark.parametrize("name", STEPS)
def test_other_sizes_miss(name: str) -> None:
    """A call whose sizes break a constraint is traced anew, and every call is right."""
    f = program([name])
    g = jit(f, cache="symbolic values")
    for rows, others, n in ((2, 5, 0.5), (5, 5, 2.5), (5, 2, 0.5), (4, 2, 2.5)):
        args = arguments((rows, others, 3), n)
        torch.testing.assert_close(g(*args), f(*args), rtol=1e-9, atol=1e-9)
    assert cache_info(g).misses <= 4


# ---- planted bugs ----

SYMBOLS, FAMILIES = "thunder_fn.symbols", "thunder_fn.jit.families"
PLANTED = (
    Mutation("constraints are not looked at", f"{SYMBOLS}:_specialize", "values) is False", "values) is None", "laws"),
    Mutation("each symbol is the first dim", f"{SYMBOLS}:bind", ".shape[dim]", ".shape[0]", "laws"),
    Mutation("values are off by one", f"{SYMBOLS}:_items", "as_dim(value))", "as_dim(value + 1))", "laws"),
    Mutation(
        "a decision is taken for its opposite",
        f"{FAMILIES}:Class.find",
        "(type(answer), answer)",
        "(bool, True)",
        "laws",
    ),
    Mutation(
        "symbols are read from each other's places",
        f"{FAMILIES}:Class.find",
        "in self.places]",
        "in self.places[::-1]]",
        "laws",
    ),
)


def run_all() -> None:
    for names in (["norm"], ["branch"], ["halves"], ["number"]):
        for second in ((3, 4, 2), (5, 5, 3)):
            check_law(names, (4, 3, 2), second, (2.5, 0.5), ("trace",))
        f = program(names)
        g = jit(f, cache="symbolic values")
        for rows, n in ((4, 2.5), (3, 0.5), (5, 2.5), (1, 0.5), (6, 2.5)):
            args = arguments((rows, 3, 2), n)
            torch.testing.assert_close(g(*args), f(*args), rtol=1e-9, atol=1e-9)


def test_nothing_is_caught_without_a_bug() -> None:
    run_all()


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.bug)
def test_planted_bugs_are_caught(bug: Mutation) -> None:
    with planted(bug), pytest.raises(Exception):  # noqa: B017 - whatever it is that the bug breaks
        run_all()
