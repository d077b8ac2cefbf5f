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

from collections import Counter

from thunder_fn.derived.quirks.attention import without_log_sums
from thunder_fn.executors.reuse import CLONE
from thunder_fn.interpreters.noops import same_as, shortened, without_kept_dims
from thunder_fn.interpreters.simplify import makes_symbols
from thunder_fn.ir import ops
from thunder_fn.ir.equations import operands_in
from thunder_fn.ir.memory import is_alias, leaving_variables
from thunder_fn.ir.trace import Equation, Trace, Var, cut, vars_in
from thunder_fn.ir.walking import merged


def prune(trace: Trace, *, below_autograd: bool) -> tuple[Trace, tuple[int, ...]]:
    """Drop equations that change no value.

    Law: same values, bitwise; distinct outputs stay distinct tensors.

    Returns:
        The trace, and the positions of the equations that are gone.
    """
    escaping = leaving_variables(trace)
    computed = _computed(trace)
    uses = Counter(var.index for var in (*operands_in(trace.equations), *vars_in(trace.outputs)))
    returned = {atom.index for atom in trace.outputs if isinstance(atom, Var)}
    seen, makers = dict[object, Equation](), dict[int, Equation]()

    def known(equation: Equation) -> tuple[Var, ...] | Equation:
        stays = not any(var.index in escaping for var in equation.outputs)
        equation = shortened(equation, makers) if stays else equation
        equation = without_kept_dims(equation, makers, uses)
        same = _identity(equation, escaping, computed, returned, below_autograd)
        if same is None and (stays or (below_autograd and is_alias(equation.op))):
            same = same_as(equation, makers)
            same = same if stays or _is_own(equation, same, computed, returned) else None
        if same is not None:
            if equation.outputs[0].index in returned:
                returned.add(same.index)
            return (same,)
        earlier = seen.setdefault(_key(equation), equation)
        if earlier is not equation and not _both_escape(earlier, equation, escaping):
            pairs = zip(equation.outputs, earlier.outputs, strict=True)
            escaping.update(var.index for old, var in pairs if old.index in escaping)
            return earlier.outputs
        makers.update((var.index, equation) for var in equation.outputs)
        return equation

    return merged(trace, known)


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
            ops.has_side_effect(equation)
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


def _computed(trace: Trace) -> set[int]:
    """The variables that are no inputs and no views of inputs: what eager mode takes of an input
    under `no_grad` requires a gradient as that does.
    """
    found = set[int]()
    for equation in trace.equations:
        may_show = equation.op.kind != "leaf" or ops.is_view(equation.op)
        if not may_show or all(var.index in found for var in equation.operands):
            found.update(var.index for var in equation.outputs)
    return found


def _identity(
    equation: Equation,
    escaping: set[int],
    computed: set[int],
    returned: set[int],
    below_autograd: bool,
) -> Var | None:
    """The operand of a detach or a clone whose copy can be dropped."""
    operand = equation.args[0] if len(equation.args) == 1 and not equation.kwargs else None
    if not isinstance(operand, Var) or not equation.outputs:
        return None
    result = equation.outputs[0].index
    if equation.op in (ops.STOP_GRADIENT, ops.NO_GRAD):
        own = result not in escaping or _is_own(equation, operand, computed, returned)
        return operand if below_autograd and own else None
    return operand if equation.op == CLONE and result not in escaping else None


def _is_own(equation: Equation, same: Var | None, computed: set[int], returned: set[int]) -> bool:
    """Test whether a result may be the operand that it is a view of: memory of the program's own,
    which does not become two of its outputs.
    """
    both = {equation.outputs[0].index, same.index} if same is not None else set[int]()
    return same is not None and same.index in computed and not both <= returned


def _key(equation: Equation) -> object:
    """Equal for equations that compute the same; those that must run get a key of their own."""
    if ops.has_side_effect(equation) or makes_symbols(equation) or equation.op.kind != "leaf":
        return id(equation)
    return equation.op, equation.args, equation.kwargs


def _both_escape(known: Equation, other: Equation, escaping: set[int]) -> bool:
    return any(var.index in escaping for var in known.outputs) and any(
        var.index in escaping for var in other.outputs
    )
