"""Running traces and comparing what comes out."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch

from thunder_fn.derived.leaf_vjp import is_differentiable
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.trace import TensorType, Trace, Var, every_equation, subtraces, type_of
from thunder_fn.testing.drawn_programs import random_tensor

Inputs: TypeAlias = tuple[torch.Tensor, ...]
Values: TypeAlias = tuple[Any, ...]
Law: TypeAlias = Callable[[Trace, Inputs], bool | None]
"""A law raises `LawBroken`. It returns False if it says nothing about a trace."""
Transform: TypeAlias = Callable[[Trace], Trace]

S = TypeVar("S")
P = ParamSpec("P")
TOO_LARGE = 1e4


class LawBroken(AssertionError):
    """A law does not hold: the law, and the traces that show it.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.testing import LawBroken
        >>> print(LawBroken("sin is not cos", made=tfn.trace(torch.sin, torch.ones(2))))
        sin is not cos
        <BLANKLINE>
        made:
        def sin(v0):
            # v0: f32[2]
            v1 = aten.sin.default(v0)  # f32[2]
            return (v1,)
    """

    def __init__(self, what: str, **traces: Trace) -> None:
        super().__init__(
            "\n\n".join([what, *(f"{name}:\n{trace}" for name, trace in traces.items())])
        )
        self.what = what
        self.traces = traces
        self.inputs: Sequence[Any] | None = None

    def on(self, inputs: Sequence[Any]) -> LawBroken:
        """Note the inputs that show it, if they are not those that the law was given."""
        self.inputs = inputs
        return self


def holds(condition: bool, what: str, **traces: Trace) -> None:
    """Raise `LawBroken` with the traces printed unless the condition holds."""
    if not condition:
        raise LawBroken(what, **traces)


def law_of(
    law: Callable[Concatenate[S, Trace, Inputs, P], bool | None],
) -> Callable[Concatenate[S, P], Law]:
    """A decorator: a function of a subject, a trace and its inputs makes the law of a subject.

    Further arguments of the function are given with the subject.
    """

    @functools.wraps(law)
    def of(subject: S, *args: P.args, **options: P.kwargs) -> Law:
        return lambda trace, inputs: law(subject, trace, inputs, *args, **options)

    return of


# ---- running and comparing ----


def run(trace: Trace, inputs: Sequence[Any]) -> Values:
    """Evaluate, the random numbers always the same."""
    return seeded(lambda: evaluate(trace, inputs))


def state_after(trace: Trace, inputs: Sequence[Any]) -> torch.Tensor:
    """The state of the generator of random numbers after evaluating: it shows how many were
    drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a stack for CUDA, 2 ms
        evaluate(trace, inputs)
        return torch.get_rng_state()


def seeded(f: Callable[[], Values]) -> Values:
    """Run with the random numbers always the same; results are detached."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats a stack for CUDA, 2 ms
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in f())


def same_bits(a: Any, b: Any) -> bool:
    """Compare values: tensors bit for bit, except that every NaN equals every other."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (a, b)]
    missing = [part.isnan() for part in parts]
    bits = [
        part.masked_fill(gone, 0).contiguous().reshape(-1).view(torch.uint8)
        for part, gone in zip(parts, missing, strict=True)
    ]
    return torch.equal(missing[0], missing[1]) and torch.equal(bits[0], bits[1])


def agree(have: Values, want: Values, what: str, **traces: Trace) -> None:
    """Check that two runs gave the same, bitwise."""
    holds(
        len(have) == len(want), f"{what}: {len(have)} values, but {len(want)} are wanted", **traces
    )
    for position, (a, b) in enumerate(zip(have, want, strict=True)):
        if not same_bits(a, b):
            raise _differs(what, position, a, b, **traces)


def is_tame(values: Sequence[Any]) -> bool:
    """Test that all values are finite and of moderate size, as a comparison with a tolerance
    needs.
    """
    floats = [x for x in values if isinstance(x, torch.Tensor) and is_inexact(x)]
    return all(bool(x.isfinite().all()) and largest(x) < TOO_LARGE for x in floats)


def largest(value: torch.Tensor) -> float:
    """The largest magnitude in a tensor, 0 if it is empty."""
    return float(value.detach().abs().amax()) if value.numel() else 0.0


def is_inexact(value: torch.Tensor) -> bool:
    """Test for a floating or complex tensor."""
    return value.is_floating_point() or value.is_complex()


