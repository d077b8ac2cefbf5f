"""Laws beyond equal values: promises about cost, precision and lines that a transform may make.

Each is a function of the transform, by the name under which `check_transform` takes it. Costs are
counted from the trace, never timed, so a verdict is the same on every machine.

Source: J. Harrison, Floating-point verification (FM 2005), for errors against a finer reference.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal as Choice

import torch

from thunder_fn.errors import UnknownOption
from thunder_fn.inspect.costs import FREE, cost_of, cost_of_trace
from thunder_fn.inspect.scratch import peak_of
from thunder_fn.ir.trace import (
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    every_equation,
    subtraces,
)
from thunder_fn.structured.shared.scan_parts import Loop, add_scan, stacked
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    Transform,
    agree,
    close,
    draws,
    holds,
    is_inexact,
    is_tame,
    law_of,
    run,
    tolerance,
)
from thunder_fn.testing.laws.interpreters import widened
from thunder_fn.testing.laws.pairs import once, values_of
from thunder_fn.testing.laws.schedules import keeps_schedules

Keeps = Choice["values", "nothing"]
Ensures = Callable[[Trace, Trace], bool]
"""A test of the trace before and after: whether a transform has done what it is for."""

ENSURED = "does what it is for"
"""The name of the law about `ensures`."""

LawOf = Callable[..., Law]
"""The law of a transform, and of a bound if the promise takes one."""

LENGTHS = (2, 4, 8)
"""The lengths of the loops whose costs are compared."""

# ---- cost ----


def launches_of(trace: Trace) -> int:
    """The number of kernels that a trace starts: its leaves, views left out. A loop starts those
    of its body in each known step, a choice those of the branch that has most.
    """
    return sum(map(_launches, trace.equations))


def _launches(equation: Equation) -> int:
    if not equation.bodies:
        return int(cost_of(equation) != FREE)
    found = list(map(launches_of, equation.bodies))
    if equation.op.kind == "composite":
        return found[0]
    steps = dict(equation.kwargs).get("length")
    times = steps.value if isinstance(steps, Literal) else 1
    return max(found) * (times if isinstance(times, int) else 1)


def flops_of_trace(trace: Trace) -> int:
    """The floating-point operations of a trace."""
    return cost_of_trace(trace).flops


MEASURES: Mapping[str, tuple[str, Callable[[Trace], int]]] = MappingProxyType(
    {
        "flops": ("floating-point operations", flops_of_trace),
        "memory": ("bytes at the peak", peak_of),
        "launches": ("kernels to start", launches_of),
    }
)
"""The costs that a transform may promise not to raise, each with its unit."""


def _adds_no(name: str) -> LawOf:
    unit, measure = MEASURES[name]

    @law_of
    def of(transform: Transform, trace: Trace, inputs: Inputs, times: float = 1) -> bool:
        new = once(transform, trace)
        have, want = measure(new), measure(trace)
        what = f"there are {have} {unit}, and there were {want}"
        what += f": more than {times:g} times as many" * (times != 1)
        holds(have <= times * want, what, trace=trace, made=new)
        return want > 0 or bool(trace.equations)

    return of


@law_of
def keeps_loops_linear(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Keep loops as loops: a loop of the program over n rows becomes a program whose size does not
    depend on n, and whose cost grows by the same amount with each row.
    """
    if not trace.inputs or not all(hasattr(type, "shape") for type in trace.input_types):
        return False
    made = [transform(over_rows(trace, length)) for length in LENGTHS]
    sizes = [sum(1 for _ in every_equation(new)) for new in made]
    what = f"for loops of {_and(LENGTHS)} steps there are {_and(sizes)} equations"
    holds(len(set(sizes)) == 1, what, made=made[-1])
    for unit, measure in MEASURES.values():
        costs = [measure(new) for new in made]
        grown = [(b - a) / (n - m) for a, b, m, n in _steps(costs)]
        what = f"for loops of {_and(LENGTHS)} steps there are {_and(costs)} {unit}"
        holds(grown[0] == grown[1], f"{what}, which is not linear", made=made[-1])
    return True


