"""Capture of modules: layers as composites, buffers as writes, and modules as they were afterwards."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from tests.unit.capturing import agree_made
from thunder_fn.capture import capture
from thunder_fn.errors import EscapedTracer
from thunder_fn.ir.check import check
from thunder_fn.ir.trace import Trace

X, Y, IMAGE = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 8, 8)
TOKENS = torch.tensor([[1, 2], [0, 3]])


def agree_module(
    build: Callable[[], nn.Module], *args: Any, train: bool = True, is_bitwise: bool = True, **kwargs: Any
) -> Trace:
    """The module's trace does what the module does, to its buffers too."""

    def make() -> Any:
        torch.manual_seed(0)
        module = build().train(train)
        return module, (copy.deepcopy(args), kwargs), list(module.state_dict().values())

    return agree_made(make, is_bitwise=is_bitwise)


class Residual(nn.Module):
    """A block of a residual network, in place wherever it can be."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.norm(self.conv(x)))
        y += x
        return self.relu(y)


class SelfAttention(nn.Module):
    """The same tensor as query, key and value."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x)


class Tied(nn.Module):
    """A shared weight, parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.ones(8))})

    def forward(self, tokens: Any) -> Any:
        return self.head(self.embed(tokens) * self.scales[0] + self.shifts["a"])


class Hooked(nn.Module):
    """With hooks before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.register_forward_hook(lambda module, args, out: out * 2)
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Any) -> Any:
        return self.linear(x)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(8, 4))


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(3), (IMAGE,)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (IMAGE,)),
    "group norm": (lambda: nn.GroupNorm(3, 3), (IMAGE,)),
    "residual network": (lambda: nn.Sequential(Residual(), Residual(), nn.MaxPool2d(2), nn.Flatten()), (IMAGE,)),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), (X, Y, Y + 1)),
    "attention with dropout": (lambda: nn.MultiheadAttention(8, 2, dropout=0.3), (X, Y, Y + 1)),
    "self attention": (SelfAttention, (X,)),
    "self attention with dropout": (lambda: SelfAttention(dropout=0.3, add_bias_kv=True), (X,)),
    "encoder layer": (encoder_layer, (X,)),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (X, Y)),
    "LSTM": (lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.2), (X,)),
    "GRU": (lambda: nn.GRU(8, 4), (X,)),
    "RNN": (lambda: nn.RNN(8, 4), (X,)),
    "LSTM cell": (lambda: nn.LSTMCell(8, 4), (X[:, 0],)),
    "embedding": (lambda: nn.Embedding(10, 4, padding_idx=0), (TOKENS,)),
    "embedding that renormalises": (lambda: nn.Embedding(10, 4, max_norm=1.0), (TOKENS,)),
    "embedding bag": (lambda: nn.EmbeddingBag(10, 4), (TOKENS,)),
    "cross entropy": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (X[0], torch.tensor([1, 2, 0, 3, 4]))),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, 2), (IMAGE,)),
    "convolution": (lambda: nn.Conv1d(5, 4, 3, padding="same"), (X,)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), (X,)),
    "weight norm by hook": (old_weight_norm, (X,)),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), (X,)),
    "spectral norm by hook": (lambda: nn.utils.spectral_norm(nn.Linear(8, 4)), (X,)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), (X,)),
    "tied weights": (Tied, (torch.tensor([1, 2]),)),
    "hooks": (Hooked, (X,)),
    "upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (IMAGE,)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.LayerNorm(8)), (X,)),
}


@pytest.mark.parametrize("train", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, train: bool) -> None:
    build, args = MODULES[name]
    agree_module(build, *args, train=train, is_bitwise=name not in ("GRU", "LSTM"))


def test_batch_norm_statistics_are_writes() -> None:
    module = nn.BatchNorm1d(3)
    captured = capture(module, (torch.randn(4, 3),))
    targets = [write.target for write in captured.writes]
    assert {id(target) for target in targets} == {id(buffer) for buffer in module.buffers()}
    assert len(captured.trace.outputs) == 4


