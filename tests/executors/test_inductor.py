"""The inductor executor: right values and layouts, shared regions, tiers, and what goes wrong around a compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import evaluate, executors, inspect, optim, torch_internals as internals
from thunder_fn.errors import CacheWarning, ExecutorError, RegionWarning, UnknownOption
from thunder_fn.executors import backend, bisect, claims, inductor, lower, torchinductor as compiled
from thunder_fn.executors.torchinductor import codegen, compiling, native, region_calls, store, trusted, worker
from thunder_fn.executors.torchinductor.codegen import Job, closed_region, generate
from thunder_fn.executors.torchinductor.parts import join, parts_of
from thunder_fn.executors.torchinductor.programs import Staged
from thunder_fn.executors.torchinductor.region_calls import Region
from thunder_fn.executors.verify import unwritten_outputs
from thunder_fn.extend import FusionExecutor, OperatorExecutor
from thunder_fn.interpreters import grad as vjp
from thunder_fn.ir.trace import Trace

Tensor = torch.Tensor


def jit(f: Callable[..., Any], **options: Any) -> Any:
    return tfn.jit(f, executors=[inductor(**options)])


def region_names(f: Any) -> list[str]:
    """The regions that the last program calls, in order."""
    return [str(equation.op) for equation in tfn.last_traces(f)[-1].trace.equations if "inductor::" in str(equation.op)]


def staged_of(f: Any) -> Staged:
    """The last call's program, whose regions are compiled."""
    staged = tfn.last_traces(f)[-1].run
    while not isinstance(staged, Staged):  # a function that switches autocast off
        (staged,) = (cell.cell_contents for cell in staged.__closure__ if callable(cell.cell_contents))
    return staged


def is_compiled(f: Any) -> bool:
    """The last call's program runs compiled regions."""
    staged = staged_of(f)
    ready = [run for run in staged.ready.values() if run is not staged.run]
    while any(hasattr(run, "run") for run in ready):  # until it has run once
        ready = [getattr(run, "run", run) for run in ready]
    return bool(ready) and not any(isinstance(value, Region) for run in ready for value in run.__globals__.values())


def same(outputs: Any, expected: Any) -> None:
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    for output, right in zip(outputs, expected, strict=True):
        assert output.stride() == right.stride()


def wave(x: Tensor) -> Tensor:
    """A program that several tests run: it is compiled once for all of them."""
    return (x.sin() * 2 + x.exp()).tanh()


# ---- values and layouts ----


def test_values_strides_and_memory() -> None:
    """One region for all: layouts are eager's, and outputs share memory where eager's do and nowhere else."""

    def f(a: Tensor, b: Tensor, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        y = a.sin()
        layered = F.layer_norm(a @ b.t(), (4,))
        pooled = F.max_pool2d(x, 2)
        return y, y.clone(), y.t(), a.expand(4, 4), a + 0, layered, pooled, (x * 2).permute(0, 2, 3, 1), b.sin()[i]

    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    args = torch.randn(4, 4), torch.randn(4, 4), x, torch.tensor([0, 3, 3])
    compiled_f = jit(f)
    outputs, expected = compiled_f(*args), f(*args)
    same(outputs, expected)
    assert is_compiled(compiled_f)
    assert len({id(value) for value in (*outputs, *args)}) == len(outputs) + len(args)
    memory = lambda values: [value.untyped_storage().data_ptr() for value in values]
    shared = lambda values: [[a == b for a in memory(values)] for b in memory(values)]
    assert shared(outputs) == shared(expected)


def test_other_layouts_and_dtypes_are_compiled_on_their_own() -> None:
    f = jit(lambda x: (x.sin() * 2).sum(0))
    for x in (torch.randn(3, 4), torch.randn(3, 8)[:, ::2], torch.randn(3, 4).double()):
        torch.testing.assert_close(f(x), (x.sin() * 2).sum(0))


def _chosen(x: Tensor, n: Tensor) -> Tensor:
    return tfn.cond(n % 2 == 1, lambda x: x.t(), lambda x: x + 0, (x,))


def _looped(x: Tensor, n: Tensor) -> Tensor:
    return tfn.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, (y.t() * 1.5).sin()), (torch.tensor(0), x))[1]


def _switched(x: Tensor, n: Tensor) -> Tensor:
    return torch.sort(tfn.switch(n, [lambda x: x.t(), lambda x: x + 1, lambda x: (x.t() + 1).t()], (x,)), 0).values


@pytest.mark.filterwarnings(
    "ignore:.*a loop's carry has another layout after each step:thunder_fn.errors.RegionWarning"
)
@pytest.mark.parametrize("tiered", (False, True))
@pytest.mark.parametrize("choose", (_chosen, _looped, _switched))
def test_layouts_that_values_decide_on(choose: Callable[..., Tensor], tiered: bool) -> None:
    """Regions behind a choice or a loop are compiled for what they are called with, not for what the first call found."""
    f = lambda x, n: (choose(x, n).sin() * 2 + x).exp()
    jitted, x = jit(f, tiered=tiered), torch.randn(5, 5)
    for _ in range(2):
        for n in (1, 2, 0, 3, 1):
            torch.testing.assert_close(jitted(x, torch.tensor(n)), f(x, torch.tensor(n)))
        compiled.wait()


def test_layouts_that_an_operator_decides_on() -> None:
    calls = list[int]()

    def twice(x: Tensor) -> Tensor:
        calls.append(len(calls))
        return torch.empty_strided((5, 5), (1, 5) if len(calls) % 2 else (5, 1)).copy_(x * 2)

    mine = OperatorExecutor("layouts")
    double = mine.register_operator("double", like=lambda x: x * 2, fn=twice)
    f, x = tfn.jit(lambda x: (double(x).sin() * 2 + x).exp(), executors=[mine, inductor()]), torch.randn(5, 5)
    for _ in range(3):
        torch.testing.assert_close(f(x), ((x * 2).sin() * 2 + x).exp())


