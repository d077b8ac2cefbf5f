"""The nvfuser executor: its definitions are what nvFuser takes, and compute what the trace does.

Judged by a stand-in for nvFuser (`nvfuser_stand_in.py`), and by nvFuser itself on machines that have it.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest
import torch
from hypothesis import given

import thunder_fn as tfn
from tests.executors import nvfuser_stand_in as stand_in
from tests.ops.agreement import tensors_in
from tests.ops.sweep import cases_of
from thunder_fn import jit
from thunder_fn.capture import capture
from thunder_fn.capture.pytree import tree_map
from thunder_fn.errors import ExecutorError, RegionWarning
from thunder_fn.executors import claim, get_executor, lower
from thunder_fn.executors.nvfuser import NvFuser, find_library
from thunder_fn.executors.nvfuser.definitions import Definitions, peeled
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir import ops
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import TensorType, Trace, Var, canonical, map_arg
from thunder_fn.testing.laws.comparing import agree, run, seeded
from thunder_fn.testing.strategies import Case, cases


def nvfuser(**options: Any) -> NvFuser:
    return NvFuser(library=stand_in, device="cpu", **options)  # type: ignore[arg-type]


class Eager(NvFuser):
    """Takes regions of any size, so that single ops are translated."""

    def is_worth(self, region: Trace) -> bool:
        return any(not ops.is_view(equation.op) for equation in region.equations)


def everything() -> Eager:
    return Eager(library=stand_in, device="cpu")  # type: ignore[arg-type]


def check_agrees(trace: Trace, inputs: Any, executor: NvFuser) -> None:
    """Values, dtypes and strides are those of the torch executor."""
    program = lower(trace, executors=[executor], below_autograd=True)
    expected = seeded(lambda: lower(trace, below_autograd=True)(*(x.clone() for x in inputs)))
    outputs = seeded(lambda: program(*(x.clone() for x in inputs)))
    for output, right in zip(outputs, expected, strict=True):
        half = isinstance(right, torch.Tensor) and right.dtype in stand_in.HALF
        options = {"rtol": 2e-2, "atol": 2e-2} if half else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(output, right, equal_nan=True, msg=lambda text: f"{text}\n{program}", **options)
        if isinstance(right, torch.Tensor) and right.numel() > 1:
            assert output.stride() == right.stride(), program


# ---- the translation ----


@given(cases(dtypes=(torch.float32, torch.int64, torch.bool, torch.bfloat16)))
def test_random_traces(case: Case) -> None:
    check_agrees(case.trace, case.inputs, everything())


@given(cases(dtypes=(torch.float32,)))
def test_views_at_the_end_are_peeled(case: Case) -> None:
    region = inline(case.trace)
    if region.constants or any(map(ops.has_random, region.equations)):
        return
    kernel, views = peeled(region)
    check(kernel)
    check(views)
    assert all(ops.is_view(equation.op) for equation in views.equations)
    agree(
        run(views, (*case.inputs, *run(kernel, case.inputs))), run(region, case.inputs), "the two parts", trace=region
    )


# fmt: off
OPERATORS = (
    "nanquantile", "nn_functional_rms_norm", "std_mean_unbiased", "gcd", "nn_functional_celu", "var_unbiased", "where", "cat",
    "bitwise_xor", "bitwise_not", "nextafter", "min_reduction_no_dim", "nn_functional_gelu", "round", "gather",
    "logical_xor", "div_trunc_rounding", "div_floor_rounding", "sign", "isneginf", "signbit", "le", "__rpow__", "fmod", "stack",
    "arange", "nn_functional_group_norm", "nn_functional_layer_norm", "clamp_max", "clamp", "isin", "all", "any", "amax",
    "unsafe_chunk", "nn_functional_embedding", "nn_functional_cross_entropy", "softmax", "inner", "trapezoid", "prod", "tril",
    "split_with_sizes_copy", "unbind_copy", "select_scatter", "sum", "mean", "remainder",
)
# fmt: on


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    before = stand_in.FusionDefinition.executed
    for dtype, count in ((torch.float32, 2), (torch.bfloat16, 1), (torch.int64, 1)):
        for sample in islice(cases_of(name, "forward", 1, kinds=("noncontiguous",), dtypes=(dtype,)), count):
            captured = capture(sample.function, sample.args, sample.kwargs)
            check_agrees(captured.trace, tensors_in((sample.args, sample.kwargs)), everything())
    assert stand_in.FusionDefinition.executed > before, "nothing was translated"


def test_backwards_of_slices_and_fills() -> None:
    def f(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = (
            (x[1:, 0] * 2).sum()
            + x.masked_fill(x > 0, value).prod(0)[1]
            + x.index_select(1, torch.tensor([2, 0])).exp().sum()
        )
        return y + x.view(-1).sigmoid()[3:7].sum()

    captured = capture(tfn.grad(f), (torch.randn(3, 4), torch.tensor(2.0)), {})
    check_agrees(captured.trace, (torch.randn(3, 4), torch.tensor(2.0)), nvfuser())


UNARY = (
    "acos acosh asin asinh atan atanh cosh erf erfc erfinv exp2 expm1 frac lgamma log10 log1p log2 rsqrt sinh tan trunc"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_one_number(dtype: torch.dtype) -> None:
    x = torch.linspace(0.1, 1.4, 12, dtype=dtype)
    captured = capture(lambda x: tuple(getattr(torch, name)(x) for name in UNARY.split()), (x,), {})
    check_agrees(captured.trace, (x,), nvfuser())


def test_half_precision_is_rounded_at_each_op() -> None:
    """Float32 is never handed on where the trace says bfloat16."""

    def rounded(y: torch.Tensor) -> torch.Tensor:
        return y.bfloat16().float()

    x = torch.randn(64, 64, dtype=torch.bfloat16)
    f = jit(lambda x: ((x * 1.001 + 0.1).exp() - x).tanh(), executors=[nvfuser()])
    y = rounded(rounded(rounded(x.float() * 1.001) + 0.1).exp())
    assert torch.equal(f(x).float(), rounded(rounded(y - x.float()).tanh()))


@pytest.mark.parametrize(
    ("sizes", "strides", "contiguity", "order"),
    [
        ((2, 3, 4), (12, 4, 1), [True, True, True], [2, 1, 0]),
        ((2, 3, 4), (4, 8, 1), [True, True, True], [1, 2, 0]),
        ((2, 3), (6, 1), [False, True], [1, 0]),
        ((2, 1, 3), (3, 3, 1), [True, None, True], [2, 1, 0]),
        ((2, 3), (0, 1), [None, True], [0, 1]),
        ((), (), [], []),
    ],
)
def test_descriptors_of_the_stand_in(sizes: Any, strides: Any, contiguity: Any, order: Any) -> None:
    found, found_order = stand_in.compute_tensor_descriptor(sizes, strides)
    assert (found_order, sorted(map(str, found))) == (order, sorted(map(str, contiguity)))


def test_the_stand_in_is_strict() -> None:
    with stand_in.FusionDefinition() as fusion:
        x = fusion.define_tensor([2, 3], [True, True], stand_in.DataType.Half, stride_order=[1, 0])
        y = fusion.define_tensor([3], [True], stand_in.DataType.Float)
        assert fusion.ops.add(x, 1.0).dtype() is stand_in.DataType.Float
        for wrong, error in (
            (lambda: fusion.ops.gelu(x), AttributeError),
            (lambda: fusion.ops.add(x, 1.0, alpha=2), TypeError),
            (lambda: fusion.ops.add(x, y), AssertionError),
            (lambda: fusion.ops.sum(x, []), RuntimeError),
            (lambda: fusion.ops.var_mean(x, [0]), RuntimeError),
            (lambda: fusion.ops.squeeze(x, [0]), RuntimeError),
            (lambda: fusion.ops.sum(x, (0,)), AssertionError),
        ):
            with pytest.raises(error):
                wrong()


# ---- what is taken ----


def on_cuda(trace: Trace) -> Trace:
    """The same trace as it would be on a GPU: tensors with dims there, others on the CPU."""

    def moved(type: Any) -> Any:
        return replace(type, device=torch.device("cuda", 0)) if isinstance(type, TensorType) and type.shape else type

    def var(old: Var) -> Var:
        return Var(old.index, moved(old.type))

    equations = tuple(
        replace(
            equation, args=tuple(map_arg(var, arg) for arg in equation.args), outputs=tuple(map(var, equation.outputs))
        )
        for equation in inline(trace).equations
    )
    outputs = tuple(map_arg(var, atom) for atom in trace.outputs)
    return canonical(tuple(map(var, trace.inputs)), equations, outputs, (), trace.constraints)


def test_claims_need_no_library() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x * scale, -1) @ w).tanh() + torch.rand_like(x)

    trace = on_cuda(capture(f, (torch.randn(4, 4), torch.randn(4, 4), torch.tensor(2.0)), {}).trace)
    claimed = claim(trace, [NvFuser()]).trace
    left = [e.op.name for e in claimed.equations if e.op.kind == "leaf"]
    assert left == ["aten.mm.default", "aten.rand_like.default"] or left == [
        "aten.rand_like.default",
        "aten.mm.default",
    ]
    taken = [inner.op.name for e in claimed.equations if e.op.kind == "composite" for inner in e.body.equations]
    assert sorted(taken) == ["aten._softmax.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.tanh.default"]


@pytest.mark.parametrize(
    ("f", "x", "reason"),
    [
        (torch.sin, torch.ones(2, dtype=torch.complex64), "nvFuser's Python module has no complex64"),
        (torch.neg, torch.ones(2, dtype=torch.int8), "nvFuser's Python module has no int8"),
        (torch.sin, torch.ones(0), "tensors without elements, or with more than 8 dims"),
        (
            torch.nn.functional.dropout,
            torch.ones(2),
            "random numbers and effects stay with torch, which draws what eager draws",
        ),
        (lambda x: x[::2] + 1, torch.ones(4), "nvFuser slices in steps of one"),
        (lambda x: x.flip(0), torch.ones(4), "not registered"),
    ],
)
def test_refusals(f: Any, x: torch.Tensor, reason: str) -> None:
    log = claim(capture(f, (x,), {}).trace, [nvfuser()]).log
    assert reason in {why for decision in log for name, why in decision.refusals if name == "nvfuser"}


def test_tensors_on_other_devices_are_refused() -> None:
    log = claim(capture(torch.sin, (torch.ones(2),), {}).trace, [NvFuser()]).log
    assert "tensors on cpu: regions are compiled for cuda" in {why for one in log for _, why in one.refusals}


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", None)
    trace = on_cuda(capture(lambda x: x.sin() + 1, (torch.ones(2),), {}).trace)
    with pytest.warns(RegionWarning, match="nvfuser: the package nvfuser_direct cannot be imported"):
        lower(trace, executors=[get_executor("nvfuser")])


def test_an_old_package(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("nvfuser_direct")
    old.version = lambda: "0.2.30"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvfuser_direct", old)
    with pytest.raises(ExecutorError, match=r"nvfuser_direct is 0\.2\.30, and 0.2.34 or later is needed"):
        find_library()


# ---- definitions are kept ----


def test_one_definition_for_equal_regions_and_strides() -> None:
    executor = nvfuser()
    f = jit(lambda x: (x.sin() + 1) * x, executors=[executor])
    g = jit(lambda y: (y.sin() + 1) * y, executors=[executor])
    for x in (torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 3).t()):
        assert torch.allclose(f(x), (x.sin() + 1) * x)
        assert torch.allclose(g(x), (x.sin() + 1) * x)
    assert len(executor.definitions) == 2


def test_definitions_are_forgotten() -> None:
    kept = Definitions(size=2)
    trace = capture(torch.sin, (torch.ones(2),), {}).trace
    made: list[int] = []
    for stride in (1, 2, 1, 3, 1, 2):
        kept.find(trace, ((stride,),), lambda stride=stride: made.append(stride))  # type: ignore[arg-type,return-value]
    assert (made, len(kept)) == ([1, 2, 3, 2], 2)


def test_results_share_no_memory_but_where_eager_does() -> None:
    """The stand-in returns an input's memory for `set` and `reshape`, as nvFuser may."""
    x = torch.randn(3, 4)
    f = jit(lambda x: (x.clone(), x.t(), (x + 1) * 2), executors=[everything()])
    copy, view, _ = f(x)
    assert copy.data_ptr() != x.data_ptr()
    assert (view.data_ptr(), view.stride()) == (x.data_ptr(), (1, 4))