def test_identical_layers_have_one_body() -> None:
    trace = capture(nn.Sequential(*[encoder_layer().eval() for _ in range(3)]), (X,)).trace
    bodies = [equation.body for equation in trace.equations]
    assert len(bodies) == 3
    assert bodies[0] is bodies[1] is bodies[2]
    assert [equation.source.module for equation in trace.equations if equation.source] == ["0", "1", "2"]


# ---- functional_call ----


def agree_functional(build: Callable[[], nn.Module], *args: Any) -> Trace:
    def make() -> Any:
        torch.manual_seed(0)
        module = build()
        state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        call = lambda state, args: torch.func.functional_call(module, state, args)
        return call, ((state, copy.deepcopy(args)), {}), list(module.state_dict().values())

    return agree_made(make)


@pytest.mark.parametrize(
    "build",
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)), lambda: nn.LSTM(8, 4), Hooked, encoder_layer),
    ids=("batch norm", "LSTM", "hooks", "encoder layer"),
)
def test_functional_call(build: Callable[[], nn.Module]) -> None:
    trace = agree_functional(build, X)
    assert not trace.constants


def test_ensemble_by_vmap() -> None:
    def make() -> Any:
        torch.manual_seed(0)
        models = [nn.Linear(8, 2) for _ in range(3)]

        def f(x: Any) -> Any:
            params, buffers = torch.func.stack_module_state(models)
            base = copy.deepcopy(models[0])
            return torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(params, buffers)

        return f, ((X,), {}), []

    agree_made(make)


def test_module_made_inside_draws_its_weights() -> None:
    agree_made(lambda: (lambda x: nn.Linear(8, 2)(x), ((X,), {}), []))


def test_module_as_an_argument_is_closed_over() -> None:
    module = nn.Linear(8, 2)
    trace = capture(lambda m, x: m(x), (module, X)).trace
    assert len(trace.inputs) == 1
    assert [constant.tensor is p for constant, p in zip(trace.constants, module.parameters(), strict=True)] == [
        True
    ] * 2


# ---- attributes that forward assigns ----


class Counter(nn.Module):
    """Binds one buffer anew and changes another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Any) -> Any:
        self.count = self.count + 1
        self.average.mul_(0.9).add_(x.mean((0, 1)))
        return x * self.count


def test_rebound_buffer_is_a_write() -> None:
    module = Counter()
    count, average = module.count, module.average
    captured = capture(module, (X,))
    assert module.count is count
    assert {id(write.target) for write in captured.writes} == {id(count), id(average)}
    assert torch.equal(count, torch.zeros(()))


class Keeper(nn.Module):
    """Does something to itself in `forward`."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.act = act
        self.seen: list[Any] = []
        self.table = {"a": 1}
        self.steps = 0
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        self.steps += 1
        y = self.inner(x)
        self.act(self, y)
        return y


def fail() -> None:
    raise ValueError("no")


STORES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "new attribute": (lambda m, y: setattr(m, "kept", y), lambda m: m.kept),
    "attribute": (lambda m, y: setattr(m, "steps", y), lambda m: m.steps),
    "buffer of another shape": (lambda m, y: setattr(m, "cache", y), lambda m: m.cache),
    "list": (lambda m, y: m.seen.append(y), lambda m: m.seen[0]),
    "dict": (lambda m, y: m.table.update(b=y), lambda m: m.table["b"]),
    "nested": (lambda m, y: setattr(m, "kept", {"a": [y]}), lambda m: m.kept["a"][0]),
}


@pytest.mark.parametrize("name", STORES)
def test_tracers_kept_by_a_module_are_lost_after_a_transform(name: str) -> None:
    act, kept = STORES[name]
    module = nn.Sequential(Keeper(act))
    capture(module, (X,))
    with pytest.raises(EscapedTracer):
        kept(module[0]).sin()


