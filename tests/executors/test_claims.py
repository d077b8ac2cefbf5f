"""Claiming and regions: who runs what, whatever the program and whoever asks."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import evaluate, jit
from thunder_fn.errors import ExecutorError, JitError, RegionWarning, UnknownOption
from thunder_fn.executors import FusionExecutor, claim, lower
from thunder_fn.executors.regions import Group, grouped, partition
from thunder_fn.interpreters.autocast import autocast as autocast_trace
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import agree, run, seeded
from thunder_fn.testing.laws.data import Patchy
from thunder_fn.testing.strategies import Case, cases


def evaluating(name: str = "slow", **options: object) -> FusionExecutor:
    """A fusion executor that evaluates its regions and counts them."""
    compiled: list[Trace] = []

    def fuse(region: Trace):  # type: ignore[no-untyped-def]
        compiled.append(region)
        return lambda *inputs: evaluate(region, inputs)

    executor = FusionExecutor(name, fuse=fuse, numerics="bitwise", **options)  # type: ignore[arg-type]
    executor.compiled_regions = compiled  # type: ignore[attr-defined]
    return executor


def arithmetic(name: str = "slow", **options: object) -> FusionExecutor:
    executor = evaluating(name, **options)
    for op in (torch.sin, torch.mul, torch.add, torch.cos):
        executor.register_supported(op)
    return executor


# ---- regions ----


def reaches(trace: Trace, start: set[int], group: Group) -> bool:
    """From an equation of `start`, through the others, back into the group."""
    tainted = {var.index for position in start for var in trace.equations[position].outputs}
    for position, equation in enumerate(trace.equations):
        if position in start or not any(var.index in tainted for var in equation.operands):
            continue
        if position in group:
            return True
        tainted |= {var.index for var in equation.outputs}
    return False


def outside_paths(trace: Trace, group: Group) -> bool:
    """A way leads out of the group and back in."""
    members = {var.index for position in group for var in trace.equations[position].outputs}
    leaving = {
        position
        for position, equation in enumerate(trace.equations)
        if position not in group and any(var.index in members for var in equation.operands)
    }
    return reaches(trace, leaving, group)


@given(cases(), st.integers(0, 2**16))
def test_regions_are_convex_and_as_large_as_can_be(case: Case, mask: int) -> None:
    flat = inline(case.trace)
    wanted = [bool(mask >> (i % 16) & 1) for i in range(len(flat.equations))]
    groups = partition(flat, wanted)
    placed = [position for group in groups for position in group]
    expected = [i for i, flag in enumerate(wanted) if flag and not ops.has_side_effect(flat.equations[i])]
    assert sorted(placed) == expected
    for group in groups:
        assert not outside_paths(flat, group)
    for first, second in itertools.pairwise(groups):
        if any(map(ops.has_side_effect, flat.equations)):
            break  # an order of effects may keep two apart
        assert outside_paths(flat, (*first, *second)), "two regions that could be one"
    new, firsts = grouped(flat, groups, "any::region")
    assert len(firsts) == len(new.equations)
    check(new)
    agree(run(new, case.inputs), run(flat, case.inputs), "the grouped trace", trace=flat, grouped=new)


def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([(x > 1).sum().item(), 0]) / 2


def two_numbers(x: torch.Tensor) -> torch.Tensor:
    first = (x > 1).sum().item()
    second = torch.full((2,), first).cumsum(0).sum().item()
    return torch.full((), second).sin() + x * first


def size_found(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.sin()[x > 1]
    return torch.ones(y.size(0)).cumsum(0) * 2, x.cos().sum()


@pytest.mark.parametrize("f", (halves, two_numbers, size_found))
def test_regions_come_after_the_numbers_that_they_mention(f: Any) -> None:
    """No operand leads from the number that is found to what computes with it."""
    x = torch.arange(6.0)
    flat = inline(tfn.trace(f, x))
    expected = run(flat, [x])
    count = len(flat.equations)
    random = torch.Generator().manual_seed(0)
    for _ in range(24):
        drawn = torch.rand(count, generator=random) < 0.7
        wanted = [bool(flag) and ITEM not in one.op.name for flag, one in zip(drawn, flat.equations, strict=True)]
        new, _ = grouped(flat, partition(flat, wanted), "any::region")
        check(new)
        agree(run(new, [x]), expected, "the grouped trace", trace=flat, grouped=new)


ITEM = "_local_scalar_dense"


@given(cases(), st.booleans())
def test_claiming_keeps_values(case: Case, share: bool) -> None:
    executor = Patchy("patchy", min_size=1, min_shared=2 if share else 10**6)
    claimed = claim(case.trace, (executor,), below_autograd=True)
    check(claimed.trace)
    agree(run(claimed.trace, case.inputs), run(case.trace, case.inputs), "what was claimed", trace=case.trace)
    for equation in claimed.trace.equations:
        if equation.op.kind == "composite":
            assert claimed.claim_of(equation).executor.name == "patchy"


@given(cases())
def test_a_wrong_region_is_caught(case: Case) -> None:
    """The law of executors sees it if a region's results are swapped with zeros."""
    executor = FusionExecutor("wrong", fuse=lambda region: lambda *xs: tuple(_zeroed(y) for y in evaluate(region, xs)))
    executor.register_supported(torch.sin)
    program = lower(case.trace, executors=[executor])
    found = seeded(lambda: program(*(x.clone() for x in case.inputs)))
    wanted = run(case.trace, case.inputs)
    changed = "wrong_fusion_0" in str(program) and any(torch.is_tensor(y) and y.any() for y in wanted)
    if not changed:
        agree(found, wanted, "the program without regions", trace=case.trace)


