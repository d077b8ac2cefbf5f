"""The functions from trace to trace, and the laws that hold for every one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from thunder_fn.capture import capture, current
from thunder_fn.capture.apply import apply_inside, replay
from thunder_fn.distributed.schedule import overlapped
from thunder_fn.executors.claims import claim
from thunder_fn.interpreters import (
    clean,
    grad as reverse,
    jvp as forward,
    simplify,
    vmap as batching,
)
from thunder_fn.interpreters.autocast import autocast
from thunder_fn.interpreters.check_errors import KINDS, check_errors
from thunder_fn.interpreters.checkpoint.policies import check_policy
from thunder_fn.interpreters.fold import fold_constants
from thunder_fn.interpreters.noops import drop_noops
from thunder_fn.interpreters.partial_eval import follows_from, partial_eval
from thunder_fn.interpreters.rewriting.rewrite import represent
from thunder_fn.interpreters.vmap import expand
from thunder_fn.ir import ops
from thunder_fn.ir.check import check
from thunder_fn.ir.flow import WIRINGS, Flow, Port
from thunder_fn.ir.fx import from_fx, to_fx
from thunder_fn.ir.memos import clear_caches
from thunder_fn.ir.rules import Split
from thunder_fn.ir.trace import (
    Equation,
    Expr,
    Literal,
    Source,
    TensorType,
    Trace,
    TraceBuilder,
    Var,
    cut,
    every_equation,
    subtraces,
)
from thunder_fn.ir.walking import inline_into
from thunder_fn.structured.checkpoint import alone as checkpointed
from thunder_fn.structured.roll import roll, unroll
from thunder_fn.testing.drawn_programs import static_shape
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    Transform,
    agree,
    close,
    draws,
    holds,
    is_flat,
    is_inexact,
    law_of,
    random_like,
    run,
    state_after,
    tolerance,
    wanted_inputs,
    wanted_outputs,
)
from thunder_fn.testing.laws.losses import emit, scalarised
from thunder_fn.testing.laws.unfolding import unfolded

aten = torch.ops.aten


# ---- interpreters ----


@dataclass(frozen=True)
class Interpreter:
    """A function from a trace to the traces that it makes.

    `keeps_values` says that the only trace it makes computes what the trace did, bitwise, and
    `idempotent` that a second application changes nothing. `keeps_memory` says that outputs lie in
    the memory of what they did. `carries` says that constraints, sources and ownership stay; a text
    or an FX graph does not hold them, nor a loop that is written out without its condition.
    `covers` says which traces it takes.

    Example:
        >>> import thunder_fn as tfn
        >>> from thunder_fn.testing import Interpreter, laws_of
        >>> mine = Interpreter(lambda trace: (tfn.simplify(trace),), keeps_values=True)
        >>> "mine keeps values" in laws_of(mine, "mine")
        True
    """

    run: Callable[[Trace], tuple[Trace, ...]]
    keeps_values: bool = False
    idempotent: bool = False
    keeps_memory: bool = False
    carries: bool = True
    covers: Callable[[Trace], bool] = lambda trace: True


def without_code(trace: Trace) -> Trace:
    """The trace that finds errors, without the code of the first one."""
    new, _ = check_errors(trace, KINDS)
    return cut(new, outputs=new.outputs[:-1])


def recapture(trace: Trace) -> Trace:
    """The capture of a program's own Python text."""
    return capture(trace.python_callable(), fakes(trace)).trace


def recapture_nested(trace: Trace) -> Trace:
    """The capture of a program run equation by equation, each composite a scope that capture
    nests anew.
    """
    return capture(lambda *xs: replay(recorder(), trace, xs), fakes(trace)).trace


def recapture_whole(trace: Trace) -> Trace:
    """The capture of a function that applies the trace as one equation."""
    return capture(
        lambda *xs: apply_inside(recorder(), trace, xs, ops.composite("Whole")), fakes(trace)
    ).trace


