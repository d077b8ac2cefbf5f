"""Laws of symbolic traces, and of jitted functions that have them.

At sizes that satisfy its constraints a symbolic trace is the static trace of these sizes, whatever
transforms are applied to both. Other sizes are refused. A jitted function gives what the function
gives, in whatever order sizes come.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal as Choice

import torch
import torch.utils.checkpoint

from thunder_fn.api.checkpoint import checkpoint
from thunder_fn.capture import capture, composite
from thunder_fn.capture.numbers.arguments import symbolic_leaves
from thunder_fn.errors import TraceTypeError
from thunder_fn.executors import lower
from thunder_fn.interpreters.autocast import autocast
from thunder_fn.interpreters.checkpoint.policies import check_policy
from thunder_fn.interpreters.clean import simplify
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import grad_and_value, vjp
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.partial_eval import partial_eval
from thunder_fn.interpreters.simplify import inline
from thunder_fn.interpreters.vmap import vmap
from thunder_fn.ir.check import check
from thunder_fn.ir.constraints import constraints_of
from thunder_fn.ir.rules import Mask
from thunder_fn.ir.symbols import Symbol, specialize, symbols_in
from thunder_fn.ir.trace import TensorType, Trace, TraceBuilder, Type
from thunder_fn.ir.walking import inline_into
from thunder_fn.jitted import jit
from thunder_fn.portable import load, save
from thunder_fn.structured.checkpoint import alone
from thunder_fn.structured.cond import cond, switch
from thunder_fn.structured.custom_jvp import custom_jvp
from thunder_fn.structured.custom_vjp import custom_vjp
from thunder_fn.structured.loop_functions import scan
from thunder_fn.structured.roll import roll, unroll
from thunder_fn.structured.while_loop import while_loop
from thunder_fn.testing.laws.comparing import holds
from thunder_fn.testing.laws.data import as_data

Tensor = torch.Tensor
Step = Callable[[Tensor, Tensor, float], Tensor]
Sizes = tuple[int, int, int]
"""Rows of x, rows of y, columns of both."""


@composite
def block(x: Tensor, k: int) -> Tensor:
    """A layer whose equations hold for one number."""
    return (x.sin() + 1.5) ** k


def own_backward(x: Tensor, k: int) -> Tensor:
    """A function with a backward of its own, both of which hold for one number."""
    f: Any = custom_vjp(lambda x: x.sin() ** k)
    f.defvjp(lambda x: (x.sin() ** k, x), lambda x, ct: (ct * k * x.sin() ** (k - 1) * x.cos(),))
    return f(x)


def own_tangent(x: Tensor, k: int) -> Tensor:
    """A function with a tangent of its own, both of which hold for one number."""
    f: Any = custom_jvp(lambda x: x.sin() ** k)
    f.defjvp(lambda xs, ts: (xs[0].sin() ** k, ts[0] * k * xs[0].sin() ** (k - 1) * xs[0].cos()))
    return f(x)


STEPS: dict[str, Step] = {
    "sin": lambda x, y, n: x.sin(),
    "matmul": lambda x, y, n: (x @ y.t()) @ y / y.shape[0],
    "scale": lambda x, y, n: x * n + x.shape[0],
    "flatten": lambda x, y, n: x.reshape(-1).cumsum(0).view(x.shape),
    "transpose": lambda x, y, n: (
        (x.t() @ y).t().mean(0) + x if x.shape[0] == y.shape[0] else x - y.sum(0)
    ),
    "cat": lambda x, y, n: torch.cat([x, y.tanh()])[: x.shape[0]],
    "softmax": lambda x, y, n: x.softmax(0) - y.logsumexp(0),
    "norm": lambda x, y, n: torch.nn.functional.layer_norm(x, (x.shape[1],)),
    "halves": lambda x, y, n: (
        x.view(2, -1, x.shape[1]).sum(0).repeat(2, 1) if x.shape[0] % 2 == 0 else x.flip(0)
    ),
    "branch": lambda x, y, n: x * 2 if x.shape[0] > y.shape[0] else x + y.mean(0),
    "number": lambda x, y, n: x + n if n > 1 else x * n,
    "pad": lambda x, y, n: torch.nn.functional.pad(x, (1, 2))[:, 1:-2],
    "cond": lambda x, y, n: cond(
        x.sum() > 0, lambda x: x * x.shape[0], lambda x: x.cos() * n, (x,)
    ),
    "scan": lambda x, y, n: scan(lambda c, row: ((c + row).tanh(), c * n), y.sum(0), x)[1],
    "mask": lambda x, y, n: x + x[x[:, 0] > 0].sum(0) * n,
    "checkpoint": lambda x, y, n: torch.utils.checkpoint.checkpoint(
        lambda x: (x @ y.t()).tanh() @ y, x, use_reentrant=False
    ),
    "diagonal": (
        lambda x, y, n: x + torch.arange(x.shape[1]) / x.numel() + torch.eye(x.shape[0])[0, 0]
    ),
    "strides": lambda x, y, n: x * x.stride(0) + (n if x.is_contiguous() else -n),
    "choice of masks": lambda x, y, n: (
        x
        + cond(x.sum() > 0, lambda x: x[x[:, 0] > 0] * n, lambda x: x[x[:, 0] < 0].exp(), (x,)).sum(
            0
        )
    ),
    "power": lambda x, y, n: (x.tanh() + 2) ** n,
    "whole power": lambda x, y, n: (x / 4) ** y.shape[0],
    "alpha": lambda x, y, n: torch.sub(
        torch.add(x, y.mean(0), alpha=n), y.sum(0), alpha=y.shape[0]
    ),
    "dim": lambda x, y, n: x + x.cumsum(y.shape[0] % 2),
    "order": lambda x, y, n: x + torch.linalg.vector_norm(x, ord=y.shape[0], dim=1, keepdim=True),
    "wide pad": lambda x, y, n: torch.nn.functional.pad(x, (0, 0, y.shape[0], 1))[y.shape[0] : -1],
    "every other": lambda x, y, n: x + x[:: y.shape[0]].sum(0),
    "while": lambda x, y, n: while_loop(
        lambda c, k: k < 3, lambda c, k: (c.cos() ** y.shape[0], k + 1), (x, 0)
    )[0],
    "switch": lambda x, y, n: switch(
        (x.sum() > 0).long(), [lambda x: x.sin() ** y.shape[0], lambda x: x * x.shape[0]], (x,)
    ),
    "remembered": lambda x, y, n: checkpoint(lambda x: (x.sin() * n) ** y.shape[0])(x),
    "own backward": lambda x, y, n: own_backward(x, y.shape[0]),
    "own tangent": lambda x, y, n: own_tangent(x, y.shape[0]),
    "scan of powers": lambda x, y, n: scan(
        lambda c, row: ((c * row.cos()) ** y.shape[0], c * n), y.sum(0), x
    )[1],
    "blocks": lambda x, y, n: block(block(block(x, y.shape[0]), y.shape[0]), y.shape[0]),
}
"""Steps of a program on x, given a second tensor and a number."""

OF_DATA = ("mask", "choice of masks")
"""Steps with sizes that depend on data, which differ between the examples of a batch."""


def program(names: Sequence[str]) -> Callable[[Tensor, Tensor, float], Tensor]:
    """The function that does these steps, and gives a scalar."""

    def f(x: Tensor, y: Tensor, n: float) -> Tensor:
        for name in names:
            x = STEPS[name](x, y, n)
        return x.pow(2).mean(0).sum() + x[0, 0]

    return f


def arguments(sizes: Sizes, n: float, *, is_transposed: bool = False) -> tuple[Any, ...]:
    """Values of a program's arguments."""
    generator = torch.Generator().manual_seed(sum(sizes))
    rows, others, columns = sizes
    make: Callable[..., Tensor] = lambda *shape: torch.randn(
        shape, dtype=torch.float64, generator=generator
    )
    x = make(columns, rows).t() if is_transposed else make(rows, columns)
    return x, make(others, columns), n


