"""Compiled regions with symbols: one compilation for all sizes, and right at each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch

import thunder_fn as tfn
from thunder_fn.capture import capture
from thunder_fn.capture.numbers.arguments import symbolic_leaves
from thunder_fn.executors.torchinductor import codegen, compiling, inductor
from thunder_fn.executors.torchinductor.codegen import Job
from thunder_fn.executors.torchinductor.layouts import layout_of, strides_for
from thunder_fn.executors.torchinductor.store import job_key
from thunder_fn.ir.trace import Expr
from thunder_fn.jitted import cache_info, jit, last_traces

Tensor = torch.Tensor


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that are compiled during the test."""
    found: list[Job] = []
    original = compiling.generate
    monkeypatch.setattr(compiling, "generate", lambda job: found.append(job) or original(job))
    return found


def layers(x: Tensor, w: Tensor, b: Tensor, n: int) -> tuple[Tensor, ...]:
    y = torch.nn.functional.gelu(x @ w + b) * x.shape[0] + n
    z = torch.nn.functional.layer_norm(y, (w.shape[1],)).softmax(0)
    return torch.cat([z, y], 0).sum(1), z.transpose(0, 1).exp().sin(), (y * 2).tanh()[1:]


def loss(x: Tensor, w: Tensor, b: Tensor, n: int) -> Tensor:
    return ((x @ w + b).tanh().softmax(0) * n).square().mean() / x.shape[0]


def arguments(rows: int, columns: int, features: int, n: int) -> tuple[Any, ...]:
    make = lambda *shape: torch.randn(shape, dtype=torch.float64)
    return make(rows, columns), make(columns, features), make(features), n


SIZES = [(5, 7, 16), (9, 3, 4), (2, 2, 2), (33, 17, 65), (16, 16, 16), (4, 40, 8)]


@pytest.mark.parametrize("f", [layers, tfn.grad_and_value(loss, argnums=(0, 1, 2))], ids=["value", "gradient"])
def test_regions_are_compiled_once_for_all_sizes(f: Callable[..., Any], jobs: list[Job]) -> None:
    torch.manual_seed(0)
    g = jit(f, cache="symbolic values", executors=[inductor()])
    eager = layers if f is layers else torch.func.grad_and_value(loss, argnums=(0, 1, 2))
    for sizes in SIZES:
        for n in (3, -1):
            args = arguments(*sizes, n)
            torch.testing.assert_close(g(*args), eager(*args), rtol=1e-9, atol=1e-9)
        if sizes == SIZES[0]:
            compiled = len(jobs)
    assert cache_info(g).misses == 1 and len(jobs) == compiled > 0
    assert "inductor_fusion_0(" in last_traces(g)[-1].text


def test_sizes_0_and_1() -> None:
    torch.manual_seed(0)
    f = lambda x: (x.sin() * x.shape[0] + x.mean(1, keepdim=True), x.cos().sum(0))
    g = jit(f, cache="symbolic values", executors=[inductor()])
    for shape in ((3, 5), (1, 5), (0, 5), (7, 1), (1, 1), (2, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(g(x), f(x))


def test_each_layout_is_compiled_once(jobs: list[Job]) -> None:
    torch.manual_seed(0)
    f = lambda x: (x.sin() + 1).cos() * x.shape[0]
    g = jit(f, cache="symbolic values", executors=[inductor()])
    for rows, columns in ((4, 3), (6, 5), (2, 9), (8, 8)):
        whole = torch.randn(rows * 2, columns + 3, dtype=torch.float64)
        plain = torch.randn(rows, columns, dtype=torch.float64)
        for x in (plain, plain.t(), whole[::2, 3:], plain[:1].expand(rows, columns)):
            torch.testing.assert_close(g(x), f(x))
            assert g(x).stride() == f(x).stride()
    assert len(jobs) == cache_info(g).misses == 4


def test_sizes_that_decide_the_code_run_on_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is asked at each call whether it holds; here it is said to hold for five rows only."""
    five: Callable[[Job], Any] = lambda job: (sympy.Eq(job.symbols[0], 5),)
    checked = codegen._checked  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        codegen, "_checked", lambda job, conditions: checked(job, (*conditions, *map(str, map(Expr, five(job)))))
    )
    f = lambda x: (x.sin() * 2).exp()
    g = jit(f, cache="symbolic values", executors=[inductor()])
    for shape in ((5, 3), (6, 5), (5, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(g(x), f(x))
    assert cache_info(g).misses == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.nn.functional.pad(x.sin(), (1, 2)) * 2,
        lambda x: torch.nn.functional.pad(x.sin(), (x.shape[0], 0, -1, 1), value=3.0).cos(),
        tfn.grad(lambda x: torch.nn.functional.pad(x.sin(), (1, 2)).square().sum()),
    ],
    ids=["pad", "pad by sizes", "gradient"],
)
def test_padding_pins_no_size(f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's C++ rule for constant_pad_nd takes sizes for numbers; the one in Python computes with them."""
    decided: list[tuple[str, ...]] = []
    checked = codegen._checked  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        codegen, "_checked", lambda job, conditions: decided.append(conditions) or checked(job, conditions)
    )
    g = jit(f, cache="symbolic values", executors=[inductor()])
    for shape in ((4, 3), (6, 5), (4, 3)):
        x = torch.randn(shape)
        torch.testing.assert_close(g(x), f(x))
    assert cache_info(g).misses == 1 and decided
    assert not any("==" in condition for conditions in decided for condition in conditions)


def test_a_changing_size_is_compiled_twice(jobs: list[Job]) -> None:
    """Once for the first call, once more when the length changes, as the trace is."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    g = jit(model, executors=[inductor()])
    for rows in (5, 9, 3, 30, 7):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            torch.testing.assert_close(g(x), model(x))
    assert cache_info(g).misses == len(jobs) == 2


def test_strides_follow_from_sizes() -> None:
    x = torch.randn(4, 6, 5)
    trace = capture(torch.sin, (x,), symbolic=symbolic_leaves((x,), [(0, 0), (0, 1), (0, 2)])).trace
    for value, expected in (
        (x, "(s1*s2, s2, 1)"),
        (torch.randn(6, 4, 5).transpose(0, 1), "(s2, s0*s2, 1)"),
        (torch.randn(4, 6, 9)[..., :5], "(s1*s1000001, s1000001, 1)"),
        (torch.randn(4, 1, 5).expand(4, 6, 5), "(s2, 0, 1)"),
    ):
        (strides,) = strides_for(trace, layout_of([value]))
        assert f"({', '.join(map(str, strides))})" == expected


def test_equal_jobs_have_one_name_in_every_process() -> None:
    """The hint of a symbol makes no difference to entries on disk; its bounds do."""

    def key(hint: int, bounds: Any = (None, None)) -> str:
        symbolic = symbolic_leaves((torch.randn(hint),), [(0, 0)], {(0, 0): bounds})
        return job_key(Job(capture(torch.sin, (torch.randn(hint),), symbolic=symbolic).trace, ((1,),), 1))

    assert key(5) == key(7) != key(5, (2, 64))
