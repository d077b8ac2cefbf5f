"""The data: equality up to names, hashes, pickles, canonical numbering; and evaluate, its meaning."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.messages import message_of
from tests.unit.small_traces import (
    ADD,
    MUL,
    OWNED,
    SIN,
    TRACES,
    aten,
    blocks,
    example_inputs,
    f32,
    leaves,
    masked_gradients,
    same_bits,
    splits,
)
from thunder_fn.errors import InvalidTrace, MissingRule, TraceTypeError
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.trace import (
    Constant,
    Equation,
    Literal,
    NumberType,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    canonical,
    map_arg,
    subtraces,
    type_of,
)

ROOT = Path(__file__).parents[2]


def _returning(value: object) -> Trace:
    return TraceBuilder().build((Literal(value),))


@pytest.mark.parametrize("build", TRACES)
def test_equal_programs_are_equal_values(build: Callable[[], Trace]) -> None:
    a, b = build(), build()
    assert a == b and hash(a) == hash(b) and a is not b


def test_different_programs_differ() -> None:
    traces = [build() for build in TRACES]
    assert len(set(traces)) == len(traces)


@pytest.mark.parametrize(
    "values", [(1, 1.0, True, 1 + 0j), (0, 0.0, -0.0, False), ((1,), (2,)), (torch.float32, torch.float64)]
)
def test_literals_of_different_types_differ(values: tuple[object, ...]) -> None:
    assert len({Literal(value) for value in values}) == len(values)
    assert [[Literal(a) == Literal(b) for a in values] for b in values] == [[a is b for a in values] for b in values]


def test_nan_literals_are_equal() -> None:
    assert _returning(float("nan")) == _returning(-float("nan"))
    assert _returning(1) != _returning(True) != _returning(1.0)


def test_names_and_sources_take_no_part_in_equality() -> None:
    def build(name: str, source: Source | None) -> Trace:
        b = TraceBuilder(name)
        return b.build(b.add(SIN, (b.input(f32(3)),), (f32(3),), source=source))

    assert build("f", None) == build("g", Source("a.py", 1, "f")) == build("f", None).renamed("h")
    assert build("f", None).renamed("h").name == "h"


def test_constants_are_equal_by_identity_unless_the_trace_owns_them() -> None:
    def constant(tensor: torch.Tensor, owned: bool) -> Constant:
        return Constant(Var(0, f32(4)), tensor, owned)

    assert constant(OWNED, False) == constant(OWNED, False)
    assert constant(OWNED, False) != constant(OWNED.clone(), False)
    assert constant(OWNED, True) == constant(OWNED.clone(), True)
    assert constant(OWNED, True) != constant(OWNED + 1, True)
    assert constant(torch.tensor([float("nan")]), True) == constant(torch.tensor([float("nan")]), True)
    assert constant(torch.tensor([0.0]), True) != constant(torch.tensor([-0.0]), True)


@pytest.mark.parametrize("offset", [1, 7])
@pytest.mark.parametrize("build", TRACES)
def test_renaming_changes_nothing(build: Callable[[], Trace], offset: int) -> None:
    trace = build()
    renamed = canonical(*_rename(trace, offset), trace.constraints, name=trace.name)
    assert renamed == trace and hash(renamed) == hash(trace) and str(renamed) == str(trace)


def _rename(trace: Trace, offset: int) -> tuple[object, ...]:
    """The parts of a trace, its variables numbered otherwise."""

    def new(var: Var) -> Var:
        return Var(1000 - offset * var.index, var.type)

    def equation(e: Equation) -> Equation:
        kwargs = tuple((key, map_arg(new, arg)) for key, arg in e.kwargs)
        return Equation(e.op, map_arg(new, e.args), kwargs, map_arg(new, e.outputs), e.bodies, e.source)

    constants = tuple(Constant(new(c.var), c.tensor, c.owned) for c in trace.constants)
    return map_arg(new, trace.inputs), tuple(map(equation, trace.equations)), map_arg(new, trace.outputs), constants


def _pickled() -> list[Trace]:
    """Those whose constants are all owned, so that a copy is equal."""
    return [leaves(), splits(), masked_gradients()]


def test_pickles() -> None:
    for trace in _pickled():
        copy = pickle.loads(pickle.dumps(trace))
        assert copy == trace and hash(copy) == hash(trace) and str(copy) == str(trace)
    copy = pickle.loads(pickle.dumps(blocks()))
    assert copy != blocks(), "a tensor held by reference is another one after unpickling"
    inputs = example_inputs(copy)
    assert torch.equal(evaluate(copy, inputs)[0], evaluate(blocks(), inputs)[0])


def test_pickles_from_a_process_with_other_hashes(tmp_path: Path) -> None:
    program = """if True:
        import pathlib, pickle, sys
        from tests.unit.test_trace import _pickled
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(_pickled()))
    """
    file = tmp_path / "traces.pickle"
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program, str(file)], check=True, env=env)
    copies = pickle.loads(file.read_bytes())
    assert copies == _pickled() and set(copies) == set(_pickled())


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (TensorType(torch.bfloat16, (2, 3)), "bf16[2, 3]"),
        (TensorType(torch.bool, ()), "bool[]"),
        (TensorType(torch.uint8, (0,)), "u8[0]"),
        (TensorType(torch.complex64, (1,)), "c64[1]"),
        (TensorType(torch.float8_e4m3fn, (1,)), "f8_e4m3fn[1]"),
        (TensorType(torch.int64, (1,), torch.device("cuda", 0)), "cuda:0 i64[1]"),
        (NumberType(int), "int"),
    ],
)
def test_types_print(type: Type, text: str) -> None:
    assert str(type) == text


def test_a_literal_of_another_type_has_no_type() -> None:
    with pytest.raises(InvalidTrace) as error:
        type_of(Literal("text"))
    assert message_of(error.value) == "a literal of type str has no type in a trace; only numbers and None do"


def test_numbering_is_dense() -> None:
    x, y = Var(0, f32(3)), Var(2, f32(3))
    with pytest.raises(InvalidTrace) as error:
        Trace((x,), (Equation(SIN, (x,), (), (y,)),), (y,), (), ())
    message = "variables are numbered densely in binding order, but v2 is bound by aten.sin.default where v1 is due"
    assert message_of(error.value) == message
    with pytest.raises(InvalidTrace) as error:
        Trace((y,), (), (y,), (), ())
    assert message_of(error.value) == "variables are numbered densely in binding order, but v2 is bound where v0 is due"


def test_canonical_finds_unbound_and_twice_bound_variables() -> None:
    x, y = Var(0, f32(3)), Var(1, f32(3))
    with pytest.raises(InvalidTrace) as error:
        canonical((x,), (Equation(SIN, (y,), (), (y,)),), (y,), (), ())
    assert message_of(error.value) == "v1: f32[3] is used before it is bound"
    with pytest.raises(InvalidTrace) as error:
        canonical((x,), (Equation(SIN, (x,), (), (x,)),), (x,), (), ())
    assert message_of(error.value) == "v0 is bound twice"


def test_builder_shares_constants_and_drops_unused_ones() -> None:
    b = TraceBuilder()
    x = b.input(f32(4))
    b.constant(torch.ones(4))
    (y,) = b.add(ADD, (x, b.constant(OWNED)), (f32(4),))
    (y,) = b.add(ADD, (y, b.constant(OWNED)), (f32(4),))
    trace = b.build((y,))
    assert [constant.tensor for constant in trace.constants] == [OWNED] and trace.constants[0].tensor is OWNED


def test_operands_come_in_order_with_repeats() -> None:
    (split, _, cat) = splits().equations
    assert [str(var) for var in cat.operands] == ["v2", "v3", "v2"]
    assert [str(var) for var in split.operands] == ["v0"]


def test_subtraces_are_each_given_once() -> None:
    assert [t.name for t in subtraces(blocks(5))] == ["program", "Block", "layer_norm"]


# ---- evaluate ----


def test_evaluate_returns_inputs_and_literals() -> None:
    x, y = torch.rand(2, 3), torch.rand(3)
    product, same, one = evaluate(leaves(), (x, y))
    assert torch.equal(product, x * y) and same is x and one == 1.0


def test_evaluate_binds_none() -> None:
    grad, x, weight = example_inputs(masked_gradients())
    d_weight, none, d_bias = evaluate(masked_gradients(), (grad, x, weight))
    assert none is None and d_weight.shape == weight.shape and torch.allclose(d_bias, grad.sum((0, 2, 3)))


def test_evaluate_binds_nothing_for_ops_without_results() -> None:
    b = TraceBuilder()
    condition = b.input(TensorType(torch.bool, ()))
    b.add(ops.leaf(aten._assert_async.msg), (condition, Literal("no")), ())
    assert evaluate(b.build((condition,)), (torch.tensor(True),)) == (torch.tensor(True),)


def test_evaluate_is_plain_pytorch() -> None:
    inputs = [x.requires_grad_() for x in example_inputs(blocks())]
    (gradient,) = torch.autograd.grad(evaluate(blocks(), inputs)[0].sum(), inputs[1])
    batched = torch.func.vmap(lambda x: evaluate(blocks(), (x, inputs[1]))[0])(torch.stack([inputs[0]] * 2))
    assert gradient.shape == (4,) and torch.allclose(batched[1], evaluate(blocks(), inputs)[0])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (torch.ones(2, 3),),
            "program: expected 2 inputs, given 1\nPass them as one tuple: `evaluate(trace, (x, y))`.",
        ),
        ((torch.ones(2, 3), torch.ones(4)), "program: input 1 (v1) must be f32[3], given f32[4]"),
        ((torch.ones(2, 3).double(), torch.ones(3)), "program: input 0 (v0) must be f32[2, 3], given f64[2, 3]"),
        ((torch.ones(2, 3), 1.0), "program: input 1 (v1) must be f32[3], given float"),
    ],
)
def test_evaluate_rejects_wrong_inputs(inputs: tuple[object, ...], message: str) -> None:
    with pytest.raises(TraceTypeError) as error:
        evaluate(leaves(), inputs)
    assert message_of(error.value) == message


def test_evaluate_names_the_equation_of_an_op_that_fails() -> None:
    def body() -> Trace:
        b = TraceBuilder("body")
        x, y = b.input(f32(3)), b.input(f32(4))
        return b.build(b.add(MUL, (x, y), (f32(3),), source=Source("model.py", 41, "forward", "h.0")))

    b = TraceBuilder()
    x, y = b.input(f32(3)), b.input(f32(4))
    trace = b.build(b.add(ops.composite("f"), (x, y), (f32(3),), bodies=(body(),)))
    with pytest.raises(RuntimeError, match="must match the size") as error:
        evaluate(trace, (torch.ones(3), torch.ones(4)))
    assert error.value.__notes__ == [
        "while thunder_fn evaluated\n"
        "in equation:  v2: f32[3] = aten.mul.Tensor(v0, v1)\n"
        "from:         model.py:41 in forward (h.0)"
    ]


def test_evaluate_has_no_rule_for_an_unknown_structured_op() -> None:
    b = TraceBuilder()
    trace = b.build(b.add(Op("structured", "no_such_op"), (b.input(f32(3)),), (f32(3),)))
    with pytest.raises(MissingRule) as error:
        evaluate(trace, (torch.ones(3),))
    assert message_of(error.value) == (
        "evaluate: there is no rule for the structured op no_such_op\n"
        "Import the module that defines the op, or register a rule for it (`thunder_fn.ir.rules`)."
    )


def test_evaluate_is_deterministic() -> None:
    for build in TRACES:
        inputs = example_inputs(build())
        assert all(map(same_bits, evaluate(build(), inputs), evaluate(build(), inputs)))
