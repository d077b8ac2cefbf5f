"""Traces as data: tables of ops, types, sources and traces, each entry after those that it names.

    trace       name, inputs, constants, equations, outputs, constraints
    equation    op, args, kwargs, types of the outputs, bodies, source

Equal bodies are one entry, so a file grows with distinct code. Variables are numbers in binding
order. What is read is put together by the constructors of `thunder_fn.ir`, and then checked.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from thunder_fn.errors import ThunderError
from thunder_fn.ir import facts, ops
from thunder_fn.ir.check import check
from thunder_fn.ir.rules import EVALUATE
from thunder_fn.ir.trace import (
    Arg,
    Constant,
    Equation,
    Expr,
    Literal,
    NoneType,
    NumberType,
    Op,
    Source,
    TensorType,
    Trace,
    Type,
    Var,
)
from thunder_fn.portable.errors import refused, unreadable
from thunder_fn.portable.numbers import NumberReader, NumberWriter, at, number
from thunder_fn.portable.rules import function_of, with_rules_in_bodies, without_options
from thunder_fn.portable.values import DTYPES, literal_data, read_device, read_literal, text
from thunder_fn.torch_internals import OpOverload

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, complex)}
_READS_FILES = frozenset({"aten.from_file.default", "aten.from_file.out"})


class TraceWriter:
    """Gives traces and what they consist of their places in tables."""

    def __init__(self) -> None:
        self.numbers = NumberWriter()
        self.tensors: list[torch.Tensor] = []
        self.tables: dict[str, list[Any]] = {
            name: [] for name in ("ops", "types", "sources", "traces")
        }
        self._places: dict[Any, int] = {}
        self._within: tuple[Any, ...] = ()
        self._tensors: dict[int, int] = {}

    def data(self) -> dict[str, Any]:
        """The tables without the tensors."""
        symbols, expressions = self.numbers.checked()
        return {"symbols": symbols, "expressions": expressions, **self.tables}

    def literal(self, value: Any) -> Any:
        """The data of a literal's value."""
        return literal_data(value, self.numbers)

    def trace(self, trace: Trace) -> int:
        """The place of a trace.

        Raises:
            PortableError: it holds code, an object of the process, or an op with an effect.
        """
        key = trace, trace.origin, trace.name, tuple(map(id, self._within))
        if key not in self._places:
            found = [
                trace.name,
                [self.type(var.type) for var in trace.inputs],
                [[self.tensor(one.tensor), one.owned] for one in trace.constants],
                [self.equation(equation) for equation in trace.equations],
                [self.arg(atom) for atom in trace.outputs],
                [self.numbers.expression(relation) for relation in trace.constraints],
            ]
            self.tables["traces"].append(found)
            self._places[key] = len(self.tables["traces"]) - 1
        return self._places[key]

    def equation(self, equation: Equation) -> list[Any]:
        """The data of an equation."""
        _check_op(equation.op, lambda what: refused(what, equation))
        function = function_of(equation)
        equation = without_options(with_rules_in_bodies(equation, self._within))
        try:
            args = [self.arg(arg) for arg in equation.args]
            kwargs = [[key, self.arg(arg)] for key, arg in equation.kwargs]
        except ThunderError as error:
            fix = "Save a program whose arguments are numbers, strings, dtypes and devices."
            what = str(error).removeprefix("save: ")
            raise refused(f"{equation.op}: {what}", equation, fix) from None
        return [
            self._place("ops", [equation.op.kind, equation.op.name]),
            args,
            kwargs,
            [self.type(var.type) for var in equation.outputs],
            self._bodies(equation, function),
            None if equation.source is None else self._place("sources", _of_source(equation)),
        ]

    def _bodies(self, equation: Equation, function: Any) -> list[int]:
        """The places of the bodies; all but the first are those of a rule."""
        if function is None:
            return list(map(self.trace, equation.bodies))
        around = self._within
        self._within = around if any(function is one for one in around) else (*around, function)
        try:
            rule = list(map(self.trace, equation.bodies[1:]))
        finally:
            self._within = around
        return [*map(self.trace, equation.bodies[:1]), *rule]

    def arg(self, arg: Arg) -> Any:
        """The data of an argument or an atom."""
        if isinstance(arg, Var):
            return arg.index
        return self.literal(arg.value) if isinstance(arg, Literal) else list(map(self.arg, arg))

    def type(self, type: Type) -> int:
        """The place of a type."""
        match type:
            case TensorType(dtype, shape, device):
                dims = [
                    {"expr": self.numbers.expression(size)} if isinstance(size, Expr) else size
                    for size in shape
                ]
                name = str(dtype).removeprefix("torch.")
                return self._place("types", ["tensor", name, dims, str(device)])
            case NumberType(kind, value):
                place = None if value is None else self.numbers.expression(value)
                return self._place("types", ["number", kind.__name__, place])
            case NoneType():
                return self._place("types", ["none"])

    def tensor(self, tensor: torch.Tensor) -> int:
        """The place of a constant: the same one for the same tensor."""
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._tensors[id(tensor)]

    def _place(self, table: str, entry: list[Any]) -> int:
        key = table, repr(entry)
        if key not in self._places:
            self.tables[table].append(entry)
            self._places[key] = len(self.tables[table]) - 1
        return self._places[key]


