"""Traces to and from `torch.fx`, where FX tools, `torch.compile` backends and `torch.export` meet
them.

The FX form is flat: composites are inlined down to their leaves. Each node keeps its type in
`meta["thunder_fn_type"]`: a tuple of types if it has several results, nested as the op nests them.
Its equation's source is in `meta["thunder_fn_source"]`, and the user's line in `stack_trace`, as FX
expects it.
"""

from __future__ import annotations

import cmath
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from thunder_fn.errors import CaptureError, MissingRule, kind_of
from thunder_fn.ir import ops
from thunder_fn.ir.check import fake_result, types_in
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.rules import lowered
from thunder_fn.ir.symbols import symbols_in, without_vars
from thunder_fn.ir.text import escaped, identifier
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Expr,
    Literal,
    NoneType,
    NumberType,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    all_args,
    type_of_value,
)
from thunder_fn.torch_internals import FakeTensorMode, OpOverload, detect_fake_mode

_Path: TypeAlias = tuple[int, ...]
_Env: TypeAlias = dict[torch.fx.Node, Any]
_LITERALS = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def to_fx(trace: Trace) -> torch.fx.GraphModule:
    """The trace as an FX graph module: a placeholder for each input, a call for each leaf, a tuple
    of outputs.

    Closed-over tensors become its buffers and parameters, by reference.

    Law: ``to_fx(t)(*xs)`` is bitwise ``evaluate(t, xs)``.

    Raises:
        MissingRule: the trace has a structured op, which has no ATen overload, or a number that is
            not known yet.
    """
    graph = torch.fx.Graph()
    inputs = [_placeholder(graph, var) for var in trace.inputs]
    constants: dict[int, tuple[torch.fx.Node, torch.Tensor]] = {}
    graph.output(_inline(graph, trace, inputs, constants))
    attributes = {str(node.target): tensor for node, tensor in constants.values()}
    return torch.fx.GraphModule(attributes, graph, class_name=identifier(trace.name))


def _placeholder(graph: torch.fx.Graph, var: Var) -> torch.fx.Node:
    node = graph.placeholder(str(var))
    node.meta["thunder_fn_type"] = var.type
    return node


def _inline(
    graph: torch.fx.Graph, trace: Trace, inputs: list[Any], constants: dict[int, Any]
) -> tuple[Any, ...]:
    """Append the leaves of a trace, as evaluate does with nodes for values. Returns its outputs."""
    env = [*inputs, *(_attribute(graph, c.tensor, c.owned, constants) for c in trace.constants)]
    for equation in trace.equations:
        body = lowered(equation)
        if body is not None:
            env.extend(
                _inline(graph, body, [env[var.index] for var in equation.operands], constants)
            )
        elif equation.op.kind == "leaf":
            if _symbols_of_numbers(equation):
                raise _not_a_number(equation)
            env.extend(_call(graph, equation, env))
        else:
            raise _not_a_call(equation)
    return tuple(_read(graph, env, atom) for atom in trace.outputs)


def _not_a_call(equation: Equation) -> MissingRule:
    """The error for a structured op, which is no ATen call."""
    what = f"{equation.op}: to_fx cannot express a structured op as ATen calls"
    fix = "Run the trace with an executor, or apply to_fx to the bodies of the equation."
    if equation.op.name == "carry_at":
        what = (
            "carry_at: reverse mode of a while_loop without max_steps keeps a buffer that grows,"
            " which no graph has"
        )
        fix = "Give the loop max_steps=, or run the trace with the torch executor."
    return MissingRule(what, equation=format_equation(equation), source=equation.source, fix=fix)


def _symbols_of_numbers(equation: Equation) -> set[Any]:
    """The symbols in arguments that are numbers, not in the sizes of tensors."""
    return set(symbols_in(without_vars(all_args(equation))))


def _not_a_number(equation: Equation) -> MissingRule:
    """The error for an argument that is an expression over symbols, which a graph of calls does
    not know.
    """
    names = ", ".join(sorted(map(str, _symbols_of_numbers(equation))))
    what = f"{equation.op}: to_fx cannot express a number that depends on {names}"
    fix = (
        "Run the trace with an executor; or trace the function with static sizes and numbers, and"
        " keep `.item()` out of it."
    )
    return MissingRule(what, equation=format_equation(equation), source=equation.source, fix=fix)


def _read(graph: torch.fx.Graph, env: list[Any], arg: Arg) -> Any:
    match arg:
        case Var():
            return env[arg.index]
        case Literal(value=complex() as value) if not _is_exact(value):
            return graph.call_function(complex, (value.real, value.imag))
        case Literal():
            return arg.value
        case tuple():
            return [_read(graph, env, item) for item in arg]


