"""check_errors: a trace that also computes which of its checks failed first.

    outputs..., code = checked(inputs...)       code: i64[], 0 if no check failed

A check is a NaN among an equation's results, a place outside of what it indexes, or an assertion.
Checks are numbered from 1. Each gives a flag; a trace puts its flags in a row, in the order of its
equations, and the first that is set is its code. A structured op hands on the code of its bodies: a
loop carries the first one, a branch returns its own.

Assertions are taken out of the program, and places outside are replaced by 0, so that nothing
raises. Values are those of the trace as long as the code is 0.

Source: jax.experimental.checkify.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal as Choice, TypeAlias

import torch
from torch.utils import _pytree as torch_pytree

from thunder_fn.errors import CheckFailed, located
from thunder_fn.interpreters.grad import zeros
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import facts, ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import FREE_TYPES, Rules
from thunder_fn.ir.trace import (
    Atom,
    Dim,
    Equation,
    Literal,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    every_equation,
    subtraces,
)
from thunder_fn.ir.types import is_differentiable
from thunder_fn.ir.walking import inline_into, put, rewritten, walk
from thunder_fn.torch_internals import named_arguments

Kind: TypeAlias = Choice["nan", "bounds", "asserts"]
KINDS: tuple[Kind, ...] = ("nan", "bounds", "asserts")
aten = torch.ops.aten

Checked: TypeAlias = tuple[Sequence[Atom], Atom]
"""The results of an equation, and the code of its bodies."""
Rule: TypeAlias = Callable[
    [TraceBuilder, Equation, tuple[Atom, ...], Callable[[Trace], Trace]], Checked
]
CHECK_ERRORS: Rules[Rule] = Rules("check_errors")
"""`rule(builder, equation, operands, checked)` appends the equation with checks in its bodies.
`checked(body)` has the body's code as one more output. An op whose outputs have the types that its
bodies give needs no rule. Of an op without a rule the results are checked, and the assertions of
its first body.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """A thing that may go wrong: its kind, a sentence about it, and the user's line."""

    kind: Kind
    text: str
    source: Source | None


@dataclass(frozen=True, eq=False)
class FoundError:
    """The first check that failed in a call, if one did. A pytree with one tensor.

    Args:
        code: an i64[], 0 if no check failed; with a dim for each vmap around the call.
        checks: those of the program; the code is a number among them, from 1.
    """

    code: torch.Tensor
    checks: tuple[Check, ...] = field(repr=False)

    def get(self) -> str | None:
        """Return the text of the first error, or None."""
        failed = self.code.nonzero().tolist()
        if not failed:
            return None
        place = tuple(failed[0])
        check = self.checks[int(self.code[place]) - 1]
        what = check.text
        if place:
            example = place[0] if len(place) == 1 else place
            what += f", in example {example}; {len(failed)} of {self.code.numel()} examples fail"
        return located(what, source=check.source)

    def throw(self) -> None:
        """Raise the first error, if there is one.

        Raises:
            CheckFailed: a check failed.
        """
        found = self.get()
        if found is not None:
            raise CheckFailed(found)


torch_pytree.register_pytree_node(
    FoundError,
    lambda error: ([error.code], error.checks),
    lambda parts, checks: FoundError(next(iter(parts)), checks),
)


@memo(256)
def check_errors(trace: Trace, kinds: tuple[Kind, ...]) -> tuple[Trace, tuple[Check, ...]]:
    """Return the trace with a code as its last output, and the checks: check i has the code i + 1.

    Results that nothing needs are not computed.

    Law: the code is 0 if and only if no check fails when the trace is evaluated equation by
        equation; then the other outputs are those of the trace. Otherwise it is that of the first
        check that fails.
    """
    trace = dce(trace)
    checking = _Checking(frozenset(kinds), _device_of(trace))
    return checking.checked(trace), tuple(checking.checks)


def first_code(builder: TraceBuilder, code: Atom, later: Atom) -> Atom:
    """Return the first code unless it is 0, and the later one then."""
    type = _tensor(code)
    is_set = replace(type, dtype=torch.bool)
    flag = ops.emit(builder, aten.ne.Scalar, (code, 0), is_set)
    return ops.emit(builder, aten.where.self, (flag, code, later), type)


