"""Explicit random keys in traces: the same key draws the same bits under every transform.

PyTorch has kernels for CUDA devices. Here stand-ins run on the CPU: any function of a key and a position will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import thunder_fn as tfn
from tests.messages import message_of
from thunder_fn import torch_internals as internals
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir.check import check

R = pytest.importorskip("torch.func._random", reason="PyTorch has random keys since 2.12")
ON_CPU = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_philox_normal_", "CPU")


def hashed(key: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers in [0, 1) for a batch of keys."""
    seed, offset = key.to(torch.float64).unbind(-1)
    positions = torch.arange(1, count + 1, dtype=torch.float64)
    mixed = seed.unsqueeze(-1) * 0.618 + offset.unsqueeze(-1) * 0.377 + positions * 12.9898
    return (mixed.sin() * 43758.5453).frac().abs()


def split(key: torch.Tensor, number: int) -> torch.Tensor:
    return torch.stack([fold_in(key, i) for i in range(number)])


def fold_in(key: torch.Tensor, data: int) -> torch.Tensor:
    seed, offset = key.to(torch.int64).unbind(-1)
    return torch.stack([(seed * 1009 + data * 31 + 7) % 65537, offset], -1).to(torch.uint64)


def fill(out: torch.Tensor, key: torch.Tensor, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    batch = key.dim() - 1
    numbers = hashed(key, out.shape[batch:].numel()).reshape(*key.shape[:-1], *out.shape[batch:])
    return out.copy_(low + (high - low) * numbers)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    if ON_CPU:
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    functions: dict[str, Callable[..., Any]] = {
        "_philox_key_split": split,
        "_philox_key_fold_in": fold_in,
        "_philox_normal_": fill,
        "_philox_uniform_": fill,
    }
    for name, function in functions.items():
        library.impl(name, function, "CPU")
    yield
    library._destroy()


def noisy(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    left, right = R.split(key)
    return (R.normal(left, 3, std=2.0) * x**2).sum() + (R.uniform(R.fold_in(right, 5), 3) * x).sum()


def test_under_jit_and_grad() -> None:
    key, x = R.key(42), torch.tensor([0.5, -1.0, 2.0])
    check(tfn.trace(noisy, key, x))
    want = torch.func.grad(noisy, argnums=1)(key, x)
    assert torch.equal(tfn.jit(noisy)(key, x), noisy(key, x))
    for grad in (tfn.grad(noisy, argnums=1), tfn.jit(tfn.grad(noisy, argnums=1)), tfn.grad(tfn.jit(noisy), argnums=1)):
        torch.testing.assert_close(grad(key, x), want)
        torch.testing.assert_close(grad(R.key(7), x), torch.func.grad(noisy, argnums=1)(R.key(7), x))
    torch.testing.assert_close(tfn.jvp(lambda x: noisy(key, x), (x,), (x,))[1], (want * x).sum())


def test_a_checkpoint_draws_the_same() -> None:
    key, x = R.key(3), torch.tensor([0.5, -1.0, 2.0])
    drop = lambda x: (R.uniform(key, 3) > 0.5) * x.sin() * x.cos()
    want = tfn.grad(lambda x: drop(x).sum())(x)
    assert torch.equal(tfn.grad(lambda x: tfn.checkpoint(drop)(x).sum())(x), want)


def test_split_keys_in_a_batch() -> None:
    keys, xs = R.split(R.key(1), 4), torch.randn(4, 3)
    rows = [noisy(key, x) for key, x in zip(keys, xs, strict=True)]
    assert torch.equal(tfn.vmap(noisy)(keys, xs), torch.stack(rows))
    shared = tfn.vmap(noisy, in_dims=(None, 0))(keys[0], xs)
    torch.testing.assert_close(shared, torch.stack([noisy(keys[0], x) for x in xs]))
    gradients = tfn.vmap(tfn.grad(noisy, argnums=1))(keys, xs)
    wanted = [torch.func.grad(noisy, argnums=1)(key, x) for key, x in zip(keys, xs, strict=True)]
    torch.testing.assert_close(gradients, torch.stack(wanted))
    nested = tfn.vmap(tfn.vmap(lambda key: R.normal(key, 3)))(R.split(keys, 2))
    assert torch.equal(nested, torch.stack([R.normal(key, 4, 3) for key in R.split(keys, 2)]))


def test_in_a_scan() -> None:
    keys = R.split(R.key(1), 4)
    total, _ = tfn.scan(lambda carry, key: (carry + R.normal(key, 3), carry), torch.zeros(3), keys)
    assert torch.equal(total, sum((R.normal(key, 3) for key in keys), torch.zeros(3)))


def test_equal_draws_are_merged() -> None:
    key = R.key(5)
    trace = tfn.simplify(tfn.trace(lambda key: R.normal(key, 3) + R.normal(key, 3), key))
    assert sum("key_normal" in equation.op.name for equation in trace.equations) == 1


def test_a_device_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "has_kernel", lambda name, device: False)
    with pytest.raises(UnsupportedCall) as found:
        tfn.trace(lambda key: R.normal(key, 3), R.key(1))
    lines = message_of(found.value).splitlines()
    assert lines[0] == f"PyTorch {torch.__version__} has no random keys on cpu: there is no kernel for _philox_normal_"
    assert lines[2].startswith("Make the key on a CUDA device, `torch.func._random.key(seed, device='cuda')`")