def test_verify_runs_what_is_compiled() -> None:
    x = torch.randn(8, 8)
    f = lambda x: (x.sin() * 3 + x.cos()).exp()
    torch.testing.assert_close(tfn.jit(f, executors=[inductor()], verify=True)(x), f(x))


def test_verify_leaves_out_memory_that_nobody_wrote() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.dropout(x.sin() * 2, 0.5)
        empty = torch.empty_like(y)
        return y, (empty + 1).exp() * y, torch.empty_like(x).copy_(y).cos() * 2

    x = torch.randn(4, 5)
    torch.manual_seed(0)
    y, _, z = f(x)
    torch.manual_seed(0)
    found, _, copied = tfn.jit(f, executors=[inductor()], verify=True)(x)
    same((found, copied), (y, z))
    trace = tfn.trace(f, x)
    assert unwritten_outputs(trace) == {1}


def scatters() -> dict[str, Callable[..., Tensor]]:
    """Ops that write to some elements of a copy, with values or a number."""
    wide: Callable[[Tensor, Tensor], Tensor] = lambda i, s: i[:, None, None].expand_as(s)
    return {
        "index_add": lambda z, i, s: z.index_add(0, i, s),
        "index_copy": lambda z, i, s: z.index_copy(0, i[:4], s[:4]),
        "index_fill": lambda z, i, s: z.index_fill(0, i[:2], 3.0),
        "index_put": lambda z, i, s: z.index_put((i,), s, accumulate=True),
        "scatter": lambda z, i, s: z.scatter(0, wide(i[:4], s[:4]), s[:4]),
        "scatter_add": lambda z, i, s: z.scatter_add(0, wide(i, s), s),
        "scatter_reduce": lambda z, i, s: z.scatter_reduce(0, wide(i, s), s, "amax"),
    }


