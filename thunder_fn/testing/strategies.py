"""Hypothesis strategies that draw traces as data. See `programs.py` for why what they draw shrinks
well.

@given(cases())
def test_my_interpreter(case):
    laws.law_keeps_values(my_interpreter, case.trace, case.inputs)

A branch or a step of a loop must return certain types. Such a body picks its outputs among the
variables that have them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from thunder_fn.errors import UnknownOption
from thunder_fn.extras import missing
from thunder_fn.ir.trace import TensorType, Trace
from thunder_fn.testing.drawn_programs import (
    BODIES,
    FAMILIES,
    FREQUENT,
    Program,
    Step,
    build,
    example_inputs,
)

try:
    from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
except ImportError as error:
    raise missing("hypothesis", "thunder_fn.testing", error) from error

DTYPES = (
    torch.float64,
    torch.float64,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex128,
    torch.float32,
)
SINGLE = (torch.float32, torch.float32, torch.int64, torch.bool)
"""Dtypes of inputs for laws of autocast, which lets float64 be."""

SHAPES = ((2,), (), (2, 3), (3,), (2, 2), (3, 3), (2, 1), (1, 3), (2, 3, 2), (1,), (0,), (2, 0))
MAX_PICK = 11

SMOOTH = ("unary", "binary", "loop", "choice", "rule")
"""Families of steps for short programs in which structured ops and their derivatives are what
there is.
"""


@dataclass(frozen=True)
class Case:
    """A program and a seed for the values of its inputs.

    Example:
        >>> import torch
        >>> from thunder_fn.testing import Case, Program, Step
        >>> from thunder_fn.ir import TensorType
        >>> case = Case(Program((TensorType(torch.float32, (2,)),), (Step("sin", (0,)),)))
        >>> [tuple(x.shape) for x in case.inputs]
        [(2,)]
    """

    program: Program
    seed: int = 0

    @cached_property
    def trace(self) -> Trace:
        """The trace of the program."""
        return build(self.program)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The values of its inputs."""
        return example_inputs(self.trace, self.seed)


