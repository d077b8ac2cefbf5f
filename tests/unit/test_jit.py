"""jit: results are the function's own, whatever the arguments, and what is cached is what was asked for."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import pickle
import sys
import warnings
from collections import namedtuple
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from thunder_fn.errors import (
    ArgnumError,
    JitError,
    UnhashableStatic,
    UnknownOption,
    UnsupportedInput,
)
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.simplify import cse
from thunder_fn.ir.trace import Trace, cut
from thunder_fn.jitted import Jitted, cache_info, jit, last_prologue_traces, last_traces
from thunder_fn.jitted.prologue import PrologueMiss

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class State:
    w: torch.Tensor
    step: int


class Runs:
    """The number of times that Python ran a function: a queue's content is nothing that a program changes."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[None] = SimpleQueue()

    def __len__(self) -> int:
        return self.queue.qsize()


def counted(f):
    """f, and how often Python ran it."""
    runs = Runs()
    note = runs.queue.put

    @functools.wraps(f)
    def g(*args, **kwargs):
        note(None)
        return f(*args, **kwargs)

    return g, runs


def body(a, b):
    return torch.sin(a) * b + 1


# ---- values ----


def test_results_and_hits() -> None:
    f = jit(body)
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    for _ in range(3):
        assert torch.equal(f(a, b), body(a, b))
    assert cache_info(f) == (2, 1, 1, 256)


def test_structures_in_and_out() -> None:
    @jit
    def f(tree, *rest, scale=2, mode="plain"):
        return {"z": [tree["b"] * scale, None], "a": (tree["a"][0], Point(rest[0], mode)), "e": ()}

    x, y, z = torch.randn(3).unbind()
    for _ in range(2):
        out = f({"b": x, "a": [y, None]}, z, scale=3)
        assert list(out) == ["z", "a", "e"] and out["e"] == ()
        assert torch.equal(out["z"][0], x * 3) and out["z"][1] is None
        assert out["a"][0] is y and type(out["a"][1]) is Point and out["a"][1].x is z and out["a"][1].y == "plain"
    assert cache_info(f).misses == 1
    assert torch.equal(f({"a": [y, None], "b": x}, z, scale=3)["z"][0], x * 3)
    assert cache_info(f).misses == 2, "f may ask for the order of a dict's keys"


def test_dataclasses_namedtuples_and_modules() -> None:
    step = jit(lambda s, p: State(s.w * p.x + s.step, s.step + 1))
    s = State(torch.ones(2), 1)
    for _ in range(2):
        assert torch.equal(step(s, Point(s.w, 1)).w, s.w * s.w + 1) and step(s, Point(s.w, 1)).step == 2
    assert cache_info(step) == (3, 1, 1, 256)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.LayerNorm(4))
    x = torch.randn(2, 3)
    assert torch.equal(jit(model)(x), model(x))


def test_no_arguments_and_no_results() -> None:
    assert torch.equal(jit(lambda: torch.ones(2) * 3)(), torch.ones(2) * 3)
    f = jit(lambda x: None)
    assert f(torch.ones(1)) is None and f(torch.ones(1)) is None


def test_inputs_come_back_as_themselves_and_repeats_are_one_object() -> None:
    f = jit(lambda x, y: (x, y + 1, x))
    x, y = torch.ones(2), torch.ones(2)
    for _ in range(2):
        a, _, c = f(x, y)
        assert a is x and c is x
    g = jit(lambda x: (lambda h: (h, h))(x + 1))
    one, two = g(x)
    assert one is two


def test_owned_constants_are_made_anew() -> None:
    f = jit(lambda: torch.tensor([1.0, 2.0]))
    f().zero_()
    assert f().tolist() == [1.0, 2.0]


# ---- what tells calls apart ----


@pytest.mark.parametrize(
    "values",
    [
        (1, 1.0, True, "1", None, 1 + 0j),
        (0.0, -0.0, 0, False),
        (float("nan"), float("inf"), 2.5),
        (torch.float32, torch.float64, "float32"),
        ((1, 2), [1, 2], (1, (2,)), {"a": 1, "b": 2}, {"a": 1, "c": 2}),
        (slice(0, 1), slice(0, 1, 1), Ellipsis, range(2)),
        (complex(0.0, -0.0), complex(0.0, 0.0)),
    ],
)
def test_values_of_different_types_are_different(values) -> None:
    f = jit(lambda x, v: x + 1)
    x = torch.ones(1)
    for count, value in enumerate(values, start=1):
        f(x, value)
        f(x, value)
        assert cache_info(f).misses == count, value
    for value in values:
        f(x, value)
    assert cache_info(f).misses == len(values)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(3, 2),
        torch.ones(6),
        torch.ones(3, 2).t(),
        torch.ones(2, 6)[:, ::2],
        torch.ones(1, 3).expand(2, 3),
        torch.ones(2, 3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.ones(2, 3, device="meta"),
    ],
)
def test_metadata_of_tensors_tells_calls_apart(other) -> None:
    f, runs = counted(lambda x: x * 2)
    g = jit(f)
    for x in (torch.ones(2, 3), other, torch.ones(2, 3), other):
        result = g(x)
        assert result.shape == x.shape and result.dtype == x.dtype and result.requires_grad == x.requires_grad
    assert len(runs) == 2 and cache_info(g).hits == 2


