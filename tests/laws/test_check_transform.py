"""`check_transform` passes a right transform, and shows a tiny trace for a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thunder_fn import ops
from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.testing import LawBroken, check_transform
from thunder_fn.trace import Trace

SIN, COS = ops.leaf(ops.aten.sin.default), ops.leaf(ops.aten.cos.default)


def cosine_for_sine(trace: Trace) -> Trace:
    """A wrong transform."""
    return replace(trace, equations=tuple(replace(e, op=COS) if e.op == SIN else e for e in trace.equations))


def test_a_right_transform_passes() -> None:
    check_transform(lambda trace: cse(dce(trace)), max_examples=10)


def test_a_wrong_transform_shrinks_to_a_tiny_trace() -> None:
    with pytest.raises(LawBroken, match="breaks the law: keeps values") as caught:
        check_transform(cosine_for_sine, max_examples=100)
    smallest = str(caught.value).split("smallest trace:\n")[1]
    assert smallest.count("aten.") == 1 and "aten.sin.default" in smallest