def types(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[TensorType]:
    """Types of inputs: floats most often; rank 0 and sizes 1 and 0 among them."""
    return st.builds(TensorType, st.sampled_from(dtypes), st.sampled_from(SHAPES))


def programs(
    *,
    families: Collection[str] = tuple(FAMILIES),
    max_inputs: int = 3,
    max_steps: int = 16,
    depth: int = 2,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> st.SearchStrategy[Program]:
    """Programs as data.

    Law: `build` makes a checked trace of each program that is drawn.

    Args:
        families: which of `programs.FAMILIES` to draw steps from; without "random" a program is
            deterministic.
        max_inputs, max_steps: how large the program is; bodies have half as many steps at each
            level.
        depth: how deep composites and structured ops nest.
        dtypes: those of the inputs; the first input has the first of them.

    Raises:
        UnknownOption: there is no such family.

    Example:
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import build, programs
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(programs(families=["unary"], max_steps=3, depth=0))
        ... def test_a_program_has_one_trace(program):
        ...     assert build(program) == build(program)
        >>> test_a_program_has_one_trace()
    """
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        fix = f"`families` is a collection of {', '.join(FAMILIES)}."
        raise UnknownOption(f"programs: there is no family {unknown[0]!r}", fix=fix)
    return _programs(tuple(families), max_inputs, max_steps, depth, tuple(dtypes))


@cache
def _programs(
    families: tuple[str, ...],
    max_inputs: int,
    max_steps: int,
    depth: int,
    dtypes: tuple[torch.dtype, ...],
) -> st.SearchStrategy[Program]:
    """Make and validate a strategy once for all tests that draw alike: that takes as long as
    drawing some programs.
    """
    first = types(dtypes[:1])
    inputs = st.builds(_join, first, st.lists(types(dtypes), max_size=max_inputs - 1))
    rarely_none = _rarely(st.just(()), inputs)
    return st.builds(
        Program, rarely_none, _steps(families, max_steps, depth, min_steps=1), _outputs(4)
    )


def _join(first: TensorType, rest: list[TensorType]) -> tuple[TensorType, ...]:
    return (first, *rest)


def _rarely(rare: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One in ten; `one_of` has no weights and drops repeats."""
    return st.integers(0, 9).flatmap(lambda number: rare if number == 9 else usual)


def _picks(max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, MAX_PICK), max_size=max_size).map(tuple)


def _outputs(max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw outputs: everything unused, or some, so that there is dead code."""
    nothing, some = st.just(()), _picks(max_size)
    return st.booleans().flatmap(lambda flag: some if flag else nothing)


def _steps(
    families: tuple[str, ...], max_steps: int, depth: int, min_steps: int = 0
) -> st.SearchStrategy[tuple[Step, ...]]:
    """Steps of the families, those with bodies as deep as `depth` allows."""
    body = (
        st.builds(Program, st.just(()), _steps(families, max_steps // 2, depth - 1), _outputs(3))
        if depth
        else None
    )

    def step(name: str) -> st.SearchStrategy[Step]:
        bodies = st.just(()) if body is None else st.tuples(*[body] * BODIES.get(name, 0))
        return st.builds(Step, st.just(name), _picks(10 if name in BODIES else 4), bodies)

    known = {
        family: [step(name) for name in FAMILIES[family] if depth or name not in BODIES]
        for family in families
    }
    by_family = {family: st.one_of(*steps) for family, steps in known.items() if steps}
    names = [name for name in (*families, *FREQUENT) if name in by_family]
    any_step = st.sampled_from(names).flatmap(by_family.__getitem__)
    some = st.lists(any_step, min_size=min_steps, max_size=max_steps)
    many = st.lists(any_step, min_size=max_steps // 2, max_size=max_steps)
    return st.one_of(some, many).map(tuple)


def traces(**options: Any) -> st.SearchStrategy[Trace]:
    """Closed, checked traces. Options as for `programs`.

    Law: `check` accepts each trace that is drawn.

    Errors as in `programs`.

    Example:
        >>> import thunder_fn as tfn
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import traces
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(traces(max_steps=3, depth=0))
        ... def test_simplify_is_idempotent(trace):
        ...     once = tfn.simplify(trace)
        ...     assert tfn.simplify(once) == once
        >>> test_simplify_is_idempotent()
    """
    return programs(**options).map(build)


def cases(**options: Any) -> st.SearchStrategy[Case]:
    """Traces with inputs. Options as for `programs`.

    Law: ``evaluate(case.trace, case.inputs)`` runs, for each case that is drawn.

    Errors as in `programs`.

    Example:
        >>> import thunder_fn as tfn
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import cases
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(cases(families=["unary", "binary"], max_steps=3, depth=0))
        ... def test_simplify_keeps_types(case):
        ...     assert tfn.simplify(case.trace).output_types == case.trace.output_types
        >>> test_simplify_keeps_types()
    """
    return st.builds(Case, programs(**options), st.integers(0, 99))


def in_dims(trace: Trace) -> st.SearchStrategy[tuple[int | None, ...]]:
    """Draw the `in_dims` of a `vmap`: for each input a batch dim, or None; at least one is batched,
    if there is one.

    Law: ``vmap(trace, dims, size)`` is a loop, for each dims drawn.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import in_dims
        >>> trace = tfn.trace(torch.add, torch.ones(2), torch.ones(2))
        >>> @settings(max_examples=5, database=None, deadline=None)
        ... @given(in_dims(trace))
        ... def test_something_is_batched(dims):
        ...     assert len(dims) == 2 and dims != (None, None)
        >>> test_something_is_batched()
    """
    ranks = [len(type.shape) if isinstance(type, TensorType) else 0 for type in trace.input_types]
    one_each = st.tuples(*(st.sampled_from((*range(rank + 1), None)) for rank in ranks))
    return one_each.map(
        lambda dims: dims if not dims or any(dim is not None for dim in dims) else (0, *dims[1:])
    )


def smooth_cases(**options: Any) -> st.SearchStrategy[Case]:
    """Short traces of loops, choices and calls around smooth functions. Options as for
    `programs`.

    Law: `check` accepts the trace of each case.

    Errors as in `programs`.

    Example:
        >>> import thunder_fn as tfn
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import smooth_cases
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(smooth_cases(max_steps=2))
        ... def test_traces_are_well_formed(case):
        ...     tfn.check(case.trace)
        >>> test_traces_are_well_formed()
    """
    return cases(**{"families": SMOOTH, "max_inputs": 2, "max_steps": 6, **options})


@cache
def drawn_cases(kind: st.SearchStrategy[Case], number: int, count: int) -> tuple[Case, ...]:
    """The cases that Hypothesis draws from a seed, as many as that: always the same ones."""
    found: list[Case] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )
    @given(kind)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return tuple(found)


def inputs_for(trace: Trace) -> st.SearchStrategy[tuple[torch.Tensor, ...]]:
    """Values for the inputs of a trace.

    Law: the values have the types of the inputs.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from hypothesis import given, settings
        >>> from thunder_fn.testing import inputs_for
        >>> trace = tfn.trace(torch.sin, torch.ones(2))
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(inputs_for(trace))
        ... def test_sine_is_bounded(inputs):
        ...     assert all((y.abs() <= 1).all() for y in tfn.evaluate(trace, inputs))
        >>> test_sine_is_bounded()
    """
    return st.integers(0, 99).map(lambda seed: example_inputs(trace, seed))


# ---- pytrees ----


class Point(NamedTuple):
    """A namedtuple among the nodes of the pytrees that are drawn."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Box:
    """A dataclass among the nodes of the pytrees that are drawn."""

    content: Any
    label: str = "box"


def pytrees(leaves: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Trees of tuples, lists, dicts, namedtuples, dataclasses and None; the leaves are tensors,
    numbers and text.

    Law: PyTorch's pytrees flatten each tree that is drawn, and put it together again.

    Example:
        >>> from hypothesis import given, settings, strategies as st
        >>> from torch.utils import _pytree as pytree
        >>> from thunder_fn.testing import pytrees
        >>> @settings(max_examples=2, database=None, deadline=None)
        ... @given(pytrees(st.integers()))
        ... def test_a_tree_is_its_leaves_and_its_structure(tree):
        ...     leaves, structure = pytree.tree_flatten(tree)
        ...     assert pytree.tree_unflatten(leaves, structure) == tree
        >>> test_a_tree_is_its_leaves_and_its_structure()
    """
    if leaves is None:
        tensors = (
            types().flatmap(lambda type: inputs_for(_identity(type))).map(lambda values: values[0])
        )
        leaves = st.one_of(tensors, st.integers(-2, 2), st.just("text"))
    return st.recursive(st.one_of(leaves, st.none()), _nodes, max_leaves=6)


def _identity(type: TensorType) -> Trace:
    return build(Program((type,)))


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(("b", "a", "c")), children, max_size=3),
        st.builds(Point, children, children),
        st.builds(Box, children),
    )