def test_global_state_tells_calls_apart() -> None:
    f, runs = counted(lambda x: (x @ x, torch.ones(1), torch.is_grad_enabled()))
    g = jit(f)
    x = torch.ones(2, 2)
    assert g(x)[2] is True
    with torch.no_grad():
        assert g(x)[2] is False and g(x)[2] is False
    assert g(x)[2] is True and len(runs) == 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert g(x)[0].dtype == torch.bfloat16
    try:
        torch.set_default_dtype(torch.float64)
        assert g(x)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    try:
        torch.set_default_device("meta")
        assert g(x)[1].device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert g(x)[1].device.type == "cpu" and g(x)[1].dtype == torch.float32 and len(runs) == 5
    with torch.inference_mode():
        assert g(x)[0].is_inference()


def test_one_tensor_in_several_places() -> None:
    f = jit(lambda xs, y: sum(xs) + y)
    a, b = torch.ones(2), torch.ones(2) * 2
    for xs, y in (([a, a], a), ([a, b], a), ([a, a], b), ([a, a], a), ([b, a], a)):
        for _ in range(2):
            assert torch.equal(f(xs, y), sum(xs) + y)
    assert cache_info(f).misses == 4, "a program for each way of passing a tensor twice"


def test_static_arguments() -> None:
    f, runs = counted(lambda n, x, op: op(x, n))
    g = jit(f, static_argnums=(0, -1))
    x = torch.ones(3)
    assert torch.equal(g(2, x, torch.mul), x * 2) and torch.equal(g(2, x, torch.mul), x * 2)
    assert torch.equal(g(2.0, x, torch.add), x + 2) and torch.equal(g(2, x, torch.add), x + 2)
    assert len(runs) == 3
    with pytest.raises(UnhashableStatic, match="static argument 0 is a list, which has no hash"):
        g([2], x, torch.mul)


@pytest.mark.parametrize("option", [{"static_argnums": 1}, {"static_argnames": "op"}])
def test_an_argument_is_static_by_position_and_by_name(option: Any) -> None:
    runs = Runs()
    note = runs.queue.put

    @dataclass(frozen=True)
    class Times:
        n: int

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            note(None)
            return x * self.n

    def f(x: torch.Tensor, op: Times, *, scale: float = 1.0) -> torch.Tensor:
        return op(x) * scale

    g, x = jit(f, **option), torch.ones(3)
    for n in (2, 3, 2):
        for result in (g(x, Times(n)), g(x, op=Times(n)), g(op=Times(n), x=x), g(x, op=Times(n), scale=2.0) / 2):
            assert torch.equal(result, x * n)
    assert len(runs) == 8 and cache_info(g).hits == 4
    assert torch.equal(jit(lambda x: g(x, op=Times(5)))(x), x * 5), "inside of another trace"
    with pytest.raises(UnhashableStatic, match="static argument 'op' is a list, which has no hash"):
        g(x, op=[2])


def test_keyword_only_arguments_are_static_by_name() -> None:
    g, x = jit(lambda x, *, op: op(x), static_argnames=("op",)), torch.ones(3)
    module = torch.nn.ReLU()
    assert torch.equal(g(-x, op=module), x * 0) and torch.equal(g(-x, op=module), x * 0)
    assert cache_info(g).misses == 1
    many = jit(lambda x, **options: options["op"](x), static_argnames="op")
    assert torch.equal(many(-x, op=module), x * 0)


def test_closed_over_tensors_are_read_when_called_and_watched() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    f, runs = counted(lambda x: x * w)
    g = jit(f)
    with torch.no_grad():
        g(torch.ones(2))
        w.mul_(3)
        assert g(torch.ones(2)).tolist() == [3, 3] and len(runs) == 1
    assert g(torch.ones(2)).requires_grad
    w.requires_grad_(False)
    assert not g(torch.ones(2)).requires_grad
    w.data = torch.ones(2, dtype=torch.float64)
    assert g(torch.ones(2)).dtype == torch.float64


