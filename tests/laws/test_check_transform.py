"""`check_transform` passes a right transform, and shows a tiny trace for a wrong one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import cse, dce
from thunder_fn.ir import cut, inline_into, ops, put, rewritten
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import Equation, Expr, Literal, TensorType, Trace, TraceBuilder, as_arg, map_arg, python_args
from thunder_fn.structured.cond import COND
from thunder_fn.testing import Case, Coverage, Given, LawBroken, check_transform, reproduce
from thunder_fn.testing.drawn_programs import Program, Step
from thunder_fn.testing.growing import (
    ALIASES,
    BOUNDED,
    BROADCAST,
    CASES,
    CHAIN,
    CHAINED,
    CONSTANTS,
    COUSINS,
    DEAD,
    DRAWS,
    EFFECTS,
    INSIDE,
    LOOPS,
    NESTS,
    RULED,
    SWAPPED,
    VECTOR,
    calls_of,
    conversions_of,
    cousins_of_leaves,
    deep_nests,
    nested,
    on_constants,
    pairs_of,
    redrawn,
    runs,
    two_deep,
)
from thunder_fn.testing.laws.draws import laws_of_draws
from thunder_fn.testing.laws.effects import EFFECT
from thunder_fn.testing.laws.pairs import TRANSFORMS
from thunder_fn.testing.laws.promises import Promised
from thunder_fn.testing.mutations import counterexample_in
from thunder_fn.testing.mutations.users import USERS
from thunder_fn.testing.samples import samples
from thunder_fn.testing.schemas import MOST_PICKS, NUMBERS, calls_of_samples
from thunder_fn.testing.sized import Sized
from thunder_fn.testing.user import MOST_IDLE, Search, Share, in_shares, laws_of_transform, steps_alone
from thunder_fn.testing.vocabulary import vocabulary

DIFFERENCE = ops.leaf(ops.aten.sub.Tensor)
SIN, COS = ops.leaf(ops.aten.sin.default), ops.leaf(ops.aten.cos.default)


def cosine_for_sine(trace: Trace) -> Trace:
    """A wrong transform."""
    return replace(trace, equations=tuple(replace(e, op=COS) if e.op == SIN else e for e in trace.equations))


def test_a_right_transform_passes() -> None:
    """On random traces; the tutorial of laws has one that passes on those made on purpose, too."""
    assert Search(lambda trace: cse(dce(trace)), Promised()).at_random(3) is None


def test_a_wrong_transform_shrinks_to_a_tiny_trace() -> None:
    with pytest.raises(LawBroken) as caught:
        check_transform(cosine_for_sine, max_examples=100)
    said = str(caught.value).split("\n\n")
    assert said[0] == 'cosine_for_sine breaks the law "keeps values". The smallest trace found:'
    assert said[1] == (
        "def program(v0):\n    # v0: f64[2]\n    v1 = aten.sin.default(v0)  # f64[2]\n    return (v1,)\n"
    ).rstrip("\n")
    assert "becomes" in said and said[-1] == (
        "To see it again:\n"
        "import torch\n"
        "from thunder_fn.ir.trace import TensorType\n"
        "from thunder_fn.testing import Program, Step, reproduce\n"
        f"from {__name__} import cosine_for_sine\n"
        "reproduce(Program(inputs=(TensorType(torch.float64, (2,)),), steps=(Step('sin'),)), 'keeps values')"
        "(cosine_for_sine)"
    )
    assert "The first equation whose value is not in the new trace:\n  v1: f64[2] = aten.sin.default(v0)" in said[-2]


def replaced_where(op: Any, new: Any, is_wrong: Any) -> Any:
    """A transform that takes another op for an op, for some of its calls."""
    name, other = ops.leaf(op).name, ops.leaf(new)

    def of(e: Equation) -> Equation:
        return replace(e, op=other, args=e.args[: len(e.operands)]) if e.op.name == name and is_wrong(e) else e

    return lambda trace: replace(trace, equations=tuple(map(of, trace.equations)))


OF_FEW_CALLS: dict[str, tuple[Any, Any, Any]] = {
    "bfloat16": (ops.aten.exp.default, ops.aten.exp2.default, lambda e: e.outputs[0].type.dtype == torch.bfloat16),
    "nothing": (ops.aten.prod.default, ops.aten.sum.default, lambda e: e.operands[0].type.shape == (0,)),
    "an argument in single precision": (
        *[ops.aten.leaky_relu.default] * 2,
        lambda e: e.outputs[0].type.dtype == torch.float32,
    ),
    "quotients that are rounded down": (
        ops.aten.floor_divide.default,
        ops.aten.fmod.Tensor,
        lambda e: e.outputs[0].type.dtype == torch.int32,
    ),
    "scalars": (ops.aten.transpose.int, ops.aten.neg.default, lambda e: e.outputs[0].type.shape == ()),
    "infinite numbers": (ops.aten.isinf.default, ops.aten.isnan.default, lambda e: True),
}


@pytest.mark.parametrize("name", OF_FEW_CALLS)
def test_bugs_of_few_calls_are_found(name: str) -> None:
    """Dtypes, sizes and arguments together, and numbers that are not finite: in the first programs, not by chance."""
    op, new, is_wrong = OF_FEW_CALLS[name]
    search = Search(replaced_where(op, new, is_wrong), Promised())
    broken = search._first_broken(map(Case, calls_of(str(op))), ["keeps values"])
    assert broken is not None and broken[0] == "keeps values"


def test_the_report_runs_alone() -> None:
    with pytest.raises(LawBroken) as caught:
        check_transform(cosine_for_sine, max_examples=0)
    script = (
        str(caught.value).partition("To see it again:\n")[2].replace(f"from {__name__} import cosine_for_sine\n", "")
    )
    with pytest.raises(LawBroken, match="keeps values"):
        exec(script, {"cosine_for_sine": cosine_for_sine})
    exec(script, {"cosine_for_sine": lambda trace: trace})


def without_alpha(trace: Trace) -> Trace:
    """Wrong for one argument of one op, which its code names."""

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        if equation.op.name == "aten.sub.Tensor":
            equation = replace(equation, kwargs=())
        return put(builder, equation, operands)

    return rewritten(trace, rewrite)


def with_one_draw(trace: Trace) -> Trace:
    """A cse that merges draws of random numbers."""
    known: dict[Any, Any] = {}

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        if not ops.is_random(equation.op):
            return put(builder, equation, operands)
        key = (equation.op, equation.args, equation.kwargs)
        return known[key] if key in known else known.setdefault(key, put(builder, equation, operands))

    return rewritten(trace, rewrite)


def with_another_body(trace: Trace) -> Trace:
    """Wrong where a loop has four equations: the operands of a difference are exchanged."""

    def of(equation: Equation) -> Equation:
        body = equation.bodies[0]
        if len(body.equations) < 4:
            return equation
        new = [replace(e, args=e.args[::-1]) if e.op.name == "aten.sub.Tensor" else e for e in body.equations]
        return replace(equation, bodies=(replace(body, equations=tuple(new)),))

    return replace(trace, equations=tuple(of(e) if e.op.name == "scan" else e for e in trace.equations))


def with_a_loop_beside_four(trace: Trace) -> Trace:
    """Wrong where a loop stands beside four equations: it runs backwards."""
    if len(trace.equations) != 5:
        return trace
    turned = lambda kwargs: tuple((key, Literal(not v.value) if key == "reverse" else v) for key, v in kwargs)
    return replace(
        trace,
        equations=tuple(replace(e, kwargs=turned(e.kwargs)) if e.op.name == "scan" else e for e in trace.equations),
    )


def with_a_narrow_sum(trace: Trace) -> Trace:
    """Sums that are asked for in double precision are added up in single, and converted then."""
    op = ops.leaf(torch.ops.aten.sum.dim_IntList)

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        types = [var.type for var in (*equation.operands, *equation.outputs)]
        dtypes = [one.dtype for one in types if isinstance(one, TensorType)]
        if equation.op != op or dtypes != [torch.float32, torch.float64]:
            return put(builder, equation, operands)
        narrow = replace(types[-1], dtype=torch.float32)
        found = builder.add(op, (operands[0], *equation.args[1:]), (narrow,))
        wide = (("dtype", Literal(torch.float64)),)
        return builder.add(ops.leaf(torch.ops.aten._to_copy.default), found, (types[-1],), kwargs=wide)

    return rewritten(trace, rewrite)


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (without_alpha, "keeps values"),
        (with_a_narrow_sum, "keeps values"),
        (with_one_draw, "merges no draws"),
        (with_another_body, "keeps values"),
        (with_a_loop_beside_four, "keeps values"),
    ],
)
def test_bugs_that_random_traces_rarely_show(wrong: Any, law: str) -> None:
    with pytest.raises(LawBroken, match=f'breaks the law "{law}"'):
        check_transform(wrong, max_examples=0)


def without(name: str, place: int, value: Any) -> Any:
    """The transform that gives an argument of an op another value."""

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        if equation.op.name == name and len(equation.args) > place:
            args = (*equation.args[:place], value, *equation.args[place + 1 :])
            equation = replace(equation, args=args)
        return put(builder, equation, operands)

    return lambda trace: rewritten(trace, rewrite)


def merged_by(key: Any) -> Any:
    """A cse of one's own, by a key of an equation and its operands."""

    def transform(trace: Trace) -> Trace:
        known: dict[Any, Any] = {}

        def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
            if any(ops.is_random(e.op) for e in (equation, *(e for b in equation.bodies for e in b.equations))):
                return put(builder, equation, operands)
            found = key(equation, operands)
            return known[found] if found in known else known.setdefault(found, put(builder, equation, operands))

        return rewritten(trace, rewrite)

    return transform


