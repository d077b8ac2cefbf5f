"""Laws for your own transform: one call tests it alone and beside the built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from hypothesis import HealthCheck, Phase, given, settings

from thunder_fn.check import check
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
from thunder_fn.testing.laws.interpreters import Interpreter, interpreter_is_idempotent
from thunder_fn.testing.laws.pairs import TRANSFORMS, commute, floats
from thunder_fn.testing.programs import FAMILIES
from thunder_fn.testing.strategies import Case, cases
from thunder_fn.trace import Trace

Keeps = Literal["values", "nothing"]
CERTAIN = tuple(family for family in FAMILIES if family != "random")


def check_transform(
    transform: Callable[[Trace], Trace], *, keeps: Keeps = "values", idempotent: bool = False, max_examples: int = 50
) -> None:
    """Test a function from trace to trace on random traces without random numbers.

    Args:
        keeps: "values" promises the same types and values, and then the transform must also commute with vjp, jvp,
            vmap, checkpoint, dce, cse and inline; "nothing" promises a checked trace only.
        idempotent: promises that a second application changes nothing.
        max_examples: how many traces to try.

    Raises:
        LawBroken: a law does not hold; names it and prints the smallest trace found.
    """
    laws = _laws(transform, keeps, idempotent)
    broken: list[tuple[str, Case, Exception]] = []

    @settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
    )
    @given(cases(families=CERTAIN, max_steps=8))
    def test(case: Case) -> None:
        for name, law in laws.items():
            try:
                law(case.trace, case.inputs)
            except Exception as error:  # noqa: BLE001 - a wrong transform may raise anything
                broken.append((name, case, error))
                raise LawBroken(name) from None

    try:
        test()
    except LawBroken:
        name, case, error = broken[-1]
        raise LawBroken(f"the transform breaks the law: {name}\n\n{error}\n\nsmallest trace:\n{case.trace}") from error


def _laws(transform: Callable[[Trace], Trace], keeps: Keeps, idempotent: bool) -> dict[str, Law]:
    laws: dict[str, Law] = {
        "gives checked traces": lambda trace, inputs: check(transform(trace)),
        "is pure": _is_pure(transform),
    }
    if keeps == "values":
        laws["keeps values"] = _keeps_values(transform)
    if idempotent:
        laws["is idempotent"] = interpreter_is_idempotent(Interpreter(lambda trace: (transform(trace),)))
    if keeps == "values":
        laws |= {f"commutes with {name}": commute(transform, other) for name, other in TRANSFORMS.items()}
    return laws


def _is_pure(transform: Callable[[Trace], Trace]) -> Law:
    def law(trace: Trace, inputs: Inputs) -> None:
        text = str(trace)
        first, second = transform(trace), transform(trace.renamed(trace.name))
        holds(str(trace) == text, "the trace was changed", trace=trace)
        holds(first == second, "equal traces gave different traces", first=first, second=second)

    return law


def others(values: Values) -> Values:
    """What is neither floating nor complex: compared exactly."""
    return tuple(value for value in values if not isinstance(value, torch.Tensor) or not is_inexact(value))


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
