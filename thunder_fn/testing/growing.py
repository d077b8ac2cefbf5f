"""Programs that are made on purpose, changed at random, and made small again.

Hypothesis draws programs from nothing. Three things need more: a structured op around a body of a
certain length, an op with a certain argument, and a program that is like one that was interesting.
Programs are data, so each of these is a few lines.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache

import torch

from thunder_fn.errors import ThunderError, TraceTypeError
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.trace import Op, TensorType, Trace
from thunder_fn.testing.drawn_programs import BODIES, FAMILIES, Program, Step, build, example_inputs
from thunder_fn.testing.schemas import (
    DTYPES,
    MOST_PICKS,
    NUMBERS,
    UNCHECKED,
    calls_of_samples,
    dtype_picks,
    in_turn,
    num_picks,
    num_values,
    number_places,
    plainer_calls_of_samples,
    takes,
    tensor_places,
)

F64 = torch.float64
VECTOR = TensorType(F64, (2,))
MATRIX = TensorType(F64, (3, 3))

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

FAMILIES_OF_LEAVES = tuple(
    name
    for family, names in FAMILIES.items()
    for name in names
    if family != "random" and name not in BODIES
)
"""The steps without bodies."""

NESTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "composite": ((0, 1, 0, 1), (1, 1, 0, 1), (2, 1, 0, 1)),
    "operator": ((1, 0, 1),),
    "call": ((1, 0, 1),),
    "checkpoint": ((1, 0, 1), (1, 0, 1, 1)),
    "custom_vjp": ((1, 0, 1),),
    "cond": ((0, 0, 1, 2, 3), (2, 1, 1, 1, 2)),
    "switch": ((0, 2, 1, 1, 1, 2),),
    "scan": ((), (1, 0, 1, 0, 0, 0, 1, 0, 1)),
    "map": ((),),
    "while_loop": ((), (1, 0, 1, 0, 0, 0, 1, 0, 0, 1)),
}
"""The steps that own bodies, each with picks that give them operands."""


def nested(
    name: str,
    steps: Sequence[Step],
    picks: tuple[int, ...] = (),
    types: tuple[TensorType, ...] = (VECTOR, VECTOR),
) -> Program:
    """A program of one step around a body."""
    outputs = (0, 1) if name in ("scan", "while_loop") else ()  # carries that are not the same
    bodies = (Program((), tuple(steps), outputs),) * BODIES[name]
    return Program(types, (Step(name, picks, bodies),))


def around_chains(lengths: Sequence[int]) -> Iterator[Program]:
    """Nest chains of these lengths in each structured op."""
    for length in lengths:
        for name, variants in NESTS.items():
            for picks in variants:
                yield nested(name, CHAIN[:length], picks)


def beside_chains(lengths: Sequence[int]) -> Iterator[Program]:
    """Put so many equations before and after each structured op."""
    for length in lengths:
        for name, variants in NESTS.items():
            half = length // 2
            own = Step(name, variants[-1], (Program((), CHAIN[:2]),) * BODIES[name])
            steps = (*CHAIN[2 : 2 + half], own, *CHAIN[2 : 2 + length - half])
            yield Program((VECTOR, VECTOR), steps)


def two_deep() -> Iterator[Program]:
    """Nest each structured op in each other."""
    for inner, variants in NESTS.items():
        step = nested(inner, CHAIN[:3], variants[-1]).steps[0]
        for outer, of_outer in NESTS.items():
            yield nested(outer, (step,), of_outer[-1])


def around(program: Program) -> Iterator[Program]:
    """Nest the steps of a program in each structured op, alone and at the end of a chain."""
    steps, types = program.steps, program.inputs or (VECTOR, VECTOR)
    for name, variants in NESTS.items():
        yield nested(name, steps, variants[0], types)
        yield nested(name, (*CHAIN[:3], *steps), variants[-1], types)


def _scan(
    carries: int,
    consts: int,
    rows: int,
    length: int,
    reverse: bool,
    ys: bool,
    outputs: tuple[int, ...] = (0, 1),
) -> Program:
    """A scan over so many carries, constants and rows, whose body reads all of them and may return
    a value of each step. Picks below 0 hand on what the step was given, -1 the last carry.
    """
    given, counts = (carries, consts, rows), ((1, 2, 0, 3), (1, 2, 0), (1, 0, 2))
    operands = [
        (choices.index(count), *(place % 2 for place in range(count)))
        for choices, count in zip(counts, given, strict=True)
    ]
    loop = ((2, 3, 1, 0).index(length), int(reverse))
    picks = (*operands[0], *(0,) * carries, *operands[1], *loop, *operands[2])
    # each step reads the one before and the next input, past the results and the inputs read
    reading = [Step("mul" if n % 2 else "sub", (0, 2 * n + 1)) for n in range(sum(given) - 1)]
    unread = [Step("cos", (1 + n,)) for n in range(carries if ys else 0)]
    made = len(reading) + 1 + len(unread)
    handed = tuple(made - pick - 1 if pick < 0 else pick for pick in outputs)
    body = Program((), (*reading, Step("sin"), *unread), handed)
    return Program((TensorType(F64, (3,)),) * 2, (Step("scan", picks, (body,)),))


LOOPS: tuple[Program, ...] = (
    tuple(
        _scan(carries, consts, rows, length, reverse, ys)
        for rows in (1, 0, 2)
        for carries in (1, 2, 0)
        for consts in (0, 1)
        for length in ((3,) if rows else (0, 1, 2, 3))
        for reverse in (False, True)
        for ys in (False, True)
        if carries + rows > 0 and carries >= ys
    )
    + tuple(
        program
        for consts in (0, 1)
        for length in (2, 3)
        for outputs in ((-1, -2), (-2, 0), (0, -1), (-2, -2))
        for loop in (_scan(2, consts, 0, length, False, True, outputs),)
        for program in (loop, replace(loop, outputs=(0,)), replace(loop, outputs=(1,)))
    )
    + tuple(
        Program(
            (TensorType(F64, (3,)),) * 2,
            (Step("scan", (0, 0, 0, 1, 0, 1, 1, 0, 0, 0), (Program((), steps, (0,)),)),),
        )
        for place in (3, 4)
        for steps in (
            (Step("sub", (0, 1)), Step("mul", (0, place)), Step("sin"), Step("cos", (1,))),
        )
    )
)
"""Loops of each kind: what is peeled, unrolled or turned around depends on all of that. Some hand
on carries, exchanged or as they were. In the last ones, one constant of two is not read.
"""

_ON_CONSTANT, _OF_CONSTANTS = (0, 1, 0, 0, 0, 0, 0, 1), (1,) * 4
"""The picks of a scan over one carry and one constant, and of a step on the constant alone."""

INSIDE: tuple[Program, ...] = tuple(
    nested(name, (Step(leaf, picks), Step("mul", (0, 1))), own, (MATRIX, MATRIX))
    for leaf, (other, variants) in zip(
        FAMILIES_OF_LEAVES, itertools.cycle(NESTS.items()), strict=False
    )
    for name, picks, own in (
        ("scan", _OF_CONSTANTS, _ON_CONSTANT),
        (other, (), variants[-1]),
    )
)
"""Every leaf inside of a loop where it is the same in each step, and inside of another structured
op.
"""


_RULES = ("custom_vjp", "custom_jvp", "custom_vmap")
_READ = ((), (Step("sub", (0, 1)),))
_HOLDING = ("scan", "checkpoint", "composite", "call", "cond", "switch")

RULED: tuple[Program, ...] = tuple(
    program
    for kind in (0, 1, 2)
    for step in (Step("ruled", (kind, 1, 0, 1), (Program((), CHAIN[:3]),)),)
    for program in (
        Program((VECTOR, VECTOR), (step,)),
        Program((VECTOR, VECTOR), (Step("sin"), step, Step("cos"))),
        *(nested(name, (step,), NESTS[name][0]) for name in _HOLDING),
        *(
            Program((VECTOR, VECTOR), pair)
            for right in (Step(_RULES[kind], step.picks[1:], step.bodies),)
            for pair in ((step, replace(right, picks=(1, 1, 2)), *more) for more in _READ)
        ),
    )
)
"""Functions with rules of their own that are not their derivatives, or batches, and beside the same
with the right rule: who inlines one, or takes one for another call, changes what vjp, jvp and vmap
make of the trace.
"""

_CLOSED_NESTS = {"call": (3,), "cond": (2, 1, 3)}
"""Steps that own bodies, with picks that give them nothing to read."""


def _beside_closed(steps: tuple[Step, ...], others: tuple[Step, ...]) -> Iterator[Program]:
    """Nest some steps in each structured op, and others in one beside it that reads nothing: the
    two may be exchanged but for what they do.
    """
    closed = {
        name: Step(name, picks, (Program((), others),) * BODIES[name])
        for name, picks in _CLOSED_NESTS.items()
    }
    for second in closed.values():
        for name, variants in NESTS.items():
            first = nested(name, steps, variants[0])
            yield replace(first, steps=(*first.steps, second))
        for name, picks in _CLOSED_NESTS.items():
            yield Program((), (second, *nested(name, steps, picks).steps))


_ONE_UNREAD = Program(
    (), (Step("rand"), Step("sin", (1,)), Step("normal_like"), Step("mul", (0, 1))), (0,)
)
"""Two draws, one of which nothing reads."""

_DRAWING = ("rand", "normal_like", "bernoulli", "dropout")

DRAWS: tuple[Program, ...] = (
    *(Program((VECTOR,), (Step(a), Step(b, (1,)))) for a in _DRAWING for b in _DRAWING),
    Program((), (Step("rand"), Step("rand"), Step("sub", (0, 1)))),
    Program((VECTOR,), (Step("bernoulli"), Step("bernoulli", (1,)), Step("sub", (0, 1)))),
    Program((VECTOR,), (Step("dropout"), Step("twin"))),
    *(
        Program((TensorType(F64, (size,)),), (Step(name), Step(name, (1,))))
        for size in (9, 20)  # PyTorch draws 16 normal numbers and more in another way than fewer
        for name in _DRAWING[1:]
    ),
    Program((VECTOR,), (Step("rand"), Step("sin", (1,)), Step("rand")), (0,)),
    Program((VECTOR,), (Step("rand"),), (1,)),
    Program((VECTOR,), (Step("normal_like"), Step("rand"), Step("sin", (1,))), (0,)),
    *(
        nested(name, (Step("normal_like"), Step("normal_like", (1,)), Step("sub", (0, 1))), picks)
        for name, (picks, *_) in NESTS.items()
    ),
    *(nested(name, (Step("rand"), Step("sin")), picks) for name, (picks, *_) in NESTS.items()),
    *(
        program
        for name, (picks, *_) in NESTS.items()
        for drawn in (nested(name, (Step("normal_like"),), picks).steps[0],)
        for program in (
            Program((VECTOR, VECTOR), (drawn, Step("twin"))),
            nested("scan", (drawn, Step("twin"), Step("sub", (0, 1)))),
            nested(
                "checkpoint", (drawn, Step("twin"), Step("sub", (0, 1))), NESTS["checkpoint"][0]
            ),
        )
    ),
    *(
        Program((VECTOR, VECTOR), (Step(name, picks, (_ONE_UNREAD,) * BODIES[name]), Step("rand")))
        for name, (picks, *_) in NESTS.items()
    ),
    *_beside_closed((Step("rand"), Step("sin")), (Step("rand"), Step("bernoulli"))),
)
"""Programs whose draws can be merged, dropped, repeated and put in another order."""


_BOTH = Program((), CHAIN[:2], (0, 1))
_READING_TWO = {"composite": (0, 1), "cond": (0, 0, 1)} | dict.fromkeys(
    ("operator", "call", "checkpoint", "custom_vjp", "custom_jvp", "custom_vmap"), (1,)
)


def _rows(reverse: int) -> Step:
    """A loop over the rows of the newest value."""
    return Step("map", (0, 1, 0, reverse), (Program((), CHAIN[2:3]),))


CHAINED: tuple[Program, ...] = (
    *(
        Program((VECTOR, VECTOR), tuple(Step(name, (*picks, *order), bodies) for order in orders))
        for name, picks in _READING_TWO.items()
        for bodies in ((_BOTH,) * BODIES[name],)
        for orders in (((0, 1), (1, 0)), ((1, 0), (0, 1)))
    ),
    *(
        Program((MATRIX, MATRIX), (first, _rows(second)))
        for reverse, second in itertools.product((0, 1), repeat=2)
        for first in (_rows(reverse), *_scan(1, 0, 1, 3, bool(reverse), True).steps)
    ),
)
"""Programs in which a structured op reads what another of its kind made, in either order; loops
over rows run in either direction.
"""

_OWN, _CLOSED = Step("owned_constant"), Step("constant")

CONSTANTS: tuple[Program, ...] = (
    *(
        Program((VECTOR,), (replace(made, picks=(place,)), Step("sin"), *more))
        for place in (0, 1)
        for made in (_OWN, _CLOSED)
        for more in (
            (),
            (Step("cos"),),
            (Step("exp"), Step("mul", (0, 1))),
            (replace(made, picks=(1 - place,)), Step("sin"), Step("mul", (0, 2))),
        )
    ),
    *(Program((VECTOR,), (made, Step("reshape"), Step("sin"))) for made in (_OWN, _CLOSED)),
    Program((VECTOR,), (_OWN, Step("owned_constant", (1,)), Step("mul"), Step("sin"))),
    Program((VECTOR,), (_OWN, Step("normal_like", (0,)), Step("mul", (0, 1)))),
    Program((VECTOR,), (_OWN, Step("bernoulli", (0,)), Step("sin"))),
    Program((VECTOR,), (_CLOSED, Step("two_constants"), Step("mul", (0, 1)), Step("sin"))),
    Program((), (Step("transposed_constant"),)),
    Program((VECTOR,), (Step("scaled"),)),
    *(nested(name, (_OWN, Step("sin"), Step("cos")), p[0]) for name, p in NESTS.items()),
    *(nested(name, (_CLOSED, Step("sin"), Step("cos")), p[0]) for name, p in NESTS.items()),
    *(
        Program((VECTOR, VECTOR), (*one.steps, *other.steps, Step("sub", (0, 1))))
        for name, picks in NESTS.items()
        for one, other in (
            [
                nested(
                    name, (replace(_OWN, picks=(n,)), Step("sin"), Step("mul", (0, 1))), picks[-1]
                )
                for n in (0, 1)
            ],
        )
    ),
)
"""Programs that compute with constants of their own, and with closed-over tensors, which may
change. Some differ in the values of a constant, and nothing else.
"""


def on_constants(names: Sequence[str]) -> Iterator[Program]:
    """Programs that call an op on two constants of their own, or beside them: these differ in their
    values, and nothing else.
    """
    for name in names:
        for step in _variants(name)[:2]:
            if any(takes(name, (type,) * 2, step.picks) for type in _TYPES_OF_CONSTANTS):
                twice = (*_owned(0, step), *_owned(1, step))
                yield Program((VECTOR,), (*twice, Step("sub", (0, 2))))


_TYPES_OF_CONSTANTS = (TensorType(F64, (3,)),)


def _owned(place: int, step: Step) -> tuple[Step, Step]:
    return replace(_OWN, picks=(place,)), step


_PART = Program((), CHAIN[:3], (1,))
_ONE_SIDED = Program((), (Step("sin"),), (0,))

DEAD: tuple[Program, ...] = (
    Program((VECTOR, VECTOR), CHAIN[:3], (1,)),
    Program((VECTOR, VECTOR), CHAIN[:3], (2, -1)),
    Program((VECTOR, VECTOR), CHAIN[:3], (0, -1, 4)),
    Program((VECTOR, VECTOR), (*CHAIN[:2], Step("twin"), Step("twin", (1,))), (1, 0)),
    *(Program((VECTOR, VECTOR), (*CHAIN[:2], nested(n, CHAIN[:2]).steps[0]), (2,)) for n in NESTS),
    *(
        Program((VECTOR, VECTOR), (Step(name, picks, (body,) * BODIES[name]),), outputs)
        for name, variants in NESTS.items()
        for picks in variants
        for body, outputs in (
            (_PART, ()),
            (_ONE_SIDED, ()),
            (Program((), CHAIN[:3], (0, 1, 2)), (0, 3)),
        )
    ),
)
"""Programs with equations, results and operands of bodies that nothing reads."""

_SHOWN = (Step("effect", (1,)), Step("sin"), Step("effect"))

EFFECTS: tuple[Program, ...] = (
    Program((VECTOR, VECTOR), (Step("effect"), Step("effect", (1,)), Step("sin"))),
    Program((VECTOR, VECTOR), _SHOWN),
    Program((VECTOR, VECTOR), (*_SHOWN, Step("effect"), Step("effect", (1,)), Step("cos"))),
    *(
        program
        for name, variants in NESTS.items()
        for own in (nested(name, _SHOWN, variants[-1]),)
        for program in (
            own,
            replace(own, steps=(Step("effect"), *own.steps, Step("effect", (1,)), Step("cos"))),
            nested("composite", own.steps, (0, 1, 0, 1)),
            replace(nested("composite", own.steps, (0, 1, 0, 1)), outputs=(-1,)),
        )
    ),
    *_beside_closed(_SHOWN, (Step("full", (1,)), Step("effect"))),
)
"""Programs that call Python, on values that differ and on the same twice, around bodies that do so,
and where nobody reads their results.
"""

_VIEWS = tuple(Step(name) for name in ("transpose", "reshape", "select", "slice", "unsqueeze"))
_COPIES = (
    Step("clone"),
    Step("aten.clone.default", (0, 1)),
    *(Step(f"aten.{name}.Scalar", (0, 4)) for name in ("mul", "div")),
    Step("aten.sub.Scalar", (0, 3)),
    Step("aten.pow.Tensor_Scalar", (0, 4)),
)


_FLAT = Step("aten.view.default", (0, 5))
"""The elements in one row."""


def _copied(step: Step, place: int) -> Step:
    return replace(step, picks=(place, *step.picks[1:]))


ALIASES: tuple[Program, ...] = (
    *(Program((MATRIX,), (view, copy)) for view in _VIEWS for copy in _COPIES),
    *(
        Program((MATRIX,), (Step("sin"), _VIEWS[0], copy, *more), outputs)
        for copy in _COPIES
        for more, outputs in (((_copied(copy, 1),), ()), ((), (0, 1)), ((), (0, 2)))
    ),
    *(
        Program((MATRIX,), (Step("sin"), copy, Step("transpose", (1,))), outputs)
        for copy in _COPIES
        for outputs in ((0, 1), (1, 0))
    ),
    *(
        nested(name, (view, copy), picks, (MATRIX, MATRIX))
        for name, (picks, *_) in NESTS.items()
        for view, copy in itertools.product(_VIEWS[:2], _COPIES[:2])
    ),
    *(
        Program((TensorType(F64, (2, 3)),), (_VIEWS[0], *more, _COPIES[1], _FLAT))
        for more in ((), (Step("sin"),))
    ),
)
"""Programs that return copies of views, and both: a copy that goes leaves results in one memory.
In the last ones, who reads the copy asks for its layout.
"""

_ON = Program((), (), (2, 1))
"""A condition that holds as long as the loop counts."""

BOUNDED: tuple[Program, ...] = tuple(
    Program((VECTOR,), (Step("while_loop", (0, 0, 0, 0, 0, *picks), (Program((), steps), _ON)),))
    for picks in ((0, 2), (1, 2), (1, 0), (0, 3))
    for steps in (CHAIN[2:3], (*CHAIN[2:3], Step("cos")))
)
"""Loops that end because of `max_steps`, or because their condition says so."""

MOST_DEEP = 40

_LEAVES: tuple[tuple[Step, ...], ...] = (
    (Step("mul", (0, 1)), Step("sub", (0, 1))),
    (Step("mul", (0, 1)), Step("sub", (1, 0))),
    (Step("mul", (0, 1)), Step("add_scaled", (0, 1, 1))),
    (Step("mul", (0, 1)), Step("sin")),
    (Step("sub", (1, 0)), Step("cos")),
)
"""The steps of innermost bodies: each differs from the next one in little."""

_ONCE = ("checkpoint", "call", "custom_vjp", "composite")
_CHOICES, _LOOPS = ("cond", "switch"), ("scan", "while_loop")


_BOOL = TensorType(torch.bool, ())
_Given = Sequence[TensorType | None]
_DEEP_INPUTS = ((VECTOR, VECTOR), (_BOOL, VECTOR, VECTOR), (VECTOR,) * 3)
_KINDS = (_CHOICES, _CHOICES, _LOOPS, _LOOPS, _ONCE)


def deep_nests(names: Sequence[str]) -> Iterator[Program]:
    """Nest three and four structured ops in each other, half of them among these. The branches of a
    choice differ in the innermost bodies alone, or one of them is short.
    """
    rng = random.Random(0)
    known = [name for name in names if name in itertools.chain(*_KINDS)]
    for number in range(MOST_DEEP):
        kinds = tuple(
            rng.choice(known if known and rng.random() < 0.5 else rng.choice(_KINDS))
            for _ in range(3 + number % 2)
        )
        types = _DEEP_INPUTS[number % 3]
        step = _nest(kinds, types, number, rng)
        yield Program(types, (step, Step("sub", (0, 1))))


def _nest(kinds: tuple[str, ...], given: _Given, leaves: int, rng: random.Random) -> Step:
    """A step of the first of these kinds around the others, on all that is given; None stands for
    the counter of a loop. `leaves` chooses the innermost steps, and branches have different ones.
    """
    name, *inner = kinds
    data = [place for place, type in enumerate(reversed(given)) if type is not None][::-1]
    picks, own = _on_all(name, given, data, rng)
    is_short, state = rng.random() < 0.5, rng.getstate()
    outputs = (0, 1) if name in _LOOPS else rng.choice(((0,), (0, 1)))
    bodies = list[Program]()
    for branch in range(BODIES[name] if name in _CHOICES else 1):
        few = _LEAVES[(leaves + branch) % len(_LEAVES)]
        steps = (*few, Step("sub", (0, len(few) + own.count(VECTOR) - 1)))  # and the oldest value
        if inner and not (branch and is_short):
            rng.setstate(state)  # the nests of all branches are alike but for their leaves
            steps = (_nest((*inner,), own, leaves + branch, rng), Step("sub", (0, 2)), few[0])
        bodies.append(Program((), steps, outputs))
    counts = [_ON] * (name == "while_loop")
    return Step(name, picks, (*bodies, *counts))


def _on_all(
    name: str, given: _Given, data: Sequence[int], rng: random.Random
) -> tuple[tuple[int, ...], list[TensorType | None]]:
    """The picks of a step on the values at these places, and what its body is given."""
    own: list[TensorType | None] = [type for type in given if type is not None]
    if name in _LOOPS:
        carries = rng.choice((1, 2))
        started = (carries - 1, *(pick for place in data[-carries:] for pick in (place, 0)))
        consts, count = data[:-carries], len(data) - carries
        if name == "scan":
            loop = (rng.randrange(2), rng.randrange(2), 1)
            return (*started, (2, 0, 1)[count], *consts, *loop), own
        picks = (*started, (1, 0, 2)[count], *consts, rng.randrange(2), rng.randrange(2))
        return picks, [*own[:-carries], None, *own[-carries:]]
    first, made = ((0,) if name == "composite" else ()), 0
    if name == "switch":
        first, made = (0, rng.randint(1, 3), 1), 1
    if name == "cond":
        scalars = sum(type in (None, _BOOL) for type in given)
        ways = [((0, 0), 2), ((2, rng.randrange(2)), 1)]
        ways += [((3, rng.randrange(scalars)), 0)] * 3 if scalars else []
        first, made = rng.choice(ways)
    return (*first, len(data) - 1, *(place + made for place in data)), own


_BRANCHES = (
    *(
        tuple(Program((), (Step(name),)) for name in names)
        for names in (("sin", "cos", "exp"), ("sin", "sin", "cos"), ("sin", "cos", "cos"))
    ),
    tuple(Program((), (Step("sin"), Step("cos")), (place,)) for place in (0, 1, 0)),
    (Program((), (Step("sin"),), (1,)),) * 3,
    *(
        tuple(Program((), (Step(name, (0, *picks)), Step("cos"))) for picks in several)
        for name, several in (
            ("power", ((0,), (1,), (2,))),
            ("add_scaled", ((0, 0), (0, 1), (0, 2))),
        )
    ),
)
"""Branches that differ, that are alike in part, that differ in what they return or in an argument
of their first op, that return an operand.
"""

CASES: tuple[Program, ...] = (
    *(
        Program((VECTOR,), (Step("switch", (0, index, 1, 0, 1), bodies),))
        for bodies in _BRANCHES
        for index in range(5)
    ),
    *(
        Program((VECTOR,), (Step("switch", (3 - count, index, 1, 0, 1), _BRANCHES[0]),))
        for count in (2, 1)
        for index in range(5)
    ),
    *(
        Program((VECTOR,), (Step("cond", (2, truth, 0, 1), bodies[-2:]),))
        for bodies in _BRANCHES
        for truth in (0, 1)
    ),
    *(
        Program(
            (VECTOR, TensorType(dtype, ())), (Step("cond", (3, 0, 1, *operands), (body, body)),)
        )
        for dtype in (torch.bool, torch.int64, F64)
        for operands in ((0, 1), (1, 0))
        for body in (Program((), (Step("cond", (3, 0, 1, 0, 1), _BRANCHES[0][:2]),)),)
    ),
    *(
        Program(
            (VECTOR, TensorType(F64, ())),
            (
                *(Step(name, picks) for name in names),
                Step("cond", (3, 0, 0, 1 + len(names)), _BRANCHES[0][:2]),
            ),
        )
        for names, picks in (
            (("abs",), ()),
            (("abs", "neg"), ()),
            (("extreme",), ()),
            (("extreme",), (0, 2)),
            (("is_positive",), ()),
            (("is_positive", "aten.logical_not.default"), ()),
        )
    ),
    *(
        Program(
            (VECTOR, VECTOR, _BOOL),
            (
                Step("aten.logical_not.default"),
                Step("cond", (3, 0, 1, 0, 1), tuple(Program((), (nest,)) for nest in nests)),
            ),
        )
        for kind in ("cond", "scan", "while_loop")
        for nests in [[_nest((kind,), (VECTOR,) * 2, n, random.Random(0)) for n in (0, 1)]]
    ),
)
"""Choices by each index and beyond both ends, by both truths, by numbers, by a truth that the
branches ask again, and of two nests by what is not true.
"""

_WRITTEN = tuple(Step("written", (0, kind)) for kind in range(4))

ALLOCATED: tuple[Program, ...] = (
    *(Program((VECTOR,), (step, Step("sin"), Step("mul", (0, 1)))) for step in _WRITTEN),
    *(Program((MATRIX,), (Step("cos"), *_WRITTEN[a : a + 2])) for a in range(3)),
    *(nested(n, (s, Step("sin")), p[0]) for n, p in NESTS.items() for s in _WRITTEN[::2]),
)
"""Programs that allocate memory and write all of it."""

_READING = (Step("sub", (0, 1)), Step("sub", (3, 4)), Step("sub", (0, 1)))
"""Steps that read the four newest values: results that leave are often spared."""

SWAPPED: tuple[Program, ...] = (
    *(
        Program((VECTOR, VECTOR), (Step(name, (0, 1)), Step(name, (2, 1)), *more))
        for more in ((), _READING)
        for name in (*FAMILIES["binary"], "add_scaled")
    ),
    Program((MATRIX, MATRIX), (Step("mm", (0, 1)), Step("mm", (2, 1)))),
)
"""Programs with one op on two operands, and on the same in the other order, returned or read."""

_IN_ORDER = (Step("power"), Step("sub", (0, 1)), Step("sin"))
"""Steps that read their operands in an order, and numbers."""

COUSINS: tuple[Program, ...] = (
    *(
        Program(
            (VECTOR, VECTOR),
            (*nested(name, _IN_ORDER, variants[-1]).steps, Step("cousin", (what,)), *_READING),
        )
        for name, variants in NESTS.items()
        for what in (2, 3)
    ),
    *(
        Program(
            (VECTOR, VECTOR),
            (*nested(name, CHAIN[:3], variants[-1]).steps, Step("cousin", (what,)), *more),
        )
        for more in ((), _READING)
        for name, variants in NESTS.items()
        for what in (0, 1)
    ),
    *(
        replace(outer, steps=(*outer.steps, Step("cousin"), *_READING))
        for outer in itertools.islice(two_deep(), 0, None, 3)
        if "custom_vjp" not in (outer.steps[0].op, outer.steps[0].bodies[0].steps[0].op)
    ),
)
"""Programs with two structured ops that differ in a body, in a body of a body, or in an option, and
nothing else. Their results are returned, or read.
"""

BROADCAST: tuple[Program, ...] = tuple(
    Program(
        (TensorType(F64, (2, 3)), *(TensorType(F64, shape),) * 2), (Step(a, (0, 1)), Step(b, picks))
    )
    for shape in ((3,), (2, 1))
    for a in FAMILIES["binary"][:4]
    for b in FAMILIES["binary"][:4]
    for picks in ((0, 3), (3, 0))
)
"""Programs in which a result is broadcast, as either operand."""

ALIKE = ((MATRIX, MATRIX), (TensorType(torch.int64, (3, 3)),) * 2)
WITH_NUMBERS = ("aten.mul.Scalar", "aten.pow.Tensor_Scalar", "aten.rsub.Scalar")
"""Ops whose results depend on the type of a number."""

ALONG_DIMS = ("aten.sum.dim_IntList", "aten.cumsum.default", "aten.flip.default", "aten.mul.Scalar")
"""Ops of which -1 and -2 are two arguments: Python gives them one hash."""

MOST_COUSINS = 4


@cache
def cousins_of_leaves(names: Sequence[str]) -> tuple[Program, ...]:
    """Programs with two leaves that differ in one argument, and nothing else, both read: of each
    step, and of each of these ops.
    """
    of_steps = (*FAMILIES_OF_LEAVES, *WITH_NUMBERS)
    steps = [Program(types, (Step(name),)) for types in ALIKE for name in of_steps]
    found = {build(pair): pair for name in (*ALONG_DIMS, *names) for pair in _of_one_hash(name)}
    known = set[tuple[Op, TensorType]]()
    for program in (*steps, *(call for name in names for call in calls_of(name)[:1])):
        last = build(program).equations[-1:]
        key = [(e.op, program.inputs[0]) for e in last if e.op.kind == "leaf" and e.operands]
        if key and key[0] not in known:
            known.update(key)
            for pair in itertools.islice(_cousins_of(program), MOST_COUSINS):
                read = replace(pair, steps=(*pair.steps, Step("mul", (0, 1))))
                found.setdefault(build(pair), read)
    return tuple(found.values())


def _of_one_hash(name: str) -> Iterator[Program]:
    """Two calls whose arguments have one hash in Python and are not equal: -1 and -2."""
    for types in CUBES[:2]:
        calls = {step: takes(name, types, step.picks) for step in _variants(name)}
        for (a, one), (b, other) in itertools.combinations(calls.items(), 2):
            if one and other and one != other and hash(one) == hash(other):
                second = replace(b, picks=(1, *b.picks[1:]))
                yield Program(types, (a, second, Step("mul", (0, 1))))


def _cousins_of(program: Program) -> Iterator[Program]:
    """The program with its last call and another one, for each that eager PyTorch takes."""
    for place in range(2 * MOST_COUSINS):
        pair = replace(program, steps=(*program.steps, Step("cousin", (place,))))
        if len(build(pair).equations) > len(build(program).equations) and runs(pair):
            yield pair


MOST_PAIRS, MOST_OF_ONE, MOST_CHAINS = 720, 480, 50

CUBES = tuple(
    (TensorType(dtype, shape),) * 2
    for dtype, shape in (
        *((F64, (2, 2, 2)), (F64, (4, 4)), (F64, (2,))),
        *((torch.float32, (2, 2)), (torch.int64, (2, 2, 2))),
    )
)
"""Inputs all of whose dims are alike, so that one op can often follow another."""


def pairs_of(names: Sequence[str]) -> list[Program]:
    """Programs in which one op reads what another made: the patterns that rewrites look for.

    An op reads its own result, or that of each other, as each of its operands, and with each value
    of each argument. It reads two results of another, made with other arguments.
    """
    own = [_on_itself(name) for name in names]
    other = [_one_on_another(a, b) for a in names for b in names if a != b]
    first = in_turn(own)[:MOST_OF_ONE]
    return [*first, *in_turn(other)[: MOST_PAIRS - len(first)]]


def _on_itself(name: str) -> list[Program]:
    found = list[list[Program]]()
    for types in CUBES:
        calls = [step for step in _variants(name) if takes(name, types, step.picks)]
        if not calls:
            continue
        plain = calls[0]
        both = replace(plain, picks=(1, *plain.picks[1:]))
        chains = [(plain, plain), (plain, plain, plain), (plain, Step("sin"), plain)]
        alone = in_turn(_by_argument(calls))
        one = [pair for step in alone for pair in ((plain, step), (step, plain))]
        one += [(step, step) for step in alone]
        some = (*alone[: MOST_SEVERAL // 2], *_with_two(calls, types))
        several = list(itertools.product(some, repeat=2))
        chains += in_turn(
            (one, random.Random(name).sample(several, min(len(several), MOST_CHAINS)))
        )
        programs = [Program(types, chain) for chain in chains]
        programs[1:1] = [
            Program(types, (plain, plain), (0, 1)),
            Program(types, (plain, both), (0, 1)),
            Program(types, (plain, both, Step("sub", (0, 1)))),
        ]
        found.append(programs)
    found.append([replace(call, steps=call.steps * 2) for call in calls_of(name)[:1]])
    return list(dict.fromkeys(in_turn(found)))


def _with_two(calls: Sequence[Step], types: tuple[TensorType, ...]) -> list[Step]:
    """Calls in which two arguments have values that some of these have alone, the others defaults:
    most faults need no more.

    Source: Cohen, Dalal, Fredman and Patton, The AETG system, IEEE TSE 23(7), 1997.
    """
    both = [
        replace(a, picks=(*a.picks, *b.picks[len(a.picks) :]))
        for some, others in itertools.combinations(_by_argument(calls), 2)
        for a, b in itertools.product(some, others)
    ]
    random.Random(str(calls[0])).shuffle(both)
    found = (step for step in both if takes(step.op, types, step.picks))
    return list(itertools.islice(found, MOST_SEVERAL))


def _by_argument(calls: Sequence[Step]) -> list[list[Step]]:
    """The calls in which one argument has another value, those of each argument together."""
    alone = [step for step in calls if sum(map(bool, step.picks)) == 1]
    counts = sorted({len(step.picks) for step in alone})
    return [[step for step in alone if len(step.picks) == count] for count in counts]


def _one_on_another(first: str, second: str) -> list[Program]:
    """The second op reads results of the first, as each operand and with each argument."""
    types = next((call.inputs for call in calls_of(first)), (VECTOR, VECTOR))
    makers = [step for step in _variants(first) if takes(first, types, step.picks)]
    makers += _with_two(makers, types) if makers else []
    readers = [_as_operand(second, place, step) for step in _variants(second) for place in (0, 1)]
    if not makers or not takes_after(Program(types, (makers[0],)), readers[0]):
        return []
    programs = [Program(types, (makers[0], step)) for step in readers]
    other = [Program(types, (step, reader)) for step in makers[1:] for reader in readers[:2]]
    both = [Program(types, (makers[0], step, readers[0])) for step in makers[1:]]
    return in_turn((programs, other, both))


def _as_operand(name: str, place: int, step: Step) -> Step:
    """The step reading what is newest as its operand at this place."""
    picks = [*step.picks, *(0,) * (num_picks(name) - len(step.picks))]
    for at in tensor_places(name)[:place]:
        picks[at] = 1
    return replace(step, picks=tuple(picks))


@cache
def _variants(name: str) -> tuple[Step, ...]:
    """The calls of an op: the plain one, other values of one literal, and of all."""
    counts = [
        1 if at in tensor_places(name) and at not in number_places(name) else n
        for at, n in enumerate(num_values(name))
    ]
    rng = random.Random(name)
    several = [tuple(rng.randrange(count) for count in counts) for _ in range(MOST_SEVERAL)]
    alone = list(_one_at_a_time(counts))
    return tuple(Step(name, picks) for picks in dict.fromkeys((*alone, *several)))


def takes_after(call: Program, second: Step) -> bool:
    """Test whether an op takes what a call has made."""
    made = build(replace(call, steps=(*call.steps, second))).equations
    return len(made) > 1 and made[-1].op.name == second.op


LARGE = (Step("aten.pow.Tensor_Scalar", (0, NUMBERS.index(3))),) * 3
"""Steps that make numbers with as many digits as an integer has."""

MOST_CONVERSIONS = 162


def conversions_of(names: Sequence[str]) -> list[Program]:
    """Programs that ask an op for each dtype, on inputs of each dtype, and then for a wide one: the
    digits that the first loses are missing there.
    """
    return in_turn([list(_conversions(name)) for name in names])[:MOST_CONVERSIONS]


def _conversions(name: str) -> Iterator[Program]:
    picks = dtype_picks(name)
    for dtype, (first, own) in itertools.product(DTYPES, picks.items()):
        types = (TensorType(dtype, (12,)),)
        is_whole = not dtype.is_floating_point and not dtype.is_complex
        wide = torch.int64 if is_whole and not first.is_complex else torch.complex128
        wide = F64 if dtype.is_floating_point and first.is_floating_point else wide
        is_real_part = dtype.is_complex and not first.is_complex  # PyTorch warns
        if takes(name, types, own) and not is_real_part:
            steps = (Step(name, own), Step(name, picks[wide]))
            yield Program(types, (*LARGE, *steps) if is_whole else steps)


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


# ---- programs of what a transform names ----

ODDS = (0.3, 0.6, 0.9)
"""The chances that an argument of a call has its default."""


def drawn_of(rng: random.Random, ops: Sequence[str], nests: Sequence[str]) -> Program:
    """A short program of these ops and structured ops, on inputs of any size; often a call of one
    of the ops, and more.
    """
    calls = calls_of(rng.choice(ops)) if ops and rng.random() < 0.6 else ()
    known = rng.choice(calls) if calls else Program(rng.choice(rng.choice((CUBES, PLACES))))
    if {type.dtype for type in known.inputs} & _HALVES:
        known = replace(known, inputs=CUBES[0])
    types = tuple(_drawn_type(type, rng) for type in known.inputs)
    spoilt = (Step("extreme", (rng.randrange(2), rng.randrange(4))),) * (rng.random() < 0.3)
    more = (_drawn_step(rng, ops, nests, 2) for _ in range(rng.randint(1, 4)))
    return Program(types, (*spoilt, *known.steps, *more), _drawn_outputs(rng))


_HALVES = {torch.float16, torch.bfloat16}
"""Dtypes that round too much for sums in any order."""


def redrawn(
    program: Program, rng: random.Random, ops: Sequence[str], nests: Sequence[str]
) -> Program:
    """A program that is like this one: other picks of a step, a step more, an input of another
    type, or a change of any kind.
    """
    steps, inputs, at = list(program.steps), program.inputs, rng.randrange(len(program.steps) + 1)
    match rng.randrange(6):
        case 0 | 1 if at < len(steps):
            steps[at] = _other_picks(steps[at], rng)
        case 2:
            steps = [_other_values(step, rng) for step in steps]
        case 3:
            steps.insert(at, _drawn_step(rng, ops, nests, 2))
        case 4 if inputs:
            inputs = tuple(_drawn_type(type, rng) for type in inputs)
        case _:
            return changed(program, rng, ops)
    return replace(program, inputs=inputs, steps=tuple(steps[:24]))


def _other_values(step: Step, rng: random.Random) -> Step:
    """The call with the same arguments set, to other values: what a rewrite looks for stays."""
    counts = num_values(step.op) if step.op.count(".") == 2 and "#" not in step.op else ()
    picks = (
        rng.randrange(1, count) if pick and count > 1 else pick
        for pick, count in itertools.zip_longest(step.picks, counts[: len(step.picks)], fillvalue=0)
    )
    return replace(step, picks=tuple(picks))


def _drawn_type(type: TensorType, rng: random.Random) -> TensorType:
    """The type, or the same with another dtype, one dim less, or a dim of size 1 or 0."""
    match rng.randrange(10):
        case 0:
            return TensorType(rng.choice(DTYPES[:5]), type.shape)
        case 1:
            return TensorType(type.dtype, type.shape[1:])
        case 2 | 3 if type.shape:
            place = rng.randrange(len(type.shape))
            size = 0 if rng.random() < 0.2 else 1
            return TensorType(type.dtype, (*type.shape[:place], size, *type.shape[place + 1 :]))
        case _:
            return type


def _drawn_step(rng: random.Random, ops: Sequence[str], nests: Sequence[str], depth: int) -> Step:
    """A call of one of the ops, a structured op around some, or any other step."""
    if nests and depth and rng.random() < 0.6:
        name = rng.choice(nests)
        one, other = (
            tuple(_drawn_step(rng, ops, nests, depth - 1) for _ in range(rng.randint(1, 3)))
            for _ in range(2)
        )
        drawn = Program((), one, _drawn_outputs(rng))
        bodies = (drawn, *(rng.choice((drawn, Program((), other))),) * (BODIES[name] - 1))
        usual = rng.choice(NESTS.get(name, ((),)))
        return Step(name, rng.choice((usual, tuple(_pick(rng) for _ in range(10)))), bodies)
    if ops and rng.random() < 0.8:
        name, odds = rng.choice(ops), rng.choice(ODDS)
        numbers = number_places(name)
        picks = (
            0 if rng.random() < odds else _drawn_pick(count, place in numbers, rng)
            for place, count in enumerate(num_values(name))
        )
        return Step(name, tuple(picks))
    return random_step(rng, ())


def _drawn_pick(count: int, takes_number: bool, rng: random.Random) -> int:
    """One of so many values; the newest variable, which is the last of them, more often than each
    number.
    """
    is_newest = takes_number and rng.random() < 0.5
    return count - 1 if is_newest else rng.randrange(count)


def _drawn_outputs(rng: random.Random) -> tuple[int, ...]:
    """Draw outputs: everything that is not read, or up to three results."""
    return () if rng.random() < 0.7 else tuple(rng.randrange(4) for _ in range(rng.randint(1, 3)))


# ---- making programs small ----

MOST_TRIES = 400


def smallest(program: Program, breaks: Callable[[Program], bool]) -> Program:
    """A program that still breaks what this one does, and no smaller one that is tried does."""
    tries, found = 0, True
    while found and tries < MOST_TRIES:
        found = False
        for smaller in _smaller(program):
            tries += 1
            if _size(smaller) <= _size(program) and breaks(smaller):
                program, found = smaller, True
                break
            if tries >= MOST_TRIES:
                break
    return program


@lru_cache(1000)
def _size(program: Program) -> float:
    """The number of equations: in the place of an input that goes there may come one."""
    try:
        return len(build(program).equations)
    except Exception:  # noqa: BLE001 - PyTorch refuses some arguments that schemas allow
        return float("inf")


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are one change smaller, those that are much smaller first."""
    steps, inputs = program.steps, program.inputs
    yield from _drawn_instead(steps)
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