def without_bound(trace: Trace) -> Trace:
    """Wrong: a loop forgets `max_steps`."""
    plain = lambda e: replace(e, kwargs=tuple((k, Literal(None) if k == "max_steps" else v) for k, v in e.kwargs))
    return replace(trace, equations=tuple(map(plain, trace.equations)))


def effects_exchanged(trace: Trace) -> Trace:
    """Wrong: two calls of Python beside each other change places."""
    first, second = trace.equations[:2]
    both = (second, first) if first.op == second.op and first.op.name == EFFECT else (first, second)
    return replace(trace, equations=(*both, *trace.equations[2:]))


def test_effects_beside_each_other_are_kept_in_order() -> None:
    law, case = laws_of_transform(effects_exchanged, Promised())["keeps effects"], Case(EFFECTS[0])
    assert "in another order" in str(counterexample_in(law, case))


def without_rows(trace: Trace) -> Trace:
    """Wrong where a product that is broadcast is added."""
    made = {e.outputs[0] for e in trace.equations if e.op.name == "aten.mul.Tensor"}

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        rows = [var in made and var.type != equation.outputs[0].type for var in equation.operands]
        if equation.op.name == "aten.add.Tensor" and any(rows):
            return builder.add(equation.op, (operands[rows.index(False)],) * 2, equation.output_types)
        return put(builder, equation, operands)

    return rewritten(trace, rewrite)


def without_keywords_of_constants(trace: Trace) -> Trace:
    """Wrong: a loop's equations on what is the same in each step lose their keyword arguments."""

    def of(loop: Equation) -> Equation:
        same = loop.bodies[0].inputs[: loop.literals["num_consts"]]
        plain = [
            replace(e, kwargs=()) if e.operands and {*e.operands} <= {*same} else e for e in loop.bodies[0].equations
        ]
        return replace(loop, bodies=(replace(loop.bodies[0], equations=tuple(plain)),))

    return replace(trace, equations=tuple(of(e) if e.op.name == "scan" else e for e in trace.equations))


def merged_branches(alike: Any) -> Any:
    """A transform that takes the first branch of a switch for all, wrongly for some."""

    def of(e: Equation) -> Equation:
        return replace(e, bodies=e.bodies[:1] * len(e.bodies)) if e.op.name == "switch" and alike(e.bodies) else e

    return lambda trace: replace(trace, equations=tuple(map(of, trace.equations)))


def permuted_once(trace: Trace) -> Trace:
    """Wrong: of two permutations in a row, the second comes first."""
    makers = {var: e for e in trace.equations for var in e.outputs}

    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        inner = makers.get(equation.operands[0]) if equation.op.name == "aten.permute.default" else None
        if inner is None or inner.op != equation.op:
            return put(builder, equation, operands)
        first, second = (python_args(e, str)[0][1] for e in (inner, equation))
        return builder.add(
            equation.op, (inner.operands[0], tuple(Literal(second[dim]) for dim in first)), equation.output_types
        )

    return rewritten(trace, rewrite)


def fused(name: str, arguments: Any) -> Any:
    """The transform that makes one call of two in a row, with arguments made of both; None for those
    that it leaves.
    """

    def transform(trace: Trace) -> Trace:
        makers = {var: e for e in trace.equations for var in e.outputs}
        known: dict[Any, Any] = {}

        def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
            known.update(zip(equation.operands, operands, strict=True))
            inner = makers.get(equation.operands[0]) if equation.op.name == name else None
            if inner is None or inner.op != equation.op or inner.operands[0] not in known:
                return put(builder, equation, operands)
            new = arguments(*(python_args(e, lambda var: var)[0] for e in (inner, equation)))
            if new is None or equation.kwargs or inner.kwargs:
                return put(builder, equation, operands)
            args = (known[inner.operands[0]], *map(as_arg, new))
            return builder.add(equation.op, args, equation.output_types)

        return rewritten(trace, rewrite)

    return transform


def _unclamped(first: list[Any], second: list[Any]) -> Any:
    """Wrong: `x[a:b][c:d]` as `x[a + c : a + d]`, which may end behind b."""
    if not len(first) == len(second) == 4 or first[1] != second[1] or None in (*first, *second):
        return None
    (_, dim, a, b), (_, _, c, d) = first, second
    return (dim, a + c, a + d) if min(a, b, c, d) >= 0 else None


def _dims_of_the_whole(first: list[Any], second: list[Any]) -> Any:
    """Wrong: dims below 0 of a sum of a sum, counted from the end of the first operand."""
    if len(first) != 2 or len(second) != 2 or not first[1] or not second[1]:
        return None
    rank = len(first[0].type.shape)
    gone = {dim % rank for dim in first[1]}
    rest = [dim for dim in range(rank) if dim not in gone]
    own = {dim % rank if dim < 0 else rest[dim] for dim in second[1]}
    return [sorted(gone | own)]


def _turned_as_one(first: list[Any], second: list[Any]) -> Any:
    """Wrong: two shifts along any two dims as one."""
    if len(first) != 3 or len(second) != 3 or len(first[1]) != 1 or len(second[1]) != 1:
        return None
    return ([first[1][0] + second[1][0]], first[2]) if {*first[2]} != {*second[2]} else None


