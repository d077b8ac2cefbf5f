"""Derivatives of collectives, as functions of the values of all ranks.

Most are linear: forward mode sends tangents as it sends values, and reverse mode is the transpose,
which PyTorch's formulas are. A maximum over ranks is not linear. PyTorch reduces its cotangents by
the maximum too, which is no derivative; so it is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn.errors import MissingRule
from thunder_fn.ir import ops
from thunder_fn.ir.rules import JvpRule, Mask, Split, chosen
from thunder_fn.ir.trace import Equation, Literal, Op, Trace, TraceBuilder, type_of
from thunder_fn.ir.walking import inline_into

_REDUCING = ("all_reduce", "reduce_scatter")
_LINEAR = ("all_gather", "all_to_all", "broadcast", "wait_tensor")
_ALL_REDUCE = f"{ops.COLLECTIVES}all_reduce.default"
_WAIT = Op("leaf", f"{ops.COLLECTIVES}wait_tensor.default")
_WITHOUT_TRANSPOSE = ("broadcast",)


def _is(equation: Equation, *names: str) -> bool:
    return equation.op.name.startswith(tuple(f"{ops.COLLECTIVES}{name}" for name in names))


def _reduction(equation: Equation) -> str | None:
    """The name of the reduction of a collective; None of one that reduces nothing."""
    if not _is(equation, *_REDUCING):
        return None
    named = [arg.value for arg in equation.args if isinstance(arg, Literal)]
    return str(named[0]).lower()


def is_linear(equation: Equation) -> bool:
    """Test for a collective that is linear in the values of all ranks."""
    return _is(equation, *_LINEAR) or _reduction(equation) in ("sum", "avg")


def is_symmetric(equation: Equation) -> bool:
    """Test for a sum or a mean over ranks that all ranks get."""
    return equation.op.name == _ALL_REDUCE and _reduction(equation) in ("sum", "avg")


def check_derivative(equation: Equation, *, reverse: bool) -> None:
    """Check that a collective has a derivative.

    Raises:
        MissingRule: it has none; names the op and the user's line.
    """
    kind = _reduction(equation)
    if kind is not None and kind not in ("sum", "avg"):
        what = f"{'vjp' if reverse else 'jvp'}: {equation.op} by {kind!r} has no derivative here"
        fix = "Gather the values of all ranks with `all_gather`, and reduce them on each."
        raise MissingRule(what, source=equation.source, fix=fix)
    if reverse and _is(equation, *_WITHOUT_TRANSPOSE):
        fix = "Gather the values of all ranks with `all_gather`, and take those of one."
        raise MissingRule(f"vjp: {equation.op} has none", source=equation.source, fix=fix)


def check_stays(equation: Equation) -> None:
    """Check that a value with a derivative is not sent to another rank.

    Raises:
        MissingRule: it is, by this equation; names the user's line.
    """
    if equation.op == ops.SEND:
        what = "a message to another rank has no derivative: that rank would have to send one back"
        fix = "Use the gradients that `pipeline` returns; its step is not differentiated again."
        raise MissingRule(what, source=equation.source, fix=fix)


def check_batched(equation: Equation) -> None:
    """Check that an op is no message.

    Raises:
        MissingRule: it is one; names the user's line.
    """
    if equation.op in (ops.SEND, ops.RECEIVE, ops.SENT):
        what = "vmap: a message from rank to rank is not batched"
        fix = "Give the step a larger batch, or take `vmap` inside the function of `pipeline`."
        raise MissingRule(what, source=equation.source, fix=fix)


def pushed(single: Trace, active: Mask) -> JvpRule:
    """The jvp of one linear collective, all of whose tensors have tangents: itself, twice.

    Tangents are awaited here, as gradients are: torch.func does not show them to a later wait.
    """
    builder = TraceBuilder(f"{single.name}_jvp")
    primals = builder.take(single.input_types)
    tangents = builder.take(chosen(single.input_types, active))
    results = inline_into(builder, single, primals)
    sent = inline_into(builder, single, tangents)
    found = (builder.add(_WAIT, (one,), (type_of(one),))[0] for one in sent)
    return JvpRule(builder.build((*results, *found)), (True,) * len(single.outputs))


def transposed(single: Trace) -> Split:
    """The vjp of one symmetric collective, which is itself; awaited, as gradients are read."""
    builder = TraceBuilder(f"{single.name}_backward")
    given = builder.take(single.output_types)
    (sent,) = inline_into(builder, single, given)
    found = builder.add(_WAIT, (sent,), single.input_types)
    return Split(single, builder.build(found), (), (0,))


def mean_scattered(x: torch.Tensor, reduction: str, size: int, group: str) -> Any:
    """The mean over ranks as the sum of parts, of which PyTorch has a derivative."""
    if reduction.lower() != "avg":
        return NotImplemented
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    return scatter(x / size, "sum", size, group)
