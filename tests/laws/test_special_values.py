"""Bugs that NaN and infinite numbers alone show are found, and right transforms get no blame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from thunder_fn.ir import Literal, TensorType, Trace, TraceBuilder, put, rewritten
from thunder_fn.ir.ops import aten, leaf
from thunder_fn.testing import Case, LawBroken, Program, Step, reproduce
from thunder_fn.testing.laws.promises import Promised
from thunder_fn.testing.user import laws_of_transform

MATRIX = TensorType(torch.float64, (2, 3))
BOOL = TensorType(torch.bool, (2, 3))


def program(*steps: tuple[str, tuple[int, ...]]) -> Program:
    return Program((MATRIX, MATRIX), tuple(Step(f"aten.{name}", picks) for name, picks in steps))


def instead(name: str, write: Any) -> Any:
    """The transform that writes something else for an op."""
    step = lambda b, e, xs: (write(b, *xs),) if e.op.name == f"aten.{name}" else put(b, e, xs)
    return lambda trace: rewritten(trace, step)


def add(builder: Any, op: Any, *args: Any, type: TensorType = MATRIX) -> Any:
    return builder.add(leaf(op), args, (type,))[0]


def negated_less(trace: Trace) -> Trace:
    """Wrong: `not x < y` as `x >= y`."""
    makers = {e.outputs[0]: e for e in trace.equations if e.op == leaf(aten.lt.Tensor)}
    ge = lambda e: replace(e, op=leaf(aten.ge.Tensor), args=makers[e.args[0]].args)
    is_not = lambda e: e.op == leaf(aten.logical_not.default) and e.args[0] in makers
    return replace(trace, equations=tuple(ge(e) if is_not(e) else e for e in trace.equations))


def larger(b: Any, x: Any, y: Any) -> Any:
    return add(b, aten.where.self, add(b, aten.gt.Tensor, x, y, type=BOOL), x, y)


def never(b: Any, x: Any, y: Any) -> Any:
    return add(b, aten.zeros_like.default, add(b, aten.ne.Tensor, x, y, type=BOOL), type=BOOL)


WRONG: dict[str, tuple[Any, Program]] = {
    "comparison": (negated_less, program(("lt.Tensor", (0, 0)), ("logical_not.default", ()))),
    "maximum": (instead("maximum.default", larger), program(("maximum.default", (0, 0)))),
    "other maximum": (
        instead("maximum.default", lambda b, x, y: larger(b, y, x)),
        program(("maximum.default", (0, 0))),
    ),
    "unequal": (instead("ne.Tensor", never), program(("ne.Tensor", (0, 1)))),
    "zero": (instead("mul.Scalar", lambda b, x: add(b, aten.zeros_like.default, x)), program(("mul.Scalar", (0, 3)))),
    "itself": (
        instead("sub.Tensor", lambda b, x, y: add(b, aten.zeros_like.default, x)),
        program(("sub.Tensor", (0, 1))),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_for_special_numbers_alone_is_found(name: str) -> None:
    wrong, made = WRONG[name]
    case = Case(made)
    with pytest.raises(LawBroken, match="the transformed trace") as caught:
        laws_of_transform(wrong, Promised())["keeps values"](case.trace, case.inputs)
    assert caught.value.inputs is not None and not all(x.isfinite().all() for x in caught.value.inputs)
    laws_of_transform(lambda trace: replace(trace), Promised())["keeps values"](case.trace, case.inputs)


def normalized(b: Any, x: Any) -> Any:
    """Right: one fused kernel's mean of an infinite number is NaN, and a plain one is infinite."""
    narrow = TensorType(torch.float64, (2, 1))
    mean = lambda y: b.add(leaf(aten.mean.dim), (y, (Literal(-1),), Literal(True)), (narrow,))[0]
    middle = mean(x)
    apart = add(b, aten.sub.Tensor, x, middle)
    spread = add(b, aten.add.Scalar, mean(add(b, aten.mul.Tensor, apart, apart)), Literal(1e-5), type=narrow)
    scale = add(b, aten.rsqrt.default, spread, type=narrow)
    return add(b, aten.mul.Tensor, apart, scale), middle, scale


def test_a_right_decomposition_gets_no_blame() -> None:
    name = "aten.native_layer_norm.default"
    step = lambda b, e, xs: normalized(b, *xs) if e.op.name == name else put(b, e, xs)
    builder = TraceBuilder("program")
    x = builder.input(MATRIX)
    narrow = TensorType(torch.float64, (2, 1))
    args = (x, (Literal(3),), Literal(None), Literal(None), Literal(1e-5))
    trace = builder.build(builder.add(leaf(aten.native_layer_norm.default), args, (MATRIX, narrow, narrow)))
    law = laws_of_transform(lambda one: rewritten(one, step), Promised())["keeps values"]
    assert law(trace, (torch.randn(2, 3, dtype=torch.float64),))


def test_the_report_has_the_inputs_and_the_first_difference() -> None:
    with pytest.raises(LawBroken) as caught:
        reproduce(WRONG["comparison"][1], "keeps values")(negated_less)
    said = str(caught.value)
    assert "the transformed trace: of [[inf, " in said and "value 0 is" in said
    assert "The first equation whose value is not in the new trace:" in said
