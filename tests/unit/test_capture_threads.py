"""Captures from several threads, captures inside captures, and what a capture leaves behind: nothing."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import unittest.mock
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.unit.capturing import agree
from thunder_fn.api.calling import tensors_of
from thunder_fn.capture import capture, current
from thunder_fn.capture.scopes import ScopeMode
from thunder_fn.errors import ThunderError, UnsupportedCall
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.ir.trace import Trace
from thunder_fn.structured import checkpoint
from thunder_fn.torch_internals import function_modes

X = torch.randn(4, 8)


def global_state() -> tuple[Any, ...]:
    """The state that a capture changes for its duration."""
    return (
        nn.Module.__call__,
        torch.get_rng_state,
        torch.random.set_rng_state,
        torch.compiler._is_compiling_flag,
        torch._functorch.utils.unwrap_dead_wrappers,
        len(function_modes()),
        torch._C._len_torch_dispatch_stack(),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.autograd.is_multithreading_enabled() if hasattr(torch.autograd, "is_multithreading_enabled") else None,
        current(),
    )


# ---- threads ----


def test_anomaly_mode_stays_as_it_is() -> None:
    """A trace has no values in which PyTorch could find NaN: it is told so, and nobody else."""
    looks = torch.is_anomaly_check_nan_enabled
    seen = list[tuple[bool, bool]]()

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_anomaly_enabled(), looks()))
        return tfn.grad(lambda y: (y.sin() * x).sum())(x) + torch.autograd.grad(x.sin().sum(), x)[0]

    want = capture(f, (X.clone().requires_grad_(),)).trace
    with torch.autograd.set_detect_anomaly(True):
        assert capture(f, (X.clone().requires_grad_(),)).trace == want
        torch.testing.assert_close(tfn.jit(tfn.grad(lambda x: f(x).sum()))(X), X.cos() - X * X.sin())
        assert looks()
    assert set(seen[1:]) == {(True, True)} and not torch.is_anomaly_enabled()


def state_of_the_process() -> dict[str, Any]:
    """The state that all threads share, as Python code of a user sees it."""
    methods = (
        *((nn.Module, name) for name in ("__call__", "__getattribute__", "__setattr__")),
        *((torch.inference_mode, name) for name in ("__enter__", "__exit__")),
        (threading.Thread, "start"),
        *((math, name) for name in vars(math)),
    )
    return {
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "answers": (torch.compiler.is_compiling(), torch.get_num_threads(), torch.is_inference_mode_enabled()),
        "modes": (len(function_modes()), torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled()),
        **{f"{owner.__name__}.{name}": getattr(owner, name) for owner, name in methods},
    }


@pytest.mark.parametrize("anomaly", [False, True], ids=["", "anomaly"])
@pytest.mark.parametrize("how", ["grad", "jit", "dynamic"])
def test_other_threads_see_nothing_of_a_capture(how: str, anomaly: bool) -> None:
    ready, looked, seen = threading.Event(), threading.Event(), list[dict[str, Any]]()
    net = nn.Linear(3, 3)

    def look() -> None:
        ready.wait(60)
        seen.append(state_of_the_process())
        looked.set()

    def f(x: torch.Tensor) -> torch.Tensor:
        assert torch.compiler.is_compiling()
        ready.set()
        looked.wait(60)
        return (net(x) * math.sqrt(x.shape[0])).sum()

    around = {"grad": tfn.grad(f), "jit": tfn.jit(f), "dynamic": tfn.jit(f, dynamic=True)}
    thread = threading.Thread(target=look)
    with torch.autograd.set_detect_anomaly(anomaly):
        thread.start()
        before = state_of_the_process()
        around[how](torch.ones(3))
        thread.join()
        assert seen == [before] and state_of_the_process() == before


def program(number: int) -> tuple[Callable[..., Any], Any]:
    """A different program for each number."""
    torch.manual_seed(number)
    layers = [nn.Linear(8, 8) if i % 2 else nn.BatchNorm1d(8) for i in range(2 + number)]
    model = nn.Sequential(*layers, nn.Dropout(0.0)).eval()

    def f(x: Any) -> Any:
        assert torch.compiler.is_compiling()
        y = model(x) * number
        return tfn.grad(lambda y: (y**2).sum())(y)

    return f, model


def test_threads_capture_at_once_while_another_runs_eagerly() -> None:
    before = global_state()
    stop, problems, calls = threading.Event(), [], [0]

    def run_eagerly() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        while not stop.is_set():
            out = model(X)
            calls[0] += 1
            if torch.compiler.is_compiling() or type(out) is not torch.Tensor or current() is not None:
                problems.append("the eager thread saw a capture")

    def captured(number: int) -> bool:
        f, model = program(number)
        expected = 2 * number * model(X)
        for _ in range(4):
            result = capture(f, (X,))
            (out,) = evaluate(result.trace, tensors_of(result, (X,), {}))
            if not torch.equal(out, expected):
                return False
        return True

    eager = threading.Thread(target=run_eagerly)
    eager.start()
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(captured, range(1, 9)))
    stop.set()
    eager.join()
    assert results == [True] * 8
    assert problems == []
    assert calls[0] > 0
    assert global_state() == before


def test_threads_get_equal_traces() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with ThreadPoolExecutor(8) as pool:
        traces = list(pool.map(lambda _: capture(model, (X,)).trace, range(16)))
    assert len(set(traces)) == 1


def _alone(work: Callable[[], Any]) -> None:
    """Do the work in a thread, and swallow its error as `threading` does."""

    def caught() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=caught, name="worker")
    thread.start()
    thread.join()


def _in_a_thread(x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    _alone(lambda: found.append(torch.sin(x)))
    return found[0] * 2


def _written_in_a_thread(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    _alone(lambda: y.add_(1))
    return y


def _read_in_a_thread(x: torch.Tensor) -> torch.Tensor:
    found: list[bool] = []
    _alone(lambda: found.append(bool(x.sum() > 0)))
    return x * 2 if found else x


def _in_a_pool(x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(torch.sin, [x, x * 2]), start=x)


def _by_asyncio(x: torch.Tensor) -> torch.Tensor:
    async def run() -> torch.Tensor:
        return await asyncio.to_thread(torch.sin, x)

    found: list[torch.Tensor] = []  # by a loop of its own: the tests' browser has one in this thread
    _alone(lambda: found.append(asyncio.run(run())))
    return found[0] if found else x


def _in_a_thread_of_a_transform(x: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    _alone(lambda: found.append(tfn.grad(lambda y: (y * x).sum())(torch.ones(4, 8))))
    return found[0] if found else x


WITH_THREADS = (
    *(_in_a_thread, _written_in_a_thread, _read_in_a_thread, _in_a_pool, _by_asyncio),
    _in_a_thread_of_a_transform,
)


@pytest.mark.filterwarnings("ignore::thunder_fn.errors.OutsideWarning")
@pytest.mark.parametrize("f", WITH_THREADS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("around", [tfn.jit, lambda f: tfn.grad(lambda x: f(x).sum())], ids=["jit", "grad"])
def test_tracers_in_other_threads_are_refused(f: Any, around: Any) -> None:
    """Whether or not the thread's own error is seen, the capture names the thread and the call."""
    with pytest.raises(UnsupportedCall, match=r"the thread '.*' calls `.*` on a tracer"):
        around(f)(X)
    assert current() is None and torch.equal(tfn.jit(torch.sin)(X), torch.sin(X))


