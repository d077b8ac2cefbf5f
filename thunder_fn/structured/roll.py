"""roll and unroll: equal layers in sequence become one scan over their stacked parameters, and
back.

    v3 = Block(w0, v2)                        w = stack((w0, w1, w2))
    v4 = Block(w1, v3)        roll ->         v5 = scan(v2, w, ...)      body: Block
    v5 = Block(w2, v4)      <- unroll

A run is a sequence of composites with one body, each of which reads the results of the one before,
in the same places. An operand that is the same everywhere is a const of the scan. One that the step
before gives is a carry; the others are stacked. A result that is read outside the run is a ys. So
the forward and the backward of a model of any depth become two scans.

Source: the scan over layers that JAX users write by hand, flax's `nn.scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn.errors import spelled
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import chosen
from thunder_fn.ir.trace import (
    Atom,
    Equation,
    Literal,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    as_kwargs,
    check_is_trace,
    cut,
    map_arg,
    map_args,
    num_vars,
)
from thunder_fn.ir.walking import inline_into, put, rewritten
from thunder_fn.structured.shared.bodies import tensor_type
from thunder_fn.structured.shared.scan_parts import SCAN, Loop, add_scan, slice_of, stacked

aten = torch.ops.aten
STACK = ops.leaf(aten.stack.default)
UNBIND = ops.leaf(aten.unbind.int)
SELECT = ops.leaf(aten.select.int)


@spelled()
@memo(1024)
def roll(trace: Trace) -> Trace:
    """Turn each run of equal composites in sequence, also inside bodies, into one scan.

    Law: same values, bitwise; random numbers are drawn in the same order. ``unroll(roll(t))``
        computes the same as t.

    Raises:
        TraceTypeError: `trace` is no trace.

    Example:
        >>> import torch
        >>> from thunder_fn import trace
        >>> layer = torch.nn.Linear(2, 2)
        >>> deep = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))
        >>> rolled = roll(trace(deep, torch.ones(2)))
        >>> [equation.op.name for equation in rolled.equations]
        ['aten.stack.default', 'aten.stack.default', 'scan']
    """
    check_is_trace("roll", trace)
    bodies = (tuple(map(roll, equation.bodies)) for equation in trace.equations)
    equations = tuple(
        replace(e, bodies=new) for e, new in zip(trace.equations, bodies, strict=True)
    )
    trace = replace(trace, equations=equations)
    while (run := _find_run(trace)) is not None:
        trace = dce(_rolled(trace, run))
    return trace


# ---- finding runs ----


@dataclass(frozen=True, slots=True)
class _Run:
    """A run: the positions of its equations, and for each operand that is carried, by place, the
    output of the step before that it is.
    """

    positions: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]


def _find_run(trace: Trace) -> _Run | None:
    """The first run of at least two."""
    places: dict[Any, list[int]] = {}
    for position, equation in enumerate(trace.equations):
        if equation.op.kind == "composite":
            places.setdefault(_kind(equation), []).append(position)
    for positions in places.values():
        for start in range(len(positions) - 1):
            run = _run_from(trace, positions[start:])
            if run is not None:
                return run
    return None


def _kind(equation: Equation) -> Any:
    """Return a key that is equal for equations that differ in their operands only."""
    hole = Literal(...)
    return equation.op, *map_args(lambda var: hole, equation), equation.bodies


def _run_from(trace: Trace, positions: Sequence[int]) -> _Run | None:
    """The longest run that begins with the first of these equations."""
    first, second = (trace.equations[position] for position in positions[:2])
    carried = _carried(first, second)
    if not carried or any(first.operands[p].type != first.outputs[k].type for p, k in carried):
        return None
    chain = [positions[0]]
    for position in positions[1:]:
        before, equation = trace.equations[chain[-1]], trace.equations[position]
        run = _Run((*chain, position), carried)
        if _carried(before, equation) != carried or not _is_possible(trace, run):
            break
        chain.append(position)
    return _Run(tuple(chain), carried) if len(chain) > 1 else None


def _carried(before: Equation, equation: Equation) -> tuple[tuple[int, int], ...]:
    given = {var.index: k for k, var in enumerate(before.outputs)}
    return tuple(
        (p, given[var.index]) for p, var in enumerate(equation.operands) if var.index in given
    )


def _is_possible(trace: Trace, run: _Run) -> bool:
    """Test that the run's operands from outside can be computed in front of it, and that differing
    ones are tensors.

    Nothing between its equations has an effect, whose place would change.
    """
    steps = [trace.equations[position] for position in run.positions]
    dependent = _dependent(trace, run)
    carried = {p for p, _ in run.carried}
    for p in range(len(steps[0].operands)):
        column = [step.operands[p] for step in steps]
        if p in carried:
            column = column[:1]
        if any(var.index in dependent for var in column):
            return False
        if len(set(column)) > 1 and not all(isinstance(var.type, TensorType) for var in column):
            return False
    between = set(range(run.positions[0], run.positions[-1])) - set(run.positions)
    return not any(ops.has_side_effect(trace.equations[position]) for position in between)


def _dependent(trace: Trace, run: _Run) -> set[int]:
    """The variables that are computed from the run's results, or after its last equation."""
    own = set(run.positions)
    found = set[int]()
    for position, equation in enumerate(trace.equations):
        late = position > run.positions[-1] or position in own
        if late or any(var.index in found for var in equation.operands):
            found.update(var.index for var in equation.outputs)
    return found


