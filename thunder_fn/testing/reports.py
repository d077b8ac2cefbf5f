"""Reports of broken laws: the traces before and after, where they part, and how to see it again."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.trace import Equation, Trace, Var, subtraces
from thunder_fn.testing.drawn_programs import source_of
from thunder_fn.testing.given import Given, smallest_part
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    is_inexact,
    run,
    same_bits,
    told_apart,
    tolerance,
)
from thunder_fn.testing.laws.pairs import arguments_of
from thunder_fn.testing.laws.promises import ENSURED, Promised
from thunder_fn.testing.sized import Sized
from thunder_fn.testing.strategies import Case
from thunder_fn.testing.vocabulary import functions_of, own_code

AnyCase = Case | Sized | Given


def described(
    transform: Callable[[Trace], Trace],
    law: str,
    case: AnyCase,
    error: Exception,
    promised: Promised,
    keeps: Law | None = None,
) -> LawBroken:
    """Describe a broken law: the trace, the transform's result, where they part, and a script.

    `keeps` is the law that the transform keeps values, if it promises that.
    """
    name, other = _name(transform), law.rpartition(" ")[2]
    what = error.what if isinstance(error, LawBroken) else f"{type(error).__name__}: {error}"
    traces = error.traces if isinstance(error, LawBroken) else {}
    pieces = [f'{name} breaks the law "{law}". The smallest trace found:', case.trace]
    try:
        new: Any = transform(case.trace)
    except Exception:  # noqa: BLE001 - then that is what is broken
        new = None
        pieces.append("and there is no trace that it becomes.")
    else:
        pieces += [] if "changed" in traces else ["becomes", new]
    before, after = _compared(case.trace, new, traces)
    if "changed" in traces:
        pieces += [f"{other} makes of it", before, f"of which {name} makes", after]
    elif "plain" in traces:
        pieces += [f"Without the transform, {other} makes of it", before]
        pieces += ["and with it", after] if "made" in traces else []
    pieces += [what, *_place(transform, error)]
    if isinstance(before, Trace) and isinstance(after, Trace):
        given = error.inputs if isinstance(error, LawBroken) else None
        pieces += [*_constants(before, after), *_where(case, before, after, given)]
    if keeps is not None and "plain" in traces and "made" not in traces:
        pieces += _wrong_part(
            transform, keeps, before, arguments_of(before, case.trace, case.inputs)
        )
    pieces.append(f"To see it again:\n{script_of(transform, law, case, promised)}")
    return LawBroken("\n\n".join(str(piece).rstrip() for piece in pieces))


def _compared(trace: Trace, new: Any, traces: dict[str, Trace]) -> tuple[Any, Any]:
    """The two traces that should be alike: those of a law about two transforms, or else the trace
    and what it becomes.
    """
    if "plain" not in traces:
        return trace, new
    return traces["plain"], traces.get("changed", traces.get("made"))


def _wrong_part(
    transform: Callable[[Trace], Trace], keeps: Law, trace: Trace, inputs: Inputs
) -> list[Any]:
    """The equations of what another transform has made that this one gets wrong alone."""
    errors = dict[Trace, Exception]()

    def breaks(part: Trace, values: Inputs) -> bool:
        try:
            run(part, values)
        except Exception:  # noqa: BLE001 - then nobody can say what is right
            return False
        try:
            keeps(part, values)
        except Exception as error:  # noqa: BLE001 - a wrong transform may raise anything
            errors[part] = error
        return part in errors

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = smallest_part(trace, inputs, breaks)
    if part is None or len(part.equations) == len(trace.equations):
        return []
    error, pieces = errors[part], [f"The equations of it that {_name(transform)} gets wrong:", part]
    with suppress(Exception):
        pieces += ["become", transform(part)]
    what = error.what if isinstance(error, LawBroken) else f"{type(error).__name__}: {error}"
    return [*pieces, what]


def _place(transform: Callable[[Trace], Trace], error: BaseException | None) -> list[str]:
    """The last line of the transform's own code that an error went through."""
    codes = {code.co_filename for code in own_code(functions_of(transform))}
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename in codes:
                return [f"in {Path(frame.filename).name}:{frame.lineno}: {frame.line}"]
        error = error.__cause__
    return []


def _constants(before: Trace, after: Trace) -> list[str]:
    """The constants that have other values than before: the text of a trace has no values."""
    pairs = zip(subtraces(before), subtraces(after), strict=False)
    lines = [
        f"  {old.var}: {' became '.join(told_apart(old.tensor.detach(), new.tensor.detach()))}"
        for one, other in pairs
        if [c.var for c in one.constants] == [c.var for c in other.constants]
        for old, new in zip(one.constants, other.constants, strict=True)
        if not same_bits(old.tensor, new.tensor)
    ]
    return ["\n".join(["Constants have other values:", *lines])] if lines else []


def _name(transform: Callable[[Trace], Trace]) -> str:
    name = getattr(transform, "__name__", type(transform).__name__)
    return name.replace("<lambda>", "the transform")


def _where(
    case: AnyCase, before: Trace, after: Trace, given: Sequence[Any] | None = None
) -> list[str]:
    """The first equation whose value the other trace does not compute, on inputs that were given
    or on those of the case.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = given or arguments_of(before, case.trace, case.inputs)
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
    known = [*(value for *_, value in have), *inputs, *(c.tensor for c in after.constants)]
    for place, (equation, var, value) in enumerate(want):
        if any(_alike(value, other, rtol) for other in known):
            continue
        unlike = [
            item
            for item in _in_place_of(before, after, (equation, var), have, place)
            if not any(_alike(item[2], value, rtol) for *_, value in want)
        ]
        text, there = told_apart(value, unlike[0][2]) if unlike else (str(value), "")
        lines = ["The first equation whose value is not in the new trace:"]
        lines.append(_line(equation, var, text))
        if unlike:
            lines += ["In its place stands:", _line(unlike[0][0], unlike[0][1], there)]
        return "\n".join(lines)
    return None


def _in_place_of(
    before: Trace,
    after: Trace,
    wanted: tuple[Equation, Var],
    have: Sequence[tuple[Equation, Var, Any]],
    place: int,
) -> list[tuple[Equation, Var, Any]]:
    """The values of another trace that may stand in the place of one: what is returned where it is
    returned, or else the results of the same op, or else what is computed in the same place.
    """
    equation, var = wanted
    returned = [new for old, new in zip(before.outputs, after.outputs, strict=False) if old == var]
    found = [item for item in have if item[1] in returned]
    found += [item for item in have if item[0].op == equation.op] or have[place : place + 1]
    at = equation.outputs.index(var)
    return sorted(
        found, key=lambda item: (item[1] not in returned, item[0].outputs.index(item[1]) != at)
    )


def _steps(trace: Trace, inputs: Sequence[Any]) -> list[tuple[Equation, Var, Any]]:
    """Yield each equation with each of its outputs and their values."""
    places = [(equation, var) for equation in trace.equations for var in equation.outputs]
    whole = replace(trace, outputs=tuple(var for _, var in places))
    values = run(whole, inputs)
    return [(*place, value) for place, value in zip(places, values, strict=True)]


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


def _line(equation: Equation, var: Var, value: str) -> str:
    name = f"{var} " if len(equation.outputs) > 1 else ""
    return f"  {format_equation(equation)}\n  {name}= {value}"


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
