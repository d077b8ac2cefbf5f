"""Reads of a jitted function from outside: guarded, refused, or said to be a constant."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import datetime
import decimal
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time as clock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.unit.outside_kinds import ROWS, Row, X, forget
from thunder_fn import cache_info, explain_misses, jit
from thunder_fn.capture.outside import evaluating, frames
from thunder_fn.capture.outside.reads import seen
from thunder_fn.capture.outside.watch import Watch
from thunder_fn.errors import OutsideWarning, ThunderError, UnsupportedCall

HERE = Path(__file__)
today = datetime.datetime.now
POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()  # its thread is there
FILLED_BY_THE_CALL = {"defaultdict"}
"""Rows in which the first call changes what it reads, so that the second is traced too."""


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("TFN_K", "TFN_J", "TFN_L"):
        monkeypatch.delenv(name, raising=False)
    benchmark, limit, name = torch.backends.cudnn.benchmark, sys.getrecursionlimit(), threading.current_thread().name
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with np.errstate(), np.printoptions(), decimal.localcontext():
        yield
    torch.backends.cudnn.benchmark = benchmark
    forget()
    sys.setrecursionlimit(limit)
    threading.current_thread().name = name
    logging.disable(logging.NOTSET)
    for logger in ("tests", "tests.outside"):
        logging.getLogger(logger).setLevel(logging.NOTSET)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_a_change_is_seen_and_nothing_else_is(row: Row) -> None:
    f, change = row()
    jitted, filled = jit(f), row.__name__ in FILLED_BY_THE_CALL
    for _ in range(3):
        assert torch.equal(jitted(X), f(X))
    assert cache_info(jitted).misses == 1 + filled
    change()
    for _ in range(2):
        found, expected = jitted(X), f(X)
        assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())
        assert found.dtype == expected.dtype
    assert cache_info(jitted).misses <= 2 + filled
    assert len(explain_misses(jitted)) == cache_info(jitted).misses - 1


# ---- reasons ----


def test_a_miss_says_what_changed() -> None:
    cfg, box, net = SimpleNamespace(lr=0.1, steps=[1]), {"w": torch.ones(3)}, nn.Dropout(0.5)
    f = jit(lambda x: net(x) * cfg.lr * box["w"] + len(cfg.steps))
    f(X)
    cfg.lr = 0.2
    f(X)
    cfg.steps.append(2)
    f(X)
    box["w"] = torch.zeros(3)
    f(X)
    net.eval()
    f(X)
    assert [str(miss) for miss in explain_misses(f)] == [
        "cfg.lr: it was 0.1, and is 0.2 now",
        "the content of cfg.steps has changed",
        "box['w'] is another Tensor",
        "net.training has changed",
    ]


class Problem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(problem_type="a", unused=[1])
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) if self.config.problem_type == "a" else x


def test_a_jitted_module_says_what_changed() -> None:
    model = Problem()
    jitted = jit(model)
    jitted(X)
    model.config.problem_type = "b"
    assert torch.equal(jitted(X), X)
    model.eval()
    jitted(X)
    model.fc = nn.Linear(3, 3, bias=False)
    jitted(X)
    assert [miss.what for miss in explain_misses(jitted)] == [
        "Problem.config.problem_type",
        "the parameters, buffers, parts or hooks of Problem have changed",
    ]


# ---- several programs ----


def test_train_and_eval_in_turns_are_two_programs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    f = jit(lambda x: model(x))
    for _ in range(5):
        for mode in (True, False):
            model.train(mode)
            assert torch.equal(f(X), model(X))
    assert cache_info(f).misses == 2 and cache_info(f).size == 2


def test_states_in_turns_with_symbols() -> None:
    cfg = SimpleNamespace(k=2)
    f = jit(lambda x: x * cfg.k if x.shape[0] % cfg.k == 0 else x.sin())
    for _ in range(2):
        for k in (2, 3):
            cfg.k = k
            for size in (4, 5, 6, 9, 8, 7):
                x = torch.ones(size)
                assert torch.equal(f(x), x * k if size % k == 0 else x.sin())
    assert cache_info(f).misses <= 10


def test_a_number_that_always_changes_keeps_few_programs() -> None:
    cfg = SimpleNamespace(k=0)
    f = jit(lambda x: x * cfg.k)
    with pytest.warns(tfn.jit.__globals__["RetraceWarning"], match="cfg.k"):
        for k in range(40):
            cfg.k = k
            assert torch.equal(f(X), X * k)
    assert cache_info(f).size <= 8


@pytest.mark.parametrize(
    ("owner", "name", "f"),
    [
        (math, "sqrt", lambda x: x * math.sqrt(4.0)),
        (math, "pi", lambda x: x * math.pi),
        (torch, "sin", lambda x: torch.sin(x)),
        (nn.functional, "relu", lambda x: nn.functional.relu(x)),
        (nn, "Flatten", lambda x: nn.Flatten(0)(x)),
        (np, "sqrt", lambda x: x * float(np.sqrt(4.0))),
    ],
)
def test_a_name_of_a_library_may_be_bound_anew(
    owner: Any, name: str, f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    jitted = jit(f)
    for value in (
        getattr(owner, name),
        3.0 if name == "pi" else lambda *args: (lambda x: x * 7) if name == "Flatten" else args[0] * 5,
    ):
        monkeypatch.setattr(owner, name, value)
        for _ in range(2):
            assert torch.equal(jitted(X), f(X))
    assert cache_info(jitted).misses == 2


# ---- what cannot be guarded ----


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda: time.time(), "time.time"),
        (lambda: clock(), "clock"),
        (lambda: datetime.datetime.now().second, "datetime.datetime.now"),
        (lambda: os.path.exists("x"), "os.path.exists"),
        (lambda: today().second, "today"),
        (lambda: functools.partial(time.time)(), "time.time"),
        (lambda: socket.gethostname().count("a"), "socket.gethostname"),
        (lambda: subprocess.Popen([sys.executable, "-V"]).wait() or 1, "subprocess.Popen"),
        (lambda: HERE.exists(), r"pathlib\..*\.exists"),
        (lambda: len(HERE.read_text()), r"pathlib\..*\.read_text"),
        (lambda: len(Path(__file__).read_text()), r"pathlib\..*\.read_text"),
        (lambda: random.SystemRandom().random(), "random.SystemRandom.random"),
        (lambda: len(subprocess.check_output([sys.executable, "-V"])), "subprocess.check_output"),
        (lambda: uuid.uuid4().int % 7, "uuid.uuid4"),
        (lambda: len(tempfile.mkdtemp()), "tempfile.mkdtemp"),
        (lambda: logging.makeLogRecord({}).created, "logging.makeLogRecord"),
        (lambda: np.load("a.npy").sum().item(), "numpy.load"),
        (lambda: torch.load("a.pt")["k"], "torch.serialization.load"),
        (lambda: sum(1 for _ in HERE.parent.rglob("test_out*.py")), r"(pathlib|glob)\..*"),
        (lambda: open(HERE).close() or 1, "open"),
        (lambda: secrets.randbelow(3), "secrets.randbelow"),
        (lambda: len(contextvars.copy_context()), "contextvars.copy_context"),
        (lambda: POOL.submit(lambda: 1).result(), "POOL.submit"),
    ],
)
def test_answers_that_change_by_themselves_are_said_to_be_constants(
    ask: Callable[[], float], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    np.save("a.npy", np.ones(2)), torch.save({"k": 2.0}, "a.pt")
    with pytest.warns(OutsideWarning, match=rf"the answer of {name} in test_outside.py:\d+ is taken as a constant"):
        jit(lambda x: x * ask())(X)


class Registry:
    """A class whose subclasses are asked for, as einops asks for its backends."""

    scale = 2.0


def registered(x: torch.Tensor) -> torch.Tensor:
    for one in Registry.__subclasses__():
        x = x * one.scale
    return x


def test_subclasses_are_guarded() -> None:
    def check() -> None:
        for _ in range(2):
            assert torch.equal(jitted(X), registered(X))

    jitted = jit(registered)
    check()
    more = type("More", (Registry,), {"scale": 3.0})
    check()
    more.scale = 5.0  # type: ignore[attr-defined]
    check()
    assert cache_info(jitted).misses == 3


def unused(x: torch.Tensor) -> int:
    return len(json.load(open(HERE))) if x.dim() == 7 else 0


def said(x: torch.Tensor) -> torch.Tensor:
    say = lambda text: logging.getLogger("tests").warning(text)
    say("a number")
    return x


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * tfn.constant(time.time()),
        lambda x: x * tfn.constant(uuid.uuid4().int % 7 + len(HERE.read_text())),
        lambda x: x * (time.time() + len(open(HERE).read()) if len(x) == 0 else 1),  # noqa: SIM115
        lambda x: registered(x) + unused(x),
        lambda x: said(x) + len(os.path.join("a", "b")) + threading.get_ident() * 0 + len(os.environ.get("TFN_K", "")),
    ],
)
def test_answers_that_are_known_or_go_nowhere_are_no_constants(f: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit(f)(X).shape == X.shape


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.Random(0).random, "the random numbers of draws"),
        (np.random.default_rng(0).random, "the random numbers of draws"),
        (lambda: random.Random().random(), r"random.Random\(\)"),
        (lambda: np.random.default_rng().random(), r"np.random.default_rng\(\)"),
    ],
)
def test_other_generators_are_said_to_be_constants(draw: Callable[[], float], name: str) -> None:
    draws = getattr(draw, "__self__", None)
    f = (lambda x: x * draw()) if draws is None else (lambda x: x * draws.random())
    with pytest.warns(OutsideWarning, match=rf"jit: {name} in test_outside.py:\d+ is taken as a constant"):
        jit(f)(X)


def popping() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    def make() -> Callable[..., torch.Tensor]:
        held = [3.0, 2.0, 1.0]
        return lambda x: x * held.pop()

    return make(), make()


def counting() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    class Counting(nn.Module):
        n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * self.n

    def make() -> Callable[..., torch.Tensor]:
        module = Counting()
        return lambda x: module(x)

    return make(), make()


@pytest.mark.parametrize("make", [popping, counting])
def test_content_that_the_function_changes_after_it_has_read_it(
    make: Callable[[], Sequence[Callable[..., torch.Tensor]]],
) -> None:
    ours, eager = make()
    jitted = jit(ours)
    for _ in range(3):
        assert torch.equal(jitted(X), eager(X))


def test_what_a_function_mode_does_is_done_once() -> None:
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return found * 2 if function is torch.sin else found

    f = jit(torch.sin)
    for _ in range(2):
        assert torch.equal(f(X), X.sin())
        with Twice():
            assert torch.equal(f(X), X.sin() * 2)


def test_iterators_are_refused() -> None:
    numbers, endless, pairs = iter([1.0, 2.0]), (n for n in (1.0, 2.0)), zip([1.0], [2.0], strict=True)
    for f, name in (
        (lambda x: x * next(numbers), "draws from numbers, a list_iterator"),
        (lambda x: x * next(endless), "draws from endless, a generator"),
        (lambda x: x * sum(next(pairs)), "draws from pairs, a zip"),
    ):
        with pytest.raises(UnsupportedCall, match=name):
            jit(f)(X)


def test_files_are_refused() -> None:
    with open(__file__) as file, pytest.raises(UnsupportedCall, match="draws from file, a TextIOWrapper"):
        jit(lambda x: x * len(file.readline()))(X)


def test_large_arrays_are_refused() -> None:
    table = np.ones(1000)
    with pytest.raises(UnsupportedCall, match="reads table, an array of 8000 bytes"):
        jit(lambda x: x * torch.from_numpy(table).sum())(X)
    assert torch.equal(jit(lambda x: x * torch.from_numpy(tfn.constant(table)).sum())(X), X * 1000)


def test_what_no_guard_can_look_into_is_said_once() -> None:
    steps = (ctypes.c_double * 1)(2.0)
    f = jit(lambda x: x * steps[0])
    with pytest.warns(OutsideWarning, match=r"jit: steps in test_outside.py:\d+ is taken as a constant"):
        f(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(X)
        assert torch.equal(jit(lambda x: x * tfn.constant(steps[0]))(X), X * 2)


@pytest.mark.parametrize("show", [str, repr, "{:.3f}".format, lambda w: f"{w}", lambda w: f"{w}"])
def test_the_text_of_a_tensor_is_said_to_be_a_constant(show: Callable[[torch.Tensor], str]) -> None:
    w = torch.tensor(1.0)
    with pytest.warns(OutsideWarning, match="the text of a tensor in .* is taken as a constant"):
        jit(lambda x: x * len(show(w)))(X)


def test_a_constant_is_not_looked_at() -> None:
    cfg = SimpleNamespace(a=SimpleNamespace(k=2.0), j=1.0)
    f = jit(lambda x: x * tfn.constant(cfg.a.k) + cfg.j)
    f(X)
    cfg.a.k = 3.0
    assert torch.equal(f(X), X * 2 + 1) and cache_info(f).misses == 1
    cfg.j = 2.0
    assert torch.equal(f(X), X * 3 + 2) and cache_info(f).misses == 2


# ---- what is written ----


def test_what_is_only_written_is_not_read() -> None:
    log, cfg = [], SimpleNamespace(calls=0)

    def f(x):
        log.append(x.shape)
        cfg.calls += 1
        return x * 2

    jitted = jit(f)
    for _ in range(3):
        jitted(X)
    assert cache_info(jitted).misses == 1 and cfg.calls == 3 and log == [X.shape] * 3


def test_a_flag_that_the_function_sets_is_as_it_was_before() -> None:
    cfg = SimpleNamespace(busy=False)

    def f(x):
        assert not cfg.busy
        cfg.busy = True
        y = x * (2 if cfg.busy else 3)
        cfg.busy = False
        return y

    jitted = jit(f)
    for _ in range(3):
        assert torch.equal(jitted(X), X * 2)
    assert cache_info(jitted).misses == 1


def test_a_memo_that_the_first_call_fills() -> None:
    memo: dict[int, float] = {}

    def f(x):
        if 3 not in memo:
            memo[3] = 2.0
        return x * memo[3]

    jitted = jit(f)
    for _ in range(4):
        assert torch.equal(jitted(X), X * 2)
    assert cache_info(jitted).misses == 2


class Kept:
    """An object that a function keeps tensors in."""

    def __init__(self) -> None:
        self.last, self.state, self.log, self.parts = None, torch.zeros(3), [], {"n": 1}


class KeptModule(nn.Module):
    """A module that a function keeps tensors in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.state, self.log, self.parts = None, torch.zeros(3), [], {"n": 1}
        self.register_buffer("grown", torch.zeros(1))

    def __hash__(self) -> int:
        return hash((self.training, len(self.log)))


