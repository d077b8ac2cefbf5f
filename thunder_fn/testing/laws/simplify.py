"""Laws of dce, cse and inline beyond those of every interpreter."""

from __future__ import annotations

from thunder_fn.interpreters import simplify
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.trace import Trace, Var, subtraces
from thunder_fn.testing.laws.comparing import (
    Inputs,
    holds,
    leaf_counts,
    num_equations,
)

# ---- laws of single interpreters ----


def law_dce_drops_the_dead(trace: Trace, inputs: Inputs) -> None:
    """dce never grows a trace, and what it leaves is used, random or effectful; in bodies too."""
    new = simplify.dce(trace)
    holds(num_equations(new) <= num_equations(trace), "dce added equations", trace=trace, made=new)
    for inner in subtraces(new):
        used = {var.index for var in operands_in(inner.equations)}
        used |= {atom.index for atom in inner.outputs if isinstance(atom, Var)}
        for equation in inner.equations:
            live = any(var.index in used for var in equation.outputs) or ops.has_side_effect(
                equation
            )
            holds(live, f"dce left {equation.op}, which nothing uses", trace=trace, made=new)


def law_cse_leaves_no_twins(trace: Trace, inputs: Inputs) -> None:
    """After cse no two equations are the same, unless they are random; it never grows a trace."""
    new = simplify.cse(trace)
    holds(num_equations(new) <= num_equations(trace), "cse added equations", trace=trace, made=new)
    for inner in subtraces(new):
        kept = [
            (e.op, e.args, e.kwargs, e.bodies)
            for e in inner.equations
            if not ops.has_side_effect(e)
        ]
        holds(len(kept) == len(set(kept)), "cse left an equation twice", trace=trace, made=new)


def law_inline_leaves_no_composites(trace: Trace, inputs: Inputs) -> None:
    """After inline all equations are leaves or structured, the same leaves as before."""
    new = simplify.inline(trace)
    holds(
        all(e.op.kind != "composite" for e in new.equations),
        "inline left a composite",
        trace=trace,
        made=new,
    )
    leaves = leaf_counts(trace)
    holds(leaf_counts(new) == leaves, "inline changed the leaves", trace=trace, made=new)