def _zeroed(value: object) -> object:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


# ---- sharing ----


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(4):
            y = y.sin() * 2 + y.cos()
        return x + self.linear(y).sin() * 2


def test_equal_blocks_are_compiled_once() -> None:
    executor = arithmetic()
    model = torch.nn.Sequential(*(Block() for _ in range(5))).requires_grad_(False)
    f, x = jit(model, executors=[executor]), torch.randn(3, 4)
    assert torch.equal(f(x), model(x))
    assert len(executor.compiled_regions) == 2  # type: ignore[attr-defined]
    text = str(tfn.last_traces(f)[-1])
    assert text.count("= slow_fusion_0(") == 5 and text.count("= slow_fusion_1(") == 5
    assert text.count("# def slow_fusion_0(") == 1, "its meaning is written once"


def test_a_block_that_occurs_once_is_no_border() -> None:
    executor = arithmetic()
    block = Block().requires_grad_(False)
    f = jit(lambda x: block(x.sin() * 2).cos() + 1, executors=[executor])
    x = torch.randn(3, 4)
    assert torch.equal(f(x), block(x.sin() * 2).cos() + 1)
    assert len(executor.compiled_regions) == 2  # type: ignore[attr-defined]


def test_regions_reach_gradients_and_loops() -> None:
    executor = arithmetic()

    def f(x: torch.Tensor) -> torch.Tensor:
        return tfn.fori_loop(0, 3, lambda i, y: y.sin() * 2 + y.cos(), x).sum()

    x = torch.randn(3, dtype=torch.float64)
    g = tfn.grad(jit(f, executors=[executor]))
    assert torch.equal(g(x), tfn.grad(jit(f))(x))
    assert executor.compiled_regions, "the bodies of loops have regions"  # type: ignore[attr-defined]
    y = x.clone().requires_grad_()
    jit(f, executors=[executor])(y).backward()
    torch.testing.assert_close(y.grad, g(x))


def test_a_call_keeps_its_own_executors() -> None:
    first, second = arithmetic("first"), arithmetic("second")
    inner = jit(lambda x: x.sin() * 2, executors=[first])
    plain = jit(lambda x: x.cos() * 3)
    refusing = jit(lambda x: x.sin() + x.cos(), executors=["torch"])
    f = jit(lambda x: refusing(inner(x) + inner(x * 2) + plain(x)), executors=[second])
    x = torch.randn(3)
    y = x.sin() * 2 + (x * 2).sin() * 2 + x.cos() * 3
    assert torch.equal(f(x), y.sin() + y.cos())
    text = str(tfn.last_traces(f)[-1])
    assert text.count("= first_fusion_0(") == 2, "inner's executor, compiled once"
    assert "= second_fusion_0(" in text, "what is given no executors runs on those around it"
    assert " = sin(" in text and " = cos(" in text, "torch alone"
    report = tfn.explain_claims(f, x)
    assert {one.taken_by for one in report.forward} == {"first", "second", "torch", None}


# ---- who is asked, and what they say ----


def test_explain_claims() -> None:
    first, second = arithmetic("first", min_size=3), evaluating("second")
    second.register_supported("torch.nn.functional.softplus", checker=lambda x, *rest: x.dim() == 2)
    second.register_supported(torch.ops.aten.exp.default, checker=lambda x: x.dtype == torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin().cos() * 2).exp().exp().sin()

    report = tfn.explain_claims(jit(f, executors=[first, second]), torch.ones(2))
    decisions = [(one.op, one.taken_by, one.times, one.refusals) for one in report.forward]
    assert decisions == [
        ("aten.sin.default", "first", 1, ()),
        ("aten.cos.default", "first", 1, ()),
        ("aten.mul.Tensor", "first", 1, ()),
        ("aten.exp.default", "torch", 2, (("first", "not registered"), ("second", "the checker <lambda> said no"))),
        ("aten.sin.default", "torch", 1, (("first", "the region would be too small"),)),
    ]
    assert report.taken_by("first") == report.forward[:3]
    assert str(report).splitlines()[:3] == ["claims of f", "forward:", str(report).splitlines()[2]]
    with_grad = tfn.explain_claims(jit(f, executors=[first]), torch.ones(2, requires_grad=True))
    assert any(one.op == "aten.mul.Tensor" for one in with_grad.backward)