def _steps(costs: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    return zip(costs, costs[1:], LENGTHS, LENGTHS[1:], strict=False)


def _and(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def over_rows(trace: Trace, length: int) -> Trace:
    """The program that runs a trace on each row of inputs with `length` rows, by one scan."""
    builder = TraceBuilder(trace.name)
    rows = builder.take([stacked(type, length) for type in trace.input_types])
    return builder.build(add_scan(builder, Loop(0, 0, length), trace, ((), (), rows), None))


# ---- precision ----


@law_of
def is_as_precise(transform: Transform, trace: Trace, inputs: Inputs, ulps: float = 4) -> bool:
    """Be no farther from the result in float64 than before, up to some units in the last place of
    the dtype.
    """
    single = tolerance(trace) > 1e-6
    if not single or draws(trace) or not is_tame(values_of(trace, inputs)):
        return False
    new = once(transform, trace)
    exact = [x.double() for x in _reals(run(widened(trace), inputs))]
    before, after = (_reals(run(one, inputs)) for one in (trace, new))
    for place, (a, b, x) in enumerate(zip(after, before, exact, strict=True)):
        if not x.numel():
            continue
        unit = torch.finfo(b.dtype).eps * max(1.0, float(x.abs().amax()))
        have, want = (float((one.double() - x).abs().amax()) for one in (a, b))
        what = (
            f"value {place} is {have / unit:.1f} units in the last place from the result in"
            f" float64, and was {want / unit:.1f}"
        )
        holds(have <= want + ulps * unit, what, trace=trace, made=new)
    return bool(exact)


@law_of
def refines(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Get as precise as the numbers are: where all of them become float64, so does the result. A
    constant that is cut off for float32, or a detour through another dtype, stays as it is.
    """
    wide = widened(trace)
    if tolerance(trace) < 1e-6 or not _is_wide(wide) or draws(trace):
        return False
    want = [x.double() for x in _reals(run(wide, inputs))]
    if not is_tame(want) or not is_tame(values_of(trace, inputs)):
        return False
    new = once(transform, trace)
    have = [x.double() for x in _reals(run(widened(new), inputs))]
    close(have, want, WIDE, "the transformed trace in float64", trace=trace, made=new)
    return bool(want)


WIDE = 1e-9
"""The relative error of a result in float64."""


def _is_wide(trace: Trace) -> bool:
    """Test that no equation makes floats that are less precise than float64."""
    made = (var.type for e in every_equation(trace) for var in e.outputs)
    dtypes = {type.dtype for type in made if isinstance(type, TensorType)}
    return all(torch.finfo(d).eps < WIDE for d in dtypes if d.is_floating_point or d.is_complex)


def _reals(values: Sequence[Any]) -> list[torch.Tensor]:
    found = [x for x in values if isinstance(x, torch.Tensor) and is_inexact(x)]
    return [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in found]


@law_of
def keeps_bits(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Keep every bit of every value."""
    new = once(transform, trace)
    have, want = run(new, inputs), values_of(trace, inputs)
    agree(have, want, "the transformed trace", trace=trace, made=new)
    return bool(want)


# ---- lines, processes ----


@law_of
def keeps_lines(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Give every equation the user's line that it comes from, and none of another program."""
    from thunder_fn.testing.laws.interpreters import marked

    given, _ = marked(trace)
    known = {e.source for e in every_equation(given)}
    new = transform(given)
    for equation in every_equation(new):
        what = f"{equation.op} has no line of the trace: pass `source=equation.source`"
        holds(equation.source in known, what, trace=given, made=new)
    return bool(trace.equations)


MANY = 3
"""The number of different ops without a line that no rewrite of one op explains."""


@law_of
def has_lines(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """Keep some line of the user's code if the trace stays as it is."""
    from thunder_fn.testing.laws.interpreters import marked

    given, _ = marked(trace)
    new = transform(given)
    what = "the trace is as it was, without its lines: make the new one with `rewritten`, `put`"
    for inner in subtraces(new) if new == given else ():
        lost = {equation.op for equation in inner.equations if equation.source is None}
        has_some = any(equation.source is not None for equation in inner.equations)
        holds(has_some or len(lost) < MANY, what, trace=given, made=new)
    return new == given and len(list(every_equation(new))) >= MANY


_IN_A_PROCESS = """
import sys, importlib
from thunder_fn.testing.laws.promises import text_of
print(text_of(getattr(importlib.import_module(sys.argv[1]), sys.argv[2])))
"""


def is_the_same_everywhere(transform: Transform) -> Law:
    """Make the same trace in every process: ranks that make different ones wait for each other
    for ever. Two processes with other hashes of strings are asked once.
    """
    known: list[bool] = []

    def law(trace: Trace, inputs: Inputs) -> bool:
        name, module = getattr(transform, "__qualname__", ""), transform.__module__
        if not name.isidentifier() or module == "__main__" or not inspect.getmodule(transform):
            return False
        if not known:
            found = {_in_a_process(module, name, seed) for seed in ("1", "2")}
            known.append(len(found) == 1)
        holds(known[0], "two processes made different traces of the same programs", trace=trace)
        return True

    return law


def _in_a_process(module: str, name: str, seed: str) -> str:
    folders = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS, module, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise LawBroken(f"a process of its own fails: {done.stderr[-500:]}")
    return done.stdout


def text_of(transform: Transform) -> str:
    """A hash of the traces that a transform makes of programs made on purpose."""
    from thunder_fn.testing.drawn_programs import build
    from thunder_fn.testing.growing import around_chains, beside_chains

    programs = (*around_chains((1, 4, 6)), *beside_chains((4,)))
    whole = "\n".join(str(transform(build(program))) for program in programs)
    return hashlib.sha256(whole.encode()).hexdigest()


PROMISES: Mapping[str, tuple[str, LawOf]] = MappingProxyType(
    {
        "flops": ("adds no FLOP", _adds_no("flops")),
        "memory": ("adds no memory", _adds_no("memory")),
        "launches": ("adds no launch", _adds_no("launches")),
        "loops": ("keeps loops linear", keeps_loops_linear),
        "precision": ("is as precise", is_as_precise),
        "refines": ("gets as precise as its numbers", refines),
        "bits": ("keeps bits", keeps_bits),
        "lines": ("keeps lines", keeps_lines),
        "schedules": ("ranks meet", keeps_schedules),
        "processes": ("is the same in every process", is_the_same_everywhere),
    }
)
"""The promises that `check_transform` takes, each with the name of its law."""

BOUNDED = (*MEASURES, "precision")
"""Promises that take a bound: `flops=2` for twice as many, `precision=1` for one unit."""


def law_of_promise(promise: str, transform: Transform) -> tuple[str, Law]:
    """The name of the law of a promise, and the law.

    Raises:
        UnknownOption: nobody knows the promise, or its bound.
    """
    name, _, bound = promise.partition("=")
    if name not in PROMISES:
        what = f"check_transform: nobody knows the promise {name!r}"
        raise UnknownOption(what, fix=f"Choose among {', '.join(PROMISES)}.")
    law, law_of = PROMISES[name]
    if not bound:
        return law, law_of(transform)
    if name not in BOUNDED or not bound.replace(".", "", 1).isdigit():
        what = f"check_transform: {promise!r} is no promise with a bound"
        raise UnknownOption(what, fix=f"Choose among {', '.join(f'{one}=2' for one in BOUNDED)}.")
    return law, law_of(transform, float(bound))


@dataclass(frozen=True, slots=True)
class Promised:
    """The promises of a transform, as `check_transform` takes them."""

    keeps: Keeps = "values"
    idempotent: bool = False
    promises: tuple[str, ...] = ()
    ensures: Ensures | None = None
