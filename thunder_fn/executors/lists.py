"""Ops over lists of tensors: what an optimizer does to each parameter, done to all of them at once.

    v5, v6 = AdamW(v0, v1)              v5, v7 = aten._foreach_mul.Scalar((v0, v2), 0.99)
    v7, v8 = AdamW(v2, v3)      ->      v6, v8 = aten._foreach_lerp.Scalar((v1, v3), (v5, v7), 0.1)

On a GPU each op is a launch, which takes longer than a small update. PyTorch's own optimizers run
the same ops over lists there (`foreach=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.errors import InvalidTrace
from thunder_fn.executors.regions import Group, grouped
from thunder_fn.executors.reuse import CLONE, drop_copies
from thunder_fn.ir import ops
from thunder_fn.ir.memos import kept_of_ops
from thunder_fn.ir.trace import (
    Arg,
    Atom,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    map_arg,
)
from thunder_fn.ir.types import is_on, is_scalar
from thunder_fn.ir.walking import put

MIN_TIMES = 3
"""The least number of equal composites that run as ops over lists."""

TOGETHER = "composites side by side"

TO_COPY = ops.leaf(torch.ops.aten._to_copy.default)


def with_lists(trace: Trace, is_ours: Callable[[Equation], bool]) -> Trace:
    """The trace with equal composites side by side as one, whose body runs ops over lists.

    Law: it computes what the trace computes, with the last bits of PyTorch's ops over lists.

    Args:
        is_ours: tells whether the torch executor may run a composite.
    """
    groups = list(_groups(trace, is_ours))
    if not groups:
        return trace
    together, _ = grouped(trace, groups, TOGETHER)

    def opened(equation: Equation) -> Equation:
        if equation.op.name != TOGETHER:
            return equation
        name = f"{equation.body.equations[0].op.name} of {len(equation.body.equations)}"
        return replace(equation, op=ops.composite(name), bodies=(_over_lists(equation.body),))

    return replace(together, equations=tuple(map(opened, together.equations)))


# ---- what runs together ----


def _groups(trace: Trace, is_ours: Callable[[Equation], bool]) -> Iterator[Group]:
    """Equal composites in a row. Between them are at most numbers on the CPU, which read none of
    their results.
    """
    run: dict[Any, list[int]] = {}
    made = set[int]()
    for position, equation in enumerate(trace.equations):
        kind = _kind(equation)
        reads = any(var.index in made for var in equation.operands)
        if reads or (kind is None and not _is_number(equation)):
            yield from _long_ones(run)
            run, made = {}, set()
        if kind is not None and is_ours(equation):
            run.setdefault(kind, []).append(position)
            made.update(var.index for var in equation.outputs)
    yield from _long_ones(run)


def _long_ones(run: dict[Any, list[int]]) -> Iterator[Group]:
    yield from (tuple(group) for group in run.values() if len(group) >= MIN_TIMES)


def _is_number(equation: Equation) -> bool:
    return equation.op.kind == "leaf" and all(
        is_scalar(var.type) and is_on(var.type, "cpu") for var in equation.outputs
    )


def _kind(equation: Equation) -> Any:
    """Equal for composites that compute the same from tensors of other shapes and from the same
    numbers; None if ops over lists do not compute it.
    """
    if equation.op.kind != "composite" or ops.is_operator(equation.op):
        return None
    body = equation.body
    if body.constants or body.constraints or not all(map(_may_be_listed, body.equations)):
        return None
    computing = [inner for inner in body.equations if not _launches_nothing(inner)]
    listed = sum(list_form(inner) is not None for inner in computing)
    if not listed or listed * 2 < len(computing):
        return None
    numbers = tuple(var.index for var in equation.operands if is_scalar(var.type))
    inside = tuple(
        (inner.op, _masked(inner.args), _masked(inner.kwargs)) for inner in body.equations
    )
    return numbers, inside, tuple(map(_mask, body.inputs)), tuple(map(_masked, body.outputs))


def _may_be_listed(equation: Equation) -> bool:
    """Test for an op that may run for all tensors before the next op runs for any."""
    return (
        equation.op.kind == "leaf"
        and not ops.is_effectful(equation.op)
        and not ops.is_random(equation.op)
    )


def _launches_nothing(equation: Equation) -> bool:
    return ops.is_view(equation.op) or _is_copy(equation)


def _is_copy(equation: Equation) -> bool:
    """Test for a copy that a program drops, as nobody writes to what it copies."""
    return equation.op == CLONE or equation.op.name == "aten.copy.default"


def _masked(value: Any) -> Any:
    """Arguments without the shapes of tensors."""
    match value:
        case Var():
            return _mask(value)
        case tuple():
            return tuple(map(_masked, value))
        case _:
            return value


def _mask(var: Var) -> Any:
    if not isinstance(var.type, TensorType):
        return var
    return var.index, var.type.dtype, var.type.device, is_scalar(var.type)


# ---- forms over lists ----


@dataclass(frozen=True, slots=True)
class ListForm:
    """An op over lists, and the places of its arguments that are no list: one tensor for all."""

    op: Op
    shared: frozenset[int] = frozenset()


def list_form(equation: Equation) -> ListForm | None:
    """Find the op that does to lists what the equation does to tensors of its result's type."""
    if equation.op.kind != "leaf" or len(equation.outputs) != 1 or _is_copy(equation):
        return None
    (result,) = equation.outputs
    if not isinstance(result.type, TensorType) or result.type.device.type != "cuda":
        return None
    if (
        not equation.args
        or type_of_argument(equation.args[0]) != result.type
        or is_scalar(result.type)
    ):
        return None
    form = _form(equation.op, tuple(_role(arg, result) for arg in equation.args))
    keywords = {key for key, _ in equation.kwargs}
    if form is None:
        return None
    return form if keywords <= set(internals.argument_names(ops.overload(form.op))) else None