def _drawn_instead(steps: tuple[Step, ...]) -> Iterator[Program]:
    """The drawn calls of an op, in the place of a recorded one."""
    if len(steps) == 1 and "#" in steps[0].op:
        drawn = calls_of(steps[0].op.partition("#")[0])
        yield from (call for call in drawn if "#" not in call.steps[0].op)


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
        ((torch.int64, (5,)), (torch.int64, (5,))),
        ((torch.bool, (2,)), (torch.bool, (2,))),
        ((torch.complex128, (2,)), (torch.complex128, (2,))),
        ((torch.float32, (2, 2)), (torch.float32, (2, 2))),
        ((F64, (2, 1)), (F64, (3,))),
        ((F64, (2, 3)), (torch.int64, (2,))),
        ((torch.int64, (2,)), (F64, (3, 2))),
        ((F64, (2,)), (F64, (2,)), (torch.bool, (2,))),
        ((torch.bfloat16, (2, 3)), (torch.bfloat16, (2, 3))),
        ((F64, (0, 2)), (F64, (0, 2))),
        ((F64, (0,)), (F64, (0,))),
        ((torch.float16, (3, 2)), (torch.float16, (3, 2))),
        ((torch.complex64, (2, 2)), (torch.complex64, (2, 2))),
        ((torch.int32, (2, 3)), (torch.int32, (2, 3))),
        ((torch.uint8, (4,)), (torch.uint8, (4,))),
    )
)
"""Inputs of the calls of an op: every argument is tried with the first two that it takes, and the
defaults, and other values of all, with the others.
"""


