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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from thunder_fn.ir.check import check
from thunder_fn.ir.ops import overload
from thunder_fn.ir.symbols import made_by
from thunder_fn.ir.trace import Equation, TensorType, Trace, every_equation
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
    drawn_of,
    in_single,
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

MORE = 100
MOST_CALLS = 240
MOST_NESTED_CALLS = 90
MOST_DRAWN, MOST_CHANGED, MOST_FOUND = 14_000, 600, 12
"""The number of equations that are drawn, of programs that are judged, and of those that are
changed further, at most.
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

    def run(self, max_examples: int, traces: Sequence[Trace | Given] = ()) -> None:
        """Search, and raise what is found."""
        broken = (
            self.on_given(traces)
            or self.on_purpose()
            or self.on_drawn()
            or self.on_symbols()
            or self.on_few()
            or self.at_random(max_examples)
        )
        if broken is not None:
            law, case = broken
            case, error = self.made_small(law, case)
            keeps = self.laws.get("keeps values")
            raise described(self.transform, law, case, error, self.promised, keeps) from error
        self.coverage.note_branches(self.ran, self.functions)

    # what is tried

    def on_given(self, traces: Sequence[Trace | Given]) -> tuple[str, AnyCase] | None:
        """Try the user's own traces."""
        given = (one if isinstance(one, Given) else Given(one) for one in traces)
        cases = [replace(one, place=place) for place, one in enumerate(given)]
        return self._first_broken(cases, [*self.alone, *self.beside])

    def on_purpose(self) -> tuple[str, AnyCase] | None:
        """Try the programs made on purpose: the basic ones alone, some of them beside other
        transforms, then the others alone.
        """
        beside = list[Case]()

        def basic() -> Iterator[Case]:
            """The programs, each made when it is tried: making all of them takes seconds."""
            for program, flag in self._basic_programs():
                case = Case(program)
                beside.extend([case] * flag)
                yield case

        return (
            self._first_broken(basic(), self.alone)
            or self._first_broken(beside, self.movers)
            or self._first_broken(map(Case, self._further_programs()), self.alone)
        )

    def on_drawn(self) -> tuple[str, AnyCase] | None:
        """Try programs of what the transform names, those that it changes."""
        return self._first_broken(self._drawn(), self.alone)

    def _drawn(self) -> Iterator[Case]:
        """Programs that are drawn, or made of those that ran a new branch, if the transform changes
        them.
        """
        rng, found, seen = random.Random(0), list[Program](), set[Trace]()
        count = 0
        while count < MOST_DRAWN and len(seen) < MOST_CHANGED:
            if found and rng.random() < 0.5:
                program = redrawn(rng.choice(found[-MOST_FOUND:]), rng, self.ops, self.nests)
            else:
                program = drawn_of(rng, self.ops, self.nests)
            case, known, count = Case(program, len(seen)), len(self.ran), count + 1
            if not self._note(case) or case.trace in seen:
                continue
            count += num_equations(case.trace)
            if len(self.ran) > known:
                found.append(program)
            if self._changes(case.trace) and runs(program):
                seen.add(case.trace)
                yield case

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
        yield from ON_PURPOSE
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
        """Try random programs, half of them inside of structured ops or like one that was kept.

        Where branches of the transform never ran, further ones are drawn, and the laws see those
        that run a new one.
        """
        names = [*self.alone, *self.beside]
        broken = self._first_broken(map(Case, self._random(count)), names)
        if broken is not None or not (self.ran.never_ran() or self.ran.one_sided()):
            return broken
        return self._first_broken(map(Case, self._that_run_more(count)), names)

    def _that_run_more(self, count: int) -> Iterator[Program]:
        for program in self._random(4 * count, 1):
            known = len(self.ran)
            if self._note(Case(program)) and len(self.ran) > known:
                yield program

    def _random(self, count: int, start: int = 0) -> Iterator[Program]:
        rng = random.Random(start)
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
        """The most basic of some laws that a program breaks, and the first that does: the laws
        stand in that order. A more basic one is looked for in `MORE` programs after the first.
        """
        broken, more = None, MORE
        for case in cases:
            more -= broken is not None
            if not names or more < 0:
                break
            if not self._note(case):
                continue
            with remembering():
                trace, inputs = case.trace, case.inputs
                for position, name in enumerate(names):
                    if self.error_of(name, trace, inputs) is not None:
                        names, broken = names[:position], (name, case)
                        break
        return broken

    def _note(self, case: AnyCase) -> bool:
        """Count what is in a trace, and keep its program if that, or the lines that run, is new."""
        try:
            trace = case.trace
        except Exception:  # noqa: BLE001 - PyTorch refuses some arguments that schemas allow
            return False
        known = len(self.ran)
        new = self.coverage.add(trace)
        with self.ran.watching(), suppress(Exception):  # the laws say what is wrong
            self.transform(trace)
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
            return once(self.transform, trace) != trace
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
    text, state = str(trace), torch.get_rng_state()
    first, second = transform(trace), transform(trace.renamed(trace.name))
    holds(str(trace) == text, "the trace was changed", trace=trace)
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
    holds(new.input_types == trace.input_types, "the inputs' types changed", made=new)
    holds(new.output_types == trace.output_types, "the outputs' types changed", made=new)
    if draws(trace):
        return False
    want = values_of(trace, inputs)
    have = values_of(new, inputs)
    rtol = tolerance(trace, computed=True)
    if not is_tame(want):
        what, shown = "the transformed trace", (floats(have), floats(want))
        close(_finite(have), _finite(want), rtol, what, shown=shown, made=new)
        return True
    close(floats(have), floats(want), rtol, "the transformed trace", made=new)
    agree(others(have), others(want), "the transformed trace", made=new)
    return True


def _finite(values: Values) -> tuple[torch.Tensor, ...]:
    """The floating values with 1 for NaN, 2 for infinity and 3 for what is very large."""
    return tuple(
        torch.where(x.isnan(), 1.0, torch.where(x.isinf(), 2.0, 3.0)) if not is_tame((x,)) else x
        for x in floats(values)
    )


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
