"""Each rule of the grammar, broken once, and the exact text that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch

from tests.messages import message_of
from tests.unit.small_traces import ADD, OWNED, SIN, TRACES, aten, f32, layer_norm, register_rules
from thunder_fn.capture import capture
from thunder_fn.capture.numbers.arguments import symbolic_leaves
from thunder_fn.errors import InvalidTrace, MissingRule, ThunderError, TraceTypeError
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.check import check, check_types, fake_result_types
from thunder_fn.ir.trace import (
    Constant,
    Equation,
    Expr,
    Literal,
    NumberType,
    Op,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
)

SOURCE = Source("model.py", 41, "forward")
X, Y = Var(0, f32(3)), Var(1, f32(3))


@pytest.mark.parametrize("build", TRACES)
def test_good_traces_pass(build: Callable[[], Trace]) -> None:
    check(build())


def _message(kind: type[ThunderError], trace: Trace) -> str:
    with pytest.raises(kind) as error:
        check(trace)
    assert type(error.value) is kind
    return message_of(error.value)


def test_use_before_binding() -> None:
    trace = Trace((X,), (Equation(SIN, (Var(5, f32(3)),), (), (Y,), source=SOURCE),), (Y,), (), ())
    assert _message(InvalidTrace, trace) == (
        "program: v5 is used before it is bound\n"
        "in equation:  v1: f32[3] = aten.sin.default(v5)\n"
        "from:         model.py:41 in forward\n"
        "Bodies are closed: pass what they use as inputs."
    )


def test_return_before_binding() -> None:
    assert (
        _message(InvalidTrace, Trace((X,), (), (Var(1, f32(3)),), (), ()))
        == "program: v1 is returned before it is bound"
    )


def test_use_with_another_type() -> None:
    trace = Trace((X,), (Equation(SIN, (Var(0, f32(4)),), (), (Y,)),), (Y,), (), ())
    assert _message(TraceTypeError, trace) == (
        "program: v0 is used as f32[4], but it is bound as f32[3]\nin equation:  v1: f32[3] = aten.sin.default(v0)"
    )
    assert _message(TraceTypeError, Trace((X,), (), (Var(0, f32(4)),), (), ())) == (
        "program: v0 is returned as f32[4], but it is bound as f32[3]"
    )


def test_output_without_type() -> None:
    message = "a literal of type str has no type in a trace; only numbers and None do"
    assert _message(InvalidTrace, Trace((), (), (Literal("a"),), (), ())) == message


def test_constant_of_another_type() -> None:
    var = Var(0, f32(3))
    trace = Trace((), (), (var,), (Constant(var, OWNED),), ())
    assert _message(TraceTypeError, trace) == "program: constant v0 is f32[3], but its tensor is f32[4]"


def test_constraints_over_unknown_symbols() -> None:
    s0, s1 = sympy.Symbol("s0"), sympy.Symbol("s1")
    var = Var(0, TensorType(torch.float32, (Expr(s0),)))
    check(Trace((var,), (), (var,), (), (Expr(s0 > 5),)))
    trace = Trace((var,), (), (var,), (), (Expr(sympy.Eq(s0, s1)),))
    assert _message(InvalidTrace, trace) == "program: the constraint s0 == s1 is over s1, which nothing binds"


def _leaf(overload: torch._ops.OpOverload, *types: TensorType, inputs: tuple[TensorType, ...] = (f32(3),)) -> Trace:
    b = TraceBuilder()
    outputs = b.add(ops.leaf(overload), tuple(map(b.input, inputs)), types, source=SOURCE)
    return b.build(outputs)


@pytest.mark.parametrize(
    ("type", "text"),
    [
        (f32(4), "f32[4]"),
        (TensorType(torch.float64, (3,)), "f64[3]"),
        (TensorType(torch.float32, (3,), torch.device("meta")), "meta f32[3]"),
    ],
)
def test_leaf_with_wrong_output_type(type: TensorType, text: str) -> None:
    assert _message(TraceTypeError, _leaf(aten.sin.default, type)) == (
        f"aten.sin.default: output 0 (v1) is {text}, but the op gives f32[3]\n"
        f"in equation:  v1: {text} = aten.sin.default(v0)\n"
        "from:         model.py:41 in forward\n"
        "Take the types of outputs from the op: `check.fake_result_types(equation)` gives them."
    )


def test_leaf_with_wrong_number_of_outputs() -> None:
    assert _message(InvalidTrace, _leaf(aten.sin.default, f32(3), f32(3))) == (
        "aten.sin.default: the equation has 2 outputs, but the op gives 1\n"
        "in equation:  v1: f32[3], v2: f32[3] = aten.sin.default(v0)\n"
        "from:         model.py:41 in forward\n"
        "Take the types of outputs from the op: `check.fake_result_types(equation)` gives them."
    )


def test_leaf_that_rejects_its_operands() -> None:
    message = _message(TraceTypeError, _leaf(aten.mul.Tensor, f32(3), inputs=(f32(3), f32(4))))
    first, *_, equation, source, fix = message.splitlines()
    assert first.startswith("aten.mul.Tensor: the op rejects its operands: ")
    assert equation == "in equation:  v2: f32[3] = aten.mul.Tensor(v0, v1)"
    assert source == "from:         model.py:41 in forward" and fix == "Look at the types of the operands."


def test_leaf_that_does_not_exist() -> None:
    trace = Trace((X,), (Equation(Op("leaf", "aten.no_such_op.default"), (X,), (), (Y,)),), (Y,), (), ())
    message = "PyTorch has no op aten.no_such_op.default; is the library that defines it imported?"
    assert _message(InvalidTrace, trace) == message


def test_leaf_with_a_body() -> None:
    trace = Trace((X,), (Equation(SIN, (X,), (), (Y,), (layer_norm(),)),), (Y,), (), ())
    assert _message(InvalidTrace, trace) == (
        "aten.sin.default: a leaf has no bodies, but this one has 1\nin equation:  v1: f32[3] = aten.sin.default(v0)"
    )


def _composite(inputs: tuple[TensorType, ...], outputs: tuple[TensorType, ...], bodies: tuple[Trace, ...]) -> Trace:
    b = TraceBuilder()
    op = ops.composite("torch.nn.functional.layer_norm")
    return b.build(b.add(op, tuple(map(b.input, inputs)), outputs, bodies=bodies))


def test_composite_with_wrong_number_of_operands() -> None:
    assert _message(InvalidTrace, _composite((f32(2, 4),), (f32(2, 4),), (layer_norm(),))) == (
        "torch.nn.functional.layer_norm: the body takes 2 inputs, but there are 1 operands\n"
        "in equation:  v1: f32[2, 4] = layer_norm(v0)\n"
        "A body has one input for each operand, in order, with repeats."
    )


def test_composite_with_wrong_operand_type() -> None:
    assert _message(TraceTypeError, _composite((f32(2, 4), f32(2)), (f32(2, 4),), (layer_norm(),))) == (
        "torch.nn.functional.layer_norm: the body takes v1: f32[4], but the operand v1 is f32[2]\n"
        "in equation:  v2: f32[2, 4] = layer_norm(v0, v1)\n"
        "A body has one input for each operand, in order, with repeats."
    )


def test_composite_with_wrong_output_type() -> None:
    assert _message(TraceTypeError, _composite((f32(2, 4), f32(4)), (f32(4, 2),), (layer_norm(),))) == (
        "torch.nn.functional.layer_norm: output 0 (v2) is f32[4, 2], but the body returns f32[2, 4]\n"
        "in equation:  v2: f32[4, 2] = layer_norm(v0, v1)\n"
        "Build the equation from its body's output types."
    )


def test_composite_without_body() -> None:
    assert _message(InvalidTrace, _composite((f32(3),), (f32(3),), ())) == (
        "torch.nn.functional.layer_norm: a composite has one body, but this one has 0\n"
        "in equation:  v1: f32[3] = layer_norm(v0)"
    )


def test_bodies_are_checked() -> None:
    broken = _leaf(aten.sin.default, f32(4)).renamed("inner")
    message = _message(TraceTypeError, _composite((f32(3),), (f32(4),), (broken,)))
    assert message.startswith("aten.sin.default: output 0 (v1) is f32[4], but the op gives f32[3]\n")


def test_register_ruless_go_by_their_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    b = TraceBuilder()
    trace = b.build(b.add(Op("structured", "twice"), (b.input(f32(3)),), (f32(3),), source=SOURCE))
    assert _message(MissingRule, trace) == (
        "check: there is no rule for the structured op twice\n"
        "from:         model.py:41 in forward\n"
        "Import the module that defines the op, or register a rule for it (`thunder_fn.ir.rules`)."
    )
    register_rules(monkeypatch, "twice", check=lambda equation: check_types(equation, (f32(4),), "twice gives"))
    assert _message(TraceTypeError, trace).startswith("twice: output 0 (v1) is f32[3], but twice gives f32[4]\n")


def _types(overload: torch._ops.OpOverload, *args: object) -> object:
    b = TraceBuilder()
    read = tuple(b.input(arg) if isinstance(arg, (TensorType, NumberType)) else arg for arg in args)
    b.add(ops.leaf(overload), read, ())  # type: ignore[arg-type]
    return fake_result_types(b.build(()).equations[0])


def test_types_that_only_a_run_tells_are_skipped() -> None:
    assert _types(aten.nonzero.default, f32(3)) is None
    assert _types(aten._local_scalar_dense.default, f32()) is None
    assert _types(aten.select.int, f32(3), Literal(0), NumberType(int)) is None
    symbolic = TensorType(torch.float32, (Expr(sympy.Symbol("s0", integer=True)),))
    assert _types(aten.sin.default, symbolic) == (symbolic,)


def test_fake_results_do_not_depend_on_what_is_on() -> None:
    square = TensorType(torch.float32, (5, 5))
    types: list[object] = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        types.append(_types(aten.mm.default, square, square))
        return x.sum()

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        torch.func.vmap(torch.func.grad(inside))(torch.ones(2, 3, device="cpu"))
    assert types == [(square,)]


def test_types_on_a_device_that_is_not_here() -> None:
    there = TensorType(torch.float32, (3,), torch.device("cuda", 0))
    assert _types(aten.sin.default, there) == (there,)


def test_a_shared_body_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    register_rules(monkeypatch, "counted", check=lambda equation: calls.append(equation.op.name))
    inner = TraceBuilder("inner")
    body = inner.build(inner.add(Op("structured", "counted"), (inner.input(f32(3)),), (f32(3),)))
    b = TraceBuilder()
    x = b.input(f32(3))
    for _ in range(4):
        (x,) = b.add(ops.composite("f"), (x,), (f32(3),), bodies=(body,))
    (x,) = b.add(ADD, (x, x), (f32(3),))
    check(b.build((x,)))
    assert calls == ["counted"]


# ---- types with symbols ----


def _symbolic(f: Any, *args: Any) -> Trace:
    places = [(i, dim) for i, arg in enumerate(args) for dim in range(arg.dim())]
    return capture(f, args, symbolic=symbolic_leaves(args, places)).trace


def test_types_with_symbols_agree_for_all_numbers_and_not_for_the_hints_only() -> None:
    """`2*s0` is 6 for the hint 3, as `s0 + 3` is."""
    trace = _symbolic(lambda x: torch.cat([x, x]), torch.ones(3))
    (s0,) = trace.input_types[0].shape  # type: ignore[union-attr]
    wrong = replace(trace.equations[0].outputs[0].type, shape=(Expr(s0.value + 3),))  # type: ignore[union-attr, type-var]
    var = Var(1, wrong)  # type: ignore[arg-type]
    broken = replace(trace, equations=(replace(trace.equations[0], outputs=(var,)),), outputs=(var,))
    check(trace)
    with pytest.raises(
        TraceTypeError,
        match=r"output 0 \(v1\) is f32\[s0 \+ 3\], but the op gives f32\[2\*s0\], as where s0 = \d+\nin equation",
    ):
        check(broken)


def test_what_an_op_takes_for_granted_is_a_constraint() -> None:
    trace = _symbolic(lambda x, y: x.reshape(2, -1) + y.reshape(-1, 2).t(), torch.ones(6), torch.ones(6))
    check(trace)
    assert str(trace.constraints[-1]) == "(s0 // 2) == (s1 // 2)"
    message = _message(TraceTypeError, replace(trace, constraints=trace.constraints[:-1]))
    where = re.search(r"which no constraint says, as where s0 = (\d+), s1 = (\d+)\nin equation:  v5", message)
    assert where is not None and int(where[1]) // 2 != int(where[2]) // 2
    with pytest.raises(
        TraceTypeError, match=r"the op gives these types where \(s0 % 2\) == 0, which no constraint says"
    ):
        check(replace(trace, constraints=trace.constraints[1:]))


def test_sizes_found_in_data_are_checked_too() -> None:
    trace = capture(lambda x: x[x > 0] + x[x > 1], (torch.arange(5.0),)).trace
    check(trace)
    bare = inline(trace)
    broken = [equation for equation in bare.equations if equation.op.name != "aten._assert_scalar.default"]
    check(bare)
    with pytest.raises(TraceTypeError, match=r"u0 == u1, which no constraint says, as where u0 = \d, u1 = \d"):
        check(cut(bare, equations=broken))