# ---- rolling ----


@dataclass(frozen=True, slots=True)
class _Columns:
    """The operands of a run, by place: carried, equal in all steps, or different; and the results
    that are read.
    """

    carried: tuple[tuple[int, int], ...]
    fixed: tuple[int, ...]
    moving: tuple[int, ...]
    ys: tuple[int, ...]


def _columns(trace: Trace, run: _Run) -> _Columns:
    steps = [trace.equations[position] for position in run.positions]
    carried = {p for p, _ in run.carried}
    rest = [p for p in range(len(steps[0].operands)) if p not in carried]
    fixed = tuple(p for p in rest if len({step.operands[p] for step in steps}) == 1)
    own = set(run.positions)
    read = {v.index for at, e in enumerate(trace.equations) if at not in own for v in e.operands}
    read |= {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    last = {k for _, k in run.carried}
    ys = tuple(
        k
        for k in range(len(steps[0].outputs))
        if any(step.outputs[k].index in read for step in (steps[:-1] if k in last else steps))
    )
    return _Columns(run.carried, fixed, tuple(p for p in rest if p not in fixed), ys)


def _rolled(trace: Trace, run: _Run) -> Trace:
    own, dependent = set(run.positions), _dependent(trace, run)
    outside = [equation for position, equation in enumerate(trace.equations) if position not in own]
    constants = (constant.var for constant in trace.constants)
    env: dict[int, Atom] = {var.index: var for var in (*trace.inputs, *constants, *bound(outside))}
    builder = TraceBuilder(trace.name, num_vars(trace))
    _add_rolled(builder, env, trace, run)

    def read(var: Var) -> Atom:
        return env[var.index]

    def is_late(equation: Equation, position: int) -> bool:
        return position > run.positions[-1] or any(
            var.index in dependent for var in equation.operands
        )

    flags = [is_late(e, at) for at, e in enumerate(trace.equations) if at not in own]
    early = chosen(outside, [not late for late in flags])
    late = [equation.reading(read) for equation in chosen(outside, flags)]
    equations = (*early, *builder.equations, *late)
    return cut(trace, equations=equations, outputs=map_arg(read, trace.outputs))


def _add_rolled(builder: TraceBuilder, env: dict[int, Atom], trace: Trace, run: _Run) -> None:
    """Add the stacks, the scan, and the results that are read outside, slices of its ys."""
    steps = [trace.equations[position] for position in run.positions]
    columns, length = _columns(trace, run), len(steps)
    whole = {p: _whole(trace, [step.operands[p] for step in steps]) for p in columns.moving}
    reverse = any(known is not None and known[1] for known in whole.values())
    order = steps[::-1] if reverse else steps
    xs: list[Atom] = []
    for p in columns.moving:
        known = whole[p]
        if known is not None and known[1] == reverse:
            xs.append(env[known[0].index])
        else:
            parts = tuple(env[step.operands[p].index] for step in order)
            xs.append(
                ops.emit(builder, STACK, (parts,), stacked(steps[0].operands[p].type, length))
            )
    consts = tuple(env[steps[0].operands[p].index] for p in columns.fixed)
    carry = tuple(env[steps[0].operands[p].index] for p, _ in columns.carried)
    loop = Loop(len(consts), len(carry), length, reverse)
    results = add_scan(
        builder, loop, _body(steps[0], columns), (consts, carry, tuple(xs)), steps[0].source
    )
    for (_, k), value in zip(columns.carried, results, strict=False):
        env[steps[-1].outputs[k].index] = value
    for k, stack in zip(columns.ys, results[len(carry) :], strict=True):
        slices = builder.add(UNBIND, (stack,), (slice_of(stack.type),) * length)
        for step, value in zip(order, slices, strict=True):
            env.setdefault(step.outputs[k].index, value)


def _body(step: Equation, columns: _Columns) -> Trace:
    """The step as the body of a scan: consts, carries, slices."""
    # Before: operands in their own order -> all outputs
    # After:  fixed, carried, moving operands -> outputs that are carried, outputs that are read
    builder = TraceBuilder(ops.short_name(step.op))
    places = (*columns.fixed, *(p for p, _ in columns.carried), *columns.moving)
    inputs = {p: builder.input(step.operands[p].type) for p in places}
    outputs = put(builder, step, [inputs[p] for p in range(len(step.operands))])
    return builder.build(
        (*(outputs[k] for _, k in columns.carried), *(outputs[k] for k in columns.ys))
    )


def _whole(trace: Trace, column: Sequence[Var]) -> tuple[Var, bool] | None:
    """The tensor whose slices these are, all of them in order or (True) in reverse; None if
    there is none.
    """
    makers = {
        var.index: e
        for e in trace.equations
        if e.op == UNBIND and len(e.args) == 1
        for var in e.outputs
    }
    maker = makers.get(column[0].index)
    if maker is None or not isinstance(maker.args[0], Var) or len(maker.outputs) != len(column):
        return None
    if maker.outputs == tuple(column):
        return maker.args[0], False
    return (maker.args[0], True) if maker.outputs[::-1] == tuple(column) else None


# ---- unrolling ----


@spelled()
@memo(1024)
def unroll(trace: Trace) -> Trace:
    """Turn each scan, also inside bodies, into its steps one after the other.

    Law: same values, bitwise. The inverse of `roll`: values that were stacked for a scan only are
        not stacked any more.

    Raises:
        TraceTypeError: `trace` is no trace.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> loop = tfn.trace(lambda x: tfn.fori_loop(0, 3, lambda i, x: x * 2, x), torch.ones(()))
        >>> [str(equation.op) for equation in unroll(loop).equations].count("aten.mul.Tensor")
        3
    """
    check_is_trace("unroll", trace)
    parts: dict[int, tuple[Atom, ...]] = {}

    def step(
        builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
    ) -> tuple[Atom, ...]:
        equation = replace(equation, bodies=tuple(map(unroll, equation.bodies)))
        whole = (
            parts.get(operands[0].index)
            if equation.op == UNBIND and isinstance(operands[0], Var)
            else None
        )
        if equation.op == SCAN:
            return add_steps(builder, equation, operands, parts)
        if whole is not None and len(equation.args) == 1:
            return whole
        results = put(builder, equation, operands)
        if equation.op == STACK and len(equation.args) == 1:
            parts[results[0].index] = operands
        return results

    return dce(rewritten(trace, step))


def add_steps(
    builder: TraceBuilder,
    equation: Equation,
    operands: tuple[Atom, ...],
    parts: dict[int, tuple[Atom, ...]],
) -> tuple[Atom, ...]:
    """The steps of a scan one after the other. `parts` knows the elements of stacks, and learns
    of the ys.
    """
    loop = Loop.of(equation)
    consts, carry, xs = loop.parts(operands)
    columns: list[list[Atom]] = [[] for _ in equation.outputs[loop.num_carry :]]
    for place in reversed(range(loop.steps)) if loop.reverse else range(loop.steps):
        slices = tuple(_slice(builder, x, place, parts) for x in xs)
        carry, ys = loop.results(
            inline_into(builder, equation.body, (*consts, *carry, *slices), equation.source)
        )
        for column, y in zip(columns, ys, strict=True):
            column.append(y)
    stacks: list[Atom] = []
    for column, var in zip(columns, equation.outputs[loop.num_carry :], strict=True):
        ordered = tuple(column[::-1] if loop.reverse else column)
        stack = _stack(builder, ordered, tensor_type(var.type))
        parts[stack.index] = ordered
        stacks.append(stack)
    return (*carry, *stacks)


def _slice(builder: TraceBuilder, x: Atom, place: int, parts: dict[int, tuple[Atom, ...]]) -> Atom:
    assert isinstance(x, Var), "only tensors are sliced"
    known = parts.get(x.index)
    if known is not None:
        return known[place]
    return ops.emit(builder, SELECT, (x, 0, place), slice_of(x.type))


def _stack(builder: TraceBuilder, column: tuple[Atom, ...], type: TensorType) -> Var:
    if column:
        return ops.emit(builder, STACK, (column,), type)
    kind = {"dtype": type.dtype, "device": type.device}
    return ops.emit(builder, aten.empty.memory_format, (type.shape,), type, **kind)


def in_blocks(equation: Equation) -> Trace:
    """A scan with `unroll` steps in the body of each step of a shorter scan, and the steps left
    over after it.
    """
    # Before: xs: [length, ...]
    # After:  main: [blocks, count, ...], left: [rest, ...], where length = blocks * count + rest.
    #         The rest is run last: it is the end of xs, and in reverse their beginning.
    loop = Loop.of(equation)
    count = min(loop.unroll, loop.steps)
    builder = TraceBuilder("unrolled")
    operands = builder.take(equation.operand_types)
    if count == loop.length:
        return builder.build(add_steps(builder, equation, operands, {}))
    consts, carry, xs = loop.parts(operands)
    blocks, rest = divmod(loop.steps, count)
    start, stop = (rest, loop.steps) if loop.reverse else (0, loop.steps - rest)
    body = _block(equation, loop, count)
    main = tuple(_reshaped(builder, _cut(builder, x, start, stop), (blocks, count)) for x in xs)
    found = add_scan(
        builder,
        replace(loop, length=blocks, unroll=1),
        body,
        (consts, carry, main),
        equation.source,
    )
    carry, ys = found[: loop.num_carry], [_flattened(builder, y) for y in found[loop.num_carry :]]
    if rest:
        left = tuple(
            _cut(builder, x, 0 if loop.reverse else stop, start if loop.reverse else loop.steps)
            for x in xs
        )
        short = _alone(equation, rest)
        results = add_steps(builder, short, (*consts, *carry, *left), {})
        carry, more = results[: loop.num_carry], results[loop.num_carry :]
        pairs = [(b, a) if loop.reverse else (a, b) for a, b in zip(ys, more, strict=True)]
        types = [tensor_type(var.type) for var in equation.outputs[loop.num_carry :]]
        ys = [
            ops.emit(builder, aten.cat.default, (pair,), t)
            for pair, t in zip(pairs, types, strict=True)
        ]
    return builder.build((*carry, *ys))


def _alone(equation: Equation, length: int) -> Equation:
    """Return the scan for another number of steps; its operands do not matter."""
    loop = Loop.of(equation)
    kwargs = as_kwargs(replace(loop, length=length, unroll=1).literals())
    ys = tuple(
        Var(v.index, stacked(slice_of(v.type), length)) for v in equation.outputs[loop.num_carry :]
    )
    return replace(equation, kwargs=kwargs, outputs=(*equation.outputs[: loop.num_carry], *ys))


def _block(equation: Equation, loop: Loop, count: int) -> Trace:
    """Return `count` steps as one body."""
    builder = TraceBuilder(equation.body.name)
    consts, carry, xs = loop.parts(equation.body.input_types)
    inputs = tuple(
        builder.input(type) for type in (*consts, *carry, *(stacked(type, count) for type in xs))
    )
    return builder.build(add_steps(builder, _alone(equation, count), inputs, {}))


def _cut(builder: TraceBuilder, x: Atom, start: int, stop: int) -> Var:
    assert isinstance(x, Var), "only tensors are sliced"
    type = stacked(slice_of(x.type), stop - start)
    return ops.emit(builder, aten.slice.Tensor, (x, 0, start, stop), type)


def _reshaped(builder: TraceBuilder, x: Var, sizes: tuple[int, int]) -> Var:
    type = tensor_type(x.type)
    new = TensorType(type.dtype, (*sizes, *type.shape[1:]), type.device)
    return ops.emit(builder, aten.reshape.default, (x, new.shape), new)


def _flattened(builder: TraceBuilder, y: Var) -> Var:
    type = tensor_type(y.type)
    first, second, *rest = type.shape
    assert isinstance(first, int) and isinstance(second, int), "the length of a scan is a number"
    flat = TensorType(type.dtype, (first * second, *rest), type.device)
    return ops.emit(builder, aten.flatten.using_ints, (y, 0, 1), flat)
