"""Small interpreters that keep what a trace computes: dce, cse, inline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from thunder_fn.ir import ops
from thunder_fn.ir.memos import memo
from thunder_fn.ir.rules import DCE, Mask, chosen
from thunder_fn.ir.symbols import finders, made_by
from thunder_fn.ir.trace import Atom, Equation, Trace, TraceBuilder, Var, cut
from thunder_fn.ir.walking import merged, put, rewritten, walk

# ---- dce ----


def dce(trace: Trace) -> Trace:
    """Drop equations that no output needs, in bodies too.

    Law: same values; idempotent; never more equations. Random and effectful equations stay.
    """
    return dce_to(trace, (True,) * len(trace.outputs))[0]


@memo(16384, derives=False)
def dce_to(trace: Trace, wanted: Mask) -> tuple[Trace, Mask]:
    """The trace cut down to the wanted outputs, and which inputs it reads. All inputs stay."""
    outputs = chosen(trace.outputs, wanted)
    need = {atom.index for atom in outputs if isinstance(atom, Var)}
    found = {var.index for var in finders(trace).values()}  # anything may read these
    kept = _cut_down(trace.equations, need, ops.has_side_effect, found)
    reads = tuple(var.index in need for var in trace.inputs)
    if (
        len(kept) == len(trace.equations)
        and all(wanted)
        and all(a is b for a, b in zip(kept, trace.equations, strict=True))
    ):
        return trace, reads
    return cut(trace, equations=kept, outputs=outputs), reads


def _nothing(equation: Equation) -> bool:
    return False


def cut_to(
    trace: Trace, outputs: tuple[Atom, ...], keep: Callable[[Equation], bool] = _nothing
) -> Trace:
    """Keep the equations that some variables need and nothing else; effects that they do not
    need go too, but for those to `keep`.
    """
    need = {atom.index for atom in outputs if isinstance(atom, Var)}
    return cut(trace, equations=_cut_down(trace.equations, need, keep), outputs=outputs)


def _cut_down(
    equations: Sequence[Equation],
    need: set[int],
    keep: Callable[[Equation], bool] = _nothing,
    found: Collection[int] = (),
) -> list[Equation]:
    """The equations that variables need, each cut down to the needed results; `need` grows by what
    they read. One that gives a variable in `found` is whole.
    """
    kept: list[Equation] = []
    for equation in reversed(equations):
        flags = tuple(var.index in need for var in equation.outputs)
        if any(var.index in found for var in equation.outputs):
            flags = (True,) * len(flags)
        if any(flags) or keep(equation):
            new, reads = _dce_equation(equation, flags)
            kept.append(new)
            need.update(var.index for var in reads)
    return kept[::-1]


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
        return replace(equation, bodies=(body,)), equation.operands
    operands, outputs = chosen(equation.operands, reads), chosen(equation.outputs, flags)
    closed = cut(body, inputs=chosen(body.inputs, reads))
    op = ops.composite(ops.short_name(equation.op))
    return Equation(op, operands, (), outputs, (closed,), equation.source), operands


def makes_symbols(equation: Equation) -> bool:
    """Test whether a size or number of its results depends on data."""
    return bool(made_by(equation))


# ---- cse ----


@memo(16384, derives=False)
def cse(trace: Trace) -> Trace:
    """Compute equal things once, in bodies too.

    Law: same values; idempotent. Random equations are never merged.
    """
    seen: dict[object, tuple[Var, ...]] = {}

    def same(equation: Equation) -> tuple[Var, ...] | None:
        key = (equation.op, equation.args, equation.kwargs, equation.bodies)
        if key in seen and not ops.has_side_effect(equation) and not makes_symbols(equation):
            return seen[key]
        seen[key] = equation.outputs
        return None

    return merged(trace, same, cse)[0]


# ---- inline ----


@memo(1024, derives=False)
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