def _keeps(kind: str, of: type = Kept) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    kept, last = of(), None

    def attributes(x):
        kept.last, kept.parts["tree"] = x * 2, {"a": (x, x + 1)}
        return x.sin()

    def state(x):
        kept.state = kept.state * 0.5 + x
        return kept.state + 1

    def first(x):
        kept.last = x if kept.last is None else kept.last + x
        return kept.last * 2

    def appended(x):
        kept.log.append(x * 2)
        kept.log.extend([x, x.sin()])
        return x

    def filled_again(x):
        kept.log.clear()
        kept.log.append(x * 2)
        return x

    def method(x):
        kept.parts.update(w=x * 3)
        kept.parts.__setitem__("v", x)
        return x

    def twice(x):
        y = kept.state * 2 + x + (0 if kept.last is None else kept.last)
        kept.last = kept.state
        return y

    def buffer(x):
        kept.grown = torch.cat([kept.grown, x[:1]])
        return kept.grown

    def cell(x):
        nonlocal last
        last = x * 2
        return x

    cell.get = lambda: last  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return kept, locals()[kind]


KEPT = {
    "attributes": 1,
    "state": 1,
    "first": 2,
    "appended": 2,
    "filled_again": 2,
    "method": 2,
    "twice": 4,
    "buffer": 4,
    "cell": 1,
}
"""Functions that keep tensors, and the traces of four calls."""