def type_of_argument(arg: Arg) -> Any:
    """The type of a variable; None for other arguments."""
    return arg.type if isinstance(arg, Var) else None


def _role(arg: Arg, result: Var) -> str:
    """The role of an argument: a tensor of the result's type, one for all, a number."""
    if isinstance(arg, Var):
        return "list" if arg.type == result.type else "shared" if is_scalar(arg.type) else "other"
    is_number = isinstance(arg, Literal) and isinstance(arg.value, (bool, int, float))
    return "number" if is_number else "other"


@kept_of_ops()
def _form(op: Op, roles: tuple[str, ...]) -> ListForm | None:
    """The form over lists for arguments of these roles."""
    if ops.is_random(op) or roles[0] != "list" or "other" in roles or roles.count("shared") > 1:
        return None
    namespace, name, _ = op.name.split(".")
    variants: dict[tuple[str, ...], str] = {
        ("list",): "default",
        ("list", "list"): "List",
        ("list", "number"): "Scalar",
        ("list", "shared"): "Tensor",
        ("list", "list", "number"): "Scalar",
        ("list", "list", "list"): "Scalar",
    }
    variant = variants.get(roles)
    if namespace != "aten" or variant is None:
        return None
    form = Op("leaf", f"aten._foreach_{name}.{variant}")
    try:
        arguments = internals.schema_of(ops.overload(form)).arguments
    except InvalidTrace:
        return None
    types = [str(argument.type) for argument in arguments]
    wanted = {"list": "List[Tensor]", "shared": "Tensor", "number": "number"}
    fits = len(types) >= len(roles) and all(
        type == wanted[role] for type, role in zip(types, roles, strict=False)
    )
    shared = frozenset(place for place, role in enumerate(roles) if role == "shared")
    return ListForm(form, shared) if fits else None


# ---- writing ----