SCALARS = (TensorType(F64, ()),) * 2
"""Inputs of calls with any arguments that an op takes then: its plain ones may name a dim."""

MOST_PLACES = 2
"""The number of inputs with which every argument of an op is tried."""

MOST_SEVERAL = 12
"""The number of calls in which all arguments have other values, or two."""


@cache
def calls_of(name: str) -> tuple[Program, ...]:
    """Programs that call an op with its defaults, with each other value of each argument, and as
    PyTorch's own samples do.
    """
    samples = [program for _, program in calls_of_samples(name)]
    samples += () if name in UNCHECKED else filter(runs, plainer_calls_of_samples(name))
    found: dict[object, Program] = {}
    variants = _variants(name)
    few = (variants[0], max(variants, key=lambda step: sum(map(bool, step.picks))))
    of_integers = (*few, *_with_a_number(name))
    for count, types in enumerate(() if name in UNCHECKED else _fitting(name, not samples)):
        others = of_integers if types[0].dtype == torch.int64 else few
        for step in variants if count < MOST_PLACES else dict.fromkeys(others):
            made = takes(name, types, step.picks)
            program = Program(types, (step,))
            if made and runs(program):
                found.setdefault((types, made), program)
    scalars = (Program(SCALARS, (step,)) for step in variants if takes(name, SCALARS, step.picks))
    few_scalars = () if name in UNCHECKED else itertools.islice(filter(runs, scalars), MOST_PLACES)
    drawn = [*found.values(), *few_scalars]
    return (*in_turn((drawn, samples)), *_of_infinite(name), *_of_one_infinite(name))


