"""Dtypes, constants, copies, random numbers, and composites."""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_fn.ir import ops
from thunder_fn.ir.trace import Arg, Equation, Literal, Trace
from thunder_fn.structured.custom_vjp import CUSTOM_VJP
from thunder_fn.testing.drawn_programs import (
    BODIES,
    STEPS,
    Draft,
    Skip,
    Step,
    register,
    shape_of,
    tensor_type,
)
from thunder_fn.testing.laws.effects import effect
from thunder_fn.testing.schemas import relatives
from thunder_fn.testing.steps.enter import call, step, void
from thunder_fn.testing.suits import (
    both,
    broadcasts_with,
    has_dims,
    has_elements,
    has_type_of,
    is_any,
    is_complex,
    is_inexact,
    is_mask,
    is_number,
    is_real,
    same_dtype,
)

aten = torch.ops.aten


# dtypes, constants, copies


@step("make")
def _to_inexact(d: Draft) -> object:
    dtype = (torch.float64, torch.float32, torch.complex128)[d.number(3)]
    return d.leaf(aten._to_copy.default, d.var(lambda var: not is_complex(var)), dtype=dtype)


@step("make")
def _to_integer(d: Draft) -> object:
    return d.leaf(aten._to_copy.default, d.var(is_mask), dtype=torch.int64)


@step("make")
def _complex(d: Draft) -> object:
    x = d.var(is_real)
    return d.leaf(aten.complex.default, x, d.var(both(same_dtype(x), broadcasts_with(x))))


@step("make")
def _from_complex(d: Draft) -> object:
    return d.leaf(
        (aten.view_as_real.default, aten.conj_physical.default)[d.number(2)], d.var(is_complex)
    )


@step("make")
def _full(d: Draft) -> object:
    shape = ([], [2], [2, 3], [0])[d.number(4)]
    value, dtype = ((0.75, torch.float64), (2, torch.int64), (True, torch.bool))[d.number(3)]
    return d.leaf(aten.full.default, shape, value, dtype=dtype, device=torch.device("cpu"))


@step("make")
def _arange(d: Draft) -> object:
    return d.leaf(
        aten.arange.default, 2 + d.number(2), dtype=(torch.int64, torch.float64)[d.number(2)]
    )


call("stop", "full_like", aten.full_like.default, is_inexact, 1.5)
call("stop", "clone", aten.clone.default, is_any)
call("stop", "detach", aten.detach.default, is_inexact)


CONSTANTS = (
    torch.nn.Parameter(torch.tensor([0.5, -1.25, 2.0], dtype=torch.float64)),
    torch.tensor([-0.75, 0.25, 1.0], dtype=torch.float64),
    torch.tensor([[1.5, -0.75, 0.25], [0.5, 2.5, -1.0]], dtype=torch.float64),
    torch.tensor([1, -2, 0], dtype=torch.int64),
)
"""Tensors that programs close over, by reference."""

_SCALE = torch.tensor(0.5, dtype=torch.float64)
"""A number that programs close over: it looks like a literal, and may change."""

_SQUARE = torch.tensor([[0.5, -1.5, 1.0], [0.25, 2.0, -0.5], [1.25, 0.75, -1.0]]).double()


@step("constant")
def _constant(d: Draft) -> object:
    """The new variable binds before all equations, so it counts as the newest only until the
    next one.
    """
    var = d.builder.constant(CONSTANTS[d.number(len(CONSTANTS))])
    return None if var in d.env else d.bind((var,))


@step("constant")
def _two_constants(d: Draft) -> object:
    """Two of one type: taking one for the other shows."""
    return _difference(d, *CONSTANTS[:2])


def _difference(d: Draft, *tensors: torch.Tensor) -> object:
    x, y = map(d.builder.constant, tensors)
    d.bind(tuple(var for var in (x, y) if var not in d.env))
    return d.leaf(aten.sub.Tensor, x, y)


@step("constant")
def _owned_constant(d: Draft) -> object:
    values = ([0.5, 1.5, -2.0], [1.0, -1.5, 0.75], [1, 0, 2], True)[d.number(4)]
    data = torch.tensor(values)
    return d.bind(
        (d.builder.constant(data.double() if data.is_floating_point() else data, owned=True),)
    )


# random numbers