@pytest.mark.parametrize(
    ("kind", "of"),
    [*((kind, Kept) for kind in KEPT if kind != "buffer"), *((kind, KeptModule) for kind in KEPT)],
)
def test_tensors_in_objects_from_outside_are_those_of_the_call(kind: str, of: type) -> None:
    (kept, f), (ours, g) = _keeps(kind, of), _keeps(kind, of)
    jitted = jit(g)
    for step in range(4):
        x = torch.full((3,), float(step))
        if kind == "twice" and step == 2:  # until now one tensor in two places
            kept.last, ours.last = torch.ones(3), torch.ones(3)
        assert torch.equal(jitted(x), f(x))
        assert repr(vars(ours)) == repr(vars(kept))
        found, expected = (getattr(one, "get", lambda: None)() for one in (g, f))
        assert repr(found) == repr(expected)
    assert cache_info(jitted).misses <= KEPT[kind]


class UserDict(dict[Any, Any]):
    """A dict that keeps count."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)


class UserList(list[Any]):
    """A list of the user's."""


class Cache:
    """An object with attributes."""


def _assign(held: Any, x: torch.Tensor) -> None:
    held.last = x * 2


def _item(held: Any, x: torch.Tensor) -> None:
    held["k"] = x * 2


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "set": (set, lambda held, x: held.add(x * 2)),
    "set with an item": (lambda: {1}, lambda held, x: held.update([x, x * 2])),
    "deque": (collections.deque, lambda held, x: held.append(x * 2)),
    "deque, at the left": (collections.deque, lambda held, x: held.extendleft([x, x * 2])),
    "deque of two": (lambda: collections.deque(maxlen=2), lambda held, x: held.append(x * 2)),
    "deque of two, at the left": (lambda: collections.deque([0, 1], 2), lambda held, x: held.appendleft(x * 2)),
    "list, in front": (lambda: [1], lambda held, x: held.insert(0, x * 2)),
    "ordered dict": (lambda: collections.OrderedDict(a=1), _item),
    "default dict": (lambda: collections.defaultdict(list), lambda held, x: held["k"].append(x * 2)),
    "dict of the user": (UserDict, _item),
    "list of the user": (UserList, lambda held, x: held.append(x * 2)),
    "wrapped dict": (collections.UserDict, _item),
    "chained dicts": (lambda: collections.ChainMap({}, {"k": 1}), _item),
    "order of a dict": (lambda: {"a": 1}, lambda held, x: held.update(k=x * 2, n=3)),
    "object": (Cache, _assign),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("place", ("closure", "module", "jitted module"))
