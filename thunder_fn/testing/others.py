"""The laws for other people's compilers: FX passes, and backends of `torch.compile`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.drawn_programs import FAMILIES, Program
from thunder_fn.testing.growing import CHAIN, PLACES, VECTOR, smallest
from thunder_fn.testing.laws.comparing import (
    LawBroken,
    is_flat,
    is_inexact,
    is_tame,
    seeded,
    tolerance,
)
from thunder_fn.testing.laws.promises import Promised
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
    is given. Traces with structured ops are left as they are.

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
        graph = to_fx(trace)
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


def check_backend(backend: Any, *, max_examples: int = 20) -> int:
    """Compare a backend of `torch.compile` with eager PyTorch: values and gradients of programs.

    Args:
        backend: as for `torch.compile`: a name, or a function.
        max_examples: how many programs; a backend such as inductor takes seconds for each.

    Returns:
        The number of programs that were compared.

    Raises:
        LawBroken: the backend is wrong, or fails; the message is a script that needs PyTorch only.

    Example:
        >>> from thunder_fn.testing import check_backend
        >>> check_backend("eager", max_examples=2)
        2
    """
    count = 0
    for program in _flat_programs(max_examples):
        case = Case(program)
        if not _is_fit(case):
            continue
        count += 1
        if _differs(case, backend) is not None:
            small = smallest(program, lambda p: _breaks(p, backend))
            found = _differs(Case(small), backend) or "the difference is gone"
            raise LawBroken(
                f"{backend} is not eager PyTorch:\n\n{found}\n\n{_script(small, backend)}"
            )
    return count


def _flat_programs(count: int) -> Iterator[Program]:
    """Steps in turn, each on some of the inputs, and random programs."""
    names = [name for name in STEPS if not name[0].isupper()]
    drawn = [case.program for case in drawn_cases(FLAT, 0, max(count // 2, 1))]
    chains = [Program((VECTOR, VECTOR), CHAIN)]
    alone = [program for name in names for program in steps_alone(name)[:1] if program.inputs]
    yield from (*chains, *drawn, *alone, *(Program(types, CHAIN[:3]) for types in PLACES))[:count]


def _is_fit(case: Case) -> bool:
    trace = case.trace
    return is_flat(trace) and bool(trace.equations) and not trace.constants and bool(trace.inputs)


def _breaks(program: Program, backend: Any) -> bool:
    try:
        case = Case(program)
        return _is_fit(case) and _differs(case, backend) is not None
    except Exception:  # noqa: BLE001 - no program
        return False


def _differs(case: Case, backend: Any) -> str | None:
    """Describe how the compiled program differs from the eager one; None if it does not."""
    f = case.trace.python_callable()
    want = _values_and_gradients(f, case)
    if not is_tame(want):
        return None
    torch.compiler.reset()
    try:
        have = _values_and_gradients(torch.compile(f, backend=backend, dynamic=False), case)
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        return f"{type(error).__name__}: {str(error)[:500]}"
    rtol = 10 * tolerance(case.trace)
    for place, (a, b) in enumerate(zip(have, want, strict=True)):
        scale = max(1.0, float(b.abs().amax()) if b.numel() and is_inexact(b) else 1.0)
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"value {place} has type {a.dtype} {tuple(a.shape)}, eager {b.dtype} {b.shape}"
        same = torch.allclose(a, b, rtol, rtol * scale) if is_inexact(a) else torch.equal(a, b)
        if not same:
            return f"value {place} is\n{a}\nbut in eager PyTorch\n{b}"
    return None


def _values_and_gradients(f: Callable[..., Any], case: Case) -> tuple[torch.Tensor, ...]:
    """The results of a program, then the gradients of the sum of their squares."""
    inputs = tuple(
        x.clone().requires_grad_(x.is_floating_point()) for x in copy.deepcopy(case.inputs)
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


def _script(program: Program, backend: Any) -> str:
    """The program as a script that needs PyTorch only."""
    case = Case(program)
    values = ", ".join(f"torch.tensor({x.tolist()}, dtype={x.dtype})" for x in case.inputs)
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    return (
        f"import torch\n\naten = torch.ops.aten\n\n{case.trace}\n"
        f"inputs = ({values},)\nprint(program(*inputs))\n"
        f"print(torch.compile(program, backend={name!r}, dynamic=False)(*inputs))"
    )
