"""Programs that are made on purpose, changed at random, and made small again.

Hypothesis draws programs from nothing. Three things need more: a structured op around a body of a
certain length, an op with a certain argument, and a program that is like one that was interesting.
Programs are data, so each of these is a few lines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from thunder_fn.ir.trace import TensorType
from thunder_fn.testing.drawn_programs import BODIES, FAMILIES, Program, Step, build
from thunder_fn.testing.schemas import MOST_PICKS, num_picks, takes

F64 = torch.float64
VECTOR = TensorType(F64, (2,))

CHAIN = (
    Step("mul", (0, 1)),
    Step("add", (0, 1)),
    Step("sin"),
    Step("sub", (0, 2)),
    Step("cos"),
    Step("atan2", (0, 2)),
)
"""Steps that each read the one before: a body of any length in which nothing is dead. In a loop the
first two make the order of the steps show.
"""

NESTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "composite": ((0, 1, 0, 1), (1, 1, 0, 1), (2, 1, 0, 1)),
    "operator": ((1, 0, 1),),
    "call": ((1, 0, 1),),
    "checkpoint": ((1, 0, 1), (1, 0, 1, 1)),
    "custom_vjp": ((1, 0, 1),),
    "cond": ((0, 0, 1, 0, 1), (2, 1, 1, 0, 1)),
    "switch": ((0, 2, 1, 1, 0, 1),),
    "scan": ((), (1, 0, 1, 0, 0, 0, 1, 0, 1)),
    "map": ((),),
    "while_loop": ((), (1, 0, 1, 0, 0, 0, 1, 0, 0, 1)),
}
"""The steps that own bodies, each with picks that give them operands."""


def nested(
    name: str, steps: Sequence[Step], picks: tuple[int, ...] = (), outputs: tuple[int, ...] = ()
) -> Program:
    """A program of one step around a body."""
    bodies = (Program((), tuple(steps), outputs),) * BODIES[name]
    return Program((VECTOR, VECTOR), (Step(name, picks, bodies),))


def around_chains(lengths: Sequence[int]) -> Iterator[Program]:
    """Each structured op around bodies of these lengths."""
    for length in lengths:
        for name, variants in NESTS.items():
            for picks in variants:
                yield nested(name, CHAIN[:length], picks)


def beside_chains(lengths: Sequence[int]) -> Iterator[Program]:
    """Each structured op with so many equations before and after it."""
    for length in lengths:
        for name, variants in NESTS.items():
            half = length // 2
            own = Step(name, variants[-1], (Program((), CHAIN[:2]),) * BODIES[name])
            steps = (*CHAIN[2 : 2 + half], own, *CHAIN[2 : 2 + length - half])
            yield Program((VECTOR, VECTOR), steps)


def around(steps: Sequence[Step]) -> Iterator[Program]:
    """Each structured op around a body of some steps, alone and at the end of a chain."""
    for name, variants in NESTS.items():
        yield nested(name, steps, variants[0])
        yield nested(name, (*CHAIN[:3], *steps), variants[-1])


DRAWS: tuple[Program, ...] = (
    Program((), (Step("rand"), Step("rand"))),
    Program((), (Step("rand"), Step("rand"), Step("sub", (0, 1)))),
    Program((VECTOR,), (Step("normal_like"), Step("normal_like", (1,)))),
    Program((VECTOR,), (Step("rand"), Step("normal_like", (1,)))),
    Program((VECTOR,), (Step("bernoulli"), Step("bernoulli", (1,)), Step("sub", (0, 1)))),
    Program((VECTOR,), (Step("dropout"), Step("twin"))),
    Program((VECTOR,), (Step("rand"), Step("sin", (1,)), Step("rand")), (0,)),
    Program((VECTOR,), (Step("rand"),), (1,)),
    Program((VECTOR,), (Step("normal_like"), Step("rand"), Step("sin", (2,))), (0,)),
    *(
        nested(name, (Step("normal_like"), Step("normal_like", (1,)), Step("sub", (0, 1))), picks)
        for name, (picks, *_) in NESTS.items()
    ),
)
"""Programs whose draws can be merged, dropped, repeated and put in another order."""


_OWN, _CLOSED = Step("owned_constant"), Step("constant")

CONSTANTS: tuple[Program, ...] = (
    *(
        Program((VECTOR,), (made, Step("sin"), *more))
        for made in (_OWN, _CLOSED)
        for more in ((), (Step("cos"),), (Step("exp"), Step("mul", (0, 1))))
    ),
    *(Program((VECTOR,), (made, Step("view"), Step("sin"))) for made in (_OWN, _CLOSED)),
    Program((VECTOR,), (_OWN, Step("owned_constant", (1,)), Step("mul"), Step("sin"))),
    Program((VECTOR,), (_OWN, Step("normal_like", (0,)), Step("mul", (0, 1)))),
    Program((VECTOR,), (_OWN, Step("bernoulli", (0,)), Step("sin"))),
    Program((VECTOR,), (_CLOSED, Step("two_constants"), Step("mul", (0, 1)), Step("sin"))),
    *(nested(name, (_OWN, Step("sin"), Step("cos")), p[0]) for name, p in NESTS.items()),
    *(nested(name, (_CLOSED, Step("sin"), Step("cos")), p[0]) for name, p in NESTS.items()),
)
"""Programs that compute with constants of their own, and with closed-over tensors, which may
change.
"""

_PART = Program((), CHAIN[:3], (0,))

DEAD: tuple[Program, ...] = (
    Program((VECTOR, VECTOR), CHAIN[:3], (0,)),
    Program((VECTOR, VECTOR), CHAIN[:3], (2,)),
    Program((VECTOR, VECTOR), (*CHAIN[:2], Step("twin"), Step("twin", (1,))), (1, 0)),
    *(Program((VECTOR, VECTOR), (*CHAIN[:2], nested(n, CHAIN[:2]).steps[0]), (2,)) for n in NESTS),
    *(
        Program((VECTOR, VECTOR), (Step(name, picks, (body,) * BODIES[name]),), outputs)
        for name, variants in NESTS.items()
        for picks in variants
        for body, outputs in ((_PART, ()), (Program((), CHAIN[:3], (0, 1, 2)), (0,)))
    ),
)
"""Programs with equations, results and operands of bodies that nothing reads."""

MOST_PAIRS = 160


def pairs_of(names: Sequence[str]) -> list[Program]:
    """Programs in which one op reads what another made: the patterns that rewrites look for.

    An op on its own result comes first, with other arguments the second time and three times in a
    row; then an op twice on the same operand; then each op on the result of each other.
    """
    own = [program for name in names for program in _on_itself(name)]
    other = [
        program
        for first in names
        for second in names
        if first != second
        for program in _one_on_another(first, second)[:1]
    ]
    return [*own[: MOST_PAIRS // 2], *other[: MOST_PAIRS - len(own[: MOST_PAIRS // 2])]]


def _on_itself(name: str) -> list[Program]:
    calls = calls_of(name)
    if not calls:
        return []
    types, (plain,) = calls[0].inputs, calls[0].steps
    others = [call.steps[0] for call in calls[1:] if call.inputs == types][:3]
    chains = [(plain, plain), (plain, plain, plain), *((plain, step) for step in others)]
    chains += [(step, plain) for step in others]
    both = replace(plain, picks=(1, *plain.picks[1:]))
    return [
        *(Program(types, chain) for chain in chains),
        Program(types, (plain, plain), (0, 1)),
        Program(types, (plain, both), (0, 1)),
        Program(types, (plain, both, Step("sub", (0, 1)))),
        Program(types, (plain, Step("sin"), plain)),
    ]


def _one_on_another(first: str, second: str) -> list[Program]:
    return [
        Program(call.inputs, (*call.steps, Step(second)))
        for call in calls_of(first)[:1]
        if takes_after(call, second)
    ]


def takes_after(call: Program, second: str) -> bool:
    """Test whether an op takes what a call has made."""
    made = build(replace(call, steps=(*call.steps, Step(second)))).equations
    return len(made) > 1 and made[-1].op.name == second


def in_single(program: Program) -> Program:
    """The program on inputs in single precision."""
    singles = {F64: torch.float32, torch.complex128: torch.complex64}
    types = (TensorType(singles.get(t.dtype, t.dtype), t.shape) for t in program.inputs)
    return replace(program, inputs=tuple(types))


# ---- changing programs ----


def changed(program: Program, rng: random.Random, ops: Sequence[str]) -> Program:
    """A program that is like this one: a step more, less, elsewhere, with other picks, or inside
    of a structured op.
    """
    steps = list(program.steps)
    at = rng.randrange(len(steps) + 1)
    match rng.randrange(7):
        case 0 | 1:
            steps.insert(at, random_step(rng, ops))
        case 2 if len(steps) > 1:
            del steps[rng.randrange(len(steps))]
        case 3 if steps:
            place = rng.randrange(len(steps))
            steps[place] = _other_picks(steps[place], rng)
        case 4 | 5 if steps:
            start = rng.randrange(len(steps))
            stop = rng.randint(start + 1, len(steps))
            steps[start:stop] = [wrapped(steps[start:stop], rng)]
        case _:
            places = [i for i, step in enumerate(steps) if step.bodies]
            if not places:
                steps.insert(at, random_step(rng, ops))
            else:
                place = rng.choice(places)
                bodies = tuple(changed(body, rng, ops) for body in steps[place].bodies)
                steps[place] = replace(steps[place], bodies=bodies)
    return replace(program, steps=tuple(steps[:24]))


def wrapped(steps: Sequence[Step], rng: random.Random) -> Step:
    """Steps as the body of a structured op."""
    name = rng.choice(list(NESTS))
    body = Program((), tuple(steps))
    return Step(name, rng.choice(NESTS[name]), (body,) * BODIES[name])


def random_step(rng: random.Random, ops: Sequence[str]) -> Step:
    """A step without bodies; half of the time a call of one of the ops."""
    if ops and rng.random() < 0.5:
        name = rng.choice(ops)
        return Step(name, tuple(_pick(rng) for _ in range(num_picks(name))))
    family = rng.choice([family for family in FAMILIES if family != "random"])
    names = [name for name in FAMILIES[family] if name not in BODIES] or ["sin"]
    return Step(rng.choice(names), tuple(_pick(rng) for _ in range(rng.randrange(4))))


def _pick(rng: random.Random) -> int:
    return 0 if rng.random() < 0.4 else rng.randrange(MOST_PICKS)


def _other_picks(step: Step, rng: random.Random) -> Step:
    picks = [*step.picks, 0]
    picks[rng.randrange(len(picks))] = _pick(rng)
    return replace(step, picks=tuple(picks))


# ---- making programs small ----

MOST_TRIES = 400


def smallest(program: Program, breaks: Callable[[Program], bool]) -> Program:
    """A program that still breaks what this one does, and no smaller one that is tried does."""
    tries, found = 0, True
    while found and tries < MOST_TRIES:
        found = False
        for smaller in _smaller(program):
            tries += 1
            if breaks(smaller):
                program, found = smaller, True
                break
            if tries >= MOST_TRIES:
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are one change smaller, those that are much smaller first."""
    steps, inputs = program.steps, program.inputs
    if len(steps) > 3:
        half = len(steps) // 2
        yield replace(program, steps=steps[half:])
        yield replace(program, steps=steps[:half])
    for place, step in enumerate(steps):
        rest = (steps[:place], steps[place + 1 :])
        yield replace(program, steps=(*rest[0], *rest[1]))
        for body in step.bodies[:1]:
            yield replace(program, steps=(*rest[0], *body.steps, *rest[1]))
    for place in range(len(inputs)):
        yield replace(program, inputs=(*inputs[:place], *inputs[place + 1 :]))
    if program.outputs:
        yield replace(program, outputs=())
        yield replace(program, outputs=program.outputs[:-1])
    for place, step in enumerate(steps):
        for new in _smaller_steps(step):
            yield replace(program, steps=(*steps[:place], new, *steps[place + 1 :]))
    for place, type in enumerate(inputs):
        if type != VECTOR:
            yield replace(program, inputs=(*inputs[:place], VECTOR, *inputs[place + 1 :]))


