"""Transforms keep their captures between eager calls, as long as nothing that was read changes."""

import collections
import functools
import gc
import io
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import thunder_fn as tfn
from thunder_fn.api import captures
from thunder_fn.errors import UnsupportedCall

Tensor = torch.Tensor


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are captured in a test by calls from outside, in order."""
    found: list[Any] = []
    original = captures.capture

    def noting(f: Any, *args: Any, **kwargs: Any) -> Any:
        if captures.current() is None:
            found.append(f)
        return original(f, *args, **kwargs)

    monkeypatch.setattr(captures, "capture", noting)
    tfn.clear_caches(rules=False)
    return found


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs)


# ---- what is kept ----


def f(x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x @ y) * y.sum()).pow(2).sum()


REST = slice(1, None)

TRANSFORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "grad": lambda lib, x, y: lib.grad(f)(x, y),
    "grad of two": lambda lib, x, y: lib.grad(f, argnums=(1, 0))(x, y),
    "grad_and_value": lambda lib, x, y: lib.grad_and_value(f)(x, y),
    "aux": lambda lib, x, y: lib.grad(lambda a: (f(a, y), a * 2), has_aux=True)(x),
    "vmap": lambda lib, x, y: lib.vmap(f, in_dims=(0, None))(torch.stack([x, -x]), y),
    "chunks": lambda lib, x, y: lib.vmap(f, (0, None), chunk_size=2)(torch.stack([x] * 3), y),
    "vmap of grad": lambda lib, x, y: lib.vmap(lib.grad(f), (None, 0))(x, torch.stack([y, -y])),
    "jvp": lambda lib, x, y: lib.jvp(f, (x, y), (y.mT, x.mT)),
    "vjp": lambda lib, x, y: lib.vjp(lambda a: a @ y, x)[1](torch.ones(3, 3)),
    "linearize": lambda lib, x, y: (
        lib.linearize(lambda a: a @ y, x)[1](x + 1) if lib is tfn else lib.jvp(lambda a: a @ y, (x,), (x + 1,))[1]
    ),
    "jacrev": lambda lib, x, y: lib.jacrev(f)(x, y),
    "jacfwd": lambda lib, x, y: lib.jacfwd(f)(x, y),
    "hessian": lambda lib, x, y: lib.hessian(f)(x, y),
    "functionalize": lambda lib, x, y: lib.functionalize(lambda a: (a * 1).add_(1))(x),
    "a slice": lambda lib, x, y: lib.grad(lambda a, s: a[s].sum() + a[REST].sum())(x, slice(0, 2)),
    "kwargs": lambda lib, x, y: lib.grad(lambda a, *, b: f(a, b))(x, b=y),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_later_calls_are_not_captured(name: str, captured: list[Any]) -> None:
    """From the third call on: PyTorch imports modules in the first of a process, which is an effect."""
    run = TRANSFORMS[name]
    for seed in range(4):
        given = torch.manual_seed(seed)
        x, y = torch.randn(3, 4, generator=given), torch.randn(4, 3, generator=given)
        same(run(tfn, x, y), run(torch.func, x, y))
        count = len(captured) if seed < 2 else count  # noqa: F821
        assert len(captured) == count > 0


def test_a_step_that_defines_its_loss_is_captured_once(captured: list[Any]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    params = dict(model.named_parameters())

    def step(lib: Any, batch: dict[str, Tensor], scale: float) -> Any:
        def loss(p: Any) -> Tensor:
            out = torch.func.functional_call(model, p, (batch["x"],))
            return (out - batch["y"]).pow(2).mean() * scale

        return lib.grad(loss)(params)

    for seed in range(3):
        torch.manual_seed(seed)
        batch = {"x": torch.randn(5, 4), "y": torch.randn(5, 1)}
        same(step(tfn, batch, 2.0), step(torch.func, batch, 2.0))
    assert len(captured) == 1
    same(step(tfn, batch, 3.0), step(torch.func, batch, 3.0))
    assert len(captured) == 2


def test_autograd_follows_calls_that_are_not_captured(captured: list[Any]) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        found = []
        for lib in (tfn, torch.func):
            x = torch.arange(12.0).reshape(3, 4).div(7).add(seed).requires_grad_()
            y = torch.linspace(0, 1, 12).reshape(4, 3).requires_grad_()
            loss = lib.grad(lambda a: f(a, y))(x).pow(2).sum()
            found.append((loss.detach(), *torch.autograd.grad(loss, (x, y))))
        same(*found)
    assert len(captured) == 1


def test_a_result_that_is_closed_over_is_that_of_the_call() -> None:
    def step(lib: Any, y: Tensor) -> Any:
        return lib.grad(lambda a: ((a * y).sum(), y), has_aux=True)(torch.ones(3))

    for value in (1.0, 2.0):
        y = torch.full((3,), value)
        (grad, aux), (want, _) = step(tfn, y), step(torch.func, y)
        same(grad, want)
        assert aux is y


def test_tensors_of_a_call_are_not_kept_alive() -> None:
    def step(batch: Tensor) -> Tensor:
        return tfn.grad(lambda a: (a * batch).sum())(torch.ones(3))

    gone: list[Any] = []
    for value in (1.0, 2.0):
        batch = torch.full((3,), value)
        step(batch)
        gone.append(weakref.ref(batch))
        del batch
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_threads_share_captures(captured: list[Any]) -> None:
    x, y = torch.ones(3, 4), torch.ones(4, 3)
    want, found = torch.func.grad(f)(x, y), list[Tensor]()
    run = lambda: [found.append(tfn.grad(f)(x, y)) for _ in range(3)]
    run()
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(captured) == 1 and len(found) == 15
    for one in found:
        same(one, want)


# ---- what changes between two calls ----

SCALE, TABLE, ITEMS = 2.0, {"a": 2.0}, [1.0, 2.0]
WEIGHT = torch.ones(3)
CONFIG = SimpleNamespace(scale=2.0, inner=SimpleNamespace(flag=True), weight=torch.ones(3))
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.0))


def helper(x: Tensor) -> Tensor:
    return x * 2


def with_default(x: Tensor, scale: float = 2.0) -> Tensor:
    return (x * scale).pow(2).sum()


def _set(name: str, value: Any) -> None:
    globals()[name] = value


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any], Callable[[], Any]]] = {
    "a global": (
        lambda x: (x**2).sum() * SCALE,
        lambda: _set("SCALE", 5.0),
        lambda: _set("SCALE", 2.0),
    ),
    "an entry": (
        lambda x: (x**2).sum() * TABLE["a"],
        lambda: TABLE.update(a=7.0),
        lambda: TABLE.update(a=2.0),
    ),
    "an item": (
        lambda x: (x**2).sum() * ITEMS[1],
        lambda: ITEMS.__setitem__(1, 9.0),
        lambda: ITEMS.__setitem__(1, 2.0),
    ),
    "a longer list": (
        lambda x: sum((x**2).sum() * one for one in ITEMS),
        lambda: ITEMS.append(4.0),
        lambda: ITEMS.pop(),
    ),
    "an attribute": (
        lambda x: (x**2).sum() * CONFIG.scale,
        lambda: setattr(CONFIG, "scale", 4.0),
        lambda: setattr(CONFIG, "scale", 2.0),
    ),
    "an attribute below": (
        lambda x: (x**2).sum() if CONFIG.inner.flag else x.sum(),
        lambda: setattr(CONFIG.inner, "flag", False),
        lambda: setattr(CONFIG.inner, "flag", True),
    ),
    "a function": (
        lambda x: helper(x).pow(2).sum(),
        lambda: _set("helper", torch.sin),
        lambda: _set("helper", lambda x: x * 2),
    ),
    "a default": (
        with_default,
        lambda: setattr(with_default, "__defaults__", (3.0,)),
        lambda: setattr(with_default, "__defaults__", (2.0,)),
    ),
    "another tensor": (
        lambda x: (x * WEIGHT).pow(2).sum(),
        lambda: _set("WEIGHT", torch.full((3,), 3.0)),
        lambda: _set("WEIGHT", torch.ones(3)),
    ),
    "a tensor in place": (
        lambda x: (x * WEIGHT).pow(2).sum(),
        lambda: WEIGHT.add_(1),
        lambda: WEIGHT.sub_(1),
    ),
    "a tensor's dtype": (
        lambda x: (x * CONFIG.weight).pow(2).sum().float(),
        lambda: setattr(CONFIG, "weight", torch.full((3,), 0.3, dtype=torch.float64)),
        lambda: setattr(CONFIG, "weight", torch.ones(3)),
    ),
    "train or eval": (
        lambda x: MODEL(x).pow(2).sum() if MODEL.training else MODEL(x * 2).sum(),
        lambda: MODEL.eval(),
        lambda: MODEL.train(),
    ),
    "a parameter": (
        lambda x: MODEL(x).pow(2).sum(),
        lambda: setattr(MODEL[0], "weight", torch.nn.Parameter(torch.ones(3, 3))),
        lambda: None,
    ),
    "weights in place": (
        lambda x: MODEL(x).pow(2).sum(),
        lambda: MODEL[0].weight.data.mul_(2),
        lambda: None,
    ),
    "a layer": (
        lambda x: MODEL(x).pow(2).sum(),
        lambda: MODEL.append(torch.nn.Tanh()),
        lambda: MODEL.__delitem__(-1),
    ),
    "the default dtype": (
        lambda x: (x * torch.ones(3)).pow(2).sum() * torch.ones(()).element_size(),
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "the grad mode": (
        lambda x: x.pow(2).sum() if torch.is_grad_enabled() else x.sum(),
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_seen(name: str) -> None:
    g, change, back = CHANGES[name]
    x = torch.tensor([1.0, 2.0, 3.0])
    for _ in range(2):
        same(tfn.grad(g)(x), torch.func.grad(g)(x))
    try:
        change()
        same(tfn.grad(g)(x), torch.func.grad(g)(x))
    finally:
        back()
    same(tfn.grad(g)(x), torch.func.grad(g)(x))


def test_kinds_of_arguments_are_apart() -> None:
    def g(x: Tensor, n: Any = 1, table: Any = None) -> Tensor:
        first = next(iter(table.values())) if table else 1.0
        return (x * n * (2 if isinstance(n, bool) else 1)).sum() * first / (n + 1e-30)

    x = torch.ones(3)
    rows: list[tuple[Any, ...]] = [(x, 1), (x, True), (x, 1.0), (x, -0.0), (x, 0.0), (x.double(), 1)]
    rows += [(x, 1, {"a": x, "b": x * 2}), (x, 1, {"b": x * 2, "a": x}), (x.expand(2, 3), 1)]
    for row in (*rows, *rows):
        same(tfn.grad(lambda *args: g(*args).sum())(*row), torch.func.grad(lambda *args: g(*args).sum())(*row))


def test_a_tensor_passed_twice_and_two_tensors() -> None:
    def g(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum() * (2.0 if x is y else 1.0)

    x, y = torch.ones(3), torch.full((3,), 2.0)
    for _ in range(2):
        same(tfn.grad(g)(x, y), torch.func.grad(g)(x, y))
        tfn.grad(g)(x, x)
        same(tfn.grad(g)(y, x), torch.func.grad(g)(y, x))


def test_attributes_of_tensors_are_seen() -> None:
    def step(lib: Any, w: Tensor) -> Tensor:
        scale = lambda: getattr(w, "scale", 1.0) * getattr(WEIGHT, "scale", 1.0)
        return lib.grad(lambda x: x.sum() * scale())(torch.ones(3))

    plain, tagged = torch.ones(3), torch.ones(3)
    tagged.scale = 3.0
    for w in (plain, tagged, plain):
        same(step(tfn, w), step(torch.func, w))
    try:
        for value in (5.0, 7.0):
            WEIGHT.scale = value
            same(step(tfn, plain), step(torch.func, plain))
    finally:
        del WEIGHT.scale
    same(step(tfn, plain), step(torch.func, plain))


def test_a_tensor_that_is_reached_in_two_ways() -> None:
    def step(lib: Any, w: Tensor) -> Tensor:
        return lib.grad(lambda x: (x * w + x * WEIGHT).pow(2).sum())(torch.ones(3))

    for w in (WEIGHT, WEIGHT, torch.full((3,), 5.0), WEIGHT):
        same(step(tfn, w), step(torch.func, w))

    def passed(lib: Any, w: Tensor) -> Tensor:
        return lib.grad(lambda x: (x * WEIGHT).pow(2).sum())(w)

    for w in (WEIGHT, torch.full((3,), 5.0)):
        same(passed(tfn, w), passed(torch.func, w))


FACTOR, FACTORS = 2.0, [1.0]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * FACTOR * FACTORS[0]


scaled = tfn.custom_vjp(lambda x: x * 2)
scaled.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * FACTOR * FACTORS[0],))


@pytest.mark.parametrize("of", [Scaled.apply, scaled], ids=["Function", "custom_vjp"])
def test_rules_read_from_outside_too(of: Any, captured: list[Any]) -> None:
    run = lambda: tfn.grad(lambda x: of(x).sum())(torch.ones(()))
    found = [run(), run()]
    try:
        _set("FACTOR", 5.0)
        found.append(run())
        FACTORS[0] = 10.0
        found.append(run())
    finally:
        _set("FACTOR", 2.0)
        FACTORS[0] = 1.0
    assert [int(one) for one in found] == [2, 2, 5, 50]
    assert len(captured) == 3


def test_a_rule_of_a_step_is_that_of_the_call() -> None:
    def step(scale: Tensor) -> Tensor:
        own = tfn.custom_vjp(lambda x: x * 2)
        own.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * scale,))
        return tfn.grad(lambda x: own(x).sum())(torch.ones(()))

    assert [int(step(torch.tensor(value))) for value in (1.0, 2.0, 3.0)] == [1, 2, 3]


def test_generators_go_on(captured: list[Any]) -> None:
    given, found = torch.Generator(), []
    for lib in (tfn, torch.func):
        given.manual_seed(3)
        f = lambda x: (x * torch.rand(3, generator=given)).sum()
        found.append(torch.stack([lib.grad(f)(torch.ones(3)) for _ in range(3)]))
    same(*found)


# ---- sizes that change ----


def test_sizes_that_change_are_captured_five_times(captured: list[Any]) -> None:
    for lib in (tfn, torch.func):
        found = [lib.grad(lambda x: (x.sin() * len(x)).sum())(torch.ones(n)) for n in (3, 5, 6, 2, 9, 4, 11)]
        if lib is tfn:
            ours, count = found, len(captured)
    same(ours, found)
    assert count == 5


def test_new_sizes_do_without_dynamo() -> None:
    """Its import takes longer than the first call of a small function. Neither forward mode nor symbols need it."""
    text = """
