"""The laws for backends of `torch.compile`: they compute what eager PyTorch does.

A search may find several differences. Programs that have all the ops of a known one are then left
out, so each is found once, by its smallest program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thunder_fn.progress import tracked
from thunder_fn.testing.drawn_programs import FAMILIES, Program
from thunder_fn.testing.growing import CHAIN, PLACES, VECTOR, smallest
from thunder_fn.testing.laws.comparing import (
    LawBroken,
    is_flat,
    is_inexact,
    is_tame,
    leaf_counts,
    seeded,
    tolerance,
)
from thunder_fn.testing.samples import samples
from thunder_fn.testing.schemas import calls_of_samples, is_callable
from thunder_fn.testing.strategies import Case, cases, drawn_cases
from thunder_fn.testing.user import STEPS, steps_alone

FLAT = cases(
    families=tuple(
        family
        for family in FAMILIES
        if family not in ("random", "choice", "loop", "rule", "composite", "constant")
    ),
    max_steps=8,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A program that a backend compiles wrongly: its ops, and a script that needs PyTorch only."""

    ops: frozenset[str]
    report: str


@dataclass(slots=True)
class Survey:
    """The number of programs that a backend was right for, and the differences found."""

    compared: int = 0
    found: list[Difference] = field(default_factory=list[Difference])

    def is_known(self, case: Case) -> bool:
        """Test whether a program has all the ops of a difference that was found."""
        names = set(leaf_counts(case.trace))
        return any(one.ops <= names for one in self.found)


def check_backend(
    backend: Any, *, max_examples: int = 20, together: int = 1, without: Sequence[str] = ()
) -> int:
    """Compare a backend of `torch.compile` with eager PyTorch: values and gradients of programs.

    The programs are random ones, each kind of equation alone, then PyTorch's own samples of its
    ops.

    Law: the backend "eager" is never wrong.

    Args:
        backend: as for `torch.compile`: a name, or a function.
        max_examples: how many programs; a backend such as inductor takes seconds for each.
        together: how many programs are compiled as one: ten take little longer than one.
        without: ops, such as "aten.erfinv.default", that are known to differ: programs with one of
            them are left out.

    Returns:
        The number of programs that were compared.

    Raises:
        LawBroken: the backend is wrong, or fails; the message is a script that needs PyTorch only.

    Example:
        >>> from thunder_fn.testing import check_backend
        >>> check_backend("eager", max_examples=2)
        2
    """
    survey = Survey()
    for survey in surveyed(backend, max_examples=max_examples, together=together, without=without):
        if survey.found:
            raise LawBroken(survey.found[0].report)
    return survey.compared


def surveyed(
    backend: Any,
    *,
    max_examples: int = 20,
    together: int = 1,
    without: Sequence[str] = (),
    seed: int = 0,
) -> Iterator[Survey]:
    """Compare a backend with eager PyTorch as `check_backend` does, and go on after a difference.
    Yield the findings so far after each group of programs.
    """
    survey, group, left_out = Survey(), list[Case](), set(without)
    yield survey
    for case in map(Case, tracked([*_flat_programs(max_examples, seed)], "comparing programs")):
        if _is_fit(case) and not left_out & set(leaf_counts(case.trace)):
            group.append(case)
        if len(group) == together:
            yield _compared(group, backend, survey)
            group = []
    yield _compared(group, backend, survey)


def _compared(group: Sequence[Case], backend: Any, survey: Survey) -> Survey:
    """Compare some programs, until those that are left have no difference that is not known. They
    are given up where the difference cannot be told by ops.
    """
    while True:
        left = [case for case in group if not survey.is_known(case)]
        found = compare(left, backend)
        if found is None:
            survey.compared += len(left)
            return survey
        survey.found.append(found)
        if not any(map(survey.is_known, left)):
            return survey
        group = left


def compare(cases: Sequence[Case], backend: Any) -> Difference | None:
    """Compare some programs that are compiled as one; look for the one that differs."""
    if not cases or (found := _differs(cases, backend)) is None:
        return None
    alone = (case for case in cases if len(cases) == 1 or _differs([case], backend) is not None)
    if (case := next(alone, None)) is not None:
        cases = [Case(smallest(case.program, lambda program: _breaks(program, backend)))]
        found = _differs(cases, backend) or "the difference is gone"
    names = frozenset(name for case in cases for name in leaf_counts(case.trace))
    report = f"{backend} is not eager PyTorch:\n\n{found}\n\n{_script(cases, backend)}"
    return Difference(names, report)


def print_survey(backend: str, count: int, together: int, without: Sequence[str], seed: int) -> int:
    """Print what differs, each with a script, and the number of programs; return how many do."""
    shown, survey = 0, Survey()
    for survey in surveyed(
        backend, max_examples=count, together=together, without=without, seed=seed
    ):
        for difference in survey.found[shown:]:
            print(f"{difference.report}\n", flush=True)
        shown = len(survey.found)
    ops = ", ".join(sorted({name for one in survey.found for name in one.ops}))
    known = f"; programs with {ops} were left out from then on" if ops else ""
    print(f"{backend}: {survey.compared} programs are eager PyTorch's, {shown} differ{known}")
    return shown