@dataclass(slots=True)
class _Row:
    """One of the composites that run together: its equations, and the values of its variables."""

    equations: Sequence[Equation]
    values: dict[int, Atom] = field(default_factory=dict[int, Atom])

    def read(self, arg: Arg) -> Arg:
        return map_arg(lambda var: self.values[var.index], arg)

    def bind(self, equation: Equation, results: Sequence[Atom]) -> None:
        self.values.update(
            (var.index, value) for var, value in zip(equation.outputs, results, strict=True)
        )


def _over_lists(body: Trace) -> Trace:
    """A body of equal composites, with ops over lists in place of theirs."""
    builder = TraceBuilder(body.name)
    values: dict[int, Atom] = dict(
        zip((var.index for var in body.inputs), builder.take(body.input_types), strict=True)
    )
    insides = [drop_copies(equation.body)[0] for equation in body.equations]
    rows = [
        _Row(
            inside.equations,
            {
                var.index: values[operand.index]
                for var, operand in zip(inside.inputs, equation.operands, strict=True)
            },
        )
        for equation, inside in zip(body.equations, insides, strict=True)
    ]
    for column in zip(*(row.equations for row in rows), strict=True):
        _put_column(builder, rows, column)
    for equation, inside, row in zip(body.equations, insides, rows, strict=True):
        results = (
            row.values[atom.index] if isinstance(atom, Var) else atom for atom in inside.outputs
        )
        values.update(zip((var.index for var in equation.outputs), results, strict=True))
    outputs = (values[atom.index] if isinstance(atom, Var) else atom for atom in body.outputs)
    return builder.build(tuple(outputs))


def _put_column(builder: TraceBuilder, rows: Sequence[_Row], column: Sequence[Equation]) -> None:
    """Append the same equation of all rows."""
    first = column[0]
    form = list_form(first)
    if form is None:
        for row, equation in zip(rows, column, strict=True):
            operands = tuple(row.values[var.index] for var in equation.operands)
            row.bind(equation, put(builder, equation, operands))
        return
    args = tuple(
        _argument(builder, rows, column, place, is_shared=place in form.shared)
        for place in range(len(first.args))
    )
    kwargs = tuple((key, rows[0].read(arg)) for key, arg in first.kwargs)
    types = tuple(equation.outputs[0].type for equation in column)
    results = builder.add(form.op, args, types, kwargs=kwargs, source=first.source)
    for row, equation, result in zip(rows, column, results, strict=True):
        row.bind(equation, (result,))


def _argument(
    builder: TraceBuilder,
    rows: Sequence[_Row],
    column: Sequence[Equation],
    place: int,
    *,
    is_shared: bool,
) -> Arg:
    """An argument of an op over lists: the tensors of all rows, or what all rows share."""
    arg = column[0].args[place]
    if not isinstance(arg, Var):
        return arg
    if not is_shared:
        return tuple(
            row.read(equation.args[place]) for row, equation in zip(rows, column, strict=True)
        )
    value, (result,) = rows[0].read(arg), column[0].outputs
    assert isinstance(value, Var), "a tensor that all rows share"
    types = value.type, result.type
    assert all(isinstance(type, TensorType) for type in types), "as `list_form` says"
    return _converted(builder, value, types[1])


def _converted(builder: TraceBuilder, value: Var, like: Any) -> Var:
    """A number on the GPU in the dtype of the list: a kernel over lists takes no other."""
    own: Any = value.type
    if own.device.type == "cpu" or own.dtype == like.dtype:
        return value
    known = next(
        (
            equation.outputs[0]
            for equation in reversed(builder.equations)
            if equation.op == TO_COPY
            and equation.args == (value,)
            and equation.outputs[0].type.dtype == like.dtype  # pyright: ignore[reportAttributeAccessIssue]
        ),
        None,
    )
    if known is not None:
        return known
    type = replace(own, dtype=like.dtype)
    return ops.emit(builder, TO_COPY, (value,), type, dtype=like.dtype)