def recorder() -> Any:
    """The recorder of the capture that is going on."""
    return current()


def fakes(trace: Trace) -> Inputs:
    """Zeros of the input types: capture looks at their types only."""
    types = [type for type in trace.input_types if isinstance(type, TensorType)]
    return tuple(torch.zeros(static_shape(type), dtype=type.dtype) for type in types)


def split(trace: Trace, *, fused: bool = False) -> Split:
    """The split of a trace for all gradients that there are."""
    return reverse.forward_backward(trace, wanted_inputs(trace), wanted_outputs(trace), fused=fused)


def pull(trace: Trace) -> Trace:
    """The vjp of a trace for all gradients that there are."""
    return reverse.vjp(trace, wanted_inputs(trace), wanted_outputs(trace))


def grad(trace: Trace) -> Trace:
    """The gradient of the loss of a trace."""
    loss = scalarised(trace)
    return reverse.grad_and_value(loss, wanted_inputs(loss))


def push(trace: Trace) -> Trace:
    """The jvp of a trace along all tangents that there are."""
    return forward.jvp(trace, wanted_inputs(trace))


SIZE = 3
"""The number of examples in a batch."""

InDims: TypeAlias = tuple[int | None, ...]


def batchings(trace: Trace) -> tuple[InDims, ...]:
    """in_dims to try: every other input unbatched, in both ways, all first, and all last."""
    ranks = [len(type.shape) if isinstance(type, TensorType) else 0 for type in trace.input_types]
    even = tuple(rank // 2 if position % 2 == 0 else None for position, rank in enumerate(ranks))
    odd = tuple(0 if position % 2 else None for position in range(len(ranks)))
    return tuple(dict.fromkeys((odd, even, (0,) * len(ranks), tuple(ranks))))


def batch(trace: Trace, in_dims: InDims | None = None) -> Trace:
    """The trace on a batch, each example with random numbers of its own; every output is a
    batch.
    """
    dims = batchings(trace)[-1] if in_dims is None else in_dims
    new, out_dims = batching.vmap(trace, dims, SIZE, "different")
    builder = TraceBuilder(new.name)
    results = inline_into(builder, new, builder.take(new.input_types))
    wide = (
        expand(builder, atom, SIZE) if dim is None and isinstance(atom, Var) else atom
        for atom, dim in zip(results, out_dims, strict=True)
    )
    return builder.build(tuple(wide))


def known_and_rest(trace: Trace) -> tuple[Trace, ...]:
    """The trace in two: what follows from every other input, and the rest."""
    known = tuple(position % 2 == 0 for position in range(len(trace.inputs)))
    found = follows_from(trace, known)
    outputs = tuple(not isinstance(atom, Var) or atom.index in found for atom in trace.outputs)
    return partial_eval(trace, known, outputs)


def whole_checkpoint(trace: Trace) -> Trace:
    """The trace as the body of one checkpoint equation that keeps nothing."""
    return checkpointed(trace, check_policy(None))


WIDENED = frozenset(
    f"aten.{name}"
    for name in ("mm.default", "addmm.default", "bmm.default", "mul.Tensor", "sin.default")
)
PROMOTED = frozenset(("aten.add.Tensor", "aten.cat.default", "aten.where.self"))


def widening_policy(equation: Equation) -> Any:
    """A policy that answers in every way about ops that the strategies draw."""
    if equation.op.name in WIDENED:
        return "lower"
    return "promote" if equation.op.name in PROMOTED else None


def silent_policy(equation: Equation) -> Any:
    """A policy that never answers."""
    return None


def widened(trace: Trace) -> Trace:
    """The trace under autocast to float64: autocast's changes to a trace, without rounding of
    its numbers.
    """
    return autocast(trace, torch.float64, widening_policy)


def _alone(transform: Transform) -> Callable[[Trace], tuple[Trace, ...]]:
    return lambda trace: (transform(trace),)


INTERPRETERS: dict[str, Interpreter] = {
    "dce": Interpreter(
        lambda t: (simplify.dce(t),), keeps_values=True, idempotent=True, keeps_memory=True
    ),
    "cse": Interpreter(lambda t: (simplify.cse(t),), keeps_values=True, idempotent=True),
    "inline": Interpreter(
        lambda t: (simplify.inline(t),), keeps_values=True, idempotent=True, keeps_memory=True
    ),
    "drop_noops": Interpreter(
        _alone(drop_noops), keeps_values=True, idempotent=True, keeps_memory=True
    ),
    "fold_constants": Interpreter(
        _alone(fold_constants), keeps_values=True, idempotent=True, keeps_memory=True
    ),
    "simplify": Interpreter(_alone(clean.simplify), keeps_values=True, idempotent=True),
    "autocast": Interpreter(_alone(widened)),
    "autocast without answers": Interpreter(
        lambda t: (autocast(t, torch.bfloat16, silent_policy),),
        keeps_values=True,
        idempotent=True,
        keeps_memory=True,
    ),
    "unfold": Interpreter(_alone(unfolded), keeps_values=True, carries=False),
    "recapture": Interpreter(_alone(recapture), keeps_values=True, carries=False),
    "recapture nested": Interpreter(_alone(recapture_nested), keeps_values=True, carries=False),
    "recapture whole": Interpreter(_alone(recapture_whole), keeps_values=True, carries=False),
    "fx": Interpreter(
        lambda t: (from_fx(to_fx(t)),),
        keeps_values=True,
        idempotent=True,
        carries=False,
        covers=is_flat,
    ),
    "forward_backward": Interpreter(lambda t: (split(t).forward, split(t).backward)),
    "forward_backward, fused": Interpreter(
        lambda t: (split(t, fused=True).forward, split(t, fused=True).backward)
    ),
    "vjp": Interpreter(_alone(pull)),
    "grad_and_value": Interpreter(_alone(grad)),
    "jvp": Interpreter(_alone(push)),
    "vmap": Interpreter(_alone(batch)),
    "checkpoint": Interpreter(_alone(whole_checkpoint), keeps_values=True),
    "claims": Interpreter(lambda t: (claim(t).trace,)),
    "schedule": Interpreter(lambda t: (overlapped(t, 2),), keeps_values=True, idempotent=True),
    "represent": Interpreter(lambda t: (represent(t, (None,) * len(t.inputs)),), keeps_values=True),
    "roll": Interpreter(_alone(roll), keeps_values=True),
    "unroll": Interpreter(_alone(unroll), keeps_values=True),
    "partial_eval": Interpreter(known_and_rest, covers=lambda t: not ops.has_effects(t)),
    "check_errors": Interpreter(_alone(without_code), keeps_values=True),
    "vjp of vjp": Interpreter(lambda t: (pull(pull(t)),)),
}
"""Every function from trace to trace, by name."""

UNFOLDING = frozenset({"inline", "unfold", "recapture", "fx", "claims", "partial_eval"})
"""Interpreters that unfold composites, so that what they make grows with the unfolded program."""


# ---- laws of every interpreter ----


@law_of
def interpreter_gives_checked_traces(
    interpreter: Interpreter, trace: Trace, inputs: Inputs
) -> None:
    """Traces that an interpreter makes pass check."""
    for new in interpreter.run(trace):
        try:
            check(new)
        except Exception as error:
            raise LawBroken(f"check fails: {error}\n\ntrace:\n{trace}\n\nmade:\n{new}") from error


_OPENED = frozenset(("scan", "while_loop", "cond", "switch", "checkpoint", "call"))
"""Structured ops whose bodies all run under every transform."""


def marked(trace: Trace) -> tuple[Trace, dict[Trace, Expr]]:
    """Return the trace with a constraint of its own in it and in each body, and a line of its own
    for each equation.

    Returns:
        The marked trace, and the added constraint of it and of each body, by marked trace.
    """
    found: dict[Trace, Trace] = {}
    marks: dict[Trace, Expr] = {}
    lines = itertools.count(1)

    def mark(trace: Trace) -> Trace:
        if trace not in found:
            number = len(marks)
            own = Expr(sympy.Symbol(f"mark{number}", integer=True) > number)
            marks[trace] = own
            equations = tuple(
                dataclasses.replace(
                    equation,
                    bodies=tuple(map(mark, equation.bodies)),
                    source=Source("law.py", next(lines), equation.op.name),
                )
                for equation in trace.equations
            )
            first = Expr(sympy.Symbol(f"mark{number}", integer=True) > -1)  # each has to be kept
            new = dataclasses.replace(
                trace, equations=equations, constraints=(first, *trace.constraints, own)
            )
            found[trace] = new
        return found[trace]

    new = mark(trace)
    return new, {found[trace]: own for trace, own in marks.items()}


_READ_BY_ALL = Flow(
    "backward",
    lambda equation, flags: (
        (any(flags) and not _has_rules_of_its_own(equation),) * len(equation.operands)
    ),
    opens=lambda equation: not _has_rules_of_its_own(equation),
    control=True,
)
"""The values that outputs are made of under every transform: a custom rule may leave any of its
operands unread.
"""


def _has_rules_of_its_own(equation: Equation) -> bool:
    return equation.op.kind == "structured" and equation.op.name not in _OPENED


def always_run(trace: Trace) -> set[Trace]:
    """Return the bodies in a trace that run under every transform: no rule is chosen between them.

    With an empty loop in the trace, whole parts of it may be dead: then there are none.
    """
    seen: set[Trace] = set()
    todo = [(trace, (True,) * len(trace.outputs))]
    while todo:
        trace, flags = todo.pop()
        read = _READ_BY_ALL.everywhere(trace, flags)
        for equation in trace.equations:
            if any(
                arg == Literal(0) for key, arg in equation.kwargs if key in ("length", "max_steps")
            ):
                return set()
            given = tuple([read[var.index] for var in equation.outputs])
            if not any(given) or not equation.bodies or _has_rules_of_its_own(equation):
                continue
            ports: set[Port] = {("out", 0, i) for i, flag in enumerate(given) if flag}
            if equation.op.kind != "composite":
                rule = WIRINGS.find(equation.op)
                assert rule is not None
                ports = _READ_BY_ALL.ports(equation, rule(equation), given)
            for place, body in enumerate(equation.bodies):
                seen.add(body)
                todo.append(
                    (body, tuple([("out", place, i) in ports for i in range(len(body.outputs))]))
                )
    return seen


@law_of
def interpreter_carries_facts(
    interpreter: Interpreter, trace: Trace, inputs: Inputs, *, whole: bool = True
) -> None:
    """Constraints of a trace guard every trace made of it, and a closed-over tensor stays the
    user's.

    Every trace that is made has the constraints of the trace. With `whole`, one of them has those
    of each body that runs, and every line is one of the trace.
    """
    given, marks = marked(simplify.dce(trace))
    own, inside = marks[given], {marks[body] for body in always_run(given)}
    made = interpreter.run(given)
    carried = [{one for inner in subtraces(new) for one in inner.constraints} for new in made]
    mine = {id(c.tensor) for inner in subtraces(given) for c in inner.constants if not c.owned}
    known = {source for inner in subtraces(given) for source in _places(inner)}
    for new, constraints in zip(made, carried, strict=True):
        holds(own in constraints, f"the constraint {own} is lost. {_CARRY}", trace=given, made=new)
        wrong = [
            c
            for inner in subtraces(new)
            for c in inner.constants
            if c.owned == (id(c.tensor) in mine)
        ]
        holds(not wrong, f"a closed-over tensor changed its owner. {_CARRY}", trace=given, made=new)
        strange = {source for inner in subtraces(new) for source in _places(inner)} - known
        holds(
            not whole or not strange,
            f"lines that are not of the trace: {strange}",
            trace=given,
            made=new,
        )
    lost = inside - set[Expr]().union(*carried)
    holds(
        not whole or not lost,
        f"constraints of bodies are lost: {sorted(map(str, lost))}",
        trace=given,
    )


_CARRY = (
    "Make the new trace with `walk`, `rewritten` or `cut` (thunder_fn.ir), which carry what a trace"
    " carries."
)


def _places(trace: Trace) -> set[str]:
    return {equation.source.place for equation in trace.equations if equation.source is not None}


@law_of
def interpreter_is_pure(interpreter: Interpreter, trace: Trace, inputs: Inputs) -> None:
    """The trace is untouched, no random number is drawn, and equal traces give equal traces,
    remembered or not.
    """
    text, key, generator = str(trace), hash(trace), torch.get_rng_state()
    remembered = interpreter.run(trace)
    holds(
        str(trace) == text and hash(trace) == key,
        f"the trace was changed; it was\n{text}",
        trace=trace,
    )
    holds(torch.equal(generator, torch.get_rng_state()), "random numbers were drawn", trace=trace)
    clear_caches(rules=False)
    anew = interpreter.run(trace)
    for a, b, c in zip(remembered, anew, interpreter.run(trace.renamed(trace.name)), strict=True):
        holds(a == b, "equal traces gave different traces", trace=trace, first=a, second=b)
        holds(
            b == c and str(b) == str(c),
            "equal traces gave different traces",
            trace=trace,
            first=b,
            second=c,
        )


@law_of
def interpreter_keeps_values(interpreter: Interpreter, trace: Trace, inputs: Inputs) -> None:
    """The same values, bitwise, and the same random numbers in the same order; types and inputs
    stay.
    """
    (new,) = interpreter.run(trace)
    holds(new.input_types == trace.input_types, "the inputs' types changed", trace=trace, made=new)
    holds(
        new.output_types == trace.output_types, "the outputs' types changed", trace=trace, made=new
    )
    agree(run(new, inputs), run(trace, inputs), "the transformed trace", trace=trace, made=new)
    same = torch.equal(state_after(new, inputs), state_after(trace, inputs))
    holds(same, "more or fewer random numbers are drawn", trace=trace, made=new)


@law_of
def interpreter_is_idempotent(interpreter: Interpreter, trace: Trace, inputs: Inputs) -> None:
    """A second application changes nothing."""
    (once,) = interpreter.run(trace)
    (twice,) = interpreter.run(once)
    holds(
        once == twice, "a second application changes the trace", trace=trace, once=once, twice=twice
    )


@law_of
def interpreter_leaves_closures_alone(
    interpreter: Interpreter, trace: Trace, inputs: Inputs, *, exact: bool = True
) -> bool:
    """Closed-over tensors are read when the trace runs: it sees the values that they have by
    then. Unless `exact`, values may differ by rounding.
    """
    constants = [c for inner in subtraces(trace) for c in inner.constants if not c.owned]
    tensors = {id(c.tensor): c.tensor for c in constants if c.tensor.is_floating_point()}.values()
    (new,) = interpreter.run(trace)
    with torch.no_grad():
        before = [tensor.clone() for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.mul_(2)
            have, want = run(new, inputs), run(trace, inputs)
            what = "after a closed-over tensor changed (only constants that are `owned` never do)"
            if exact:
                agree(have, want, what, trace=trace, made=new)
            elif not draws(trace):
                doubles = _tensors_of(have), _tensors_of(want)
                close(doubles[0], doubles[1], tolerance(trace), what, trace=trace, made=new)
        finally:
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
    return bool(tensors)


def _tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    return [x if is_inexact(x) else x.double() for x in values if isinstance(x, torch.Tensor)]


@law_of
def interpreter_keeps_memory(interpreter: Interpreter, trace: Trace, inputs: Inputs) -> None:
    """Two outputs, or an output and an input, lie in the same memory exactly if they did."""
    (new,) = interpreter.run(trace)
    have, want = (_shared_memory((*inputs, *run(t, inputs))) for t in (new, trace))
    holds(have == want, f"values share memory: {have}, but before: {want}", trace=trace, made=new)


def _shared_memory(values: Sequence[Any]) -> list[int]:
    """The first tensor that shares the memory of each tensor with elements."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.numel()]
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [places.index(place) for place in places]


@law_of
def interpreter_keeps_gradients(interpreter: Interpreter, trace: Trace, inputs: Inputs) -> None:
    """Gradients after the interpreter are those before it."""
    (new,) = interpreter.run(trace)
    arguments = (*inputs, *random_like(trace))
    have, want = (run(pull(t), arguments)[len(trace.outputs) :] for t in (new, trace))
    close(
        have,
        want,
        tolerance(trace),
        "the gradients of the transformed trace",
        trace=trace,
        made=new,
    )


def laws_of(interpreter: Interpreter, name: str) -> dict[str, Law]:
    """The laws that an interpreter must keep, by name.

    Law: the identity keeps each of them.

    Example:
        >>> import thunder_fn as tfn
        >>> from thunder_fn.testing import Interpreter, laws_of
        >>> sorted(laws_of(Interpreter(lambda trace: (trace,)), "nothing"))
        ['nothing carries facts', 'nothing gives checked traces', 'nothing is pure']
    """
    laws = {
        "gives checked traces": interpreter_gives_checked_traces,
        "is pure": interpreter_is_pure,
    }
    if interpreter.carries:
        laws["carries facts"] = interpreter_carries_facts
    if interpreter.keeps_values:
        laws |= {
            "keeps values": interpreter_keeps_values,
            "keeps gradients": interpreter_keeps_gradients,
        }
        laws["leaves closed-over tensors alone"] = interpreter_leaves_closures_alone
    if interpreter.keeps_memory:
        laws["keeps memory apart"] = interpreter_keeps_memory
    if interpreter.idempotent:
        laws["is idempotent"] = interpreter_is_idempotent
    return {f"{name} {law}": _where_covered(interpreter, make) for law, make in laws.items()}


def _where_covered(interpreter: Interpreter, make: Callable[[Interpreter], Law]) -> Law:
    law = make(interpreter)

    def covered(trace: Trace, inputs: Inputs) -> None:
        if interpreter.covers(trace):
            law(trace, inputs)

    covered.__doc__ = make.__doc__
    return covered


# ---- work grows with distinct code ----


def nested(depth: int) -> Trace:
    """A function nested so many composites deep, each calling the next one twice: 2**depth
    leaves when unfolded.
    """
    type = TensorType(torch.float64, (2,))
    builder = TraceBuilder("level_0")
    body = builder.build((emit(builder, aten.sin.default, builder.input(type)),))
    for level in range(1, depth + 1):
        builder = TraceBuilder(f"level_{level}")
        (once,) = builder.add(
            ops.composite("Level"), (builder.input(type),), (type,), bodies=(body,)
        )
        (twice,) = builder.add(ops.composite("Level"), (once,), (type,), bodies=(body,))
        body = builder.build((twice,))
    return body


def size(trace: Trace) -> int:
    """The number of equations in distinct traces: the work of an interpreter that shares."""
    return sum(1 for _ in every_equation(trace))


def law_work_grows_with_distinct_code(interpreter: Interpreter) -> None:
    """The trace that an interpreter makes of `nested(depth)` grows by the same amount with each
    level.
    """
    sizes = [sum(size(new) for new in interpreter.run(nested(depth))) for depth in (4, 6, 8, 10)]
    steps = {b - a for a, b in itertools.pairwise(sizes)}
    holds(
        len(steps) == 1, f"for depths 4, 6, 8, 10 there are {sizes} equations, which is not linear"
    )