def test_containers_from_outside_hold_what_eager_puts_there(name: str, place: str) -> None:
    make, put = CONTAINERS[name]

    class Holder(nn.Module):
        def __init__(self, held: Any) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            put(self.held, x)
            return x + 1

    def content(held: Any) -> Any:
        return sorted(map(repr, held)) if isinstance(held, set) else repr(vars(held) if name == "object" else held)

    found, expected = make(), make()
    module = Holder(found)

    def closure(x: torch.Tensor) -> torch.Tensor:
        put(found, x)
        return x + 1

    f = jit({"closure": closure, "module": lambda x: module(x), "jitted module": module}[place])
    for step in range(3):
        f(X + step)
        put(expected, X + step)
        assert content(found) == content(expected)


def test_tensors_in_objects_of_a_jitted_module() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = SimpleNamespace(last=torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache.last = self.cache.last + x
            return self.cache.last * 2

    module, known = Kept(), Kept()
    jitted = jit(module)
    for step in range(4):
        if step == 2:
            module.cache.last, known.cache.last = torch.ones(3), torch.ones(3)
        assert torch.equal(jitted(X), known(X)) and torch.equal(module.cache.last, known.cache.last)


def test_tensors_that_hooks_keep_have_gradients() -> None:
    found: dict[str, torch.Tensor] = {}
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda *given: found.update(out=given[-1] * 2))
    jitted = jit(lambda x: layer(x).sum())
    for _ in range(2):
        jitted(X)
    found["out"].sum().backward()
    assert layer.bias.grad is not None and torch.equal(layer.bias.grad, torch.full((3,), 2.0 * X.numel() / 3))


def _found(items, x):
    for i in range(len(items)):
        if i != 1:
            items[i] = x * i


def _found_plain(items, x):
    last = len(items) - 1
    items[last], items[0] = 7, x


def _swapped(items, x):
    items[0], items[1] = items[1], items[0]
    items[-1] = x * 2


def _twice(items, x):
    items[0] = x
    items[0], items[1] = 5, items[1] + 1
    items[2] = x


def _in_transform(items, x):
    def loss(y):
        items[1] = y * 2
        return (y**2).sum()

    items[0] = tfn.grad(loss)(x)


def _written(name: str) -> Callable[[Any, torch.Tensor], None]:
    """The same as a statement: `items[1] = ...` as the code says it."""
    scope: dict[str, Any] = {}
    exec(f"def f(items, x):\n    {name}\n", scope)
    return scope["f"]


STATEMENTS = (
    *(
        "items[1] = x * 2",
        "items[-1] = x * 2",
        "items[1] = x",
        "items[1] = x + items[0]",
        "items[0] = items[0] * 2 + x",
    ),
    *("items[-3] = items[-3] * 2 + x", "items[len(items) // 2] = x * len(items)", "items[0] = items[1] = items[2] = x"),
)
CHANGES = {
    **{name: _written(name) for name in STATEMENTS},
    **{one.__name__: one for one in (_found, _found_plain, _swapped, _twice, _in_transform)},
}


@pytest.mark.parametrize(
    "kind",
    (list, collections.deque, lambda items: collections.deque(items, maxlen=3)),
    ids=("list", "deque", "full deque"),
)
@pytest.mark.parametrize("name", CHANGES)
def test_tensors_that_take_the_place_of_items(name: str, kind: Any) -> None:
    """Another item may be there in the next call, and the list may be longer."""
    change, items, known = CHANGES[name], kind([X, 3, None]), kind([X, 3, None])
    jitted = jit(lambda x: [change(items, x), x + 1][1])
    for step in range(4):
        jitted(X * step)
        change(known, X * step)
        assert str(items) == str(known)
        for one in (items, known):
            if step == 1:
                one[0] = X * 5
            if step == 2:
                one.append(step)


def test_tensors_that_take_the_place_of_items_of_a_list_that_grows() -> None:
    items: list[Any] = [1, 2]

    def f(x):
        items[0] = x * 2
        return x

    jitted = jit(f)
    for step in range(3):
        jitted(X * step)
        assert torch.equal(items[0], X * step * 2) and len(items) == 2 + step
        items.append(step)
    assert cache_info(jitted).misses == 1


