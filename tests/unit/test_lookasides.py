"""Lookasides: PyTorch's higher-order functions and the user's, however imported, in captures only."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import inspect
import math
import subprocess
import sys
import threading
import types
import weakref
from math import sqrt as imported_sqrt
from typing import Any

import pytest
import torch
import torch._higher_order_ops as hops
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint as imported_checkpoint

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import Lookaside, cache_info, jit, torch_internals as internals
from thunder_fn.capture.replaced.lookasides import lookasides
from thunder_fn.errors import JitError, LookasideError, RecipeError
from thunder_fn.ir.trace import Trace

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings("ignore:jit. the work of the thread:thunder_fn.errors.OutsideWarning")

X = torch.linspace(-1, 1, 3, dtype=torch.float64)
imported_cond = torch.cond


def names(trace: Trace) -> set[str]:
    return {e.op.name for e in trace.equations} | {n for e in trace.equations for b in e.bodies for n in names(b)}


# ---- PyTorch's own ----


def true_fn(x: torch.Tensor) -> Tensor:
    return torch.cos(x)


def false_fn(x: torch.Tensor) -> Tensor:
    return torch.sin(x)


def test_the_seeds_example_as_it_is_written() -> None:
    @jit
    def f(true_fn: Any, false_fn: Any, x: Tensor) -> Tensor:
        return torch.cond(x.shape[0] > 4, true_fn, false_fn, (x,))

    x = torch.ones(5)
    torch.testing.assert_close(f(true_fn, false_fn, x), torch.cos(x))
    torch.testing.assert_close(f(true_fn, false_fn, x[:3]), torch.sin(x[:3]))
    torch.testing.assert_close(f(false_fn, true_fn, x), torch.sin(x))
    assert tfn.cache_info(f).misses == 3


def loops(x: Tensor) -> Any:
    carry, ys = hops.scan(lambda c, y: (c * y, c + y), x, torch.stack([x, x.sin()]), reverse=True)
    n, v = torch.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * 2), (torch.tensor(0), x))
    prefixes = hops.associative_scan(lambda a, b: a * b, torch.stack([x, x.cos(), x]), 0)
    mapped = hops.map(lambda y, z: y * z, torch.stack([x, x.exp()]), x)
    kept = imported_checkpoint(lambda x: x.sin().sin(), x, use_reentrant=False)
    chosen = imported_cond(
        x.sum() > 0, lambda x: x * 2, lambda x: torch.cond(x[0] > 0, torch.sin, torch.cos, (x,)), (x,)
    )
    return carry, ys, n, v, prefixes, mapped, kept, chosen


def python(x: Tensor) -> Any:
    xs = (x, x.sin())
    first = x * xs[1]
    ys = torch.stack([first + x, x + xs[1]])
    chosen = x * 2 if x.sum() > 0 else x.sin() if x[0] > 0 else x.cos()
    prefixes = torch.stack([x, x, x]).cumprod(0) * torch.stack([x / x, x.cos() / x, x.cos() / x])
    return first * x, ys, torch.tensor(3), x * 8, prefixes, torch.stack([x * x, x.exp() * x]), x.sin().sin(), chosen


def test_every_spelling_becomes_an_equation() -> None:
    x = X + 0.3
    trace = tfn.trace(loops, x)
    tfn.check(trace)
    assert {"scan", "while_loop", "checkpoint", "cond"} <= names(trace)
    torch.testing.assert_close(jit(loops)(x), python(x))
    torch.testing.assert_close(jit(loops)(-x), python(-x))
    torch.testing.assert_close(tfn.jacrev(lambda x: loops(x)[:2])(x), torch.func.jacrev(lambda x: python(x)[:2])(x))


def test_scan_without_xs_is_torchs() -> None:
    (trace_out,) = tfn.evaluate(tfn.trace(lambda x: hops.scan(lambda c, y: (c, c), x, [])[0], X), (X,))
    torch.testing.assert_close(trace_out, X)


def test_outside_a_capture_nothing_is_different() -> None:
    functions = [torch.cond, torch.while_loop, hops.scan, hops.map, hops.associative_scan, imported_checkpoint]
    before = [(f.__code__, f.__defaults__, inspect.signature(f)) for f in functions]
    with pytest.raises(ZeroDivisionError):
        tfn.trace(lambda x: torch.cond(x.sum() > 0, lambda x: x / (1 // 0), lambda x: x, (x,)), X)
    assert [(f.__code__, f.__defaults__, inspect.signature(f)) for f in functions] == before


def test_other_threads_run_the_original_meanwhile() -> None:
    stop, wrong, calls = threading.Event(), [], [0]

    def other() -> None:
        while not stop.is_set():
            result = imported_checkpoint(lambda x: x + 1, X, use_reentrant=False)
            calls[0] += 1
            if type(result) is not torch.Tensor or not torch.equal(result, X + 1):
                wrong.append(result)

    thread = threading.Thread(target=other)
    thread.start()
    traces = [tfn.trace(lambda x: imported_checkpoint(torch.sin, x, use_reentrant=False), X) for _ in range(30)]
    stop.set()
    thread.join()
    assert not wrong and calls[0] and all(names(trace) >= {"checkpoint"} for trace in traces)


# ---- flex_attention ----


@pytest.mark.parametrize("how", ["jit", "compile"])
def test_a_block_mask_is_a_result_as_any_object(how: str) -> None:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    def f(x: Tensor, size: int) -> Any:
        return create_block_mask(causal, None, None, size, size, device="cpu", BLOCK_SIZE=2), x * 2

    ours = getattr(tfn, how)(f)
    for size in (4, 4, 6):
        (mask, _), (want, _) = ours(X, size), f(X, size)
        assert type(mask) is BlockMask and torch.equal(mask.to_dense(), want.to_dense())
        assert list(vars(mask)) == list(vars(want)) and mask.seq_lengths == want.seq_lengths
        assert mask.mask_mod is want.mask_mod


def test_flex_attention_under_transforms() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    size = 6
    q, k, v = (torch.randn(2, 2, size, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, dtype=torch.float64)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cpu", BLOCK_SIZE=size)

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 1.5 + bias[h] * (i - j), block_mask=mask)

    def oracle(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        i = torch.arange(size)
        scores = q @ k.transpose(-1, -2) / 2 * 1.5 + bias[None, :, None, None] * (i[:, None] - i)
        return scores.masked_fill(i[:, None] < i, float("-inf")).softmax(-1) @ v

    def loss(f: Any) -> Any:
        return lambda *args: f(*args).sin().sum()

    args, every = (q, k, v, bias), (0, 1, 2, 3)
    tfn.check(tfn.trace(f, *args))
    torch.testing.assert_close(jit(f)(*args), oracle(*args))
    torch.testing.assert_close(tfn.grad(loss(f), every)(*args), torch.func.grad(loss(oracle), every)(*args))
    biases = torch.stack([bias, bias * 2])
    batched = tfn.vmap(tfn.grad(loss(f)), (None, None, None, 0))(q, k, v, biases)
    torch.testing.assert_close(
        batched, torch.func.vmap(torch.func.grad(loss(oracle)), (None, None, None, 0))(q, k, v, biases)
    )
    hessian = torch.func.jacrev(torch.func.jacrev(loss(oracle), 3), 3)(*args)
    torch.testing.assert_close(tfn.hessian(loss(f), 3)(*args), hessian)


# ---- the user's ----


def slow(x: Tensor, factor: float = 2.0) -> Tensor:
    return x.sin() * factor


also_slow = slow


def with_cell() -> Any:
    offset = 1.0

    def shifted(x: Tensor) -> Tensor:
        return x + offset

    return shifted


def test_a_lookaside_of_jit() -> None:
    f = jit(
        lambda x: also_slow(x) + slow(x, factor=3.0), lookasides=[Lookaside(slow, lambda x, factor=2.0: x * factor)]
    )
    torch.testing.assert_close(f(X), X * 5)
    torch.testing.assert_close(slow(X), X.sin() * 2)
    torch.testing.assert_close(jit(lambda x: slow(x))(X), X.sin() * 2)


def test_a_lookaside_of_what_the_collector_has_frozen() -> None:
    gc.freeze()
    try:
        assert jit(lambda x: x * imported_sqrt(16.0), lookasides=Lookaside(math.sqrt, lambda x: 3 * x))(X)[2] == 48
    finally:
        gc.unfreeze()


def test_a_lookaside_calls_the_original_and_reaches_bodies() -> None:
    def thrice(x: Tensor, factor: float = 2.0) -> Tensor:
        return slow(x, factor) * 3

    f = jit(lambda x: tfn.scan(lambda c, _: (slow(c), None), x, length=2)[0], lookasides=Lookaside(slow, thrice))
    torch.testing.assert_close(f(X), (X.sin() * 6).sin() * 6)


def test_lookasides_of_closures_and_of_c_functions() -> None:
    shifted = with_cell()
    with lookasides(
        [Lookaside(shifted, lambda x: x * 10), Lookaside(torch.sin, torch.cos), Lookaside(Tensor.exp, torch.tanh)]
    ):
        have = tfn.jvp(lambda x: (shifted(x), torch.sin(x), x.exp()), (X,), (X,))[0]
        assert torch.equal(torch.sin(X), X.sin())
    torch.testing.assert_close(have, (X * 10, X.cos(), X.tanh()))
    torch.testing.assert_close(shifted(X), X + 1)


BY_NAME = {
    "math.sqrt": (math.sqrt, lambda x: x * math.sqrt(4.0), lambda x: x * imported_sqrt(4.0)),
    "len": (len, lambda x: x * len([1, 2]), lambda x: x * builtins.len([1, 2])),
    "torch.get_num_threads": (torch.get_num_threads, lambda x: x * torch.get_num_threads()),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_builtins_that_modules_have(name: str) -> None:
    """They are replaced where user's code looks them up, for that capture and in that thread."""
    builtin, *functions = BY_NAME[name]
    for f in functions:
        want = f(X)
        found = list[torch.Tensor]()

        def seven(*args: object) -> int:
            thread = threading.Thread(target=lambda: found.append(f(X)))
            thread.start()
            thread.join()
            return 7

        torch.testing.assert_close(jit(f, lookasides=[Lookaside(builtin, seven)])(X), X * 7)
        assert torch.equal(f(X), want) and torch.equal(found[0], want) and torch.equal(jit(f)(X), want)
    assert math.sqrt is imported_sqrt and len is builtins.len


