"""autocast: a trace whose ops run in lower precision where a policy says so.

The policy is asked about each equation, about a composite before its body. Its answer casts the
arguments; the body of a composite with an answer is not asked about. Everything else takes its
arguments as they come, so types change along the way: ops promote as PyTorch's do.

A `torch.autocast` region, or the result of an autocast inside, stays as it is: the innermost
decides. Values that enter and leave a loop or a custom rule keep their types, and bodies are cast
inside.

This interpreter serves policies of users and transforms of traces. Under PyTorch's own policy
`api/autocast.py` traces the function with autocast on, because only the dispatcher knows how
functions made of other ops are cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.autocast_regions import is_region
from thunder_fn.derived.leaf_autocast import (
    LAYERS,
    TO_COPY,
    Answer,
    body_of_call,
    cast_operands,
    device_of,
    is_eligible,
)
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import AutocastError
from thunder_fn.ir import facts, ops
from thunder_fn.ir.check import fake_result_types
from thunder_fn.ir.memos import memo
from thunder_fn.ir.pretty import format_equation
from thunder_fn.ir.rules import FREE_TYPES
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    TensorType,
    Trace,
    TraceBuilder,
    Type,
    Var,
    supplying,
    type_of,
)
from thunder_fn.ir.walking import begun_with, walk

Policy = Callable[[Equation], Any]


@memo(1024)
def autocast(trace: Trace, dtype: torch.dtype, policy: Policy) -> Trace:
    """Cast the arguments of ops as a policy says.

    Law: with a policy that always answers None the trace computes what it did, bitwise. The inputs
        keep their types.

    Args:
        dtype: the lower precision.
        policy: answers "lower", "float32", "promote" (the widest of the arguments) or None for each
            equation. None for a composite asks about its body.

    Raises:
        AutocastError: the policy answers something else.

    Source: torch.autocast.
    """
    return _retyped(trace, trace.input_types, dtype, policy)


@memo(16384)
def _retyped(
    trace: Trace, types: tuple[Type, ...], dtype: torch.dtype, policy: Policy | None
) -> Trace:
    """The trace for inputs of other types; casts where there is a policy."""
    builder = TraceBuilder(trace.name)
    arguments: tuple[Atom, ...] = builder.take(types)
    return builder.build(walk(builder, trace, arguments, _Casting(builder, dtype, policy).equation))


class _Casting:
    """The step of autocast, which knows how values have been cast already."""

    def __init__(self, builder: TraceBuilder, dtype: torch.dtype, policy: Policy | None) -> None:
        self.builder, self.dtype, self.policy = builder, dtype, policy
        self._cast: dict[tuple[int, torch.dtype], Atom] = {}

    def equation(self, equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """Append the equation on its arguments as they are now."""
        if is_region(equation.op):
            types = equation.output_types
            return self._add(equation, self._as_before(equation, operands), types, equation.bodies)
        answer = None if self.policy is None else ask(self.policy, equation)
        inner = self.policy
        if answer is not None:
            operands, inner = self._answered(equation, operands, answer), None
        match equation.op.kind:
            case "leaf":
                return self._leaf(equation, operands)
            case "composite":
                return self._composite(equation, operands, inner)
            case "structured" if not FREE_TYPES.find(equation.op):
                return self._keeping_types(equation, operands, inner)
            case "structured":
                return self._with_free_types(equation, operands, inner)

    def _answered(
        self, equation: Equation, operands: tuple[Atom, ...], answer: Answer
    ) -> tuple[Atom, ...]:
        device = device_of(equation)
        if device is None:
            return operands
        flags = cast_operands(equation)
        found = [
            type_of(atom) if flag else None for atom, flag in zip(operands, flags, strict=True)
        ]
        floats = [
            type.dtype
            for type in found
            if isinstance(type, TensorType) and is_eligible(type, device)
        ]
        widest = (
            torch.float32
            if torch.float32 in floats or len(set(floats)) > 1
            else next(iter(floats), None)
        )
        target = {"lower": self.dtype, "float32": torch.float32, "promote": widest}[
            answer or "promote"
        ]
        return tuple(
            (
                self.cast(atom, target)
                if target is not None and type is not None and is_eligible(type, device)
                else atom
            )
            for atom, type in zip(operands, found, strict=True)
        )

    def cast(self, atom: Atom, dtype: torch.dtype) -> Atom:
        """The value in this dtype, cast once."""
        if not isinstance(atom, Var):
            return atom
        key = (atom.index, dtype)
        if key not in self._cast:
            self._cast[key] = cast(self.builder, atom, dtype)
        return self._cast[key]

    def _leaf(self, equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        if _same_types(equation, operands):
            return self._add(equation, operands, equation.output_types)
        # its kernel takes one precision, whatever its types promise
        is_backward = "_backward." in equation.op.name
        if equation.op not in facts.PARAMETERS_MAY_BE_WIDER and (
            is_backward or not ops.is_pointwise(equation.op)
        ):
            operands = self._answered(equation, operands, "promote")
        types = None if is_backward and _is_mixed(operands) else _result_types(equation, operands)
        if types is None:  # the op does not take these types: it gets those that it had
            operands = self._as_before(equation, operands)
            types = equation.output_types
        return self._add(equation, operands, types)

    def _as_before(self, equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        return tuple(
            self.cast(atom, var.type.dtype) if isinstance(var.type, TensorType) else atom
            for atom, var in zip(operands, equation.operands, strict=True)
        )

    def _composite(
        self, equation: Equation, operands: tuple[Atom, ...], inner: Policy | None
    ) -> tuple[Atom, ...]:
        is_known = ops.is_call(equation.op) or equation.op.name in LAYERS
        if inner is None and is_known and not _same_types(equation, operands):
            body = body_of_call(alone(equation.reading(supplying(operands))))
            if body is not None:
                return self._add(equation, operands, body.output_types, (body,))
        body = _retyped(equation.body, tuple(map(type_of, operands)), self.dtype, inner)
        if body == equation.body or inner is None:  # it is still the call that its name says
            return self._add(equation, operands, body.output_types, (body,))
        op = ops.composite(ops.short_name(equation.op))
        return self.builder.add(
            op, operands, body.output_types, bodies=(body,), source=equation.source
        )

    def _keeping_types(
        self, equation: Equation, operands: tuple[Atom, ...], inner: Policy | None
    ) -> tuple[Atom, ...]:
        bodies = tuple(
            ending_in(_retyped(b, b.input_types, self.dtype, inner), b.output_types)
            for b in equation.bodies
        )
        types = equation.output_types
        return self._add(equation, self._as_before(equation, operands), types, bodies)

    def _with_free_types(
        self, equation: Equation, operands: tuple[Atom, ...], inner: Policy | None
    ) -> tuple[Atom, ...]:
        if not equation.bodies:
            return self._add(equation, operands, tuple(map(type_of, operands)))
        given = tuple(map(type_of, operands[len(operands) - len(equation.bodies[0].inputs) :]))
        bodies = [_retyped(body, given, self.dtype, inner) for body in equation.bodies]
        columns = zip(equation.outputs, *(body.output_types for body in bodies), strict=True)
        types = tuple(_widest(var.type, column) for var, *column in columns)
        return self._add(
            equation, operands, types, tuple(ending_in(body, types) for body in bodies)
        )

    def _add(
        self,
        equation: Equation,
        operands: tuple[Atom, ...],
        types: tuple[Type, ...],
        bodies: tuple[Trace, ...] = (),
    ) -> tuple[Atom, ...]:
        new = equation.reading(supplying(operands))
        return self.builder.add(
            new.op, new.args, types, kwargs=new.kwargs, bodies=bodies, source=new.source
        )


def ask(policy: Policy, equation: Equation) -> Answer:
    """The policy's answer about an equation.

    Raises:
        AutocastError: it is none of the answers that there are.
    """
    match policy(equation):
        case None | "lower" | "float32" | "promote" as answer:
            return answer
        case other:
            raise AutocastError(
                f"autocast: the policy {getattr(policy, '__name__', type(policy).__name__)}"
                f" answered {other!r}",
                equation=format_equation(equation),
                source=equation.source,
                fix='Answer "lower", "float32", "promote" or None.',
            )


def _is_mixed(operands: tuple[Atom, ...]) -> bool:
    """Test for float64, which autocast lets be, beside a lower precision."""
    types = (type_of(atom) for atom in operands)
    return (
        len(
            {
                type.dtype
                for type in types
                if isinstance(type, TensorType) and type.dtype.is_floating_point
            }
        )
        > 1
    )


def _same_types(equation: Equation, operands: tuple[Atom, ...]) -> bool:
    return all(
        type_of(atom) == var.type for atom, var in zip(operands, equation.operands, strict=True)
    )


def _result_types(equation: Equation, operands: tuple[Atom, ...]) -> tuple[Type, ...] | None:
    """The types of a leaf's results on these operands; None where the op refuses them."""
    try:
        with internals.compiling():  # a refusal is no news for PyTorch's log
            return fake_result_types(equation.reading(supplying(operands)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _widest(type: Type, types: Sequence[Type]) -> Type:
    """The type of a result, whose dtype is the one that those of the branches are cast to."""
    dtypes = [branch.dtype for branch in types if isinstance(branch, TensorType)]
    return (
        replace(type, dtype=reduce(torch.promote_types, dtypes))
        if isinstance(type, TensorType)
        else type
    )


def ending_in(body: Trace, types: tuple[Type, ...]) -> Trace:
    """The body with its results cast to these types."""
    if body.output_types == types:
        return body
    builder, results = begun_with(body)
    return builder.build(
        tuple(
            cast(builder, atom, type.dtype) if isinstance(type, TensorType) else atom
            for atom, type in zip(results, types, strict=True)
        )
    )


def cast(builder: TraceBuilder, atom: Atom, dtype: torch.dtype) -> Atom:
    """The value in this dtype."""
    if (
        not isinstance(atom, Var)
        or not isinstance(atom.type, TensorType)
        or atom.type.dtype == dtype
    ):
        return atom
    type = TensorType(dtype, atom.type.shape, atom.type.device)
    return ops.emit(builder, TO_COPY, (atom,), type, dtype=dtype)
