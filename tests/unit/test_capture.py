"""Capture: what the trace computes is what the function does, for every kind of Python and PyTorch in it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import re
import typing
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn
from tests.unit.capturing import agree, agree_made, assert_same, call_captured
from thunder_fn.capture import capture
from thunder_fn.errors import DataDependentValue, UnsupportedCall
from thunder_fn.ir import ops
from thunder_fn.ir.trace import Trace, subtraces

X = torch.arange(6.0).reshape(2, 3) + 0.5
Z = torch.complex(X, X.flip(0))


def leaf_names(trace: Trace) -> list[str]:
    """The leaf ops of a trace and of its bodies."""
    return [equation.op.name for each in subtraces(trace) for equation in each.equations if equation.op.kind == "leaf"]


# ---- in-place code and views come out pure ----


def set_row(x: Any) -> Any:
    y = x * 1
    y[0] = 1.0
    y[:, 1] += 2
    return y


def write_through_view(x: Any) -> Any:
    y = x * 1
    y.view(-1)[2:].mul_(3)
    return y


def write_to_views(x: Any) -> Any:
    y = x.clone()
    for part in y.chunk(3, 1):
        part.mul_(2)
    a, b = y.unbind(0)
    a += 1
    b *= a
    y.diagonal().copy_(x[0, :2])
    return y, a, b


def out_argument(x: Any) -> Any:
    wide, empty = torch.empty_like(x), torch.empty(0)
    torch.add(x, x, out=wide)
    torch.mul(x, x, out=empty)
    return wide, empty


def change_shape(x: Any) -> Any:
    y = x * 1
    y.transpose_(0, 1)
    y.unsqueeze_(0)
    y.squeeze_()
    y.t_()
    y.resize_(6)
    return y


def share_memory(x: Any) -> Any:
    y, z, w = x * 1, x.sin(), x * 1
    y.data = z
    w.set_(x.cos())
    z.mul_(2)
    y.data.add_(1)
    return y, z, w


def write_to_parts(x: Any) -> Any:
    z = torch.complex(x, x)
    z.real.mul_(2)
    z.imag.add_(1)
    bits = x.clone()
    bits.view(torch.int32).add_(1)
    return z, bits


def scatter_and_fill(x: Any) -> Any:
    index = torch.tensor([0])
    return (
        torch.full_like(x, 3).fill_diagonal_(0.0),
        torch.zeros(3, 3).scatter_(0, torch.tensor([[0, 1, 2]]), x[:1]),
        torch.eye(3).index_add_(0, index, x[:1]),
        torch.eye(3).index_copy_(0, index, x[:1]),
        torch.eye(3).index_fill_(0, index, 2.0),
        x.clone().masked_fill_(x > 2, 0.0),
        x.clone().cumsum_(1),
    )


def put(x: Any) -> Any:
    y = x.clone()
    y[torch.tensor([1, 0])] = 0.0
    y[torch.tensor([0]), torch.tensor([1])] += 1
    y[y > 4] = 9.0
    return y


def many_at_once(x: Any) -> Any:
    tensors = [x.clone(), x[0].clone()]
    torch._foreach_add_(tensors, 1.0)
    return tensors, torch._foreach_mul(tensors, 2.0)


def conjugate_views(x: Any) -> Any:
    z, w = torch.complex(x, x), torch.complex(x, x)
    z.conj().mul_(2j)
    return z, z.conj(), z.conj().imag, z.mH, z.resolve_conj(), w.conj() * 2, torch.view_as_real(w), w.abs(), w.angle()


def mutate_argument(x: Any) -> Any:
    x.add_(1)
    x[0] = 5.0
    return x.sum()


def swap_rows(x: Any) -> Any:
    first, second = x[0].clone(), x[1]
    x[0].copy_(second)
    second.copy_(first)
    return x


INPLACE = (
    *(set_row, write_through_view, write_to_views, out_argument, change_shape, share_memory, write_to_parts, put),
    *(scatter_and_fill, many_at_once, conjugate_views, mutate_argument, swap_rows),
)


@pytest.mark.parametrize("f", INPLACE, ids=lambda f: f.__name__)
def test_inplace_code_is_pure(f: Any) -> None:
    trace = agree(f, X)
    for name in leaf_names(trace):
        assert not ops.overload(ops.Op("leaf", name))._schema.is_mutable, name


def test_complex_argument_is_mutated() -> None:
    agree(lambda z: z.conj().mul_(2j), Z)


def test_closed_over_tensors_are_mutated() -> None:
    def make() -> Any:
        total, rows, parameter = torch.zeros(3), torch.zeros(4, 3), torch.nn.Parameter(torch.zeros(3))

        def f(x: Any) -> Any:
            total.add_(x.sum(0))
            rows[1] = x[0]
            rows[2:].mul_(0).add_(1)
            parameter.data = total * 2
            return total * 2, rows.sum(), parameter * 1

        return f, ((X.clone(),), {}), [total, rows, parameter]

    agree_made(make)


# ---- closures ----


def test_closed_over_tensors_are_constants_by_reference() -> None:
    a, b = torch.ones(3), torch.ones(3)
    trace = capture(lambda x: x + a + b + a, (X,)).trace
    assert [constant.tensor for constant in trace.constants] == [a, b] or len(trace.constants) == 2
    assert trace.constants[0].tensor is a
    assert trace.constants[1].tensor is b


def test_unused_closures_are_no_constants() -> None:
    a = torch.ones(3)
    assert capture(lambda x: (a * 2, x)[1], (X,)).trace.constants == ()


def test_tensors_from_python_data_are_owned_constants() -> None:
    first = agree(lambda x: (x + torch.tensor([1.0, 2.0, 3.0]), torch.as_tensor([[1, 2, 3]]) * x), X)
    second = agree(lambda x: (x + torch.tensor([1.0, 2.0, 3.0]), torch.as_tensor([[1, 2, 3]]) * x), X)
    assert first == second
    assert all(constant.owned for constant in first.constants)


def test_numpy_data_becomes_a_constant() -> None:
    array = np.ones(3, dtype=np.float32)
    agree(lambda x: (x + torch.from_numpy(array), torch.as_tensor(array) * x, torch.tensor(array)), X)


# ---- pytrees ----

Point = collections.namedtuple("Point", "x y")


class Named(typing.NamedTuple):
    """A typed named tuple."""

    a: torch.Tensor
    b: int = 3


@dataclasses.dataclass
class State:
    """With a field that `__init__` does not take."""

    a: torch.Tensor
    n: int = 2
    c: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.c = self.a + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """Frozen, slotted, with a dataclass inside."""

    state: State
    rest: tuple[torch.Tensor, ...] = ()


TREES: dict[str, tuple[Any, Any]] = {
    "dict": ({"a": X, "b": [X * 2, (3, "s", None)]}, lambda d: {"z": d["a"] * d["b"][0], "n": d["b"][1]}),
    "ordered": (OrderedDict(b=X, a=X + 1), lambda d: OrderedDict(z=d["b"] * 2, y=d["a"])),
    "default": (defaultdict(list, {"a": [X]}), lambda d: defaultdict(list, q=[d["a"][0] * 2])),
    "deque": (collections.deque([X, X + 1]), lambda d: collections.deque([d[0] * d[1]], maxlen=3)),
    "namedtuple": (Point(X, 2), lambda p: Point(p.x * p.y, p)),
    "typed namedtuple": (Named(X), lambda p: Named(p.a * p.b)),
    "dataclass": (State(X), lambda s: State(s.a * s.n + s.c)),
    "frozen dataclass": (Frozen(State(X), (X,)), lambda f: Frozen(f.state, (f.rest[0] * 2,))),
    "return type": (torch.max(X, 0), lambda r: torch.max(r.values * X, 0)),
    "size": (torch.Size([3, 2]), lambda size: (X.reshape(size), X.shape, X.sum().shape)),
    "none": (None, lambda none: (none, None, X)),
    "slice": (slice(0, 1), lambda s: X[s]),
    "nothing": ((), lambda empty: None),
    "repeated": (X, lambda x: (y := x * 2, y, x, x)),
}


@pytest.mark.parametrize("name", TREES)
def test_pytrees_in_and_out(name: str) -> None:
    tree, f = TREES[name]
    agree(f, tree)


def test_keyword_arguments_and_static_leaves() -> None:
    captured = capture(lambda n, x, *, a, s: (x * a, s, n), (None, X), {"a": 3, "s": "hi"})
    assert len(captured.trace.inputs) == 1
    assert_same(call_captured(captured, (None, X), {"a": 3, "s": "hi"}), (X * 3, "hi", None))


# ---- random numbers: eager's, in eager's order ----


def draw(x: Any) -> Any:
    torch.rand(3)  # dead, but eager draws it
    return (
        torch.rand(2, 3) + x,
        torch.randn_like(x),
        torch.rand_like(x.t()),
        torch.randperm(5),
        torch.randint(0, 5, (3,)),
    )


def draw_from(x: Any) -> Any:
    return torch.multinomial(x, 2), torch.normal(x, 1.0), torch.bernoulli(torch.sigmoid(x.t())), torch.poisson(x)


def draw_in_place(x: Any) -> Any:
    return (
        torch.empty_like(x).bernoulli_(0.5),
        torch.empty(3).normal_(),
        torch.empty(3).uniform_(),
        torch.empty(2).exponential_(),
        torch.empty(2, dtype=torch.int64).random_(0, 5),
    )


def draw_into_strides(x: Any) -> Any:
    """Eager fills memory in its order, whatever the order of the dimensions."""
    y = torch.empty(4, 3, 2).permute(2, 0, 1)
    y.uniform_()
    z = torch.zeros(3, 2).t()
    z[:, 1:].normal_()
    p = torch.empty(3, 2).t().bernoulli_(torch.sigmoid(x))
    return y * 1, z, p


def dropouts(x: Any) -> Any:
    return (
        F.dropout(x, 0.5),
        F.dropout(x.t(), 0.5),
        F.dropout(x.clone(), 0.5, inplace=True),
        F.alpha_dropout(x, 0.5, True),
        F.rrelu(x, training=True),
        F.gumbel_softmax(x),
    )


def sample_distributions(x: Any) -> Any:
    normal = torch.distributions.Normal(x, 1.0)
    sample = normal.rsample()
    return sample, normal.log_prob(sample), torch.distributions.Categorical(logits=x).sample()


@pytest.mark.parametrize(
    "f", (draw, draw_from, draw_in_place, draw_into_strides, dropouts, sample_distributions), ids=lambda f: f.__name__
)
def test_random_numbers_are_those_of_eager(f: Any) -> None:
    agree(f, X)


LAYOUTS: dict[str, Any] = {
    "transposed": lambda v: v.t(),
    "with gaps": lambda v: v[::2],
    "a column": lambda v: v[:, 3],
    "gaps in a transposed one": lambda v: v.t()[1:, ::2],
    "permuted": lambda v: v.reshape(4, 10, 30).permute(2, 0, 1),
    "diagonal": lambda v: v.diagonal(),
    "channels last": lambda v: v.reshape(2, 4, 10, 15).to(memory_format=torch.channels_last),
    "overlapping": lambda v: v.as_strided((4, 5), (7, 1)),
    "half": lambda v: v.bfloat16().t(),
    "computed": lambda v: v.t() * 2,
    "few": lambda v: v[:3, :4].t(),
}
DRAWS: dict[str, Any] = {
    "normal_": lambda v: v.normal_(1, std=2),
    "uniform_": lambda v: v.uniform_(),
    "bernoulli_": lambda v: v.bernoulli_(torch.full_like(v, 0.4)),
    "exponential_": lambda v: v.exponential_(),
    "geometric_": lambda v: v.geometric_(0.4),
    "cauchy_": lambda v: v.cauchy_(),
    "log_normal_": lambda v: v.log_normal_(),
    "random_": lambda v: v.random_(3, 10),
    "dropout": lambda v: F.dropout(v + 1, 0.4),
    "dropout_": lambda v: F.dropout(v.add_(1), 0.4, inplace=True),
    "rrelu_": lambda v: F.rrelu(v.sub_(1), training=True, inplace=True),
    "randn_like": torch.randn_like,
    "normal": lambda v: torch.normal(v, 1.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_in_any_layout_are_those_of_eager(name: str) -> None:
    """The number of an element depends on how its tensor lies in memory; so do later draws."""
    for layout, view in LAYOUTS.items():

        def run(v: torch.Tensor, view: Any = view) -> Any:
            return DRAWS[name](view(v)), v, torch.rand(2)

        found = []
        for g in (run, tfn.jit(run), tfn.jit(tfn.checkpoint(run))):
            torch.manual_seed(3)
            found.append(g(torch.zeros(40, 30)))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), (name, layout)


# ---- Python on tracers ----


def look(x: Any) -> Any:
    assert f"{x} {x!r} {x.sum():.3f} {[x]}"
    assert len(x) == 2
    assert x.device == torch.device("cpu")
    assert x.type() == "torch.FloatTensor"
    assert isinstance(x, torch.Tensor)
    return x * len(x), [row * 2 for row in x], x.numel(), x.shape[0], x.view(x.size()[:-1] + (3, 1))  # noqa: RUF005


def convert(x: Any) -> Any:
    return (
        *(x.to(torch.int64), x.double().half(), x.cpu(), x.to(x), x.bool(), x.to("cpu", torch.bfloat16), x.long()),
        *(x.new_zeros(x.shape), x.new_tensor([1.0, 2.0]), x.new_ones(2), x.new_full((2,), 3.0), x.type(torch.float64)),
        *(x.type_as(torch.ones(1, dtype=torch.int32)), x.T.contiguous(), torch.as_tensor(x), torch.asarray(x)),
    )


def compute(x: Any) -> Any:
    return (
        *(2**x, 1 / x, 2 - x, x // 2, x % 2, -x, ~(x > 1), x @ x.T, abs(x), x.T @ x, np.prod(x.shape) * x, True + x),
        *(torch.stack([x, x]), torch.cat((x, x), dim=1), torch.einsum("ij,kj->ik", x, x), torch.split(x, [1, 2], 1)),
        *(x.sort(), x.topk(2), x.argmax(), torch.block_diag(x, x), torch.cartesian_prod(x[0], x[1]), torch.std_mean(x)),
        *(
            torch.linalg.inv(x @ x.T + torch.eye(2)),
            torch.linalg.svd(x)[1],
            torch.linalg.cholesky(x @ x.T + torch.eye(2)),
        ),
    )


def index(x: Any) -> Any:
    where = torch.tensor([1, 0])
    return x[where], x[:, where], x[where, where], x[..., None], x[torch.tensor(1)], x[:, -1], x[1:][::1], x[None, 1]


def copies(x: Any) -> Any:
    y = copy.deepcopy(x)
    y.mul_(2)
    return y, copy.copy(x)


@pytest.mark.parametrize("f", (look, convert, compute, index, copies), ids=lambda f: f.__name__)
def test_python_on_tracers(f: Any) -> None:
    agree(f, X)


def test_tracers_show_their_type() -> None:
    seen: list[str] = []
    capture(lambda x: seen.append(f"{x} {x!r} {x.sum():.3f} {[x]}"), (X,))
    assert seen == ["Tracer(f32[2, 3]) Tracer(f32[2, 3]) Tracer(f32[]) [Tracer(f32[2, 3])]"]


def test_constants_can_be_read() -> None:
    def f(x: Any) -> Any:
        t = torch.tensor(3)
        before = t.item()
        t += 1
        return x * before, x * t.item()

    agree(f, X)


def test_default_dtype_and_device_contexts_are_written_into_the_trace() -> None:
    def f(x: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("cpu"):
                return torch.ones(3) + x, torch.arange(0.0, 2), torch.rand(2)
        finally:
            torch.set_default_dtype(torch.float32)

    trace = agree(f, X)
    kwargs = [dict(equation.kwargs) for equation in trace.equations if "dtype" in dict(equation.kwargs)]
    assert [entry["dtype"].value for entry in kwargs] == [torch.float64] * 3
    assert all(entry["device"].value == torch.device("cpu") for entry in kwargs)


def test_meta_tensors_can_be_captured() -> None:
    trace = capture(lambda x: F.softmax(x @ x.T, -1), (X.to("meta"),)).trace
    assert str(trace.outputs[0].type) == "meta f32[2, 2]"


def test_compiled_functions_run_as_they_are() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    assert leaf_names(agree(compiled, X)) == ["aten.sin.default", "aten.add.Tensor"]


def test_ops_on_two_numbers_are_equations() -> None:
    trace = tfn.trace(lambda x: x + torch.add(1, 2) * torch.div(1.0, 4), torch.zeros(2))
    assert tfn.evaluate(trace, [torch.zeros(2)])[0].tolist() == [0.75, 0.75] and not trace.constants


def test_complex_numbers_in_data_are_no_symbols() -> None:
    with pytest.raises(DataDependentValue, match="`item` asked for the values"):
        tfn.jit(lambda x: x.sum().item() * 2)(torch.ones(2, dtype=torch.complex64))


class Counter:
    """State of a user's own object, changed in place."""

    def __init__(self) -> None:
        self.total, self.parts = torch.zeros(3), {"last": torch.ones(3)}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        self.parts["last"] *= 2
        self.total.mul_(2)
        return self.total + self.parts["last"]