ROW = X[0, 0, :3]


class Lazy(nn.Module):
    """A module that makes a table at its first call."""

    def __init__(self, make: Callable[[Any], torch.Tensor], where: str) -> None:
        super().__init__()
        self.make, self.where = make, where
        self.weight, self.holder, self.table = nn.Parameter(torch.full((3,), 2.0)), {}, None
        self.register_buffer("scale", torch.arange(3.0))
        self.register_buffer("late", None)

    def found(self) -> torch.Tensor:
        if self.where == "dict":
            if not self.holder:
                self.holder["table"] = self.make(self)
            return self.holder["table"]
        if getattr(self, self.where) is None:
            setattr(self, self.where, self.make(self))
        return getattr(self, self.where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.found() * self.weight).sum()


TABLES: dict[str, Callable[[Any], torch.Tensor]] = {
    "constant": lambda m: torch.arange(3.0) + 1,
    "of a buffer": lambda m: m.scale * 2,
    "of a parameter": lambda m: m.weight.detach() * 3,
}
LAZY = {
    "grad": tfn.grad,
    "vmap": lambda f: tfn.vmap(lambda x: tfn.grad(f)(x * torch.ones(3))),
    "jit of grad": lambda f: tfn.jit(tfn.grad(f)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize(
    ("where", "table"),
    (("table", "constant"), ("late", "constant"), ("dict", "of a buffer"), ("table", "of a parameter")),
)
def test_a_table_that_a_module_keeps_at_its_first_call_is_eagers(where: str, table: str, name: str) -> None:
    module, other = Lazy(TABLES[table], where), Lazy(TABLES[table], where)
    first = LAZY[name](lambda x: module(x))(ROW)
    assert torch.equal(module(ROW), other(ROW)) and type(module.found()) is torch.Tensor
    assert torch.equal(LAZY[name](lambda x: module(x))(ROW), first)
    module(ROW).backward(), other(ROW).backward()
    assert torch.equal(module.weight.grad, other.weight.grad)


def test_a_kept_table_stays_where_what_it_was_made_of_changes() -> None:
    module, other = (Lazy(TABLES["of a parameter"], "table") for _ in range(2))
    tfn.grad(lambda x: module(x))(ROW), torch.func.grad(lambda x: other(x))(ROW)
    for one in (module, other):
        with torch.no_grad():
            one.weight.add_(1)
    assert torch.equal(module(ROW), other(ROW))


@pytest.mark.parametrize("name", ("grad", "vmap", "jit"))
def test_a_module_moves_to_where_it_is(name: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    weight, x = module[0].weight, torch.ones(2, 3)
    step = lambda x: module.to(x)(x).sin().sum()
    want = {"grad": tfn.grad(lambda x: module(x).sin().sum()), "jit": lambda x: module(x).sin().sum()}
    make = {"grad": tfn.grad, "jit": tfn.jit, "vmap": lambda f: tfn.vmap(lambda x: f(x[None]))}[name]
    expected = want[name](x) if name in want else torch.stack([module(one[None]).sin().sum() for one in x])
    torch.testing.assert_close(make(step)(x), expected)
    assert module[0].weight is weight


@pytest.mark.parametrize("name", STORES)
def test_tensors_kept_by_a_module_are_those_of_the_call(name: str) -> None:
    act, kept = STORES[name]
    module = Keeper(act)
    jitted = tfn.jit(lambda x: module(x) * 2)
    for x in (X, X + 1):
        result = jitted(x)
        assert torch.equal(kept(module) * 2, result)
        module.seen.clear()


def test_a_parameter_made_of_a_tracer_is_refused() -> None:
    module = Keeper(lambda m, y: m._parameters.update(cache=y))
    with pytest.raises(EscapedTracer, match="stored in the parameter or container `cache` of a Keeper"):
        capture(module, (X,))
    assert_untouched(module)


def assert_untouched(module: Any) -> None:
    assert (module.seen, module.table, module.steps) == ([], {"a": 1}, 0)
    assert "kept" not in module.__dict__
    assert torch.equal(module.cache, torch.zeros(2))
    assert [type(p) for p in module.parameters()] == [nn.Parameter] * 2


@pytest.mark.parametrize("name", STORES)
def test_a_failed_capture_leaves_modules_as_they_were(name: str) -> None:
    act, _ = STORES[name]
    module = Keeper(lambda m, y: (act(m, y), fail()))
    with pytest.raises(ValueError, match="no"):
        capture(module, (X,))
    assert_untouched(module)
    assert torch.equal(module.inner(X), F.linear(X, module.inner.weight, module.inner.bias))


def test_plain_attributes_change_once_as_all_python_does() -> None:
    module = Keeper(lambda m, y: m.seen.append("called"))
    capture(module, (X,))
    assert (module.steps, module.seen) == (1, ["called"])


@pytest.mark.parametrize("train", [True, False])
def test_the_gradient_of_an_lstm(train: bool) -> None:
    """The kernel saves a workspace that PyTorch's fake tensors know nothing of."""
    layer = nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True).train(train)
    params = {name: value.detach() for name, value in layer.named_parameters()}
    loss = lambda params, x: torch.func.functional_call(layer, params, (x,))[0].pow(2).sum()
    trace = capture(loss, (params, X)).trace
    check(trace)
    expected = torch.func.grad(loss)(params, X)
    for found in (
        tfn.grad(loss)(params, X),
        torch.no_grad()(tfn.grad(loss))(params, X),
        tfn.jit(tfn.grad(loss))(params, X),
    ):
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in params)


def test_equal_layers_share_one_body() -> None:
    """Within a capture and with captures of other models that are alive; a dead one keeps nothing."""

    def bodies() -> list[Trace]:
        trace = capture(nn.Sequential(*(Residual() for _ in range(3))), (torch.randn(2, 3, 4, 4),)).trace
        return [equation.body for equation in trace.equations if equation.op.name == "Residual"]

    first, second = bodies(), bodies()
    assert len(first) == 3 and all(body is first[0] for body in first + second)
    reference = weakref.ref(first[0])
    del first, second
    gc.collect()
    assert reference() is None


class MadeInside(nn.Module):
    """Looks `super().__init__` up on itself while it has no parameters yet, by keyword arguments as torchode does."""

    def __init__(self, power: float, *, factor: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("power", torch.tensor(power))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x**self.power  # pyright: ignore[reportOperatorIssue]


def test_a_module_with_parameters_of_its_own_is_made_inside() -> None:
    x = torch.tensor([0.5, 2.0])
    f = lambda x: MadeInside(3.0, factor=1.5)(x).sum()  # pyright: ignore[reportUnknownLambdaType]
    for transform in (tfn.grad, lambda f: tfn.jit(tfn.grad(f))):
        assert torch.allclose(transform(f)(x), 4.5 * x**2)


# ---- buffers that are registered on modules which nobody calls ----

REGISTRATIONS: dict[str, Callable[[nn.Sequential, torch.Tensor], Any]] = {
    "new": lambda m, x: m.register_buffer("w", x * 2),
    "the argument": lambda m, x: m.register_buffer("w", x),
    "in place of another": lambda m, x: m[0].register_buffer("old", x * 2),
    "of a submodule": lambda m, x: m[1][0].register_buffer("w", x * 2, persistent=False),
    "found by its name": lambda m, x: m.get_submodule("1.0").register_buffer("w", x * 2),
    "of all": lambda m, x: [one.register_buffer("w", x * k) for k, one in enumerate(m.modules())],
    "by apply": lambda m, x: m.apply(lambda one: one.register_buffer("w", x * 2)),
    "several": lambda m, x: (m.register_buffer("v", x + 1), m[0].register_buffer("w", x), m[0].old.add_(1)),
    "after it was deleted": lambda m, x: (delattr(m[0], "old"), m[0].register_buffer("old", x * 3)),
    "none": lambda m, x: m.register_buffer("w", None),
}


def _module_with_old() -> nn.Sequential:
    made = nn.Sequential(nn.Identity(), nn.Sequential(nn.ReLU()))
    made[0].register_buffer("old", torch.zeros(3))
    return made


@pytest.mark.parametrize("reached", ["closure", "argument", "list", "grad"])
@pytest.mark.parametrize("name", REGISTRATIONS)
def test_buffers_of_modules_that_nobody_calls_are_registered_in_each_call(name: str, reached: str) -> None:
    register = REGISTRATIONS[name]
    ours, eagers = _module_with_old(), _module_with_old()
    held = [ours]

    def f(m: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        register(m, x)
        return x.sin()

    jitted = tfn.jit(f)
    call: Callable[[torch.Tensor], Any] = {
        "closure": tfn.jit(lambda x: f(ours, x)),
        "argument": lambda x: jitted(ours, x),
        "list": tfn.jit(lambda x: f(held[0], x)),
        "grad": tfn.grad(lambda x: f(ours, x).sum()),
    }[reached]
    for number in range(3):
        x = torch.arange(3.0) + number
        call(x)
        f(eagers, x.clone())
        found, want = (dict(m.named_buffers()) for m in (ours, eagers))
        assert list(found) == list(want) and all(type(one) is torch.Tensor for one in found.values())
        torch.testing.assert_close(found, want)
        assert list(ours.state_dict()) == list(eagers.state_dict())


def test_parameters_that_are_registered_on_modules_which_nobody_calls_are_refused() -> None:
    m = _module_with_old()

    def f(x: torch.Tensor) -> torch.Tensor:
        m[1].register_parameter("p", nn.Parameter(x * 2))
        return x + 1

    with pytest.raises(EscapedTracer, match="the parameter or container `p` of a Sequential"):
        tfn.jit(f)(torch.ones(3))
    assert not list(m.parameters())


def _writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.w = x * 2
    return x + 1


def _adds(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.w = m.a.w + x
    return m.a.w * 2


def _adds_to_both(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.w, m.a.w = m.a.w * 1, m.w + x
    return m.w - m.a.w


def _writes_a_container(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a.w = m.a.w + x
    m.a.state = {"h": m.a.state["h"] * 2 + x, "n": m.a.state["n"] + 1}
    return m.a.state["h"] * m.a.state["n"]


@pytest.mark.parametrize("is_argument", [False, True])
@pytest.mark.parametrize("f", [_writes, _adds, _adds_to_both, _writes_a_container])
def test_a_module_that_nobody_calls_is_state(f: Callable[[Any, torch.Tensor], torch.Tensor], is_argument: bool) -> None:
    def begin() -> Any:
        m = torch.nn.Module()
        m.a, m.w = torch.nn.Module(), torch.ones(2)
        m.a.w, m.a.state = torch.full((2,), 2.0), {"h": torch.zeros(2), "n": 1}
        return m

    ours, theirs = begin(), begin()
    jitted = tfn.jit(f) if is_argument else tfn.jit(lambda x: f(ours, x))
    for call in range(5):
        x = torch.full((2,), call + 1.0)
        found = jitted(ours, x) if is_argument else jitted(x)
        torch.testing.assert_close(found, f(theirs, x))
        for mine, its in ((ours.w, theirs.w), (ours.a.w, theirs.a.w), (ours.a.state["h"], theirs.a.state["h"])):
            torch.testing.assert_close(mine, its)
        assert ours.a.state["n"] == theirs.a.state["n"]
    assert tfn.cache_info(jitted).misses == 1
