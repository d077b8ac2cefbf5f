"""Linear layers in programs are one call of PyTorch's, which chooses its way by the layout of its operand, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import thunder_fn as tfn

torch.manual_seed(0)
X = torch.randn(3, 5, 4, 64)
GIVEN: dict[str, torch.Tensor] = {
    "a matrix": X[0, 0],
    "a matrix, transposed": torch.randn(64, 7).t(),
    "three dims": X[0],
    "four dims": X,
    "transposed": X[0].transpose(0, 1),
    "expanded": X[0, :1].expand(3, 4, 64),
    "every second": X[:, ::2],
    "no rows": X[:0],
}
LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "with a bias": torch.nn.Linear(64, 33),
    "without one": torch.nn.Linear(64, 33, bias=False),
    "two": torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5)),
    "in half precision": torch.nn.Linear(64, 33).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("layer", LAYERS)
def test_results_are_eagers_to_the_bit_in_every_layout(layer: str, name: str) -> None:
    """Also after a call with a tensor in another layout."""
    f, x = LAYERS[layer], GIVEN[name]
    x = x.to(torch.bfloat16) if layer == "in half precision" else x
    made = tfn.jit(f)
    with torch.no_grad():
        made(torch.randn(x.shape).to(x.dtype))
        for given in (x, x.contiguous()):
            assert torch.equal(made(given), f(given))


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("layer", ["with a bias", "without one"])
def test_a_layer_is_one_call(layer: str, dims: int) -> None:
    x = torch.randn(2, 3, 4, 64)[(0,) * (4 - dims)]
    with torch.no_grad():
        text = tfn.jit(LAYERS[layer]).lower(x).text()
    assert text.count("= linear(") == 1 and not any(f"= {op}(" in text for op in ("mm", "addmm", "t", "reshape"))


def test_what_others_read_is_computed() -> None:
    """The rows or the product before it is reshaped, and a bias that is no row."""
    w, b, x = torch.randn(5, 4), torch.randn(3, 5), torch.randn(3, 4)
    whole = lambda x: (flat := x.reshape(-1, 4)) @ w.t() + flat.sum()
    assert torch.equal(tfn.jit(whole)(X[..., :4]), whole(X[..., :4]))
    both = lambda x: ((y := x.reshape(-1, 4) @ w.t()).reshape(3, 5, 4, 5), y * 2)
    for mine, its in zip(tfn.jit(both)(X[..., :4]), both(X[..., :4]), strict=True):
        assert torch.equal(mine, its)
    added = lambda x: torch.addmm(b, x, w.t())
    assert torch.equal(tfn.jit(added)(x), added(x))


def test_gradients_are_eagers() -> None:
    layer = torch.nn.Linear(64, 33)
    made = tfn.jit(layer)
    x = X.clone().requires_grad_()
    wanted = torch.autograd.grad(F.gelu(layer(x)).sum(), (x, *layer.parameters()))
    found = torch.autograd.grad(F.gelu(made(x)).sum(), (x, *layer.parameters()))
    for mine, its in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, its)


def test_the_cost_of_a_layer_is_that_of_its_product() -> None:
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        assert tfn.inspect.cost(LAYERS["with a bias"], x).total.flops == 2 * x.numel() * 33


P, W, B = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
BY_NAME: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (F.linear, {"input": P, "weight": W}),
    "linear without a bias": (F.linear, {"input": P, "weight": W, "bias": None}),
    "linear with a bias": (F.linear, {"input": P, "weight": W, "bias": B}),
    "conv1d": (F.conv1d, {"input": P, "weight": W[:, :, None], "bias": B}),
    "layer_norm": (F.layer_norm, {"input": P, "normalized_shape": (3,), "weight": B, "bias": B + 1}),
    "attention": (F.scaled_dot_product_attention, {"query": P[None], "key": W[None], "value": P[None]}),
    "embedding": (F.embedding, {"input": torch.tensor([0, 2]), "weight": W}),
    "addmm": (torch.addmm, {"input": B, "mat1": P, "mat2": W}),
    "matmul": (torch.matmul, {"input": P, "other": W}),
    "where": (torch.where, {"condition": P > 0, "input": P, "other": W}),
    "cross_entropy": (F.cross_entropy, {"input": P, "target": torch.tensor([0, 2, 1])}),
    "batch_norm": (
        F.batch_norm,
        {"input": P, "running_mean": None, "running_var": None, "weight": B, "training": True},
    ),
    "lerp": (torch.lerp, {"input": P, "end": W, "weight": B}),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_arguments_by_name_are_the_same_in_any_order(name: str) -> None:
    """`linear(x, weight=w)` was an error of the torch executor, which took the positional arguments alone."""
    function, given = BY_NAME[name]
    known = function(**given)
    first = next(iter(given))
    tensors = [key for key, value in given.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    for names in (list(given), list(given)[::-1]):
        call = lambda **values: function(**{key: values[key] for key in names})
        one_placed = lambda **values: function(values.pop(first), **values)
        for f in (call, one_placed):
            torch.testing.assert_close(tfn.jit(f)(**given), known)
            leaves = {key: value.clone().requires_grad_() for key, value in given.items() if key in tensors}
            for h in (tfn.jit(f), f):
                found = torch.autograd.grad(h(**{**given, **leaves}).square().sum(), list(leaves.values()))
                wanted = torch.autograd.grad(function(**{**given, **leaves}).square().sum(), list(leaves.values()))
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a, b)
            rows = {key: torch.stack([given[key], given[key] * 2]) for key in tensors}
            batched = tfn.jit(tfn.vmap(lambda one, f=f: f(**{**given, **one})))(rows)
            each = [function(**{**given, **{key: rows[key][i] for key in tensors}}) for i in range(2)]
            torch.testing.assert_close(batched, torch.stack(each))