WINDOWS = {
    "items.append(x * 2); items[0] = x": 1,
    "items.insert(0, x); items.pop()": 1,
    "items.pop(0); items.append(x)": 1,
    "del items[0]; items.append(x)": 1,
    "items.insert(1, x * 2)": 9,
    "items[:-1] = items[1:]; items[-1] = x": 9,
    "items.append(x); items[0], items[1] = items[1], items[0]": 9,
    "x = x + items.pop(0); items.append(x)": 9,
    "items.append(x); items.pop(0); x = x + items[0] * items[-2]": 9,
    "items.append(x); items.pop(0); x = torch.stack(list(items)).sum(0)": 9,
    "items.insert(0, x); x = x * items[1].shape[0] * items[2].sum(); items.pop()": 9,
    "other.append(items.pop(0)); items.append(x)": 9,
    "other.append(items[1]); items.insert(0, x); items.pop()": 9,
    "items.reverse(); items.append(x)": 9,
    "items.append(x); items.rotate(1) if hasattr(items, 'rotate') else items.pop()": 9,
}
"""Statements, and the number of traces at most."""


@pytest.mark.parametrize("leaf", (False, True), ids=("tensors", "leaves"))
@pytest.mark.parametrize("kind", (list, collections.deque), ids=("list", "deque"))
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_over_a_list(name: str, kind: Any, leaf: bool) -> None:
    """Items that stay are those of each call, whatever somebody has put there."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def f(items, other, x):\n    {name}\n    return x", scope)

    def run(wrap: Callable[..., Any]) -> tuple[list[str], Any]:
        make = lambda value: torch.full((3,), value).requires_grad_(leaf)
        items, other, found = kind(map(make, (1.0, 2.0, 3.0))), list[Any](), list[str]()
        step = wrap(lambda x: scope["f"](items, other, x))
        for i in range(7):
            if i in (2, 4):
                items[i // 2] = make(10.0 * i)
            if i == 5:
                items.append(make(7.0))
            try:
                result = step(X * i).detach()
            except (TypeError, ThunderError) as error:
                return [*found, str(isinstance(error, TypeError))], step
            found.append(str((result, [one.detach() for one in (*items, *other)], list(map(len, (items, other))))))
        return found, step

    (found, step), (expected, _) = run(jit), run(lambda f: f)
    assert found == expected
    assert leaf or cache_info(step).misses <= WINDOWS[name] + (name != "items.append(x * 2); items[0] = x")


@pytest.mark.parametrize("plain", (None, 5, "a"))
def test_a_window_over_a_list_that_holds_plain_data(plain: Any) -> None:
    f = _written("items.insert(0, x); items.pop()")
    items, known = [plain, X, X + 1], [plain, X, X + 1]
    jitted = jit(lambda x: [f(items, x), x][1])
    for step in range(6):
        jitted(X * step)
        f(known, X * step)
        assert str(items) == str(known)
        if step == 3:
            items[1] = known[1] = plain


def test_an_item_that_may_come_from_elsewhere_is_refused_between_others() -> None:
    items, cfg = [X, X + 1], SimpleNamespace(k=X)

    def f(x):
        items.insert(0, x)
        items[1] = cfg.k
        return x

    with pytest.raises(UnsupportedCall, match="between the items of a list"):
        jit(f)(X)
    assert items[0] is X and len(items) == 2


# ---- around it ----


def test_a_profiler_goes_on() -> None:
    seen: list[str] = []

    def profile(frame, event, arg):
        seen.append(event)

    f = jit(lambda x: x * 2)
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        f(X)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)


def a_number_of_now() -> int:
    return uuid.uuid4().int % 7


def test_what_another_thread_asks_meanwhile_is_asked_here_too() -> None:
    """`sys.monitoring` disables an event for all threads."""
    begun, asked = threading.Event(), threading.Event()

    def ask() -> None:
        begun.wait(60)
        a_number_of_now()
        asked.set()

    def f(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        asked.wait(60)
        return x * a_number_of_now()

    thread = threading.Thread(target=ask)
    thread.start()
    for g in (f, lambda x: x * a_number_of_now()):
        with pytest.warns(OutsideWarning, match=r"the answer of uuid\.uuid4"):
            jit(g)(X)
    thread.join()


def of_other_tools(o: SimpleNamespace) -> float:
    return o.k


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in Python 3.12")
def test_other_tools_that_monitor() -> None:
    """Events that a tool disabled stay so for the next one in its place. Without a place, nothing is watched."""
    tools: Any = sys.monitoring  # type: ignore[attr-defined]
    start, o = tools.events.PY_START, SimpleNamespace(k=2.0)
    jitted = jit(lambda x: x * of_other_tools(o))
    if frames._monitor.tool >= 0:
        tools.free_tool_id(frames._monitor.tool)
    taken = [one for one in range(6) if tools.get_tool(one) is None]
    try:
        for one in taken:
            tools.use_tool_id(one, "other")
            tools.register_callback(one, start, lambda code, at: tools.DISABLE)
            tools.set_events(one, start)
        of_other_tools(o)
        with pytest.raises(UnsupportedCall, match=r"all tool ids of `sys\.monitoring` are in use"):
            jitted(X)
    finally:
        for one in taken:
            tools.set_events(one, 0)
            tools.free_tool_id(one)
    for o.k in (2.0, 3.0):
        assert torch.equal(jitted(X), X * o.k)


def test_other_threads_are_not_watched() -> None:
    cfg, other = SimpleNamespace(k=2.0), SimpleNamespace(k=1.0)

    def elsewhere() -> None:
        torch.ones(2) * other.k

    def f(x):
        thread = threading.Thread(target=elsewhere, name="other")
        thread.start()
        thread.join()
        return x * cfg.k

    jitted = jit(f)
    with pytest.warns(
        OutsideWarning, match=r"the work of the thread 'other' in test_outside.py:\d+ is taken as a constant"
    ):
        jitted(X)
    other.k = 3.0
    jitted(X)
    assert cache_info(jitted).misses == 1


def test_what_a_program_reads_is_let_go_with_it() -> None:
    class Config:
        k = 2.0

    def made():
        cfg, net = Config(), nn.Linear(3, 3)
        jitted = jit(lambda x: net(x) * cfg.k)
        jitted(X)
        return weakref.ref(cfg), weakref.ref(net), weakref.ref(jitted)

    references = made()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


DRAWING = """
import itertools
DRAWN = itertools.count()
def draw():
    return next(DRAWN)