def _of_source(equation: Equation) -> list[Any]:
    source = equation.source
    assert source is not None, "the caller looks"
    first = None if source.first is None else list(source.first)
    return [source.file, source.line, source.function, source.inside, source.around, first]


def _check_op(op: Op, error: Any) -> None:
    """Raise for an op that nothing here knows, and for one that does more than compute."""
    if op.kind == "leaf":
        if op.name in _READS_FILES:
            raise error(f"{op} reads a file")
        if op in facts.CALLBACKS:
            raise error(f"{op} calls a Python function, which is not saved")
        if ops.is_effectful(op) and op not in facts.ASSERTS:
            raise error(f"{op} has an effect besides its results, which is not saved")
    elif op.kind == "structured" and op.name not in EVALUATE.by_name:
        raise error(f"there is no structured op {op}")


class TraceReader:
    """Makes the traces of the tables of a file."""

    def __init__(self, data: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        self.numbers = NumberReader(data["symbols"], data["expressions"])
        self.tensors = tensors
        self.ops = list(map(_read_op, data["ops"]))
        self.types = list(map(self._type, data["types"]))
        self.sources = list(map(_source, data["sources"]))
        self.traces: list[Trace] = []
        for entry in data["traces"]:
            self.traces.append(self._trace(entry))

    def trace(self, place: Any) -> Trace:
        """The trace at a place, checked but for the types that leaves give.

        Raises:
            InvalidTrace, TraceTypeError: it breaks a rule of the grammar.
        """
        found = at(self.traces, place)
        check(found, leaves=False)
        return found

    def literal(self, data: Any) -> Any:
        """The value of a literal."""
        return read_literal(data, self.numbers)

    def _trace(self, entry: Any) -> Trace:
        name, inputs, constants, equations, outputs, constraints = entry
        bound = [Var(i, at(self.types, place)) for i, place in enumerate(inputs)]
        count = len(bound)
        found = list[Constant]()
        for place, owned in constants:
            tensor = at(self.tensors, place)
            type = TensorType(tensor.dtype, tuple(tensor.shape), tensor.device)
            bound.append(Var(len(bound), type))
            found.append(Constant(bound[-1], tensor, number(owned, bool)))
        return Trace(
            tuple(bound[:count]),
            tuple([self._equation(one, bound) for one in equations]),
            tuple([self._atom(atom, bound) for atom in outputs]),
            tuple(found),
            tuple(map(self.numbers.expression, constraints)),
            text(name),
        )

    def _equation(self, entry: Any, bound: list[Var]) -> Equation:
        op, args, kwargs, types, bodies, source = entry
        new = tuple(Var(len(bound) + i, at(self.types, place)) for i, place in enumerate(types))
        equation = Equation(
            at(self.ops, op),
            tuple([self._arg(arg, bound) for arg in args]),
            tuple([(text(key), self._arg(arg, bound)) for key, arg in kwargs]),
            new,
            tuple([at(self.traces, place) for place in bodies]),
            None if source is None else at(self.sources, source),
        )
        bound.extend(new)
        return equation

    def _arg(self, data: Any, bound: list[Var]) -> Arg:
        if type(data) is int:
            return at(bound, data)
        if isinstance(data, list):
            return tuple([self._arg(item, bound) for item in data])
        return Literal(self.literal(data))

    def _atom(self, data: Any, bound: list[Var]) -> Any:
        atom = self._arg(data, bound)
        if isinstance(atom, tuple):
            raise unreadable("an output is a tuple")
        return atom

    def _type(self, entry: Any) -> Type:
        match entry:
            case ["tensor", name, dims, device]:
                if name not in DTYPES:
                    raise unreadable(f"{name!r} is no dtype of this version of PyTorch")
                return TensorType(DTYPES[name], tuple(map(self._dim, dims)), read_device(device))
            case ["number", kind, place] if kind in _KINDS:
                value = None if place is None else self.numbers.expression(place)
                return NumberType(_KINDS[kind], value)
            case ["none"]:
                return NoneType()
            case _:
                raise unreadable(f"{entry!r} is no type")

    def _dim(self, data: Any) -> int | Expr:
        if isinstance(data, dict):
            return self.numbers.expression(data["expr"])
        size = number(data, int)
        if size < 0:
            raise unreadable(f"{size} is no size")
        return size


def _read_op(entry: Any) -> Op:
    kind, name = entry
    if kind not in ("leaf", "composite", "structured"):
        raise unreadable(f"{kind!r} is not a kind of op")
    op = Op(kind, text(name))
    if kind == "leaf":
        _check_leaf(op)
    _check_op(op, unreadable)
    return op


def _check_leaf(op: Op) -> None:
    parts = op.name.split(".")
    known = len(parts) == 3 and all(part.isidentifier() for part in parts)
    try:
        found = known and isinstance(ops.overload(op), OpOverload)
    except (ThunderError, AttributeError, RuntimeError):
        found = False
    if not found:
        raise unreadable(
            f"there is no op {op.name}", "Import the library that defines it, then load the file."
        )


def _source(entry: Any) -> Source:
    file, line, function, inside, around, first = entry
    source = Source(
        text(file),
        number(line, int),
        text(function),
        text(inside),
        None if around is None else text(around),
    )
    if first is None:
        return source
    outer, inner = first
    return replace(source, first=(None if outer is None else text(outer), text(inner)))
