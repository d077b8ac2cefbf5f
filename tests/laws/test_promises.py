"""Laws beyond equal values: each has a planted bug that it finds, and passes a right transform."""

from __future__ import annotations

import importlib
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.distributed.collectives import collectives
from thunder_fn.errors import DistributedError, UnknownOption
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import dce
from thunder_fn.ir import ops, put, rewritten
from thunder_fn.ir.trace import Equation, Op, TensorType, Trace, TraceBuilder, cut
from thunder_fn.testing import Case, LawBroken, Program, Sized, Step, check_schedule, check_transform, reproduce
from thunder_fn.testing.growing import CHAIN, VECTOR, in_single
from thunder_fn.testing.laws.promises import PROMISES, Promised, law_of_promise
from thunder_fn.testing.laws.schedules import Event, explored
from thunder_fn.testing.laws.threads import depends_on_values, works_in_threads
from thunder_fn.testing.laws.unfolding import unfolded
from thunder_fn.testing.mutations import counterexample_in
from thunder_fn.testing.mutations.users import differences_as_sums
from thunder_fn.testing.user import Search
from thunder_fn.testing.vocabulary import functions_of, own_code

aten = torch.ops.aten
SIN = ops.leaf(aten.sin.default)
CASE = Case(Program((VECTOR, VECTOR), CHAIN[:4]))


def same(trace: Trace) -> Trace:
    return rewritten(trace, put)


def step_of(change: Any) -> Any:
    """A transform that changes sines; everything else stays."""

    def transform(trace: Trace) -> Trace:
        return rewritten(trace, lambda b, e, xs: change(b, e, xs) if e.op == SIN else put(b, e, xs))

    return transform