class Finder:
    def find_spec(self, fullname, path=None, target=None):
        draw()
"""


def test_what_an_import_runs_is_no_part_of_the_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither what looks for a module, nor what a library's module calls while it is imported: both draw from a count."""
    (tmp_path / "a_package_that_draws.py").write_text(DRAWING)
    (tmp_path / "a_library_that_draws.py").write_text("import a_package_that_draws\na_package_that_draws.draw()\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("a_package_that_draws")
    monkeypatch.setattr(frames, "_MACHINERY", frames._MACHINERY | {"a_library_that_draws"})
    monkeypatch.setattr(sys, "meta_path", [package.Finder(), *sys.meta_path])
    frames.is_machinery.cache_clear()

    def f(x: torch.Tensor) -> torch.Tensor:
        import a_library_that_draws  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

        return x * len(a_library_that_draws.__name__)

    try:
        jitted = jit(f)
        for _ in range(2):
            assert torch.equal(jitted(X), f(X))
        assert package.draw() >= 2 and cache_info(jitted).misses == 1
    finally:
        for name in ("a_library_that_draws", "a_package_that_draws"):
            sys.modules.pop(name, None)
        frames.is_machinery.cache_clear()


@pytest.mark.parametrize(
    "ask",
    [
        lambda: importlib.util.find_spec("optree") is not None,
        lambda: importlib.util.find_spec("no_such_package") is None,
        lambda: importlib.util.find_spec("xml.dom.minidom") is not None,
        lambda: importlib.metadata.version("optree") != "0",
        lambda: importlib.import_module("xml.sax.handler") is not None,
    ],
)
def test_which_packages_there_are_is_no_question_about_files(ask: Any) -> None:
    """Transformers asks in the `forward` of Mamba."""
    jitted = jit(lambda x: x * (2 if ask() else 3))
    for _ in range(2):
        assert torch.equal(jitted(X), X * 2)
    assert cache_info(jitted).misses == 1


def test_what_is_imported_may_come_go_and_be_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            import a_module_that_goes  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]
        except ImportError:
            return x
        return x * a_module_that_goes.k

    jitted, name = jit(f), "a_module_that_goes"
    for module in (SimpleNamespace(k=2.0), SimpleNamespace(k=3.0), None, type("A", (), {"k": 4.0})):
        monkeypatch.setitem(sys.modules, name, module)
        assert torch.equal(jitted(X), f(X)) and torch.equal(jitted(X), f(X))
        if module is not None:
            module.k = 5.0
            assert torch.equal(jitted(X), f(X))
        monkeypatch.delitem(sys.modules, name)
        assert torch.equal(jitted(X), f(X))


def test_watching_runs_no_code_of_the_user() -> None:
    """An object whose class answers every question about it is asked as often as in eager mode, and by the function alone."""
    asked: list[str] = []

    class Asked:
        def __init__(self) -> None:
            object.__setattr__(self, "held", {"k": 2.0})

        def __getattribute__(self, name: str) -> object:
            asked.append(name)
            return object.__getattribute__(self, name)

        @property
        def k(self) -> float:
            return self.held["k"]

    box = [Asked()]

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * box[0].k + len(box)

    f(X)
    expected = asked.copy()
    asked.clear()
    jitted = jit(f)
    jitted(X)
    assert asked == expected
    box[0].held["k"] = 3.0
    assert torch.equal(jitted(X), f(X))


