"""Laws for your own transform: one call tests it alone and beside the built-in ones.

The search has three parts. Programs made on purpose come first: every kind of equation, every
argument of every op that the transform names, every structured op around bodies of one to six
equations, and draws that can be merged. Random programs follow, half of them inside of structured
ops. A program that ran a new branch of the transform, or has a new kind of trace, is kept and
changed. Whatever breaks a law is made small.

Source: coverage-guided fuzzing (AFL, M. Zalewski 2013); swarm testing (Groce et al. 2012).
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from thunder_fn.ir.check import check, types_in
from thunder_fn.ir.ops import overload
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import Equation, TensorType, Trace, Type, every_equation
from thunder_fn.testing.branches import Branches
from thunder_fn.testing.drawn_programs import BODIES, FAMILIES, Program, Step, build
from thunder_fn.testing.given import Given
from thunder_fn.testing.growing import (
    ALIASES,
    ALLOCATED,
    BOUNDED,
    BROADCAST,
    CASES,
    CHAINED,
    CONSTANTS,
    COUSINS,
    DEAD,
    DRAWS,
    EFFECTS,
    INSIDE,
    LOOPS,
    RULED,
    SWAPPED,
    VECTOR,
    around,
    around_chains,
    beside_chains,
    calls_of,
    changed,
    conversions_of,
    cousins_of_leaves,
    deep_nests,
    drawn_of,
    in_single,
    on_constants,
    pairs_of,
    redrawn,
    runs,
    smallest,
    two_deep,
    wrapped,
)
from thunder_fn.testing.laws.comparing import (
    Inputs,
    Law,
    LawBroken,
    Values,
    agree,
    close,
    draws,
    holds,
    is_inexact,
    is_tame,
    law_of,
    num_equations,
    tolerance,
)
from thunder_fn.testing.laws.draws import laws_of_draws
from thunder_fn.testing.laws.effects import keeps_effects
from thunder_fn.testing.laws.interpreters import (
    Interpreter,
    interpreter_carries_facts,
    interpreter_is_idempotent,
    interpreter_leaves_closures_alone,
)
from thunder_fn.testing.laws.memory import stays_deterministic
from thunder_fn.testing.laws.pairs import TRANSFORMS, commute, floats, once, remembering, values_of
from thunder_fn.testing.laws.promises import (
    ENSURED,
    PROMISES,
    Ensures,
    Keeps,
    Promised,
    has_lines,
    law_of_promise,
)
from thunder_fn.testing.laws.special import keeps_special_values
from thunder_fn.testing.laws.threads import laws_of_functions
from thunder_fn.testing.reports import AnyCase, described
from thunder_fn.testing.schemas import in_turn
from thunder_fn.testing.sized import Sized, sized_cases
from thunder_fn.testing.strategies import Case, cases, drawn_cases, smooth_cases
from thunder_fn.testing.vocabulary import (
    functions_of,
    overloads_of,
    own_code,
    structures,
    vocabulary,
)
from thunder_fn.testing.watching import Coverage
from thunder_fn.torch_internals.patches import no_meta_log

Transform = Callable[[Trace], Trace]
STEPS = tuple(name for family, names in FAMILIES.items() if family != "random" for name in names)
KINDS = (cases(max_steps=8), smooth_cases())
MOVERS = ("vjp", "jvp", "vmap", "autocast", "checkpoint")
"""The transforms beside which programs made on purpose are tried."""

ON_PURPOSE = tuple(
    program
    for family in (
        DRAWS,
        CONSTANTS,
        DEAD,
        ALIASES,
        ALLOCATED,
        BOUNDED,
        BROADCAST,
        CASES,
        CHAINED,
        COUSINS,
        SWAPPED,
        EFFECTS,
        INSIDE,
    )
    for program in family
)
"""Programs that are the same for every transform."""

MORE = 40
MOST_CALLS = 240
MOST_NESTED_CALLS = 90
MOST_DRAWN, MOST_CHANGED, MOST_ALIKE = 14_000, 600, 6
"""The number of equations that are drawn, of programs that are judged, and of those in which the
same equations go and come, at most.
"""

MOST_FOUND, MOST_IDLE = 12, 400
"""The number of programs that are changed further, and of those in a row that bring nothing new
where every branch has run, at most.
"""


def check_transform(  # noqa: PLR0913 - options, by keyword
    transform: Transform,
    *,
    keeps: Keeps = "values",
    idempotent: bool = False,
    max_examples: int = 50,
    ops: Sequence[Any] = (),
    traces: Sequence[Trace | Given] = (),
    promises: Sequence[str] = (),
    ensures: Ensures | None = None,
) -> Coverage:
    """Test a function from trace to trace on programs made on purpose, and on random ones.

    Law: the identity keeps every law.

    Args:
        keeps: "values" promises the same types and values, and the same random numbers in the same
            order. Then the transform must also commute with vjp, jvp, vmap, checkpoint and the
            simplifying transforms, and read closed-over tensors when the trace runs. "nothing"
            promises a checked trace, the same for equal traces and with their constraints, and
            nothing else.
        idempotent: promises that a second application changes nothing.
        max_examples: how many random traces to try.
        ops: ops to draw often, with every argument of their schemas: names such as "sub" or
            "aten.sub.Tensor", or overloads. Those that the transform's code names are drawn anyway.
        traces: programs of your own to try first, such as `tfn.trace(f, *arguments)`. The values of
            their inputs are drawn; `Given(trace, values=arguments)` brings its own.
        promises: further laws: "flops", "memory" and "launches" (no more of these than before;
            "flops=2" for twice as many), "loops" (what a loop costs is linear in its length),
            "precision" (no farther from the result in float64; up to 4 units in the last place, or
            as many as "precision=1" says), "refines" (in float64 the result has its precision),
            "bits" (the same bits), "lines" (each equation has the user's line),
            "schedules" (ranks that transform the same trace do not wait for each other for ever),
            "processes" (the same trace in every process).
        ensures: the purpose of the transform, as a test of the trace before and after:
            `lambda before, after: not any(e.op == RELU for e in after.equations)`. Without it a
            transform that does nothing keeps every law.

    Returns:
        The record of the search: ops, arguments, nestings, the branches of the transform that
        never ran and what to pass to see more, the laws that no trace could break. Print it.

    Raises:
        LawBroken: a law does not hold; names it and prints the smallest trace found.
        UnknownOption: nobody knows one of the promises.

    Example:
        >>> import thunder_fn as tfn
        >>> from thunder_fn.testing import LawBroken, check_transform
        >>> def drop_last(trace):  # wrong: the last output may be needed
        ...     return tfn.ir.cut(trace, outputs=trace.outputs[:-1])
        >>> try:
        ...     check_transform(drop_last, max_examples=1)
        ... except LawBroken as error:
        ...     print("broken")
        broken
    """
    with warnings.catch_warnings(), no_meta_log():
        warnings.simplefilter("ignore")
        promised = Promised(keeps, idempotent, tuple(promises), ensures)
        search = Search(transform, promised, ops)
        search.run(max_examples, traces)
    return search.coverage


def reproduce(
    program: Program | Sized | Given,
    law: str,
    *,
    seed: int = 0,
    keeps: Keeps = "values",
    ensures: Ensures | None = None,
    promises: Sequence[str] = (),
) -> Callable[[Transform], Transform]:
    """Hold a transform to one law on one program: the decorator that a report of
    `check_transform` prints.

    Law: the decorated transform is the transform itself.

    Raises:
        LawBroken: it still does not hold.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> from thunder_fn.ir import TensorType
        >>> from thunder_fn.testing import Program, Step, reproduce
        >>> program = Program((TensorType(torch.float32, (2,)),), (Step("sin", (0,)),))
        >>> @reproduce(program, "keeps values")
        ... def simplified(trace):
        ...     return tfn.simplify(trace)
    """

    def decorate(transform: Transform) -> Transform:
        case = Case(program, seed) if isinstance(program, Program) else program
        promised = Promised(keeps, True, (*PROMISES, *promises), ensures)
        with warnings.catch_warnings(), no_meta_log():
            warnings.simplefilter("ignore")
            laws = laws_of_transform(transform, promised)
            try:
                laws[law](case.trace, case.inputs)
            except Exception as error:
                which = laws.get("keeps values")
                raise described(transform, law, case, error, promised, which) from error
        return transform

    return decorate


@dataclass(frozen=True)
class Share:
    """A search among others: its part of the work, the cost of a case in milliseconds, its cases
    with None for what was drawn in vain, and the laws that they are tried with.
    """

    part: int
    cost: float
    cases: Iterator[AnyCase | None]
    names: Sequence[str]


def in_shares(searches: Sequence[Share]) -> Iterator[tuple[AnyCase, Sequence[str]]]:
    """Take a case from the search that has used the least of its part, until all have ended. Costs
    are counted, not timed, so the order is the same on every machine.
    """
    spent = dict.fromkeys(range(len(searches)), 0.0)
    while spent:
        place = min(spent, key=spent.__getitem__)
        search, end = searches[place], object()
        case: Any = next(search.cases, end)
        if case is end:
            del spent[place]
            continue
        spent[place] += search.cost / search.part
        if case is not None:
            yield case, search.names


def _kind(equation: Equation) -> Any:
    """An equation without the names of its variables."""
    args = types_in(equation)
    return equation.op, args, equation.bodies, equation.output_types


class Search:
    """The programs that were tried for one transform, and those worth changing."""

    def __init__(
        self,
        transform: Transform,
        promised: Promised,
        ops: Sequence[Any] = (),
        without: Sequence[str] = (),
    ) -> None:
        self.functions = functions_of(transform)
        self.ran = Branches(own_code(self.functions))
        self.transform, self.promised = transform, promised
        self.laws = laws_of_transform(transform, promised)
        for name in without:
            self.laws.pop(name, None)
        never = replace(promised, ensures=None)
        self.of_identity = laws_of_transform(lambda trace: trace, never) | {ENSURED: _is_computed}
        self.few = [name for name in OF_FEW if name in self.laws]
        self.of_sizes = [name for name in OF_SIZES if name in self.laws]
        self.alone = [n for n in self.laws if not n.startswith(BESIDE) and n not in self.few]
        self.beside = [name for name in self.laws if name.startswith(BESIDE)]
        self.movers = [BESIDE + name for name in MOVERS if BESIDE + name in self.laws]
        named = vocabulary(transform)
        if promised.ensures is not None:
            named += vocabulary(promised.ensures)
        self.ops = tuple(dict.fromkeys((*overloads_of(ops), *named)))
        self.nests = structures(transform)
        self.coverage = Coverage(vocabulary=self.ops)
        self.coverage.applied.update(dict.fromkeys(self.laws, 0))
        self.kept: list[Program] = []
        self.left = self.since_new = 0
        """The numbers of traces that stayed as they were, and since a new branch ran."""
        self.noted: tuple[Any, ...] = ()
        """The last case, and the transform, its trace and what became of it."""

    def run(self, max_examples: int, traces: Sequence[Trace | Given] = ()) -> None:
        """Search, and raise what is found."""
        basic = (Case(program) for program, _ in self._basic_programs())
        broken = (
            self.on_given(traces)
            or self._first_broken(basic, self.alone)
            or self._first_of(in_shares(self._searches(max_examples)))
            or self.on_few()
        )
        if broken is not None:
            law, case = broken
            case, error = self.made_small(law, case)
            keeps = self.laws.get("keeps values")
            raise described(self.transform, law, case, error, self.promised, keeps) from error
        self.coverage.note_branches(self.ran, self.functions)

    def _searches(self, max_examples: int) -> list[Share]:
        """The searches that go on side by side, with their shares of the work and the costs of
        their cases. None of them waits for another one to end.
        """
        movers = (Case(program) for program, flag in self._basic_programs() if flag)
        everything = [*self.alone, *self.beside]
        return [
            Share(6, 3, self._drawn(), self.alone),
            Share(4, 4, map(Case, self._further_programs()), self.alone),
            Share(2, 12, movers, self.movers),
            Share(1, 40, sized_cases(self.ops), self.of_sizes),
            Share(1, 60, self._at_random(max_examples), everything),
        ]

    # what is tried

    def on_given(self, traces: Sequence[Trace | Given]) -> tuple[str, AnyCase] | None:
        """Try the user's own traces."""
        given = (one if isinstance(one, Given) else Given(one) for one in traces)
        cases = [replace(one, place=place) for place, one in enumerate(given)]
        return self._first_broken(cases, [*self.alone, *self.beside])

    def on_drawn(self) -> tuple[str, AnyCase] | None:
        """Try programs of what the transform names, those that it changes."""
        return self._first_broken(filter(None, self._drawn()), self.alone)

    def _drawn(self) -> Iterator[Case | None]:
        """Programs that are drawn, or like others that ran a new branch or that the transform
        changes, if it changes them in a way that is new; None for each other one.
        """
        rng, found, hit = random.Random(0), list[Program](), list[Program]()
        seen, ways = set[Trace](), Counter[Any]()
        count, idle = 0, 0
        while count < MOST_DRAWN and len(seen) < MOST_CHANGED:
            if idle > MOST_IDLE and not (self.ran.never_ran() or self.ran.one_sided()):
                break
            program = self._like_one(rng, found, hit)
            case, known = Case(program, len(seen)), len(self.ran)
            count, idle = count + 1, idle + 1
            is_new = self._note(case) and case.trace not in seen
            count += num_equations(case.trace) if is_new else 0
            if len(self.ran) > known:
                found.append(program)
                idle = 0
            way = self._change(case.trace) if is_new else None
            if way is None or ways[way] >= MOST_ALIKE or not runs(case.trace):
                yield None
                continue
            seen.add(case.trace)
            hit.append(program)
            ways[way] += 1
            idle = 0
            yield case

    def _like_one(
        self, rng: random.Random, found: Sequence[Program], hit: Sequence[Program]
    ) -> Program:
        """A new program, or one like some that ran a new branch or that the transform changes."""
        pool = hit if hit and (not found or rng.random() < 0.6) else found
        if pool and rng.random() < 0.7:
            return redrawn(rng.choice(pool[-MOST_FOUND:]), rng, self.ops, self.nests)
        return drawn_of(rng, self.ops, self.nests)

    def _change(self, trace: Trace) -> Any:
        """The equations that go and come where the transform changes a trace, None where it does
        not. If there are none, the trace itself: then equations read other values.
        """
        if not self._changes(trace):
            return None
        made = self.noted[3] if len(self.noted) > 3 else None
        if not isinstance(made, Trace):
            return trace
        old, new = (Counter(map(_kind, one.equations)) for one in (trace, made))
        return (frozenset(old - new), frozenset(new - old)) if old != new else trace

    def on_symbols(self) -> tuple[str, AnyCase] | None:
        """Try programs whose sizes and numbers are variables."""
        return self._first_broken(sized_cases(self.ops), self.of_sizes)

    def on_few(self) -> tuple[str, AnyCase] | None:
        """Try the laws about the transform as a function on some programs that were kept."""
        return self._first_broken(map(Case, self.kept[:FEW]), self.few)

    def programs(self) -> Iterator[Program]:
        """The programs made on purpose."""
        yield from (program for program, _ in self._basic_programs())
        yield from self._further_programs()

    def _basic_programs(self) -> Iterator[tuple[Program, bool]]:
        """Programs, and whether each is tried beside other transforms, too."""
        for name in STEPS:
            yield from ((program, not i) for i, program in enumerate(steps_alone(name)))
        for index, program in self._calls():
            yield program, index == 0 or "#" in program.steps[0].op
        singles = (in_single(program) for _, program in self._calls())
        yield from ((program, False) for program in singles if _widens(program))
        yield from ((program, False) for program in self._nested_calls())
        yield from ((program, True) for program in RULED)
        yield from ((program, False) for program in LOOPS)
        yield from ((program, False) for program in around_chains((1, 2, 3, 5, 6)))
        yield from ((program, True) for program in around_chains((4,)))
        yield from ((program, False) for program in beside_chains((1, 2, 3, 4, 5)))

    def _further_programs(self) -> Iterator[Program]:
        yield from two_deep()
        yield from deep_nests(self.nests)
        yield from ON_PURPOSE
        yield from on_constants(self.ops)
        yield from cousins_of_leaves(self.ops)
        yield from conversions_of(self.ops)
        yield from pairs_of(self.ops)
        if any(promise.startswith(("precision", "refines")) for promise in self.promised.promises):
            yield from self._in_single()

    def _in_single(self) -> Iterator[Program]:
        """Programs in single precision, where rounding shows."""
        for name in STEPS:
            yield from map(in_single, steps_alone(name))
        for _, program in self._calls():
            yield in_single(program)
        yield from map(in_single, around_chains((2, 4)))

    def _calls(self) -> Iterator[tuple[int, Program]]:
        """The calls of the ops that the transform names: the plain call of each, then others."""
        calls = [list(enumerate(calls_of(name))) for name in self.ops]
        return iter(in_turn(calls)[:MOST_CALLS])

    def _nested_calls(self) -> list[Program]:
        calls = [calls_of(name)[:3] for name in self.ops]
        return in_turn([[p for call in of_one for p in around(call)] for of_one in calls])[
            :MOST_NESTED_CALLS
        ]

    def at_random(self, count: int) -> tuple[str, AnyCase] | None:
        """Try random programs."""
        return self._first_broken(self._at_random(count), [*self.alone, *self.beside])

    def _at_random(self, count: int) -> Iterator[Case]:
        """Random programs, half of them inside of structured ops or like one that was kept."""
        return map(Case, self._random(count))

    def _random(self, count: int) -> Iterator[Program]:
        rng = random.Random(0)
        for number in range(count):
            drawn = drawn_cases(KINDS[number % 2], number // 50, 25)[number % 50 // 2].program
            match number % 4:
                case 0 | 1 if number % 8 < 4:
                    yield drawn
                case 0 | 1:
                    yield replace(drawn, steps=(wrapped(drawn.steps, rng),))
                case _:
                    program = rng.choice(self.kept) if self.kept else drawn
                    for _ in range(rng.randint(1, 3)):
                        program = changed(program, rng, self.ops)
                    yield program

    # trying

    def _first_broken(
        self, cases: Iterable[AnyCase], names: Sequence[str]
    ) -> tuple[str, AnyCase] | None:
        """The most basic of some laws that a program breaks, and the first that does."""
        return self._first_of((case, names) for case in cases)

    def _first_of(
        self, tries: Iterable[tuple[AnyCase, Sequence[str]]]
    ) -> tuple[str, AnyCase] | None:
        """The most basic law that a program breaks among those that it is tried with, and the first
        that does: the laws stand in that order. A more basic one is looked for in `MORE` programs
        after the first.
        """
        places = {name: place for place, name in enumerate(self.laws)}
        broken, more, least = None, MORE, len(places)
        for case, names in tries:
            more -= broken is not None
            if more < 0 or least == 0:
                break
            names = [name for name in names if places[name] < least]
            if not names or not self._note(case):
                continue
            with remembering(*self.noted[1:]):
                trace, inputs = case.trace, case.inputs
                for name in self._worth(names, trace):
                    if self.error_of(name, trace, inputs) is not None:
                        least, broken = places[name], (name, case)
                        break
        return broken

    def _worth(self, names: Sequence[str], trace: Trace) -> Sequence[str]:
        """The laws that are worth asking: where many traces stayed as they were, of those about a
        single trace few more.
        """
        if self._changes(trace):
            return names
        self.left += 1
        if self.left <= MANY_LEFT or self.left % EVERY_LEFT == 0:
            return names
        return [name for name in names if name not in OF_ONE_TRACE]

    def _watching(self) -> AbstractContextManager[None]:
        """Note what runs of the transform: where long nothing new ran, once in a while."""
        is_watched = self.since_new < MANY_LEFT or self.since_new % 3 == 0
        return self.ran.watching() if is_watched else nullcontext()

    def _note(self, case: AnyCase) -> bool:
        """Count what is in a trace, and keep its program if that, or the lines that run, is new.
        The result of the transform is then known.
        """
        if self.noted[:1] == (case,) and self.noted[0] is case:
            return True
        try:
            trace = case.trace
        except Exception:  # noqa: BLE001 - PyTorch refuses some arguments that schemas allow
            return False
        known = len(self.ran)
        new = self.coverage.add(trace)
        self.noted = (case,)
        with self._watching(), suppress(Exception):  # the laws say what is wrong
            self.noted = (case, self.transform, trace, self.transform(trace))
        self.since_new = 0 if len(self.ran) > known else self.since_new + 1
        if isinstance(case, Case) and (new or len(self.ran) > known):
            self.kept.append(case.program)
        return True

    def error_of(self, name: str, trace: Trace, inputs: Inputs) -> Exception | None:
        """The error of a law; None also where the trace is out of the law's reach, as the same
        error for a transform that changes nothing shows.
        """
        if name in OF_CHANGES and not self._changes(trace):
            return None
        try:
            said = self.laws[name](trace, inputs)
        except Exception as error:  # noqa: BLE001 - a wrong transform may raise anything
            try:
                values_of(trace, inputs)  # PyTorch may refuse what it gives types for
                if name in self.of_identity:
                    self.of_identity[name](trace, inputs)
            except Exception:  # noqa: BLE001
                return None
            return error
        self.coverage.applied[name] += said is not False
        return None

    def _changes(self, trace: Trace) -> bool:
        """Test whether the transform makes another trace, or nothing, of this one."""
        try:
            known = self.noted[2:3] and self.noted[2] is trace
            return (self.noted[3] if known else once(self.transform, trace)) != trace
        except Exception:  # noqa: BLE001 - the laws say what is wrong
            return True

    def made_small(self, name: str, case: AnyCase) -> tuple[AnyCase, Exception]:
        """The smallest case found that breaks a law as this one does, and its error."""
        errors: dict[AnyCase, Exception] = {}

        def breaks(case: AnyCase) -> bool:
            try:
                trace, inputs = case.trace, case.inputs
            except Exception:  # noqa: BLE001
                return False
            error = self.error_of(name, trace, inputs)
            if error is not None:
                errors[case] = error
            return error is not None

        breaks(case)
        if isinstance(case, Given):
            case = case.shortest(breaks)
        elif isinstance(case, Case):
            case = Case(smallest(case.program, lambda program: breaks(Case(program))))
        gone = LawBroken("the difference is gone when it is looked for again")
        return case, errors.get(case, gone)


def steps_alone(name: str) -> tuple[Program, ...]:
    """A step on two tensors, and on one."""
    bodies = (Program(steps=(Step("sin"),)),) * BODIES.get(name, 0)
    return (
        Program((VECTOR, VECTOR), (Step(name, (0, 1), bodies),)),
        Program((VECTOR,), (Step(name, bodies=bodies),)),
    )


# ---- the laws ----

BESIDE = "commutes with "
"""The beginning of the names of laws about two transforms."""


OF_FEW = ("depends on the trace alone", "works in threads")
"""Laws that are held on the first programs that were kept: each runs the transform many times."""

FEW = 12
"""The number of programs for these."""

OF_SIZES = ("gives checked traces", "keeps values", "carries facts")
"""Laws that are held on programs whose sizes and numbers are variables."""


OF_CHANGES = (
    "reads written memory alone",
    "keeps values",
    "merges no draws",
    "draws as many numbers",
    "draws in the same order",
    "keeps effects",
    "keeps shared memory",
    "leaves closed-over tensors alone",
)
"""Laws that compare values: where the transform leaves a trace as it is, nothing is computed."""


OF_ONE_TRACE = ("gives checked traces", "is pure", "carries facts", "has lines")
"""Laws that hold of a trace that stays as it is, unless they break for most such traces."""

MANY_LEFT, EVERY_LEFT = 200, 8
"""After so many traces that stay as they are, these laws are asked about one in this many."""


def laws_of_transform(transform: Transform, promised: Promised) -> dict[str, Law]:
    """The laws that a user's transform promises, basic ones first."""
    keeps = promised.keeps
    alone = Interpreter(lambda trace: (once(transform, trace),))
    kept: Transform = lambda trace: once(transform, trace)
    laws: dict[str, Law] = {
        "gives checked traces": _checked(transform),
        "is pure": _pure(transform),
    }
    laws["reads written memory alone"] = stays_deterministic(kept)
    if keeps == "values":
        laws["keeps values"] = _keeps_values(kept)
        laws |= laws_of_draws(kept)
        laws["keeps effects"] = keeps_effects(kept)
        laws["keeps shared memory"] = _keeps_shared_memory(kept)
        laws["leaves closed-over tensors alone"] = interpreter_leaves_closures_alone(
            alone, exact=False
        )
    laws.update(law_of_promise(promise, transform) for promise in promised.promises)
    if promised.ensures is not None:
        laws[ENSURED] = _ensured(kept, promised.ensures)
    if promised.idempotent:
        laws["is idempotent"] = interpreter_is_idempotent(alone)
    laws["carries facts"] = interpreter_carries_facts(alone, whole=False)
    laws["has lines"] = has_lines(transform)
    laws |= laws_of_functions(transform, own_code(functions_of(transform)))
    if keeps == "values":
        laws |= {f"{BESIDE}{name}": commute(transform, other) for name, other in TRANSFORMS.items()}
    return laws


@law_of
def _ensured(transform: Transform, trace: Trace, inputs: Inputs, ensures: Ensures) -> None:
    new = transform(trace)
    what = "the transform has not done what `ensures` says"
    holds(ensures(trace, new) is not False, what, trace=trace, made=new)


def _is_computed(trace: Trace, inputs: Inputs) -> None:
    """Raise what eager PyTorch raises: a purpose may compute values, and schemas allow more."""
    values_of(trace, inputs)


@law_of
def _checked(transform: Transform, trace: Trace, inputs: Inputs) -> None:
    new: object = once(transform, trace)
    if not isinstance(new, Trace):
        raise LawBroken(
            f"the transform returned {type(new).__name__}, not a Trace. Return the new trace"
            " itself; a transform that makes several is tested once for each."
        )
    check(new)
    for equation in every_equation(new):
        what = f"{equation.op} gives a size that it does not find"
        holds(not made_by(equation) or _may_find(equation), what, made=new)


_FINDS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _may_find(equation: Equation) -> bool:
    """Test whether an equation may find a size in data: PyTorch tags such ops of ATen."""
    if equation.op.kind != "leaf" or not equation.op.name.startswith("aten."):
        return True
    return bool(_FINDS & set(overload(equation.op).tags))


@law_of
def _pure(transform: Transform, trace: Trace, inputs: Inputs) -> None:
    first, copy = once(transform, trace), trace.renamed(trace.name)
    text, state = str(copy), torch.get_rng_state()
    second = transform(copy)
    holds(str(copy) == text, "the trace was changed", trace=trace)
    drew = not torch.equal(state, torch.get_rng_state())
    holds(not drew, "random numbers were drawn while transforming", trace=trace)
    holds(first == second, "equal traces gave different traces", first=first, second=second)


def _widens(program: Program) -> bool:
    """Test for a call that computes in a wider dtype than it is given, as `sum(x, dtype=...)`."""
    return any(
        isinstance(result.type, TensorType)
        and result.type.dtype.itemsize > var.type.dtype.itemsize
        and result.type.dtype.is_floating_point
        and var.type.dtype.is_floating_point
        for equation in build(program).equations
        for result in equation.outputs
        for var in equation.operands
        if isinstance(var.type, TensorType)
    )


def others(values: Values) -> Values:
    """The values that are neither floating nor complex: compared exactly."""
    return tuple(
        value for value in values if not isinstance(value, torch.Tensor) or not is_inexact(value)
    )


@law_of
def _keeps_values(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    new = transform(trace)
    for what, old, now in (
        ("input", trace.input_types, new.input_types),
        ("output", trace.output_types, new.output_types),
    ):
        holds(now == old, f"the {what}s' types changed{_first_change(what, old, now)}", made=new)
    if draws(trace):
        return False
    want = values_of(trace, inputs)
    have = values_of(new, inputs)
    rtol = tolerance(trace, computed=True)
    if is_tame(want):
        close(floats(have), floats(want), rtol, "the transformed trace", made=new)
        agree(others(have), others(want), "the transformed trace", made=new)
    else:
        what, shown = "the transformed trace", (floats(have), floats(want))
        close(_finite(have), _finite(want), rtol, what, shown=shown, made=new)
    keeps_special_values(trace, new, inputs)
    return True


def _first_change(what: str, old: Sequence[Type], new: Sequence[Type]) -> str:
    """The first type that is another one, or the numbers of types."""
    if len(old) != len(new):
        return f": there are {len(new)}, and were {len(old)}"
    places = (i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    return "".join(f": {what} {i} is {new[i]}, and was {old[i]}" for i in list(places)[:1])


def _finite(values: Values) -> tuple[torch.Tensor, ...]:
    """The floating values with 1 for NaN, 2 for infinity, -2 for that below 0, and 3 for what is
    very large.
    """
    return tuple(x if is_tame((x,)) else _kind_of_each(x) for x in floats(values))


def _kind_of_each(x: torch.Tensor) -> torch.Tensor:
    infinite = 2.0 * x.sign() if x.is_floating_point() else 2.0
    return torch.where(x.isnan(), 1.0, torch.where(x.isinf(), infinite, 3.0))


@law_of
def _keeps_shared_memory(transform: Transform, trace: Trace, inputs: Inputs) -> bool:
    """An output that had memory of its own does not come to lie in that of an input or of another
    output: whoever writes to one would change the other. One variable that is returned twice tells
    so.
    """
    tensors = [value for value in values_of(trace, inputs) if isinstance(value, torch.Tensor)]
    if draws(trace) or not tensors:
        return False
    new = transform(trace)
    before, after = (_shared(values_of(t, inputs), inputs) for t in (trace, new))
    after = [(i, j) for i, j in after if j is None or new.outputs[i] != new.outputs[j]]
    held = [i for i, j in after if j is None and (i, j) not in before]
    what = f"outputs {held} lie in the memory of inputs, and did not: who writes to one writes to"
    holds(not held, f"{what} the other. Return a copy.", made=new)
    pairs = [pair for pair in after if pair not in before]
    what = f"the outputs {pairs} lie in one memory, and did not: who writes to one writes to the"
    holds(not pairs, f"{what} other. Return a copy.", made=new)
    return True


def _shared(values: Values, inputs: Inputs) -> list[tuple[int, int | None]]:
    """The places of outputs in the memory of an input, with None, and the pairs in one memory."""
    places = {
        place: value.untyped_storage().data_ptr()
        for place, value in enumerate(values)
        if isinstance(value, torch.Tensor) and value.numel()
    }
    known = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    pairs = [(i, j) for i in places for j in places if i < j and places[i] == places[j]]
    return [*((i, None) for i, place in places.items() if place in known), *pairs]
