"""Transforms as users write them, in many styles: the judges of `check_transform` are their
mutants.

Each is right: it keeps values, draws and derivatives, and commutes with every transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    Op,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    every_equation,
    map_arg,
)
from thunder_fn.ir.walking import put, rewritten

aten = torch.ops.aten
SUM, POWER, PRODUCT = (
    ops.leaf(op) for op in (aten.add.Tensor, aten.pow.Tensor_Scalar, aten.mul.Tensor)
)
RELU = ops.leaf(aten.relu.default)


def _type(equation: Equation) -> TensorType:
    type = equation.outputs[0].type
    assert isinstance(type, TensorType)
    return type


def _is_float(equation: Equation) -> bool:
    """Test for an equation of floats: PyTorch's integers have other rules."""
    return all(
        isinstance(var.type, TensorType) and var.type.dtype.is_floating_point
        for var in (*equation.operands, *equation.outputs)
    )


def sorted_sums(trace: Trace) -> Trace:
    """`x + y` with the older operand first."""

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        if equation.op == SUM and len(operands) == 2 and not equation.kwargs:
            args = sorted((x for x in operands if isinstance(x, Var)), key=lambda var: var.index)
            if len(args) == 2:
                return builder.add(SUM, tuple(args), (equation.outputs[0].type,))
        return put(builder, equation, operands)

    return rewritten(trace, step)


def squares_as_products(trace: Trace) -> Trace:
    """`x ** 2` as `x * x`, in bodies too."""

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        bodies = tuple(squares_as_products(body) for body in equation.bodies)
        if equation.op == POWER and equation.args[1] == Literal(2) and _is_float(equation):
            x = operands[0]
            return builder.add(PRODUCT, (x, x), (equation.outputs[0].type,))
        return put(builder, equation, operands, bodies=bodies)

    return rewritten(trace, step)


def differences_as_sums(trace: Trace) -> Trace:
    """`x - a * y` as `x + -a * y`."""

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        if equation.op.name != "aten.sub.Tensor" or len(operands) != 2:
            return put(builder, equation, operands)
        options = dict(equation.kwargs)
        alpha = options.get("alpha", Literal(1))
        if not isinstance(alpha, Literal) or not isinstance(alpha.value, int | float):
            return put(builder, equation, operands)  # a number that is a variable
        return builder.add(
            SUM, tuple(operands), (_type(equation),), kwargs=(("alpha", Literal(-alpha.value)),)
        )

    return rewritten(trace, step)


def relu_as_clamp(trace: Trace) -> Trace:
    """`relu(x)` as `threshold_backward(x, x, 0)`, one equation for another."""

    def of(equation: Equation) -> Equation:
        bodies = tuple(map(relu_as_clamp, equation.bodies))
        if equation.op != RELU:
            return replace(equation, bodies=bodies)
        x = equation.args[0]
        return replace(
            equation, op=Op("leaf", "aten.threshold.default"), args=(x, Literal(0), Literal(0))
        )

    return replace(trace, equations=tuple(map(of, trace.equations)))


def silu_written_out(trace: Trace) -> Trace:
    """`silu(x)` as `x * sigmoid(x)`."""

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        if equation.op.name == "aten.silu.default":
            type = _type(equation)
            (gate,) = builder.add(Op("leaf", "aten.sigmoid.default"), tuple(operands), (type,))
            return builder.add(PRODUCT, (operands[0], gate), (type,))
        return put(builder, equation, operands)

    return rewritten(trace, step)


def without_double_negation(trace: Trace) -> Trace:
    """`-(-x)` as a copy of x."""
    makers = {var: equation for equation in trace.equations for var in equation.outputs}

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        known.update(zip(equation.operands, operands, strict=True))
        if equation.op.name == "aten.neg.default":
            inner = makers.get(equation.operands[0])
            if inner is not None and inner.op == equation.op:
                x = known[inner.operands[0]]
                return builder.add(
                    Op("leaf", "aten.clone.default"), (x,), (equation.outputs[0].type,)
                )
        return put(builder, equation, operands)

    known: dict[Var, Atom] = {}
    return rewritten(trace, step)


def without_dead_leaves(trace: Trace) -> Trace:
    """A dce of one's own: leaves that nobody reads go, if they draw nothing and find no size."""
    read = {var for var in trace.outputs if isinstance(var, Var)}
    kept = list[Equation]()
    for equation in reversed(trace.equations):
        is_read = any(var in read for var in equation.outputs)
        if is_read or equation.bodies or ops.has_side_effect(equation) or made_by(equation):
            kept.append(equation)
            read.update(equation.operands)

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        return put(builder, equation, operands) if equation in kept else equation.outputs

    return rewritten(trace, step)


def _leaves(trace: Trace, equation: Equation) -> bool:
    """Test whether a result, or what may be a view of it, may be returned."""
    readers = (e for e in trace.equations if e.bodies or ops.is_view(e.op))
    handed_on = {*trace.outputs, *(var for reader in readers for var in reader.operands)}
    return any(var in handed_on for var in equation.outputs)


def without_twins(trace: Trace) -> Trace:
    """A cse of one's own, of leaves that draw nothing and find no size."""
    known: dict[Any, Any] = {}

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        if equation.op.kind != "leaf" or ops.has_side_effect(equation) or made_by(equation):
            return put(builder, equation, operands)
        supply = iter(operands)
        args = tuple(map_arg(lambda _: next(supply), arg) for arg in equation.args)
        options = tuple((key, map_arg(lambda _: next(supply), v)) for key, v in equation.kwargs)
        key = (equation.op, repr(args), repr(options))
        if key not in known or _leaves(trace, equation):
            known[key] = put(builder, equation, operands)
        return known[key]

    return rewritten(trace, step)