def _with_a_number(name: str) -> Iterator[Step]:
    """The calls with a number in the place of a tensor: of integers, it decides the dtype. Then
    those with one of two numbers, and another value of one more argument.
    """
    counts = num_values(name)
    for place in number_places(name):
        for pick in range(2, counts[place]):
            yield Step(name, (*(0,) * place, pick))
        for other in range(place + 1, len(counts)):
            for pick, value in itertools.product((2, 4), range(1, counts[other])):
                yield Step(name, (*(0,) * place, pick, *(0,) * (other - place - 1), value))


def _of_infinite(name: str) -> Iterator[Program]:
    """Programs that make something finite of very large numbers by an op, or a number of infinite
    ones.
    """
    types = (TensorType(F64, (2, 3)),)
    infinite = (Step("aten.sub.Tensor", (0, 0)), Step("aten.div.Tensor", (1, 0)))
    if name in UNCHECKED or len(tensor_places(name)) != 1:
        return
    for step, before in itertools.product(_variants(name), (infinite, LARGE)):
        program = Program(types, (*before, step))
        trace = build(program)
        if trace.equations[-1].op.name == name and runs(program):
            value = evaluate(trace, example_inputs(trace))[-1]
            if value.isfinite().all() if before is LARGE else not value.isnan().all():
                yield program


