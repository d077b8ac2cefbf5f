"""jit of a module: it is that module, on the same state, and trains as it does, bit for bit."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import threading
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.unit.capturing import same
from tests.unit.test_capture_modules import MODULES, Tied
from thunder_fn import cache_info, jit
from thunder_fn.errors import ArgnumError, JitError, UnknownOption
from thunder_fn.jitted.modules.module import jit_of

BACKWARD_FAILS = {"residual network": "eager's own backward refuses: relu's result is changed in place"}
NO_GRADIENT = {"embedding that renormalises": "the gradient past an update of a detached view under no_grad is lost"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(3, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 2))
    return nn.Sequential(*layers)


def leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tfn.capture.pytree.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def steps(module: nn.Module, args: Any, count: int = 3) -> list[Any]:
    """Everything that some optimizer steps can show: results, gradients and state."""
    torch.manual_seed(1)
    params = list(module.parameters())
    optimizer = torch.optim.AdamW(params, lr=0.01) if params else None
    seen: list[Any] = []
    for step in range(count):
        given = [arg + step / 10 if arg.is_floating_point() else arg for arg in args]
        results = [leaf for leaf in leaves(module(*given)) if leaf.is_floating_point()]
        seen.append([result.detach().clone() for result in results])
        loss = sum(result.pow(2).sum() for result in results)
        if optimizer is not None:
            loss.backward()
            seen.append([param.grad for param in params])
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, {name: value.clone() for name, value in module.state_dict().items()}]


@pytest.mark.parametrize("train", (True, False), ids=("train", "eval"))
@pytest.mark.parametrize("name", sorted(MODULES.keys() - BACKWARD_FAILS.keys() - NO_GRADIENT.keys()))
def test_training_is_eager_s(name: str, train: bool) -> None:
    build, args = MODULES[name]
    # Recurrent layers multiply parts of tensors, which some processors round by their alignment, and Adam divides a
    # gradient by its own size: in float64 its epsilon is far above what rounding leaves of a gradient that is zero.
    recurrent = name in ("GRU", "LSTM", "RNN")
    dtype = torch.float64 if recurrent else torch.float32
    args = [arg.to(dtype) if arg.is_floating_point() else arg for arg in args]
    seen = []
    for wrap in (jit, lambda module: module):
        torch.manual_seed(0)
        seen.append(leaves(steps(wrap(build().train(train).to(dtype)), args)))
    agree = torch.allclose if recurrent else same
    assert all(agree(found, known) for found, known in zip(*seen, strict=True))


def test_five_steps() -> None:
    x = torch.randn(5, 3)
    mine, its = leaves(steps(jit(network()), (x,), 5)), leaves(steps(network(), (x,), 5))
    assert all(same(found, known) for found, known in zip(mine, its, strict=True))


# ---- it is the module ----


class Configured(nn.Module):
    """A model as libraries write one: a config, a method that calls the model, properties."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"scale": 2.0}
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Twice."""
        return self.linear(x) * (self.config["scale"] if scale is None else scale)

    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = self(x)
        return x

    @property
    def device(self) -> torch.device:
        return self.linear.weight.device


def test_it_is_the_module() -> None:
    module = Configured()
    jitted, x = jit(module), torch.randn(2, 3)
    assert isinstance(jitted, Configured) and type(jitted).__name__ == "Configured" and repr(jitted) == repr(module)
    assert inspect.signature(jitted.forward) == inspect.signature(module.forward)
    assert inspect.signature(type(jitted).forward) == inspect.signature(Configured.forward)
    assert jitted.forward.__doc__ == "Twice."
    assert jitted.config is module.config and jitted.device == torch.device("cpu")
    assert list(jitted.state_dict()) == ["linear.weight", "linear.bias"]
    assert [name for name, _ in jitted.named_modules()] == ["", "linear"]
    assert same(jitted.generate(x, 3), module.generate(x, 3))
    assert cache_info(jitted)[:2] == (1, 2)  # results require grad, which the first argument did not
    assert str(tfn.last_traces(jitted)[0]).startswith("def Configured(v0, v1, v2):")


def test_state_is_shared_both_ways() -> None:
    module = network()
    jitted, x = jit(module.eval()), torch.randn(4, 3)
    jitted(x)
    jitted.extra = 5
    assert module.extra == 5
    module.load_state_dict(network().state_dict() | {"0.bias": torch.ones(8)})
    assert same(jitted(x), module(x)) and cache_info(jitted).misses == 1
    module[0].weight = nn.Parameter(torch.zeros(8, 3))
    assert same(jitted(x), module(x)) and cache_info(jitted).misses == 1
    module[5] = nn.Linear(8, 4)
    assert jitted(x).shape == (4, 4) and cache_info(jitted).misses == 2
    del module.extra
    assert not hasattr(jitted, "extra")


def test_train_and_eval_have_programs_of_their_own() -> None:
    module = network()
    jitted, x = jit(module), torch.randn(4, 3)
    for _ in range(3):
        jitted.train()
        jitted(x)
        jitted.eval()
        assert same(jitted(x), module(x))
    assert cache_info(jitted).misses == 2


def test_what_was_read_is_guarded() -> None:
    module = network().eval()
    jitted, x = jit(module), torch.randn(4, 3)
    jitted(x)
    jitted.step = 1  # never read
    jitted(x)
    assert cache_info(jitted).misses == 1
    jitted[4].eps = 0.5
    assert same(jitted(x), module(x)) and cache_info(jitted).misses == 2
    jitted[4].eps = 1e-5
    jitted(x)
    assert cache_info(jitted).misses == 2
    configured = Configured()
    jitted = jit(configured)
    jitted(x)
    configured.config["scale"] = 3.0
    assert same(jitted(x), configured(x)) and cache_info(jitted).misses == 2


def test_plain_attributes_are_bound_by_every_call() -> None:
    class Turning(nn.Module):
        turns, first, size = 0, True, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turns = (self.turns + 1) % 2
            self.size, self.first = x.shape[0], False
            return x + self.turns

    eager = Turning()
    module = copy.deepcopy(eager)
    jitted = jit(module)
    for size in (2, 2, 3, 2, 3, 4, 5, 5):
        assert same(jitted(torch.ones(size)), eager(torch.ones(size)))
        assert (module.turns, module.size, module.first) == (eager.turns, eager.size, False)
        assert type(module.size) is int
    assert cache_info(jitted).misses == 4  # for either turn, one size and all sizes


def test_hooks() -> None:
    module, x, seen = Configured(), torch.randn(2, 3, requires_grad=True), list[str]()
    jitted = jit(module)
    plain = jitted(x)
    handle = jitted.register_forward_hook(lambda m, args, out: seen.append(type(out).__name__) or out + 1)
    assert same(jitted(x), plain + 1) and same(jitted(x), plain + 1) and seen == ["Tensor", "Tensor"]
    handle.remove()
    inner = jitted.linear.register_forward_hook(lambda m, args, out: out * 2)
    assert same(jitted(x), module(x))
    inner.remove()
    assert same(jitted(x), plain)
    calls = list[torch.Size]()
    jitted.linear.weight.register_hook(lambda grad: calls.append(grad.shape))
    jitted.register_full_backward_hook(lambda m, grads_in, grads_out: calls.append(grads_out[0].shape))
    jitted(x).sum().backward()
    assert sorted(calls) == [(2, 3), (3, 3)]


def test_hooks_of_all_modules() -> None:
    module, x = Configured(), torch.randn(2, 3)
    jitted = jit(module)
    jitted(x)
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out + 1)
    try:
        assert same(jitted(x), module(x))
    finally:
        handle.remove()
    assert same(jitted(x), module(x))


def test_requires_grad_and_dtype_changes() -> None:
    module = network().eval()
    jitted, x = jit(module), torch.randn(4, 3)
    jitted(x)
    jitted[0].weight.requires_grad_(False)
    jitted(x).sum().backward()
    assert jitted[0].weight.grad is None and jitted[0].bias.grad is not None
    jitted.to(torch.bfloat16)
    assert jitted(x.bfloat16()).dtype == torch.bfloat16
    assert jitted.to(torch.float64) is jitted and same(jitted(x.double()), module(x.double()))


def test_tied_weights() -> None:
    jitted, tokens = jit(Tied()), torch.tensor([1, 2])
    plain = copy.deepcopy(jitted)
    assert len(tfn.last_traces((jitted(tokens), jitted)[1])[0].inputs) == 4
    jitted(tokens).sum().backward()
    known = plain(tokens).sum()
    known.backward()
    assert same(jitted.head.weight.grad, plain.head.weight.grad)
    with torch.no_grad():
        jitted.embed.weight.mul_(2)
    assert jitted.head.weight is jitted.embed.weight
    jitted.head.weight = nn.Parameter(jitted.embed.weight.detach().clone())
    jitted.zero_grad()
    jitted(tokens).sum().backward()
    assert not same(jitted.head.weight.grad, jitted.embed.weight.grad) and cache_info(jitted).misses == 2


def test_copies_are_on_their_own() -> None:
    jitted, x = jit(network().eval(), executors="torch"), torch.randn(4, 3)
    jitted(x)
    for other in (copy.deepcopy(jitted), pickle.loads(pickle.dumps(jitted))):
        assert type(other) is type(jitted) and jit_of(other).options == jit_of(jitted).options
        assert same(other(x), jitted(x))
        nn.init.zeros_(other[5].weight)
        assert not same(other(x), jitted(x))
    shallow = copy.copy(jitted)
    assert shallow[0] is jitted[0] and same(shallow(x), jitted(x))


def test_another_forward() -> None:
    module, x = Configured(), torch.randn(2, 3)
    jitted = jit(module)
    jitted(x)
    jitted.forward = lambda x: x * 5
    assert same(jitted(x), x * 5) and same(module(x), x * 5)
    del jitted.forward
    assert same(jitted(x), module(x))


def around(model: Any, factor: int) -> None:
    """Wrap a model as accelerate does: the new `forward` calls the old one."""
    before = model.forward.__func__

    @functools.wraps(before)
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return before(self, x) * factor

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("frontend", ("direct", "dynamo"))
def test_wrappers_around_forward(frontend: Any) -> None:
    """One around the other, on the jitted module and the one behind it, in copies, and taken off again."""
    module, x = Configured(), torch.randn(2, 3)
    known = module(x)
    jitted = tfn.compile(module, frontend=frontend, executors="torch")
    for expected, factor in ((known * 2, 2), (known * 2 * 3, 3)):
        jitted(x)
        around(jitted, factor)
        assert same(jitted(x), expected) and same(module(x), expected) and same(copy.deepcopy(jitted)(x), expected)
        assert inspect.signature(jitted.forward) == inspect.signature(Configured().forward)
    jitted.forward = lambda *args, before=jitted.forward: before(*args) + 1
    assert same(jitted(x), known * 2 * 3 + 1)
    del jitted.forward
    assert same(jitted(x), known)


@pytest.mark.parametrize("make", (jit, tfn.compile))
def test_a_module_without_a_class_of_its_own(make: Any) -> None:
    module, x = nn.Module(), torch.randn(2, 3)
    module.linear = nn.Linear(3, 3)
    module.forward = lambda x: module.linear(x).sin()
    jitted = make(module)
    assert same(jitted(x), module(x)) and type(jitted).__name__ == "Module" and jitted.linear is module.linear


def test_lazy_modules_run_as_they_are_once() -> None:
    jitted, x = jit(nn.Sequential(nn.LazyLinear(4), nn.ReLU())), torch.randn(2, 3)
    assert jitted(x).shape == (2, 4) and jitted[0].weight.shape == (4, 3)
    assert same(jitted(x), jit_of(jitted).module(x)) and cache_info(jitted).misses == 1


def test_jit_of_jit_and_options() -> None:
    jitted = jit(network())
    assert jit(jitted) is jitted
    assert jit_of(jit(jitted, cache="no caching")).options.cache == "no caching"
    with pytest.raises(UnknownOption, match="unknown option 'chache'"):
        jit(network(), chache=1)
    with pytest.raises(ArgnumError, match="static_argnums has 3, but forward takes 2 positional arguments"):
        jit(Configured(), static_argnums=3)
    with pytest.raises(JitError, match=r"has not been called yet"):
        tfn.last_traces(jitted)


def test_static_arguments_of_forward() -> None:
    jitted, x = jit(Configured(), static_argnums=1), torch.randn(2, 3)
    assert same(jitted(x, 2.0), jitted(x)) and cache_info(jitted).misses == 2


# ---- under transforms, and inside others ----


def test_functional_call_passes_parameters() -> None:
    module = network().eval()
    jitted, x = jit(module), torch.randn(4, 3)
    params = {name: param.detach() * 2 for name, param in module.named_parameters()}
    for _ in range(2):
        assert same(torch.func.functional_call(jitted, params, (x,)), torch.func.functional_call(module, params, (x,)))
    assert cache_info(jitted).misses == 1
    reference = weakref.ref(next(iter(params.values())))
    del params
    gc.collect()
    assert reference() is None


def test_gradients_through_functional_call() -> None:
    module = network().eval()
    jitted, x = jit(module), torch.randn(4, 3)
    params = {name: param.detach() for name, param in module.named_parameters()}

    def loss(model: nn.Module) -> Any:
        return lambda params: torch.func.functional_call(model, params, (x,)).pow(2).sum()

    known = torch.func.grad(loss(module))(params)
    for found in (tfn.grad(loss(jitted))(params), jit(tfn.grad(loss(jitted)))(params)):
        for name, value in known.items():
            torch.testing.assert_close(found[name], value)
    stacked = {name: torch.stack([value, value + 1]) for name, value in params.items()}
    each = tfn.vmap(lambda params: torch.func.functional_call(jitted, params, (x,)))(stacked)
    torch.testing.assert_close(each[0], module(x))


def test_transforms_of_a_jitted_module() -> None:
    module = Configured()
    jitted, x = jit(module), torch.randn(2, 3)
    torch.testing.assert_close(tfn.vmap(jitted)(x), module(x))
    found = tfn.grad(lambda x: jitted(x).sum())(x)
    torch.testing.assert_close(found, (module.linear.weight.sum(0) * 2).expand(2, 3))
    assert same(torch.vmap(jitted)(x), torch.vmap(module)(x))


def test_inside_a_jitted_function_and_a_plain_module() -> None:
    module = network()
    layer = jit(module)
    model, x = nn.Sequential(layer, nn.ReLU()), torch.randn(4, 3)
    torch.manual_seed(3)
    known = nn.Sequential(copy.deepcopy(module), nn.ReLU())(x)
    torch.manual_seed(3)
    assert same(model(x), known)
    step = jit(lambda x: model(x).sum())
    step(x).backward()
    assert all(param.grad is not None for param in module.parameters())


# ---- autograd ----


def test_accumulation_and_part_of_the_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": self.a(x), "b": self.b(self.a(x)), "count": x.argmax()}

    module, x = Two(), torch.randn(3, 2)
    jitted = jit(module)
    results = [[], []]
    for model, found in ((jitted, results[0]), (copy.deepcopy(module), results[1])):
        for _ in range(2):
            model(x)["a"].sum().backward()
        assert model.b.weight.grad is None
        model(x)["b"].pow(2).sum().backward()
        found += [param.grad for param in model.parameters()]
    for mine, its in zip(*results, strict=True):
        torch.testing.assert_close(mine, its)


def test_no_grad_and_inference_mode() -> None:
    module = network().eval()
    jitted, x = jit(module), torch.randn(4, 3)
    with torch.no_grad():
        assert same(jitted(x), module(x)) and not jitted(x).requires_grad
    with torch.inference_mode():
        assert same(jitted(x), module(x)) and jitted(x).is_inference()
    assert jitted(x).requires_grad


def test_a_result_without_gradient_has_none() -> None:
    f, x = jit(lambda x: x.detach() * 2), torch.ones(2, requires_grad=True)
    assert not f(x).requires_grad


def test_double_backward() -> None:
    module, x = Configured(), torch.randn(2, 3, requires_grad=True)
    found = []
    for model in (jit(module), module):
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), list(module.parameters())))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_activations_go_with_the_backward() -> None:
    """The backward frees what it saved, and so is freed what a dropped result had saved."""
    jitted, x = jit(nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 1))), torch.randn(5, 3)
    saved = list[weakref.ref[torch.Tensor]]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    for finish in (lambda loss: loss.backward(), lambda loss: None):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = jitted(x).sum()
        params = {id(tensor) for tensor in (*jitted.parameters(), x)}
        assert any(tensor is not None and id(tensor) not in params for tensor in (ref() for ref in saved))
        finish(loss)
        del loss
        left = [tensor for tensor in (ref() for ref in saved) if tensor is not None and id(tensor) not in params]
        assert all(tensor.numel() <= 64 * 3 for tensor in left)
        saved.clear()


def test_a_dropped_module_is_freed() -> None:
    jitted = jit(network())
    jitted(torch.randn(4, 3)).sum().backward()
    weight, module = weakref.ref(jitted[0].weight), weakref.ref(jit_of(jitted).module)
    del jitted
    gc.collect()
    assert weight() is None and module() is None


def test_threads() -> None:
    jitted, x = jit(network().eval()), torch.randn(4, 3)
    known, found = jit_of(jitted).module(x), list[torch.Tensor]()

    def work() -> None:
        for _ in range(5):
            found.append(jitted(x))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20 and all(same(one, known) for one in found)


def test_an_error_leaves_the_module_as_it_was() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if x.sum() > 0 else x

    jitted = jit(Branches())
    with pytest.raises(tfn.errors.DataDependentBranch):
        jitted(torch.ones(2))
    assert isinstance(jitted.linear.weight, nn.Parameter) and "__getattribute__" not in vars(nn.Module)


# ---- custom ops ----


@torch.library.custom_op("jit_module_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


cube.register_fake(lambda x: torch.empty_like(x))
cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def test_a_custom_op_with_its_own_derivative() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cube(self.linear(x))

    seen = []
    for wrap in (jit, lambda module: module):
        torch.manual_seed(0)
        seen.append(leaves(steps(wrap(Cubic()), (torch.ones(2, 3),))))
    assert all(same(found, known) for found, known in zip(*seen, strict=True))
    with torch.no_grad():
        assert not jit(Cubic())(torch.ones(2, 3)).requires_grad


def test_a_graph_module_has_a_new_of_its_own() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    x = torch.ones(2)
    torch.testing.assert_close(tfn.jit(module)(x), module(x))


def test_fx_records_a_jitted_module_as_it_is_written() -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()), torch.randn(3, 2)
    jitted = tfn.jit(module)
    for recorded in (jitted, torch.nn.Sequential(jitted, torch.nn.ReLU()), tfn.jit(torch.fx.symbolic_trace(module))):
        torch.testing.assert_close(torch.fx.symbolic_trace(recorded)(x), recorded(x), rtol=0, atol=0)
    assert [node.target for node in torch.fx.symbolic_trace(jitted).graph.nodes] == ["input", "0", "1", "output"]


def test_running_statistics_of_all_batches() -> None:
    """`update_bn` sets `momentum=None`: the number of batches is found in data, and the trace is one for all of them."""
    batches = [torch.randn(6, 3) for _ in range(4)]
    expected, module = network().train(), network().train()
    jitted = jit(module)
    for model in (expected, jitted):
        torch.optim.swa_utils.update_bn(batches, model)
    for (name, buffer), actual in zip(expected.named_buffers(), module.buffers(), strict=True):
        assert torch.allclose(buffer, actual, rtol=1e-6, atol=1e-7), name
    assert cache_info(jitted).misses == 1
