"""A trace prints as a Python program, and the program computes what evaluate does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.small_traces import (
    TRACES,
    aten,
    block,
    blocks,
    example_inputs,
    f32,
    layer_norm,
    register_rules,
    same_bits,
    splits,
)
from thunder_fn.errors import MissingRule
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.pretty import format_equation, to_text
from thunder_fn.ir.text import identifier, literal_text
from thunder_fn.ir.trace import Literal, NumberType, Op, Source, TensorType, Trace, TraceBuilder


@pytest.mark.parametrize("build", TRACES)
def test_the_text_computes_what_evaluate_does(build: Callable[[], Trace]) -> None:
    trace = build()
    inputs = example_inputs(trace)
    printed, evaluated = trace.python_callable()(*inputs), evaluate(trace, inputs)
    assert all(same_bits(a, b) for a, b in zip(printed, evaluated, strict=True))


@pytest.mark.parametrize("build", TRACES)
def test_equal_traces_have_equal_texts(build: Callable[[], Trace]) -> None:
    assert to_text(build()) == to_text(build())


def test_composites_print_once() -> None:
    expected = """\
def program(v0, v1):
    # v0: f32[2, 4]
    # v1: f32[4]
    # v2: f32[4] constant
    v3 = Block(v0, v1)  # f32[2, 4] at h.0
        # def Block(v0, v1):
        #   v2: f32[4] constant
        #   v3 = layer_norm(v0, (4,), v1)  # f32[2, 4]
            # def layer_norm(v0, v1):
            #   v2, v3, v4 = aten.native_layer_norm.default(v0, (4,), v1, None, 1e-05)  # f32[2, 4], f32[2, 1], f32[2, 1]
            #   return (v2,)
        #   v4 = aten.add.Tensor(v3, v2)  # f32[2, 4]
        #   return (v4,)
    v4 = Block(v3, v1)  # f32[2, 4] at h.1, as above
    v5 = layer_norm(v4, normalized_shape=(4,), weight=v2)  # f32[2, 4], as above
    return (v5,)
"""
    assert str(blocks()) == expected


def test_the_text_grows_with_distinct_code_only() -> None:
    assert len(str(blocks(48)).splitlines()) - len(str(blocks(2)).splitlines()) == 46


def test_results_unpack_as_the_op_nests_them() -> None:
    expected = """\
def program(v0):
    # v0: f32[4, 2]
    v1, v2 = aten.split.Tensor(v0, 2)  # f32[2, 2], f32[2, 2]
    (v3,) = aten.split.Tensor(v1, 2)  # f32[2, 2]
    v4 = aten.cat.default((v2, v3, v2), dim=0)  # f32[6, 2]
    return (v4, v3)