class Failing(stand_in.FusionDefinition):
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("INTERNAL ASSERT FAILED")


def test_a_region_that_nvfuser_cannot_compile_runs_on_torch() -> None:
    library = types.SimpleNamespace(**{**vars(stand_in), "FusionDefinition": Failing})
    f = jit(lambda x: x.sin() + 1, executors=[NvFuser(library=library, device="cpu")])  # type: ignore[arg-type]
    with pytest.warns(
        RegionWarning, match="could not be compiled and runs on the torch executor: INTERNAL ASSERT FAILED"
    ):
        assert torch.equal(f(torch.ones(2)), torch.ones(2).sin() + 1)
    assert torch.equal(f(torch.ones(2)), torch.ones(2).sin() + 1)


# ---- nvFuser itself ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nvFuser needs a GPU")
def test_operators_on_nvfuser() -> None:
    pytest.importorskip("nvfuser_direct")
    for name, dtype in product(OPERATORS, (torch.float32, torch.bfloat16, torch.int64)):
        for sample in islice(cases_of(name, "forward", 1, kinds=("plain",), dtypes=(dtype,)), 1):
            args, kwargs = tree_map(
                lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
            )
            check_agrees(capture(sample.function, args, kwargs).trace, tensors_in((args, kwargs)), Eager())
