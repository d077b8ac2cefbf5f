"""`functional_optimizer` against the optimizer's own `step`, and schedules without tracing again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import thunder_fn as tfn
from thunder_fn.errors import OptimizerError

SGD, AdamW, Adam, RMSprop, Adagrad = (
    getattr(torch.optim, name) for name in ("SGD", "AdamW", "Adam", "RMSprop", "Adagrad")
)
RATES = (0.1, 0.05, 0.02, 0.01)
CASES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (SGD, {}),
    (SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True, "foreach": True}),
    (SGD, {"momentum": 0.9, "fused": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"amsgrad": True, "foreach": True}),
    (AdamW, {"fused": True}),
    (Adam, {"betas": (0.8, 0.9), "eps": 1e-5}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Adagrad, {}),
)


def eager_and_ours(make: Any, options: dict[str, Any], rate: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """The parameters after some steps of a schedule, and how often the jitted step was traced."""
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    twin, xs, ys = copy.deepcopy(model), torch.randn(4, 7, 5).double(), torch.randn(4, 7, 2).double()
    optimizer = make(twin.parameters(), lr=1.0, **options)
    for x, y, lr in zip(xs, ys, RATES, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        F.mse_loss(twin(x), y).backward()
        optimizer.step()
    ours = tfn.functional_optimizer(make, lr=1.0, **options)
    loss = lambda params, x, y: F.mse_loss(torch.func.functional_call(model, params, (x,)), y)
    step = tfn.jit(lambda p, s, x, y, lr: ours.update(p, tfn.grad(loss)(p, x, y), s, lr=lr), donate_argnums=(0, 1))
    params = {name: value.detach().clone() for name, value in model.named_parameters()}
    state = ours.init(params)
    for x, y, lr in zip(xs, ys, RATES, strict=True):
        params, state = step(params, state, x, y, rate(lr))
    return [value.detach() for value in twin.parameters()], list(params.values()), tfn.cache_info(step).misses


@pytest.mark.parametrize(("make", "options"), CASES, ids=range(len(CASES)))
def test_steps_of_a_schedule(make: Any, options: dict[str, Any]) -> None:
    expected, found, traced = eager_and_ours(make, options, lambda lr: torch.tensor(lr, dtype=torch.float64))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(expected, found, strict=True))
    assert traced <= 2, "a new learning rate is no new program; the first step makes the state"


def test_a_number_that_changes_becomes_symbolic() -> None:
    expected, found, traced = eager_and_ours(SGD, {}, lambda lr: lr)
    assert all(map(torch.equal, expected, found))
    assert traced <= 3, "the first call, the one that has a state, and at most one more for other rates"


def test_unknown_option() -> None:
    sgd, params = tfn.functional_optimizer(SGD, lr=0.1), {"w": torch.ones(2)}
    with pytest.raises(OptimizerError) as info:
        sgd.update(params, params, sgd.init(params), rate=0.1)
    assert str(info.value).startswith("SGD has no option 'rate'; those that can change are dampening, ")
