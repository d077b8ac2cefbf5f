"""Structured ops as Python: the functions that stand for scan, while_loop, cond and switch in a
program.

    # torch: mm, tanh_; torch.Tensor: add_
    def scan(v0, v1, x2):
        y0 = []
        for v2, in zip(x2.unbind(0)):
            v3 = mm(v1, v0)  # f32[16, 64]
            v4 = add_(v3, v2)  # f32[16, 64] in v3's memory
            v5 = tanh_(v4)  # f32[16, 64] in v4's memory
            y0.append(v5)
            v1 = v5
        return (v1, stack(y0))

A body stands in the function itself, so a step of a loop calls nothing but its ops. Invariants are
computed in front of the loop, and a step may compute in the memory of a carry that nobody else
holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.executors.base import Fuse, FusionExecutor
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.constraints import is_positive
from thunder_fn.ir.equations import bound, operands_in
from thunder_fn.ir.memory import RegionOf, find_aliases, no_region
from thunder_fn.ir.pretty import as_comment
from thunder_fn.ir.symbols import finders, is_symbolic, mentions
from thunder_fn.ir.text import tuple_text
from thunder_fn.ir.trace import Equation, TensorType, Trace, Type, Var, cut, num_vars, type_of
from thunder_fn.structured.carry_at import CARRY_AT, histories
from thunder_fn.structured.cond import COND, SWITCH
from thunder_fn.structured.shared.scan_parts import SCAN, Loop
from thunder_fn.structured.shared.while_parts import WHILE, While

if TYPE_CHECKING:
    from thunder_fn.executors.claims import Claimed
    from thunder_fn.executors.torch_executor import FunctionWriter

INDENT = "    "


@dataclass(frozen=True, slots=True)
class Function:
    """The parameters of a function, and its lines."""

    parameters: tuple[str, ...]
    lines: tuple[str, ...]


def function_of(equation: Equation) -> Callable[[FunctionWriter, Equation], Function] | None:
    """The writer of a structured equation's function; None for one that runs by its evaluation
    rule.
    """
    if any(body.constants for body in equation.bodies):
        return None
    if equation.op == SCAN:
        return _scan if Loop.of(equation).length else None
    return {WHILE: _while, COND: _cond, SWITCH: _switch}.get(equation.op)


# ---- loops that an executor compiles whole ----


def _compiled(
    writer: FunctionWriter, equation: Equation, bodies: Sequence[Claimed]
) -> Function | None:
    """A call of the loop as one executor compiles it, if there is one that takes everything in
    its bodies.
    """
    fusion = next(
        (
            one
            for one in writer.executors
            if isinstance(one, FusionExecutor) and _takes(one, bodies)
        ),
        None,
    )
    if fusion is None:
        return None
    whole = replace(equation, bodies=tuple(inline(body.trace) for body in bodies))
    loop = alone(whole)
    is_open = is_symbolic(loop) or any(body.constants for body in whole.bodies)
    run = None if is_open else fusion.fuse_loop(loop)
    if run is None:
        return None
    name = writer.bind((fusion, loop), f"{fusion.name}_loop", run)
    parameters = tuple(f"a{i}" for i in range(len(loop.inputs)))
    lines = [f"# by {fusion.name}, all steps of:"]
    lines += [line for body in loop.equations[0].bodies for line in as_comment(body)]
    given = [parameters[var.index] for var in loop.inputs]
    return Function(parameters, (*lines, f"return {name}({', '.join(given)})"))


def _takes(fusion: FusionExecutor, bodies: Sequence[Claimed]) -> bool:
    """Test whether each equation is in a region of the executor, or might be."""

    def takes(body: Claimed, equation: Equation) -> bool:
        if equation.op.kind == "composite":
            claim = body.claim_of(equation)
            return claim.region is not None and claim.executor is fusion
        return equation.op.kind == "leaf" and isinstance(fusion.answer(equation), Fuse)

    equations = [(body, equation) for body in bodies for equation in body.trace.equations]
    return bool(equations) and all(takes(body, equation) for body, equation in equations)


# ---- scan ----


def _scan(writer: FunctionWriter, equation: Equation) -> Function:
    loop, flat = Loop.of(equation), writer.flat(equation.body)
    whole = _compiled(writer, equation, (flat,))
    if whole is not None:
        return whole
    once, step = split_invariant(flat, loop.num_consts)
    body, num_hoisted = step.trace, len(once.trace.outputs)
    loop = replace(loop, num_consts=loop.num_consts + num_hoisted)
    block = writer.block(
        step, private_carries(body, loop.num_consts, loop.num_carry, step.region_of)
    )
    consts, carry, xs = loop.parts(body.inputs)
    own = consts[: len(consts) - num_hoisted]
    outputs, ys = loop.results(body.outputs)
    lines = list(_hoisted(writer, once, own, consts[len(own) :]))
    lines += [f"{var} = {_clone(writer)}({var})" for var in block.overwritten]
    lines += [f"y{i} = []" for i in range(len(ys))]
    lines.append(_scan_header(loop, xs))
    inside = [*block.statements(), *(f"y{i}.append({block.output(y)})" for i, y in enumerate(ys))]
    inside += _assign(map(str, carry), map(block.output, outputs))
    lines += _indented(inside or ["pass"])
    stacks = (_stack(writer, f"y{i}", type_of(y), loop) for i, y in enumerate(ys))
    lines.append(f"return {tuple_text([*map(str, carry), *stacks])}")
    return Function((*map(str, (*own, *carry)), *(f"x{var.index}" for var in xs)), tuple(lines))


def _stack(writer: FunctionWriter, name: str, type: Type, loop: Loop) -> str:
    """The stack of the steps' results, empty if there was no step."""
    steps = f"{name}[::-1]" if loop.reverse else name
    text = f"{writer.bind(torch.stack, 'stack', torch.stack)}({steps})"
    if isinstance(loop.length, int) or is_positive(loop.length) or not isinstance(type, TensorType):
        return text
    empty, dtype, device = (
        writer.bind(value, wanted, value)
        for value, wanted in (
            (torch.empty, "empty"),
            (type.dtype, "dtype"),
            (type.device, "device"),
        )
    )
    shape = tuple_text(["0", *map(str, type.shape)])
    return f"{text} if {name} else {empty}({shape}, dtype={dtype}, device={device})"