def tolerance(trace: Trace, *, computed: bool = False) -> float:
    """Relative tolerance: that of the least precise floating dtype in the trace; of what it
    computes alone, where inputs are exact.
    """
    given = set(trace.inputs) if computed else set[Var]()
    dtypes = {
        var.type.dtype
        for inner in subtraces(trace)
        for var in variables(inner)
        if isinstance(var.type, TensorType) and not (inner is trace and var in given)
    }
    precise = {torch.float64, torch.complex128}
    return (
        1e-9
        if all(
            dtype in precise or not (dtype.is_floating_point or dtype.is_complex)
            for dtype in dtypes
        )
        else 2e-3
    )


def variables(trace: Trace) -> Iterator[Var]:
    """Return the variables that a trace binds, without those of its bodies."""
    yield from trace.inputs
    yield from (constant.var for constant in trace.constants)
    yield from (var for equation in trace.equations for var in equation.outputs)


def close(
    have: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    rtol: float,
    what: str,
    shown: tuple[Values, Values] | None = None,
    **traces: Trace,
) -> None:
    """Check that two lists of tensors agree to a tolerance, relative to the largest number among
    them; types are equal. An error shows the values, or those that they stand for.
    """
    if not is_tame(want):
        return
    scale = max([1.0, *map(largest, want)])
    holds(
        len(have) == len(want), f"{what}: {len(have)} values, but {len(want)} are wanted", **traces
    )
    for position, (a, b) in enumerate(zip(have, want, strict=True)):
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.allclose(a, b, rtol=rtol, atol=rtol * scale)
        )
        if not same:
            a, b = (values[position] for values in shown or (have, want))
            raise _differs(what, position, a, b, **traces)


def _differs(what: str, position: int, have: Any, want: Any, **traces: Trace) -> LawBroken:
    """Describe a difference, only where a law does not hold: to print tensors takes longer than
    to compare them.
    """
    seen, wanted = told_apart(have, want)
    return LawBroken(f"{what}: value {position} is\n{seen}\nbut should be\n{wanted}", **traces)


def told_apart(a: Any, b: Any) -> tuple[str, str]:
    """The texts of two values: with all digits, and their dtypes, if they look alike otherwise."""
    if str(a) != str(b) or not all(isinstance(x, torch.Tensor) for x in (a, b)):
        return str(a), str(b)
    return f"{a.tolist()}, {a.dtype}", f"{b.tolist()}, {b.dtype}"


def draws(trace: Trace) -> list[str]:
    """The random ops of a trace in the order in which they draw, composites unfolded."""
    found: list[str] = []
    for equation in trace.equations:
        if ops.draws(equation):
            found.append(equation.op.name)
        found += itertools.chain.from_iterable(draws(body) for body in equation.bodies)
    return found


def num_equations(trace: Trace) -> int:
    """The number of equations, composites unfolded."""
    return sum(1 + sum(map(num_equations, equation.bodies)) for equation in trace.equations)


def is_flat(trace: Trace) -> bool:
    """Test for a trace without structured ops: an FX graph of ATen calls can hold it."""
    return all(equation.op.kind != "structured" for equation in every_equation(trace))


def leaf_counts(trace: Trace) -> Counter[str]:
    """Count how often each leaf op stands in a trace, composites unfolded."""
    found: Counter[str] = Counter()
    for equation in trace.equations:
        if equation.op.kind == "leaf":
            found[equation.op.name] += 1
        for body in equation.bodies:
            found += leaf_counts(body)
    return found


def wanted_inputs(trace: Trace) -> tuple[bool, ...]:
    """Tell which inputs have gradients: the floating and complex ones."""
    return tuple(is_differentiable(type) for type in trace.input_types)


def wanted_outputs(trace: Trace) -> tuple[bool, ...]:
    """Tell which outputs take cotangents: the floating and complex ones."""
    return tuple(isinstance(atom, Var) and is_differentiable(atom.type) for atom in trace.outputs)


def random_like(trace: Trace, seed: int = 1) -> Inputs:
    """A cotangent for each differentiable output of a trace."""
    generator = torch.Generator().manual_seed(seed)
    types = [
        type_of(atom)
        for atom, wanted in zip(trace.outputs, wanted_outputs(trace), strict=True)
        if wanted
    ]
    return tuple(random_tensor(type, generator) for type in types if isinstance(type, TensorType))


def chosen(values: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    """The values where the mask is true."""
    return tuple(value for value, wanted in zip(values, mask, strict=True) if wanted)
