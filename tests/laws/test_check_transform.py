"""`check_transform` passes a right transform, and shows a tiny trace for a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Trace, map_arg
from thunder_fn.testing import LawBroken, check_transform

SIN, COS = ops.leaf(ops.aten.sin.default), ops.leaf(ops.aten.cos.default)


def cosine_for_sine(trace: Trace) -> Trace:
    """A wrong transform."""
    return replace(trace, equations=tuple(replace(e, op=COS) if e.op == SIN else e for e in trace.equations))


def test_a_right_transform_passes() -> None:
    check_transform(lambda trace: cse(dce(trace)), max_examples=10)


def test_a_wrong_transform_shrinks_to_a_tiny_trace() -> None:
    with pytest.raises(LawBroken) as caught:
        check_transform(cosine_for_sine, max_examples=100)
    said = str(caught.value).split("\n\n")
    assert said[0] == 'cosine_for_sine breaks the law "keeps values". The smallest trace found:'
    assert said[1] == (
        "def program(v0):\n    # v0: f64[2]\n    v1 = aten.sin.default(v0)  # f64[2]\n    return (v1,)\n"
    ).rstrip("\n")
    assert "becomes" in said and said[-1] == (
        "To see it again:\n"
        "from thunder_fn.testing import Program, Step, build\n"
        "build(Program(inputs=(TensorType(torch.float64, (2,)),), steps=(Step('sin'),)))"
    )


def test_a_transform_that_only_pairs_find_wrong() -> None:
    """Dropping a detach keeps every value; gradients then flow where they did not."""

    def without_detach(trace: Trace) -> Trace:
        detached = {e.outputs[0]: e.args[0] for e in trace.equations if e.op == ops.STOP_GRADIENT}
        read = lambda var: detached.get(var, var)
        equations = tuple(replace(e, args=tuple(map_arg(read, arg) for arg in e.args)) for e in trace.equations)
        return replace(trace, equations=equations, outputs=tuple(map_arg(read, atom) for atom in trace.outputs))

    with pytest.raises(LawBroken, match=r'^without_detach breaks the law "commutes with vjp"'):
        check_transform(without_detach, max_examples=300)


def test_a_transform_that_raises_is_broken_too() -> None:
    def refuses_bodies(trace: Trace) -> Trace:
        if any(equation.bodies for equation in trace.equations):
            raise NotImplementedError("bodies")
        return trace

    with pytest.raises(LawBroken, match="and there is no trace that it becomes") as caught:
        check_transform(refuses_bodies, keeps="nothing", max_examples=100)
    assert "NotImplementedError: bodies" in str(caught.value)