def exchanged_deep(trace: Trace, depth: int = 0) -> Trace:
    """Wrong: in the second branch of a choice that is inside of two more equations, differences are
    turned around.
    """

    def of(e: Equation) -> Equation:
        bodies = [exchanged_deep(body, depth + 1) for body in e.bodies]
        if e.op == COND and depth >= 2:
            new = (replace(q, args=q.args[::-1]) if q.op == DIFFERENCE else q for q in bodies[1].equations)
            bodies[1] = replace(bodies[1], equations=tuple(new))
        return replace(e, bodies=tuple(bodies))

    return replace(trace, equations=tuple(map(of, trace.equations)))


def constants_exchanged(trace: Trace, path: tuple[str, ...] = ()) -> Trace:
    """Wrong: a loop inside of a loop reads its constants in another order."""

    def of(e: Equation) -> Equation:
        bodies = tuple(constants_exchanged(body, (*path, e.op.name)) for body in e.bodies)
        new = replace(e, bodies=bodies)
        if e.op.name == "scan" and "while_loop" in path and e.literals["num_consts"] == 2:
            a, b, *rest = e.args
            new = replace(new, args=(b, a, *rest)) if e.operand_types[0] == e.operand_types[1] else new
        return new

    return replace(trace, equations=tuple(map(of, trace.equations)))


def one_of_each_type(trace: Trace) -> Trace:
    """Wrong: constants of the trace's own are one if their types are."""
    first: dict[Any, Any] = {}
    own = {c.var: first.setdefault(c.var.type, c.var) for c in trace.constants if c.owned}
    return replace(trace, equations=tuple(e.reading(lambda var: own.get(var, var)) for e in trace.equations))


def converted_once(trace: Trace) -> Trace:
    """Wrong: a conversion that loses digits is left out before another one."""
    makers = {var: e for e in trace.equations for var in e.outputs}
    is_cast = lambda e: e is not None and e.op == ops.leaf(torch.ops.aten._to_copy.default)
    inner = lambda e: makers.get(e.operands[0]) if is_cast(e) else None
    joined = lambda e: replace(e, args=inner(e).args) if is_cast(inner(e)) else e  # type: ignore[union-attr]
    return replace(trace, equations=tuple(map(joined, trace.equations)))


def test_digits_that_a_conversion_loses_are_missed() -> None:
    """Of integers: -3 is 253 in uint8, and 2**24 + 1 is no float32. Of floats, "precision" and "bits" tell."""
    law, seen = laws_of_transform(converted_once, Promised())["keeps values"], set[tuple[torch.dtype, ...]]()
    for program in conversions_of(["aten._to_copy.default"]):
        case = Case(program)
        if counterexample_in(law, case):
            seen.add((program.inputs[0].dtype, case.trace.equations[-2].outputs[0].type.dtype))  # type: ignore[union-attr]
    assert {
        (torch.int8, torch.uint8),
        (torch.int32, torch.float32),
        (torch.int64, torch.float64),
        (torch.float64, torch.int64),
    } <= seen


def _leaves_of(body: Trace) -> tuple[Any, ...]:
    return tuple((e.op, e.args) for e in body.equations)


def _numbers(e: Equation) -> list[Any]:
    """The arguments as Python compares them: 1, 1.0 and True are one."""
    return [tuple(arg) if isinstance(arg, list) else arg for arg in python_args(e, str)[0]]


IN_ORDER = COUSINS[: 2 * len(NESTS)]
NESTED_COUSINS = [program for program in COUSINS if program.steps[0].bodies[0].steps[0].bodies]


@pytest.mark.parametrize(
    ("wrong", "programs"),
    [
        (without_bound, BOUNDED),
        (without_rows, BROADCAST),
        (without_keywords_of_constants, INSIDE),
        (
            without("aten.convolution.default", 5, (Literal(1), Literal(1))),
            partial(calls_of, "aten.convolution.default"),
        ),
        (without("aten.avg_pool2d.default", 4, Literal(False)), partial(calls_of, "aten.avg_pool2d.default")),
        (merged_branches(lambda bodies: bodies[0] == bodies[1]), CASES),
        (merged_branches(lambda bodies: len({body.equations for body in bodies}) == 1), CASES),
        (permuted_once, partial(pairs_of, ["aten.permute.default"])),
        (without("aten.flip.default", 1, (Literal(0),)), partial(pairs_of, ["aten.flip.default"])),
        (fused("aten.sum.dim_IntList", _dims_of_the_whole), partial(pairs_of, ["aten.sum.dim_IntList"])),
        (fused("aten.roll.default", _turned_as_one), partial(pairs_of, ["aten.roll.default"])),
        (exchanged_deep, partial(deep_nests, ())),
        (constants_exchanged, partial(deep_nests, ("while_loop", "scan"))),
        (one_of_each_type, partial(on_constants, ["aten.neg.default"])),
        (one_of_each_type, CONSTANTS),
        (merged_by(lambda e, xs: (e.op, *xs, e.output_types, e.kwargs, str(e.args))), COUSINS),
        (merged_by(lambda e, xs: (e.op, *xs, e.output_types, e.bodies, str(e.args))), COUSINS),
        (merged_by(lambda e, xs: (e.op, frozenset(xs), e.output_types, e.kwargs, e.bodies)), SWAPPED),
        (merged_by(lambda e, xs: (e.op, frozenset(xs), e.kwargs) if e.op.name == "aten.add.Tensor" else e), SWAPPED),
        (merged_by(lambda e, xs: (e.op, *xs, tuple(map(_leaves_of, e.bodies)), e.kwargs, str(e.args))), NESTED_COUSINS),
        (merged_by(lambda e, xs: (e.op, *xs, e.kwargs, str(e.args), e.bodies[1:], len(e.bodies))), IN_ORDER),
        (merged_by(lambda e, xs: (e.op, *xs, e.kwargs, str(e.args), e.bodies[:1])), IN_ORDER),
        (merged_by(lambda e, xs: (e.op, *xs, e.output_types, str(e.args))), partial(cousins_of_leaves, ())),
        (
            merged_by(lambda e, xs: (e.op, *xs, e.output_types, hash((e.args[1:], e.kwargs)))),
            partial(cousins_of_leaves, ()),
        ),
        (merged_by(lambda e, xs: (e.op, *xs, e.output_types, e.kwargs)), partial(cousins_of_leaves, ())),
        (
            merged_by(lambda e, xs: (e.op, *xs, str(python_args(e, str)[1]), *_numbers(e))),
            partial(cousins_of_leaves, ()),
        ),
    ],
    ids=[
        "max_steps",
        "rows",
        "keywords in loops",
        "dilation",
        "ceil_mode",
        "two branches",
        "results of branches",
        "permutations",
        "dims",
        "sums of sums",
        "turns",
        "deep branches",
        "constants of deep loops",
        "own constants of an op",
        "own constants",
        "bodies",
        "options",
        "order",
        "order of sums with alpha",
        "nests",
        "first bodies",
        "other bodies",
        "keywords",
        "one hash",
        "arguments",
        "numbers",
    ],
)
def test_programs_made_on_purpose_show(wrong: Any, programs: Any) -> None:
    cases = [Case(program) for program in (programs() if callable(programs) else programs)]
    law, held = (laws_of_transform(f, Promised())["keeps values"] for f in (wrong, lambda trace: trace))
    assert any(counterexample_in(law, case) for case in cases)
    assert not any(counterexample_in(held, case) for case in cases[:6])


def test_one_op_reads_another_as_each_operand_and_with_each_argument() -> None:
    """A fusion of `x + alpha * (y * z)` that forgets alpha has to be seen."""
    made = [Case(program).trace.equations for program in pairs_of(["aten.add.Tensor", "aten.mul.Tensor"])]
    places = {
        (place, dict(second.kwargs).get("alpha"))
        for first, second in (equations for equations in made if len(equations) == 2)
        for place, arg in enumerate(second.args)
        if (first.op.name, second.op.name) == ("aten.mul.Tensor", "aten.add.Tensor") and arg == first.outputs[0]
    }
    assert {(0, None), (1, None), (0, Literal(2)), (1, Literal(2)), (1, Literal(-1))} <= places