def test_is_compiling_can_be_combined_as_a_bool() -> None:
    flags: list[Any] = []

    def f(x: Any) -> Any:
        flag = torch.compiler.is_compiling()
        flags.extend([flag | False, False | flag, flag & True, flag == True, not flag, bool(flag)])  # noqa: E712
        return x

    capture(f, (X,))
    assert flags == [True, True, True, True, False, True]
    assert torch.compiler.is_compiling() is False


# ---- captures inside captures ----


def test_capture_inside_capture() -> None:
    weight = torch.randn(8)

    def f(x: Any) -> Any:
        inner = capture(lambda y: (y * weight * x.sum()).sin(), (x,)).trace
        assert len(inner.constants) == 2
        return tfn.grad(lambda y: (y**3 * weight * x).sum())(x), tfn.vjp(lambda y: y * x, x)[1](x)

    agree(f, X)


@pytest.mark.parametrize(
    "around",
    (
        lambda f: torch.vmap(f)(X),
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.jvp(f, (X,), (X,))[1],
        lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(X),
    ),
    ids=("vmap", "grad", "jvp", "vmap of grad"),
)
def test_capture_inside_torch_func(around: Any) -> None:
    result = around(tfn.grad(lambda y: (y**3).sum()))
    assert torch.allclose(result, around(lambda y: 3 * y**2))


def test_capture_under_grad_modes_and_modes_of_others() -> None:
    with torch.no_grad(), torch.device("cpu"):
        assert capture(torch.sin, (X,)).trace == capture(torch.sin, (X,)).trace


# ---- nothing is left behind ----


class Odd(BaseException):
    """Not an Exception."""


