"""Reports of broken laws: the traces before and after, where they part, and how to see it again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.trace import Equation, Trace
from thunder_fn.testing.drawn_programs import source_of
from thunder_fn.testing.given import Given
from thunder_fn.testing.laws.comparing import LawBroken, is_inexact, run, tolerance
from thunder_fn.testing.laws.pairs import arguments_of
from thunder_fn.testing.laws.promises import ENSURED, Promised
from thunder_fn.testing.sized import Sized
from thunder_fn.testing.strategies import Case

AnyCase = Case | Sized | Given


def described(
    transform: Callable[[Trace], Trace],
    law: str,
    case: AnyCase,
    error: Exception,
    promised: Promised,
) -> LawBroken:
    """Describe a broken law: the trace, the transform's result, where they part, and a script."""
    name = _name(transform)
    what = error.what if isinstance(error, LawBroken) else f"{type(error).__name__}: {error}"
    traces = error.traces if isinstance(error, LawBroken) else {}
    parts = [f'{name} breaks the law "{law}". The smallest trace found:', str(case.trace).rstrip()]
    try:
        new: Any = transform(case.trace)
    except Exception:  # noqa: BLE001 - then that is what is broken
        new = None
        parts += ["and there is no trace that it becomes."]
    else:
        parts += ["becomes", str(new).rstrip()]
    parts += _composed(law, traces)
    parts.append(what)
    parts += _where(case, new, traces)
    script = script_of(transform, law, case, promised)
    return LawBroken("\n\n".join([*parts, f"To see it again:\n{script}"]))


def _name(transform: Callable[[Trace], Trace]) -> str:
    name = getattr(transform, "__name__", type(transform).__name__)
    return name.replace("<lambda>", "the transform")


def _composed(law: str, traces: dict[str, Trace]) -> list[str]:
    """The two traces of a law about two transforms."""
    if "plain" not in traces:
        return []
    other = law.rpartition(" ")[2]
    return [
        f"Without the transform, {other} makes of it",
        str(traces["plain"]).rstrip(),
        "and with it",
        str(traces["made"]).rstrip(),
    ]


def _where(case: AnyCase, new: object, traces: dict[str, Trace]) -> list[str]:
    """The first equation whose value the other trace does not compute."""
    if "plain" in traces:
        before, after = traces["plain"], traces["made"]
    elif isinstance(new, Trace):
        before, after = case.trace, new
    else:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = arguments_of(before, case.trace, case.inputs)
            found = first_difference(before, after, arguments)
    except Exception:  # noqa: BLE001 - a wrong trace may not run
        return []
    return [] if found is None else [found]


def first_difference(before: Trace, after: Trace, inputs: Sequence[Any]) -> str | None:
    """The first equation of a trace whose value no variable of the other one has, and both values.

    The equation of the same place in the other trace is shown beside it.
    """
    rtol = tolerance(before)
    have, want = _steps(after, inputs), _steps(before, inputs)
    known = [value for _, value in have]
    for place, (equation, value) in enumerate(want):
        if any(_alike(value, other, rtol) for other in known):
            continue
        text = ["The first equation whose value is not in the new trace:", _line(equation, value)]
        alike = [item for item in have if item[0].op == equation.op] or have[place : place + 1]
        unlike = [
            item for item in alike if not any(_alike(item[1], value, rtol) for _, value in want)
        ]
        if unlike:
            text += ["In its place stands:", _line(*unlike[0])]
        return "\n".join(text)
    return None


def _steps(trace: Trace, inputs: Sequence[Any]) -> list[tuple[Equation, Any]]:
    """Yield each equation with each of its values."""
    places = [(equation, var) for equation in trace.equations for var in equation.outputs]
    whole = replace(trace, outputs=tuple(var for _, var in places))
    values = run(whole, inputs)
    return [(equation, value) for (equation, _), value in zip(places, values, strict=True)]


def _alike(a: Any, b: Any, rtol: float) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True)
        if is_inexact(a)
        else torch.equal(a, b)
    )


def _line(equation: Equation, value: Any) -> str:
    return f"  {format_equation(equation)}\n  = {value}"


def script_of(
    transform: Callable[[Trace], Trace], law: str, case: AnyCase, promised: Promised
) -> str:
    """A script that runs alone, if the transform can be imported; else a decorator for it."""
    name, home = _imported(transform)
    kind = "" if isinstance(case, Case) else f"{type(case).__name__}, "
    lines = [
        "import torch",
        "from thunder_fn.ir.trace import TensorType",
        f"from thunder_fn.testing import {kind}Program, Step, reproduce",
    ]
    lines += ["traces = ...  # as in check_transform"] if isinstance(case, Given) else []
    options = [f"seed={case.seed}"] if case.seed else []
    options += [f"keeps={promised.keeps!r}"] if promised.keeps != "values" else []
    if promised.ensures is not None and law == ENSURED:
        purpose, its_home = _imported(promised.ensures)
        lines += [f"from {its_home} import {purpose}"] if its_home else []
        options.append(f"ensures={purpose or '...  # as in check_transform'}")
    if bounded := [one for one in promised.promises if "=" in one]:
        options.append(f"promises={bounded}")
    source = source_of(case.program) if isinstance(case, Case) else case.source()
    call = ", ".join([source, repr(law), *options])
    if home:
        return "\n".join([*lines, f"from {home} import {name}", f"reproduce({call})({name})"])
    return "\n".join([*lines, f"@reproduce({call})  # above the transform"])


def _imported(f: Callable[..., object]) -> tuple[str, str]:
    """The name and the module of a function that can be imported, or two empty strings."""
    name, module = getattr(f, "__qualname__", ""), getattr(f, "__module__", "__main__")
    return (name, module) if name.isidentifier() and module != "__main__" else ("", "")