def computed_twice(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    put(builder, equation, operands)
    return put(builder, equation, operands)


def padded(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    """The sine of a copy, and a large intermediate result that stays to the end."""
    (type,) = equation.output_types
    add = lambda name, *args: builder.add(Op("leaf", name), args, (type,))[0]
    (one,) = put(builder, equation, operands)
    two = add("aten.neg.default", add("aten.neg.default", one))
    return [add("aten.maximum.default", one, two)]


def in_half(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    """A sine in half precision: far within the tolerance of single precision."""
    (type,) = equation.output_types
    if not isinstance(type, TensorType) or type.dtype != torch.float32:
        return put(builder, equation, operands)
    half = replace(type, dtype=torch.float16)
    cast = lambda x, to: builder.add(
        Op("leaf", "aten._to_copy.default"), (x,), (to,), kwargs=(("dtype", tfn.ir.Literal(to.dtype)),)
    )
    (x,) = cast(operands[0], half)
    return cast(builder.add(SIN, (x,), (half,))[0], type)


def rounded_otherwise(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    """`sin(x)` as `cos(x - pi / 2)`: right to rounding."""
    (type,) = equation.output_types
    (x,) = builder.add(Op("leaf", "aten.sub.Scalar"), (operands[0], tfn.ir.Literal(torch.pi / 2)), (type,))
    return builder.add(Op("leaf", "aten.cos.default"), (x,), (type,))


def cut_off(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    """`sin(x)` in single precision as `cos(x - pi / 2)`, with the digits of pi that single precision has."""
    (type,) = equation.output_types
    if not isinstance(type, TensorType) or type.dtype != torch.float32:
        return put(builder, equation, operands)
    (x,) = builder.add(Op("leaf", "aten.sub.Scalar"), (operands[0], tfn.ir.Literal(1.57079637)), (type,))
    return builder.add(Op("leaf", "aten.cos.default"), (x,), (type,))


def without_line(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
    return builder.add(equation.op, operands, equation.output_types)


def written_out(trace: Trace) -> Trace:
    """Loops written out: the program grows with their length."""
    return unfolded(trace)


@pytest.mark.parametrize(
    ("promise", "wrong", "case"),
    [
        ("flops", step_of(computed_twice), CASE),
        ("launches", step_of(computed_twice), CASE),
        ("memory", step_of(padded), Case(Program((VECTOR,), (Step("sin"), Step("sin"))))),
        ("loops", written_out, CASE),
        ("precision", step_of(in_half), Case(in_single(CASE.program))),
        ("refines", step_of(in_half), Case(in_single(CASE.program))),
        ("refines", step_of(cut_off), Case(in_single(CASE.program))),
        ("bits", step_of(rounded_otherwise), CASE),
        ("lines", step_of(without_line), CASE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_promise_that_is_not_kept_is_found(promise: str, wrong: Any, case: Case) -> None:
    name, law_of = PROMISES[promise]
    assert counterexample_in(law_of(same), case) is None, name
    assert law_of(same)(case.trace, case.inputs), "it could have been broken"
    found = counterexample_in(law_of(wrong), case)
    assert found is not None and found.startswith("LawBroken"), found


def test_promises_are_named_in_the_report() -> None:
    wrong = step_of(computed_twice)
    with pytest.raises(LawBroken, match='breaks the law "adds no FLOP"'):
        check_transform(wrong, promises=["flops"], max_examples=0)
    with pytest.raises(UnknownOption, match="nobody knows the promise 'speed'"):
        check_transform(same, promises=["speed"])
    with pytest.raises(UnknownOption, match="'loops=2' is no promise with a bound"):
        check_transform(same, promises=["loops=2"])


def test_a_promise_has_a_bound() -> None:
    single = Case(in_single(CASE.program))
    for promise, wrong, case in (
        ("flops=1.2", step_of(computed_twice), CASE),
        ("precision=0.2", step_of(cut_off), single),
    ):
        assert counterexample_in(law_of_promise(promise, wrong)[1], case) is not None
        assert counterexample_in(law_of_promise(promise, same)[1], case) is None
    for promise, right, case in (("flops=2", step_of(computed_twice), CASE), ("precision", step_of(cut_off), single)):
        name, law = law_of_promise(promise, right)
        assert counterexample_in(law, case) is None, name
    with pytest.raises(LawBroken, match="adds no FLOP"):
        reproduce(CASE.program, "adds no FLOP")(step_of(computed_twice))
    reproduce(CASE.program, "adds no FLOP", promises=["flops=2"])(step_of(computed_twice))


def test_a_transform_that_does_nothing_breaks_its_purpose() -> None:
    no_sine = lambda before, after: SIN not in [equation.op for equation in after.equations]
    with pytest.raises(LawBroken, match='breaks the law "does what it is for"'):
        check_transform(same, keeps="nothing", ensures=no_sine, max_examples=0)
    case = Program((VECTOR,), (Step("sin"),))
    with pytest.raises(LawBroken, match="ensures"):
        reproduce(case, "does what it is for", ensures=no_sine)(same)
    reproduce(case, "does what it is for", ensures=no_sine)(step_of(rounded_otherwise))


def test_a_purpose_is_asked_about_programs_that_eager_pytorch_computes() -> None:
    """A schema allows `alpha=True`, PyTorch does not: a purpose that computes values is not to blame."""
    refused = Case(Program((VECTOR,), (Step("aten.add.Tensor", (0, 0, 5)),)))
    with pytest.raises(RuntimeError, match="alpha"):
        evaluate(refused.trace, refused.inputs)
    search = Search(same, Promised(ensures=lambda before, after: bool(evaluate(before, refused.inputs))))
    assert search.error_of("does what it is for", refused.trace, refused.inputs) is None


# ---- threads, copies ----

LAST: list[Trace] = []


def through_a_global(trace: Trace) -> Trace:
    """Wrong where two threads call it: it keeps the trace in a global on the way."""
    LAST.clear()
    LAST.append(trace)
    made = LAST[0]
    return made.renamed(trace.name)


def by_identity(trace: Trace) -> Trace:
    """Wrong: the order of equations depends on where objects lie."""
    if len(trace.equations) < 2 or any(set(e.operands) - set(trace.inputs) for e in trace.equations):
        return trace
    SEEN.extend(e for e in trace.equations if not any(e is one for one in SEEN))
    addresses = {id(e): 7 * place % 11 for place, e in enumerate(SEEN)}
    return cut(trace, equations=sorted(trace.equations, key=lambda e: addresses[id(e)]))


SEEN: list[Equation] = []


def test_state_that_threads_share_is_found() -> None:
    for transform, is_right in ((through_a_global, False), (same, True), (dce, True)):
        law = works_in_threads(transform, own_code(functions_of(transform)))
        found = counterexample_in(law, CASE)
        assert (found is None) == is_right, found
    assert works_in_threads(dce, own_code(functions_of(dce)))(CASE.trace, CASE.inputs), "a memo hides no thread"


def test_an_order_by_identity_is_found() -> None:
    case = Case(Program((VECTOR, VECTOR, VECTOR), tuple(Step("sin", (place,)) for place in (0, 2, 4))))
    assert counterexample_in(depends_on_values(by_identity), case) is not None
    assert counterexample_in(depends_on_values(same), case) is None


# ---- sizes and numbers that are variables ----


def negated_alpha(trace: Trace) -> Trace:
    """Wrong where `alpha` is a variable: an early draft of `differences_as_sums`."""

    def step(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
        alpha = dict(equation.kwargs).get("alpha", tfn.ir.Literal(1))
        if equation.op.name != "aten.sub.Tensor" or not isinstance(alpha, tfn.ir.Literal):
            return put(builder, equation, operands)
        kwargs = (("alpha", tfn.ir.Literal(-alpha.value)),)
        return builder.add(Op("leaf", "aten.add.Tensor"), operands, equation.output_types, kwargs=kwargs)

    return rewritten(trace, step)


def test_a_number_that_is_a_variable_is_tried() -> None:
    reproduce(Sized("alpha"), "gives checked traces")(differences_as_sums)
    with pytest.raises(LawBroken, match="gives checked traces") as caught:
        reproduce(Sized("alpha"), "gives checked traces")(negated_alpha)
    assert "Sized('alpha')" in message_of(caught.value)


def test_a_size_that_is_taken_for_a_constant_is_found() -> None:
    def means(trace: Trace) -> Trace:
        def step(builder: TraceBuilder, equation: Equation, operands: Any) -> Any:
            if equation.op.name != "aten.sum.default":
                return put(builder, equation, operands)
            (mean,) = builder.add(Op("leaf", "aten.mean.default"), operands, equation.output_types)
            args = (mean, tfn.ir.Literal(2))
            return builder.add(Op("leaf", "aten.mul.Scalar"), args, equation.output_types)

        return rewritten(trace, step)

    sized = Sized(Program((VECTOR,), (Step("aten.sum.default"),)))
    reproduce(sized, "keeps values")(same)
    with pytest.raises(LawBroken, match='breaks the law "keeps values"'):
        reproduce(sized, "keeps values")(means)


# ---- schedules ----

wait = collectives.wait_tensor


def summed(x: torch.Tensor, group: str = "all", kind: str = "sum") -> torch.Tensor:
    return wait(collectives.all_reduce(x, kind, group))


def traced(f: Any) -> Trace:
    return tfn.trace(f, torch.ones(2))


FIRST = traced(lambda x: summed(x, "a") + summed(x * 2, "b"))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_with_one_program_end(ranks: int) -> None:
    assert check_schedule(FIRST, ranks) == 3
    same_on_all = lambda x: tfn.cond(summed(x).sum() > 0, summed, torch.neg, (x,))
    assert check_schedule(traced(same_on_all), ranks) == 5, "2 and 3 states on the two branches"
    assert check_schedule(traced(lambda x: tfn.scan(lambda c, _: (summed(c), None), x, None, length=3)[0]), ranks) == 4


def test_two_rows_and_two_columns_meet_in_any_order() -> None:
    grid = {"a": ((0, 1), (2, 3)), "b": ((0, 2), (1, 3))}
    assert check_schedule(FIRST, 4, grid) == 7


def ends(runs: list[list[tuple[str, Any]]], groups: dict[str, tuple[int, ...]]) -> bool:
    """Whether ranks always end, by trying every single step of every rank in every order."""
    seen, todo = set[Any](), list[Any]([tuple((0, 0, 0) for _ in runs)])  # steps, sends, collectives done
    while todo:
        state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list[Any]()
        heads = list[str | None]()
        for rank, (at, sent, done) in enumerate(state):
            own = [group for kind, group in runs[rank] if kind == "send"]
            heads.append(own[done] if done < sent else None)
            if at < len(runs[rank]):
                kind, what = runs[rank][at]
                if kind == "send" or what < done:
                    moved = (at + 1, sent + (kind == "send"), done)
                    following.append((*state[:rank], moved, *state[rank + 1 :]))
        for group, members in groups.items():
            if all(heads[rank] == group for rank in members):
                following.append(tuple((a, s, d + (r in members)) for r, (a, s, d) in enumerate(state)))
        if not following and any(at < len(run) for (at, _, _), run in zip(state, runs, strict=True)):
            return False
        if not following and any(done < sent for _, sent, done in state):
            return False
        todo += following
    return True


def test_the_states_leave_no_deadlock_out() -> None:
    """Beside a search that moves one rank by one step at a time, on random programs of four ranks."""
    rng, verdicts = random.Random(0), list[bool]()
    for _ in range(150):
        count = rng.randint(2, 4)
        pairs = [tuple(sorted(rng.sample(range(count), 2))) for _ in range(2)]
        groups = {"all": tuple(range(count)), "one": pairs[0], "two": pairs[1]}
        runs = list[list[tuple[str, Any]]]([] for _ in range(count))
        for _ in range(rng.randint(1, 3)):
            group = rng.choice(list(groups))
            for rank in groups[group]:
                runs[rank].append(("send", group))
                sent = sum(kind == "send" for kind, _ in runs[rank])
                if rng.random() < 0.6:
                    runs[rank].append(("wait", rng.randrange(sent)))
        if rng.random() < 0.5:  # most of these do not end
            run = rng.choice(runs)
            if len(run) > 1 and [kind for kind, _ in run[:2]] == ["send", "send"]:
                run[0], run[1] = run[1], run[0]
        events = [
            tuple(Event("send", group=w) if kind == "send" else Event("wait", number=w) for kind, w in run)
            for run in runs
        ]
        try:
            explored(events, {name: (members,) for name, members in groups.items()})
        except LawBroken:
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert verdicts[-1] == ends(runs, groups), (runs, groups)
    assert 20 < sum(verdicts) < 145


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ([FIRST, traced(lambda x: summed(x * 2, "b") + summed(x, "a"))], "wait for each other for ever"),
        ([FIRST, traced(lambda x: summed(x, "a", "max") + summed(x * 2, "b"))], "meet in different collectives"),
        ([FIRST, FIRST, traced(lambda x: summed(x, "a"))], "rank 2 is at its end"),
        (
            [traced(lambda x: tfn.cond(x.sum() > 0, summed, torch.neg, (x,)))] * 2,
            "rank 0 waits in _c10d_functional.all_reduce.default of group 'all'",
        ),
        ([traced(lambda x: tfn.while_loop(lambda x: x.sum() < 3, lambda x: (summed(x),), (x,)))] * 3, "for ever"),
    ],
    ids=["order", "kind", "missing", "branch", "loop"],
)
def test_ranks_that_wait_for_ever_are_found(programs: list[Trace], said: str) -> None:
    with pytest.raises(LawBroken, match=said):
        check_schedule(programs)


def test_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = traced(lambda x: [tfn.cond(summed(x).sum() > 0, summed, torch.neg, (x + i,)) for i in range(4)])
    assert check_schedule(many, 1) > 16, "a way for each combination of branches"
    monkeypatch.setattr("thunder_fn.testing.laws.schedules.MOST_CHOICES", 15)
    with pytest.raises(DistributedError, match="more than 15 ways"):
        check_schedule(many, 1)


def test_an_order_of_collectives_that_differs_between_ranks_is_found() -> None:
    name, law_of = PROMISES["schedules"]
    case = Case(Program((VECTOR, VECTOR), CHAIN[:2]))
    assert counterexample_in(law_of(same), case) is None and law_of(same)(case.trace, case.inputs), name
    turns = iter([False, True] * 8)

    def every_other(trace: Trace) -> Trace:
        """Swap the first two sums, as a set would on some of the ranks, where they are of two groups."""
        sends = [e for e in trace.equations if e.op.name.endswith("all_reduce.default")]
        if not next(turns) or len(sends) < 2:
            return trace
        kept = [e for e in trace.equations if e is not sends[0]]
        at = next(i for i, e in enumerate(kept) if e is sends[1]) + 1
        return cut(trace, equations=(*kept[:at], sends[0], *kept[at:]))

    found = counterexample_in(law_of(every_other), Case(Program((VECTOR, replace(VECTOR, shape=(3,))), ())))
    assert found is not None and "ranks meet in different collectives" in found


BY_HASH = """
from thunder_fn.ir.trace import Trace

def by_hash(trace: Trace) -> Trace:
    return trace.renamed(f"program_{hash('program') % 10**9}")

def by_name(trace: Trace) -> Trace:
    return trace.renamed("program_1")
"""


@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "thorough", reason="it starts four processes: `make thorough` runs it"
)
def test_processes_make_the_same_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "by_hash_of_text.py").write_text(BY_HASH)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("by_hash_of_text")
    assert PROMISES["processes"][1](module.by_name)(CASE.trace, CASE.inputs) is True
    with pytest.raises(LawBroken, match="two processes made different traces"):
        PROMISES["processes"][1](module.by_hash)(CASE.trace, CASE.inputs)