def _smaller_steps(step: Step) -> Iterator[Step]:
    if step.picks:
        yield replace(step, picks=())
        yield replace(step, picks=step.picks[:-1])
    for place, pick in enumerate(step.picks):
        if pick:
            yield replace(step, picks=(*step.picks[:place], 0, *step.picks[place + 1 :]))
    if len(set(step.bodies)) == 1 and len(step.bodies) > 1:
        for body in _smaller(step.bodies[0]):
            yield replace(step, bodies=(body,) * len(step.bodies))
    for place, body in enumerate(step.bodies):
        for new in _smaller(body):
            yield replace(step, bodies=(*step.bodies[:place], new, *step.bodies[place + 1 :]))


# ---- the ops of a vocabulary, with every argument ----

PLACES: tuple[tuple[TensorType, ...], ...] = tuple(
    tuple(TensorType(dtype, shape) for dtype, shape in types)
    for types in (
        ((F64, (2,)), (F64, (2,))),
        ((F64, (2, 3)), (F64, (2, 3))),
        ((F64, (3, 3)), (F64, (3, 3)), (F64, (3, 3))),
        ((F64, (2, 3, 2)), (F64, (2, 2, 3))),
        ((torch.int64, (3,)), (torch.int64, (3,))),
        ((torch.bool, (2,)), (torch.bool, (2,))),
        ((torch.complex128, (2,)), (torch.complex128, (2,))),
        ((F64, (2, 3)), (torch.int64, (2,))),
        ((torch.int64, (2,)), (F64, (3, 2))),
        ((F64, (2,)), (F64, (2,)), (torch.bool, (2,))),
    )
)
"""Inputs of the calls of an op: its first two that the op takes are used."""


def calls_of(name: str) -> list[Program]:
    """Programs that call an op with its defaults, and with each other value of each argument."""
    found: dict[object, Program] = {}
    fitting = 0
    for types in PLACES:
        if not takes(name, types, ()):
            continue
        fitting += 1
        for picks in _one_at_a_time(num_picks(name)):
            made = takes(name, types, picks)
            if made:
                found.setdefault((types, made), Program(types, (Step(name, picks),)))
        if fitting == 2:
            break
    return list(found.values())


def _one_at_a_time(count: int) -> Iterator[tuple[int, ...]]:
    yield ()
    for place in range(count):
        for pick in range(1, MOST_PICKS):
            yield (*(0,) * place, pick)
