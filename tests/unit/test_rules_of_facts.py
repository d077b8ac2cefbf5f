"""Rules that follow from facts about ops are those that PyTorch's forward AD and functorch give, in types and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.derived.attempts import Attempt
from thunder_fn.derived.leaf_jvp import JVP_ATTEMPTS, JvpQuestion
from thunder_fn.derived.leaf_vjp import alone, is_differentiable
from thunder_fn.derived.leaf_vmap import VMAP_ATTEMPTS, VmapQuestion, VmapRule
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import Trace, facts, ops
from thunder_fn.ir.rules import JvpRule, Mask
from thunder_fn.testing.drawn_programs import build
from thunder_fn.testing.samples import samples
from thunder_fn.testing.schemas import calls_of_samples, is_callable

MOST = 5
"""The recorded calls of an op that are looked at."""

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")


def recorded(has_fact: Callable[[ops.Op], Any]) -> Iterator[tuple[str, Trace]]:
    """Recorded calls of ops of which a fact holds, each as one equation."""
    for name in filter(is_callable, samples()):
        op = ops.leaf(ops.overload_named(name))
        if has_fact(op) and not ops.is_random(op):
            for _, program in islice(calls_of_samples(name), MOST):
                yield name, alone(build(program).equations[-1])


def masks(single: Trace, allowed: Mask) -> Iterator[Mask]:
    """Every choice of at least one of the allowed operands."""
    choices = [(False, True) if flag else (False,) for flag in allowed]
    yield from (mask for mask in islice(product(*choices), 8) if any(mask))


def drawn(of: Any) -> torch.Tensor:
    """A tensor of a type: random numbers, the first index, or masks and pivots, which count from one."""
    if is_differentiable(of):
        return torch.randn(of.shape, dtype=of.dtype)
    return (torch.zeros if of.dtype is torch.int64 else torch.ones)(of.shape, dtype=of.dtype)


def found_by(attempts: tuple[Attempt[Any, Any], ...], names: tuple[str, ...], question: Any, kind: type) -> list[Any]:
    """The rules that the attempts of these names have."""
    found = [attempt.find(question) for name in names for attempt in attempts if attempt.name == name]
    return [rule for rule in found if isinstance(rule, kind)]


def assert_same(ours: Trace, theirs: Trace, single: Trace) -> None:
    assert ours.input_types == theirs.input_types and ours.output_types == theirs.output_types, single
    values = [drawn(type) for type in theirs.input_types]
    try:
        want = evaluate(theirs, values)
    except NotImplementedError:  # of bits of a float, whose fake tensors PyTorch lets pass
        return
    torch.testing.assert_close(evaluate(ours, values), want, equal_nan=True, msg=lambda text: f"{single}\n{text}")


def test_tangents_by_linearity_are_those_of_forward_mode() -> None:
    torch.manual_seed(0)
    linear, seen = ("the tangent of one term", "the op on the tangents"), set[str]()
    for name, single in recorded(ops.linear_in):
        for active in masks(single, tuple(map(is_differentiable, single.input_types))):
            question = JvpQuestion(single, active)
            rules = found_by(JVP_ATTEMPTS, linear, question, JvpRule)
            for theirs in found_by(JVP_ATTEMPTS, ("forward AD",), question, JvpRule) if rules else ():
                assert rules[0].active_outputs == theirs.active_outputs, single
                assert_same(rules[0].trace, theirs.trace, single)
                seen.add(name)
    assert len(seen) > 60, seen


def test_batches_by_facts_are_those_of_functorch() -> None:
    torch.manual_seed(0)
    direct = "the op on the whole batch", "the shape with the batch in front", "product of rows or pairs"
    shapes = [((4, 3), (2, -1)), ((6,), (1, 6, 1)), ((0, 2), (2, 0)), ((), (1,))]
    reshapes = [tfn.trace(lambda x, to=to: x.reshape(to), torch.ones(given)) for given, to in shapes]
    seen = set[str]()
    singles = [("reshape", alone(one.equations[0])) for one in reshapes]
    for name, single in (*singles, *recorded(lambda op: ops.is_pointwise(op) or op in facts.MATMULS)):
        for batched in masks(single, (True,) * len(single.inputs)):
            question = VmapQuestion(single, batched, 5, "error")
            rules = found_by(VMAP_ATTEMPTS, direct, question, VmapRule)
            for theirs in found_by(VMAP_ATTEMPTS, ("functorch's rule",), question, VmapRule) if rules else ():
                assert_same(rules[0].trace, theirs.trace, single)
                seen.add(name)
    assert len(seen) > 80 and {"aten.mm.default", "reshape"} <= seen, seen
