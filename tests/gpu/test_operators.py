"""Some of PyTorch's operators on a GPU, against eager; `python -m tests.ops.sweep --device cuda` runs all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.ops.sweep import failures

NAMES = (
    "nn_functional_batch_norm",
    "nn_functional_batch_norm_without_cudnn",
    "nn_functional_conv2d",
    "nn_functional_instance_norm",
    "nn_functional_layer_norm",
    "addmm",
    "sort",
    "linalg_vector_norm",
    "masked_fill",
    "cumsum",
)


@pytest.mark.parametrize("what", ["forward", "gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_operators(name: str, what: str) -> None:
    assert not failures(name, what, 2, (torch.float32,), ("plain",), device="cuda")


@pytest.mark.parametrize(
    ("name", "what", "limit"),
    [
        ("index_put", "vmap of vjp", 2),  # the second sample's mask is on the CPU
        ("nn_functional_logsigmoid", "vjp of vjp", 1),
        ("nn_functional_embedding_bag", "vjp of vjp", 7),  # the seventh has `include_last_offset`
    ],
)
def test_compositions(name: str, what: str, limit: int) -> None:
    assert not failures(name, what, limit, (torch.float32,), ("plain",), device="cuda")


def test_statistics_are_updated_once_where_a_forward_runs_again() -> None:
    """cuDNN's op updates them without saying so."""
    x, means = torch.randn(2, 2, 5, 5, device="cuda", requires_grad=True), []
    for wrapped in (lambda module: module, lambda module: tfn.jit(lambda x: tfn.checkpoint(module)(x))):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).cuda()
        wrapped(module)(x).square().sum().backward()
        means += [module[1].running_mean, module[3].running_var]
    torch.testing.assert_close(means[2:], means[:2])
