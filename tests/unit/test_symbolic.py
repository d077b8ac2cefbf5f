"""Symbolic sizes and numbers: one program for many calls, and never a wrong one."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn.capture import capture
from thunder_fn.capture.numbers.arguments import symbolic_leaves
from thunder_fn.derived.leaf_jvp import jvp_rule
from thunder_fn.derived.leaf_vjp import alone
from thunder_fn.errors import TraceTypeError
from thunder_fn.executors import lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.interpreters.grad import grad_and_value
from thunder_fn.interpreters.jvp import jvp
from thunder_fn.interpreters.vmap import vmap
from thunder_fn.ir.check import check
from thunder_fn.ir.rules import JvpRule
from thunder_fn.ir.symbols import size_symbol, specialize
from thunder_fn.ir.trace import Expr, Trace, Var
from thunder_fn.jitted import cache_info, explain_misses, jit, last_prologue_traces, last_traces

SYMBOLIC = "symbolic values"


def traced(f: Callable[..., Any], *args: Any) -> Trace:
    """The trace of f with a symbol for every size and number."""
    places = [
        (i, dim)
        for i, arg in enumerate(args)
        for dim in (range(arg.dim()) if isinstance(arg, torch.Tensor) else [None])
    ]
    trace = capture(f, args, symbolic=symbolic_leaves(args, places)).trace
    check(trace)
    return trace


def agrees(f: Callable[..., Any], g: Callable[..., Any], *args: Any) -> None:
    """Both give the same results, numbers by type."""
    mine, its = f(*args), g(*args)
    torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(*(tfn.capture.pytree.flatten(value)[0] for value in (mine, its)), strict=True):
        assert type(a) is type(b)


# ---- the seed ----


def split(a: torch.Tensor, dim0: int, dim1: int) -> Any:
    dim2 = a.size(2) - dim0 - dim1
    x = torch.split(a, (dim0, dim1, dim2), dim=2)
    dim3 = x[2].size(2) + dim2
    return x, dim3


def foo(flag: float) -> torch.Tensor:
    if flag > 5:
        return torch.ones(1)
    return torch.zeros(1)


def test_split_with_computed_sizes() -> None:
    f = jit(split, cache=SYMBOLIC)
    for shape, dim0, dim1 in (((8, 16, 32), 2, 8), ((5, 6, 20), 3, 9), ((5, 6, 40), 30, 9)):
        agrees(f, split, torch.randn(shape), dim0, dim1)
    assert cache_info(f).misses == 1
    text = str(last_traces(f)[0])
    assert "split_with_sizes.default(v0, (s3, s4, s2 - s3 - s4), 2)" in text and "2*s2 - 2*s3 - 2*s4)" in text


def test_a_decision_is_a_constraint() -> None:
    f = jit(foo, cache=SYMBOLIC)
    for n in (6, 0, 7, 100, -4, 5):
        agrees(f, foo, n)
    assert cache_info(f).misses == 2
    assert "# where s0 <= 5" in str(last_prologue_traces(f)[0])
    (miss,) = explain_misses(f)
    assert str(miss).startswith("s0 > 5 (s0 is args[0]): it was True, and is False now (asked at ")
    assert miss.source is not None and miss.source.function == "foo"


def test_gradient_with_symbolic_numbers() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor, scale: float, power: int) -> torch.Tensor:
        return ((torch.tanh(x @ w) * scale) ** power).mean(0).sum() / x.shape[0]

    f = jit(tfn.grad(loss, argnums=(0, 1)), cache=SYMBOLIC)
    for n, scale in ((5, 2.0), (7, 0.5), (2, -1.0)):
        args = torch.randn(4, 3), torch.randn(n, 4), scale, 2
        torch.testing.assert_close(f(*args), torch.func.grad(loss, argnums=(0, 1))(*args))
    assert cache_info(f).misses == 1


@pytest.mark.parametrize("number", [0.5, 1.0, 2.0])
def test_a_power_decides_nothing_about_its_number(number: float) -> None:
    """PyTorch 2.11 computes powers with these numbers as other ops."""
    x = torch.rand(3, dtype=torch.float64) + 0.5
    f = lambda x, n: x**n + n**x
    trace = capture(f, (x, number), symbolic=symbolic_leaves((x, number), [(1, None)])).trace
    for n in (number, 0.75, 3.0):
        torch.testing.assert_close(evaluate(trace, [x, n]), (f(x, n),))


def test_misses_tell_what_kind_of_argument_changed() -> None:
    f = jit(lambda x, n=None: x)
    x = torch.ones(2)
    for args in ((x,), (x, 1), (x, True), (x, "a"), (x[None].double(), "a"), (x, None)):
        f(*args)
    assert list(map(str, explain_misses(f))) == [
        "the structure of the arguments: it was PyTreeSpec(((*,), {})), and is PyTreeSpec(((*, *), {})) now",
        "args[1]: it was int, and is bool True now",
        "args[1]: it was bool True, and is str 'a' now",
        "args[0]: it was Tensor of 1 dims, float32 on cpu, and is Tensor of 2 dims, float64 on cpu now",
        "the structure of the arguments: it was PyTreeSpec(((*, *), {})), and is PyTreeSpec(((*, None), {})) now",
    ]


@pytest.mark.filterwarnings("ignore::thunder_fn.jitted.RetraceWarning")
def test_programs_that_take_turns_keep_their_call_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("thunder_fn.jitted")
    made: list[Any] = []
    original = module.call_path
    monkeypatch.setattr(module, "call_path", lambda *args, **kwargs: made.append(args) or original(*args, **kwargs))
    f = jit(lambda n: len(range(n)), cache=SYMBOLIC)
    object.__setattr__(f.programs, "maxsize", 4)
    for _ in range(3):
        assert [f(n) for n in range(20)] == list(range(20))
    assert cache_info(f).misses == len(made) == 20


# ---- traces ----


def mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.gelu(torch.nn.functional.layer_norm(x @ w + b, (w.shape[1],)))
    z = torch.cat([y, y * 2], dim=1)[:, : x.shape[1]].transpose(0, 1).reshape(-1, w.shape[1])
    return z.softmax(-1).pow(2).mean(0).sum() * x.numel() + x.std()


def arguments(*sizes: int) -> tuple[torch.Tensor, ...]:
    batch, length, features, width = sizes
    return torch.randn(batch, length, features), torch.randn(features, width), torch.randn(width)


def test_traces_hold_for_all_sizes() -> None:
    trace = traced(mlp, *arguments(3, 5, 7, 9))
    assert [str(var.type) for var in trace.inputs] == ["f32[s0, s1, s2]", "f32[s2, s4]", "f32[s4]"]
    args = arguments(4, 6, 8, 2)
    for run in (lambda *xs: evaluate(trace, xs), trace.python_callable(), lower(trace)):
        torch.testing.assert_close(run(*args), (mlp(*args),))
    other = traced(mlp, *arguments(3, 5, 7, 9))
    assert trace == other and hash(trace) == hash(other)
    copy = pickle.loads(pickle.dumps(trace))
    assert copy == trace and hash(copy) == hash(trace)
    check(specialize(trace, dict.fromkeys(symbols(trace), 4)))


def symbols(trace: Trace) -> set[Any]:
    return {symbol for var in trace.inputs for size in var.type.shape for symbol in size.value.free_symbols}


def test_traces_refuse_other_sizes() -> None:
    trace = traced(lambda x: x * 2 if x.shape[0] > 5 else x, torch.randn(7))
    with pytest.raises(TraceTypeError, match="the trace holds where s0 > 5, and not where s0 = 3"):
        evaluate(trace, [torch.randn(3)])
    with pytest.raises(TraceTypeError, match="the size s0 is at least 2, given 1"):
        evaluate(traced(torch.sin, torch.randn(7)), [torch.randn(1)])
    with pytest.raises(TraceTypeError):
        evaluate(traced(torch.add, torch.randn(7), torch.randn(7)), [torch.randn(3), torch.randn(4)])


def test_transforms_of_symbolic_traces() -> None:
    torch.manual_seed(0)
    trace, args = traced(mlp, *arguments(3, 5, 7, 9)), arguments(4, 6, 8, 2)
    wanted = (True, True, True)
    new = grad_and_value(trace, wanted)
    check(new)
    grads, value = torch.func.grad_and_value(mlp, argnums=(0, 1, 2))(*args)
    for run in (lambda *xs: evaluate(new, xs), lower(new)):
        torch.testing.assert_close(tuple(run(*args)), (*grads, value))
    xs = torch.randn(3, *args[0].shape)
    batched, _ = vmap(trace, (0, None, None), 3)
    check(batched)
    torch.testing.assert_close(evaluate(batched, (xs, *args[1:]))[0], torch.stack([mlp(x, *args[1:]) for x in xs]))
    forward = jvp(trace, wanted)
    check(forward)
    tangents = tuple(torch.randn_like(arg) for arg in args)
    expected = torch.func.jvp(mlp, args, tangents)
    torch.testing.assert_close(evaluate(forward, (*args, *tangents)), expected, rtol=1e-3, atol=1e-4)


# ---- programs that depend on numbers in every way ----


def _pick(x: torch.Tensor, n: int) -> Any:
    return [x.sin(), x.cos(), x.exp()][n]


PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "arithmetic": (lambda x, n: (x * n + n // 2 - n % 3, n * 2 + 1, -n, abs(n), n**2), [(5,), (7,), (-3,), (0,), (1,)]),
    "float": (lambda x, n: (x * n + 1 / (1 + n * n), n / 3, n - 0.25), [(0.5,), (2.5,), (-1.0,), (0.0,)]),
    "compare": (lambda x, n: x if n % 3 == 0 else x + n if n > 2 else x - n, [(i,) for i in range(-4, 8)]),
    "min and max": (lambda x, n: (x[: min(n, 3)], max(n, 2)), [(1,), (2,), (3,), (5,), (9,)]),
    "len and numel": (lambda x: (x * len(x), x.numel(), x.stride(0)), [(), ()]),
    "math": (lambda x, n: x * math.sqrt(n) + math.floor(n / 2) + math.ceil(n / 3) + math.log(n), [(2,), (5,), (9,)]),
    "range": (lambda x, n: [x * i for i in range(n)], [(2,), (3,), (0,)]),
    "index": (_pick, [(0,), (1,), (2,), (-1,)]),
    "axis": (lambda x, n: x.sum(n), [(0,), (1,), (-1,)]),
    "reshape": (lambda x, n: x.reshape(-1).repeat(n).reshape(n, -1), [(2,), (3,), (1,)]),
    "roll": (lambda x, n: torch.roll(x, n, 0) + torch.arange(x.shape[1]), [(1,), (2,), (-1,)]),
    "bool": (lambda x, n: x + 1 if n else x, [(True,), (False,), (1,), (0,), (1.0,), (None,), ("",)]),
    "string": (lambda x, n: f"{n}" == "3", [(3,), (4,), ("3",)]),
    "divisible": (lambda x: x.view(2, -1) if x.shape[0] % 2 == 0 else x, [(), ()]),
    "equal shapes": (lambda x, y: x + y if x.shape == y.shape else x.sum() + y.sum(), []),
    "is instance": (lambda x, n: x * 2 if isinstance(n, int) else x, [(3,), (4,), (2.0,), (5,)]),
    "scale": (lambda x, n: torch.nn.functional.interpolate(x[None, None], scale_factor=n), [(2,), (3,), (2,)]),
    "pad": (lambda x, n: torch.nn.functional.pad(x, (0, n)), [(2,), (3,), (0,)]),
    "full": (lambda x, n: torch.full((2, 3), n) + x.sum(), [(2,), (3,), (2.5,), (True,)]),
}


@pytest.mark.parametrize("mode", ["constant values", SYMBOLIC])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, mode: str) -> None:
    f, calls = PROGRAMS[name]
    g = jit(f, cache=mode)
    for shape in ((4, 6), (5, 6), (6, 6), (8, 3), (1, 6), (0, 3), (4, 6)):
        x = torch.randn(shape)
        if name == "equal shapes":
            for other in (shape, (4, 6), (1, 3)):
                agrees(g, f, x, torch.randn(other))
        for call in calls:
            try:
                f(x, *call)
            except (RuntimeError, ValueError, IndexError):
                continue
            agrees(g, f, x, *call)


# ---- transformers ----


class Block(torch.nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.GELU(), torch.nn.Linear(32, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm(x))


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(50, width), torch.nn.Embedding(64, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return torch.nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def test_batches_of_all_lengths() -> None:
    torch.manual_seed(0)
    model = Model()
    step = jit(model)
    for batch, length in ((4, 8), (4, 11), (2, 30), (3, 5), (4, 8)):
        ids = torch.randint(0, 50, (batch, length))
        step(ids).backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(ids).backward()
        torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert cache_info(step).misses == 3  # sizes as they are, another length, another batch size


def test_decoding_with_a_cache_is_traced_once() -> None:
    def attend(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys, values = torch.cat([keys, x], 1), torch.cat([values, x * 2], 1)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, values), keys, values

    step = jit(attend, cache=SYMBOLIC)
    x, state, expected = torch.randn(2, 1, 8), (torch.randn(2, 2, 8), torch.randn(2, 2, 8)), (torch.randn(0),)
    for _ in range(20):
        expected = attend(x, *state)
        found = step(x, *state)
        torch.testing.assert_close(found, expected)
        state = found[1:]
    assert cache_info(step).misses == 1


def test_nothing_is_traced_for_a_decoding_position() -> None:
    def write(cache: torch.Tensor, x: torch.Tensor, position: int) -> torch.Tensor:
        return torch.cat([cache[:, :position], x, cache[:, position + 1 :]], 1)

    step = jit(write)
    for position in range(1, 9):
        cache, x = torch.randn(2, 10, 3), torch.randn(2, 1, 3)
        agrees(step, write, cache, x, position)
    assert cache_info(step).misses == 2


# ---- what the user says of an argument ----


def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
    return x * n if x.shape[0] < 600 else x - n


MARKS: dict[str, tuple[Any, int]] = {
    "nothing": ({}, 3),
    "all": ({"x": True, "n": True}, 1),
    "a dim": ({"x": {0: True}, "n": False}, 2),
    "by position": ({0: {0: True}, 1: True}, 1),
    "from the end": ({-2: {-2: True}, -1: True}, 1),
    "bounds": ({"x": {0: (2, 512)}, "n": (0, 10)}, 1),
    "bounds that some calls leave": ({"x": {0: (2, 6)}, "n": True}, 2),
    "half a bound": ({"x": {0: (4, None)}, "n": True}, 2),
    "never": ({"x": False, "n": True}, 4),
}


@pytest.mark.parametrize("name", MARKS)
def test_marks(name: str) -> None:
    dynamic, misses = MARKS[name]
    f = jit(scaled, dynamic=dynamic)
    for rows in (2, 5, 9, 500):
        for n in (2, 3):
            agrees(f, scaled, torch.randn(rows, 3), n)
    assert cache_info(f).misses == misses


def test_bounds_are_known_and_checked() -> None:
    f = jit(scaled, dynamic={"x": {0: (2, 512)}, "n": True})
    agrees(f, scaled, torch.randn(5, 3), 2)
    trace = last_traces(f)[0]
    assert isinstance(trace, Trace) and [str(constraint) for constraint in trace.constraints] == [
        "s0 >= 2",
        "s0 <= 512",
    ]
    agrees(f, scaled, torch.randn(700, 3), 2)
    agrees(f, scaled, torch.randn(550, 3), 2)
    assert [miss.what for miss in explain_misses(f)] == [
        "s0 <= 512 (s0 is args[0].shape[0])",
        "s0 < 600 (s0 is args[0].shape[0])",
    ]
    with pytest.raises(TraceTypeError, match="the trace holds where s0 <= 512, and not where s0 = 513"):
        evaluate(trace, [torch.randn(513, 3), 2])


BAD_MARKS: dict[str, tuple[Any, str]] = {
    "y": ({"y": True}, "jit: unknown argument in dynamic 'y'\nThere are x, n."),
    "key": ({1.5: True}, "jit: dynamic names arguments by position or name, given 1.5"),
    "mark": ({"x": 3}, "jit: a mark is a flag or bounds (least, greatest), where None is no bound; given 3"),
    "empty": ({"x": (5, 2)}, "jit: the bounds (5, 2) leave no value between them; the least bound comes first"),
    "dim": ({"x": {"a": True}}, "jit: dynamic has a dim that is no int: 'a'"),
}


@pytest.mark.parametrize("name", BAD_MARKS)
def test_marks_that_mean_nothing(name: str) -> None:
    dynamic, text = BAD_MARKS[name]
    with pytest.raises((tfn.errors.JitError, tfn.errors.ArgnumError)) as caught:
        jit(scaled, dynamic=dynamic)
    assert message_of(caught.value).startswith(text)


def test_a_mark_for_a_dim_that_is_not_there() -> None:
    with pytest.raises(tfn.errors.ArgnumError, match="jit: dynamic has dim 7 of 'x', which has a tensor of 2 dims"):
        jit(scaled, dynamic={"x": {7: True}})(torch.randn(2, 3), 2)


def test_a_miss_says_why_no_symbol_could_stand_for_a_number() -> None:
    kinds = [type]  # Python's own is found by its names

    def exact(x: torch.Tensor, n: int) -> torch.Tensor:
        if kinds[0](n) is not int:
            raise TypeError("an int, please")
        return x * n

    f = jit(exact, cache=SYMBOLIC)
    for n in (2, 3):
        agrees(f, exact, torch.ones(2), n)
    (miss,) = explain_misses(f)
    assert str(miss) == (
        "args[1]: it was 2, and is 3 now; no symbol stands for it, since then: "
        "exact raised TypeError while it was traced: an int, please"
    )


def test_a_write_whose_value_has_another_name_for_its_size() -> None:
    """A write in place keeps sizes, so that both names stand for one number."""

    def push(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_(torch.cat((x, y), 1)[:, -3:])
        return x + 1

    f = tfn.jit(push, cache="symbolic values")
    for count in (2, 4, 5):
        x = torch.arange(count * 6.0).reshape(count, 3, 2)
        y, known = torch.ones(count, 1, 2), x.clone()
        assert torch.equal(f(x, y), push(known, y)) and torch.equal(x, known)
    assert cache_info(f).misses == 1


COMPOSED: dict[str, Any] = {
    "multilabel_margin_loss": lambda x: torch.nn.functional.multilabel_margin_loss(
        x, torch.tensor([[1, 0, -1], [2, -1, 0], [0, 1, 2]])
    ),
    "multi_margin_loss": lambda x: torch.nn.functional.multi_margin_loss(x, torch.tensor([1, 0, 2]), p=2),
    "hardshrink": torch.nn.functional.hardshrink,
    "softshrink": torch.nn.functional.softshrink,
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None], size=5, mode="linear"),
    "bicubic": lambda x: torch.nn.functional.interpolate(x[None, None], scale_factor=1.5, mode="bicubic"),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_ops_that_pytorch_composes_in_python(name: str) -> None:
    """Programs of symbolic sizes hold PyTorch's Python code for these, which is to be what its kernels are."""
    f = COMPOSED[name]
    x = torch.linspace(-1, 2, 9, dtype=torch.float64).reshape(3, 3).sin().requires_grad_()
    jitted = tfn.jit(f, cache="symbolic values")
    torch.testing.assert_close(jitted(x), f(x))
    have, want = (torch.autograd.grad(g(x).sum(), x)[0] for g in (jitted, f))
    torch.testing.assert_close(have, want)


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((5, 3), (3, 4))),
    "bmm": (torch.bmm, ((2, 5, 3), (2, 3, 4))),
    "mv": (torch.mv, ((5, 3), (3,))),
    "addmm": (lambda *args: torch.addmm(*args, beta=2, alpha=3), ((4,), (5, 3), (3, 4))),
    "baddbmm": (torch.baddbmm, ((2, 5, 4), (2, 5, 3), (2, 3, 4))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_forward_mode_of_products_fixes_no_size(name: str) -> None:
    f, shapes = PRODUCTS[name]
    values = tuple(torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes))
    for active in range(len(values)):
        of = lambda one, active=active: f(*values[:active], one, *values[active + 1 :])
        (x,) = values[active : active + 1]
        found = tfn.jvp(of, (x,), (x.cos(),))
        torch.testing.assert_close(found, torch.func.jvp(of, (x,), (x.cos(),)))
        mask = tuple(i == active for i in range(len(values)))
        rule = jvp_rule(_with_symbols(f, values), mask)
        assert isinstance(rule, JvpRule)
        assert not rule.trace.constraints


def _with_symbols(f: Callable[..., Tensor], values: tuple[Tensor, ...]) -> Trace:
    """The only leaf of a function, alone, with a symbol for each size."""
    single = tfn.trace(f, *values)
    while single.equations[0].op.kind != "leaf":
        single = single.equations[0].body
    single, names = alone(single.equations[0]), dict[int, Expr]()

    def var(one: Var) -> Var:
        shape = tuple(names.setdefault(size, Expr(size_symbol(len(names), size))) for size in one.type.shape)
        return Var(one.index, dataclasses.replace(one.type, shape=shape))

    inputs, (equation,) = tuple(map(var, single.inputs)), single.equations
    outputs = tuple(map(var, equation.outputs))
    new = dataclasses.replace(equation.reading(lambda one: inputs[one.index]), outputs=outputs)
    return Trace(inputs, (new,), outputs, (), ())
