"""Residuals that a backward computes again because that is cheaper than reading them.

Where an executor fuses what works element by element, a value that such ops give from values which are read anyway costs
less to compute again than to write and to read: a GELU that is written out keeps its input, and not the cube, the sums and the
tanh that it is made of. Whatever else reads a value, as a matrix product does, finds it in memory: such values are kept.

Source: min_cut_rematerialization_partition of functorch, which recomputes and keeps by the same two questions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from thunder_fn import ops
from thunder_fn.interpreters.simplify import dce, is_kept, makes_symbols
from thunder_fn.rules import Mask, Residual, Split, memo
from thunder_fn.trace import Atom, Equation, Op, Trace, TraceBuilder, Var, canonical, num_vars

_MOVES = frozenset(("clone", "_to_copy", "contiguous", "cat", "stack", "constant_pad_nd", "_unsafe_view"))
"""Ops that move elements, besides views."""
_REDUCES = frozenset(
    (
        *("sum", "mean", "amax", "amin", "any", "all", "prod", "var", "var_mean", "std", "std_mean", "logsumexp"),
        *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
        *("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward"),
    )
)
"""Ops that reduce, or are made of ops that do: compiled code reads their operands where it computes them."""


def lean(split: Split) -> Split:
    """The split with a backward that computes again what is cheap to have from what is kept.

    Law: the same gradients, bitwise; the residuals are some of those before.
    """
    forward = split.forward
    needed = split.residual_values(forward.inputs, forward.outputs)
    whole = read_whole(split.backward, (True,) * len(split.backward.outputs))
    known = {constant.var.index for constant in forward.constants} | {
        atom.index
        for atom, residual, flag in zip(needed, split.residuals, whole, strict=False)
        if isinstance(atom, Var) and (flag or residual.kind != "extra")
    }
    makers = {var.index: equation for equation in forward.equations for var in equation.outputs}
    again = set[int]()
    for index in sorted({atom.index for atom in needed if isinstance(atom, Var)} - known):
        if _cone(index, known, makers) is not None:
            again.add(index)
        known.add(index)
    return _without(split, needed, again, makers) if again else split


def _cone(index: int, known: Collection[int], makers: Mapping[int, Equation]) -> list[Equation] | None:
    """The equations that compute a variable from known ones, in order; None if one of them is not cheap."""
    pending, found = [index], dict[int, Equation]()
    while pending:
        index = pending.pop()
        if index in known:
            continue
        maker = makers.get(index)
        if maker is None or not is_cheap(maker):
            return None
        first = maker.outputs[0].index
        if first not in found:
            found[first] = maker
            pending.extend(var.index for var in maker.operands)
    return [found[first] for first in sorted(found)]


def is_cheap(equation: Equation) -> bool:
    """The equation computes or moves single elements, and may do so again."""
    if is_kept(equation) or makes_symbols(equation):
        return False
    match equation.op.kind:
        case "leaf":
            return _is_cheap_op(equation.op)
        case "composite":
            return not ops.is_operator(equation.op) and _is_cheap_body(equation.body)
        case "structured":
            return False


@memo(4096)
def _is_cheap_body(trace: Trace) -> bool:
    return all(map(is_cheap, trace.equations))


@cache
def _is_cheap_op(op: Op) -> bool:
    return ops.is_pointwise(op) or ops.is_view(op) or ops.is_factory(op) or op.name.split(".")[1] in _MOVES


@memo(16384)
def read_whole(trace: Trace, outputs: Mask) -> Mask:
    """Which inputs something reads from memory that no compiled code computes with. `outputs` are read so by others."""
    flags = [False] * num_vars(trace)

    def mark(atoms: Sequence[Atom], found: Sequence[bool]) -> None:
        for atom, flag in zip(atoms, found, strict=True):
            if flag and isinstance(atom, Var):
                flags[atom.index] = True

    mark(trace.outputs, outputs)
    for equation in reversed(trace.equations):
        results = tuple(flags[var.index] for var in equation.outputs)
        operands = equation.operands
        if equation.op.kind == "composite" and not ops.is_operator(equation.op):
            mark(operands, read_whole(equation.body, results))
        elif equation.op.kind == "leaf" and ops.is_view(equation.op):
            mark(operands, (any(results),) * len(operands))
        elif equation.op.kind != "leaf" or not _is_fused(equation.op):
            mark(operands, (True,) * len(operands))
    return tuple(flags[var.index] for var in trace.inputs)


@cache
def _is_fused(op: Op) -> bool:
    return _is_cheap_op(op) or op.name.split(".")[1] in _REDUCES


def _without(split: Split, needed: Sequence[Atom], again: Collection[int], makers: Mapping[int, Equation]) -> Split:
    """The split with a backward that computes these variables of the forward again, each before it is first read."""
    old = split.backward
    builder = TraceBuilder(old.name)
    builder.require(old.constraints)
    recomputed = {
        var.index: atom
        for var, atom in zip(old.inputs, needed, strict=False)
        if isinstance(atom, Var) and atom.index in again
    }
    env: dict[int, Atom] = {var.index: builder.input(var.type) for var in old.inputs if var.index not in recomputed}
    known: dict[int, Atom] = {
        atom.index: env[var.index]
        for var, atom in zip(old.inputs, needed, strict=False)
        if isinstance(atom, Var) and var.index in env
    }
    for constant in old.constants:
        env[constant.var.index] = builder.constant(constant.tensor, constant.var.type, owned=constant.owned)
    constants = {constant.var.index: constant for constant in split.forward.constants}

    def constant_of(var: Var) -> Atom:
        constant = constants[var.index]
        return builder.constant(constant.tensor, constant.var.type, owned=constant.owned)

    def compute(index: int) -> Atom:
        for equation in _cone(index, {*known, *constants}, makers) or ():
            results = builder.copy(equation, lambda var: known.get(var.index) or constant_of(var))
            known.update((var.index, new) for var, new in zip(equation.outputs, results, strict=True))
        return known[index]

    def read(var: Var) -> Atom:
        if var.index not in env:
            env[var.index] = compute(recomputed[var.index].index)
        return env[var.index]

    for equation in old.equations:
        for var in equation.operands:
            read(var)
        results = builder.copy(equation, read)
        env.update((var.index, new) for var, new in zip(equation.outputs, results, strict=True))
    backward = builder.build(tuple(read(atom) if isinstance(atom, Var) else atom for atom in old.outputs))
    return _with_fewer_extras(split, backward, tuple(var.index not in recomputed for var in old.inputs))


def _with_fewer_extras(split: Split, backward: Trace, stays: Mask) -> Split:
    """The split with a backward that takes the residuals that stay."""
    count, forward = len(split.forward.outputs) - split.num_extra, split.forward
    left = [residual for residual, flag in zip(split.residuals, stays, strict=False) if flag]
    extras = [residual.index for residual in left if residual.kind == "extra"]
    outputs = (*forward.outputs[:count], *(forward.outputs[count + index] for index in extras))
    places = {index: place for place, index in enumerate(extras)}
    residuals = tuple(
        Residual("extra", places[residual.index]) if residual.kind == "extra" else residual for residual in left
    )
    new = canonical(forward.inputs, forward.equations, outputs, forward.constants, forward.constraints, forward.name)
    return Split(dce(new), backward, residuals, split.gradients)