def carrying_code(body: Trace, place: int, position: int) -> Trace:
    """Return a checked body that carries a code: it takes one more input, at `place`, and gives
    the first code as the output at `position`.
    """
    builder = TraceBuilder(body.name)
    types = list(body.input_types)
    types.insert(place, body.output_types[-1])
    inputs = list(builder.take(types))
    before = inputs.pop(place)
    *results, own = inline_into(builder, body, inputs)
    results.insert(position, first_code(builder, before, own))
    return builder.build(tuple(results))


def _device_of(trace: Trace) -> torch.device:
    """The device of codes: a GPU if there is one in the trace."""
    found = {
        var.type.device
        for inner in subtraces(trace)
        for var in (*inner.inputs, *(var for one in inner.equations for var in one.outputs))
        if isinstance(var.type, TensorType)
    }
    others = sorted((device for device in found if device.type not in ("cpu", "meta")), key=str)
    return others[0] if others else torch.device("cpu")


def _tensor(atom: Atom) -> TensorType:
    assert isinstance(atom, Var) and isinstance(atom.type, TensorType), "checks are of tensors"
    return atom.type


class _Checking:
    """The checks of a trace and of the bodies in it, as they are numbered."""

    def __init__(self, kinds: frozenset[Kind], device: torch.device) -> None:
        self.kinds = kinds
        self.type = TensorType(torch.int64, (), device)
        self.checks: list[Check] = []
        self._done: dict[tuple[int, Source | None], tuple[Trace, Trace, bool]] = {}

    def checked(self, trace: Trace, call: Source | None = None) -> Trace:
        """Return the trace with its code as one more output; a call of a body has one numbering."""
        return self._checked(trace, call)[1]

    def has_checks(self, trace: Trace, call: Source | None) -> bool:
        """Test whether the code of a body may be another one than 0."""
        return self._checked(trace, call)[2]

    def _checked(self, trace: Trace, call: Source | None) -> tuple[Trace, Trace, bool]:
        key = id(trace), call
        if key not in self._done:
            row = _Row(self, TraceBuilder(trace.name))
            outputs = row.walk(trace, call)
            new = row.builder.build((*outputs, row.code()))
            self._done[key] = trace, new, bool(row.found)
        return self._done[key]