def test_every_program_made_on_purpose_is_a_trace() -> None:
    """A program that cannot be built is passed over, so nobody would miss it."""
    programs = (*DRAWS, *CONSTANTS, *DEAD, *COUSINS, *SWAPPED, *two_deep(), *deep_nests(()))
    for program in programs:
        assert Case(program).trace.outputs
    assert len({str(Case(program).trace) for program in two_deep()}) == 100


def test_a_kernel_that_gives_another_type_than_its_rule_is_no_program() -> None:
    """PyTorch says `int64` of a bool to the power of True, and computes a bool; a body takes no such value."""
    power = Step("aten.pow.Tensor_Scalar", (0, [one is True for one in NUMBERS].index(True)))
    types = (TensorType(torch.bool, (2,)),)
    for name in ("composite", "checkpoint"):
        assert not runs(Program(types, (power, Step(name, (0, 0, 0), (Program((), (Step("neg"),)),)))))


def test_dims_from_the_end_are_drawn_together() -> None:
    calls = [Case(program).trace.equations[-1].args[1] for program in calls_of("aten.logsumexp.default")]
    assert (Literal(-2), Literal(-1)) in calls


def test_recorded_calls_have_other_values_in_several_places() -> None:
    """A target that is left out shows where losses are neither weighted nor added up."""
    calls = [Case(program).trace.equations[-1].args[2:] for program in calls_of("aten.nll_loss_forward.default")]
    assert (Literal(None), Literal(0), Literal(1)) in calls


def test_samples_are_calls_whose_arguments_fit() -> None:
    """A few of each kind; `python -m tests.ops.recorded` keeps those that can be drawn only."""
    names = ["convolution", "embedding", "max_pool2d_with_indices", "native_group_norm", "nll_loss_forward"]
    for name in names:
        found = [program for _, program in calls_of_samples(f"aten.{name}.default")]
        assert len(found) == len(samples()[f"aten.{name}.default"]) > 1
        case = Case(found[0])
        assert evaluate(case.trace, case.inputs)


def test_lost_lines_are_found() -> None:
    law = laws_of_transform(without_lines, Promised(keeps="nothing"))["has lines"]
    case = Case(Program((VECTOR, VECTOR), CHAIN))
    assert "without its lines" in str(counterexample_in(law, case))


def without_lines(trace: Trace) -> Trace:
    return replace(trace, equations=tuple(replace(e, source=None) for e in trace.equations))


def test_a_result_that_is_no_trace_is_an_error_that_says_so() -> None:
    with pytest.raises(LawBroken, match="the transform returned tuple, not a Trace"):
        check_transform(lambda trace: (trace,), keeps="nothing", max_examples=0)  # type: ignore[arg-type,return-value]


def test_the_report_says_what_was_not_tried() -> None:
    def rare(trace: Trace) -> Trace:
        if len(trace.equations) == 1000:
            return trace.renamed("never")
        return trace

    found = check_transform(rare, keeps="nothing", ops=["sub"], max_examples=4)
    said = str(found)
    assert "aten.sub.Tensor" in found.vocabulary and found.ops["aten.sub.Tensor"] > 3
    assert "aten.sub.Tensor alpha=2" in found.arguments
    assert [line.partition(": ")[2] for line in found.never_ran] == ['return trace.renamed("never")']
    assert "lines of the transform that never ran" in said and "scan" in found.nestings
    assert "`len(trace.equations) == 1000` was never true" in said and "traces=[tfn.trace(f, *arguments)]" in said


def without_rare(trace: Trace) -> Trace:
    """Wrong for an op that its code does not name."""

    def step(builder: Any, equation: Any, operands: Any) -> Any:
        return operands if equation.op.name.endswith("rfinv.default") else put(builder, equation, operands)

    return rewritten(trace, step)


def test_a_trace_of_the_users_own_is_cut_to_its_beginning() -> None:
    whole = tfn.trace(lambda x: torch.erfinv(x.sin()).cos().exp(), torch.full((3,), 0.5))
    with pytest.raises(LawBroken, match="keeps values") as caught:
        check_transform(without_rare, traces=[whole], max_examples=0)
    said = str(caught.value)
    assert "reproduce(Given(traces[0], 2), 'keeps values')(without_rare)" in said and "aten.cos" not in said
    with pytest.raises(LawBroken, match="keeps values"):
        reproduce(Given(whole, 2, (torch.full((3,), 0.5),)), "keeps values")(without_rare)


def test_a_law_that_no_trace_could_break_says_so() -> None:
    coverage = Coverage()
    coverage.applied.update({"keeps values": 0, "is pure": 3})
    assert "laws that no trace could break: keeps values" in str(coverage)


def dropped(op: str) -> Any:
    """The transform that drops an op and hands on its operand."""
    return lambda trace: rewritten(trace, lambda b, e, xs: xs if e.op.name == op else put(b, e, xs))


def test_a_copy_that_is_dropped_shares_memory() -> None:
    with pytest.raises(LawBroken, match="keeps shared memory"):
        check_transform(dropped("aten.clone.default"), max_examples=0)


def without_zero(trace: Trace) -> Trace:
    """Wrong: `x + 0.0` of integers is floating, and `x + 0` is a copy."""
    sums = (ops.leaf(ops.aten.add.Tensor), Literal(0)), (ops.leaf(ops.aten.add.Tensor), Literal(0.0))
    return rewritten(trace, lambda b, e, xs: xs if (e.op, *e.args[1:]) in sums else put(b, e, xs))


def without_rules(trace: Trace) -> Trace:
    """Wrong: a function with a derivative of its own is inlined."""
    ruled = ("custom_vjp", "custom_jvp", "custom_vmap")
    inline = lambda b, e, xs: inline_into(b, e.bodies[0], xs) if e.op.name in ruled else put(b, e, xs)
    return rewritten(trace, inline)


def without_rules_in_branches(trace: Trace) -> Trace:
    """Wrong: the same in the branches of a choice alone."""
    of = lambda e: replace(e, bodies=tuple(map(without_rules, e.bodies))) if e.op == COND else e
    return replace(trace, equations=tuple(map(of, trace.equations)))


def without_not(trace: Trace) -> Trace:
    """Wrong: the branches stay in their order where the negation of a predicate goes."""
    makers = {e.outputs[0]: e for e in trace.equations if e.op.name == "aten.logical_not.default"}
    of = lambda e: replace(e, args=(makers[e.args[0]].args[0], *e.args[1:])) if e.args[0] in makers else e
    return replace(trace, equations=tuple(of(e) if e.op == COND else e for e in trace.equations))


def without_not_around_nests(trace: Trace) -> Trace:
    """Wrong: the branches are exchanged where the negation of a predicate goes, but not if they have bodies inside."""
    flat = without_not(trace)
    of = lambda old, new: replace(new, bodies=new.bodies[::-1]) if old != new and not _is_nest(new) else new
    return replace(flat, equations=tuple(map(of, trace.equations, flat.equations)))


def _is_nest(equation: Equation) -> bool:
    return any(inner.bodies for body in equation.bodies for inner in body.equations)