"""
    assert str(splits()) == expected


def test_a_list_beside_a_tensor_unpacks() -> None:
    with torch.library._scoped_library("thunder_pretty", "FRAGMENT") as library:
        library.define("pair(Tensor x) -> (Tensor, Tensor[], Tensor)")
        library.impl("pair", lambda x: (x, [x + 1, x + 2], x + 3), "CompositeExplicitAutograd")
        b = TraceBuilder("thunder_pretty")
        outputs = b.add(Op("leaf", "thunder_pretty.pair.default"), (b.input(f32(2)),), (f32(2),) * 4)
        trace = b.build(outputs)
        assert "    v1, (v2, v3), v4 = thunder_pretty.pair.default(v0)  # f32[2]," in str(trace)
        assert [int(x[0]) for x in trace.python_callable()(torch.zeros(2))] == [0, 1, 2, 3]


def test_names_that_python_or_the_text_uses_are_avoided() -> None:
    b = TraceBuilder("aten")
    x = b.input(f32(2, 4))
    w = b.input(f32(4))
    for name in ("my.torch", "v1", "lambda", "flat", "aten", "torch.nn.functional.layer_norm", "my.layer_norm"):
        (x,) = b.add(ops.composite(name), (x, w), (f32(2, 4),), bodies=(layer_norm() if "norm" in name else block(),))
    trace = b.build((x,))
    names = [line.split(" = ")[1].split("(")[0] for line in str(trace).splitlines() if line.startswith("    v")]
    assert names == ["torch_1", "v1_", "lambda_", "flat_1", "aten_2", "layer_norm", "layer_norm_1"]
    assert str(trace).startswith("def aten_1(v0, v1):\n")
    inputs = example_inputs(trace)
    assert torch.equal(trace.python_callable()(*inputs)[0], evaluate(trace, inputs)[0])


def test_the_same_body_under_another_name_is_not_printed_again() -> None:
    b = TraceBuilder()
    x, w = b.input(f32(2, 4)), b.input(f32(4))
    (x,) = b.add(ops.composite("a.f"), (x, w), (f32(2, 4),), bodies=(layer_norm(),))
    (x,) = b.add(ops.composite("b.g"), (x, Literal((1, 2)), w), (f32(2, 4),), bodies=(layer_norm(),))
    assert "    v3 = g(v2, (1, 2), v1)  # f32[2, 4], as f above\n" in str(b.build((x,)))


def test_objects_that_python_cannot_spell_are_bound_by_name() -> None:
    b = TraceBuilder()
    x, w = b.input(f32(2, 4)), b.input(f32(4))
    config = frozenset({1, 2})
    (x,) = b.add(ops.composite("f"), (x, w, Literal(config)), (f32(2, 4),), bodies=(layer_norm(),))
    trace = b.build((x,))
    assert "    v2 = f(v0, v1, frozenset)  # f32[2, 4]\n" in str(trace)
    assert len(trace.python_callable()(*example_inputs(trace))) == 1


def test_operands_that_are_numbers_are_told_from_literals() -> None:
    def scale() -> Trace:
        b = TraceBuilder("scale")
        x, factor = b.input(f32(3)), b.input(NumberType(float))
        return b.build(b.add(ops.leaf(aten.mul.Scalar), (x, factor), (f32(3),)))

    b = TraceBuilder()
    x, n = b.input(f32(3)), b.input(NumberType(float))
    (y,) = b.add(ops.composite("scale"), (Literal((9.0, 9.0)), x, n), (f32(3),), bodies=(scale(),))
    (y,) = b.add(ops.composite("scale"), (y, Literal(9.0)), (f32(3),), kwargs=(("by", n),), bodies=(scale(),))
    trace = b.build((y,))
    assert trace.python_callable()(torch.ones(3), 2.0)[0].tolist() == [4.0, 4.0, 4.0]


def _branch(op: object) -> Trace:
    b = TraceBuilder("branch")
    x = b.input(f32(3))
    return b.build(b.add(ops.leaf(op), (x,), (f32(3),)))  # type: ignore[arg-type]


def _cond(name: str) -> Trace:
    b = TraceBuilder()
    pred, x = b.input(TensorType(torch.bool, ())), b.input(f32(3))
    bodies = (_branch(aten.sin.default), _branch(aten.cos.default), _branch(aten.sin.default))
    source = Source("model.py", 41, "forward")
    return b.build(b.add(Op("structured", name), (pred, (x,)), (f32(3),), bodies=bodies, source=source))


def test_structured_equations_print_each_body_and_run_their_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    register_rules(monkeypatch, "choose", evaluate=lambda bodies, pred, xs: evaluate(bodies[0 if pred else 1], xs))
    trace = _cond("choose")
    expected = """\
def program(v0, v1):
    # v0: bool[]
    # v1: f32[3]
    v2 = choose(v0, (v1,))  # f32[3]
        # def body_0(v0):
        #   v1 = aten.sin.default(v0)  # f32[3]
        #   return (v1,)
        # def body_1(v0):
        #   v1 = aten.cos.default(v0)  # f32[3]
        #   return (v1,)
        # body_2: as body 0 of choose above
    return (v2,)
"""
    assert str(trace) == expected
    x = torch.arange(3.0)
    for pred in (True, False):
        expected = evaluate(trace, (torch.tensor(pred), x))
        assert torch.equal(trace.python_callable()(torch.tensor(pred), x)[0], expected[0])


def test_a_missing_rule_is_an_error_of_the_call_not_of_the_text() -> None:
    program = _cond("no_such_op").python_callable()
    with pytest.raises(MissingRule, match=r"^evaluate: there is no rule for the structured op no_such_op\n"):
        program(torch.tensor(True), torch.ones(3))


def test_format_equation() -> None:
    assert format_equation(blocks().equations[0]) == "v3: f32[2, 4] = Block(v0, v1)"
    assert format_equation(splits().equations[0]) == "v1: f32[2, 2], v2: f32[2, 2] = aten.split.Tensor(v0, 2)"
    assert format_equation(_cond("cond").equations[0]) == "v2: f32[3] = cond(v0, (v1,))"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch.nn.functional.relu", "relu"),
        ("transformer.h.0", "h_0"),
        ("0", "_0"),
        ("f.<lambda>", "lambda_"),
        ("a b", "a_b"),
        ("", "unnamed"),
    ],
)
def test_identifier(name: str, expected: str) -> None:
    assert identifier(name) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), 'float("nan")'),
        (float("-inf"), 'float("-inf")'),
        (-0.0, "-0.0"),
        (complex(-0.0, float("inf")), 'complex(-0.0, float("inf"))'),
        (torch.device("cuda", 1), 'torch.device("cuda:1")'),
        (torch.strided, "torch.strided"),
        (torch.channels_last, "torch.channels_last"),
        (((1, 2.0), ("a\n", None)), "((1, 2.0), ('a\\n', None))"),
        ((), "()"),
    ],
)
def test_literals_are_valid_python(value: object, expected: str) -> None:
    assert literal_text(value, str) == expected
    assert repr(eval(expected, {"torch": torch})) == repr(value)
