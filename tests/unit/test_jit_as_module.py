"""What code outside does with a jitted module, or a jitted function, that it may do with any other: eager is the oracle."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

import thunder_fn as tfn
from tests.unit.capturing import same
from tests.unit.test_jit_module import leaves
from thunder_fn.errors import HooksWarning, JitError

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


def agree(scenario: Callable[[Wrap], Any]) -> None:
    """The scenario sees the same values with a jitted module, bit for bit."""
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


def test_a_submodule_that_torch_jit_has_compiled_is_named() -> None:
    model = tfn.jit(nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))
    model(x())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model[1] = torch.jit.script(nn.Linear(6, 6))
    with pytest.raises(JitError) as info:
        model(x())
    assert str(info.value) == (
        "jit: '1' in a Sequential is a torch.jit.ScriptModule, which has no Python code to trace\n"
        "Put the module there that it was made from, or jit the modules around it one by one."
    )


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
    model, found = tfn.jit(Keeps().requires_grad_(False)), list[torch.Tensor]()
    wall = threading.Barrier(6)

    def work() -> None:
        wall.wait()
        found.append(model(x()))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(type(one) is torch.Tensor for one in (*found, model.seen, model.last))


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

    agree(scenario)


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