def choices_by_sign(trace: Trace) -> Trace:
    """Wrong: numbers below 0 are true, too."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op != COND or e.operand_types[0] == TensorType(torch.bool, ()):
            return put(builder, e, operands)
        truth = (TensorType(torch.bool, ()),)
        positive = builder.add(ops.leaf(ops.aten.gt.Scalar), (operands[0], Literal(0)), truth)
        return put(builder, e, (*positive, *operands[1:]))

    return rewritten(trace, step)


def first_equations_of_both(trace: Trace) -> Trace:
    """Wrong: the second branch begins as the first one does, whatever its arguments are."""

    def of(e: Equation) -> Equation:
        if e.op != COND or not all(body.equations for body in e.bodies):
            return e
        one, two = (body.equations[0] for body in e.bodies)
        if (one.op, one.operands, one.output_types) != (two.op, two.operands, two.output_types):
            return e
        second = replace(two, args=one.args, kwargs=one.kwargs)
        body = replace(e.bodies[1], equations=(second, *e.bodies[1].equations[1:]))
        return replace(e, bodies=(e.bodies[0], body))

    return replace(trace, equations=tuple(map(of, trace.equations)))


def scalars_written(trace: Trace) -> Trace:
    """Wrong: a scalar that is closed over becomes a literal, and would not change any more."""
    known = {c.var: c.tensor for c in trace.constants if c.tensor.dim() == 0}

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.name != "aten.mul.Tensor" or not {*e.operands[1:]} & known.keys():
            return put(builder, e, operands)
        number = Literal(known[e.operands[1]].item())
        return builder.add(ops.leaf(ops.aten.mul.Scalar), (operands[0], number), e.output_types)

    return rewritten(trace, step)


def effects_last(trace: Trace) -> Trace:
    """Wrong: calls of Python go behind those in bodies."""
    late = [e for e in trace.equations if e.op.name == EFFECT]
    return replace(trace, equations=(*(e for e in trace.equations if e not in late), *late))


def carries_in_any_order(trace: Trace) -> Trace:
    """Wrong: a carry that is handed on to another one counts as one that stays."""

    def of(loop: Equation) -> Equation:
        if loop.op.name != "scan":
            return loop
        body, start, count = loop.body, loop.literals["num_consts"], loop.literals["num_carry"]
        carry = body.inputs[start : start + count]
        outputs = [v if v in body.outputs[:count] else out for v, out in zip(carry, body.outputs, strict=False)]
        return replace(loop, bodies=(replace(body, outputs=(*outputs, *body.outputs[count:])),))

    return replace(trace, equations=tuple(map(of, trace.equations)))


def without_unread_carries(trace: Trace) -> Trace:
    """Wrong: a carry whose result nobody reads stays as it is, though another one depends on it."""
    read = {v for e in trace.equations for v in e.operands} | {*trace.outputs}

    def of(loop: Equation) -> Equation:
        if loop.op.name != "scan":
            return loop
        body, start, count = loop.body, loop.literals["num_consts"], loop.literals["num_carry"]
        carry = (*body.inputs[start : start + count], *body.outputs[count:])
        new = [v if var not in read else out for v, var, out in zip(carry, loop.outputs, body.outputs, strict=True)]
        return replace(loop, bodies=(replace(body, outputs=tuple(new)),))

    return replace(trace, equations=tuple(map(of, trace.equations)))


def empty_loops_run_once(trace: Trace) -> Trace:
    """Wrong: a loop of no steps is written out as one step."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        is_empty = e.op.name == "scan" and e.literals["length"] == 0
        if not is_empty or e.literals["num_carry"] != len(e.outputs):
            return put(builder, e, operands)
        return inline_into(builder, e.body, operands)

    return rewritten(trace, step)


def read_in_order(trace: Trace) -> Trace:
    """Wrong: a structured op that reads all results of one of its kind reads them in their order."""
    makers = {var: e for e in trace.equations for var in e.outputs}

    def of(e: Equation) -> Equation:
        first = makers.get(e.operands[0]) if e.op.name in ("checkpoint", "call") else None
        is_same = first is not None and first.op == e.op and {*first.outputs} == {*e.args}
        return replace(e, args=first.outputs) if is_same and first is not None else e

    return replace(trace, equations=tuple(map(of, trace.equations)))


def constants_by_address(trace: Trace) -> Trace:
    """Wrong: a matrix and its transpose lie in one memory."""
    first: dict[Any, Any] = {}
    same = {c.var: first.setdefault((c.tensor.data_ptr(), c.var.type), c.var) for c in trace.constants}
    of = lambda e: replace(e, args=map_arg(lambda var: same.get(var, var), e.args))
    return replace(trace, equations=tuple(map(of, trace.equations)))


def without_contiguous(trace: Trace) -> Trace:
    """Wrong: a copy for the sake of the layout goes, and what is left is a view."""
    copies = lambda e: e.op.name == "aten.clone.default" and e.kwargs
    return rewritten(trace, lambda b, e, xs: xs if copies(e) else put(b, e, xs))


def without_formats(trace: Trace) -> Trace:
    """Wrong: who reads a copy may ask for its layout."""
    plain = lambda e: replace(e, kwargs=()) if e.op.name == "aten.clone.default" else e
    return replace(trace, equations=tuple(map(plain, trace.equations)))


def nests_by_name(trace: Trace) -> Trace:
    """Wrong: two structured ops beside each other are sorted, whatever they draw and show."""
    found = list(trace.equations)
    for place, (a, b) in enumerate(itertools.pairwise(trace.equations)):
        if a.bodies and b.bodies and a.op.name > b.op.name and not set(b.operands) & set(a.outputs):
            found[place : place + 2] = [b, a]
            return cut(trace, equations=found)
    return trace


def without_unread_draws_in_branches(trace: Trace) -> Trace:
    """Wrong: a branch draws no number that nothing in it reads."""
    dropped = lambda e: replace(e, bodies=tuple(map(not_drawn, e.bodies))) if e.op == COND else e
    return replace(trace, equations=tuple(map(dropped, trace.equations)))


def with_the_first_constraint(trace: Trace) -> Trace:
    """Wrong: the trace may have more constraints than one."""
    return replace(trace, constraints=trace.constraints[:1])


def sizes_written(trace: Trace) -> Trace:
    """Wrong: sizes in the shape of a reshape are those that the trace was made with."""

    def written(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(written, arg))
        return Literal(hint_of(arg.value)) if isinstance(arg, Literal) and isinstance(arg.value, Expr) else arg

    of = lambda e: replace(e, args=written(e.args)) if e.op.name == "aten.reshape.default" else e
    return replace(trace, equations=tuple(map(of, trace.equations)))


def test_sizes_among_arguments_are_variables() -> None:
    case = Sized("sizes among arguments")
    law, held = (laws_of_transform(f, Promised())["keeps values"] for f in (sizes_written, lambda trace: trace))
    held(case.trace, case.inputs)
    with pytest.raises(Exception, match="invalid for input"):
        law(case.trace, case.inputs)


def without_lines_in_bodies(trace: Trace) -> Trace:
    """Wrong: the equations of bodies lose their lines."""

    def bare(body: Trace) -> Trace:
        return replace(body, equations=tuple(replace(e, source=None) for e in body.equations))

    of = lambda e: replace(e, bodies=tuple(map(bare, e.bodies)))
    return replace(trace, equations=tuple(map(of, trace.equations)))


def calls_merged_in_loops(trace: Trace) -> Trace:
    """Wrong: equal calls in the bodies of loops are one, though they draw."""

    def merged(body: Trace) -> Trace:
        known: dict[Any, Any] = {}

        def step(builder: Any, e: Equation, operands: Any) -> Any:
            if not e.bodies:
                return put(builder, e, operands)
            key = (e.op, *operands, e.bodies, e.kwargs)
            return known[key] if key in known else known.setdefault(key, put(builder, e, operands))

        return rewritten(body, step)

    of = lambda e: replace(e, bodies=tuple(map(merged, e.bodies))) if e.op.name == "scan" else e
    return replace(trace, equations=tuple(map(of, trace.equations)))


