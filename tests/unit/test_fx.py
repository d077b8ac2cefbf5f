"""Traces to FX graphs and back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.small_traces import OWNED, TRACES, WEIGHT, aten, blocks, example_inputs, f32, leaves, same_bits, splits
from thunder_fn.errors import CaptureError, MissingRule, UnsupportedInput
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir import ops
from thunder_fn.ir.check import check
from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.trace import Expr, NoneType, NumberType, Op, Source, Trace, TraceBuilder, subtraces


@pytest.mark.parametrize("build", TRACES)
def test_the_graph_computes_what_evaluate_does(build: Callable[[], Trace]) -> None:
    trace = build()
    inputs = example_inputs(trace)
    module = to_fx(trace)
    module.graph.lint()
    assert all(same_bits(a, b) for a, b in zip(module(*inputs), evaluate(trace, inputs), strict=True))


@pytest.mark.parametrize("given", ["types", "inputs"])
@pytest.mark.parametrize("build", TRACES)
def test_round_trip(build: Callable[[], Trace], given: str) -> None:
    trace = build()
    inputs = example_inputs(trace)
    back = from_fx(to_fx(trace), inputs if given == "inputs" else None)
    check(back)
    assert all(same_bits(a, b) for a, b in zip(evaluate(back, inputs), evaluate(trace, inputs), strict=True))
    assert from_fx(to_fx(back)) == back


def test_a_flat_trace_comes_back_equal() -> None:
    assert from_fx(to_fx(leaves())) == leaves()
    assert Trace.from_fx(leaves().to_fx()) == leaves()
    assert from_fx(to_fx(splits())) == splits()


def test_constants_are_attributes_by_reference() -> None:
    module = to_fx(blocks(3))
    assert [name for name, _ in module.named_parameters()] == ["constant_1"]
    assert [name for name, _ in module.named_buffers()] == ["constant_0"]
    assert module.constant_1 is WEIGHT and module.constant_0 is OWNED
    constants = {id(constant.tensor): constant.owned for constant in from_fx(module).constants}
    assert constants == {id(WEIGHT): False, id(OWNED): True}


def test_nodes_say_their_type_and_line() -> None:
    b = TraceBuilder()
    source = Source("model.py", 41, "forward", "h.0")
    module = to_fx(b.build(b.add(ops.leaf(aten.sin.default), (b.input(f32(3)),), (f32(3),), source=source)))
    x, sin, _ = module.graph.nodes
    assert str(x.meta["thunder_fn_type"]) == str(sin.meta["thunder_fn_type"]) == "f32[3]"
    assert sin.stack_trace == '  File "model.py", line 41, in forward\n'
    assert from_fx(module).equations[0].source == source
    del sin.meta["thunder_fn_source"]
    assert from_fx(module).equations[0].source == Source("model.py", 41, "forward")


def test_structured_ops_have_no_graph() -> None:
    b = TraceBuilder()
    trace = b.build(b.add(Op("structured", "cond"), (b.input(f32(3)),), (f32(3),)))
    with pytest.raises(MissingRule) as error:
        to_fx(trace)
    assert message_of(error.value) == (
        "cond: to_fx cannot express a structured op as ATen calls\n"
        "in equation:  v1: f32[3] = cond(v0)\n"
        "Run the trace with an executor, or apply to_fx to the bodies of the equation."
    )


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_graphs_of_make_fx(mode: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        values, indices = torch.topk(x * WEIGHT, 2)
        return {"a": (values, None, 3), "b": torch.cat(torch.split(y, 2)) + OWNED[0], "c": indices}

    inputs = (torch.rand(4), torch.rand(4))
    module = make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    trace = from_fx(module)
    check(trace)
    a, none, three, b, c = evaluate(trace, inputs)
    expected = f(*inputs)
    assert none is None and three == 3 and trace.output_types[1:3] == (NoneType(), NumberType(int))
    assert torch.equal(a, expected["a"][0]) and torch.equal(b, expected["b"]) and torch.equal(c, expected["c"])


def test_symbols_of_make_fx() -> None:
    """Reverse mode and vmap are torch.func's there. PyTorch has no forward mode, which is refused by name."""
    f = lambda x: (x.sin() * x).sum()
    for transformed in (tfn.grad(f), tfn.vmap(tfn.grad(f))):
        x = torch.rand(2, 3)
        for mode in ("symbolic", "fake"):
            assert torch.equal(make_fx(transformed, tracing_mode=mode)(x)(x + 1), transformed(x + 1))
    assert torch.equal(
        make_fx(tfn.grad(f), tracing_mode="symbolic")(x)(torch.ones(4, 5)), tfn.grad(f)(torch.ones(4, 5))
    )
    with pytest.raises(UnsupportedInput, match="whose sizes are symbols of PyTorch's `make_fx`"):
        make_fx(tfn.jacfwd(f), tracing_mode="symbolic")(x)


