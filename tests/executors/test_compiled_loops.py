"""Loops as compiled code: C++ around the step where that is kernels and products, right whatever the step and the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.executors.test_inductor_laws import staged
from thunder_fn.capture import capture
from thunder_fn.executors import Program, inductor, lower
from thunder_fn.executors.torchinductor import compiling
from thunder_fn.executors.torchinductor.codegen import Code, Job
from thunder_fn.executors.torchinductor.loop_cpp import View, _leading
from thunder_fn.executors.torchinductor.loop_plan import is_loop
from thunder_fn.executors.torchinductor.loop_sums import sums_of
from thunder_fn.executors.torchinductor.loops import generate
from thunder_fn.executors.torchinductor.programs import jobs_of
from thunder_fn.interpreters.simplify import inline
from thunder_fn.ir.trace import Trace
from thunder_fn.testing.laws.comparing import run

Tensor = torch.Tensor
W, H, XS = torch.randn(16, 16) * 0.2, torch.randn(3, 16), torch.randn(7, 3, 16)


def rnn(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    def step(h: Tensor, x: Tensor) -> Any:
        new = torch.tanh(x + h @ w)
        return new, new

    return tfn.scan(step, h, xs)


def rnn_backward(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    return tfn.grad(lambda w, h, xs: rnn(w, h, xs)[1].square().sum(), argnums=(0, 1, 2))(w, h, xs)


def lstm(w: Tensor, u: Tensor, b: Tensor, h: Tensor, c: Tensor, xs: Tensor) -> Any:
    def step(carry: Any, x: Tensor) -> Any:
        h, c = carry
        i, f, g, o = (x @ w + torch.addmm(b, h, u)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (h, c), (h, c.sum())

    return tfn.scan(step, (h, c), xs, reverse=True)


def passing(a: Tensor, b: Tensor, xs: Tensor) -> Any:
    """Carries that swap, are results as they were, or are inputs; a result that is stacked twice."""

    def step(carry: Any, x: Tensor) -> Any:
        a, b = carry
        new = a * 0.5 + x
        return (b, new), (a, x, new, new)

    return tfn.scan(step, (a, b), xs)


def counting(n: Tensor, xs: Tensor) -> Any:
    """Numbers of other dtypes, without dims."""

    def step(carry: Any, x: Tensor) -> Any:
        n, seen = carry
        return (n + 1, seen | (x > 1).any()), (n * 2, x.amax())

    return tfn.scan(step, (n, torch.tensor(False)), xs)


def parts(h: Tensor, xs: Tensor) -> Any:
    """A y that is the beginning of what is computed: in its place there would be no room for the rest."""

    def step(h: Tensor, x: Tensor) -> Any:
        z = torch.cat([h * 2, x * 3]).sin()
        return z[: len(h)] + 1, (z[: len(h)], z.sum())

    return tfn.scan(step, h, xs)


def repeated(h: Tensor, xs: Tensor) -> Any:
    """A carry whose rows are one row, as `expand` lays it out."""
    return tfn.scan(lambda h, x: ((h + x).sin()[:1].expand(h.shape), h * x), h, xs)


def gradients(w: Tensor, h: Tensor, xs: Tensor) -> Any:
    """A weight that is read twice, in a loop from the last step to the first."""

    def f(w: Tensor, h: Tensor, xs: Tensor) -> Tensor:
        step = lambda h, x: (lambda new: (new, new.sin()))(torch.tanh((x @ w).cos() + h @ w))
        return tfn.scan(step, h, xs, reverse=True)[1].square().sum()

    return tfn.grad(f, argnums=(0, 1, 2))(w, h, xs)


def totals(total: Tensor, h: Tensor, xs: Tensor, reverse: bool = False) -> Any:
    """Sums whose rows are carries before and after the step, stacked results, slices, and what is the same in each step."""

    def step(carry: Any, x: Tensor) -> Any:
        a, b, c, d, e, v = carry
        new = torch.tanh(v + x)
        a = new.t() @ x + a
        b = (b + v.t() @ x) + x.t() @ new
        c = c + new.sin().t() @ h
        d, e = d - v.t() @ new, e + e.t() @ e.t()  # these two are none
        return (a, b, c, d, e, new), new.sin()

    return tfn.scan(step, (total, total * 2, total.t(), total, total * 0.1, h), xs, reverse=reverse)


def strided(h: Tensor, xs: Tensor) -> Any:
    """A carry that is laid out otherwise than its first value."""
    return tfn.scan(lambda h, x: ((h + x).t().contiguous().t(), h.t()), h, xs)


def sorting(h: Tensor, xs: Tensor) -> Any:
    """An op that is no kernel: the loop stays in Python, around a compiled step."""
    return tfn.scan(lambda h, x: ((h + x).sort().values * 0.5, (h * x).sum()), h, xs)


def adding(h: Tensor, xs: Tensor) -> Any:
    """A single op, which is no region by itself."""
    return tfn.scan(lambda h, x: (h + x, h), h, xs)


def until(x: Tensor, w: Tensor) -> Any:
    return tfn.while_loop(
        lambda n, x: (x.square().sum() < 100) & (n < 50), lambda n, x: (n + 1, x @ w + x), (torch.tensor(0), x)
    )


def at_most(x: Tensor) -> Any:
    return tfn.while_loop(lambda x: x.sum() < 100, lambda x: (x * 1.5,), (x,), max_steps=4)


DOUBLE = [x.double() for x in (W, H, XS)]
GATES = (torch.randn(16, 64) * 0.2, torch.randn(16, 64) * 0.2, torch.randn(64))
FAR = torch.randn(120, 16) * 0.1, torch.randn(7, 120, 16) * 0.1
"""So many rows that two steps fill a block."""
LOOPS: dict[str, tuple[Any, tuple[Tensor, ...], bool]] = {
    "rnn": (rnn, (W, H, XS), True),
    "rnn, backward": (rnn_backward, (W, H, XS), True),
    "rnn in float64, transposed": (rnn, (DOUBLE[0].t(), DOUBLE[1], DOUBLE[2][:, :, ::1].flip(0)), True),
    "rnn on slices of other strides": (
        rnn,
        (W.t(), H.expand(3, 16), XS.transpose(0, 1).contiguous().transpose(0, 1)),
        True,
    ),
    "rnn on one row": (rnn, (W, H[:1], XS[:, :1]), True),
    "rnn of odd sizes": (rnn, (W[:5, :5].contiguous(), H[:, :5], XS[:, :, :5]), True),
    "lstm, backwards": (lstm, (*GATES, H, H + 1, XS), True),
    "passing": (passing, (H, H + 1, XS), True),
    "parts": (parts, (H, XS), True),
    "repeated": (repeated, (H, XS), True),
    "weight that is read twice": (gradients, (W, H, XS), True),
    "sums in one block": (totals, (W, H, XS), True),
    "sums in blocks": (totals, (W * 0.1, *FAR), True),
    "sums in blocks, reversed": (lambda *args: totals(*args, reverse=True), (W * 0.1, *FAR), True),
    "sums in blocks that are full": (totals, (W.double(), FAR[0].double(), FAR[1][:4].double()), True),
    "sums of one step": (totals, (W, H, XS[:1]), True),
    "counting": (counting, (torch.tensor(3), XS), True),
    "strided": (strided, (H, XS), True),
    "sorting": (sorting, (H, XS), False),
    "adding": (adding, (H[0, 0], XS[:, 0, 0]), True),
    "until": (until, (H, W), True),
    "until, no step": (until, (H + 100, W), True),
    "at most": (at_most, (H.abs() * 0.01,), True),
}


@dataclass(frozen=True)
class Compiled:
    trace: Trace
    program: Program
    in_cpp: bool


@pytest.fixture(scope="module")
def programs() -> dict[str, Compiled]:
    """All loops, compiled together."""
    lowered, jobs, codes = {}, {}, {}
    for name, (f, inputs, _) in LOOPS.items():
        trace = capture(f, inputs, {}).trace
        lowered[name] = trace, lower(trace, executors=[inductor()], below_autograd=True)
        found = staged(lowered[name][1].run)
        assert found is not None
        jobs[name] = jobs_of(found, inputs)

    def kept(job: Job) -> Code:
        codes[job] = generate(job)
        return codes[job]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "generate", kept)
        results = compiling.compile_jobs([job for found in jobs.values() for job in found])
    assert [result for result in results.values() if isinstance(result, compiling.Failed)] == []
    loops = {name: [codes[job] for job in found if is_loop(job.region)] for name, found in jobs.items()}
    return {
        name: Compiled(*lowered[name], in_cpp=all(dict(code.kernels).keys() == {"loop"} for code in loops[name]))
        for name in LOOPS
    }


@pytest.mark.parametrize("name", LOOPS)
def test_loops(programs: dict[str, Compiled], name: str) -> None:
    _, inputs, in_cpp = LOOPS[name]
    found = programs[name]
    assert found.in_cpp == in_cpp
    lines = [line.strip() for line in str(found.program).splitlines()]
    assert any("inductor_loop" in line for line in lines) and not any(line.startswith("for ") for line in lines)
    kept = [x.clone() for x in inputs]
    for _ in range(2):
        for output, right in zip(found.program(*inputs), run(found.trace, inputs), strict=True):
            torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-5)
            assert output.numel() < 2 or output.stride() == right.stride()
        assert all(torch.equal(x, old) for x, old in zip(inputs, kept, strict=True))


def test_loops_that_stay_in_python() -> None:
    """A step with random numbers, or with a loop of its own, is the torch executor's."""

    def noisy(h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda h, x: (h + torch.rand_like(h), x * 2), h, xs)

    def nested(h: Tensor, xs: Tensor) -> Any:
        return tfn.scan(lambda h, x: (tfn.scan(lambda a, b: (a + b, a), h[0], x)[0] + h, x), h, xs)

    for f in (noisy, nested):
        text = str(lower(capture(f, (H, XS), {}).trace, executors=[inductor()], below_autograd=True))
        assert "    for v" in text