REPLACED_BY_CAPTURES = {
    "sqrt of a size": (math.sqrt, lambda x: x * math.sqrt(x.shape[0])),
    "inference mode": (torch.is_inference_mode_enabled, lambda x: x * torch.is_inference_mode_enabled()),
    "threads of a pool": (torch.get_num_interop_threads, lambda x: x * torch.get_num_interop_threads()),
    "fast path": (torch.backends.mha.get_fastpath_enabled, lambda x: x * torch.backends.mha.get_fastpath_enabled()),
    "seed": (torch.initial_seed, lambda x: x * torch.random.initial_seed()),
    "state": (torch.get_rng_state, lambda x: x * torch.get_rng_state()),
}


@pytest.mark.parametrize("name", REPLACED_BY_CAPTURES)
def test_what_a_capture_itself_replaces(name: str) -> None:
    """The lookaside is asked before the capture, and for symbolic sizes too."""
    fn, f = REPLACED_BY_CAPTURES[name]
    jitted = jit(f, lookasides=[Lookaside(fn, lambda *args: 7)])
    for size in (3, 3, 4, 5):
        torch.testing.assert_close(jitted(torch.ones(size)), torch.full((size,), 7.0))
    assert cache_info(jitted).misses <= 2
    inside = jit(lambda x: jit(f, lookasides=[Lookaside(fn, lambda *args: 7)])(x))
    torch.testing.assert_close(inside(X), X * 7)