def _scan_header(loop: Loop, xs: Sequence[Var]) -> str:
    if not xs:
        return f"for _ in range({loop.length}):"
    slices = [f"x{var.index}.unbind(0)" for var in xs]
    if loop.reverse:
        slices = [f"reversed({text})" for text in slices]
    if len(xs) == 1:
        return f"for {xs[0]} in {slices[0]}:"
    return f"for {', '.join(map(str, xs))} in zip({', '.join(slices)}):"


def _hoisted(
    writer: FunctionWriter, once: Claimed, operands: Sequence[Var], targets: Sequence[Var]
) -> Iterator[str]:
    if targets:
        given = ", ".join((*writer.numbers, *map(str, operands)))
        yield f"{tuple_text(map(str, targets))} = {writer.call(once, 'invariant')}({given})"


def _clone(writer: FunctionWriter) -> str:
    return writer.bind(torch.clone, "clone", torch.clone)


def split_invariant(
    body: Claimed, num_consts: int, *, only_views: bool = False
) -> tuple[Claimed, Claimed]:
    """A body in two: the invariants, from the consts, and the step, which takes these after them.

    Args:
        only_views: leave ops that compute something in the step, since there may be no step.
    """
    trace = body.trace
    fixed = {var.index for var in trace.inputs[:num_consts]}
    early, found = list[int](), finders(trace)
    for position, equation in enumerate(trace.equations):
        operands_are_fixed = equation.op.kind == "leaf" and all(
            var.index in fixed for var in equation.operands
        )
        if mentions(equation, found):  # the number may be another in each step
            continue
        if (
            operands_are_fixed
            and not ops.has_side_effect(equation)
            and (ops.is_view(equation.op) or not only_views)
        ):
            early.append(position)
            fixed.update(var.index for var in equation.outputs)
    chosen = tuple(trace.equations[position] for position in early)
    late = tuple(
        equation for position, equation in enumerate(trace.equations) if position not in set(early)
    )
    read = {var.index for var in operands_in(late)}
    read |= {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    hoisted = tuple(var for var in bound(chosen) if var.index in read)
    once = cut(trace, inputs=trace.inputs[:num_consts], equations=chosen, outputs=hoisted)
    inputs = (*trace.inputs[:num_consts], *hoisted, *trace.inputs[num_consts:])
    step = cut(trace, inputs=inputs, equations=late)
    notes = dict[int, tuple[str, ...]]()
    for position, texts in body.notes.items():
        place = position - bisect_left(early, position)
        notes[place] = (*notes.get(place, ()), *texts)
    return replace(body, trace=once, notes={}), replace(body, trace=step, notes=notes)


def private_carries(
    body: Trace, num_consts: int, num_carry: int, region_of: RegionOf = no_region
) -> tuple[int, ...]:
    """The carries of a flat body, by input, that lie in memory which only they see once a step has
    run.

    A step that overwrites one needs a copy of the first carry, no more.
    """
    aliases = find_aliases(body, region_of)
    outputs = [atom for atom in body.outputs if isinstance(atom, Var)]
    found: list[int] = []
    for position in range(num_carry):
        atom = body.outputs[position]
        if not isinstance(atom, Var) or not aliases.whole[atom.index]:
            continue
        mine = aliases.buffers[atom.index]
        if sum(bool(mine & aliases.buffers[other.index]) for other in outputs) == 1:
            found.append(num_consts + position)
    return tuple(found)


# ---- while_loop ----


def _while(writer: FunctionWriter, equation: Equation) -> Function:
    loop = While.of(equation)
    test, flat = map(writer.flat, equation.bodies)
    whole = _compiled(writer, equation, (test, flat))
    if whole is not None:
        return whole
    once, step = split_invariant(flat, loop.num_consts, only_views=True)
    body = step.trace
    num_consts = loop.num_consts + len(once.trace.outputs)
    hoisted, carry = body.inputs[loop.num_consts : num_consts], body.inputs[num_consts:]
    test = replace(test, trace=with_more_inputs(test.trace, loop.num_consts, hoisted))
    condition = writer.block(test)
    block = writer.block(step, private_carries(body, num_consts, len(carry), step.region_of))
    own = body.inputs[: loop.num_consts]
    lines = list(_hoisted(writer, once, own, hoisted))
    lines += [f"{var} = {_clone(writer)}({var})" for var in block.overwritten]
    lines.append("while True:" if loop.max_steps is None else f"for _ in range({loop.max_steps}):")
    inside = [
        *condition.statements(),
        f"if not {condition.output(test.trace.outputs[0])}:",
        f"{INDENT}break",
    ]
    inside += [*block.statements(), *_assign(map(str, carry), map(block.output, body.outputs))]
    lines += [*_indented(inside), f"return {tuple_text(map(str, carry))}"]
    if any(inner.op == CARRY_AT for inner in body.equations):
        lines = [f"with {writer.bind(histories, 'histories', histories)}():", *_indented(lines)]
    return Function(tuple(map(str, (*own, *carry))), tuple(lines))


def with_more_inputs(trace: Trace, position: int, like: Sequence[Var]) -> Trace:
    """The trace with inputs that it does not read, of the types of `like`, at a position."""
    new = tuple(Var(num_vars(trace) + i, var.type) for i, var in enumerate(like))
    inputs = (*trace.inputs[:position], *new, *trace.inputs[position:])
    return cut(trace, inputs=inputs)


# ---- cond and switch ----


def _cond(writer: FunctionWriter, equation: Equation) -> Function:
    lines: list[str] = []
    for header, body in zip(("if choice:", "else:"), equation.bodies, strict=True):
        lines += [header, *_branch(writer, body)]
    return Function(("choice", *map(str, equation.bodies[0].inputs)), tuple(lines))


def _switch(writer: FunctionWriter, equation: Equation) -> Function:
    lines, last = ["choice = int(choice)"], len(equation.bodies) - 1
    for position, body in enumerate(equation.bodies):
        lines += [
            f"if choice <= {position}:" if position < last else "if True:",
            *_branch(writer, body),
        ]
    return Function(("choice", *map(str, equation.bodies[0].inputs)), tuple(lines))


def _branch(writer: FunctionWriter, body: Trace) -> Iterator[str]:
    block = writer.block(writer.flat(body))
    yield from _indented(
        [*block.statements(), f"return {tuple_text(map(block.output, block.trace.outputs))}"]
    )


# ---- text ----


def _assign(targets: Any, values: Any) -> list[str]:
    """One line that gives the targets their new values, None where nothing changes."""
    pairs = [
        (target, value) for target, value in zip(targets, values, strict=True) if target != value
    ]
    if not pairs:
        return []
    return [
        f"{', '.join(target for target, _ in pairs)} = {', '.join(value for _, value in pairs)}"
    ]


def _indented(lines: Sequence[str]) -> Iterator[str]:
    return (INDENT + line for line in lines)