def test_numerics_refuses_interpreters_that_change_precision() -> None:
    f, x = jit(lambda x: x @ x, numerics="bitwise"), torch.randn(3, 3)
    with pytest.raises(JitError) as info:
        tfn.autocast(f)
    assert message_of(info.value) == (
        "autocast: it is precision-changing, and the function was jitted with numerics='bitwise'\n"
        "Write `jit(autocast(f), ...)`: then results are those of `autocast(f)` to that degree."
    )
    lower = tfn.autocast(lambda x: x @ x)
    assert torch.equal(jit(lower, numerics="bitwise")(x), lower(x))
    transform = functools.partial(autocast_trace, dtype=torch.bfloat16, policy=tfn.autocast_policy)
    with pytest.raises(JitError, match=r"^jit: the transform 'autocast' is precision-changing, and numerics='bitwise'"):
        jit(f, transforms=[transform])
    assert tfn.grad(jit(lambda x: x.sin().sum(), numerics="bitwise"))(x).shape == (3, 3)


def test_numerics_leaves_executors_out() -> None:
    loose = FusionExecutor("loose", fuse=lambda region: lambda *xs: evaluate(region, xs))
    loose.register_supported(torch.sin)
    f = jit(lambda x: x.sin().sin(), executors=[loose])
    x = torch.ones(2)
    f(x)
    assert "loose_fusion_0" in str(tfn.last_traces(f)[-1])
    bitwise = jit(f, numerics="bitwise")
    bitwise(x)
    assert "loose" not in str(tfn.last_traces(bitwise)[-1])
    report = tfn.explain_claims(bitwise, x)
    assert report.left_out == (("loose", "its results are reassociating, and numerics='bitwise'"),)
    assert "loose is not asked: its results are reassociating" in str(report)
    with pytest.raises(
        ExecutorError,
        match=r"(?m)^jit: numerics is one of 'bitwise', 'reassociating', 'precision-changing', given 'exact'$",
    ):
        jit(f, numerics="exact")


def test_numerics_holds_for_functions_that_are_called() -> None:
    half = FusionExecutor("half", fuse=lambda region: lambda x: (x * 1.01,), min_size=1)
    half.register_supported(torch.sin)
    inner, x = tfn.jit(torch.sin, executors=[half]), torch.ones(2)
    assert not torch.equal(tfn.jit(lambda x: inner(x))(x), x.sin())
    assert torch.equal(tfn.jit(lambda x: inner(x), numerics="bitwise")(x), x.sin())
    inexact = tfn.jit(torch.sin, transforms=[tfn.Transform(lambda trace: trace, name="t", numerics="reassociating")])
    with pytest.raises(JitError, match="the transform 't' is reassociating, and numerics='bitwise'"):
        tfn.jit(lambda x: inexact(x), numerics="bitwise")(x)


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda x: x.sin(), "f32[3, 2]"),
        (lambda x: (x.sin()[:1],), "(f32[1, 2])"),
        (lambda x: (x.sin().double(),), "(f64[3, 2])"),
        (lambda x: (), "()"),
        (lambda x: (None,), "(None)"),
    ],
)
def test_a_region_that_returns_something_else(made: Any, found: str) -> None:
    ex = FusionExecutor("mine", fuse=lambda region: made, min_size=1)
    ex.register_supported(torch.sin)
    f = lambda x: torch.sin(x)
    with pytest.raises(ExecutorError) as caught:
        tfn.jit(f, executors=[ex])(torch.ones(3, 2))
    assert message_of(caught.value) == (
        f"mine: the region mine_fusion_0 returned {found}, but its outputs are (f32[3, 2])\n"
        f"from:         {__file__}:{f.__code__.co_firstlineno} in <lambda>\n"
        "Let the function that `fuse` makes return a tuple of tensors of the region's dtypes and shapes."
    )


def test_a_region_that_raises_names_the_line() -> None:
    ex = FusionExecutor("mine", fuse=lambda region: lambda x: 1 / 0, min_size=1)
    ex.register_supported(torch.sin)
    f = lambda x: torch.sin(x)
    with pytest.raises(ZeroDivisionError) as caught:
        tfn.jit(f, executors=[ex])(torch.ones(3))
    assert caught.value.__notes__ == [
        f"while it ran: mine: the region mine_fusion_0\nfrom:         {__file__}:{f.__code__.co_firstlineno} in <lambda>"
    ]