def to_numpy(x: Any) -> Any:
    return x.numpy()


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def inside_vmap(x: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu"):
        return torch.vmap(lambda row: row.undefined)(x)


def odd(x: Any) -> Any:
    raise Odd


def mutate_and_fail(x: Any) -> Any:
    x.add_(1)
    raise ValueError("no")


FAILING = (to_numpy, branch, inside_vmap, odd, mutate_and_fail, nn.Linear(3, 3), lambda x: (y for y in x))


@contextmanager
def any_error() -> Iterator[None]:
    with suppress(ThunderError, Odd):
        yield
        pytest.fail("no error")


@pytest.mark.parametrize("f", FAILING, ids=range(len(FAILING)))
def test_a_failed_capture_leaves_nothing(f: Any) -> None:
    before, x = global_state(), X.clone()
    version = x._version
    with any_error():
        capture(f, (x,))
    assert global_state() == before
    assert torch.equal(x, X)
    assert x._version == version
    assert torch.equal(x.sin(), X.sin())


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("f", (*FAILING, torch.sin, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))))
def test_nothing_keeps_tensors_alive(f: Any) -> None:
    """Neither the argument nor what is closed over, whether the function fails or not. No collector is needed."""
    with suppress(ThunderError, Odd):
        capture(f, (X.clone(),))  # what PyTorch caches, it has now cached
    with no_collector():
        x, closed = X.clone(), X.clone()
        references = [weakref.ref(x), weakref.ref(closed)]
        with suppress(ThunderError, Odd):
            capture(lambda x, closed=closed: f(x + closed), (x,))
        del x, closed
        assert [reference() for reference in references] == [None, None]


def test_a_trace_keeps_its_constants_alive_and_nothing_else() -> None:
    with no_collector():
        x, closed = X.clone(), X.clone()
        references = [weakref.ref(x), weakref.ref(closed)]
        captured = capture(lambda x, y=closed: x + y, (x,))
        del x
        assert references[0]() is None
        assert captured.trace.constants[0].tensor is closed
        del captured, closed
        assert references[1]() is None


# ---- depth ----


def nested_checkpoints(depth: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A checkpoint in a checkpoint, and so on."""
    if depth == 0:
        return torch.sin
    inside = nested_checkpoints(depth - 1)
    return lambda x: tfn.checkpoint(inside)(x) * 1.5


@pytest.mark.parametrize(
    "around", [lambda f: f, tfn.jit, lambda f: tfn.grad(lambda x: f(x).sum())], ids=["eager", "jit", "grad"]
)
def test_captures_inside_each_other_cost_what_they_hold(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is linear in the depth: no capture asks those around it, and no equal traces are compared twice."""
    counted = [0]

    def counting(original: Any) -> Any:
        def called(*args: Any) -> Any:
            counted[0] += 1
            return original(*args)

        return called

    for cls, name in ((ScopeMode, "__torch_function__"), (checkpoint._Noting, "__torch_function__"), (Trace, "__eq__")):
        monkeypatch.setattr(cls, name, counting(getattr(cls, name)))

    def count(depth: int) -> int:
        counted[0] = 0
        around(nested_checkpoints(depth))(X)
        return counted[0]

    count(2)
    first, second, third = count(10), count(20), count(40)
    assert third - second <= 3 * (second - first)  # four times, if it were quadratic


def test_equal_traces_of_equal_parts_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    f, g = nested_checkpoints(30), nested_checkpoints(30)
    first, second = tfn.trace(f, X), tfn.trace(g, X)
    original, counted = Trace.__eq__, [0]

    def counting(self: Trace, other: object) -> bool:
        counted[0] += 1
        return original(self, other)

    monkeypatch.setattr(Trace, "__eq__", counting)
    assert first == second and first == second
    counted[0] = 0
    assert first == second and first.equations[0].body == second.equations[0].body
    assert counted[0] == 2


def test_a_method_that_somebody_puts_back_inside_a_capture() -> None:
    """FX reads `nn.Module.__call__`, replaces it and puts back what it has read."""
    before = torch.nn.Module.__call__

    def f(x: torch.Tensor) -> torch.Tensor:
        torch.nn.Module.__call__ = torch.nn.Module.__call__  # type: ignore[method-assign]
        return torch.nn.ReLU()(x)

    tfn.trace(f, X)
    assert vars(torch.nn.Module)["__call__"] is before


def test_a_methods_original_comes_back_when_it_is_asked_for() -> None:
    module, held = torch.nn.ReLU(), vars(torch.nn.Module)
    names = ("__call__", "__getattribute__", "__setattr__")
    original = [getattr(torch.nn.Module, name) for name in names]
    present = [name in held for name in names]
    for _ in range(2):
        tfn.jit(lambda x: x.sin())(X)
        assert module(X).shape == X.shape and module.training
        module.training = True
        assert [name in held for name in names] == present
        assert [getattr(torch.nn.Module, name) for name in names] == original
        tfn.jit(lambda x: x.sin())(X)
        with unittest.mock.patch.object(torch.nn.Module, "__call__", lambda self, x: x + 1):
            assert module(X).equal(X + 1)
            assert tfn.jit(lambda x: module(x))(X).equal(X + 1)
        assert module(X).equal(X.relu())