@pytest.mark.parametrize("name", scatters())
def test_what_reads_a_scatter_comes_after_it(name: str) -> None:
    """Inductor forgets that a kernel reads what was scattered: where it rewrites the kernel's
    loops, and where the result is then written in place.
    """
    scatter, i = scatters()[name], torch.tensor([0, 1, 2, 3, 0, 2])
    x, e, z, s = torch.randn(4, 1, 8), torch.randn(4, 3, 8), torch.zeros(4, 1, 8), torch.randn(6, 1, 8)

    def f(x: Tensor, e: Tensor, z: Tensor, i: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        y = x * (e * e).sum(1, keepdim=True)
        found = scatter(z, i, s)
        written = scatter(z + 2, i, s), scatter(z + 3, i, s), scatter(z + 4, i, s)
        large = [one > 1 for one in written]
        return (
            *(y + found, y, (scatter(y, i, s) * y).sum(-1), z + 1, found),
            torch.ops.aten.index_put(written[0], (large[0],), torch.tensor(5.0)),
            torch.ops.aten.index_put(written[1], (large[1],), torch.tensor(5.0), True),
            torch.ops.aten.slice_scatter(written[2], written[2] * 2, 0, 0, 4),
        )

    same(jit(f)(x, e, z, i, s), f(x, e, z, i, s))


def test_known_miscompilations_of_expanded_targets() -> None:
    """Inductor writes index_put, index_add, ... into the one element behind an expanded intermediate."""

    def f(x: Tensor, i: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        wide = x.sin().expand(4, 5)
        return (
            wide.index_put((i,), v),
            wide.index_copy(0, i, v.expand(2, 5)),
            wide.index_fill(0, i, 2.0),
            wide.index_add(0, i, v.expand(2, 5)),
            x.sum().expand(5).scatter_add(0, i, v[:2]),
            torch.zeros(1).expand(4, 5).reshape(4, 5).index_add(0, i, v.expand(2, 5)),
        )

    args = torch.randn(5), torch.tensor([0, 3]), torch.randn(5)
    same(jit(f)(*args), f(*args))


def test_indices_of_pools_over_other_layouts_are_eagers() -> None:
    f = lambda x: (F.max_pool3d(x, 3, 2, 1, return_indices=True)[1] + 1) * 2
    x = torch.randn(2, 2, 6, 6, 6).transpose(0, 4).contiguous().transpose(0, 4)
    assert torch.equal(jit(f)(x), f(x))


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "of a product": lambda x: (x * 2).argmax() + 1,
    "of a sum": lambda x: x.sum(-1).argmin() * 2,
    "kept": lambda x: (x * 2).argmax(keepdim=True) + x,
    "beside one along a dim": lambda x: (x * 2).argmax(1) * (x + 1).argmin(),
    "under vmap": lambda x: tfn.vmap(lambda row: (row * 2).argmax() + 1)(x),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_the_largest_of_all_elements_is_eagers(name: str) -> None:
    """Inductor counts the elements as they lie in memory, also under torch.compile."""
    f, x = PLACES[name], torch.rand(3, 4, 5)
    jitted, oracle = jit(f), f if name != "under vmap" else torch.vmap(lambda row: (row * 2).argmax() + 1)
    for given in (x, x.transpose(0, 2), x.permute(1, 0, 2)):
        assert torch.equal(jitted(given), oracle(given))


def test_outputs_that_a_decomposition_lays_out_otherwise() -> None:
    """Inductor's `cat` of one tensor is a clone of it; the next region, compiled for eager's layout, read it wrongly."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        chance = (x * x).sigmoid()
        joined = torch.cat([chance])
        return (torch.bernoulli(chance) * joined).sin() + joined, joined

    x, jitted = torch.randn(2, 3, 4).transpose(0, 2), jit(f)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    same(jitted(x), expected)
    assert is_compiled(jitted)


def test_views_of_what_a_region_computes_are_views_of_it() -> None:
    """Inductor made two slices of a value dense; the next region, compiled for eager's layout, read beyond them."""

    def halves(x: Tensor) -> Tensor:
        a, b = torch.nn.functional.group_norm(x, 2).chunk(2, 1)
        return torch.nn.functional.dropout(a, 0.5) * b

    def shown(x: Tensor) -> tuple[Tensor, ...]:
        y = (x.sin() + 1).exp()
        z = y * 2
        parts = torch.cat([y, z.t()])
        return y[1:], y.t(), parts, y, z.clone(), z, z[:, 2], x[1:, 1], y.clone().view(torch.int32)

    x, y = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(4, 4)
    jitted = jit(halves)
    for _ in range(2):
        torch.manual_seed(0)
        expected = halves(x)
        torch.manual_seed(0)
        same([jitted(x)], [expected])
    assert is_compiled(jitted)
    jitted = jit(shown)
    found, expected = jitted(y), shown(y)
    same(found, expected)
    assert sharing([y, *found]) == sharing([y, *expected]) and is_compiled(jitted)
    found[0].zero_()
    assert not found[3][1:].any(), "a write to one is seen by the other"


def sharing(values: Any) -> list[list[bool]]:
    """The tensors that lie in the same memory."""
    places = [value.untyped_storage().data_ptr() for value in values]
    return [[place == other for other in places] for place in places]


def test_layouts_that_pytorch_announces_wrongly() -> None:
    """An op whose results lie otherwise than those of tensors without values: the region behind it looks."""
    with torch.library._scoped_library("thunder_fn_tests", "FRAGMENT") as library:
        library.define("flipped(Tensor x) -> Tensor")
        library.impl("flipped", lambda x: x.t().contiguous().t(), "CPU")
        library.impl("flipped", lambda x: x.clone(), "Meta")
        flipped = torch.ops.thunder_fn_tests.flipped

        def f(x: Tensor) -> Tensor:
            return (flipped(x.sin() + 1).exp() * 2).cos()

        jitted, x = jit(f), torch.randn(3, 4)
        with mock.patch.object(compiled.Inductor, "settles", lambda self, trace: True):
            for _ in range(3):
                same([jitted(x)], [f(x)])


@pytest.mark.filterwarnings("ignore:var_mean")
def test_what_is_computed_of_nothing_is_eagers() -> None:
    """Inductor's mean of no numbers is 0 where it is computed beside their variance."""

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (*torch.var_mean(x * 2), x.sum(), x.sin().mean())

    torch.testing.assert_close(jit(f)(torch.zeros(0)), f(torch.zeros(0)), equal_nan=True)


def test_closed_over_tensors_are_read_when_called() -> None:
    scale = torch.tensor([1.0, 2.0])
    f = jit(lambda x: x.sin() * scale + torch.tensor([1.0, 1.0]))
    x = torch.randn(2)
    torch.testing.assert_close(f(x), x.sin() * scale + 1)
    scale.mul_(3)
    torch.testing.assert_close(f(x), x.sin() * scale + 1)


def test_random_numbers_are_those_of_eager() -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin() * 2, 0.5).cos() + torch.rand_like(x) * 2

    x, g = torch.randn(64), jit(f)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    torch.testing.assert_close(g(x), expected)
    assert is_compiled(g)


def test_factories_keep_the_dtype_that_they_were_traced_with() -> None:
    f = lambda x: (torch.ones(2) * x.sin() + torch.arange(2.0)) * torch.full((2,), 3.0)
    x = torch.randn(2)
    region = tfn.trace(f, x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        (output,) = lower(region, executors=[inductor()])(x)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(output, f(x))


def test_training_a_module_stays_near_eager_over_several_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = lambda params: F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
    optimizer = tfn.functional_optimizer(torch.optim.AdamW, lr=1e-2)

    def step(params: Any, state: Any) -> Any:
        gradients, value = tfn.grad_and_value(loss)(params)
        return *optimizer.update(params, gradients, state), value

    fast, state = jit(step), optimizer.init(params)
    eager = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        params, state, value = fast(params, state)
        eager.zero_grad()
        expected = F.cross_entropy(model(x), y)
        expected.backward()
        eager.step()
        torch.testing.assert_close(value, expected.detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(params[name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_backward_through_autograd_takes_cotangents_of_any_layout() -> None:
    f = jit(lambda x: (x.sin() * 2, x.exp() + 1))
    x = torch.randn(3, 4, requires_grad=True)
    for weight in (torch.randn(3, 4), torch.randn(1, 1).expand(3, 4)):
        x.grad = None
        first, second = f(x)
        torch.autograd.backward((first, second), (weight, weight))
        torch.testing.assert_close(x.grad, (weight * (2 * x.cos() + x.exp())).detach())


# ---- shared regions ----


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_layers_are_one_region_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[str] = []
    original = compiling.generate
    monkeypatch.setattr(compiling, "generate", lambda job: generated.append(job.region.name) or original(job))
    sizes = []
    for layers in (3, 5):
        model = nn.Sequential(*(Layer() for _ in range(layers)))
        params = {name: value.detach() for name, value in model.named_parameters()}
        f = jit(tfn.grad(lambda params, x, model=model: torch.func.functional_call(model, params, (x,)).sum()))
        x = torch.randn(3, 8)
        gradients = f(params, x)
        expected = torch.func.grad(
            lambda params, x=x, model=model: torch.func.functional_call(model, params, (x,)).sum()
        )(params)
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-5)
        sizes.append((len(generated), len(region_names(f))))
    assert sizes[0][0] == sizes[1][0], "five layers need no code that three did not"
    assert sizes[1][1] > sizes[0][1]


class Counts:
    """The cost of a first training step of a stack of layers, in numbers of things and not in seconds."""

    def __init__(self, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: set[Job] = set()
        self.lowered, self.claimed, self.captured, self.rules = 0, 0, 0, 0
        with monkeypatch.context() as patch:
            patch.setattr(worker.WORKER, "start", lambda: None)
            patch.setattr(worker.WORKER, "submit", lambda jobs: self.jobs.update(jobs) or Future())
            for owner, name, counter in (
                (region_calls, "lower", "lowered"),
                (claims._Claiming, "part", "claimed"),
                (optim, "capture", "captured"),
                (vjp, "vjp_rule", "rules"),
            ):
                patch.setattr(owner, name, self.counting(counter, getattr(owner, name)))
            vjp.forward_backward.cache_clear()
            self.step(layers)

    def counting(self, counter: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            setattr(self, counter, getattr(self, counter) + 1)
            return function(*args, **kwargs)

        return counted

    def step(self, layers: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(layers)), nn.Linear(8, 5))
        x, y = torch.randn(6, 8), torch.randint(0, 5, (6,))
        loss = lambda params: F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        optimizer = tfn.functional_optimizer(torch.optim.AdamW, lr=1e-2)

        def step(params: Any, state: Any) -> Any:
            gradients, value = tfn.grad_and_value(loss)(params)
            return *optimizer.update(params, gradients, state), value

        params = {name: value.detach() for name, value in model.named_parameters()}
        state, fast = optimizer.init(params), jit(step, tiered=True)
        for _ in range(2):
            params, state, _ = fast(params, state)
        self.programs = tfn.cache_info(fast).misses


def test_the_first_training_step_takes_no_more_of_anything_for_more_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program; equal layers and equal parameters are captured, derived, claimed, lowered and compiled once."""
    compiling.forget()
    few, many = (Counts(layers, monkeypatch) for layers in (3, 7))  # the first one has no gradient for x
    assert few.jobs
    assert many.jobs == few.jobs
    assert many.programs == few.programs == 1
    of = lambda counts: (counts.lowered, counts.claimed, counts.captured, counts.rules)
    assert of(many) == of(few)


def updates(count: int) -> Callable[..., Any]:
    def f(step: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        correction = 1 - 0.9 ** (step + 1)
        return tuple((x * 0.9 + x.sin() / correction - x.cos()).tanh() for x in tensors[:count])

    return f


def test_an_update_of_many_is_one_update_many_times() -> None:
    args = torch.tensor(3.0), *(torch.randn(4) for _ in range(5))
    trace, _ = closed_region(tfn.trace(updates(5), *args))
    parts = parts_of(trace)
    assert len(parts) == 6, "the numbers, then five updates"
    assert len({part.trace for part in parts}) == 2
    functions = {part: lambda *xs, part=part: evaluate(part.trace, xs) for part in parts}
    assert all(map(torch.equal, join(trace, parts, functions)(*args), evaluate(trace, args)))
    same(jit(updates(5))(*args), updates(5)(*args))


def test_what_stands_side_by_side_once_stays_one_region() -> None:
    trace = tfn.trace(lambda x, y: (x.sin() + 1, y.cos() * 2), torch.randn(2), torch.randn(3))
    assert [part.trace for part in parts_of(trace)] == [trace]


# ---- tiers ----


def test_tiered_runs_on_torch_until_compiled() -> None:
    f = jit(wave, tiered=True)
    x = torch.randn(7)
    first = f(x)
    assert torch.equal(first, wave(x)), "the torch executor's bits"
    executors.wait()
    torch.testing.assert_close(f(x), first)
    assert is_compiled(f)
    again = jit(wave, tiered=True)
    again(x)
    assert is_compiled(again), "what is compiled already is used at once"


def test_what_is_compiled_is_pending_until_it_has_run() -> None:
    """The first run of a kernel may time ways to launch it, which a CUDA graph cannot record."""
    f, x = jit(lambda x: wave(x) * 3, tiered=True), torch.randn(11)
    first = f(x)
    executors.wait()
    assert staged_of(f).is_pending((x,)) and is_compiled(f)
    torch.testing.assert_close(f(x), first)
    assert not staged_of(f).is_pending((x,)) and is_compiled(f)


def test_the_process_that_compiles_has_the_environment_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been started when another folder was set: its answers are looked for in the one that is set now."""
    other = worker.Worker()
    for size in (61, 62):
        monkeypatch.setenv("THUNDER_FN_CACHE_DIR", str(tmp_path / str(size)))
        job = job_of(wave, torch.randn(size))
        assert callable(other.submit([job]).result()[job])
    other.stop()


def test_a_killed_compiler_process_leaves_results_right() -> None:
    other = worker.Worker()
    other.start()
    process = other.process
    assert process is not None
    process.kill()
    process.wait()
    x = torch.randn(5)
    job = job_of(wave, x)
    function = other.submit([job]).result()[job]
    assert callable(function), "the process is started again"
    torch.testing.assert_close(function(x)[0], wave(x))
    other.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_compiles_in_the_background_by_itself() -> None:
    """It has none of the threads of its parent, and the process that compiles is not its own."""
    job, x = job_of(wave, torch.randn(5)), torch.randn(5)
    compiling.compile_jobs([job])
    worker.WORKER.submit([job]).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child == 0:
        function = worker.WORKER.submit([job]).result(timeout=30)[job]
        os._exit(0 if callable(function) and torch.allclose(function(x)[0], wave(x)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- the folder on disk ----


def job_of(f: Callable[..., Any], *args: Tensor) -> Job:
    region, _ = closed_region(tfn.trace(f, *args))
    return Job(region, tuple(arg.stride() for arg in args), torch.get_num_threads())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THUNDER_FN_CACHE_DIR", str(tmp_path))
    return tmp_path


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job) -> Any:
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(compiling, "generate", fail)


def test_what_was_compiled_is_found_on_disk_if_it_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, x = job_of(lambda x: x.sin() * 3 + 4, torch.randn(3)), torch.randn(3)
    compiling.forget()
    assert callable(compiling.compile_jobs([job])[job])
    compiling.forget()
    with monkeypatch.context() as patch:
        no_compiler(patch)
        function = compiling.compile_jobs([job])[job]
    assert callable(function)
    torch.testing.assert_close(function(x)[0], x.sin() * 3 + 4)
    (entry,), (module,) = folder.rglob("*.json"), folder.rglob("*.so")
    whole, code = entry.read_bytes(), module.read_bytes()
    for text in (b"", whole[: len(whole) // 2], whole.replace(b"buf0", b"buf1"), b"\xff\xfe", b"{}"):
        entry.write_bytes(text)
        compiling.forget()
        assert compiling.find([job]) == {}
    entry.write_bytes(whole)
    for bits in (b"", code[: len(code) // 2], code[:-1] + b"?"):
        module.unlink()
        module.write_bytes(bits)
        compiling.forget()
        assert compiling.find([job]) == {}
    module.unlink()
    compiling.forget()
    assert compiling.find([job]) == {}
    assert not list(folder.rglob("*.part"))


def test_processes_that_compile_the_same_at_once_leave_what_both_find(folder: Path) -> None:
    """The compiler gives other bits each time. What one process has written stays whole when the other one comes."""
    job, kernels = job_of(lambda x: x.sin() * 3 + 4, torch.randn(3)), dict[str, Any]()
    compiling.compile_jobs([job])
    (module,) = folder.rglob("*.so")
    entry = store._entry(job)
    code = codegen.generate(job)
    places = {kernel.key: folder / "again" / f"{native.module_name([kernel])}.so" for _, kernel in code.kernels}
    (place,) = places.values()
    place.parent.mkdir()
    place.write_bytes(module.read_bytes() + b"other bits")
    store.write(job, code, places)
    place.unlink()
    assert len(list(folder.rglob("*.so"))) == 2
    assert store._entry(job).digests != entry.digests
    assert store.read(job, kernels) is not None
    assert all(store._digest(module.parent / name) == digest for name, digest in entry.digests)


def test_another_environment_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lambda x: x.sin() * 3 + 4, torch.randn(3))
    compiling.compile_jobs([job])
    compiling.forget()
    monkeypatch.setattr(store, "environment", lambda: "another")
    assert compiling.find([job]) == {}


def test_code_of_another_version_of_its_writers_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that outlives an edit of what writes loops would give the slower code of before, without a word."""
    folder = tmp_path / "compiled"
    shutil.copytree(Path(store.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "__file__", str(folder / "store.py"))
    before = store.environment.__wrapped__()
    assert before == store.environment()
    with (folder / "loop_cpp.py").open("a") as file:
        file.write("# edited")
    assert store.environment.__wrapped__() != before


def test_keys_tell_programs_apart_and_are_the_same_in_every_process() -> None:
    x = torch.randn(3)
    fs = (lambda x: x * 1, lambda x: x * 1.0, lambda x: x * True, lambda x: x + 1, lambda x: x.double() * 1)
    keys = {store.job_key(job_of(f, x)) for f in fs}
    assert len(keys) == len(fs)
    region = closed_region(tfn.trace(fs[1], x))[0]
    job = Job(region, ((1,),), 1)
    assert (
        len({store.job_key(job), store.job_key(Job(region, ((2,),), 1)), store.job_key(Job(region, ((1,),), 2))}) == 3
    )
    assert store.fingerprint(region) == (
        ("f32[3]",),
        (("aten.mul.Tensor", (("v0", "float 0x1.0000000000000p+0"), ()), ("f32[3]",), ()),),
        ("v1",),
    )


def test_a_full_disk_costs_the_cache_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    job, x = job_of(lambda x: x.sin() * 6 + 4, torch.randn(3)), torch.randn(3)
    function = compiling.compile_jobs([job])[job]
    assert callable(function)
    torch.testing.assert_close(function(x)[0], x.sin() * 6 + 4)
    assert not list(folder.rglob("*.*"))


# ---- files that others may have written ----


@pytest.fixture
def kept(folder: Path) -> Job:
    """A region that is on disk, and not in memory."""
    job = job_of(lambda x: x.sin() * 3 + 4, torch.randn(3))
    compiling.forget()
    compiling.compile_jobs([job])
    compiling.forget()
    trusted._warn.cache_clear()
    return job


def test_what_others_may_write_is_left_alone(folder: Path, kept: Job) -> None:
    files = [*folder.rglob("*.json"), *folder.rglob("*.so")]
    assert len(files) == 2
    for path in (*files, files[0].parent):
        mode = path.stat().st_mode
        for right in (0o020, 0o002):
            path.chmod(mode | right)
            trusted._warn.cache_clear()
            with pytest.warns(CacheWarning, match=rf"{path.name} may be written by others"):
                assert compiling.find([kept]) == {}
        path.chmod(mode)
    assert callable(compiling.find([kept])[kept])


def test_files_of_another_user_are_left_alone(folder: Path, kept: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trusted.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.warns(CacheWarning, match=f"belongs to user {os.getuid()}"):
            assert compiling.find([kept]) == {}
        with pytest.warns(CacheWarning, match="belongs to user"):
            store.write(kept, codegen.Code("", (), ()), {})
    assert callable(compiling.find([kept])[kept])


def test_entries_are_signed_by_the_user(folder: Path, kept: Job) -> None:
    """Anybody can compute a digest, and so write an entry that looks whole. Only the user has the key that signs one."""
    (path,) = folder.rglob("*.json")
    whole = path.read_text()
    code, _, text = whole.partition("\n")
    forged = text.replace("def region", "import sys; sys.forged = 1\\ndef region")
    assert forged != text
    digest = hashlib.sha256(forged.encode()).hexdigest()
    for one in (f"{digest}\n{forged}", f"{code}\n{forged}", f"\n{forged}", forged):
        path.write_text(one)
        assert compiling.find([kept]) == {}
    path.write_text(whole)
    name = f"{path.parent.name}/{path.name}"
    assert trusted.opened(name, whole) == text
    with pytest.raises(trusted.Untrusted):
        trusted.opened(f"{name}x", whole)  # an entry that was renamed is another region's
    assert callable(compiling.find([kept])[kept])
    assert not hasattr(sys, "forged")


def test_the_key_is_made_once_and_is_the_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted.Path, "home", lambda: tmp_path)
    first = trusted._kept_key()
    assert len(first) == trusted.SIZE and trusted._kept_key() == first
    (path,) = tmp_path.rglob("key")
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    trusted._warn.cache_clear()
    path.chmod(0o666)
    with pytest.warns(CacheWarning, match="key may be written by others"):
        assert trusted._kept_key() != first
    path.unlink()
    path.write_bytes(b"short")
    path.chmod(0o600)
    assert trusted._kept_key() != trusted._kept_key()


def test_a_library_that_is_cut_is_not_loaded(folder: Path, kept: Job) -> None:
    """The loader would map it all the same, and the process die when it reads what is not there."""
    (module,) = folder.rglob("*.so")
    code = module.read_bytes()
    assert native.load(code, module.stem)
    for length in (0, 3, 63, 64, 4096, len(code) // 2, len(code) - 1):
        with pytest.raises(ImportError, match="is cut short"):
            native.load(code[:length], module.stem)


# ---- compilers that fail ----


@pytest.mark.parametrize("command", ["sh -c 'sleep 60'", "sh -c 'sleep 60 & sleep 60'"])
def test_a_compiler_that_hangs_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("thunder_fn.torch_internals.inductor.build_command", lambda source, target: command)
    monkeypatch.setattr(compiling, "check_compiler", lambda: None)
    monkeypatch.setenv("THUNDER_FN_COMPILE_SECONDS", "0.3")
    x, start = torch.randn(3), time.monotonic()
    with pytest.warns(RegionWarning, match=r"(?s)did not end within 0.3 s.*THUNDER_FN_COMPILE_SECONDS sets"):
        assert torch.equal(jit(lambda x: (x.sin() * 5 + 2).tanh())(x), (x.sin() * 5 + 2).tanh())
    assert time.monotonic() - start < 50


def test_a_compiler_that_never_says_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor asks for it, and waits."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("thunder_fn.torch_internals.inductor.compilers", lambda: ("/nonexistent", str(compiler)))
    monkeypatch.setenv("THUNDER_FN_COMPILE_SECONDS", "0.3")
    with pytest.raises(codegen.RegionError, match="did not end within"):
        native.check_compiler.__wrapped__()


@pytest.mark.parametrize("given", ["soon", "-1", "nan", ""])
def test_the_time_that_a_compiler_has_is_a_number(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("THUNDER_FN_COMPILE_SECONDS", given)
    with pytest.raises(ExecutorError, match="THUNDER_FN_COMPILE_SECONDS is a positive number of seconds, given"):
        native.seconds_to_compile()
    monkeypatch.setenv("THUNDER_FN_COMPILE_SECONDS", "inf")
    assert native.seconds_to_compile() == threading.TIMEOUT_MAX


def test_the_worker_imports_nothing_from_where_it_is_started(tmp_path: Path) -> None:
    """Neither the current folder nor PYTHONPATH hides a module of Python's, or one that is installed."""
    for name in ("queue", "json", "struct", "sympy"):
        (tmp_path / f"{name}.py").write_text("import os; os.write(2, b'RAN'); os._exit(3)")
    roots = [str(Path(module.__file__ or "").parents[1]) for module in (tfn, torch)]
    lines = (
        f"import sys; sys.path = [one for one in sys.path if one != {str(tmp_path)!r}] + {roots!r}",
        "from thunder_fn.executors.torchinductor.worker import WORKER",
        "WORKER.start()",
        "WORKER.process.stdin.close(); print('code', WORKER.process.wait())",
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "RAN" not in done.stderr and "code 0" in done.stdout, done.stdout + done.stderr


def test_a_missing_compiler_is_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "thunder_fn.torch_internals.inductor.build_command", lambda source, target: "/nonexistent/g++ -o x"
    )
    f = jit(lambda x: (x.sin() * 7 + 2).tanh())
    x = torch.randn(3)
    with pytest.warns(RegionWarning) as caught:
        output = f(x)
    assert torch.equal(output, (x.sin() * 7 + 2).tanh())
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(
        "inductor: inductor_fusion_0 of program could not be compiled and runs on the torch executor: "
        "the C++ compiler /nonexistent/g++ cannot be run: [Errno 2] No such file or directory: '/nonexistent/g++'\n"
        "from:         "
    )
    assert text.endswith(
        "Install a C++ compiler and name it in the environment variable CXX, or leave the inductor executor out."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(f(x), output), "and no second one"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("false", "the C++ compiler failed:"),
        ("sh -c 'kill -9 $$'", "the C++ compiler was killed by signal 9:"),
        ("true", "the C++ compiler wrote no m"),
    ],
)
def test_a_compiler_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str) -> None:
    monkeypatch.setattr("thunder_fn.torch_internals.inductor.build_command", lambda source, target: command)
    f = jit(lambda x: (x.sin() * 8 + 2).tanh())
    x = torch.randn(3)
    with pytest.warns(RegionWarning, match=reason.replace("+", r"\+")):
        assert torch.equal(f(x), (x.sin() * 8 + 2).tanh())


def test_one_region_that_cannot_be_compiled_does_not_stop_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = job_of(lambda x: x.sin() * 9 + 1, torch.randn(3)), job_of(lambda x: x.cos() * 9 + 1, torch.randn(3))

    def spoiled(job: Job) -> codegen.Code:
        code = generate(job)
        if job is not bad:
            return code
        kernels = tuple((name, codegen.Kernel(kernel.types, "#error no")) for name, kernel in code.kernels)
        return codegen.Code(code.text, kernels, code.constants)

    monkeypatch.setattr(compiling, "generate", spoiled)
    results = compiling.compile_jobs([good, bad])
    assert callable(results[good])
    assert isinstance(results[bad], compiling.Failed)


# ---- threads ----


def test_threads_share_one_program() -> None:
    f = jit(wave)
    xs = [torch.randn(7) for _ in range(4)]
    found: dict[int, Tensor] = {}

    def call(index: int) -> None:
        for _ in range(20):
            found[index] = f(xs[index])

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(xs):
        torch.testing.assert_close(found[index], wave(x))


def test_the_executor_by_name() -> None:
    f = tfn.jit(wave, executors=["inductor"])
    x = torch.randn(7)
    torch.testing.assert_close(f(x), wave(x))
    assert tfn.executors.get_executor("inductor") is compiled.EXECUTOR


# ---- finding the region that is to blame ----


def in_thirds(x: Tensor) -> tuple[Tensor, ...]:
    """Three regions: random numbers that depend on one and lead to the next stand between them."""
    a = (x.sin() * 2).sigmoid()
    b = torch.bernoulli(a).cos() * 3 + a
    return b, torch.bernoulli(b.sigmoid()).exp() * 4 + x


def test_bisect_finds_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    torch.manual_seed(0)
    expected = in_thirds(x)

    def check(executor: compiled.RegionCompiler) -> bool:
        f = tfn.jit(in_thirds, executors=[executor])
        torch.manual_seed(0)
        return all(map(torch.allclose, f(x), expected))

    def make(fuel: int | None = None) -> compiled.Backend:
        return backend("eager", fuel=fuel)

    assert bisect(check, make) is None
    regions = make()
    check(regions)
    names = [region.name for region in regions.taken]
    assert len(names) > 1
    original = compiled.Backend.fuse

    def wrong(self: compiled.Backend, region: Trace) -> Any:
        run = original(self, region)
        return (lambda *xs: tuple(x * 0.5 for x in run(*xs))) if region.name == names[1] else run

    monkeypatch.setattr(compiled.Backend, "fuse", wrong)
    found = bisect(check, make)
    assert found is not None
    assert found.name == names[1]
    with pytest.raises(ExecutorError, match="wrong with no region compiled"):
        bisect(lambda executor: False, make)


def test_bisect_in_training_steps_and_loops() -> None:  # noqa: C901 - a branch for each family
    """A compiler that is wrong about tanh, in a train step, in a loop, in its gradient and in an executor of one's own."""

    def is_bad(region: Trace) -> bool:
        return any("tanh" in equation.op.name for equation in region.equations)

    def wrong(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        bad = any("tanh" in str(node.target) for node in graph.graph.nodes)
        return (lambda *xs: tuple(y * 1.5 for y in graph.forward(*xs))) if bad else graph.forward

    def own(fuel: int | None = None) -> FusionExecutor:
        def fuse(region: Trace) -> Any:
            factor = 1.5 if is_bad(region) else 1.0
            return lambda *xs: tuple(y * factor for y in tfn.evaluate(region, xs))

        ex = FusionExecutor("own", fuse=fuse, min_size=1, fuel=fuel)
        for op in (torch.sin, torch.tanh, torch.mul, torch.ops.aten.tanh_backward):
            ex.register_supported(op)
        return ex

    def train(w: Tensor, x: Tensor) -> Tensor:
        loss = lambda w: torch.bernoulli(torch.sigmoid(torch.sin(x @ w)) * 0.5).add(torch.tanh(x @ w) * 3).sum()
        return w - 0.1 * tfn.grad(loss)(w)

    def loop(w: Tensor, x: Tensor) -> Tensor:
        start = (torch.sin(x) * 2).cos()
        return (tfn.fori_loop(0, 3, lambda i, h: torch.tanh(h @ w) + 0.1, start) * 2).exp().sum()

    w, x = torch.randn(4, 4), torch.randn(3, 4)
    for f in (train, loop, tfn.grad(loop)):
        torch.manual_seed(0)
        expected = f(w, x)

        def check(executor: FusionExecutor, f: Any = f, expected: Tensor = expected) -> bool:
            torch.manual_seed(0)
            return torch.allclose(tfn.jit(f, executors=[executor])(w, x), expected, atol=1e-5)

        for make in (lambda fuel=None: backend(wrong, fuel=fuel), own):
            found = bisect(check, make)
            assert found is not None
            assert is_bad(found)


# ---- backends of torch.compile ----


def test_any_backend_is_given_regions_of_aten_calls() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def mine(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.register_backend(mine, name="thunder_fn_test")
    f = tfn.jit(tfn.grad(lambda x: (x.sin() * 2).exp().sum()), executors=[backend("thunder_fn_test")])
    x = torch.randn(5)
    for _ in range(2):
        torch.testing.assert_close(f(x), (x.sin() * 2).exp() * 2 * x.cos())
    assert len(graphs) == 1
    g = tfn.jit(lambda x: (x.sin() * 2).exp(), executors=[backend(functools.partial(mine))])
    torch.testing.assert_close(g(x), (x.sin() * 2).exp())
    assert len(graphs) == 2
    assert "by backend_mine" in str(tfn.last_traces(g)[-1])
    with pytest.raises(UnknownOption, match="there is no backend 'nonsense'"):
        backend("nonsense")
    with pytest.raises(ExecutorError) as caught:
        backend(3)  # type: ignore[arg-type]
    what = "backend: a backend is a function of a graph and its inputs, or the name of one, given an int: 3"
    assert message_of(caught.value) == what
    short = tfn.jit(lambda x: (x.sin() * 2).exp(), executors=[backend(lambda graph, inputs: lambda x: (x[:1],))])
    with pytest.raises(ExecutorError, match=r"returned \(f32\[1\]\), but its outputs are \(f32\[5\]\)"):
        short(x)


def test_a_backend_that_fails() -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        raise RuntimeError("no kernel for today")

    torch._dynamo.register_backend(fails, name="thunder_fn_fails")
    f, x = (
        tfn.jit(lambda x: (x.sin() * 2).exp(), executors=[backend("thunder_fn_fails")]),
        torch.randn(3).requires_grad_(),
    )
    with pytest.warns(RegionWarning, match="backend_thunder_fn_fails could not compile the region") as found:
        y = f(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert all("RuntimeError: no kernel for today" in str(one.message) for one in found)
    assert torch.equal(y, (x.sin() * 2).exp()) and torch.equal(f(x), y)
    torch.testing.assert_close(gradient, y * 2 * x.cos())


# ---- what regions allocate ----


def recurrence(w: Tensor, xs: Tensor) -> Tensor:
    return tfn.scan(lambda h, x: (torch.tanh(x + h @ w), None), xs[0], xs)[0].square().sum()


def softened(w: Tensor, x: Tensor) -> Tensor:
    y = torch.softmax(x @ w, -1)
    return ((y @ w.t()).sin() * (y.sum() + x.cos())).square().mean()


@pytest.mark.parametrize("f", [recurrence, softened], ids=lambda f: f.__name__)
def test_memory_of_regions_is_what_they_allocate(f: Callable[..., Tensor]) -> None:
    """Found without compiling, and the same after it: the timeline runs the code without its kernels."""
    args = torch.randn(64, 64), torch.randn(100, 64, 64) if f is recurrence else torch.randn(256, 64)
    step = tfn.grad(tfn.jit(f, executors=[inductor()]))
    before = inspect.memory(step, *args)
    step(*args)
    live = np.cumsum(internals.allocations(lambda: step(*args)))
    found = inspect.memory(step, *args)
    assert (found.peak, found.unseen) == (before.peak, 0)
    assert abs(found.peak - live.max()) <= 0.1 * live.max()
    assert any(one.kind == "scratch" for one in found.buffers)


@pytest.mark.parametrize("settled", (True, False))
def test_a_region_lets_go_of_what_it_has_read_last(settled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a program hands over to a region is freed inside of the region; small things are not worth it."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.sin(a) * 2 @ b).cos() + 1

    monkeypatch.setattr(compiled.Inductor, "settles", lambda self, trace: settled)
    monkeypatch.setattr(codegen, "is_faster_here", lambda: False)
    events, multiply = list[str](), torch.mm

    def mm(*args: Any, **kwargs: Any) -> Any:
        events.append("multiplied")
        return multiply(*args, **kwargs)

    for size, order in ((512, ["freed", "multiplied"]), (64, ["multiplied", "freed"])):
        a, b = torch.randn(size, size), torch.randn(size, size)
        program = lower(tfn.trace(f, a, b), below_autograd=True, executors=(inductor(),), taken=True)
        for _ in range(2):  # from then on it is compiled
            expected = program(a, b)
        monkeypatch.setattr(torch, "mm", mm)
        box = [a.clone(), b]
        weakref.finalize(box[0], events.append, "freed")
        assert torch.equal(program.take(box)[0], expected[0]) and events == order and box == []
        monkeypatch.setattr(torch, "mm", multiply)
        events.clear()


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_gradients_of_recurrent_layers(kind: type[torch.nn.Module]) -> None:
    """The kernel of LSTMs saves a workspace for its backward, which a region's call of it did not."""
    layer, x = kind(8, 6, 2, bidirectional=True), torch.randn(3, 2, 8)

    def loss(x: Tensor, **parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,))[0].transpose(0, 1).relu().square().sum()

    parameters = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    found, known = (
        torch.autograd.grad(f(x, **parameters), [*parameters.values()])
        for f in (tfn.jit(loss, executors=[inductor()]), loss)
    )
    torch.testing.assert_close(found, known)