def _of_one_infinite(name: str) -> Iterator[Program]:
    """Programs in which one operand of several is infinite, each in turn, and the result is not
    everywhere.
    """
    places, known = tensor_places(name), set[tuple[int, ...]]()
    if name in UNCHECKED or len(places) < 2:
        return
    floating = (types for types in _fitting(name, False) if F64 in [t.dtype for t in types])
    for types in itertools.islice(floating, 1):
        newest = [type.dtype for type in reversed(types)].index(F64)
        made = Step("aten.div.Scalar", (newest, NUMBERS.index(0)))
        for chosen in itertools.islice(itertools.product(range(4), repeat=len(places)), 64):
            picks = dict(zip(places, chosen, strict=True))
            step = Step(name, tuple(picks.get(n, 0) for n in range(max(places) + 1)))
            program = Program(types, (made, step))
            infinite = _places_of_infinite(program, name)
            if len(infinite) == 1 and infinite not in known and _is_finite_somewhere(program):
                known.add(infinite)
                yield program


def _places_of_infinite(program: Program, name: str) -> tuple[int, ...]:
    """The operands of the last equation that are what the first one makes; none if it is another
    op's, or reads a variable twice.
    """
    equations = build(program).equations
    if len(equations) != 2 or equations[1].op.name != name:
        return ()
    first, last = equations
    if len(set(last.operands)) < len(last.operands):
        return ()
    return tuple(n for n, var in enumerate(last.operands) if var == first.outputs[0])