def test_an_object_keeps_its_own_tensors_when_they_change_in_place() -> None:
    """`self.total += x` assigns what the addition returns, which must not be a tracer."""
    ours, theirs, x = Counter(), Counter(), torch.arange(3.0)
    jitted, total = tfn.jit(ours), ours.total
    for _ in range(3):
        assert torch.equal(jitted(x), theirs(x))
        assert ours.total is total and torch.equal(ours.total, theirs.total)
        assert torch.equal(ours.parts["last"], theirs.parts["last"])
    assert tfn.cache_info(jitted).misses == 1


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_tensor_of_numbers_in_tensors(dtype: torch.dtype | None) -> None:
    """`torch.tensor` copies the numbers: dtypes promote, and no gradient goes through."""

    def f(x: torch.Tensor) -> Any:
        made = torch.tensor([[x.argmax(), 2], [x.sum(), x[0].half()]], dtype=dtype)
        flags = torch.as_tensor([x.sum() > 0, True])
        return made, flags, torch.tensor([x[0].long(), 3]), x.sum() * made

    x = torch.linspace(-1.0, 2.0, 5)
    assert_same(tfn.jit(f)(x), f(x))
    assert_same(tfn.vmap(f)(torch.stack([x, -x])), tuple(map(torch.stack, zip(f(x), f(-x), strict=True))))
    assert_same(tfn.grad(lambda x: f(x)[3].sum())(x), f(x)[0].sum().to(x.dtype) * torch.ones(5))


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8 is now deprecated")
def test_a_mask_of_bytes_is_one_of_bools() -> None:
    x, mask = torch.arange(3.0), torch.tensor([1, 0, 1], dtype=torch.uint8)
    f = lambda x, mask: (x[mask] * 2, x[None][:, mask])
    torch.testing.assert_close(tfn.jit(f)(x, mask), f(x, mask))


def test_streams_are_refused_by_name() -> None:
    """A program runs on the stream of its caller, so work on other streams would lose its order."""
    stream: Any = object()  # a build for CUDA makes none without a GPU
    calls: dict[str, Callable[[], Any]] = {
        "torch.cuda.stream": lambda: torch.cuda.stream(stream).__enter__(),
        "torch.cuda.set_stream": lambda: torch.cuda.set_stream(stream),
        "torch.cuda.Stream.wait_stream": lambda: torch.cuda.Stream.wait_stream(stream, stream),
        "torch.cuda.Stream.record_event": lambda: torch.cuda.Stream.record_event(stream),
        "torch.cuda.Event.record": lambda: torch.cuda.Event.record(stream),
        "torch.cuda.Event.elapsed_time": lambda: torch.cuda.Event.elapsed_time(stream, stream),
    }
    for name, call in calls.items():
        with pytest.raises(UnsupportedCall, match=rf"^`{re.escape(name)}` was called while tracing"):
            tfn.trace(lambda x: call() or x * 2, torch.ones(2))

    def without(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(None):  # type: ignore[arg-type]
            return x * 2

    assert torch.equal(tfn.jit(without)(torch.ones(2)), torch.full((2,), 2.0))