def _is_number(arg: Any) -> bool:
    """Test for a number that is known: others are variables, or expressions in them."""
    return isinstance(arg, Literal) and isinstance(arg.value, int | float)


def scalars_folded(trace: Trace) -> Trace:
    """`(x * a) * b` as `x * (a * b)`."""
    makers = {var: equation for equation in trace.equations for var in equation.outputs}
    known: dict[Var, Atom] = {}

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        known.update(zip(equation.operands, operands, strict=True))
        inner = makers.get(equation.operands[0]) if equation.operands else None
        name = "aten.mul.Scalar"
        if equation.op.name != name or inner is None or inner.op.name != name:
            return put(builder, equation, operands)
        if not (_is_float(equation) and _is_float(inner)):
            return put(builder, equation, operands)
        a, b = equation.args[1], inner.args[1]
        if not (_is_number(a) and _is_number(b)):
            return put(builder, equation, operands)
        factor = Literal(cast(Any, a).value * cast(Any, b).value)
        return builder.add(equation.op, (known[inner.operands[0]], factor), (_type(equation),))

    return rewritten(trace, step)


def sums_along_dims(trace: Trace) -> Trace:
    """`sum(x)` as `sum(x, dims)`: a sum over all dims, each named."""

    def step(builder: TraceBuilder, equation: Equation, operands: Sequence[Atom]) -> Any:
        if equation.op.name != "aten.sum.default" or not isinstance(operands[0], Var):
            return put(builder, equation, operands)
        type = operands[0].type
        if not isinstance(type, TensorType) or len(type.shape) == 0:
            return put(builder, equation, operands)
        dims = tuple(Literal(dim) for dim in range(len(type.shape)))
        op = Op("leaf", "aten.sum.dim_IntList")
        args = (operands[0], dims, Literal(False))
        return builder.add(op, args, (equation.outputs[0].type,), kwargs=equation.kwargs)

    return rewritten(trace, step)


# ---- what each is for ----


def _every(transform: Callable[[Trace], Trace], holds: Callable[[Trace], bool]) -> None:
    """Say what a transform is for: something that holds of every trace that it makes."""
    transform.laws = {"ensures": lambda _, after: holds(after)}  # type: ignore[attr-defined]


def _no(wanted: Callable[[Equation], bool]) -> Callable[[Trace], bool]:
    return lambda trace: not any(map(wanted, trace.equations))


def _nowhere(wanted: Callable[[Equation], bool]) -> Callable[[Trace], bool]:
    return lambda trace: not any(map(wanted, every_equation(trace)))


def _chains(trace: Trace, name: str) -> int:
    """The length of the longest chain of calls of an op on its own results."""
    lengths: dict[Var, int] = {}
    for equation in trace.equations:
        if equation.op.name == name:
            lengths[equation.outputs[0]] = 1 + lengths.get(equation.operands[0], 0)
    return max(lengths.values(), default=0)


def _is_unsorted(equation: Equation) -> bool:
    args = [arg.index for arg in equation.args if isinstance(arg, Var)]
    return equation.op == SUM and not equation.kwargs and len(args) == 2 and args != sorted(args)


def _is_square(equation: Equation) -> bool:
    return equation.op == POWER and equation.args[1] == Literal(2) and _is_float(equation)


def _is_plain_difference(equation: Equation) -> bool:
    values = [value.value for _, value in equation.kwargs if isinstance(value, Literal)]
    known = all(isinstance(value, int | float) for value in values)
    return equation.op.name == "aten.sub.Tensor" and len(equation.operands) == 2 and known


def _is_dead(trace: Trace) -> bool:
    read = {var for e in trace.equations for var in e.operands} | set(trace.outputs)
    return any(
        e.op.kind == "leaf"
        and not ops.has_side_effect(e)
        and not made_by(e)
        and not read & set(e.outputs)
        for e in trace.equations
    )


def _has_twins(trace: Trace) -> bool:
    leaves = [
        (e.op, e.args, e.kwargs)
        for e in trace.equations
        if e.op.kind == "leaf" and not ops.has_side_effect(e) and not _leaves(trace, e)
    ]
    return len(leaves) != len(set(leaves))


def _sums_many(equation: Equation) -> bool:
    shape = getattr(equation.operands[0].type, "shape", ()) if equation.operands else ()
    return equation.op.name == "aten.sum.default" and len(shape) > 0


_every(sorted_sums, _no(_is_unsorted))
_every(squares_as_products, _nowhere(_is_square))
_every(differences_as_sums, _no(_is_plain_difference))
_every(relu_as_clamp, _nowhere(lambda equation: equation.op == RELU))
_every(silu_written_out, _no(lambda equation: equation.op.name == "aten.silu.default"))
_every(without_double_negation, lambda trace: _chains(trace, "aten.neg.default") < 2)
_every(without_dead_leaves, lambda trace: not _is_dead(trace))
_every(without_twins, lambda trace: not _has_twins(trace))
_every(sums_along_dims, _no(_sums_many))
scalars_folded.laws = {  # type: ignore[attr-defined]
    "ensures": lambda before, after: (
        2 * _chains(after, "aten.mul.Scalar") <= _chains(before, "aten.mul.Scalar") + 1
        or not all(
            _is_number(e.args[-1]) and _is_float(e)
            for e in before.equations
            if "mul.Scalar" in e.op.name
        )
    )
}

USERS: tuple[Callable[[Trace], Trace], ...] = (
    *(sorted_sums, squares_as_products, differences_as_sums, relu_as_clamp, silu_written_out),
    *(without_double_negation, without_dead_leaves, without_twins, scalars_folded),
    sums_along_dims,
)
"""Ten transforms that keep values."""