def peeled(first: bool, row: int, least: int) -> Any:
    """Wrong: the first or last step of a loop is taken outside of it, on a certain row."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        options = dict(e.kwargs)
        if e.op.name != "scan" or e.literals["length"] < least or len(e.outputs) != e.literals["num_carry"]:
            return put(builder, e, operands)
        length, start = e.literals["length"], e.literals["num_consts"] + e.literals["num_carry"]
        consts, rows = operands[: e.literals["num_consts"]], operands[start:]
        types, aten = e.body.input_types[start:], ops.aten
        low, high = (1, length) if first else (0, length - 1)

        def alone(carry: Any) -> Any:
            own = [
                builder.add(ops.leaf(aten.select.int), (xs, Literal(0), Literal(row)), (type,))[0]
                for xs, type in zip(rows, types, strict=True)
            ]
            return inline_into(builder, e.body, (*consts, *carry, *own))

        def loop(carry: Any) -> Any:
            part = tuple(map(Literal, (0, low, high)))
            kinds = (replace(type, shape=(length - 1, *type.shape)) for type in types)
            own = [
                builder.add(ops.leaf(aten.slice.Tensor), (xs, *part), (kind,))[0]
                for xs, kind in zip(rows, kinds, strict=True)
            ]
            kwargs = tuple((options | {"length": Literal(length - 1)}).items())
            return builder.add(e.op, (*consts, *carry, *own), e.output_types, kwargs=kwargs, bodies=e.bodies)

        carry = operands[len(consts) : start]
        return loop(alone(carry)) if first else alone(loop(carry))

    return lambda trace: rewritten(trace, step)


def without_unread_constants(trace: Trace) -> Trace:
    """Wrong: as many constants of a loop stay as it reads, but the first ones."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.name != "scan":
            return put(builder, e, operands)
        count, body = e.literals["num_consts"], e.bodies[0]
        read = {var for one in body.equations for var in one.operands} | {*body.outputs}
        kept = [var for var in body.inputs[:count] if var in read]
        new = cut(body, inputs=(*kept, *body.inputs[count:]))
        kwargs = tuple((dict(e.kwargs) | {"num_consts": Literal(len(kept))}).items())
        operands = (*operands[: len(kept)], *operands[count:])
        return builder.add(e.op, operands, e.output_types, kwargs=kwargs, bodies=(new,))

    return rewritten(trace, step)


def two_steps_at_once(trace: Trace) -> Trace:
    """Wrong: the last step of an odd number is lost."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.name != "scan" or not e.literals["num_carry"] == len(e.outputs) == len(operands):
            return put(builder, e, operands)
        twice = TraceBuilder(e.body.name)
        xs = inline_into(twice, e.body, twice.take(e.body.input_types))
        body = twice.build(inline_into(twice, e.body, xs))
        kwargs = tuple((dict(e.kwargs) | {"length": Literal(e.literals["length"] // 2)}).items())
        return builder.add(e.op, operands, e.output_types, kwargs=kwargs, bodies=(body,))

    return rewritten(trace, step)


def one_draw_for_two(trace: Trace) -> Trace:
    """Wrong: one long draw for two of one type beside each other; PyTorch draws long ones in another way."""
    normal = ops.leaf(ops.aten.randn_like.default)
    first, second, *rest = (*trace.equations, None, None)
    if first is None or second is None or (first.op, second.op) != (normal, normal):
        return trace
    type = first.outputs[0].type
    if not isinstance(type, TensorType) or len(type.shape) != 1 or second.operands != first.operands:
        return trace
    builder = TraceBuilder(trace.name)
    env: dict[Any, Any] = dict(zip(trace.inputs, builder.take(trace.input_types), strict=True))
    (size,), x = type.shape, env[first.operands[0]]
    long = replace(type, shape=(2 * size,))
    (both,) = builder.add(ops.leaf(ops.aten.cat.default), ((x, x),), (long,))
    (both,) = builder.add(normal, (both,), (long,))
    for place, equation in enumerate((first, second)):
        part = (both, Literal(0), Literal(place * size), Literal((place + 1) * size))
        (half,) = builder.add(ops.leaf(ops.aten.slice.Tensor), part, (type,))
        env[equation.outputs[0]] = builder.add(ops.leaf(ops.aten.clone.default), (half,), (type,))[0]
    for equation in filter(None, rest):
        env.update(zip(equation.outputs, builder.copy(equation, env.__getitem__), strict=True))
    return builder.build(tuple(env[var] for var in trace.outputs))


def choices_as_products(trace: Trace) -> Trace:
    """Wrong where what is not chosen is infinite: `where(c, x, y)` is `c * x + (1 - c) * y`."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        types = e.output_types
        if e.op.name != "aten.where.self" or {*e.operand_types[1:]} != {*types} or types[0].dtype != torch.float64:
            return put(builder, e, operands)
        if e.operand_types[0].shape != types[0].shape:
            return put(builder, e, operands)
        aten, wide = ops.aten, (("dtype", Literal(torch.float64)),)
        add = lambda op, *args, **options: builder.add(ops.leaf(op), args, types, **options)[0]
        chosen = add(aten._to_copy.default, operands[0], kwargs=wide)
        first = add(aten.mul.Tensor, chosen, operands[1])
        second = add(aten.mul.Tensor, add(aten.rsub.Scalar, chosen, Literal(1)), operands[2])
        return (add(aten.add.Tensor, first, second),)

    return rewritten(trace, step)


def switch_as_cond(trace: Trace) -> Trace:
    """Wrong for indices below 0, which are the first branch's."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.name != "switch" or len(e.bodies) != 2:
            return put(builder, e, operands)
        truth = (TensorType(torch.bool, ()),)
        first = builder.add(ops.leaf(ops.aten.eq.Scalar), (operands[0], Literal(0)), truth)
        return builder.add(COND, (*first, *operands[1:]), e.output_types, bodies=e.bodies)

    return rewritten(trace, step)


def written_out(name: str, *parts: Any) -> Any:
    """A transform that writes an op of one operand as others in a row, right where nothing overflows."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.name != name or len(e.args) != 1:
            return put(builder, e, operands)
        for part in parts:
            operands = builder.add(ops.leaf(part), operands, e.output_types)
        return operands

    return lambda trace: rewritten(trace, step)


