"""Uses of a jitted module, or function, by code outside, as of any other: eager is the oracle."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

import thunder_fn as tfn
from tests.messages import message_of
from tests.unit.capturing import same
from tests.unit.test_jit_module import leaves
from thunder_fn.errors import HooksWarning, UnsupportedCall

Wrap = Callable[[Any], Any]


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and state of some steps."""
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), list[torch.Tensor]()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def agree(scenario: Callable[[Wrap], Any], *, same: Callable[[Any, Any], bool] = same) -> None:
    """The scenario sees the same values with a jitted module, bit for bit if nothing else is said."""
    results: list[list[torch.Tensor]] = []
    for wrap in (tfn.jit, lambda module: module):
        torch.manual_seed(0)
        results.append(leaves(scenario(wrap)))
    mine, its = results
    assert len(mine) == len(its) > 0
    assert all(same(a, b) and a.requires_grad == b.requires_grad for a, b in zip(mine, its, strict=True))


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT


def test_a_submodule_with_backward_hooks_runs_as_it_is() -> None:
    def scenario(wrap: Wrap) -> Any:
        model, seen = wrap(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))), list[torch.Tensor]()
        found = train(model)
        handle = model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0]) or (gi[0] * 2,))
        found += train(model)
        handle.remove()
        return found, seen, train(model)

    with pytest.warns(HooksWarning, match="^jit: '2' in a Sequential has backward hooks") as caught:
        agree(scenario)
    assert len(caught) == 1


class Recorder:
    """A hook that remembers what it saw."""

    def __init__(self) -> None:
        self.seen, self.count = dict[str, list[torch.Tensor]](), 0

    def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> None:
        self.seen.setdefault(type(module).__name__, []).append(result)
        self.count += 1


def test_hooks_of_submodules_that_change_something_outside_run_in_each_call() -> None:
    def scenario(wrap: Wrap) -> Any:
        model, hook, calls = wrap(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3))), Recorder(), 0

        def counting(*_: Any) -> None:
            nonlocal calls
            calls += 1
            handles[-1].remove()

        found = [train(model)]
        handles = [model[0].register_forward_hook(hook), model[1].register_forward_hook(hook)]
        handles.append(model[2].register_forward_pre_hook(counting))
        found += [train(model), sum(model(x()).sum() + seen[-1].sum() for seen in hook.seen.values()).detach()]
        assert (hook.count, calls, [len(seen) for seen in hook.seen.values()]) == (10, 1, [5, 5])
        for handle in handles:
            handle.remove()
        return found, hook.seen, train(model)

    with pytest.warns(
        HooksWarning, match="^jit: Recorder, a hook of a submodule of a Sequential, changes what is outside"
    ):
        agree(scenario)


def test_a_submodule_becomes_one_that_torch_jit_has_compiled() -> None:
    def scenario(wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model = wrap(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))
        model(x())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model[1] = torch.jit.script(nn.Linear(6, 6))
        return train(model)

    agree(scenario)