def test_patches_of_one_place_come_and_go_in_any_order() -> None:
    place = types.SimpleNamespace(f=lambda: ("f",))
    original = place.f
    make = lambda name: lambda before: lambda: (name, *before())
    inner, outer = internals.Patch((place, "f", make("a"))), internals.Patch((place, "f", make("b")), outermost=True)
    for first, second in ((inner, outer), (outer, inner)):
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as early:
                early.enter_context(first.applied())
                stack.enter_context(second.applied())
                assert place.f() == ("b", "a", "f")
                assert internals.patched_places(original) == [(place, "f")] and internals.unpatched(place.f) is original
            assert place.f() == (*("b" if second is outer else "a"), "f")
        assert place.f is original
    with inner.applied():
        kept, place.f = place.f, len
    assert place.f is len
    place.f = kept  # somebody else puts our replacement back: the next patch knows it
    with inner.applied():
        assert place.f() == ("a", "f")
    assert place.f is original and internals.patched_places(original) == []


@pytest.mark.parametrize("name", ("of_instance", "kept"))
def test_a_class_that_a_lookaside_was_in_is_let_go(name: str) -> None:
    def run() -> weakref.ref[type]:
        body = {one: found for one, found in vars(Properties).items() if one not in ("__dict__", "__weakref__")}
        made = type("Made", (), body)
        held, instance = vars(made)[name], made()
        jit(lambda x: x * instance.plain, lookasides=[Lookaside(held, lambda *args: 7.0)])(X)
        assert vars(made)[name] is held
        return weakref.ref(made)

    known = run()
    gc.collect()
    assert known() is None
    (idle,) = (one for one in internals.patched_places(torch.nn.Module._wrapped_call_impl) if one[1] == "__call__")
    assert idle[0] is torch.nn.Module