class Incomparable:
    """An object that only its owner may compare, as a bar of tqdm is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def _refused(self, *_: object) -> Any:
        raise AttributeError("no such comparison")

    __eq__ = __hash__ = __bool__ = __len__ = _refused


def test_a_callee_is_not_compared() -> None:
    one = Incomparable()
    assert torch.equal(jit(lambda x: one(x))(X), 2 * X)


def test_what_was_found_is_looked_at_again_after_a_write() -> None:
    """A helper that runs before and after its caller's write finds other objects: both are guarded."""
    first, second, state = SimpleNamespace(k=2.0), SimpleNamespace(k=3.0), {}
    held: list[SimpleNamespace] = []

    class Kept:
        now = first

    def helper(x: torch.Tensor) -> torch.Tensor:
        for one in (*held, state.get("now", first), Kept.now):
            x = x * one.k
        return x

    def f(x: torch.Tensor) -> torch.Tensor:
        x = helper(x)
        Kept.now = state["now"] = second
        try:
            return helper(x)
        finally:
            Kept.now = first
            del state["now"]

    jitted = jit(f)
    for one in (first, second):
        for _ in range(2):
            assert torch.equal(jitted(X), f(X))
        one.k += 4.0
        assert torch.equal(jitted(X), f(X))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The numbers of expressions that watches evaluate, by their kinds."""
    counted: dict[str, int] = {}
    for kind, rule in list(evaluating.RULES.items()):

        def counting(*args: object, kind: str = kind, rule: Callable[..., object] = rule) -> object:
            counted[kind] = counted.get(kind, 0) + 1
            return rule(*args)

        monkeypatch.setitem(evaluating.RULES, kind, counting)
    return counted


class Again:
    def __init__(self, of: Any = None) -> None:
        self.of = of

    def again(self) -> Any:
        return self


class InheritedAgain(Again):
    def again(self) -> Any:
        return super().again()


def leads_to_a_method(x: torch.Tensor) -> torch.Tensor:
    one: Any = InheritedAgain()
    for _ in range(2):
        method = one.again
        one = method()
    return x * 2


def leads_to_super(x: torch.Tensor) -> torch.Tensor:
    one: Any = InheritedAgain()
    for _ in range(2):
        of = super(InheritedAgain, one)
        one = of.again()
    return x * 2


def leads_to_a_new_object(x: torch.Tensor) -> torch.Tensor:
    one: Any = Again(x)
    for _ in range(2):
        one = one.again()
        one = Again(x) if one is x else one
    return x * 2


@pytest.mark.parametrize("f", [leads_to_a_method, leads_to_super, leads_to_a_new_object], ids=lambda f: f.__name__)
def test_a_frame_that_leads_to_itself_is_looked_at_a_few_times(
    f: Callable[[torch.Tensor], torch.Tensor], counted: dict[str, int]
) -> None:
    """Each pass finds the same values, such as methods of one object, so that no further pass follows."""
    assert torch.equal(jit(f)(X), X * 2)
    assert sum(counted.values()) < 100, counted


def test_the_cost_of_watching_grows_with_the_reads_alone(counted: dict[str, int]) -> None:
    """Expressions are evaluated where they can lead outside: not those of tensors, and those of globals once."""

    def step(x: torch.Tensor, i: int) -> torch.Tensor:
        y = torch.sin(x).view(-1).mul(2.0)
        return torch.nn.functional.relu(y.reshape(x.shape)) if i >= 0 else x

    def count(calls: int) -> int:
        counted.clear()
        jit(lambda x: [x := step(x, i) for i in range(calls)][-1])(X)
        return sum(counted.values())

    assert count(40) == count(20) < 60


def test_attributes_of_tensors_from_outside_are_guarded() -> None:
    """A tensor that is closed over is known by identity; what Python hangs on it may change."""
    weight = torch.ones(2)
    g = lambda x: x * (2.0 if getattr(weight, "tag", 0) else 3.0)
    f, x = tfn.jit(g), torch.ones(2)
    for change in (lambda: None, lambda: setattr(weight, "tag", 1), lambda: setattr(weight, "tag", 0)):
        change()
        torch.testing.assert_close(f(x), g(x))
    del weight.tag
    torch.testing.assert_close(f(x), g(x))
    assert str(tfn.explain_misses(f)[0]) == "weight.tag: it was missing, and is 1 now"


# ---- objects among the arguments ----


class Scaled:
    """An object with state, which a function may have for an argument."""

    def __init__(self) -> None:
        self.k, self.shift = 2.0, torch.zeros(3)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k + self.shift

    @jit
    def jitted(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k + self.shift


WAYS: dict[str, Callable[[Callable[..., torch.Tensor], Scaled], torch.Tensor]] = {
    "object": lambda call, one: call(one, X),
    "bound method": lambda call, one: call(one.__call__, X),
    "partial": lambda call, one: call(functools.partial(Scaled.__call__, one), X),
    "in a list": lambda call, one: call([one], X),
}
CALLERS: dict[str, Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]] = {
    "jit": jit,
    "static": lambda f: jit(f, static_argnums=0),
    "eager grad": lambda f: tfn.grad(lambda one, x: f(one, x).square().sum(), argnums=1),
    "jit of grad": lambda f: jit(tfn.grad(lambda one, x: f(one, x).square().sum(), argnums=1)),
}


PAIRS = [(way, caller) for way in WAYS for caller in CALLERS if (way, caller) != ("in a list", "static")]  # no hash


@pytest.mark.parametrize(("way", "caller"), PAIRS)
def test_attributes_of_objects_among_the_arguments_are_guarded(way: str, caller: str) -> None:
    def f(one: Callable[..., torch.Tensor] | list[Scaled], x: torch.Tensor) -> torch.Tensor:
        return (one[0] if isinstance(one, list) else one)(x)

    call, plain, one = CALLERS[caller](f), CALLERS["eager grad"](f) if "grad" in caller else f, Scaled()
    for _ in range(2):
        assert torch.equal(WAYS[way](call, one), WAYS[way](plain, one))
    for change in (("k", 3.0), ("shift", torch.ones(3))):
        setattr(one, *change)
        expected = f([one], X) if way == "in a list" else one(X)
        expected = 2 * one.k * expected if "grad" in caller else expected
        assert torch.equal(WAYS[way](call, one), expected)
    assert torch.equal(WAYS[way](call, other := Scaled()), WAYS[way](plain, other))


def test_methods_of_plain_classes_are_jitted() -> None:
    one, other = Scaled(), Scaled()
    other.k = 5.0
    for _ in range(2):
        assert torch.equal(one.jitted(X), one(X)) and torch.equal(other.jitted(X), other(X))
    one.k = 7.0
    assert torch.equal(one.jitted(X), one(X)) and torch.equal(other.jitted(X), other(X))


@pytest.mark.parametrize("kind", [tuple, list, dict, set])
def test_containers_that_have_no_length_are_read(kind: type[Any]) -> None:
    """A subclass may refuse `len`, as e3nn's `Irreps` does: no code of the user runs to look at it."""

    def refuse(self: object) -> int:
        raise NotImplementedError

    given = type("Given", (kind,), {"__len__": refuse})([(2.0, 1), (3.0, 1)])

    def f(x: torch.Tensor) -> torch.Tensor:
        for item in given:
            x = x * (item if isinstance(item, float) else item[0])
        return x

    assert torch.equal(jit(f)(X), X * 6) and torch.equal(tfn.grad(lambda x: f(x).sum())(X), torch.full_like(X, 6.0))


