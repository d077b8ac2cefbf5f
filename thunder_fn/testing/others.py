"""The laws for other people's compilers: FX passes, and backends of `torch.compile`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.trace import Trace
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
from thunder_fn.testing.laws.promises import Promised
from thunder_fn.testing.samples import samples
from thunder_fn.testing.schemas import calls_of_samples, is_callable
from thunder_fn.testing.strategies import Case, cases, drawn_cases
from thunder_fn.testing.user import STEPS, Search, steps_alone
from thunder_fn.testing.watching import Coverage
from thunder_fn.torch_internals.patches import no_meta_log

Pass = Callable[[torch.fx.GraphModule], Any]
FLAT = cases(
    families=tuple(
        family
        for family in FAMILIES
        if family not in ("random", "choice", "loop", "rule", "composite", "constant")
    ),
    max_steps=8,
)
OF_FX = ("carries facts", "leaves closed-over tensors alone")
"""Laws about what an FX graph does not hold."""


def check_pass(fx_pass: Pass, *, max_examples: int = 50, ops: tuple[Any, ...] = ()) -> Coverage:
    """Hold an FX pass to the laws of `check_transform`.

    The pass takes a GraphModule of ATen ops. It returns a GraphModule, or changes the one that it
    is given. Traces that no FX graph expresses, those with structured ops or with symbols as
    numbers, are left as they are.

    Law: a pass that returns its graph as it is keeps all laws.

    Raises:
        LawBroken: a law does not hold; names it and prints the smallest trace found.

    Example:
        >>> import torch
        >>> from thunder_fn.testing import LawBroken, check_pass
        >>> def cosine_for_sine(graph):
        ...     for node in graph.graph.nodes:
        ...         if node.target is torch.ops.aten.sin.default:
        ...             node.target = torch.ops.aten.cos.default
        >>> try:
        ...     check_pass(cosine_for_sine, max_examples=1)
        ... except LawBroken:
        ...     print("broken")
        broken
    """

    def transform(trace: Trace) -> Trace:
        if not is_flat(trace):
            return trace
        try:
            graph = to_fx(trace)
        except MissingRule:
            return trace
        made = fx_pass(graph)
        made = getattr(made, "graph_module", made)  # of torch.fx.passes, a PassResult
        return from_fx(made if isinstance(made, torch.fx.GraphModule) else graph)

    transform.__name__ = getattr(fx_pass, "__name__", type(fx_pass).__name__)
    transform.__wrapped__ = fx_pass  # type: ignore[attr-defined]
    with warnings.catch_warnings(), no_meta_log():
        warnings.simplefilter("ignore")
        search = Search(transform, Promised(), ops, without=OF_FX)
        search.run(max_examples)
    return search.coverage


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
    count, group = 0, list[Case]()
    left_out = set(without)
    for case in map(Case, _flat_programs(max_examples)):
        if _is_fit(case) and not left_out & set(leaf_counts(case.trace)):
            group.append(case)
        if len(group) == together:
            count += compare(group, backend)
            group = []
    return count + compare(group, backend)


def compare(cases: Sequence[Case], backend: Any) -> int:
    """Compare some programs that are compiled as one; look for the one that differs."""
    if not cases or (found := _differs(cases, backend)) is None:
        return len(cases)
    alone = (case for case in cases if len(cases) == 1 or _differs([case], backend) is not None)
    if (case := next(alone, None)) is not None:
        cases = [Case(smallest(case.program, lambda program: _breaks(program, backend)))]
        found = _differs(cases, backend) or "the difference is gone"
    raise LawBroken(f"{backend} is not eager PyTorch:\n\n{found}\n\n{_script(cases, backend)}")


def _flat_programs(count: int) -> Iterator[Program]:
    """Random programs, steps in turn, each on some of the inputs, and the samples of ops."""
    names = [name for name in STEPS if not name[0].isupper()]
    drawn = [case.program for case in drawn_cases(FLAT, 0, max(count // 2, 1))]
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