import sys, torch, thunder_fn as tfn
loss = lambda w, x: (x @ w).tanh().pow(2).mean() / x.shape[0]
w, v = torch.ones(3, 4), torch.ones(2, 3, 4)
hvp = tfn.vmap(lambda v, x: tfn.jvp(tfn.grad(lambda w: loss(w, x)), (w,), (v,))[1], (0, None))
for size in range(5, 12):
    hvp(v, torch.ones(size, 3)), tfn.hessian(lambda x: x.exp().sum().square())(torch.ones(size))
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_reads_are_guarded_for_all_sizes() -> None:
    f = lambda x: (x**2).sum() * SCALE
    try:
        for value in (2.0, 3.0, 2.0):
            _set("SCALE", value)
            for n in range(3, 10):
                same(tfn.grad(f)(torch.ones(n)), torch.func.grad(f)(torch.ones(n)))
    finally:
        _set("SCALE", 2.0)


def test_sizes_that_have_to_agree_are_checked_in_each_call() -> None:
    for sizes in ((3, 3), (4, 4), (5, 5), (6, 6), (6, 7), (7, 6), (8, 8)):
        x, y = map(torch.ones, sizes)
        runs: list[Callable[[Any], Any]] = [
            lambda lib: lib.jvp(torch.sin, (x,), (y,)),
            lambda lib: lib.vmap(torch.mul)(x, y),
            lambda lib: lib.vjp(torch.sin, x)[1](y),
            lambda lib: lib.grad(lambda x, y: (x * y).sum())(x, y),
        ]
        for run in runs:
            if sizes[0] == sizes[1]:
                same(run(tfn), run(torch.func))
            else:
                with pytest.raises((RuntimeError, ValueError)):
                    run(tfn)


