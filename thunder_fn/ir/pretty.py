"""Print a trace as a Python program, and run that text.

    def program(v0, v1):
        # v0: f32[8, 4]
        # v1: f32[4]
        v2 = layer_norm(v0, (4,), v1)  # f32[8, 4]
            # def layer_norm(v0, v1):
            #   v2, v3, v4 = aten.native_layer_norm.default(v0, (4,), v1, None, 1e-05)  # ...
            #   return (v2,)
        return (v2,)

Bodies are comments under the call, in their own numbering: a body's parameters are the variables of
the call, in order. Each distinct body is printed in full once, so the text grows with distinct
code. Equal traces have equal texts.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn.errors import InvalidTrace
from thunder_fn.ir import ops
from thunder_fn.ir.notebook import ProgramLine, as_program
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.symbols import binders, is_symbolic, made_by
from thunder_fn.ir.text import (
    escaped,
    identifier,
    is_keyword_name,
    literal_text,
    object_name,
    program_text,
    run_text,
    tuple_text,
)
from thunder_fn.ir.trace import (
    Arg,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    Var,
    all_args,
    every_equation,
)

_BUILTINS = frozenset({"torch", "flat", "float", "complex", "getattr"})


def to_text(trace: Trace) -> str:
    """The trace as a Python program, types and bodies in comments.

    Law: ``to_text(a) == to_text(b)`` if ``a == b`` and their names and module paths are equal.
    """
    return _Printer(trace).text


def to_html(trace: Trace) -> str:
    """The text as HTML: bodies are folded, such as those of modules, variables have their types on
    hover, and calls lead to the user's line.
    """
    rows = _Printer(trace).rows
    types = {one: _types_of(one) for one in {row.trace for row in rows}}
    return as_program(
        [
            ProgramLine(
                escaped(row.text),
                row.level,
                types[row.trace],
                None if row.equation is None else row.equation.source,
            )
            for row in rows
        ]
    )


def _types_of(trace: Trace) -> dict[str, str]:
    """The types of a trace's variables, as texts."""
    own = (*trace.inputs, *(constant.var for constant in trace.constants))
    made = (var for equation in trace.equations for var in equation.outputs)
    return {str(var): str(var.type) for var in (*own, *made)}


def as_comment(trace: Trace) -> Iterator[str]:
    """The trace's text as comments below a call, without the types of its inputs."""
    header, *lines = to_text(trace).rstrip("\n").split("\n")
    types = [line for line in lines if line.startswith("    # v")]
    yield f"    # {header}"
    yield from (f"    # {line}" for line in lines[len(types) :])


def python_callable(trace: Trace) -> Callable[..., tuple[Any, ...]]:
    """The printed program, compiled by Python: a function of the trace's inputs.

    Law: ``python_callable(t)(*xs)`` is bitwise ``evaluate(t, xs)``.

    Raises:
        MissingRule: when called, if a structured op has no evaluation rule.
    """
    printer = _Printer(trace)
    run_text(printer.text, trace.name, printer.context)
    return printer.context[printer.name]


def format_equation(equation: Equation) -> str:
    """One line for error messages, such as `v7: f32[3] = cond(v6, v2)`."""
    targets = ", ".join(f"{var}: {var.type}" for var in equation.outputs)
    name = equation.op.name if equation.op.kind == "leaf" else identifier(equation.op.name)
    call = _call_text(name, equation, lambda value: f"<{object_name(value)}>")
    return escaped(f"{targets} = {call}" if targets else call)


def binding_lines(variables: Sequence[Var], known: Collection[str] = ()) -> Iterator[str]:
    """The lines that give symbols their values, `s0 = v0.shape[1]`, but for those that are
    known.
    """
    for symbol, (var, dim) in binders(variables).items():
        if str(symbol) not in known:
            yield binding_line(symbol, var, dim)


def binding_line(symbol: Any, var: Var, dim: int | None) -> str:
    """`s0 = v0.shape[1]`, or `s0 = v0` for a number."""
    return f"{symbol} = {var}" if dim is None else f"{symbol} = {var}.shape[{dim}]"


def _items(value: Any) -> list[Any]:
    return list(value)