def symbolic(f: Callable[..., Any], args: tuple[Any, ...]) -> Trace:
    """The trace of f with a symbol for every size and the number."""
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, None)]
    return capture(f, args, symbolic=symbolic_leaves(args, places)).trace


def static(f: Callable[..., Any], args: tuple[Any, ...]) -> Trace:
    """The fresh trace of these sizes, with the number as an input that it does not read."""
    return capture(f, args, symbolic=symbolic_leaves(args, [(2, None)])).trace


# ---- transforms ----


def _grad(trace: Trace) -> Trace:
    return grad_and_value(trace, (True, True, False))


def _jvp(trace: Trace) -> Trace:
    return jvp(trace, (True, True, False, *(False for _ in trace.inputs[3:])))


def _vmap(trace: Trace) -> Trace:
    return vmap(trace, (0, *(None for _ in trace.inputs[1:])), 2)[0]


def _floats(types: Sequence[Type]) -> Mask:
    return tuple(isinstance(type, TensorType) and type.dtype.is_floating_point for type in types)


def _vjp(trace: Trace) -> Trace:
    return vjp(trace, _floats(trace.input_types), _floats(trace.output_types))


def _linearize(trace: Trace) -> Trace:
    """The jvp as two programs, one after the other: the part that the primals decide, and the
    linear part.
    """
    active = (True, True, False, *(False for _ in trace.inputs[3:]))
    pushed, count = jvp(trace, active), len(trace.outputs)
    known = tuple(place < len(trace.inputs) for place in range(len(pushed.inputs)))
    outputs = tuple(place < count for place in range(len(pushed.outputs)))
    first, second = partial_eval(pushed, known, outputs)
    builder = TraceBuilder("linearized")
    inputs = builder.take(pushed.input_types)
    results = inline_into(builder, first, inputs[: len(trace.inputs)])
    tangents = inline_into(builder, second, (*results[count:], *inputs[len(trace.inputs) :]))
    return builder.build((*results[:count], *tangents))