def test_a_builtin_calls_the_original_in_its_replacement() -> None:
    lookaside = Lookaside(math.sqrt, lambda x: math.sqrt(x) + 1)
    torch.testing.assert_close(jit(lambda x: x * math.sqrt(4.0), lookasides=[lookaside])(X), X * 3)


@functools.cache
def cached(n: int) -> int:
    return n + 1


doubled = functools.partial(slow, factor=2.0)


class Properties:
    @property
    def plain(self) -> float:
        return 2.0

    @functools.cached_property
    def kept(self) -> float:
        return 3.0

    @functools.lru_cache(maxsize=2)  # noqa: B019 - there is one instance
    def of_instance(self, n: int) -> int:
        return n * 5


@pytest.mark.parametrize("is_filled", (False, True), ids=("caches are empty", "caches are filled"))
def test_properties_and_what_functools_makes(is_filled: bool) -> None:
    """They are diverted whatever a cache holds, and no cache holds what a replacement gave."""
    cached.cache_clear()
    held, found = Properties(), list[Tensor]()

    def f(x: Tensor) -> Tensor:
        return held.plain * x + held.kept * x**2 + cached(1) * x**3 + held.of_instance(1) * x**4 + doubled(x)

    def known(*factors: float) -> Tensor:
        return sum((factor * X**n for n, factor in enumerate(factors, 1)), torch.zeros(()))

    as_written = known(2, 3, 2, 5) + doubled(X)
    if is_filled:
        torch.testing.assert_close(f(X), as_written)

    def seven(self: Any) -> float:
        thread = threading.Thread(target=lambda: found.append(f(X)))
        thread.start()
        thread.join()
        return 7.0

    def through_original(self: Any) -> float:
        return self.kept + 10

    given = [
        Lookaside(Properties.plain, seven),
        Lookaside(Properties.kept, through_original),
        Lookaside(cached, lambda n: cached(n) * 10),
        Lookaside(Properties.of_instance, lambda self, n: 30 + n),
        Lookaside(doubled, lambda x: x * 0),
    ]
    torch.testing.assert_close(jit(f, lookasides=given)(X), known(7, 13, 20, 31))
    torch.testing.assert_close(found[0], as_written)
    torch.testing.assert_close(f(X), as_written)
    torch.testing.assert_close(jit(f)(X), as_written)
    assert type(vars(Properties)["kept"]) is functools.cached_property and vars(held) == {"kept": 3.0}
    with pytest.raises(RecipeError, match="the frontend 'dynamo' does not follow a lookaside of a cached_property"):
        tfn.compile(f, frontend="dynamo", lookasides=given[1:2])