@step("random")
def _bernoulli(d: Draft) -> object:
    (probability,) = d.leaf(aten.sigmoid.default, d.var(is_real))
    (probability,) = d.leaf(aten.nan_to_num.default, probability, 0.5)
    return d.leaf(aten.bernoulli.default, probability)


@step("random")
def _dropout(d: Draft) -> object:
    """Append a dropout, but not of an empty tensor: PyTorch's mask is then of the input's dtype on
    the CPU and bool on fake tensors.
    """
    return d.leaf(aten.native_dropout.default, d.var(both(is_real, has_elements)), 0.5, True)


@step("random")
def _rand(d: Draft) -> object:
    return d.leaf(
        aten.rand.default, [2, 3], dtype=torch.float64, device=torch.device("cpu"), pin_memory=False
    )


@step("random")
def _normal_like(d: Draft) -> object:
    return d.leaf(aten.randn_like.default, d.var(is_real))


@step("twin")
def _twin(d: Draft) -> object:
    """An earlier equation once more, which cse merges unless it is random, so that cotangents
    meet.
    """
    known = d.builder.equations[-1 - d.number(len(d.builder.equations))]
    return d.bind(d.builder.copy(known, lambda var: var))


OTHERS = {
    ops.leaf(op): ops.leaf(other)
    for one in ((aten.sin.default, aten.cos.default), (aten.mul.Tensor, aten.sub.Tensor))
    for op, other in (one, one[::-1])
}
"""Leaves that take each other's place in a cousin."""


def _cousin(d: Draft, _: Step) -> None:
    """Append the newest equation once more: a leaf with another argument, one with bodies with
    another option, or other bodies.
    """
    known = next(reversed(d.builder.equations), None)
    if known is None or known.op == CUSTOM_VJP:  # its bodies have to fit each other
        raise Skip
    if known.op.kind == "leaf":
        found = relatives(d, known)
        args, kwargs = found[d.number(len(found))]
        d.leaf(ops.overload(known.op), *args, **kwargs)
        return
    new = _changed(known, d.number(4))
    if new == known:
        raise Skip
    d.bind(d.builder.copy(new, lambda var: var))


def _changed(known: Equation, what: int) -> Equation:
    """An equation with other leaves in its bodies, other options, other operands of the leaves of
    its first body, or other numbers in its last one.
    """
    match what:
        case 0:
            return replace(known, bodies=tuple(map(_with_others, known.bodies)))
        case 1:
            options = tuple((key, _turned(value)) for key, value in known.kwargs)
            return replace(known, kwargs=options)
        case 2:
            return replace(known, bodies=(_exchanged(known.bodies[0]), *known.bodies[1:]))
        case _:
            return replace(known, bodies=(*known.bodies[:-1], _with_numbers(known.bodies[-1])))


def _turned(value: Arg) -> Arg:
    """Another value of an option that is true or false."""
    if isinstance(value, Literal) and isinstance(value.value, bool):
        return Literal(not value.value)
    return value


def _with_others(body: Trace) -> Trace:
    new = (
        replace(e, op=OTHERS.get(e.op, e.op), bodies=tuple(map(_with_others, e.bodies)))
        for e in body.equations
    )
    return replace(body, equations=tuple(new))


def _exchanged(body: Trace) -> Trace:
    """The body with the operands of its differences in the other order."""
    new = (
        replace(e, args=e.args[::-1]) if e.op == _DIFFERENCE and _is_even(e) else e
        for e in body.equations
    )
    return replace(body, equations=tuple(new))


_DIFFERENCE = ops.leaf(aten.sub.Tensor)


def _is_even(equation: Equation) -> bool:
    """Test for two operands of one type."""
    return len(equation.operands) == 2 and len(set(equation.operand_types)) == 1


def _with_numbers(body: Trace) -> Trace:
    """The body with numbers that are one more."""
    new = (
        replace(e, args=(e.args[0], _more(e.args[1]), *e.args[2:])) if e.op == _POWER else e
        for e in body.equations
    )
    return replace(body, equations=tuple(new))


_POWER = ops.leaf(aten.pow.Tensor_Scalar)


def _more(value: Arg) -> Arg:
    return Literal(value.value + 1) if isinstance(value, Literal) else value


def _effect(d: Draft, _: Step) -> None:
    """Append a call of Python on a value."""
    op, number = effect()
    d.builder.add(op, (number, (d.var(is_inexact),), (), ()), ())