def test_a_function_that_asks_for_sizes_is_captured_for_each(captured: list[Any]) -> None:
    """With numbers from the seventh size on, since symbols are no use."""
    f = lambda x: torch.stack([x[i] * i for i in range(x.shape[0])]).sum()
    for n in range(3, 10):
        same(tfn.grad(f)(torch.ones(n)), torch.func.grad(f)(torch.ones(n)))
    (family,) = captures._CAPTURES.families.values()
    assert len(captured) == 7 and family.refused == {(0, 0)}


def test_effects_for_some_sizes_are_those_of_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Tensor, effect: Any) -> Tensor:
        if (n := x.shape[0]) > 4:
            effect(n)
        return x.sum() * n

    for transform in (tfn.grad, torch.func.grad):
        LOG.clear()
        for n in (3, 4, 5, 6, 2, 7, 8):
            for effect in (LOG.append, lambda n: print("called", n)):
                own = lambda x: f(x, effect)
                same(transform(own)(torch.ones(n)), torch.full((n,), float(n)))
        assert LOG == [5, 6, 7, 8] and set(map(type, LOG)) == {int}
        assert capsys.readouterr().out == "called 5\ncalled 6\ncalled 7\ncalled 8\n"


def test_results_lie_in_memory_as_those_of_the_first_call() -> None:
    f = lambda x: torch.nn.functional.layer_norm(x, x.shape[1:])
    for n in (3, 5, 6, 7, 8, 9):
        x = torch.ones(n, 2, 4)
        ours, theirs = (lib.vmap(f, in_dims=1, out_dims=-1)(x) for lib in (tfn, torch.func))
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("f", [lambda x: x.sin() * x.shape[0], lambda x: x[::2] * 3], ids=["whole", "part"])
def test_pullbacks_of_programs_with_symbols(f: Any) -> None:
    """`vjp` in eager calls, and as the result of a jitted function."""
    jitted = tfn.jit(lambda x: tfn.vjp(f, x))
    for n in (3, 5, 6, 7, 8, 9):
        x = torch.linspace(0, 1, n)
        y, pullback = torch.func.vjp(f, x)
        expected = pullback(y), torch.func.vmap(pullback)(torch.stack([y, -y]))
        for call in (jitted, functools.partial(tfn.vjp, f)):
            value, ours = call(x)
            same(value, y)
            same((ours(y), tfn.vmap(ours)(torch.stack([y, -y]))), expected)
            with pytest.raises(tfn.errors.CotangentError, match=rf"f32\[{len(y)}\]"):
                ours(torch.ones(n + 1))