def test_builtins_that_no_module_has() -> None:
    for fn in ([].append, {}.get, functools.partial(slow), functools.cache(slow)):
        with pytest.raises(LookasideError) as caught:
            Lookaside(fn, slow)
        assert message_of(caught.value) == (
            f"Lookaside: no module or class has {fn!r:.60} by name, so calls of it cannot be reached\n"
            "Call it in a Python function of yours, and give that one."
        )
    with pytest.raises(LookasideError, match="fn must be a function, given <method 'upper' of 'str' objects>"):
        Lookaside(str.upper, slow)


@pytest.mark.parametrize(
    ("operator", "f"),
    (
        (torch.Tensor.__add__, lambda x: x + 1),
        (torch.Tensor.__mul__, lambda x: 2 * x),
        (torch.Tensor.__matmul__, lambda x: x @ x),
        (torch.Tensor.__eq__, lambda x: x == x),
        (torch.Tensor.__truediv__, lambda x: x / 2),
        (torch.Tensor.__rsub__, lambda x: 1 - x),
        (torch.Tensor.__neg__, lambda x: -x),
    ),
)
def test_operators_arrive_under_other_names(operator: Any, f: Any) -> None:
    torch.testing.assert_close(jit(f, lookasides=[Lookaside(operator, lambda x, *others: x * 10)])(X), X * 10)


def test_a_torch_function_in_python_as_its_own_replacement() -> None:
    softmax = torch.nn.functional.softmax
    with lookasides([Lookaside(softmax, lambda x, dim: softmax(x, dim) * 2)]):
        have = tfn.jvp(lambda x: torch.nn.functional.softmax(x, 0), (X,), (X,))[0]
    torch.testing.assert_close(have, X.softmax(0) * 2)


class Methods:
    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def of_none(x: Tensor) -> Tensor:
        return x * 3

    def of_instance(self, x: Tensor) -> Tensor:
        return x * 4


def test_methods_of_all_kinds() -> None:
    def f(x: Tensor) -> Tensor:
        return Methods.of_class(x) + Methods().of_class(x) + Methods.of_none(x) + Methods().of_instance(x)

    given = [
        Lookaside(Methods.of_class, lambda cls, x: x * 10),
        Lookaside(Methods.of_none, lambda x: x * 100),
        Lookaside(Methods.of_instance, lambda self, x: x * 1000),
    ]
    torch.testing.assert_close(jit(f, lookasides=given)(X), X * 1120)
    torch.testing.assert_close(f(X), X * 11)


def test_methods_as_their_class_has_them() -> None:
    given = [
        Lookaside(vars(Methods)["of_class"], lambda cls, x: x * 10),
        Lookaside(vars(Methods)["of_none"], lambda x: x * 100),
    ]
    have = jit(lambda x: Methods.of_class(x) + Methods.of_none(x), lookasides=given)(X)
    torch.testing.assert_close(have, X * 110)


def numbered(x: Tensor) -> Any:
    given = yield x
    try:
        yield given * 2
    except ValueError:
        return x * 3


def takes_apart(x: Tensor) -> Tensor:
    steps = numbered(x)
    first, second = next(steps), steps.send(x + 1)
    with pytest.raises(StopIteration) as stopped:
        steps.throw(ValueError())
    return first + second + stopped.value.value