@pytest.mark.parametrize(
    ("wrong", "law", "programs"),
    [
        (peeled(True, 0, 1), "keeps values", LOOPS),
        (peeled(False, -2, 3), "keeps values", LOOPS),
        (two_steps_at_once, "keeps values", LOOPS),
        (without_unread_constants, "keeps values", LOOPS),
        (one_draw_for_two, "draws as many numbers", DRAWS),
        (
            written_out("aten.softplus.default", ops.aten.exp.default, ops.aten.log1p.default),
            "keeps values",
            partial(calls_of, "aten.softplus.default"),
        ),
        (switch_as_cond, "keeps values", CASES),
        (choices_as_products, "keeps values", partial(calls_of, "aten.where.self")),
        (without_zero, "keeps values", partial(calls_of, "aten.add.Tensor")),
        (without_zero, "keeps shared memory", partial(calls_of, "aten.add.Tensor")),
        *(
            (wrong, f"commutes with {name}", RULED[kind * len(RULED) // 3 : (kind + 1) * len(RULED) // 3])
            for wrong in (
                without_rules,
                without_rules_in_branches,
                merged_by(lambda e, xs: (e.op, *xs, e.bodies[0]) if e.op.kind == "structured" else e),
            )
            for kind, name in enumerate(("vjp", "jvp", "vmap"))
        ),
        (without_not, "keeps values", CASES),
        (without_not_around_nests, "keeps values", CASES),
        (choices_by_sign, "keeps values", CASES),
        (first_equations_of_both, "keeps values", CASES),
        (effects_last, "keeps effects", EFFECTS),
        (carries_in_any_order, "keeps values", LOOPS),
        (without_unread_carries, "keeps values", LOOPS),
        (empty_loops_run_once, "keeps values", LOOPS),
        (read_in_order, "keeps values", CHAINED),
        (constants_by_address, "keeps values", CONSTANTS),
        (scalars_written, "leaves closed-over tensors alone", CONSTANTS),
        (without_contiguous, "keeps shared memory", ALIASES),
        (without_formats, "keeps values", ALIASES),
        (nests_by_name, "draws in the same order", DRAWS),
        (nests_by_name, "keeps effects", EFFECTS),
        (without_unread_draws_in_branches, "draws as many numbers", DRAWS),
        (with_the_first_constraint, "carries facts", LOOPS[:1]),
        (without_lines_in_bodies, "has lines", LOOPS),
        (calls_merged_in_loops, "draws as many numbers", DRAWS),
    ],
)
def test_programs_made_on_purpose_break_the_law(wrong: Any, law: str, programs: Any) -> None:
    cases = list(map(Case, programs() if callable(programs) else programs))
    search = Search(wrong, Promised())
    assert any(search.error_of(law, case.trace, case.inputs) for case in cases)


def sums_of_one(trace: Trace) -> Trace:
    """Wrong: the sum of a single element has no dims."""

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        types = (*e.operand_types, *e.output_types)
        is_one = e.op.name == "aten.sum.default" and torch.Size(types[0].shape).numel() == 1
        if not is_one or types[0].dtype != types[1].dtype:
            return put(builder, e, operands)
        return builder.add(ops.leaf(ops.aten.clone.default), operands, types[:1])

    return rewritten(trace, step)


def without_squeezes(trace: Trace) -> Trace:
    """Wrong: what adds a dim and what removes one cancel, whichever dims they are."""
    makers = {var: e for e in trace.equations for var in e.outputs}

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        inner = makers.get(e.operands[0]) if e.op.name == "aten.squeeze.dim" else None
        if inner is None or inner.op.name != "aten.unsqueeze.default":
            return put(builder, e, operands)
        x = known[inner.outputs[0]]
        return [x] if len(x.type.shape) == len(e.outputs[0].type.shape) else put(builder, e, operands)

    def noting(builder: Any, e: Equation, operands: Any) -> Any:
        known.update({e.outputs[0]: operands[0]} if e.op.name == "aten.unsqueeze.default" else {})
        return step(builder, e, operands)

    known: dict[Any, Any] = {}
    return rewritten(trace, noting)


@pytest.mark.parametrize(
    "wrong", [sums_of_one, without_squeezes, fused("aten.amax.default", _dims_of_the_whole)], ids=["1", "2", "3"]
)
def test_drawn_programs_of_what_the_code_names_show(wrong: Any) -> None:
    """Several conditions together are reached by the branches of the code, and by what it changes."""
    broken = Search(wrong, Promised()).on_drawn()
    assert broken is not None and broken[0] in ("keeps values", "gives checked traces")


def test_the_same_arguments_are_drawn_with_other_values() -> None:
    """Of a program that a transform changes, programs are drawn that it changes too."""
    slices, rng = "aten.slice.Tensor", random.Random(0)
    chain = Program((TensorType(torch.float64, (4,)),), (Step(slices, (0, 0, 2, 5)),) * 2)
    law = laws_of_transform(fused(slices, _unclamped), Promised())["keeps values"]
    assert counterexample_in(law, Case(chain)) is None
    cases = [Case(redrawn(chain, rng, (slices,), ())) for _ in range(200)]
    assert any(counterexample_in(law, case) for case in cases if runs(case.program))


def test_a_drawn_call_reads_what_is_newest_as_any_operand() -> None:
    """A quotient by a sum is read by fusions; the sum has another type than the first operand."""
    steps = Step("aten.sum.dim_IntList", (0, 1)), Step("aten.div.Tensor", (1, MOST_PICKS - 1))
    first, second = Case(Program((TensorType(torch.float64, (2, 3)),), steps)).trace.equations
    assert second.args == (first.args[0], first.outputs[0])


def without_padding(trace: Trace) -> Trace:
    """Wrong: the values of an embedding do not depend on `padding_idx`, and gradients do."""
    plain = lambda e: replace(e, args=e.args[:2]) if e.op.name == "aten.embedding.default" else e
    return replace(trace, equations=tuple(map(plain, trace.equations)))


def test_an_argument_of_a_recorded_call_shows_beside_defaults() -> None:
    search, law = Search(without_padding, Promised()), "commutes with vjp"
    cases = [Case(program) for program in calls_of("aten.embedding.default")]
    assert any(search.error_of(law, case.trace, case.inputs) for case in cases)


def test_nothing_is_drawn_for_a_transform_that_does_nothing() -> None:
    search = Search(lambda trace: trace, Promised())
    assert search.on_drawn() is None and search.coverage.traces < 2 * MOST_IDLE


def test_searches_go_on_side_by_side() -> None:
    """None waits for another one to end, and each has its part of the work."""
    cases = [iter([Case(Program(), place)] * 12 + [None] * 12) for place in range(3)]
    shares = [Share(part, 5.0, cases[place], str(place)) for place, part in enumerate((4, 2, 1))]
    tried = list(in_shares(shares))
    assert [name for _, name in tried[:14]].count("0") == 8 and {name for _, name in tried[:3]} == {"0", "1", "2"}
    assert len(tried) == 36


@pytest.mark.parametrize(("transform", "count"), [(lambda trace: trace, 0), (TRANSFORMS["checkpoint"], 1)])
def test_values_are_compared_where_the_trace_changes(transform: Any, count: int) -> None:
    search, case = Search(transform, Promised()), Case(Program((VECTOR,), (Step("sin"),)))
    assert search.error_of("keeps values", case.trace, case.inputs) is None
    assert search.coverage.applied["keeps values"] == count


def test_what_pytorch_gives_types_for_and_does_not_compute_breaks_no_law() -> None:
    """Its `sub` has a type with `alpha=True`, and refuses to compute it on floats."""
    (differences,) = (one for one in USERS if one.__name__ == "differences_as_sums")
    case = Case(Program((VECTOR,), (Step("aten.sub.Tensor", (0, 0, 5)),)))
    assert "alpha=True" in str(case.trace)
    search = Search(differences, Promised())
    assert [search.error_of(law, case.trace, case.inputs) for law in search.laws] == [None] * len(search.laws)


def test_an_overload_that_the_code_names_is_no_other() -> None:
    """Names of the package, such as `put`, are ops of ATen, too: they took the place of what the code is about."""
    assert vocabulary(permuted_once) == ("aten.permute.default",)
    of_one = vocabulary(lambda trace: put(trace, ops.aten.mul.Scalar, ops.aten.amax))
    assert of_one == ("aten.amax.default", "aten.mul.Scalar")
    of_a_local = vocabulary(lambda trace, aten: put(trace, aten.amax))
    assert of_a_local == ("aten.amax.default",)


def report_of(wrong: Any, law: str, program: Program) -> str:
    with pytest.raises(LawBroken) as caught:
        reproduce(program, law)(wrong)
    return str(caught.value)


def with_wrong_constants(trace: Trace) -> Trace:
    """Wrong in a digit that nobody prints, in bodies."""

    def of(body: Trace) -> Trace:
        constants = tuple(replace(c, tensor=c.tensor * (1 + 1e-7)) for c in body.constants)
        return replace(body, constants=constants)

    return replace(trace, equations=tuple(replace(e, bodies=tuple(map(of, e.bodies))) for e in trace.equations))


def test_a_report_shows_values_that_look_alike() -> None:
    """The texts of the traces are equal, and so are four digits of the values."""
    said = report_of(with_wrong_constants, "keeps values", nested("checkpoint", (Step("owned_constant"), Step("sin"))))
    constants = said.partition("Constants have other values:\n")[2].splitlines()[0]
    assert constants.startswith("  v1: [0.5, 1.5, -2.0], torch.float64 became [0.50000005, 1.50000015, -2.0000002]")
    have, want = said.partition("value 2 is\n")[2].splitlines()[:3:2]
    assert have != want and have.startswith("[0.479") and want.startswith("[0.479")


def test_a_report_shows_numbers_that_are_not_finite() -> None:
    """They are compared as codes, which the report showed: "should be tensor([1., 1.])"."""
    program = Program((VECTOR,), (Step("aten.log.default"), Step("exp")))
    said = report_of(without_logarithms, "keeps values", program)
    assert "but should be\ntensor([nan, nan], dtype=torch.float64)" in said


def without_logarithms(trace: Trace) -> Trace:
    """Wrong for negative numbers: `exp(log(x))` is x."""
    makers = {e.outputs[0]: e for e in trace.equations}
    logs = lambda e: e.op.name == "aten.exp.default" and makers[e.operands[0]].op.name == "aten.log.default"
    equations = tuple(
        replace(e, op=ops.leaf(ops.aten.clone.default), args=makers[e.operands[0]].args) if logs(e) else e
        for e in trace.equations
    )
    return replace(trace, equations=equations)


def without_literals(trace: Trace) -> Trace:
    """Wrong: a cse whose key has no tuples."""
    known: dict[Any, Any] = {}

    def step(builder: Any, e: Equation, operands: Any) -> Any:
        if e.op.kind != "leaf" or ops.is_random(e.op):
            return put(builder, e, operands)
        key = (e.op, *operands, *(arg for arg in e.args if isinstance(arg, Literal)), e.kwargs)
        return known[key] if key in known else known.setdefault(key, put(builder, e, operands))

    return rewritten(trace, step)


def test_a_report_shows_which_equations_of_the_composed_trace_go_wrong() -> None:
    said = report_of(without_literals, "commutes with vmap", steps_alone("while_loop")[1]).split("\n\n")
    assert "becomes" not in said and said[2] == "vmap makes of it" and said[4] == "of which without_literals makes"
    part, new, what = (said[said.index("The equations of it that without_literals gets wrong:") + i] for i in (1, 3, 4))
    assert len(part.splitlines()) == 5 and part.count("aten.reshape.default(v0, ") == 2
    assert new.count("aten.reshape.default(v0, ") == 1 and what.startswith("the outputs' types changed: output 1 is ")


def refuses_second(trace: Trace) -> Trace:
    if len(trace.inputs) == 2:
        raise NotImplementedError("two inputs")
    return trace


def test_a_report_says_where_in_the_transform_it_was_raised() -> None:
    said = report_of(refuses_second, "commutes with vjp", Program((VECTOR,), (Step("sin"),))).split("\n\n")
    assert "with the transform after the other: NotImplementedError: two inputs" in said
    line = refuses_second.__code__.co_firstlineno + 2
    assert f'in test_check_transform.py:{line}: raise NotImplementedError("two inputs")' in said


def test_an_operand_that_is_returned_is_in_the_new_trace() -> None:
    """The report said that its value was not."""
    said = report_of(dropped("aten.clone.default"), "keeps shared memory", Program((VECTOR,), (Step("clone"),)))
    assert "Return a copy." in said and "not in the new trace" not in said


def test_calls_that_eager_pytorch_refuses_are_not_tried() -> None:
    """Fake tensors take a softmax along a dim that is not there: a right decomposition got the blame."""
    for case in map(Case, calls_of("aten._softmax.default")):
        assert evaluate(case.trace, case.inputs)


def drawn_again(trace: Trace) -> Trace:
    def rewrite(builder: Any, equation: Equation, operands: Any) -> Any:
        if ops.is_random(equation.op):
            put(builder, equation, operands)
        return put(builder, equation, operands)

    return rewritten(trace, rewrite)


def not_drawn(trace: Trace) -> Trace:
    read = {var for e in trace.equations for var in e.operands} | set(trace.outputs)
    gone = {e for e in trace.equations if ops.is_random(e.op) and not read & set(e.outputs)}
    return rewritten(trace, lambda b, e, xs: e.outputs if e in gone else put(b, e, xs))


def in_another_order(trace: Trace) -> Trace:
    """Two draws beside each other, exchanged."""
    first, *rest = trace.equations or (None,)
    if first is None or not rest or not (ops.is_random(first.op) and ops.is_random(rest[0].op)):
        return trace
    builder = TraceBuilder(trace.name)
    env: dict[Any, Any] = {var: builder.input(var.type) for var in trace.inputs}
    for equation in (rest[0], first, *rest[1:]):
        if any(var not in env for var in equation.operands):
            return trace
        env.update(zip(equation.outputs, builder.copy(equation, env.__getitem__), strict=True))
    return builder.build(tuple(env[var] for var in trace.outputs))


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (with_one_draw, "merges no draws"),
        (drawn_again, "draws as many numbers"),
        (not_drawn, "draws as many numbers"),
        (in_another_order, "draws in the same order"),
    ],
)
def test_draws_are_kept(wrong: Any, law: str) -> None:
    cases = [Case(program) for program in DRAWS]
    held, of_wrong = laws_of_draws(lambda trace: trace), laws_of_draws(wrong)
    for case in cases:
        for one in held.values():
            one(case.trace, case.inputs)
    assert any(counterexample_in(of_wrong[law], case) for case in cases)