def test_a_region_that_does_not_compile_runs_on_torch() -> None:
    def fuse(region: Trace):  # type: ignore[no-untyped-def]
        raise RuntimeError("no compiler")

    broken = FusionExecutor("broken", fuse=fuse)
    broken.register_supported(torch.sin)
    f = jit(lambda x: x.sin().sin(), executors=[broken])
    with pytest.warns(RegionWarning) as caught:
        assert torch.equal(f(torch.ones(2)), torch.ones(2).sin().sin())
    text = str(caught[0].message)
    assert text.startswith(
        "broken could not compile the region broken_fusion_0 of 2 equations, which runs on the torch executor instead\n"
        "RuntimeError: no compiler\n"
        f"from:         {__file__}:"
    )
    with warnings.catch_warnings():
        f(torch.ones(2))  # one warning


def test_registering_later_traces_again() -> None:
    executor = evaluating()
    f, other = jit(lambda x: x.sin().sin(), executors=[executor]), jit(lambda x: x.sin().sin())
    x = torch.ones(2)
    for _ in range(2):
        f(x), other(x)
    executor.register_supported(torch.sin)
    for _ in range(2):
        f(x), other(x)
    assert "slow_fusion_0" in str(tfn.last_traces(f)[-1]) and "slow" not in str(tfn.last_traces(other)[-1])
    assert tfn.cache_info(f).misses == 2 and tfn.cache_info(other).misses == 1


# ---- misuse ----


def test_names() -> None:
    with pytest.raises(
        UnknownOption, match=r"^jit: unknown executor 'troch'; did you mean 'torch'\?\nfrom: .*\nThere are torch"
    ):
        jit(torch.sin, executors=["troch"])
    with pytest.raises(
        ExecutorError,
        match=r"(?m)^jit: an executor is a value such as `OperatorExecutor\('mine'\)` or a name, given 3$",
    ):
        jit(torch.sin, executors=[3])
    with pytest.raises(
        ExecutorError,
        match=r"(?m)^two executors are called 'slow'\nfrom: .*\nGive each executor of a program a name of its own.$",
    ):
        jit(torch.sin, executors=[arithmetic(), arithmetic()])(torch.ones(2))
    with pytest.raises(ExecutorError, match=r"(?m)^an executor's name is an identifier, given 'a b'$"):
        evaluating("a b")
    with pytest.raises(
        ExecutorError, match=r"(?m)^the fusion executor lazy has no `fuse`; pass `fuse=`, or define it in a subclass$"
    ):
        FusionExecutor("lazy")


def test_what_is_registered_must_be_an_op() -> None:
    with pytest.raises(
        ExecutorError,
        match=r"^slow.register_supported: test_what.*<lambda> is not an op of a trace\nfrom: .*\nGive an ATen op",
    ):
        evaluating().register_supported(lambda x: x)


def test_a_checker_that_raises_is_an_error() -> None:
    executor = evaluating()

    def picky(x: torch.Tensor) -> bool:
        raise ValueError("what is this?")

    executor.register_supported(torch.sin, checker=picky)
    with pytest.raises(ExecutorError) as caught:
        jit(lambda x: x.sin(), executors=[executor])(torch.ones(2))
    lines = message_of(caught.value).splitlines()
    assert lines[0] == "slow: the checker picky raised ValueError: what is this?"
    assert lines[1] == "in equation:  v1: f32[2] = aten.sin.default(v0)"
    assert lines[2].startswith(f"from:         {__file__}:")
    assert lines[3] == "A checker sees types only: return False for calls that the executor cannot run."


def test_a_checker_that_asks_for_values_is_an_error() -> None:
    executor = evaluating()
    executor.register_supported(torch.sin, checker=lambda x: x.sum() > 0)
    with pytest.raises(ExecutorError, match="slow: the checker <lambda> raised DataDependentOutputException"):
        jit(lambda x: x.sin(), executors=[executor])(torch.ones(2))


def test_a_checker_with_other_parameters_says_no() -> None:
    executor = evaluating()
    executor.register_supported(torch.sin, checker=lambda: True)
    report = tfn.explain_claims(jit(lambda x: x.sin(), executors=[executor]), torch.ones(2))
    assert report.forward[0].refusals == (
        ("slow", "the checker <lambda> cannot be called with these arguments: too many positional arguments"),
    )


def test_operator_names_are_short_in_programs() -> None:
    assert ops.short_name(ops.composite("myex::multimul")) == "multimul"
    assert ops.is_operator(ops.composite("myex::multimul")) and not ops.is_operator(ops.composite("torch.mul"))
