"""Every module of PyTorch's module database, jitted, against eager: results, first and second derivatives, buffers, and
the random numbers that are left.

The first kind of input of each module, in training and evaluation mode; `OPS_SAMPLES=all` takes all kinds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

import thunder_fn as tfn
from tests.ops.agreement import tensors_in

SAMPLES = None if os.environ.get("OPS_SAMPLES") == "all" else 1
MODES = [
    pytest.param(info, training, id=f"{info.name}-{'train' if training else 'eval'}")
    for info in module_db
    for training in ((True, False) if info.train_and_eval_differ else (True,))
]
WAYS = [(everything, second) for everything in (True, False) for second in (True, False)]
"""Ways to differentiate: all inputs or the first, and twice or once. Eager raises where an op has no such derivative."""


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return sum(((one.abs() if one.is_complex() else one).square().sum() for one in tensors), torch.zeros(()))


def followed(tensors: Any) -> list[torch.Tensor]:
    return [one for one in tensors_in(tensors) if one.requires_grad]


def observed(
    wrap: Callable[[Any], Any], info: ModuleInfo, sample: ModuleInput, training: bool, everything: bool, second: bool
) -> Any:
    """Call a module twice; give (results, gradients, gradients of the gradients, buffers) of each call, and a random number."""
    torch.manual_seed(1)
    given = sample.constructor_input
    module = copy.deepcopy(info.module_cls(*given.args, **given.kwargs)).to(torch.float64).train(training)
    run, found = wrap(module), list[Any]()
    for _ in range(2):
        args, kwargs = copy.deepcopy((sample.forward_input.args, sample.forward_input.kwargs))
        inputs = [one for one in tensors_in((args, kwargs)) if one.is_floating_point()][: None if everything else 1]
        for one in inputs:
            one.requires_grad_()
        result = run(*args, **kwargs)
        wrt = [*followed(list(module.parameters())), *inputs]
        first = again = ()
        if followed(result):
            first = torch.autograd.grad(total(followed(result)), wrt, allow_unused=True, create_graph=second)
        if second and followed(first):
            again = torch.autograd.grad(total(followed(first)), wrt, allow_unused=True)
        found.append((result, first, again, [buffer.clone() for buffer in module.buffers()]))
    return found, torch.rand(())


def in_eager(info: ModuleInfo, sample: ModuleInput, training: bool) -> tuple[tuple[bool, bool], Any]:
    """The first way in which eager can differentiate the module, and what it finds."""
    for way in WAYS:
        try:
            return way, observed(lambda module: module, info, sample, training, *way)
        except (RuntimeError, NotImplementedError) as error:
            reason = error
    raise AssertionError("eager has no derivative") from reason


@pytest.mark.parametrize(("info", "training"), MODES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of nested tensors, full backward hooks and the like
def test_module(info: ModuleInfo, training: bool) -> None:
    samples = info.module_inputs_func(info, "cpu", torch.float64, requires_grad=False, training=training)
    for sample in [one for one in samples if one.forward_input is not None][:SAMPLES]:
        way, expected = in_eager(info, sample, training)
        found = observed(tfn.jit, info, sample, training, *way)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9, equal_nan=True, check_stride=True)
