"""The strategies: what they draw, and that it shrinks to the few equations that matter."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings, strategies as st

from thunder_fn.interpreters.vmap import vmap
from thunder_fn.ir.trace import TensorType, Trace, subtraces
from thunder_fn.testing import build, cases, in_dims, programs, pytrees, traces
from thunder_fn.testing.drawn_programs import FAMILIES, Program
from thunder_fn.testing.laws.forward import vmap_is_a_loop
from thunder_fn.testing.mutations import corpus
from thunder_fn.testing.strategies import Case

pytestmark = pytest.mark.filterwarnings("ignore::thunder_fn.derived.leaf_vmap.LoopWarning")
CERTAIN = tuple(family for family in FAMILIES if family != "random")
THOROUGHLY = settings(
    max_examples=500,
    database=None,
    derandomize=True,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),  # to explain what is found takes as long as both, and nobody reads it
    suppress_health_check=list(HealthCheck),
)


def op_names(trace: Trace) -> list[str]:
    return [equation.op.name for inner in subtraces(trace) for equation in inner.equations]


def test_every_structured_op_is_drawn_at_every_depth() -> None:
    top: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for case in chain.from_iterable(corpus(100)):
        for equation in case.trace.equations:
            top[equation.op.name] += equation.op.kind == "structured"
            for body in equation.bodies:
                inside.update(inner.op.name for inner in body.equations if inner.op.kind == "structured")
    names = {"cond", "switch", "scan", "while_loop", "call", "checkpoint", "custom_vjp"}
    assert names <= (+top).keys() and names <= (+inside).keys()


def has_loop_in_a_branch(program: Program) -> bool:
    """Somewhere in a branch of a cond there is a scan."""
    conds = [e for inner in subtraces(build(program)) for e in inner.equations if e.op.name == "cond"]
    return any(e.op.name == "scan" for cond in conds for body in cond.bodies for e in body.equations)


def test_a_program_shrinks_through_its_bodies() -> None:
    """Equations beside, before and in the bodies go; the choice and the loop in it stay."""
    drawn = programs(families=("binary", "choice", "loop"), max_steps=3)
    smallest = build(find(drawn, has_loop_in_a_branch, settings=THOROUGHLY))
    assert Counter(op_names(smallest)) <= Counter(["aten.sum.default", "aten.gt.Scalar", "cond", "scan"])


@given(trace=traces(max_steps=6))
def test_traces_are_traces(trace: Any) -> None:
    assert isinstance(trace, Trace)


@settings(max_examples=20)
@given(drawn=cases(families=CERTAIN, max_steps=8).flatmap(lambda case: st.tuples(st.just(case), in_dims(case.trace))))
def test_vmap_is_a_loop_for_any_batch_dims(drawn: tuple[Case, tuple[int | None, ...]]) -> None:
    case, dims = drawn
    if dims:
        vmap_is_a_loop(case.trace, case.inputs, dims)
        assert vmap(case.trace, dims, 3)[0].input_types != case.trace.input_types


def test_in_dims_shrink_to_the_first_dim_of_the_first_input() -> None:
    trace = build(Program((TensorType(torch.float64, (2,)),) * 3))
    assert find(in_dims(trace), lambda dims: True) == (0, 0, 0)


def test_pytrees_shrink_to_a_single_node() -> None:
    assert find(pytrees(st.integers()), lambda tree: tree is not None) in (0, [])
