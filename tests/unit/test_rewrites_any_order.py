"""quantize, jit and a transform in any order: one function, which is jitted wherever `jit` stands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import thunder_fn as tfn
from thunder_fn.errors import JitError

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: tfn.grad(f, argnums=1),
    "vmap": lambda f: tfn.vmap(f, (None, 0)),
    "autocast": tfn.autocast,
    "jacrev": lambda f: tfn.jacrev(f, argnums=1),
    "checkpoint": tfn.checkpoint,
}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, params["w"], params["b"]).tanh().square().mean()


def quantised(f: Any) -> Any:
    return tfn.quantize(f, "int8")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_any_order(name: str) -> None:
    torch.manual_seed(0)
    params, x = {"w": torch.randn(32, 64), "b": torch.randn(32)}, torch.randn(3, 64)
    new = quantised(loss).prepare(params)
    expected = TRANSFORMS[name](loss)(new.restore(), x)
    executors = set[bool]()
    for order in itertools.permutations((quantised, TRANSFORMS[name], tfn.jit)):
        f, parts = loss, new
        for transform in order:
            f = transform(f)
            parts = f.prepare(params) if isinstance(f, tfn.parameters.Rewritten) else parts
        for _ in range(2):
            torch.testing.assert_close(f(parts, x), expected, rtol=1e-5, atol=1e-6)
        info = tfn.cache_info(f)
        assert (info.misses, info.hits) == (1, 1), order
        executors.add("codes computes" in str(tfn.last_traces(f)[-1]))
    assert len(executors) == 1, "kernels for codes run in some orders only"


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4", "nf4", "fp8"])
def test_a_batch_is_one_call_on_codes(scheme: str) -> None:
    """Of activations alone: a layer whose bias is batched, too, decodes its weight."""
    params, x = {"w": torch.randn(32, 64), "b": torch.randn(32)}, torch.randn(3, 2, 64)
    q = tfn.quantize(lambda params, x: F.linear(x, params["w"], params["b"]), scheme)
    new = q.prepare(params)
    for f in (tfn.vmap(q, (None, 1), 1), tfn.quantize(tfn.vmap(q.fn, (None, 1), 1), scheme)):
        torch.testing.assert_close(f(new, x), q(new, x))
        assert f"= {scheme}_linear(" in str(tfn.trace(f, new, x))
    of_biases = tfn.vmap(lambda b, x: q(new.replaced({"b": b}), x))
    assert f"= {scheme}_linear(" not in str(tfn.trace(of_biases, torch.ones(3, 32), x))
    torch.testing.assert_close(of_biases(torch.ones(3, 32), x), q(new.replaced({"b": torch.ones(32)}), x))


def test_a_transform_of_a_function_that_jits_itself_keeps_its_options() -> None:
    q = quantised(tfn.jit(loss, numerics="bitwise", cache="no caching"))
    with pytest.raises(JitError, match="autocast: it is precision-changing, and the function was jitted with"):
        tfn.autocast(q)
    assert tfn.grad(q, argnums=1).options.cache == "no caching"
    assert tfn.grad(q, argnums=1).options.numerics == "bitwise"


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_pruned_modules(jitted: bool) -> None:
    """Their weights, which hooks compute, are those of the parameter and mask that are stored: results, and what is trained."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 8)
    prune.l1_unstructured(module[0], "weight", amount=0.3)
    prune.random_unstructured(module[0], "weight", amount=0.3)  # a container of both
    for wrap in (tfn.quantize, lambda m: tfn.quantize(m, "int8", training=True), tfn.lora):
        q = wrap(tfn.jit(module) if jitted else module)
        torch.testing.assert_close(q(x), q.restored()(x), rtol=0.02, atol=0.02)
        assert list(q.state_dict()) == list(module.state_dict())
    plain = tfn.quantize(tfn.jit(module) if jitted else module, filter=lambda name, shape: False)
    for net in (plain, module):
        net(x).square().sum().backward()
    for name, value in module.named_parameters():
        torch.testing.assert_close(plain.parts()[name].grad, value.grad)