def _checkpoint(trace: Trace) -> Trace:
    return alone(trace, check_policy(None))


TRANSFORMS: dict[str, Callable[[Trace], Trace]] = {
    "trace": lambda trace: trace,
    "grad": _grad,
    "jvp": _jvp,
    "vmap": _vmap,
    "vjp": _vjp,
    "linearize": _linearize,
    "checkpoint": _checkpoint,
    "simplify": simplify,
    "inline": inline,
    "roll": roll,
    "unroll": unroll,
    "autocast": lambda trace: autocast(trace, torch.float64, lambda equation: "promote"),
}
CHAINS = (
    *((name,) for name in TRANSFORMS),
    *(
        ("grad", "jvp"),
        ("grad", "vmap"),
        ("jvp", "vmap"),
        ("vmap", "jvp"),
        ("grad", "vjp"),
        ("checkpoint", "grad"),
    ),
    *(
        ("inline", "linearize"),
        ("vjp", "linearize"),
        ("roll", "grad"),
        ("linearize", "vjp"),
        ("checkpoint", "vjp", "jvp"),
    ),
    *(
        ("vjp", "vjp"),
        ("vmap", "vjp"),
        ("grad", "checkpoint", "linearize"),
        ("roll", "vmap", "vjp"),
        ("jvp", "unroll"),
    ),
)


def transformed(trace: Trace, chain: Sequence[str]) -> Trace:
    """The trace under a chain of transforms."""
    for name in chain:
        trace = TRANSFORMS[name](trace)
    return trace


# ---- the laws ----


@dataclass(frozen=True)
class Resized:
    """A program that is traced for the first sizes and number and run on the second, both
    transformed.
    """

    names: tuple[str, ...]
    first: Sizes
    second: Sizes
    numbers: tuple[float, float]
    chain: tuple[str, ...] = ("trace",)


def law_symbolic_is_static(case: Resized) -> None:
    """The symbolic trace of the first sizes at the second ones, transformed, is the static one; or
    it refuses them.

    It refuses only sizes for which the function decides otherwise.
    """
    f, args = program(case.names), arguments(case.second, case.numbers[1])
    whole, fresh = symbolic(f, arguments(case.first, case.numbers[0])), static(f, args)
    check(whole)
    mine, its = transformed(whole, case.chain), transformed(fresh, case.chain)
    check(mine)
    inputs = _inputs_for(its, args)
    try:
        found = evaluate(mine, inputs)
    except TraceTypeError:
        same = _decided(mine) == _decided(transformed(symbolic(f, args), case.chain))
        holds(not same, "sizes that decide alike are refused", symbolic=mine)
        return
    _close(found, evaluate(its, inputs))
    _close(tuple(lower(mine)(*inputs)), found)