def _arg_text(arg: Arg, name_object: Callable[[Any], str]) -> str:
    match arg:
        case Var():
            return str(arg)
        case Literal():
            return literal_text(arg.value, name_object)
        case tuple():
            return tuple_text([_arg_text(item, name_object) for item in arg])


def _call_text(name: str, equation: Equation, name_object: Callable[[Any], str]) -> str:
    parts = [_arg_text(arg, name_object) for arg in equation.args]
    for key, arg in equation.kwargs:
        text = _arg_text(arg, name_object)
        parts.append(f"{key}={text}" if is_keyword_name(key) else f"**{{{key!r}: {text}}}")
    return f"{name}({', '.join(parts)})"


def _leaf_text(op: Op) -> str:
    """The expression that gives the overload: `aten.add.Tensor`, or `getattr(aten.random,
    "from")`.
    """
    path, _, variant = op.name.rpartition(".")
    if path.partition(".")[0] in _BUILTINS:
        path = f"torch.ops.{path}"
    return f'getattr({path}, "{variant}")' if keyword.iskeyword(variant) else f"{path}.{variant}"


def _lists_returned(equation: Equation) -> tuple[bool, ...]:
    """Tell for each result of a leaf whether it is a list. Empty where PyTorch does not know the
    op, and for bodies.
    """
    try:
        return ops.lists_returned(equation.op) if equation.op.kind == "leaf" else ()
    except InvalidTrace:
        return ()


