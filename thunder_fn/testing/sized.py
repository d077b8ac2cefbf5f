"""Programs whose sizes and numbers are variables: a transform must not take one for a constant.

A call of an op, or of one on the result of another, becomes a symbolic trace. Each size above 1 of
an input, and each number among the arguments, is a symbol. It is run on inputs of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from thunder_fn.capture import capture
from thunder_fn.capture.numbers.arguments import symbolic_leaves
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Literal, TensorType, Trace, Var
from thunder_fn.testing.drawn_programs import Program, build, example_inputs, source_of
from thunder_fn.testing.growing import calls_of, pairs_of
from thunder_fn.testing.laws.symbolic import arguments, program, symbolic

MOST, MOST_PAIRS = 12, 8
"""The number of calls, and of calls on results of calls, that are made symbolic at most."""

LARGER = {2: 4, 3: 5}
"""The sizes on which a program is run that was traced for others."""

OFTEN_WRONG: tuple[str, ...] = (
    *("number", "alpha", "scale", "cond", "scan", "while", "mask", "dim", "checkpoint", "blocks"),
)
"""The steps that are tried: numbers as arguments, sizes in bodies, sizes that depend on data."""

OWN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "two masks": lambda x, y, n: (
        x[x[:, 0] > 0].sum(0) * n + x[x[:, 0] > 0].cos().sum(0) - y[y[:, 0] < 9].sum(0)
    ),
    "a part of what a mask finds": lambda x, y, n: (
        (x[x[:, 0] > 0] * 2).sum(0) + x.nonzero().shape[0]
    ),
    "sizes among arguments": lambda x, y, n: (
        x.new_full(x.shape, 0.5).view(x.shape[0], 1, x.shape[1]).cos().sum((0, 1))
        + x[:1].expand(y.shape).sum(0)
    ),
}
"""Further steps: equal equations that find a size each, sizes used without values or in lists."""

FIRST, SECOND = (4, 3, 3), (6, 5, 3)
"""Rows of x, rows of y and columns of both: of the trace, and of the run."""


@dataclass(frozen=True)
class Sized:
    """A symbolic trace of a call, or of a step of `laws/symbolic.py`, and inputs of other sizes.

    Example:
        >>> from thunder_fn.testing import Sized
        >>> case = Sized("number")
        >>> print(case.trace)
        def f(v0, v1, v2):
            # v0: f64[s0, s1]
            # v1: f64[s2, s3]
            # v2: float zf4
            s0 = v0.shape[0]
            s1 = v0.shape[1]
            s2 = v1.shape[0]
            s3 = v1.shape[1]
            zf4 = v2
            # where zf4 > 1.0
            v3 = aten.add.Tensor(v0, zf4)  # f64[s0, s1]
            v4 = aten.pow.Tensor_Scalar(v3, 2)  # f64[s0, s1]
            v5 = aten.mean.dim(v4, (0,))  # f64[s1]
            v6 = aten.sum.default(v5)  # f64[]
            v7 = aten.select.int(v3, 0, 0)  # f64[s1]
            v8 = aten.select.int(v7, 0, 0)  # f64[]
            v9 = aten.add.Tensor(v6, v8)  # f64[]
            return (v9,)
    """

    program: Program | str
    seed: int = 0

    @cached_property
    def trace(self) -> Trace:
        """The symbolic trace."""
        if isinstance(self.program, str):
            f = OWN.get(self.program) or program((self.program,))
            return symbolic(f, arguments(FIRST, 2.0))
        return _symbolic_call(self.program)

    @cached_property
    def inputs(self) -> tuple[Any, ...]:
        """Values of other sizes, or of the same ones where the program takes no others."""
        if isinstance(self.program, str):
            return arguments(SECOND, 3.0)
        call = build(self.program)
        larger = tuple(map(_larger, self.program.inputs))
        numbers = tuple(_numbers(call))
        found = (*example_inputs(build(Program(larger)), self.seed), *numbers)
        try:
            evaluate(self.trace, found)
        except Exception:  # noqa: BLE001 - the sizes of other arguments may be numbers
            return (*example_inputs(call, self.seed), *numbers)
        return found

    def source(self) -> str:
        """The Python that makes it."""
        name = self.program
        return f"Sized({repr(name) if isinstance(name, str) else source_of(name)})"


def sized_cases(names: Sequence[str]) -> Iterator[Sized]:
    """The calls of some ops, the plain ones of all first, and the steps of `laws/symbolic.py`."""
    calls = [(place, call) for name in names for place, call in enumerate(calls_of(name))]
    calls.sort(key=lambda item: item[0])
    yield from (Sized(call) for _, call in calls[:MOST])
    yield from map(Sized, pairs_of(names)[:MOST_PAIRS])
    yield from of_steps()


@cache
def of_steps() -> tuple[Sized, ...]:
    """The steps of `laws/symbolic.py`, which are captured once."""
    found = tuple(map(Sized, (*OFTEN_WRONG, *OWN)))
    for one in found:
        one.trace.renamed("program")
    return found


def _larger(type: TensorType) -> TensorType:
    sizes = (size for size in type.shape if isinstance(size, int))
    return TensorType(type.dtype, tuple(LARGER.get(size, size) for size in sizes))


def _symbolic_call(call: Program) -> Trace:
    trace = build(call)
    tensors, numbers = example_inputs(trace), tuple(_numbers(trace))
    given = (*tensors, *numbers)
    places = [(i, dim) for i, x in enumerate(tensors) for dim in range(x.dim())]
    places += [(len(tensors) + i, None) for i in range(len(numbers))]
    return capture(_called(trace), given, symbolic=symbolic_leaves(given, places)).trace


def _numbers(trace: Trace) -> Iterator[int | float]:
    """The numbers among the arguments of the calls of a program."""
    for equation in trace.equations:
        for arg in (*equation.args, *(value for _, value in equation.kwargs)):
            if isinstance(arg, Literal) and type(arg.value) in (int, float):
                yield arg.value


def _called(trace: Trace) -> Callable[..., Any]:
    """The function of the inputs of a flat program and then of its numbers that does its calls."""

    def f(*values: Any) -> Any:
        numbers = iter(values[len(values) - len(list(_numbers(trace))) :])
        env = {var.index: value for var, value in zip(trace.inputs, values, strict=False)}

        def read(arg: Any) -> Any:
            if isinstance(arg, Var):
                return env[arg.index]
            if isinstance(arg, Literal):
                is_number = type(arg.value) in (int, float)
                return next(numbers) if is_number else arg.value
            return [item.value if isinstance(item, Literal) else read(item) for item in arg]

        for equation in trace.equations:
            args = [read(arg) for arg in equation.args]
            options = {key: read(value) for key, value in equation.kwargs}
            result = ops.overload(equation.op)(*args, **options)
            results = result if isinstance(result, (tuple, list)) else [result]
            env |= {var.index: x for var, x in zip(equation.outputs, results, strict=True)}
        return [env[atom.index] for atom in trace.outputs if isinstance(atom, Var)]

    return f