def test_which_carries_are_sums() -> None:
    (equation,) = inline(capture(lambda *args: totals(*args)[0], (W, H, XS), {}).trace).equations[-1:]
    whole = replace(equation, bodies=(inline(equation.body),))
    assert [(one.carry, len(one.products)) for one in sums_of(whole)] == [(0, 1), (1, 2), (2, 1)]
    wide = capture(lambda w, h, xs: tfn.scan(lambda c, x: (c + x.t() @ x, c), w, xs), (W, H, XS), {}).trace
    assert sums_of(wide.equations[-1]) == (), "a y reads it"


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_a_matrix_begins_and_how_it_lies(rows: int, dtype: torch.dtype) -> None:
    """BLAS is given a leading dim at least as large as the rows are long, also where a dim of size 1 has any stride."""
    for base in (
        torch.empty(rows, 4),
        torch.empty(4, rows).t(),
        torch.empty(rows, 8)[:, :4],
        torch.empty(rows, 1, 4)[:, 0],
    ):
        found = _leading(View("x", tuple(base.shape), base.stride(), dtype))
        assert found is not None and 1 in found and max(found) >= (4 if found[1] == 1 else rows)
    assert (_leading(View("x", (3, 4), (8, 2), dtype)), _leading(View("x", (3, 4), (0, 1), dtype))) == (None, None)


def test_quick_tanh() -> None:
    """Within one unit in the last place, as eager's, and right at the ends."""
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")]).repeat(16)
    x = torch.cat([torch.linspace(-12, 12, 20_000), torch.logspace(-30, 2, 5_000), values])
    y, exact = tfn.jit(lambda x: (torch.tanh(x), x + 1), executors=[inductor()])(x)[0], torch.tanh(x.double())
    single = exact.float().abs()
    unit = (torch.nextafter(single, torch.tensor(2.0)) - single).double()
    mine, its = (((value.double() - exact).abs() / unit)[exact.isfinite()] for value in (y, torch.tanh(x)))
    assert mine.max() <= 1 and mine.mean() <= its.mean() * 1.01
    assert torch.equal(y.isnan(), x.isnan()) and torch.equal(y.signbit()[:-1], x.signbit()[:-1])