def _assignment(equation: Equation, call: str) -> str:
    """`v3, (v4, v5) = call`: the call with its results unpacked as the op nests them."""
    names = [str(var) for var in equation.outputs]
    lists = _lists_returned(equation)
    if not names:
        return call
    if sum(lists) > 1:
        return f"{tuple_text(names)} = flat({call})"
    if lists == (True,):
        return f"{tuple_text(names) if len(names) == 1 else ', '.join(names)} = {call}"
    if any(lists):
        start = lists.index(True)
        stop = len(names) - (len(lists) - 1 - start)
        names[start:stop] = [tuple_text(names[start:stop])]
    return f"{', '.join(names)} = {call}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a text: the level of bodies that it is at, its trace, and its equation if it has
    one.
    """

    text: str
    level: int
    trace: Trace
    equation: Equation | None = None


class _Printer:
    """The text of one trace, and the context that the text runs in."""

    def __init__(self, trace: Trace) -> None:
        leaves = (e.op for e in every_equation(trace) if e.op.kind == "leaf")
        namespaces = {op.name.partition(".")[0] for op in leaves} - _BUILTINS
        self.context: dict[str, Any] = {"torch": torch, "flat": ops.flatten_result}
        if is_symbolic(trace):
            self.context["math"] = math
        self.context |= {namespace: getattr(torch.ops, namespace) for namespace in namespaces}
        self.context |= {str(constant.var): constant.tensor for constant in trace.constants}
        self.taken = {*self.context, *_BUILTINS}
        self.names: dict[Any, str] = {}
        self.shown: dict[Trace, str] = {}
        self.name = self.fresh(trace.name)
        self.known = set(map(str, binders(trace.inputs)))
        self.rows: list[Row] = []
        self.program(trace, self.name, level=0, module="")
        self.text = program_text([*(row.text for row in self.rows), ""])

    def fresh(self, wanted: str) -> str:
        """An identifier that nothing else in the text has."""
        base = name = identifier(wanted)
        count = 0
        while name in self.taken:
            count += 1
            name = f"{base}_{count}"
        self.taken.add(name)
        return name

    def bind(self, key: Any, wanted: str, value: Callable[[], Any]) -> str:
        """The name of a value in the context: the same one for the same key."""
        if key not in self.names:
            self.names[key] = self.fresh(wanted)
            self.context[self.names[key]] = value()
        return self.names[key]

    def name_object(self, value: Any) -> str:
        return self.bind(Literal(value), object_name(value), lambda: value)

    def program(self, trace: Trace, name: str, level: int, module: str) -> None:
        """Write the lines of a trace. Those of a body are comments, indented by its depth."""
        start, inner = (
            ("", "    ")
            if level == 0
            else (f"{'    ' * (level + 1)}# ", f"{'    ' * (level + 1)}#   ")
        )

        def write(line: str, equation: Equation | None = None) -> None:
            self.rows.append(Row(line, level, trace, equation))

        write(f"{start}def {name}({', '.join(map(str, trace.inputs))}):")
        note = inner if level else f"{inner}# "
        if level == 0:
            for var in trace.inputs:
                write(f"{note}{var}: {var.type}")
            for line in binding_lines(trace.inputs):
                write(inner + line)
        for constant in trace.constants:
            write(f"{note}{constant.var}: {constant.var.type} constant")
        for constraint in trace.constraints:
            write(f"{note}where {constraint}")
        for equation in trace.equations:
            name, path, line = self.line(equation, module)
            write(inner + line, equation)
            if level == 0 and made_by(equation):
                for line in binding_lines(equation.outputs, self.known):
                    write(inner + line)
            self.bodies(equation, name, level + 1, path or module)
        results = tuple_text([_arg_text(atom, self.name_object) for atom in trace.outputs])
        write(f"{inner}return {results}")

    def line(self, equation: Equation, module: str) -> tuple[str, str, str]:
        """The name of what an equation calls, the path of its module, and its line."""
        name = _leaf_text(equation.op) if equation.op.kind == "leaf" else self.function(equation)
        line = _assignment(equation, _call_text(name, equation, self.name_object))
        path = equation.source.module if equation.source and equation.bodies else ""
        comment = ", ".join(str(var.type) for var in equation.outputs)
        comment += f" at {path}" if path and path != module else ""
        if len(equation.bodies) == 1 and equation.body in self.shown:
            comment += f", {self.reference(equation.body, name)}"
        return name, path, f"{line}  # {comment.lstrip(' ,')}" if comment else line

    def bodies(self, equation: Equation, name: str, level: int, module: str) -> None:
        """Write the bodies of an equation that were not printed yet."""
        single = len(equation.bodies) == 1
        for position, body in enumerate(equation.bodies):
            if body not in self.shown:
                self.shown[body] = name if single else f"body {position} of {name}"
                self.program(body, name if single else f"body_{position}", level, module)
            elif not single:
                known = f"{'    ' * (level + 1)}# body_{position}: {self.reference(body, name)}"
                self.rows.append(Row(known, level, body))

    def reference(self, body: Trace, name: str) -> str:
        label = self.shown[body]
        return "as above" if label == name else f"as {label} above"

    def function(self, equation: Equation) -> str:
        """The name of the function that computes a composite or structured equation: one for
        each op and bodies.
        """
        mask = _operand_mask(equation)
        key = (equation.op, equation.bodies, mask)
        return self.bind(key, equation.op.name, lambda: _function(equation, mask))


def _operand_mask(equation: Equation) -> tuple[bool, ...] | None:
    """Tell for each value in a call whether it is an operand. None if the operands are just its
    tensors.
    """
    if all(isinstance(var.type, TensorType) for var in equation.operands):
        return None
    return tuple(_mask(all_args(equation)))


def _mask(arg: Any) -> Iterator[bool]:
    match arg:
        case Var():
            yield True
        case Literal():
            yield from (False for _ in _spread(arg.value))
        case _:
            for item in arg:
                yield from _mask(item)


def _spread(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in _items(value):
            yield from _spread(item)
    else:
        yield value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in _items(value)] if isinstance(value, (tuple, list)) else value


def _function(equation: Equation, mask: tuple[bool, ...] | None) -> Callable[..., Any]:
    """The function that a composite's or structured op's name stands for in the text."""
    from thunder_fn.interpreters.evaluate import evaluate

    def composite(*args: Any, **kwargs: Any) -> Any:
        values = list(_spread((args, tuple(kwargs.values()))))
        chosen = [isinstance(value, torch.Tensor) for value in values] if mask is None else mask
        operands = [value for value, is_operand in zip(values, chosen, strict=True) if is_operand]
        return _result(evaluate(equation.body, operands))

    def structured(*args: Any, **kwargs: Any) -> Any:
        return _result(tuple(EVALUATE.of(equation)(equation.bodies, *_lists(args), **kwargs)))

    return composite if equation.op.kind == "composite" else structured


def _result(results: tuple[Any, ...]) -> Any:
    """Return one result as itself and several as a tuple, as Python functions do."""
    return results[0] if len(results) == 1 else results
