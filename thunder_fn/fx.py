"""Traces to and from `torch.fx`, where FX tools, `torch.compile` backends and `torch.export` meet them.

The FX form is flat: composites are inlined down to their leaves. Nodes keep the type and the user's line of their
equation in `meta["thunder_fn_type"]` and `meta["thunder_fn_source"]`, and the line in `stack_trace` as FX expects it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_fn import ops
from thunder_fn.check import fake_result
from thunder_fn.errors import CaptureError, MissingRule, TraceTypeError, located
from thunder_fn.pretty import format_equation
from thunder_fn.trace import Arg, Equation, Expr, Literal, NoneType, NumberType, Source, TensorType, Trace, TraceBuilder
from thunder_fn.trace import Type, Var, map_arg


def to_fx(trace: Trace) -> torch.fx.GraphModule:
    """The trace as an FX graph module: a placeholder for each input, a call for each leaf, a tuple of outputs.

    Law: ``to_fx(t)(*xs)`` is bitwise ``evaluate(t, xs)``, and ``from_fx(to_fx(t))`` evaluates as ``t`` does.

    Raises:
        MissingRule: the trace has a structured op, which has no ATen overload.
    """
    graph = torch.fx.Graph()
    inputs = [_typed(graph.placeholder(str(var)), var.type) for var in trace.inputs]
    attributes: dict[str, torch.Tensor] = {}
    outputs = _inline(graph, trace, inputs, attributes)
    graph.output(outputs)
    return torch.fx.GraphModule(attributes, graph, class_name="program")


def _typed(node: torch.fx.Node, *types: Type) -> torch.fx.Node:
    node.meta["thunder_fn_type"] = ", ".join(map(str, types))
    return node


def _inline(graph: torch.fx.Graph, trace: Trace, inputs: Sequence[Any], attributes: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Append a trace's leaves to the graph. Like evaluate, with nodes for values."""
    env = [*inputs, *(_constant(graph, c.tensor, c.owned, attributes) for c in trace.constants)]
    for equation in trace.equations:
        match equation.op.kind:
            case "leaf":
                env.extend(_leaf_nodes(graph, equation, env))
            case "composite":
                env.extend(_inline(graph, equation.body, [env[var.index] for var in equation.operands], attributes))
            case "structured":
                what = f"{equation.op}: a structured op has no ATen overload, so to_fx cannot express it"
                fix = "Lower the trace, which turns structured ops into calls, before to_fx."
                raise MissingRule(located(what, equation=format_equation(equation), source=equation.source, fix=fix))
    return tuple(_node_arg(env, atom) for atom in trace.outputs)


def _constant(graph: torch.fx.Graph, tensor: torch.Tensor, owned: bool, attributes: dict[str, torch.Tensor]) -> torch.fx.Node:
    """One attribute for each tensor, whichever bodies close over it."""
    known = (name for name, other in attributes.items() if other is tensor)
    name = next(known, f"constant_{len(attributes)}")
    attributes[name] = tensor
    node = graph.get_attr(name, type_expr=None) if name in _owners(graph) else _new_attribute(graph, name)
    node.meta["thunder_fn_owned"] = owned
    return node