def test_generators_call_the_original_in_their_steps() -> None:
    """Values sent, exceptions thrown and values returned are as in Python."""

    def plus_100(x: Tensor) -> Any:
        returned = yield from numbered(x)
        return returned + 100

    have = jit(takes_apart, lookasides=[Lookaside(numbered, plus_100)])(X)
    torch.testing.assert_close(have, takes_apart(X) + 100)
    closed = jit(lambda x: next(numbered(x)), lookasides=[Lookaside(numbered, plus_100)])(X)
    torch.testing.assert_close(closed, X)


@torch.library.custom_op("test_lookasides::plus_one", mutates_args=())
def plus_one(x: Tensor) -> Tensor:
    return x + 1


plus_one.register_fake(torch.empty_like)
OPS = {
    "packet": (torch.ops.aten.sin, lambda x: torch.ops.aten.sin(x), lambda x: x.sin()),
    "packet, its overload is called": (torch.ops.aten.sin, lambda x: torch.ops.aten.sin.default(x), lambda x: x.sin()),
    "overload": (torch.ops.aten.sin.default, lambda x: torch.ops.aten.sin.default(x), lambda x: x.sin()),
    "custom": (plus_one, lambda x: plus_one(x), lambda x: x + 1),
    "custom, by name": (plus_one, lambda x: torch.ops.test_lookasides.plus_one(x), lambda x: x + 1),
    "size": (Tensor.size, lambda x: torch.tensor(x.size(0), dtype=x.dtype) + 0 * x, lambda x: x.new_full((3,), 3.0)),
}


@pytest.mark.parametrize("name", OPS)
def test_operators_of_libraries(name: str) -> None:
    op, f, known = OPS[name]
    lookaside = Lookaside(op, lambda x, *args: op(x, *args) * 7)
    torch.testing.assert_close(jit(f, lookasides=[lookaside])(X), known(X) * 7)
    torch.testing.assert_close(jit(f)(X), known(X))


# ---- through Dynamo ----


def breaks(x: Tensor) -> Tensor:
    y = slow(x)
    if y.sum() > 100:
        return y
    return slow(y)