def _is_exact(value: complex) -> bool:
    """Test for a literal that its repr holds, as which FX writes it: not for infinities, NaNs and
    signed zeros in a complex number.
    """
    return cmath.isfinite(value) and "-0.0" not in (repr(value.real), repr(value.imag))


def _attribute(
    graph: torch.fx.Graph, tensor: torch.Tensor, owned: bool, constants: dict[int, Any]
) -> torch.fx.Node:
    """The node of a closed-over tensor: one for each tensor, whichever bodies close over it."""
    if id(tensor) not in constants:
        node = graph.create_node("get_attr", f"constant_{len(constants)}")
        node.meta |= {"thunder_fn_type": type_of_value(tensor), "thunder_fn_owned": owned}
        constants[id(tensor)] = node, tensor
    return constants[id(tensor)][0]


def _call(graph: torch.fx.Graph, equation: Equation, env: list[Any]) -> list[Any]:
    """The nodes of a leaf's outputs: its call, or items of it. A None result needs no node."""
    args = tuple(_read(graph, env, arg) for arg in equation.args)
    kwargs = {key: _read(graph, env, arg) for key, arg in equation.kwargs}
    call = graph.call_function(ops.overload(equation.op), args, kwargs)
    paths = _result_paths(equation)
    types: tuple[Any, ...] = equation.output_types
    call.meta["thunder_fn_type"] = types[0] if paths == [()] else _nest(paths, types)
    _locate(call, equation.source)
    items: dict[_Path, torch.fx.Node] = {(): call}
    return [
        None if isinstance(t, NoneType) else _item(graph, items, p, t)
        for p, t in zip(paths, types, strict=True)
    ]


def _item(
    graph: torch.fx.Graph, items: dict[_Path, torch.fx.Node], path: _Path, type: Any
) -> torch.fx.Node:
    """The node of one result, `call[0][1]` for the path (0, 1)."""
    if path not in items:
        parent = _item(graph, items, path[:-1], None)
        items[path] = graph.call_function(operator.getitem, (parent, path[-1]))
    if type is not None:
        items[path].meta["thunder_fn_type"] = type
    return items[path]


