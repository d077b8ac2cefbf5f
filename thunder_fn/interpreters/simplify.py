"""Small interpreters that keep what a trace computes: dce, cse, inline."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import DCE, Mask
from thunder_fn.ir.symbols import finders, made_by
from thunder_fn.ir.trace import Arg, Atom, Equation, Op, Trace, TraceBuilder, Var, cut, map_arg
from thunder_fn.ir.walking import put, rewritten, walk

# ---- dce ----


def dce(trace: Trace) -> Trace:
    """Drop equations that no output needs, in bodies too.

    Law: same values; idempotent; never more equations. Random and effectful equations stay.
    """
    return dce_to(trace, (True,) * len(trace.outputs))[0]


@memo(16384)
def dce_to(trace: Trace, wanted: Mask) -> tuple[Trace, Mask]:
    """The trace cut down to the wanted outputs, and which inputs it reads. All inputs stay."""
    outputs = tuple(atom for atom, flag in zip(trace.outputs, wanted, strict=True) if flag)
    need = {atom.index for atom in outputs if isinstance(atom, Var)}
    kept: list[Equation] = []
    found = {var.index for var in finders(trace).values()}  # anything may read these
    for equation in reversed(trace.equations):
        flags = tuple(var.index in need for var in equation.outputs)
        if any(var.index in found for var in equation.outputs):
            flags = (True,) * len(flags)
        if not any(flags) and not is_kept(equation):
            continue
        new, reads = _dce_equation(equation, flags)
        kept.append(new)
        need.update(var.index for var in reads)
    kept.reverse()
    reads = tuple(var.index in need for var in trace.inputs)
    if (
        len(kept) == len(trace.equations)
        and all(wanted)
        and all(a is b for a, b in zip(kept, trace.equations, strict=True))
    ):
        return trace, reads
    return cut(trace, equations=kept, outputs=outputs), reads


def cut_to(trace: Trace, outputs: tuple[Atom, ...]) -> Trace:
    """Keep the equations that some variables need and nothing else; effects that they do not
    need go too.
    """
    need = {atom.index for atom in outputs if isinstance(atom, Var)}
    kept: list[Equation] = []
    for equation in reversed(trace.equations):
        flags = tuple(var.index in need for var in equation.outputs)
        if any(flags):
            new, reads = _dce_equation(equation, flags)
            kept.append(new)
            need.update(var.index for var in reads)
    return cut(trace, equations=reversed(kept), outputs=outputs)


def _dce_equation(equation: Equation, flags: Mask) -> tuple[Equation, tuple[Var, ...]]:
    match equation.op.kind:
        case "leaf":
            return equation, equation.operands
        case "composite":
            return _dce_composite(equation, flags)
        case "structured":
            new, reads = DCE.of(equation)(equation, flags)
            bodies = tuple(map(dce, new.bodies))  # a rule may leave bodies as they are
            same = all(old is body for old, body in zip(new.bodies, bodies, strict=True))
            return new if same else replace(new, bodies=bodies), reads


def _dce_composite(equation: Equation, flags: Mask) -> tuple[Equation, tuple[Var, ...]]:
    """The composite without the results and operands that are not needed.

    One that is still the user's own call keeps its arguments: `torch.nn.functional.linear(x, w, b)`
    stays as written. An executor's operator is computed as a whole.
    """
    if ops.is_operator(equation.op):
        return equation, equation.operands
    body, reads = dce_to(equation.body, flags)
    if all(flags) and (all(reads) or ops.is_call(equation.op)):
        if body is equation.body:
            return equation, equation.operands
        new = Equation(
            equation.op, equation.args, equation.kwargs, equation.outputs, (body,), equation.source
        )
        return new, new.operands
    operands = tuple(var for var, read in zip(equation.operands, reads, strict=True) if read)
    outputs = tuple(var for var, flag in zip(equation.outputs, flags, strict=True) if flag)
    inputs = tuple(var for var, read in zip(body.inputs, reads, strict=True) if read)
    closed = cut(body, inputs=inputs)
    op = ops.composite(ops.short_name(equation.op))
    return Equation(op, operands, (), outputs, (closed,), equation.source), operands


@memo(16384)
def _body_is_kept(trace: Trace) -> bool:
    return any(is_kept(equation) for equation in trace.equations)


def is_kept(equation: Equation) -> bool:
    """Test for an equation with an effect, which dce keeps: it draws random numbers or has a
    side effect.
    """
    if equation.op.kind == "leaf":
        return ops.draws(equation) or ops.is_effectful(equation.op)
    return any(_body_is_kept(body) for body in equation.bodies)


def makes_symbols(equation: Equation) -> bool:
    """Test whether a size or number of its results depends on data."""
    return bool(made_by(equation))


# ---- cse ----


@memo(16384)
def cse(trace: Trace) -> Trace:
    """Compute equal things once, in bodies too.

    Law: same values; idempotent. Random equations are never merged.
    """
    names: dict[int, Atom] = {}
    seen: dict[
        tuple[Op, tuple[Arg, ...], tuple[tuple[str, Arg], ...], tuple[Trace, ...]], tuple[Var, ...]
    ] = {}
    kept: list[Equation] = []

    def read(var: Var) -> Atom:
        return names.get(var.index, var)

    for equation in trace.equations:
        args = tuple(map_arg(read, arg) for arg in equation.args)
        kwargs = tuple((key, map_arg(read, arg)) for key, arg in equation.kwargs)
        bodies = tuple(cse(body) for body in equation.bodies)
        key = (equation.op, args, kwargs, bodies)
        if key in seen and not is_kept(equation) and not makes_symbols(equation):
            names.update(
                (var.index, known) for var, known in zip(equation.outputs, seen[key], strict=True)
            )
            continue
        seen[key] = equation.outputs
        kept.append(Equation(equation.op, args, kwargs, equation.outputs, bodies, equation.source))
    outputs = tuple(map_arg(read, atom) for atom in trace.outputs)
    return cut(trace, equations=kept, outputs=outputs)


# ---- inline ----


@memo(1024)
def inline(trace: Trace) -> Trace:
    """Unfold every composite down to leaves and structured ops.

    Law: same values, bitwise; idempotent.
    """
    return rewritten(trace, _unfold)


def _unfold(
    builder: TraceBuilder, equation: Equation, operands: tuple[Atom, ...]
) -> tuple[Atom, ...]:
    if equation.op.kind == "composite":
        return walk(
            builder, equation.body, operands, partial(_unfold, builder), call=equation.source
        )
    return put(builder, equation, operands, bodies=tuple(map(inline, equation.bodies)))