@torch._dynamo.disable
def between_graphs(x: Tensor) -> Tensor:
    return slow(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's
@pytest.mark.parametrize("frontend", (None, "dynamo"))
@pytest.mark.filterwarnings("ignore::thunder_fn.errors.GraphBreakWarning")
def test_dynamo_is_diverted_in_graphs_and_between_them(frontend: Any) -> None:
    options: dict[str, Any] = {"frontend": frontend, "executors": "torch"}
    thrice = Lookaside(slow, lambda x, factor=2.0: slow(x, factor) * 3)
    parts = tfn.compile(breaks, lookasides=[thrice], **options)
    for _ in range(2):
        torch.testing.assert_close(parts(X), (X.sin() * 6).sin() * 6)
    torch.testing.assert_close(tfn.compile(breaks, **options)(X), breaks(X))
    disabled = tfn.compile(lambda x: between_graphs(x) + slow(x), lookasides=[thrice], **options)
    torch.testing.assert_close(disabled(X), X.sin() * 12)
    torch.testing.assert_close(between_graphs(X), X.sin() * 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_threads_with_lookasides_of_their_own_through_dynamo() -> None:
    wrong = list[float]()

    def run(factor: float) -> None:
        lookaside = [Lookaside(slow, lambda x: x * factor)] if factor else []
        compiled = tfn.compile(lambda x: slow(x), frontend="dynamo", executors="torch", lookasides=lookaside)
        known = X * factor if factor else slow(X)
        wrong.extend(factor for _ in range(10) if not torch.allclose(compiled(X), known))

    threads = [threading.Thread(target=run, args=(float(factor),)) for factor in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_code_is_exchanged_while_no_thread_compiles() -> None:
    """Dynamo guards the code of what it inlines, so that it fails if another thread exchanges it meanwhile."""
    code = slow.__code__
    lookaside = Lookaside(slow, lambda x: x * 3)
    compiled = tfn.compile(lambda x: slow(x), frontend="dynamo", executors="torch", lookasides=[lookaside])
    found = list[Tensor]()
    thread = threading.Thread(target=lambda: found.append(compiled(X)))
    with internals.no_compilation():
        thread.start()
        thread.join(0.5)
        assert slow.__code__ is code and not found
    thread.join()
    assert torch.equal(found[0], X * 3) and slow.__code__ is code


def test_what_dynamo_does_not_follow() -> None:
    for lookaside, name in (
        (Lookaside(math.sqrt, lambda x: 1.0), "a lookaside of the builtin sqrt"),
        (Lookaside(numbered, numbered), "a generator function in the place of numbered"),
    ):
        with pytest.raises(RecipeError) as caught:
            tfn.compile(slow, frontend="dynamo", lookasides=[lookaside])
        assert message_of(caught.value) == (
            f"the frontend 'dynamo' does not follow {name}\n"
            "Give a Python function of yours and another that returns what it computes."
        )
        with pytest.raises(tfn.errors.DataDependentBranch):
            tfn.compile(breaks, executors="torch", lookasides=[lookaside])(X)


def test_errors() -> None:
    with pytest.raises(LookasideError, match="Lookaside: fn must be a function, given Linear"):
        Lookaside(torch.nn.Linear(2, 2), slow)
    with pytest.raises(LookasideError, match="replace_with is a function, given an int"):
        Lookaside(slow, 3)  # type: ignore[arg-type]
    with pytest.raises(JitError, match="a lookaside is a `Lookaside"):
        jit(slow, lookasides=[slow])
    for option in ("lookasides", "transforms"):
        with pytest.raises(JitError, match=f"jit: {option} is a sequence, `\\(\\)` for none, given None"):
            jit(slow, **{option: None})
    with pytest.raises(
        JitError, match=r"jit: two lookasides divert slow, to .*<lambda> and .*sin\nfrom: .*\nLeave one of them out."
    ):
        jit(slow, lookasides=[Lookaside(slow, lambda x: x), Lookaside(slow, torch.sin)])
    assert isinstance(slow, types.FunctionType)


def test_what_is_imported_inside_the_traced_function_is_diverted_too() -> None:
    program = """
import sys, torch, thunder_fn as tfn
def f(q):
    from torch.nn.attention.flex_attention import flex_attention
    return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * 2)
assert "torch.nn.attention.flex_attention" not in sys.modules
q = torch.randn(1, 2, 8, 4)
want = torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=1.0)
torch.testing.assert_close(tfn.jit(f)(q), want)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.export's
def test_exported_programs_with_control_flow() -> None:
    """The graph modules of torch.export call PyTorch's higher-order operators themselves."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x: Tensor) -> Any:
            y = torch.cond(x.sum() > 0, lambda x: self.linear(x), lambda x: x.sin(), (x,))
            _, z = torch.while_loop(lambda n, z: n < 3, lambda n, z: (n + 1, z * 2), (torch.tensor(0), y))
            return z

    model = Model()
    exported = torch.export.export(model, (X,)).module()
    for x in (X + 1, X - 1):
        torch.testing.assert_close(jit(lambda x: exported(x))(x), model(x))
    found = names(tfn.trace(exported, X))
    assert {"cond", "while_loop"} <= found


def test_operators_called_by_hand() -> None:
    step = lambda c, x, w: [c + x * w, c * x]
    f = lambda x: torch.ops.higher_order.scan(step, [x], [torch.stack([x, x.cos()])], (x.sin(),))
    carry, ys = jit(f)(X)
    torch.testing.assert_close(carry, X + X * X.sin() + X.cos() * X.sin())
    torch.testing.assert_close(ys, torch.stack([X * X, (X + X * X.sin()) * X.cos()]))
    g = lambda x: torch.ops.higher_order.map_impl(lambda row, w: (row * w,), [torch.stack([x, x.cos()])], [x])[0]
    torch.testing.assert_close(jit(g)(X), torch.stack([X * X, X * X.cos()]))
    torch.testing.assert_close(jit(lambda x: hops.strict_mode(torch.sin, (x,)))(X), X.sin())