def test_linear_functions_of_programs_with_symbols() -> None:
    f = lambda x: (x.sin()[::2], x.detach())
    for call in (tfn.jit(lambda x: tfn.linearize(f, x)), functools.partial(tfn.linearize, f)):
        for n in (3, 5, 6, 7, 8, 9):
            x = torch.linspace(0, 1, n)
            same(call(x)[1](x + 1), torch.func.jvp(f, (x,), (x + 1,))[1])


# ---- what a trace does not repeat ----

LOG: Any = []
STATE: Any = SimpleNamespace(count=0, log=[], table={}, queue=collections.deque(), seen=set())
COUNT = 0
NUMBERS = iter(range(1000))
STREAM = io.StringIO()
BUFFER = torch.zeros(())


def _global() -> None:
    global COUNT
    COUNT += 1


def _logged() -> None:
    logging.getLogger("thunder_fn.test").warning("called")


def _in_place() -> None:
    log = LOG
    log += [1]


def _deleted() -> None:
    STATE.table["gone"] = 1
    del STATE.table["gone"]


EFFECTS: dict[str, Callable[[], Any]] = {
    "in place": _in_place,
    "append": lambda: LOG.append(1),
    "item": lambda: STATE.table.__setitem__(len(STATE.table), 1),
    "update": lambda: STATE.table.update({len(STATE.table): 1}),
    "attribute": lambda: setattr(STATE, "count", STATE.count + 1),
    "append to an attribute": lambda: STATE.log.append(1),
    "deque": lambda: STATE.queue.appendleft(1),
    "set": lambda: STATE.seen.add(object()),
    "global": _global,
    "print": lambda: print("called"),
    "print by map": lambda: list(map(print, ["called"])),
    "print by partial": lambda: functools.partial(print, "called")(),
    "stream": lambda: STREAM.write("called"),
    "stream by map": lambda: list(map(STREAM.write, ["called"])),
    "iterator": lambda: next(NUMBERS),
    "warn": lambda: warnings.warn("called", UserWarning, stacklevel=2),
    "log": _logged,
    "random": lambda: random.random(),
    "numpy's": lambda: np.random.rand(),
    "time": lambda: time.perf_counter(),
    "buffer": lambda: BUFFER.add_(1),
    "thread": lambda: threading.Thread(target=lambda: None).start(),
    "exec": lambda: exec("1"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EFFECTS)
def test_functions_with_effects_are_captured_each_time(name: str, captured: list[Any]) -> None:
    effect = EFFECTS[name]

    def g(x: Tensor) -> Tensor:
        effect()
        return x.pow(2).sum()

    for _ in range(3):
        same(tfn.grad(g)(torch.ones(3)), torch.full((3,), 2.0))
    assert len(captured) == 3


def _counting() -> None:
    if STATE.verbose:
        STATE.count += 1


def _clearing() -> None:
    if STATE.verbose:
        del STATE.table["gone"]


def _filling() -> None:
    if "filled" not in STATE.table:
        STATE.table["filled"] = 3.0


def _setting() -> None:
    STATE.mode = "train"


def _switching() -> None:
    STATE.verbose, before = True, STATE.verbose
    STATE.verbose = before


LEFT_OUT: dict[str, Callable[[], Any]] = {
    **{name: (lambda effect=effect: effect() if STATE.verbose else None) for name, effect in EFFECTS.items()},
    "count": _counting,
    "delete": _clearing,
    "fill once": _filling,
    "set what is there": _setting,
    "set and put back": _switching,
    "set and delete": _deleted,
    "compile": lambda: (re.compile("a+"), compile("1", "", "eval"), tfn.compile(torch.sin)(torch.ones(2))),
    "call a clock": lambda: time.time() if STATE.verbose else 0,
    "open a file": lambda: open("nowhere") if STATE.verbose else 0,  # noqa: SIM115
    "look at the system": lambda: os.path.exists("x") or subprocess.run(["x"]) if STATE.verbose else 0,
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_effects_that_are_left_out_count_for_nothing(name: str, captured: list[Any]) -> None:
    """A branch that is not taken, and a write that changes nothing, leave a function that is pure."""
    effect = LEFT_OUT[name]
    STATE.verbose, STATE.mode = False, "train"
    STATE.table.pop("gone", None)

    def g(x: Tensor) -> Tensor:
        effect()
        return x.pow(2).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            same(tfn.grad(g)(torch.ones(3)), torch.full((3,), 2.0))
        assert len(captured) <= (2 if name == "fill once" else 1)
        same(tfn.jit(g)(torch.ones(3)), torch.tensor(3.0))
    STATE.mode, STATE.table["gone"] = "eval", 5
    STATE.table.pop("filled", None)
    tfn.grad(g)(torch.ones(3))
    assert name != "set what is there" or STATE.mode == "train"
    assert name != "fill once" or STATE.table["filled"] == 3.0
    assert name != "set and delete" or "gone" not in STATE.table


class Remembering(torch.nn.Module):
    """A module that notes what it has seen."""

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.used = tuple(x.shape), True
        return x.pow(2).sum()


def test_a_module_that_notes_the_same_again_is_pure(captured: list[Any]) -> None:
    module = Remembering()
    for _ in range(4):
        same(tfn.grad(lambda x: module(x))(torch.ones(3)), torch.full((3,), 2.0))
    assert len(captured) == 2  # there was nothing at first
    module.used = False
    tfn.grad(lambda x: module(x))(torch.ones(3))
    assert module.used
    tfn.grad(lambda x: module(x))(torch.ones(2))
    assert module.shape == (2,)


def test_effects_of_statements(captured: list[Any]) -> None:
    count = 0

    def g(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        STATE.last = 3
        STATE.table["k"] = count
        return x.pow(2).sum()

    for _ in range(3):
        tfn.grad(g)(torch.ones(3))
    assert count == len(captured) == STATE.table["k"] == 3


def test_draws_are_new_in_each_call() -> None:
    g = lambda x: (x * torch.rand(3) + torch.nn.functional.dropout(x, 0.5)).pow(2).sum()
    x = torch.ones(3)
    found = []
    for lib in (tfn, torch.func):
        torch.manual_seed(3)
        found.append([lib.grad(g)(x) for _ in range(3)])
    same(*found)


def test_errors_are_those_of_each_call() -> None:
    def g(x: Tensor, n: int) -> Tensor:
        if n > 1:
            raise ValueError("too many")
        return x.sum()

    for n in (1, 1, 2, 1, 2):
        if n == 1:
            same(tfn.grad(g)(torch.ones(3), n), torch.ones(3))
        else:
            with pytest.raises(ValueError, match="too many"):
                tfn.grad(g)(torch.ones(3), n)


def test_partial_functions_and_methods(captured: list[Any]) -> None:
    class Loss:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __call__(self, x: Tensor, n: float) -> Tensor:
            return (x * self.scale).pow(n).sum()

        def of(self, x: Tensor) -> Tensor:
            return self(x, 2.0)

    loss, x = Loss(2.0), torch.tensor([1.0, 2.0])
    for scale in (2.0, 2.0, 3.0):
        loss.scale = scale
        for n in (2.0, 3.0):
            same(
                tfn.grad(functools.partial(loss, n=n))(x),
                torch.func.grad(functools.partial(loss, n=n))(x),
            )
        same(tfn.grad(loss.of)(x), torch.func.grad(loss.of)(x))
    assert len(captured) == 6


def test_captures_are_bounded() -> None:
    tfn.clear_caches(rules=False)
    for value in range(100):
        tfn.grad(lambda x: (x * value).sum())(torch.ones(1))
    assert len(captures._CAPTURES.kept) <= captures.LIVING + captures.ORPHANS


def test_graphs_from_outside_are_those_of_the_call() -> None:
    """Gradients through the graph of a tensor from outside are not kept for a tensor with another graph."""
    vectors = torch.randn(4, 3)
    for op in (torch.sin, torch.exp, lambda x: x**3):
        x = torch.rand(3, requires_grad=True)
        y = op(x) * 1
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        for f in (
            lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0],
            lambda v: torch.autograd.grad(slope, x, v, retain_graph=True)[0],
            lambda v: torch.autograd.grad((v * y).sum(), x, retain_graph=True)[0],
        ):
            expected = torch.stack([f(v) for v in vectors])
            torch.testing.assert_close(tfn.vmap(f)(vectors), expected)
            torch.testing.assert_close(tfn.vmap(f)(vectors), expected)


# ---- what a trace cannot hold, and eager PyTorch can ----


def test_graphs_from_outside_and_sparse_and_nested_tensors_are_torch_funcs() -> None:
    x = torch.tensor([0.5, 1.5, -1.0], requires_grad=True)
    y, rows = x.sin() * x, torch.eye(3)
    jacobian = tfn.vmap(lambda ct: torch.autograd.grad(y, x, ct, retain_graph=True)[0])
    torch.testing.assert_close(jacobian(rows), torch.autograd.functional.jacobian(lambda x: x.sin() * x, x))
    with pytest.raises(tfn.errors.UnsupportedCall, match="a graph that was recorded outside"):
        tfn.jit(jacobian)(rows)
    sparse, dense = torch.eye(3).to_sparse(), torch.arange(9.0).view(3, 3)
    for f, args in (
        (lambda d: torch.sparse.mm(sparse, d.sin()).sum(), (dense,)),
        (lambda d, s: torch.sparse.mm(s, d.sin()).sum(), (dense, sparse)),
    ):
        torch.testing.assert_close(tfn.grad(f)(*args), torch.func.grad(f)(*args))
        torch.testing.assert_close(tfn.vjp(f, *args)[1](torch.ones(()))[0], torch.func.grad(f)(*args))
    with pytest.raises(tfn.errors.UnsupportedInput, match="layout sparse_coo"):
        tfn.jit(tfn.grad(f))(*args)
    with warnings.catch_warnings(action="ignore"):  # PyTorch's, once in a process
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        doubled = tfn.vmap(lambda z: z.sin() * 2)(nested)
    assert all(map(torch.equal, doubled.unbind(), (one.sin() * 2 for one in nested.unbind())))


class Doubling(TorchFunctionMode):
    """Doubles what `tanh` and `cat` give."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if getattr(func, "__name__", "").partition(".")[0] in ("tanh", "cat") else result


OBSERVED: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": lambda T: T.grad(lambda x: x.tanh().sum()),
    "vjp": lambda T: lambda x: T.vjp(torch.tanh, x)[1](x),
    "jvp": lambda T: lambda x: T.jvp(torch.tanh, (x,), (x,)),
    "vmap": lambda T: T.vmap(lambda x: torch.cat([x.tanh(), x])),
    "jacrev": lambda T: T.jacrev(torch.tanh),
    "jacfwd": lambda T: T.jacfwd(lambda x: torch.cat([x.tanh(), x])),
    "hessian": lambda T: T.hessian(lambda x: x.tanh().sum()),
    "vmap of grad": lambda T: T.vmap(T.grad(lambda x: x.tanh().sum())),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_a_function_mode_sees_the_function_once(name: str) -> None:
    """Not the program, too; and a call under another mode, or none, is another one."""
    ours, theirs = (OBSERVED[name](one) for one in (tfn, torch.func))
    x = torch.randn(3, 2)
    for mode in (nullcontext, Doubling, Doubling, nullcontext):
        with mode():
            found, want = ours(x), theirs(x)
        torch.testing.assert_close(found, want)


LAYERS = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
COUNTED: dict[str, Callable[[Any], Callable[[Tensor], Any]]] = {
    "grad": lambda T: T.grad(lambda x: LAYERS(x * 2).sum()),
    "vmap of grad": lambda T: T.vmap(T.grad(lambda x: LAYERS(x * 2).sum())),
    "jvp": lambda T: lambda x: T.jvp(lambda x: LAYERS(x * 2), (x,), (x,)),
    "jacrev": lambda T: T.jacrev(lambda x: LAYERS(x * 2)),
}


@pytest.mark.parametrize("jit", [lambda f: f, tfn.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", COUNTED)
def test_flops_are_counted(name: str, jit: Any) -> None:
    """PyTorch's counter asks for multi-grad hooks of what modules are called with."""
    x = torch.randn(3, 2)
    with FlopCounterMode(display=False) as theirs:
        want = COUNTED[name](torch.func)(x)
    with FlopCounterMode(display=False) as ours:
        found = jit(COUNTED[name](tfn))(x)
    torch.testing.assert_close(found, want)
    assert 0 < ours.get_total_flops() <= theirs.get_total_flops()


@pytest.mark.parametrize("mode", ["all", "any"])
def test_multi_grad_hooks_are_refused(mode: Any) -> None:
    def f(x: Tensor) -> Tensor:
        y, z = x.sin(), x.cos()
        torch.autograd.graph.register_multi_grad_hook((y, z), print, mode=mode)
        return (y * z).sum()

    with pytest.raises(UnsupportedCall, match="`register_multi_grad_hook`"):
        tfn.grad(f)(torch.ones(2))