def _inputs_for(trace: Trace, args: tuple[Any, ...]) -> list[Any]:
    """Values for the inputs of a transformed trace: the arguments, and further tensors of the
    types that it asks for.
    """
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for i, var in enumerate(trace.inputs):
        shape = getattr(var.type, "shape", None)
        if i < 3 and (shape is None or len(shape) == args[i].dim()):
            values.append(args[i])
        else:
            assert shape is not None, "only the arguments are numbers"
            values.append(
                torch.randn([int(size) for size in shape], dtype=torch.float64, generator=generator)
            )
    return values


def _decided(trace: Trace) -> set[str]:
    """The demands of a trace, of itself and in its bodies, and the types that it demands them
    of.
    """
    return {*map(str, constraints_of(trace)), *(str(var.type) for var in trace.inputs[:3])}


def _close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@dataclass(frozen=True)
class Promoted:
    """A program and arguments at which its symbolic trace is compared with the static one."""

    names: tuple[str, ...]
    sizes: Sizes
    number: float


def law_hints_change_nothing(case: Promoted) -> None:
    """A symbolic trace with the numbers that it was made for in place of its symbols is,
    bitwise, the static trace.
    """
    f, args = program(case.names), arguments(case.sizes, case.number)
    whole = symbolic(f, args)
    at_hints, its = specialize(whole, _hints(whole)), static(f, args)
    check(at_hints)
    torch.testing.assert_close(
        evaluate(at_hints, args), evaluate(its, args), rtol=0, atol=0, equal_nan=True
    )


def _hints(trace: Trace) -> dict[Any, Any]:
    return {
        symbol: symbol.hint for symbol in symbols_in(trace.inputs) if isinstance(symbol, Symbol)
    }


@dataclass(frozen=True)
class Calls:
    """A program that is jitted, and calls of it: sizes, the number, and whether x is a
    transpose.
    """

    names: tuple[str, ...]
    calls: tuple[tuple[Sizes, float, bool], ...]
    cache: Choice["constant values", "symbolic values"] = "symbolic values"


def law_jit_is_eager(case: Calls) -> None:
    """Every call of a jitted function gives what the function gives, whatever calls were before."""
    f = program(case.names)
    g = jit(f, cache=case.cache)
    for sizes, n, is_transposed in case.calls:
        args = arguments(sizes, n, is_transposed=is_transposed)
        _close(g(*args), f(*args))


def law_a_saved_function_is_the_compiled_one(case: Calls) -> None:
    """A function that was saved serves the calls that its program serves, with eager's values, and
    refuses all others.
    """
    f = program(case.names)
    first, *others = (arguments(s, n, is_transposed=flag) for s, n, flag in case.calls)
    lowered = jit(f, cache=case.cache).lower(*first)
    with tempfile.TemporaryDirectory() as folder:
        save(lowered, Path(folder) / "f")
        loaded = load(Path(folder) / "f")
    assert not isinstance(loaded, Trace), "a function was saved"
    own = lowered.portable()
    holds(
        as_data(loaded.trace) == as_data(own.trace)
        and (loaded.relations, loaded.arguments.symbols) == (own.relations, own.arguments.symbols),
        "another program, or other guards",
        symbolic=loaded.trace,
    )
    compiled = lowered.compile()
    for args in (first, *others):
        found, wanted = _outcome(loaded, args), _outcome(compiled, args)
        holds(
            (found is None) == (wanted is None),
            f"a call that the program {'refuses' if wanted is None else 'serves'}: {args}",
            symbolic=loaded.trace,
        )
        if found is not None:
            _close(found, f(*args))


def _outcome(f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The result, or None for a call that is refused."""
    try:
        return f(*args)
    except TraceTypeError:
        return None


# ---- what planted bugs are looked for in ----

_DECIDING = ("norm", "branch", "halves", "number", "whole power")
RESIZED = tuple(
    Resized((name,), (4, 3, 2), second, (2.5, 0.5))
    for name in _DECIDING
    for second in ((3, 4, 2), (5, 5, 3))
)
PROMOTED = tuple(Promoted((name,), (4, 3, 2), 2.5) for name in STEPS)
CALLS = tuple(
    Calls(
        (name,),
        tuple(
            ((rows, 3, 2), n, rows == 5)
            for rows, n in ((4, 2.5), (3, 0.5), (5, 2.5), (1, 0.5), (6, 2.5))
        ),
        cache,
    )
    for name in (*_DECIDING, "strides")
    for cache in ("symbolic values", "constant values")
)