def test_it_becomes_one_of_another_class_with_the_module() -> None:
    def scenario(wrap: Wrap) -> Any:
        torch.manual_seed(1)
        module = nn.Linear(6, 6)
        model = wrap(module)
        found = train(model)
        parametrize.register_parametrization(model, "weight", Symmetric())
        found += [model.weight, *train(model)]
        parametrize.remove_parametrizations(model, "weight")
        found += train(model)
        parametrize.register_parametrization(module, "weight", Symmetric())
        assert type(model).__name__ == "ParametrizedLinear" or model.weight is not None
        return found, model.weight, model(x())

    agree(scenario)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy = tfn.jit(nn.LazyLinear(3))
    assert lazy(x()).shape == (4, 3) and type(lazy).__name__ == "Linear" and lazy.__class__ is nn.Linear
    module = nn.Linear(6, 6)
    replica = tfn.jit(module)._replicate_for_data_parallel()
    replica.weight, replica.bias = (param.detach() * 2 for param in module.parameters())
    assert isinstance(replica, nn.Linear) and same(replica(x()), x() @ (module.weight.T * 2) + module.bias * 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("inside", (False, True))
@pytest.mark.parametrize(
    "norm",
    (nn.utils.weight_norm, nn.utils.spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm),
)
def test_norms_of_weights(norm: Any, inside: bool) -> None:
    def scenario(wrap: Wrap) -> Any:
        layer = norm(nn.Linear(6, 6))
        model = wrap(nn.Sequential(layer, nn.Tanh()) if inside else layer)
        return train(model, 4), model.eval()(x())

    agree(scenario)


class Keeps(nn.Module):
    """Tensors in attributes: plain, of a submodule, in a tuple, and a buffer that is bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.state = nn.Linear(6, 6), None, None
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = (x, x) if self.state is None else self.state
        h = torch.tanh(self.inner(x) + h)
        self.state, self.last, self.inner.cache = (h, c + h), h, {"x": x, "h": h.detach(), "n": 1}
        self.seen = self.seen + h.detach().sum(0)
        return h * c


def test_attributes_are_bound_as_eager_binds_them() -> None:
    def scenario(wrap: Wrap) -> Any:
        model = wrap(Keeps())
        first = model.seen
        found = [model(x(step)) for step in range(4)]
        sum(result.sum() for result in found).backward()
        grads = [param.grad for param in model.parameters()]
        model.state = None
        return found, grads, model(x()), model.last, model.state, model.inner.cache, model.seen, first

    agree(scenario)


class Last(nn.Linear):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last * 2


def test_an_attribute_that_is_only_written_costs_one_more_trace() -> None:
    model = tfn.jit(Last(6, 6))
    for step in range(5):
        model(x(step))
    assert tfn.cache_info(model).misses == 2 and model.last is not None


def test_threads_and_buffers_that_are_bound_anew() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as often as under load
    try:
        for _ in range(8):
            model, found = tfn.jit(Keeps().requires_grad_(False)), list[torch.Tensor]()
            run_threads(6, lambda model=model, found=found: found.append(model(x())))
            assert len(found) == 6 and all(type(one) is torch.Tensor for one in (*found, model.seen, model.last))
    finally:
        sys.setswitchinterval(interval)


def run_threads(count: int, work: Callable[[], Any]) -> None:
    wall = threading.Barrier(count)

    def start() -> None:
        wall.wait()
        work()

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_first_call_may_be_in_inference_mode() -> None:
    for f in (lambda x: x.sin() * 2, nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))):
        jitted = tfn.jit(f)
        with torch.inference_mode():
            assert same(jitted(x()), f(x())) and jitted(x()).is_inference()
    with torch.inference_mode():
        inside = torch.ones(3)
        assert same(tfn.grad(lambda x: (x * x).sum())(inside), inside * 2)
        assert same(tfn.jit(lambda x: x.add_(1))(inside), torch.full((3,), 2.0))


def test_sizes_that_change_in_inference_mode() -> None:
    f = tfn.jit(lambda x: x.sin() * 2)
    with torch.inference_mode():
        for size in (2, 3, 4):
            assert same(f(torch.ones(size)), torch.ones(size).sin() * 2)
    assert tfn.cache_info(f).misses == 2


@pytest.mark.parametrize(
    ("layer", "options"), [(nn.GRU, {}), (nn.LSTM, {"batch_first": True, "bidirectional": True})], ids=["GRU", "LSTM"]
)
def test_recurrent_layers_drop_what_eager_drops_at_any_size(layer: Any, options: dict[str, bool]) -> None:
    def scenario(wrap: Wrap) -> Any:
        torch.manual_seed(1)
        model, seen = wrap(layer(6, 3, num_layers=2, dropout=0.4, dtype=torch.float64, **options)), list[Any]()
        for size in (2, 3):
            with torch.no_grad():
                value, state = model(torch.ones(2, 2 + size, 6, dtype=torch.float64))
            seen += [value, state, torch.rand(1)]
        return seen

    agree(scenario, same=torch.allclose)  # some processors round products by their alignment


def test_a_result_and_its_detached_self() -> None:
    w = torch.randn(6, 6, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        h = torch.tanh(x @ w)
        return h.detach(), h, h, h.detach().detach(), h[0], h.detach()[0]

    mine, its = tfn.jit(f)(x()), f(x())
    for a, b in zip(mine, its, strict=True):
        assert same(a, b) and a.requires_grad == b.requires_grad
    (mine_grad,), (its_grad,) = (torch.autograd.grad(results[1].sum(), w) for results in (mine, its))
    assert same(mine_grad, its_grad)


def test_an_argument_without_gradient_keeps_its_graph() -> None:
    f, w = tfn.jit(lambda unused, x: x * 2 + unused.detach()), torch.ones(3, requires_grad=True)
    unused = w.sin().exp()
    unused.sum().backward()
    for _ in range(2):
        f(unused, w).sum().backward()
    assert w.grad is not None and (w.grad - torch.ones(3).cos() * torch.ones(3).sin().exp() - 4).abs().max() < 1e-6


@pytest.mark.parametrize("executors", ((), ("inductor",)))
def test_batched_gradients_and_forward_mode(executors: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    jitted, cotangents = tfn.jit(module, executors=executors), torch.eye(24).reshape(24, 4, 6)
    params = list(module.parameters())
    mine, its = (torch.autograd.grad(f(x()), params, cotangents, is_grads_batched=True) for f in (jitted, module))
    torch.testing.assert_close(mine, its)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x(), x(1))
        mine, its = (forward_ad.unpack_dual(f(dual)) for f in (jitted, module))
    torch.testing.assert_close(tuple(mine), tuple(its))
    for strategy in ("reverse-mode", "forward-mode"):
        jacobians = [
            torch.autograd.functional.jacobian(f, x(), vectorize=True, strategy=strategy) for f in (jitted, module)
        ]
        torch.testing.assert_close(*jacobians)


def test_results_that_the_function_made_leaves() -> None:
    """A function may make parameters: what it returns is one tensor for each, and requires grad."""

    def f(x: torch.Tensor) -> Any:
        weight, start = nn.Parameter(x * 2), torch.zeros(2, requires_grad=True)
        y = (x * 3).detach()
        return weight, start, y.detach().requires_grad_(), y, x * 2, [weight]

    jitted = tfn.jit(f)
    for x in (torch.ones(2), torch.ones(2, requires_grad=True)):
        for found, expected in zip(jitted(x)[:5], f(x)[:5], strict=True):
            assert torch.equal(found, expected) and type(found) is type(expected)
            assert (found.requires_grad, found.is_leaf) == (expected.requires_grad, expected.is_leaf)
        weight, *_, [again] = jitted(x)
        assert weight is again
        (weight * 3).sum().backward()
        assert weight.grad.tolist() == [3, 3] and x.grad is None


class ReadsGradients(nn.Module):
    """The result depends on the gradient that its weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grad = self.linear.weight.grad
        return self.linear(x) if grad is None else self.linear(x) * grad.norm()


def test_gradients_that_are_read_are_those_of_the_call() -> None:
    def scenario(wrap: Wrap) -> Any:
        model, out = wrap(ReadsGradients()), list[torch.Tensor]()
        for step in range(4):
            out.append(model(x(step)).detach())
            if step == 2:
                model.zero_grad()
            model(x(step)).sum().backward()
        return out

    agree(scenario)
    weight = nn.Parameter(torch.ones(2))

    def accumulate(y: torch.Tensor) -> torch.Tensor:
        (weight * y).sum().backward()
        return y

    jitted, inner = tfn.jit(accumulate), tfn.jit(lambda y: y if weight.grad is None else y * weight.grad)
    outer = tfn.jit(lambda y: inner(y) + 1)
    for value in (2.0, 3.0):
        weight.grad = None
        assert outer(torch.ones(2)).tolist() == [2, 2]
        weight.grad = torch.full((2,), value)
        jitted(torch.ones(2))
        assert weight.grad.tolist() == [value + 1] * 2
        assert outer(torch.ones(2)).tolist() == [value + 2] * 2
    unread = tfn.jit(nn.Linear(2, 2))
    for _ in range(3):
        unread(torch.ones(1, 2)).sum().backward()
        unread.zero_grad()
    assert tfn.cache_info(unread).misses == 1


class TurnsGradientsOn(nn.Module):
    """Gradients are on inside, whatever they are around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        with torch.enable_grad():
            inside = self.second(hidden) * self.first.weight.sum()
        late = self.second(x)
        with torch.enable_grad():
            return hidden, inside, late, late.tanh() * self.first.bias.sum()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, inside, late, last = self.inner(x)
        return hidden, inside * 2, late, last


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_that_forward_turns_on(nested: bool) -> None:
    def scenario(wrap: Wrap) -> Any:
        inner = TurnsGradientsOn()
        model = wrap(Around(wrap(inner))) if nested else wrap(inner)
        for _ in range(2):
            with torch.no_grad():
                results = model(x())
        sum(result.sum() for result in results if result.requires_grad).backward()
        return [*results, *(param.grad if param.grad is not None else torch.zeros(()) for param in inner.parameters())]

    agree(scenario)


def test_gradients_that_forward_retains() -> None:
    def retain(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = y * 2
        first.retain_grad()
        second = first.sin()
        second.retain_grad()
        return first, second, second.sum()

    def scenario(wrap: Wrap) -> Any:
        first, second, loss = wrap(retain)(x().requires_grad_())
        loss.backward()
        return first.grad, second.grad

    agree(scenario)


def test_sparse_gradients_are_refused_where_somebody_asks_for_them() -> None:
    indices, weight = torch.tensor([[1, 2]]), torch.randn(5, 3)
    for layer in (nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, mode="sum", sparse=True)):
        model = tfn.jit(nn.Sequential(layer, nn.Linear(3, 3)))
        with pytest.raises(UnsupportedCall, match=r"embedding.*: its gradient is sparse in eager code") as error:
            model(indices)
        assert "test_jit_as_module.py" in message_of(error.value) and "optimizer for dense gradients" in message_of(
            error.value
        )
        with torch.no_grad():
            assert torch.equal(model(indices), nn.Sequential(layer, model[1])(indices))
    jitted = tfn.jit(lambda i: torch.nn.functional.embedding(i, weight, sparse=True))
    assert torch.equal(jitted(indices), weight[indices])


def test_attention_kernels_are_those_of_the_call() -> None:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    jitted, q = tfn.jit(attend), torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        default = jitted(q)
        with sdpa_kernel(SDPBackend.MATH):
            math = jitted(q)
            assert torch.equal(math, attend(q))
        assert torch.equal(default, attend(q)) and not torch.equal(default, math)


def test_parametrizations_are_computed_once_where_they_are_cached() -> None:
    def scenario(wrap: Wrap) -> Any:
        model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
        run = wrap(model)
        out = [run(x())]
        with parametrize.cached():
            out += [run(x()), run(x())]
        return [*out, run(x()), *model.state_dict().values()]

    agree(scenario)


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1.0


class Settings:
    def __init__(self) -> None:
        self.scales, self.inner = {"out": {"last": 1.0}}, Slotted()


class ReadsSettings(nn.Module):
    """The result depends on its class, and on what lies deep in objects."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.long, self.deep = Settings(), [1.0] * 300, [[[[1.0]]]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = self.settings.scales["out"]["last"] + self.settings.inner.value
        return x * self.factor * settings * self.long[-1] + self.deep[0][0][0][0]


def test_what_was_read_of_classes_and_deep_in_objects_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    def scenario(wrap: Wrap) -> Any:
        monkeypatch.setattr(ReadsSettings, "factor", 2.0)
        model = wrap(ReadsSettings())
        out = [model(x()), model(x())]
        monkeypatch.setattr(ReadsSettings, "factor", 3.0)
        out.append(model(x()))
        model.settings.scales["out"]["last"] = 4.0
        out.append(model(x()))
        model.settings.inner.value = 5.0
        out.append(model(x()))
        model.long[-1] = 6.0
        out.append(model(x()))
        model.deep[0][0][0][0] = 7.0
        return [*out, model(x())]

    agree(scenario)


class Swaps(nn.Module):
    """Each call exchanges two submodules, and drops one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first, self.second = self.second, self.first
        x = self.first(x) if self.third is None else self.third(x)
        self.third = None
        return x


def test_submodules_that_forward_exchanges() -> None:
    def scenario(wrap: Wrap) -> Any:
        model, out = wrap(Swaps()), list[Any]()
        for step in range(4):
            out += [model(x(step)), *model.state_dict().values()]
        return out

    agree(scenario)