def _nest(paths: list[_Path], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values arranged as their paths say: paths (0,), (1, 0), (1, 1) give `(a, (b, c))`."""
    nested: dict[int, Any] = {}
    for path, value in zip(paths, values, strict=True):
        nested[path[0]] = (*nested.get(path[0], ()), value) if len(path) == 2 else value
    return tuple(nested.get(position, ()) for position in range(max(nested, default=-1) + 1))


def _result_paths(equation: Equation) -> list[_Path]:
    """The path of each output of a leaf in the op's result: `()` for the result itself, `(1, 0)`
    for `result[1][0]`.
    """
    lists = ops.lists_returned(equation.op)
    if len(lists) == 1:
        return [(i,) for i in range(len(equation.outputs))] if lists[0] else [()]
    if sum(lists) <= 1:
        length = len(equation.outputs) - lists.count(False)
        return _paths([length if is_list else None for is_list in lists])
    result = fake_result(equation.op, *types_in(equation))
    return _paths(
        [len(item) if is_list else None for item, is_list in zip(result, lists, strict=True)]
    )


def _paths(lengths: list[int | None]) -> list[_Path]:
    """The paths of results of which some are lists of a length."""
    paths: list[_Path] = []
    for position, length in enumerate(lengths):
        paths += [(position,)] if length is None else [(position, i) for i in range(length)]
    return paths


def _locate(node: torch.fx.Node, source: Source | None) -> None:
    if source is not None:
        node.meta["thunder_fn_source"] = source
        node.stack_trace = (
            escaped(f'  File "{source.file}", line {source.line}, in {source.function}') + "\n"
        )


def from_fx(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any] | None = None
) -> Trace:
    """A trace of the ATen calls of an FX graph module, as make_fx, torch.export, AOTAutograd or
    `to_fx` give it.

    Law: ``evaluate(from_fx(to_fx(t)), xs)`` is bitwise ``evaluate(t, xs)``.

    Args:
        graph_module: calls of functional overloads. Its attributes become constants, by reference.
        example_inputs: real or fake; the types come from running on their fakes. Without them the
            types come from each node's `meta["val"]` or `meta["thunder_fn_type"]`.

    Raises:
        CaptureError: a node is not a functional ATen call, or has no type; names the node and the
            user's line.
    """
    types = {} if example_inputs is None else _run_fakes(graph_module, example_inputs)
    builder = TraceBuilder()
    env: _Env = {}
    for node in graph_module.graph.nodes:
        match node.op:
            case "placeholder":
                env[node] = builder.input(_node_types(node, types))
            case "get_attr":
                owned = node.meta.get("thunder_fn_owned", False)
                env[node] = builder.constant(_tensor(graph_module, node), owned=owned)
            case "call_function" if node.target is operator.getitem:
                env[node] = _getitem(env, node)
            case "call_function" if node.target is complex:
                env[node] = Literal(complex(*node.args))
            case "call_function" if isinstance(node.target, OpOverload):
                env[node] = _equation(builder, env, node, types)
            case "output":
                atoms = (_leaves(_arg(env, leaf, node)) for leaf in tree_leaves(node.args[0]))
                return builder.build(tuple(itertools.chain.from_iterable(atoms)))
            case _:
                fix = (
                    "Pass a graph of ATen calls, such as make_fx, torch.export and AOTAutograd"
                    " give."
                )
                _fail(node, f"{node.op} of {node.target} is no call of an ATen overload", fix)
    raise CaptureError("from_fx: the graph has no output")


def _fail(node: torch.fx.Node, what: str, fix: str | None = None) -> NoReturn:
    raise CaptureError(f"from_fx: node '{node.name}': {what}", source=_source(node), fix=fix)


def _source(node: torch.fx.Node) -> Source | None:
    """The source that `to_fx` kept, or the innermost frame of the node's stack trace."""
    if "thunder_fn_source" in node.meta:
        return node.meta["thunder_fn_source"]
    frames = re.findall(r'File "(.*)", line (\d+), in (.*)', node.stack_trace or "")
    return Source(frames[-1][0], int(frames[-1][1]), frames[-1][2].strip()) if frames else None


class _TypeRecorder(torch.fx.Interpreter):
    """An interpreter of a graph that keeps the type of what each node computes."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.types: _Env = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("placeholder", "call_function"):
            self.types[n] = _types_of(result)
        return result


def _run_fakes(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> _Env:
    mode = detect_fake_mode(example_inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in example_inputs]
    recorder = _TypeRecorder(graph_module)
    with torch.no_grad(), mode:
        recorder.run(*fakes)
    return recorder.types


def _types_of(value: Any) -> Any:
    """The type of a node's value; a tuple of types for several."""
    match value:
        case tuple() | list():
            items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
            return tuple(map(_types_of, items))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return NumberType(
                {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
            )
        case torch.Tensor():
            return TensorType(value.dtype, tuple(map(_dim, value.shape)), value.device)
        case _:
            return type_of_value(value)


def _dim(size: Any) -> int | Expr:
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_Integer else Expr(size.node.expr)


def _node_types(node: torch.fx.Node, types: _Env) -> Any:
    if node in types:
        return types[node]
    if "val" in node.meta:
        return _types_of(node.meta["val"])
    if "thunder_fn_type" in node.meta:
        return node.meta["thunder_fn_type"]
    return _fail(
        node, "its type is not known", "Pass example_inputs, from which types are computed."
    )


def _tensor(graph_module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.Tensor:
    value = operator.attrgetter(str(node.target))(graph_module)
    if not isinstance(value, torch.Tensor):
        _fail(
            node,
            f"the attribute {node.target} is {kind_of(value)}, and only tensors can be constants",
        )
    return value


def _getitem(env: _Env, node: torch.fx.Node) -> Any:
    container, position = (_arg(env, arg, node) for arg in node.args)
    if not isinstance(container, tuple) or not isinstance(position, Literal):
        _fail(node, "operator.getitem picks from the results of a call, not from inside a tensor")
    return container[position.value]


def _equation(builder: TraceBuilder, env: _Env, node: torch.fx.Node, types: _Env) -> Any:
    """Append a call; its variables, nested as the op nests its results."""
    op = ops.leaf(node.target)  # pyright: ignore[reportArgumentType]
    if ops.overload(op)._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
        _fail(
            node,
            f"{op} writes to its inputs",
            "Functionalize the graph first (torch.func.functionalize).",
        )
    args = tuple(_arg(env, arg, node) for arg in node.args)
    kwargs = tuple((key, _arg(env, arg, node)) for key, arg in node.kwargs.items())
    nested = () if ops.returns_nothing(op) else _node_types(node, types)
    outputs = iter(
        builder.add(op, args, tuple(_leaves(nested)), kwargs=kwargs, source=_source(node))
    )
    return _fill(nested, outputs)


def _leaves(nested: Any) -> Iterator[Any]:
    if isinstance(nested, tuple):
        for item in nested:
            yield from _leaves(item)
    else:
        yield nested


def _fill(nested: Any, values: Iterator[Any]) -> Any:
    """The values, in order, in the places of the nested structure."""
    return (
        tuple(_fill(item, values) for item in nested) if isinstance(nested, tuple) else next(values)
    )


def _arg(env: _Env, value: Any, node: torch.fx.Node) -> Any:
    match value:
        case torch.fx.Node():
            return env[value]
        case tuple() | list():
            return tuple(_arg(env, item, node) for item in list[Any](value))
        case _ if isinstance(value, _LITERALS):
            return Literal(value)
        case _:
            return _fail(
                node, f"an argument of type {type(value).__name__} has no place in a trace"
            )
