"""Nodes that a jitted call leaves in autograd's graph: one for each group of results, as far as anybody can tell
eager's graph.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.executors import inductor

pytestmark = pytest.mark.usefixtures("by_nodes")

Tensor = torch.Tensor


def both(f: Callable[..., Any], check: Callable[[Callable[..., Any]], Any]) -> None:
    """A function of f gives the same for the jitted f."""
    torch.manual_seed(0)
    expected = check(f)
    torch.manual_seed(0)
    torch.testing.assert_close(check(tfn.jit(f)), expected, rtol=0, atol=0)


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), **options).reshape(shape).div(7).requires_grad_()


def chain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.sin()
    return y, (y * y).sum(), y.exp()


def test_results_that_share_nothing_are_pulled_back_one_by_one() -> None:
    def check(f: Any) -> list[Any]:
        a, b = leaf(3), leaf(4)
        for result in f(a, b):
            result.backward()
        return [a.grad, b.grad]

    both(lambda a, b: (a.sin().sum(), b.cos().sum()), check)
    both(lambda a, b: tuple(c.square().sum() + b.sum() for c in a.chunk(3)), check)


def test_what_results_share_is_freed_with_the_first() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.exp(), y.cos()

    for g in (f, tfn.jit(f)):
        a, b = g(leaf(3))
        a.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            b.sum().backward()


def test_nothing_is_freed_where_nothing_is_kept() -> None:
    def check(f: Any) -> Any:
        x = leaf(3)
        a, b, c = f(x)
        a.sum().backward()
        b.sum().backward()
        c.backward()
        c.backward()
        return x.grad

    both(lambda x: ((y := x + 1).exp(), y.cos(), y.sum()), check)


def test_gradients_by_results_hooks_and_retain_grad() -> None:
    def check(f: Any) -> list[Any]:
        x = leaf(3)
        y, z, _ = f(x)
        found = [torch.autograd.grad(z, y, retain_graph=True)[0]]
        y.retain_grad()
        y.register_hook(lambda gradient: gradient * 10)
        z.backward()
        return [*found, y.grad, x.grad]

    both(chain, check)


def test_all_results_at_once() -> None:
    def check(f: Any) -> Any:
        x = leaf(3)
        return torch.autograd.grad([result.sum() for result in f(x)], x)

    both(chain, check)


class Model(nn.Module):
    """Returns what a Transformers model does: the loss, the logits and every layer's hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
        hidden = [self.embedding(tokens)]
        for layer in self.layers:
            hidden.append(hidden[-1] + layer(hidden[-1]).tanh())
        logits = self.head(hidden[-1])
        return {"loss": F.cross_entropy(logits, targets), "logits": logits, "hidden": tuple(hidden)}


@pytest.mark.parametrize("inside", (False, True))
def test_a_model_that_returns_what_it_computes_on_the_way(inside: bool) -> None:
    model, tokens = Model(), torch.tensor([1, 5, 2, 2])

    def check(f: Any) -> list[Any]:
        model.zero_grad()
        result = f(tokens, tokens)
        kept = [result["logits"], *result["hidden"]]
        for tensor in kept:
            tensor.retain_grad()
        (result["loss"] + result["hidden"][1].sum()).backward()
        return [*(tensor.grad for tensor in kept), *(parameter.grad.clone() for parameter in model.parameters())]

    both((lambda *args: model(*args)) if inside else model, check)


def test_two_optimizers_that_take_turns() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x).tanh(), self.b(x).tanh()

    pair, x = Pair(), torch.randn(4, 3)

    def check(f: Any) -> list[Any]:
        for parameter, value in zip(pair.parameters(), start, strict=True):
            parameter.data.copy_(value)
        optimizers = torch.optim.SGD(pair.a.parameters(), 0.1), torch.optim.Adam(pair.b.parameters(), 0.1)
        for _ in range(3):
            for optimizer, result in zip(optimizers, f(x), strict=True):
                optimizer.zero_grad()
                result.square().sum().backward()
                optimizer.step()
        return [parameter.detach().clone() for parameter in pair.parameters()]

    start = [parameter.detach().clone() for parameter in pair.parameters()]
    both(pair, check)