@pytest.mark.parametrize("count", (1, 2, 3))
def test_a_switch_under_make_fx_is_pytorchs_cond(count: int) -> None:
    branches = (torch.sin, torch.cos, lambda x: x * 3)[:count]
    f = lambda i, x: tfn.switch(i, branches, (x,))
    x = torch.rand(4)
    module = make_fx(f)(torch.tensor(0), x)
    for i in (-1, 0, 1, 2, 5):
        assert torch.equal(module(torch.tensor(i), x), branches[min(max(i, 0), count - 1)](x))


def test_choices_and_loops_under_make_fx_are_pytorchs() -> None:
    """Neither the branch nor the number of steps of the example is baked in."""

    def f(x: torch.Tensor) -> torch.Tensor:
        x = tfn.cond(x.sum() > 0, torch.sin, lambda x: x * 2, (x,))
        return tfn.while_loop(lambda i, x: (x.sum() < 9) & (i < 9), lambda i, x: (i + 1, x + 1), (torch.tensor(0), x))[
            1
        ]

    module = make_fx(f, _allow_non_fake_inputs=True)(torch.ones(4))
    for x in (torch.ones(4), -torch.ones(4)):
        torch.testing.assert_close(module(x), f(x))


LOOPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scan": lambda x: tfn.scan(lambda c, x: (c * 2 + x, c - x), torch.zeros(5), x)[1],
    "scan over ints": lambda x: tfn.scan(lambda c, _: (c * 2 + 1, c + 0), x[0] * 1, length=x.shape[0])[1],
    "scan along dim 1": lambda x: tfn.scan(lambda c, x: (c + x, c - x), torch.zeros(5), x.T, dim=1, reverse=True)[1],
    "map": lambda x: tfn.map(lambda x, y: x.sin() * y, x, x[0] * 1),
    "map along dim 1": lambda x: tfn.map(lambda x: x.sin(), x.T, dim=1),
    "map, some at a time": lambda x: tfn.map(lambda x: x.sin(), x, batch_size=2),
    "fori_loop": lambda x: tfn.fori_loop(0, x.shape[0], lambda i, total: total * 2 + x.sum(), x[0] * 1),
    "associative_scan": lambda x: tfn.associative_scan(lambda a, b: a * b, x, 0, reverse=True),
}


CHOICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cond": lambda x: tfn.cond(x.shape[0] == 4, torch.sin, torch.cos, (x,)),
    "switch": lambda x: tfn.switch(x.shape[0] - 4, [torch.sin, torch.cos, torch.exp], (x,)),
    "functionalize": tfn.functionalize(lambda x: tfn.cond(x.shape[0] == 4, torch.sin, torch.cos, (x,)).add_(1)),
    "gradient of map": lambda x: torch.autograd.grad(tfn.map(lambda x: x.sin(), (y := x.requires_grad_())).sum(), y)[0],
}


@pytest.mark.parametrize("name", [*LOOPS, *CHOICES])
def test_symbolic_sizes_of_make_fx_stay_open_in_loops_and_choices(name: str) -> None:
    f = (LOOPS | CHOICES)[name]
    module = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.rand(4, 5))
    for steps in (4, 7):
        x = torch.rand(steps, 5)
        torch.testing.assert_close(module(x), f(x))