def _is_finite_somewhere(program: Program) -> bool:
    if not runs(program):
        return False
    trace = build(program)
    values = evaluate(trace, example_inputs(trace))
    return any(bool(value.isfinite().any()) for value in values[-1:])


def runs(program: Program | Trace) -> bool:
    """Test whether eager PyTorch computes it: rules for fake tensors take further dtypes."""
    trace = build(program) if isinstance(program, Program) else program
    try:
        evaluate(trace, example_inputs(trace))
    except TraceTypeError:  # a kernel gives another type than the rule for fake tensors
        return False
    except ThunderError:
        raise
    except (RuntimeError, NotImplementedError, IndexError, ValueError, ZeroDivisionError):
        return False
    return True


def _fitting(name: str, with_others: bool) -> list[tuple[TensorType, ...]]:
    """The inputs that an op takes by default, or else with some other argument."""
    fitting = [types for types in PLACES if takes(name, types, ())]
    if fitting or not with_others:
        return fitting
    others = [step.picks for step in _variants(name)]
    return [types for types in PLACES if any(takes(name, types, picks) for picks in others)]


def _one_at_a_time(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The first other value of each argument, then the second ones: what follows has a limit."""
    yield ()
    for pick in range(1, max(counts, default=0)):
        for place, count in enumerate(counts):
            if pick < count:
                yield (*(0,) * place, pick)
