"""Laws for your own transform: one call tests it alone and beside the built-in ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Literal

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from thunder_fn.ir.check import check
from thunder_fn.ir.trace import TensorType, Trace
from thunder_fn.testing.drawn_programs import BODIES, FAMILIES, Program, Step, source_of
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    Values,
    agree,
    close,
    holds,
    is_inexact,
    is_tame,
    run,
    tolerance,
)
from thunder_fn.testing.laws.interpreters import (
    Interpreter,
    interpreter_carries_facts,
    interpreter_is_idempotent,
    interpreter_leaves_closures_alone,
)
from thunder_fn.testing.laws.pairs import TRANSFORMS, commute, floats
from thunder_fn.testing.strategies import Case, cases

Keeps = Literal["values", "nothing"]
CASES = cases(families=tuple(family for family in FAMILIES if family != "random"), max_steps=8)
VECTOR = TensorType(torch.float64, (2,))
STEPS = tuple(name for family, names in FAMILIES.items() if family != "random" for name in names)
QUIETLY = settings(
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=(
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ),
    print_blob=False,
)


def check_transform(
    transform: Callable[[Trace], Trace],
    *,
    keeps: Keeps = "values",
    idempotent: bool = False,
    max_examples: int = 50,
) -> None:
    """Test a function from trace to trace on a trace for each kind of equation, and on random
    traces without random numbers.

    Args:
        keeps: "values" promises the same types and values. Then the transform must also commute
            with vjp, jvp, vmap, checkpoint and the simplifying transforms, and read closed-over
            tensors when the trace runs. "nothing" promises a checked trace, the same for equal
            traces and with their constraints, and nothing else.
        idempotent: promises that a second application changes nothing.
        max_examples: how many random traces to try.

    Raises:
        LawBroken: a law does not hold; names it and prints the smallest trace found.
    """
    laws = _laws(transform, keeps, idempotent)
    for name, law in laws.items():
        for step in STEPS:  # so that no op is left to chance
            errors = [
                (case, error)
                for case in _cases_of(step)
                if (error := _error(law, case)) is not None
            ]
            if errors:
                case, error = errors[-1]
                raise _described(transform, name, case, error) from error
    broken = _first_broken(laws, max_examples)
    if broken is not None:
        case, error = _smallest(laws[broken], max_examples)
        raise _described(transform, broken, case, error) from error


def _cases_of(name: str) -> tuple[Case, Case]:
    """A step on two tensors, and on one."""
    bodies = (Program(steps=(Step("sin"),)),) * BODIES.get(name, 0)
    return (
        Case(Program((VECTOR, VECTOR), (Step(name, (0, 1), bodies),))),
        Case(Program((VECTOR,), (Step(name, bodies=bodies),))),
    )


def _first_broken(laws: dict[str, Law], max_examples: int) -> str | None:
    """The most basic law that some trace breaks: the laws stand in that order."""
    names = list(laws)
    first = [len(names)]

    @seed(0)
    @settings(QUIETLY, max_examples=max_examples, phases=(Phase.generate,))
    @given(CASES)
    def test(case: Case) -> None:
        for position, name in enumerate(names[: first[0]]):
            if _error(laws[name], case) is not None:
                first[0] = position
                return

    test()
    return names[first[0]] if first[0] < len(names) else None


def _smallest(law: Law, max_examples: int) -> tuple[Case, Exception]:
    """The smallest trace found that breaks a law, and how it does."""
    found: list[tuple[Case, Exception]] = []

    @seed(0)
    @settings(QUIETLY, max_examples=max_examples, phases=(Phase.generate, Phase.shrink))
    @given(CASES)
    def test(case: Case) -> None:
        error = _error(law, case)
        if error is not None:
            found.append((case, error))
            raise LawBroken("found one")

    with contextlib.suppress(LawBroken):
        test()
    return found[-1]


def _error(law: Law, case: Case) -> Exception | None:
    trace = case.trace
    try:
        law(trace, case.inputs)
    except Exception as error:  # noqa: BLE001 - a wrong transform may raise anything
        return error
    return None


def _described(
    transform: Callable[[Trace], Trace], law: str, case: Case, error: Exception
) -> LawBroken:
    """Describe a broken law: the trace, the transform's result, and how to see it again."""
    name = getattr(transform, "__name__", type(transform).__name__).replace(
        "<lambda>", "the transform"
    )
    what = error.what if isinstance(error, LawBroken) else f"{type(error).__name__}: {error}"
    parts = [f'{name} breaks the law "{law}". The smallest trace found:', str(case.trace).rstrip()]
    try:
        parts += ["becomes", str(transform(case.trace)).rstrip()]
    except Exception:  # noqa: BLE001 - then that is what is broken
        parts += ["and there is no trace that it becomes."]
    again = f"from thunder_fn.testing import Program, Step, build\nbuild({source_of(case.program)})"
    return LawBroken("\n\n".join([*parts, what, f"To see it again:\n{again}"]))


def _laws(transform: Callable[[Trace], Trace], keeps: Keeps, idempotent: bool) -> dict[str, Law]:
    alone = Interpreter(lambda trace: (transform(trace),))
    laws: dict[str, Law] = {
        "gives checked traces": lambda trace, inputs: check(transform(trace)),
        "is pure": _is_pure(transform),
    }
    if keeps == "values":
        laws["keeps values"] = _keeps_values(transform)
        laws["leaves closed-over tensors alone"] = interpreter_leaves_closures_alone(alone)
    else:
        laws["carries facts"] = interpreter_carries_facts(alone, whole=False)
    if idempotent:
        laws["is idempotent"] = interpreter_is_idempotent(alone)
    if keeps == "values":
        laws["carries facts"] = interpreter_carries_facts(alone, whole=False)
        laws |= {
            f"commutes with {name}": commute(transform, other) for name, other in TRANSFORMS.items()
        }
    return laws


def _is_pure(transform: Callable[[Trace], Trace]) -> Law:
    def law(trace: Trace, inputs: Inputs) -> None:
        text = str(trace)
        first, second = transform(trace), transform(trace.renamed(trace.name))
        holds(str(trace) == text, "the trace was changed", trace=trace)
        holds(first == second, "equal traces gave different traces", first=first, second=second)

    return law


def others(values: Values) -> Values:
    """The values that are neither floating nor complex: compared exactly."""
    return tuple(
        value for value in values if not isinstance(value, torch.Tensor) or not is_inexact(value)
    )


def _keeps_values(transform: Callable[[Trace], Trace]) -> Law:
    def law(trace: Trace, inputs: Inputs) -> None:
        new = transform(trace)
        holds(new.input_types == trace.input_types, "the inputs' types changed", made=new)
        holds(new.output_types == trace.output_types, "the outputs' types changed", made=new)
        want = run(trace, inputs)
        if is_tame(want):
            have = run(new, inputs)
            close(floats(have), floats(want), tolerance(trace), "the transformed trace", made=new)
            agree(others(have), others(want), "the transformed trace", made=new)

    return law