class _Row:
    """The checks of one trace, in the order of its equations: flags, and the codes of bodies."""

    def __init__(self, checking: _Checking, builder: TraceBuilder) -> None:
        self.checking, self.builder = checking, builder
        self.found: list[tuple[Atom, Check | None]] = []

    def walk(self, trace: Trace, call: Source | None) -> tuple[Atom, ...]:
        """Append the trace with its checks."""
        read = {var.index for var in operands_in(trace.equations)}
        read |= {atom.index for atom in trace.outputs if isinstance(atom, Var)}
        inputs = self.builder.take(trace.input_types)
        return walk(self.builder, trace, inputs, partial(self._step, read), call=call)

    def _step(
        self, read: set[int], equation: Equation, operands: tuple[Atom, ...]
    ) -> Sequence[Atom]:
        if "asserts" in self.checking.kinds and equation.op in facts.ASSERTIONS:
            return self._assertion(equation, operands)
        rule = CHECK_ERRORS.find(equation.op) or _by_outputs(equation)
        if rule is not None and equation.bodies:
            call = equation.source
            if not any(self.checking.has_checks(body, call) for body in equation.bodies):
                return put(self.builder, equation, operands)
            checked = partial(self.checking.checked, call=call)
            results, code = rule(self.builder, equation, operands, checked)
            self.found.append((code, None))
            return results
        if "asserts" in self.checking.kinds and any(map(_asserts, equation.bodies)):
            equation = self._outside(equation, operands)
        if "bounds" in self.checking.kinds:
            operands = self._inside(equation, operands)
        results = put(self.builder, equation, operands)
        if "nan" in self.checking.kinds and not _copies(equation):
            self._without_nan(equation, results, read)
        return results

    def _assertion(self, equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        (condition,) = operands
        message = str(equation.args[1].value) if len(equation.args) > 1 else "an assertion fails"  # type: ignore[union-attr]
        failed = self._add(aten.eq.Scalar, (condition, Literal(0)))
        self._fails(failed, Check("asserts", message, equation.source))
        return ()

    def _outside(self, equation: Equation, operands: tuple[Atom, ...]) -> Equation:
        """The call of a function with a rule of its own, whose assertions are checked beside it."""
        function = equation.bodies[0]
        assert function.input_types == equation.operand_types, "the first body is the function"
        checked = self.checking.checked(function, equation.source)
        code = inline_into(self.builder, checked, operands, equation.source)[-1]
        self.found.append((code, None))
        return replace(equation, bodies=tuple(map(_without_assertions, equation.bodies)))

    def _inside(self, equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        """The operands with 0 for each place that is outside of what it indexes."""
        inside = dict(zip(equation.operands, operands, strict=True))
        for place in places_of(equation):
            atom = inside[place.operand]
            low: Dim = place.size * -1 if place.wraps else 0  # type: ignore[assignment]
            below = self._add(aten.lt.Scalar, (atom, low))
            above = self._add(aten.ge.Scalar, (atom, place.size))
            outside = self._add(aten.logical_or.default, (below, above))
            if place.besides is not None:
                other = self._add(aten.ne.Scalar, (atom, place.besides))
                outside = self._add(aten.logical_and.default, (outside, other))
            text = f"{equation.op.name} takes a place outside of {place.of}"
            self._fails(outside, Check("bounds", text, equation.source))
            filled = (atom, outside, 0), _tensor(atom)
            inside[place.operand] = ops.emit(self.builder, aten.masked_fill.Scalar, *filled)
        return tuple(inside[var] for var in equation.operands)

    def _without_nan(
        self, equation: Equation, results: Sequence[Atom], read: Collection[int]
    ) -> None:
        for var, result in zip(equation.outputs, results, strict=True):
            if var.index in read and is_differentiable(var.type):
                text = f"{equation.op.name} gives NaN"
                is_nan = self._add(aten.ne.Tensor, (result, result))
                self._fails(is_nan, Check("nan", text, equation.source))

    def _fails(self, flags: Var, check: Check) -> None:
        """Record a check that fails if any of the flags is set."""
        type = replace(self.checking.type, dtype=torch.bool)
        own = replace(_tensor(flags), shape=())
        flag = ops.emit(self.builder, aten.any.default, (flags,), own)
        if own != type:
            flag = ops.emit(self.builder, aten._to_copy.default, (flag,), type, device=type.device)
        self.found.append((flag, check))

    def _add(self, op: Any, args: tuple[Any, ...]) -> Var:
        """Append an op that compares, of the first argument's sizes."""
        return ops.emit(self.builder, op, args, replace(args[0].type, dtype=torch.bool))

    # ---- the code ----

    def code(self) -> Atom:
        """The first code of the row that is not 0."""
        if not self.found:
            return zeros(self.builder, self.checking.type)
        runs = itertools.groupby(self.found, key=lambda one: one[1] is None)
        parts = [self._codes(list(run)) for _, run in runs]
        codes, count = parts[0], len(self.found)
        if len(parts) > 1:
            codes = self._new(aten.cat.default, (tuple(parts),), count)
        if count > 1:
            is_set = self._add(aten.ne.Scalar, (codes, 0))
            numbers = self._new(aten._to_copy.default, (is_set,), count, dtype=torch.int64)
            place = self._new(aten.argmax.default, (numbers, 0, True), 1)
            codes = self._new(aten.index_select.default, (codes, 0, place), 1)
        return self._new(aten.select.int, (codes, 0, 0))

    def _codes(self, run: Sequence[tuple[Atom, Check | None]]) -> Atom:
        """The codes of neighbours that are all flags, which are numbered here, or all codes."""
        atoms, checks = tuple(atom for atom, _ in run), [check for _, check in run]
        count = len(atoms)
        if checks[0] is None:
            return self._new(aten.stack.default, (atoms,), count)
        first = len(self.checking.checks) + 1
        self.checking.checks.extend(check for check in checks if check is not None)
        like = replace(self.checking.type, shape=(count,))
        are_bools = replace(like, dtype=torch.bool)
        flags = ops.emit(self.builder, aten.stack.default, (atoms,), are_bools)
        kind = {"dtype": like.dtype, "device": like.device}
        numbers = self._new(aten.arange.start, (first, first + count), count, **kind)
        return self._new(aten.mul.Tensor, (flags, numbers), count)

    def _new(self, op: Any, args: tuple[Any, ...], count: int | None = None, **kwargs: Any) -> Var:
        """Append an op whose result is a code, or so many."""
        type = replace(self.checking.type, shape=() if count is None else (count,))
        return ops.emit(self.builder, op, args, type, **kwargs)


def _by_outputs(equation: Equation) -> Rule | None:
    """The rule of ops whose outputs have the types that their bodies give."""
    is_free = equation.op.kind == "composite" or FREE_TYPES.find(equation.op)
    return _more_outputs if is_free else None


def _more_outputs(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    checked: Callable[[Trace], Trace],
) -> Checked:
    bodies = tuple(map(checked, equation.bodies))
    types = (*equation.output_types, bodies[0].output_types[-1])
    if equation.op.kind == "composite":  # no longer the call that its name says
        equation = replace(equation, op=ops.composite(ops.short_name(equation.op)))
    *results, code = put(builder, equation, operands, bodies=bodies, types=types)
    return results, code


def _asserts(trace: Trace) -> bool:
    return any(one.op in facts.ASSERTIONS for one in every_equation(trace))


def _without_assertions(trace: Trace) -> Trace:
    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> Sequence[Atom]:
        bodies = tuple(map(_without_assertions, equation.bodies))
        is_left = equation.op in facts.ASSERTIONS
        return () if is_left else put(builder, equation, operands, bodies=bodies)

    return rewritten(trace, step)


def _copies(equation: Equation) -> bool:
    """Test for an equation that computes no values: a view, a copy, or memory as it is."""
    op = equation.op
    return (
        not equation.operands
        or ops.is_view(op)
        or op in (ops.RESHAPE, ops.STOP_GRADIENT)
        or op in facts.MOVES
        or op in facts.EMPTY
    )


# ---- places ----


@dataclass(frozen=True, slots=True)
class Place:
    """An operand that indexes: the size of what it indexes, and what that is.

    `wraps`: negative places count from the end. `besides` is one more place that is allowed.
    """

    operand: Var
    size: Dim
    of: str
    wraps: bool = False
    besides: int | None = None


def places_of(equation: Equation) -> Iterator[Place]:
    """The operands of a leaf that say places in another one."""
    if equation.op.kind != "leaf":
        return
    given = named_arguments(ops.overload(equation.op), equation.args, dict(equation.kwargs))
    shape = given["self"].type.shape if isinstance(given.get("self"), Var) else ()
    name = equation.op.name.split(".")[1]
    if equation.op in facts.INDEXES:
        for dim, index in enumerate(given["indices"]):
            if isinstance(index, Var) and _tensor(index).dtype not in (torch.bool, torch.uint8):
                yield Place(index, shape[dim], f"dim {dim} of {given['self'].type}", wraps=True)
    elif equation.op in facts.INDEXES_ALONG_DIM and shape and isinstance(given["index"], Var):
        dim, wraps = given["dim"].value % len(shape), name == "index_fill"
        yield Place(given["index"], shape[dim], f"dim {dim} of {given['self'].type}", wraps)
    elif equation.op in facts.INDEXES_ELEMENTS:
        size = math.prod(shape)
        yield Place(given["index"], size, f"{given['self'].type}", wraps=True)
    elif equation.op in facts.EMBEDS:
        weight = given["weight"].type
        yield Place(given["indices"], weight.shape[0], f"dim 0 of {weight}")
    elif name == "embedding_dense_backward":
        size = given["num_weights"].value
        yield Place(given["indices"], size, f"{size} embeddings")
    elif equation.op in facts.CLASS_LOSSES:
        size = shape[1 if len(shape) > 1 else 0]
        ignored = given["ignore_index"].value
        yield Place(given["target"], size, f"{size} classes", besides=ignored)