def test_an_answer_that_a_full_cache_forgets_is_said_to_be_a_constant() -> None:
    o = SimpleNamespace(k=2.0)
    answers = {1: lambda: o.k, 2: lambda: 1.0}
    cached = functools.lru_cache(maxsize=1)(lambda n: answers[n]())
    cached(1)
    with pytest.warns(
        OutsideWarning, match="an answer that cached forgot in test_outside.py:.* is taken as a constant"
    ):
        jit(lambda x: x * cached(1) * cached(2))(X)


def test_arrays_of_ctypes_are_said_to_be_constants() -> None:
    values = (ctypes.c_double * 2)(2.0, 3.0)
    with pytest.warns(OutsideWarning, match="values in test_outside.py:.* is taken as a constant"):
        jit(lambda x: x * values[0])(X)


def test_cached_functions_keep_no_tracers() -> None:
    """A tensor that a cached function makes while it is traced is none of its later answers."""

    @functools.lru_cache
    def ramp(n: int) -> torch.Tensor:
        return torch.arange(n).float()

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * ramp(3) + ramp(3)

    x = torch.ones(3)
    want = x * torch.arange(3) * 2
    for _ in range(2):
        assert torch.equal(tfn.jit(f)(x), want)
        assert torch.equal(tfn.vmap(lambda a: a * ramp(1))(x), torch.zeros(3, 1))
        assert torch.equal(f(x), want)


def test_a_stream_that_is_written_to_is_no_iterator(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:

        def f(x: torch.Tensor) -> torch.Tensor:
            print("once", file=log)
            log.flush()
            return x * 2

        assert torch.equal(jit(f)(X), X * 2)
    assert (tmp_path / "log").read_text() == "once\n"


def test_the_first_answer_of_a_cached_function_is_not_random() -> None:
    @functools.cache
    def noise(n: int) -> torch.Tensor:
        return torch.rand(n).mul_(2)

    @functools.cache
    def seeded(n: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.manual_seed(n)
        return torch.rand(n, generator=generator)

    f, g = jit(lambda x: x + noise(3)), jit(lambda x: x + seeded(3))
    with pytest.raises(UnsupportedCall, match="the cached function noise draws random numbers"):
        f(X)
    assert noise.cache_info().currsize == 0
    expected = noise(3)
    for _ in range(2):
        assert torch.equal(f(X), X + expected)
        assert torch.equal(g(X), X + seeded(3))


def test_dicts_deep_in_an_object_are_the_same_in_each_look() -> None:
    """Pairs of a dict at the last depth were compared by identity, so that each call was traced."""

    class Layer:
        def __init__(self) -> None:
            self.flags = {0: True, "a": {1: [2]}}

    class Cache:
        def __init__(self) -> None:
            self.layers = [Layer(), Layer()]

    cache = Cache()
    f = tfn.jit(lambda x: x if [cache] == [] else x * 2)
    for call in range(3):
        assert torch.equal(f(torch.full((2,), float(call))), torch.full((2,), 2.0 * call))
    assert cache_info(f).misses == 1 and seen(cache) == seen(cache)


class Untidy:
    """An object in a circle, whose finalizer reads what changes."""

    noted: tuple[float, ...] = ()

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        Untidy.noted = (*Untidy.noted, time.perf_counter(), *vars(SETTINGS).values())


SETTINGS = SimpleNamespace(rate=1.0)


def test_what_the_collector_calls_is_no_part_of_the_function() -> None:
    """A collection begins by chance. Its callbacks and the finalizers that it calls may read and write what they like."""
    phases: list[Any] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append((phase, time.perf_counter(), SETTINGS.rate))

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        gc.collect()
        return y * 2

    made = jit(f)
    gc.callbacks.append(note)
    try:
        for rate in (1.0, 2.0, 3.0):
            Untidy()
            SETTINGS.rate = rate
            assert torch.equal(made(X), X.sin() * 2)
    finally:
        gc.callbacks.remove(note)
    assert cache_info(made).misses == 1
    assert len(Untidy.noted) >= 2 and {phase for phase, *_ in phases} == {"start", "stop"}


def test_calls_of_libraries_in_a_collection_are_none_of_the_function() -> None:
    """Callbacks of weak references that a library made, while user code runs."""
    watch = Watch(lambda: None, hears_calls=True)
    seen: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            watch.called_library("somewhere", "set_state")
            watch.called(os.putenv)
            seen.append(watch.is_repeatable)

    gc.callbacks.append(note)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(note)
    watch.called_library("somewhere", "set_state")
    assert seen[0] and not watch.is_repeatable


def test_classes_without_a_module_are_seen() -> None:
    """`type` makes such a class in code that has no `__name__`."""
    scope: dict[str, Any] = {}
    exec("K = type('K', (), {'v': 2.0}); k = K(); f = lambda x: x * K.v * k.v", scope)
    f = jit(scope["f"])
    assert torch.equal(f(X), X * 4) and torch.equal(tfn.grad(lambda x: scope["f"](x).sum())(X), X * 4 / X)
    scope["K"].v = 3.0
    assert torch.equal(f(X), X * 9)


@pytest.mark.parametrize(
    "of", [lambda held: held, lambda held: SimpleNamespace(held=held), SimpleNamespace], ids=["dict", "inner", "object"]
)
def test_a_dict_that_changes_while_it_is_read(of: Callable[..., Any]) -> None:
    """Another thread, or the collector of garbage, adds to a dict, as an import does to `sys.modules`."""
    held: dict[str, Any] = {f"n{i}": i for i in range(200)}
    value, threshold = of(held) if of is not SimpleNamespace else SimpleNamespace(), gc.get_threshold()
    held = vars(value) if of is SimpleNamespace else held
    held |= {f"n{i}": [i] for i in range(200)}

    def grow(phase: str, info: dict[str, int]) -> None:
        held[f"more{len(held)}"] = 1

    gc.callbacks.append(grow)
    gc.set_threshold(5)
    try:
        assert seen(value)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(grow)
    assert len(held) > 200 or sys.version_info >= (3, 12)