def _written(d: Draft, _: Step) -> None:
    """Append memory that holds nothing yet, and equations that write all of it."""
    x = d.var(both(is_inexact, has_elements, has_dims))
    (held,) = d.leaf(aten.empty_like.default, x)
    rest = shape_of(x)[0] // 2
    match d.number(4):
        case 0:
            d.leaf(aten.fill.Scalar, held, 0.75)
        case 1:
            d.leaf(aten.copy.default, held, x)
        case 2:
            (low,), (high,) = (d.leaf(aten.slice.Tensor, x, 0, *at) for at in ((0, rest), (rest,)))
            (half,) = d.leaf(aten.slice_scatter.default, held, low, 0, 0, rest)
            d.leaf(aten.slice_scatter.default, half, high, 0, rest)
        case _:
            (mask,) = d.leaf(aten.ones_like.default, x, dtype=torch.bool)
            d.leaf(aten.where.self, mask, x, held)


_EXTREMES = (
    (aten.mul.Tensor, 1, 0),
    *((aten.add.Tensor, 0, value) for value in (torch.inf, torch.nan, -torch.inf)),
)


def _extreme(d: Draft, _: Step) -> None:
    """Append a value half of whose elements are 0, infinite or NaN."""
    x = d.var(both(is_number, has_elements))
    op, other, value = _EXTREMES[d.number(len(_EXTREMES)) if is_inexact(x) else 0]
    data = torch.full(shape_of(x), other, dtype=tensor_type(x).dtype)
    data.view(-1)[: (data.numel() + 1) // 2] = value
    d.leaf(op, x, d.builder.constant(data, owned=True))


STEPS["cousin"], STEPS["effect"], STEPS["written"] = _cousin, _effect, _written
STEPS["extreme"] = _extreme
STEPS["transposed_constant"] = lambda d, _: void(_difference(d, _SQUARE, _SQUARE.t()))
STEPS["scaled"] = lambda d, _: void(
    d.leaf(aten.mul.Tensor, d.var(is_real), d.builder.constant(_SCALE))
)
"""Steps that are in programs made on purpose only, as is an operator."""


# composites


def _composite(d: Draft, step: Step) -> None:
    """Append a composite in one of the ways in which one is called: plain, or as a user's call with
    literals and keywords.
    """
    style = d.number(3)
    operands = tuple(d.var(is_any) for _ in range((1, 2, 3, 0)[d.number(4)]))
    body = Draft.closed(step.body(), tuple(map(tensor_type, operands)), "block")
    match style:
        case 0:
            d.call(ops.composite("Block"), operands, body)
        case 1:
            d.call(
                ops.composite("torch.nn.functional.block"),
                (*operands[:1], Literal(2), operands[1:]),
                body,
            )
        case _:
            kwargs = tuple((f"weight_{i}", var) for i, var in enumerate(operands[1:]))
            d.call(
                ops.composite("torch.block"), operands[:1], body, (("eps", Literal(0.5)), *kwargs)
            )


def _again(d: Draft, _: Step) -> None:
    """Call the body of an earlier composite again, on operands of the same types."""
    known = d.calls[-1 - d.number(len(d.calls))]
    operands = tuple(d.var(has_type_of(var)) for var in known.operands)
    d.call(ops.composite(ops.short_name(known.op)), operands, known.body)


def _sibling(d: Draft, step: Step) -> None:
    """Append an earlier call with another body: two composites of one name and the same
    operands.
    """
    known = d.calls[-1 - d.number(len(d.calls))]
    body = Draft.closed(step.body(), tuple(map(tensor_type, known.operands)), "block")
    d.call(known.op, known.args, body, known.kwargs)


def _operator(d: Draft, step: Step) -> None:
    """Append an operator as an executor brings it, which is computed as a whole."""
    operands = tuple(d.var(is_any) for _ in range((1, 2, 3, 0)[d.number(4)]))
    body = Draft.closed(step.body(), tuple(map(tensor_type, operands)), "block")
    d.call(ops.composite("drawn::block"), operands, body)


STEPS["operator"], BODIES["operator"] = _operator, 1

register("composite", "composite", _composite, bodies=1)
register("composite", "again", _again)
register("composite", "sibling", _sibling, bodies=1)