def test_parameters_that_the_backward_does_not_read_may_change_before_it() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def check(f: Any) -> Any:
        model.zero_grad()
        first, second = f(x).sum(), f(2 * x).sum()
        first.backward()
        with torch.no_grad():
            model.weight.mul_(1.5)
        second.backward()
        return model.weight.grad.clone()

    both(model, check)


def test_a_derivative_of_the_backward_sees_the_numbers_that_were_drawn() -> None:
    """It computes the function again, from the state in which the generator was."""

    def check(f: Any) -> list[Any]:
        x = leaf(50)
        y = f(x)
        after = torch.rand(2)
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        return [first.detach(), second.detach(), third, after, torch.rand(2)]

    both(lambda x: (F.dropout(x, 0.5) ** 4).sum(), check)


def test_any_order_through_several_nodes() -> None:
    x, w = leaf(3, dtype=torch.float64), leaf(3, dtype=torch.float64)
    f = tfn.jit(lambda x, w: ((y := (x * w).sin()), (y * w).sum(), (w**3).sum()))
    assert torch.autograd.gradcheck(f, (x, w)) and torch.autograd.gradgradcheck(f, (x, w))


def test_the_derivative_of_a_gradient_is_made_once() -> None:
    f, x = tfn.jit(lambda x: x.sin().sum()), leaf(3)
    made = list[int]()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
        gradient.sum().backward()
        (node,) = f.programs.paths[0].entry.bridge.nodes
        made.append(len(node.known))
    assert made == [1, 1, 1]


def test_symbolic_sizes() -> None:
    f = tfn.jit(chain, cache="symbolic values")
    for size in (3, 5, 2, 7):
        x, y = leaf(size), leaf(size)
        (found,), (expected,) = (torch.autograd.grad(g(x)[1], x) for g in (f, chain))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        f(y)[2].sum().backward()
    assert tfn.cache_info(f).misses == 1


_CONVOLUTIONS = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="before PyTorch 2.13, `_convolution_double_backward` calls `numel` on tensors whose sizes are symbols, and raises",
)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(nn.Conv1d(2, 2, 2), marks=_CONVOLUTIONS, id="Conv1d"), nn.BatchNorm1d(2), nn.GroupNorm(1, 2)],
    ids=lambda layer: type(layer).__name__,
)
def test_gradients_that_are_differentiated_at_other_sizes(layer: nn.Module) -> None:
    """PyTorch's rules for these take a size for a number, which holds for the sizes that they were derived with."""
    module = copy.deepcopy(layer).double()
    jitted = tfn.jit(module)
    for size in (3, 5, 4):
        penalties = []
        for one in (jitted, module):
            x = torch.sin(torch.arange(8.0 * size, dtype=torch.float64)).reshape(size, 2, 4).requires_grad_()
            (gradient,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
            penalties.append(torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()], allow_unused=True))
        torch.testing.assert_close(*penalties)


def test_compiled() -> None:
    f, x = tfn.jit(chain, executors=[inductor()]), leaf(3)
    y, z, _ = f(x)
    torch.testing.assert_close(torch.autograd.grad(z, y, retain_graph=True)[0], 2 * y)
    z.backward()
    torch.testing.assert_close(x.grad, 2 * x.sin() * x.cos())


def test_graphs_go_with_their_results() -> None:
    f, x = tfn.jit(chain), leaf(3)
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(result) for result in f(x)]
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()


def test_one_result_is_one_node() -> None:
    """The common case runs one program forward and one backward."""
    model = copy.deepcopy(Model())
    f = tfn.jit(lambda tokens: model(tokens, tokens)["loss"])
    f(torch.tensor([1, 2])).backward()
    assert len(tfn.last_backward_traces(f)) == 2


@pytest.mark.parametrize("place", [0, 1])
def test_a_result_that_shares_memory_with_a_constant_one_may_be_written(place: int) -> None:
    def f(x: torch.Tensor) -> Any:
        y = x.mul(3).sin()
        return y.view(-1), y.detach()

    def run(f: Any) -> Any:
        x = torch.ones(2, 2, requires_grad=True)
        results = f(x * 1)
        results[place].add_(2)
        return results, torch.autograd.grad(results[0].sum(), x)

    for options in ({}, {"executors": [inductor()]}):
        torch.testing.assert_close(run(tfn.jit(f, **options)), run(f))
