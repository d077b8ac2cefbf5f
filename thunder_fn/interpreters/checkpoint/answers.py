"""Answers of a policy about the equations of a body, as values of its split forward.

A chosen value is marked with an identity, `checkpoint_name(x, answer="save")`, which
`forward_backward` carries along. In the forward that it leaves, the marks are taken off again and
say which values to keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from thunder_fn.interpreters.checkpoint.policies import Answer, ask
from thunder_fn.interpreters.checkpoint.selective import Selective
from thunder_fn.ir.equations import bound
from thunder_fn.ir.trace import Atom, Equation, Literal, TensorType, Trace, TraceBuilder, Var, cut
from thunder_fn.ir.walking import put, walk
from thunder_fn.structured.call import CALL
from thunder_fn.structured.checkpoint_name import NAME

Answers: TypeAlias = dict[int, Answer]
"""The kept values by variable, and how each is kept."""


def mark(body: Trace, policy: Callable[[Equation], Any] | Selective) -> Trace:
    """Unfold the composites and calls of a body, and mark what the policy keeps.

    It is asked about every equation: about a composite before its body.
    """
    builder = TraceBuilder(body.name)
    inputs = builder.take(body.input_types)
    return builder.build(
        _mark(builder, body, inputs, policy.walk() if isinstance(policy, Selective) else policy)
    )


def is_marked(trace: Trace) -> bool:
    """Test whether something in it is kept."""
    return any(_answer(equation) is not None for equation in trace.equations)


def _answer(equation: Equation) -> Answer | None:
    if equation.op != NAME:
        return None
    return next(
        (arg.value for key, arg in equation.kwargs if key == "answer" and isinstance(arg, Literal)),
        None,
    )


def _mark(
    builder: TraceBuilder, trace: Trace, inputs: tuple[Atom, ...], policy: Callable[[Equation], Any]
) -> tuple[Atom, ...]:
    def step(equation: Equation, operands: tuple[Atom, ...]) -> tuple[Atom, ...]:
        answer = ask(policy, equation)
        if equation.op.kind == "composite" or equation.op == CALL:
            results = _mark(builder, equation.body, operands, policy)
        else:
            results = put(builder, equation, operands)
        return (
            results
            if answer == "recompute"
            else tuple(_marked(builder, value, answer) for value in results)
        )

    return walk(builder, trace, inputs, step)


def _marked(builder: TraceBuilder, value: Atom, answer: Answer) -> Atom:
    if not isinstance(value, Var) or not isinstance(value.type, TensorType):
        return value
    return builder.add(NAME, (value,), (value.type,), kwargs=(("answer", Literal(answer)),))[0]


def unmark(flat: Trace) -> tuple[Trace, Answers]:
    """The trace without the answers, and the answers.

    Values that a structured equation leaves for its own backward are kept if its results are.
    """
    env: dict[int, Var] = {}
    answers: Answers = {}
    kept: list[Equation] = []

    def read(atom: Atom) -> Atom:
        return env.get(atom.index, atom) if isinstance(atom, Var) else atom

    for equation in flat.equations:
        answer = _answer(equation)
        if answer is not None:
            source = read(equation.operands[0])
            assert isinstance(source, Var), "only variables are marked"
            env[equation.outputs[0].index] = source
            answers[source.index] = answer
        else:
            kept.append(equation.reading(read))
    for equation in kept:
        chosen: list[Answer] = [
            answers[var.index] for var in equation.outputs if var.index in answers
        ]
        if equation.op.kind == "structured" and chosen:
            for var in equation.outputs:
                answers.setdefault(var.index, chosen[0])
    outputs = tuple(map(read, flat.outputs))
    return _renumbered(flat, kept, outputs, answers)


def _renumbered(
    flat: Trace, equations: list[Equation], outputs: tuple[Atom, ...], answers: Answers
) -> tuple[Trace, Answers]:
    trace = cut(flat, equations=equations, outputs=outputs)
    olds = bound(equations)
    news = bound(trace.equations)
    names = {old.index: new.index for old, new in zip(olds, news, strict=True)}
    names |= {old.index: new.index for old, new in zip(flat.inputs, trace.inputs, strict=True)}
    return trace, {names[index]: answer for index, answer in answers.items() if index in names}
