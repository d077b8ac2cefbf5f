"""Tidying of a flat trace before it becomes a program: equations that a program need not run are
dropped.

- `detach` of an intermediate, where the program runs below autograd;
- `clone` of what nobody writes to, where the copy is only read, and whatever else gives back what
  it was given;
- what has been computed already.

Two outputs of a program never become one tensor: whoever writes to one of them must not change the
other.
"""

from __future__ import annotations

from thunder_fn.derived.quirks.attention import without_log_sums
from thunder_fn.executors.reuse import CLONE
from thunder_fn.interpreters.noops import same_as
from thunder_fn.interpreters.simplify import is_kept, makes_symbols
from thunder_fn.ir import ops
from thunder_fn.ir.equations import bound, needed
from thunder_fn.ir.trace import Arg, Equation, Trace, Var, cut, map_arg


def prune(trace: Trace, *, below_autograd: bool) -> tuple[Trace, tuple[int, ...]]:
    """Drop equations that change no value.

    Law: same values, bitwise; distinct outputs stay distinct tensors.

    Returns:
        The trace, and the positions of the equations that are gone.
    """
    escaping = escaping_vars(trace)
    computed = {var.index for var in bound(trace.equations)}
    returned = {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    names, seen = dict[int, Arg](), dict[object, Equation]()
    kept, gone, makers = list[Equation](), list[int](), dict[int, Equation]()

    def read(var: Var) -> Arg:
        return names.get(var.index, var)

    for position, equation in enumerate(trace.equations):
        new = equation.reading(read)
        same = _identity(new, equation, escaping, computed, returned, below_autograd)
        if same is None and not any(var.index in escaping for var in equation.outputs):
            same = same_as(new, makers)
        known = seen.get(_key(new))
        if same is not None:
            names[equation.outputs[0].index] = same
            if equation.outputs[0].index in returned and isinstance(same, Var):
                returned.add(same.index)
        elif known is not None and not _both_escape(known, equation, escaping):
            names.update(
                (old.index, var) for old, var in zip(equation.outputs, known.outputs, strict=True)
            )
            escaping |= {
                var.index
                for old, var in zip(equation.outputs, known.outputs, strict=True)
                if old.index in escaping
            }
        else:
            kept.append(new)
            seen.setdefault(_key(new), new)
            makers.update((var.index, new) for var in new.outputs)
            continue
        gone.append(position)
    outputs = tuple(map_arg(read, atom) for atom in trace.outputs)
    return cut(trace, equations=kept, outputs=outputs), tuple(gone)


def drop_dead(trace: Trace) -> tuple[Trace, tuple[int, ...]]:
    """Drop equations that no output needs, and log-sum-exps of attention that no backward reads.

    Operators are whole until somebody unfolds them.

    Returns:
        The trace, and the positions of the equations that are gone.
    """
    need = {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    gone, equations = list[int](), list(trace.equations)
    for position, equation in reversed(list(enumerate(trace.equations))):
        equations[position] = without_log_sums(equation, need)
        if (
            is_kept(equation)
            or makes_symbols(equation)
            or any(var.index in need for var in equation.outputs)
        ):
            need.update(var.index for var in equation.operands)
        else:
            gone.append(position)
    if not gone and all(new is old for new, old in zip(equations, trace.equations, strict=True)):
        return trace, ()
    dead = set(gone)
    new = cut(
        trace, equations=(eq for position, eq in enumerate(equations) if position not in dead)
    )
    return new, tuple(sorted(gone))


def escaping_vars(trace: Trace) -> set[int]:
    """The variables that outputs are or may share memory with."""
    escaping = {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    needed(
        [one for one in trace.equations if one.op.kind != "leaf" or ops.is_view(one.op)], escaping
    )
    return escaping


def _identity(
    new: Equation,
    equation: Equation,
    escaping: set[int],
    computed: set[int],
    returned: set[int],
    below_autograd: bool,
) -> Arg | None:
    """The operand of a detach or a clone whose copy can be dropped."""
    if len(new.args) != 1 or new.kwargs or not isinstance(new.args[0], Var):
        return None
    if new.op in (ops.STOP_GRADIENT, ops.NO_GRAD):
        result, operand = equation.outputs[0].index, new.args[0].index
        own = result not in escaping or (operand in computed and not {result, operand} <= returned)
        return new.args[0] if below_autograd and own else None
    if new.op == CLONE and equation.outputs[0].index not in escaping:
        return new.args[0]
    return None


def _key(equation: Equation) -> object:
    """Equal for equations that compute the same; those that must run get a key of their own."""
    if is_kept(equation) or makes_symbols(equation) or equation.op.kind != "leaf":
        return id(equation)
    return equation.op, equation.args, equation.kwargs


def _both_escape(known: Equation, other: Equation, escaping: set[int]) -> bool:
    return any(var.index in escaping for var in known.outputs) and any(
        var.index in escaping for var in other.outputs
    )