def test_a_transform_that_only_pairs_find_wrong() -> None:
    """Dropping a detach keeps every value; gradients then flow where they did not."""

    def without_detach(trace: Trace) -> Trace:
        detached = {e.outputs[0]: e.args[0] for e in trace.equations if e.op == ops.STOP_GRADIENT}
        read = lambda var: detached.get(var, var)
        equations = tuple(replace(e, args=tuple(map_arg(read, arg) for arg in e.args)) for e in trace.equations)
        return replace(trace, equations=equations, outputs=tuple(map_arg(read, atom) for atom in trace.outputs))

    laws, case = laws_of_transform(without_detach, Promised()), Case(steps_alone("detach")[1])
    assert not counterexample_in(laws["keeps values"], case)
    assert "with the transform before the other" in str(counterexample_in(laws["commutes with vjp"], case))


def test_a_transform_that_raises_is_broken_too() -> None:
    def refuses_bodies(trace: Trace) -> Trace:
        if any(equation.bodies for equation in trace.equations):
            raise NotImplementedError("bodies")
        return trace

    with pytest.raises(LawBroken, match="and there is no trace that it becomes") as caught:
        check_transform(refuses_bodies, keeps="nothing", max_examples=100)
    assert "NotImplementedError: bodies" in str(caught.value)


@pytest.mark.parametrize("right", USERS, ids=lambda one: one.__name__)
def test_transforms_that_judge_the_search_are_right_where_sizes_are_variables(right: Any) -> None:
    """One merged equations that find sizes, and its mutants were caught for that."""
    assert Search(right, Promised()).on_symbols() is None