# ---- options ----


def test_misuse() -> None:
    with pytest.raises(UnknownOption, match=r"unknown option 'static_argnum'; did you mean 'static_argnums'\?"):
        jit(body, static_argnum=1)
    with pytest.raises(UnknownOption, match=r"unknown executor 'troch'; did you mean 'torch'\?"):
        jit(body, executors=["troch"])
    with pytest.raises(UnknownOption, match=r"unknown cache mode 'constant'; did you mean 'constant values'\?"):
        jit(body, cache="constant")
    with pytest.raises(JitError, match="jit: dynamic is True or False, given 1"):
        jit(body, dynamic=1)
    with pytest.raises(ArgnumError, match="static_argnums has 2, but body takes 2 positional arguments"):
        jit(body, static_argnums=2)
    with pytest.raises(ArgnumError, match=r"unknown argument in static_argnames 'y'.*\nfrom: .*\nThere are x, "):
        jit(lambda x, n: x, static_argnames="y")
    with pytest.raises(ArgnumError, match="both static and donated"):
        jit(lambda x, n: x, static_argnames="x", donate_argnums=0)
    with pytest.raises(ArgnumError, match="an argnum is an int"):
        jit(body, donate_argnums="x")
    with pytest.raises(ArgnumError, match="both static and donated"):
        jit(body, static_argnums=0, donate_argnums=(0, 1))
    with pytest.raises(JitError, match="expected a function, given an int"):
        jit(3)
    with pytest.raises(JitError, match="not been called yet"):
        last_traces(jit(body))
    with pytest.raises(JitError, match="expected a jitted function"):
        cache_info(body)


def test_unsupported_arguments() -> None:
    f = jit(lambda x, c: x)
    text = r"the argument args\[1\]\['a'\] is an object, neither a tensor nor a value to bake in"
    with pytest.raises(UnsupportedInput, match=text):
        f(torch.ones(1), {"a": object()})
    with pytest.raises(UnsupportedInput, match=r"^args\[0\] is a tensor of layout sparse_coo, "):
        f(torch.eye(2).to_sparse(), 1)
    assert cache_info(f).size == 0


class Doubling:
    factor = 2


class Tripling(Doubling):
    factor = 3


GIVEN: dict[str, tuple[Any, ...]] = {
    "classes": (lambda x, c: x * c.factor, Doubling, Tripling),
    "types": (lambda x, c: x + isinstance(1, c), int, float, bool),
    "classes of modules": (lambda x, c: c()(x), torch.nn.ReLU, torch.nn.Tanh),
    "classes of tensors": (lambda x, c: x if isinstance(x, c) else -x, torch.nn.Parameter, torch.Tensor),
    "methods of a class": (lambda x, f: f(x), torch.Tensor.sin, torch.Tensor.cos, torch.Tensor.__neg__),
    "methods of numbers": (lambda x, f: x * f(2), (3).__add__, (3).__mul__, (4).__mul__),
}


@pytest.mark.parametrize("name", GIVEN)
def test_classes_and_methods_are_arguments(name: str) -> None:
    f, *given = GIVEN[name]
    jitted, x = jit(f), torch.linspace(-1, 1, 3)
    for _ in range(2):
        assert all(torch.equal(jitted(x, one), f(x, one)) for one in given)
    assert (cache_info(jitted).misses, cache_info(jitted).hits) == (len(given), len(given))


def test_an_attribute_of_a_class_that_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    jitted, x = jit(lambda x, c: x * c.factor), torch.ones(2)
    for factor in (2, 5, 2):
        monkeypatch.setattr(Doubling, "factor", factor)
        assert torch.equal(jitted(x, Doubling), x * factor)


def test_decorators_and_metadata() -> None:
    @jit
    def f(x):
        """The doc."""
        return x

    @jit(static_argnums=1)
    def g(x, n):
        return x * n

    assert f.__name__ == "f" and f.__doc__ == "The doc." and list(inspect.signature(g).parameters) == ["x", "n"]
    assert g.options.static_argnums == (1,) and torch.equal(g(torch.ones(1), 2), torch.full((1,), 2.0))
    assert repr(f).startswith("jit(test_decorators_and_metadata")
    assert jit(f) is f and jit(jit(g), donate_argnums=0).options.static_argnums == (1,)
    assert f.with_function(body).fn is body
    with pytest.raises(AttributeError):
        f.fn = body


class Holder:
    @jit(static_argnums=0)
    def double(self, x):
        return x * 2