class Chooses(torch.nn.Module):
    """A choice and a loop that torch.export looks through before it records."""

    def forward(self, x: torch.Tensor, positive: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        y = tfn.cond(positive, lambda x: x * factor.item(), lambda x: x - 1, (x,))
        return tfn.while_loop(lambda i, y: i < x.shape[0], lambda i, y: (i + 1, y + i), (0, y))[1]


def test_choices_and_loops_under_torch_export_stay_open() -> None:
    args = torch.ones(4), torch.tensor(True), torch.tensor(3)
    sizes = ({0: torch.export.Dim("n", min=2, max=9)}, None, None)
    module = torch.export.export(Chooses(), args, dynamic_shapes=sizes, strict=False).module()
    for count, positive in ((4, True), (6, False)):
        given = torch.rand(count), torch.tensor(positive), torch.tensor(5)
        torch.testing.assert_close(module(*given), Chooses()(*given))


def test_a_traced_loop_under_make_fx_keeps_the_number_of_steps_open() -> None:
    f = tfn.functionalize(lambda x: tfn.while_loop(lambda x: x.sum() < 99, lambda x: x + 1, (x,)))
    module = make_fx(f)(torch.zeros(4))
    for x in (torch.zeros(4), torch.full((4,), 20.0)):
        assert torch.equal(module(x)[0], f(x)[0])


def test_symbolic_sizes_become_expressions() -> None:
    module = make_fx(lambda x: torch.cat([x, x]), tracing_mode="symbolic")(torch.rand(3, 4))
    trace = from_fx(module)
    (x,), (y,) = trace.input_types, trace.output_types
    assert all(isinstance(dim, Expr) for dim in x.shape)
    assert str(y.shape[0]) == f"2*{x.shape[0]}" and y.shape[1] == x.shape[1]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_graphs_of_torch_export() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    program = torch.export.export(module, (torch.rand(2, 3),)).run_decompositions({})
    trace = from_fx(program.graph_module)
    inputs = (*(p.detach() for p in module.parameters()), torch.rand(2, 3))
    assert torch.equal(evaluate(trace, inputs)[0], module(inputs[-1]))


def _graph(build: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda graph, x: graph.call_function(operator.add, (x, x)),
            "from_fx: node 'add': call_function of <built-in function add> is no call of an ATen overload\n"
            "Pass a graph of ATen calls, such as make_fx, torch.export and AOTAutograd give.",
        ),
        (
            lambda graph, x: graph.call_method("sin", (x,)),
            "from_fx: node 'sin': call_method of sin is no call of an ATen overload\n"
            "Pass a graph of ATen calls, such as make_fx, torch.export and AOTAutograd give.",
        ),
        (
            lambda graph, x: graph.call_function(aten.sin_.default, (x,)),
            "from_fx: node 'sin__default': aten.sin_.default writes to its inputs\n"
            "Functionalize the graph first (torch.func.functionalize).",
        ),
        (
            lambda graph, x: graph.call_function(operator.getitem, (x, 0)),
            "from_fx: node 'getitem': operator.getitem picks from the results of a call, not from inside a tensor",
        ),
        (
            lambda graph, x: graph.call_function(aten.sin.default, (slice(0, 1),)),
            "from_fx: node 'sin_default': an argument of type slice has no place in a trace",
        ),
    ],
)
def test_nodes_that_are_no_leaf(build: Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node], message: str) -> None:
    module = _graph(build)
    for node in module.graph.nodes:
        node.meta["thunder_fn_type"] = f32(3)
    with pytest.raises(CaptureError) as error:
        from_fx(module)
    assert message_of(error.value) == message


def test_nodes_without_type() -> None:
    module = _graph(lambda graph, x: graph.call_function(aten.sin.default, (x,)))
    with pytest.raises(CaptureError) as error:
        from_fx(module)
    assert message_of(error.value) == (
        "from_fx: node 'x': its type is not known\nPass example_inputs, from which types are computed."
    )
    assert from_fx(module, [torch.rand(3)]).output_types == (f32(3),)


def test_a_write_without_gradients_is_its_value() -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        with torch.no_grad():
            y.clamp_(min=0)
        return y.sin()

    x = torch.linspace(-1, 1, 4)
    trace = tfn.trace(clamped, x)
    assert "no_grad_write(" in str(trace)
    assert torch.equal(trace.to_fx()(x)[0], clamped(x))


def test_a_growing_buffer_has_no_graph() -> None:
    step = lambda n, v: (n + 1, v.sin())
    f = lambda x: tfn.while_loop(lambda n, v: n < 3, step, (torch.tensor(0), x))[1].sum()
    with pytest.raises(MissingRule) as error:
        tfn.trace(tfn.grad(f), torch.ones(2)).to_fx()
    assert message_of(error.value).splitlines()[0] == "while_loop: to_fx cannot express a structured op as ATen calls"
    trace = tfn.trace(tfn.grad(f), torch.ones(2))
    (body,) = [t for t in subtraces(trace) if any(e.op.name == "carry_at" for e in t.equations)]
    with pytest.raises(MissingRule) as error:
        body.to_fx()
    text = message_of(error.value)
    assert text.startswith("carry_at: reverse mode of a while_loop without max_steps keeps a buffer that grows")
    assert text.endswith("Give the loop max_steps=, or run the trace with the torch executor.")


def test_a_number_that_is_found_in_data_has_no_place_in_a_graph() -> None:
    """It was written into the graph's code as a name that is not defined there."""
    with pytest.raises(MissingRule) as error:
        tfn.trace(lambda x: x * x.sum().item(), torch.ones(2)).to_fx()
    what, _, where, fix = message_of(error.value).split("\n")
    assert what == "aten.mul.Tensor: to_fx cannot express a number that depends on zuf0"
    assert where.startswith("from: ") and "test_fx.py" in where
    assert fix == (
        "Run the trace with an executor; or trace the function with static sizes and numbers, and keep `.item()` out of it."
    )