def _flat_programs(count: int, seed: int) -> Iterator[Program]:
    """Random programs, steps in turn, each on some of the inputs, and the samples of ops."""
    names = [name for name in STEPS if not name[0].isupper()]
    drawn = [case.program for case in drawn_cases(FLAT, seed, max(count // 2, 1))]
    chains = [Program((VECTOR, VECTOR), CHAIN)]
    alone = (program for name in names for program in steps_alone(name)[:1] if program.inputs)
    longer = (Program(types, CHAIN[:3]) for types in PLACES)
    of_ops = (calls_of_samples(name) for name in filter(is_callable, samples()))
    called = (program for calls in of_ops for _, program in calls)
    yield from itertools.islice(itertools.chain(chains, drawn, alone, longer, called), count)


def _is_fit(case: Case) -> bool:
    """Test whether an FX graph can hold a program, and eager PyTorch gives finite numbers."""
    try:
        trace = case.trace
        if not is_flat(trace) or not trace.equations or trace.constants or not trace.inputs:
            return False
        return is_tame(_values_and_gradients(_as_one([case]), [case]))
    except Exception:  # noqa: BLE001 - PyTorch refuses some arguments, and some gradients
        return False


def _breaks(program: Program, backend: Any) -> bool:
    case = Case(program)
    return _is_fit(case) and _differs([case], backend) is not None


def _as_one(cases: Sequence[Case]) -> Callable[..., list[Any]]:
    """The function of all inputs that gives all results."""
    parts = [(case.trace.python_callable(), len(case.inputs)) for case in cases]

    def program(*inputs: Any) -> list[Any]:
        results, start = list[Any](), 0
        for part, count in parts:
            results += part(*inputs[start : start + count])
            start += count
        return results

    return program


def _differs(cases: Sequence[Case], backend: Any) -> str | None:
    """Describe how the compiled programs differ from the eager ones; None if they do not."""
    f = _as_one(cases)
    want = _values_and_gradients(f, cases)
    torch.compiler.reset()
    try:
        have = _values_and_gradients(torch.compile(f, backend=backend, dynamic=False), cases)
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        return f"{type(error).__name__}: {str(error)[:500]}"
    rtol = 10 * max(tolerance(case.trace) for case in cases)
    for place, (a, b) in enumerate(zip(have, want, strict=True)):
        scale = max(1.0, float(b.abs().amax()) if b.numel() and is_inexact(b) else 1.0)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"value {place} has type {a.dtype} {tuple(a.shape)}, eager {b.dtype} {b.shape}"
        same = torch.allclose(a, b, rtol, rtol * scale) if is_inexact(a) else torch.equal(a, b)
        if not same:
            return f"value {place} is\n{a}\nbut in eager PyTorch\n{b}"
    return None


def _values_and_gradients(f: Callable[..., Any], cases: Sequence[Case]) -> tuple[torch.Tensor, ...]:
    """The results of a program, then the gradients of the sum of their squares."""
    inputs = tuple(
        x.clone().requires_grad_(x.is_floating_point()) for case in cases for x in case.inputs
    )

    def run() -> tuple[Any, ...]:
        results = [x for x in f(*inputs) if isinstance(x, torch.Tensor)]
        floats = [x for x in results if x.requires_grad]
        if not floats:
            return tuple(results)
        loss = torch.stack([(x * x.conj()).real.sum().double() for x in floats]).sum()
        leaves = [x for x in inputs if x.requires_grad]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return (*results, *(g for g in gradients if g is not None))

    return seeded(run)


def _script(cases: Sequence[Case], backend: Any) -> str:
    """The programs as a script that needs PyTorch only."""
    inputs = [x for case in cases for x in case.inputs]
    values = ", ".join(map(_written, inputs))
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    texts, calls, start = list[str](), list[str](), 0
    for number, case in enumerate(cases):
        stop = start + len(case.inputs)
        texts.append(str(case.trace.renamed(f"program_{number}")))
        calls.append(f"*program_{number}(*inputs[{start}:{stop}])")
        start = stop
    texts.append(f"def program(*inputs):\n    return ({', '.join(calls)},)")
    text = str(cases[0].trace) if len(cases) == 1 else "\n".join(texts)
    return (
        f"import torch\n\naten = torch.ops.aten\n\n{text}\n"
        f"inputs = ({values},)\nprint(program(*inputs))\n"
        f"print(torch.compile(program, backend={name!r}, dynamic=False)(*inputs))"
    )


def _written(x: torch.Tensor) -> str:
    """The Python that makes a tensor, with its strides."""
    text = f"torch.tensor({x.tolist()}, dtype={x.dtype})"
    if x.is_contiguous():
        return text
    made = f"torch.empty_strided({tuple(x.shape)}, {x.stride()}, dtype={x.dtype})"
    return f"{made}.copy_({text})"