def test_methods_copies_and_pickles() -> None:
    assert Holder().double(torch.ones(1)).tolist() == [2]
    again = pickle.loads(pickle.dumps(jit(body, static_argnums=1)))
    assert again.fn is body and again.options.static_argnums == (1,) and isinstance(copy.copy(again), Jitted)
    assert pickle.loads(pickle.dumps(Holder.double)) is Holder.double  # by name, as functions are


def test_others_that_trace_a_jitted_function_trace_the_function() -> None:
    f = jit(lambda x: x * torch.tensor(2.0))
    with torch._subclasses.FakeTensorMode():
        assert f(torch.ones(2)).shape == (2,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        script = torch.jit.trace(f, torch.ones(2), check_trace=False)
    assert script(torch.full((2,), 3.0)).tolist() == [6, 6] and cache_info(f).size == 0


def test_transforms() -> None:
    f = jit(lambda x: torch.sin(x) + torch.sin(x), transforms=[cse])
    x = torch.ones(2)
    assert torch.equal(f(x), torch.sin(x) * 2)
    captured, after, program = last_traces(f)
    assert isinstance(captured, Trace) and len(captured.equations) == 3 and len(after.equations) == 2
    assert "def program" in str(program)

    def drop(trace: Trace) -> Trace:
        return cut(trace, equations=(), outputs=())

    with pytest.raises(JitError, match="the transform drop changes the trace's output types"):
        jit(lambda x: x + 1, transforms=drop)(x)
    with pytest.raises(JitError, match="returned a str, not a Trace"):
        jit(lambda x: x + 1, transforms=str)(x)


def test_other_cache_modes() -> None:
    f, runs = counted(lambda x, n: x * n)
    never, once = jit(f, cache="no caching"), jit(f, cache="same input")
    x = torch.ones(2)
    assert [never(x, 2).tolist(), never(x, 3).tolist(), never(x, 3).tolist()] == [[2, 2], [3, 3], [3, 3]]
    assert len(runs) == 3 and cache_info(never) == (0, 3, 0, 256) and "mul" in str(last_traces(never)[-1])
    assert once(x, 2).tolist() == [2, 2] and once(x, 3).tolist() == [2, 2], "the caller promised"
    assert len(runs) == 4


def test_the_cache_is_bounded_and_call_paths_are_kept() -> None:
    f, runs = counted(lambda x, n: x * n)
    g = jit(f, dynamic=False)
    g.programs.maxsize = 8
    x = torch.ones(1)
    for n in range(20):
        g(x, n)
    assert cache_info(g).size == 8 and len(runs) == 20
    for _ in range(3):
        for n in range(12, 20):
            assert g(x, n).item() == n
    assert len(runs) == 20


# ---- the prologue ----


def test_the_prologue_is_a_trace_that_checks() -> None:
    f = jit(lambda x, n, mode: x * n)
    x = torch.ones(2, 3)
    f(x, 3, "relu")
    (prologue,) = last_prologue_traces(f)
    text = str(prologue)
    assert text.startswith("def prologue(v0, v1):\n    # v0: f32[2, 3]\n    # v1: int\n")
    assert "check_structure.default('(args, kwargs)', \"((*, *, 'relu'), {})\")" in text
    assert 'check_tensor.default(v0, torch.float32, (2, 3), (3, 1), torch.device("cpu"), False)' in text
    assert "check_number.default(v1, 3)" in text and "grad_mode=True" in text
    assert evaluate(prologue, (x, 3)) == ()
    for wrong in ((x.requires_grad_(), 3), (torch.ones(3, 2).t(), 3), (torch.ones(2, 3), 4), (torch.ones(2, 3), True)):
        with pytest.raises((PrologueMiss, RuntimeError)):
            evaluate(prologue, wrong)
    with torch.no_grad(), pytest.raises((PrologueMiss, RuntimeError)):
        evaluate(prologue, (torch.ones(2, 3), 3))


def test_random_programs_draw_eagers_numbers() -> None:
    f = lambda x: torch.nn.functional.dropout(x, 0.5) + torch.randn(3)
    g, x = jit(f), torch.ones(3)
    for _ in range(2):
        torch.manual_seed(7)
        expected = f(x)
        torch.manual_seed(7)
        assert torch.equal(g(x), expected)


class Level(enum.IntEnum):
    HIGH = 2


@pytest.mark.parametrize(
    "value",
    [torch.float64, torch.strided, torch.device("cpu"), torch.channels_last, Level.HIGH, 1j, float("inf"), ..., len],
)
def test_a_result_may_hold_any_value(value: object) -> None:
    f = jit(lambda x: {"y": x + 1, "rest": (value, x.dtype)})
    for _ in range(2):
        found = f(torch.zeros(2))
        assert found["rest"] == (value, torch.float32) and type(found["rest"][0]) is type(value)


@pytest.mark.parametrize("cache", ["constant values", "symbolic values"])
@pytest.mark.filterwarnings("ignore::thunder_fn.jitted.RetraceWarning")
def test_among_many_programs_the_right_one_is_found_without_taking_the_call_apart(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {number: float(number) for number in range(40)}
    f = jit(lambda x, n, *, name="a": x * table[n] + len(name), cache=cache)  # n is pinned
    calls = [(torch.ones(2 + n % 3), n, "b" * (n % 2)) for n in range(40)]
    for x, n, name in calls:
        f(x, n, name=name)
    monkeypatch.setattr(
        sys.modules["thunder_fn.jitted"], "_call_slowly", lambda *args: pytest.fail("the call was taken apart")
    )
    for x, n, name in (*calls, *calls[::-1], calls[3], calls[3], calls[3]):
        assert torch.equal(f(x, n, name=name), x * table[n] + len(name))
        assert last_traces(f)[0].input_types[0].shape is not None
    assert cache_info(f).misses == 40


def test_calls_that_look_alike_get_their_own_programs() -> None:
    """Guards tell apart what a glance does not, such as strides, dtypes and the contents of lists."""
    f = jit(lambda x, options: x.t() * options[0], dynamic=False)
    for _ in range(3):
        for x in (torch.ones(2, 2), torch.ones(2, 2).t(), torch.ones(2, 2, dtype=torch.float64), torch.ones(3, 3)):
            for options in ([1], [1.0], [True], [2]):
                mine = f(x, options)
                assert torch.equal(mine, x.t() * options[0]) and mine.dtype == (x.t() * options[0]).dtype
    assert cache_info(f).misses == 12 + 4


# ---- arguments whose own code fails ----


def _failing(name: str) -> Any:
    def fails(self: object, *args: object) -> object:
        raise RuntimeError(f"hostile {name}")

    return type("Failing", (), {name: fails, **({"__hash__": object.__hash__} if name == "__eq__" else {})})()


@pytest.mark.parametrize("name", ["__eq__", "__hash__", "__len__", "__bool__", "__repr__", "__iter__", "__getattr__"])
def test_objects_whose_own_code_fails(name: str) -> None:
    """They are used as they are, or refused by name, wherever they come in; the next call is as good as any."""
    x, bad = torch.ones(3), _failing(name)

    class Holds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = bad

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2 if self.bad is bad else 3)

    calls = (
        lambda: tfn.jit(lambda x, bad: x * 2)(x, bad),
        lambda: tfn.jit(lambda x, bad: x * 2, static_argnums=1)(x, bad),
        lambda: tfn.grad(lambda x, bad: (x * x).sum())(x, bad),
        lambda: tfn.jit(Holds())(x),
        lambda: tfn.jit(lambda x: (x * 2, bad))(x)[0],
    )
    for call in calls:
        try:
            result = call()
        except tfn.errors.ThunderError:
            pass
        else:
            torch.testing.assert_close(result, x * 2)
        torch.testing.assert_close(tfn.jit(torch.sin)(x), x.sin())


def test_containers_that_hold_themselves() -> None:
    x, around, named = torch.ones(3), [], {}
    around.append(around)
    named["again"] = named
    for tree in (around, named, (around,)):
        for call in (
            lambda: tfn.jit(lambda x, t: x)(x, tree),
            lambda: tfn.jit(lambda x: (x, tree))(x),
            lambda: tfn.trace(torch.sin, tree),
        ):
            with pytest.raises(tfn.errors.ThunderError, match="holds itself"):
                call()
        torch.testing.assert_close(tfn.jit(torch.sin)(x), x.sin())


def test_containers_that_lie_deep() -> None:
    """As deep as a program can be written; deeper ones are an error of ours."""

    def nested(leaf: Any, depth: int) -> Any:
        for _ in range(depth):
            leaf = [leaf]
        return leaf

    x = torch.ones(3)
    assert str(tfn.jit(lambda x: nested(x, 140))(x)) == str(nested(x, 140))
    for depth in (200, 900):
        for call in (
            lambda: tfn.jit(lambda t: x)(nested(x, depth)),
            lambda: tfn.jit(lambda x: nested(x, depth))(x),
            lambda: tfn.vmap(lambda t: x)(nested(x, depth)),
        ):
            with pytest.raises(tfn.errors.UnsupportedInput, match="containers deep"):
                call()
