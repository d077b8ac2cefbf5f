"""Explicit random keys, `torch.func._random`, as equations.

A key says which numbers are drawn, so these equations are pure. Equal ones are merged, a checkpoint
may run them again, and a batch of keys draws what each key draws alone. PyTorch fills a tensor in
place; in a trace the numbers are a new one.

PyTorch has keys since 2.12, and kernels for them on CUDA devices.
"""

from __future__ import annotations

from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.replaced.leaf_ops import SAME
from thunder_fn.capture.scopes import user_source
from thunder_fn.errors import UnsupportedCall

Tensor = torch.Tensor
aten = torch.ops.aten

_library = torch.library.Library("thunder_fn", "FRAGMENT")
_library.define("key_split(Tensor key, int num_splits) -> Tensor")
_library.define("key_fold_in(Tensor key, int data) -> Tensor")
_library.define("key_normal(Tensor like, Tensor key, float mean, float std) -> Tensor")
_library.define("key_uniform(Tensor like, Tensor key, float low, float high) -> Tensor")


def check_kernel(kernel: str, key: Tensor) -> None:
    """Raise where PyTorch has no keys on the device."""
    if not internals.has_kernel(f"aten::{kernel}", key.device.type):
        raise UnsupportedCall(
            f"PyTorch {torch.__version__} has no random keys on {key.device.type}: there is no"
            f" kernel for {kernel}",
            source=user_source(),
            fix=(
                "Make the key on a CUDA device, `torch.func._random.key(seed, device='cuda')`,"
                " or draw from a generator."
            ),
        )


def _batched_key(
    info: Any, in_dims: Any, key: Tensor, number: int, kernel: Any
) -> tuple[Tensor, int]:
    found = kernel(key.movedim(in_dims[0], 0), number)
    return found, found.dim() - key.dim()


def _batched_draw(
    info: Any, in_dims: Any, like: Tensor, key: Tensor, a: float, b: float, draw: Any
) -> tuple[Tensor, Any]:
    """Each key draws its own numbers; where the examples share a key, all have the same."""
    example = like if in_dims[0] is None else like.select(in_dims[0], 0)
    if in_dims[1] is None:
        return draw(example, key, a, b), None
    like = example.new_empty((info.batch_size, *example.shape))
    return draw(like, key.movedim(in_dims[1], 0), a, b), 0


def _define(name: str, kernel: str) -> None:
    """Define a function of keys as PyTorch has it."""
    overload: Any = getattr(aten, kernel).default
    own: Any = getattr(torch.ops.thunder_fn, name).default
    _library.impl(name, lambda key, number: overload(key, number), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"thunder_fn::{name}", lambda key, number: overload(key, number), lib=_library
    )
    batched = lambda info, dims, key, number: _batched_key(info, dims, key, number, own)
    torch.library.register_vmap(f"thunder_fn::{name}", batched, lib=_library)

    def same(key: Tensor, *args: Any, **kwargs: Any) -> Any:
        check_kernel(kernel, key)
        return own, (key, *args, *kwargs.values()), {}

    SAME[f"aten.{kernel}.default"] = same


def _define_draw(
    name: str, kernel: str, first: str, second: str, defaults: tuple[float, float]
) -> None:
    """Numbers in a new tensor."""
    overload: Any = getattr(aten, kernel).default
    own: Any = getattr(torch.ops.thunder_fn, name).default
    fill = lambda like, key, a, b: overload(like.new_empty(like.shape), key, a, b)
    _library.impl(name, fill, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"thunder_fn::{name}", lambda like, key, a, b: like.new_empty(like.shape), lib=_library
    )
    batched = lambda info, dims, like, key, a, b: _batched_draw(info, dims, like, key, a, b, own)
    torch.library.register_vmap(f"thunder_fn::{name}", batched, lib=_library)

    def draw(like: Tensor, key: Tensor, *args: float, **kwargs: float) -> Tensor:
        check_kernel(kernel, key)
        given = {
            **dict(zip((first, second), defaults, strict=True)),
            **dict(zip((first, second), args, strict=False)),
            **kwargs,
        }
        return like.copy_(own(like, key, given[first], given[second]))

    internals.OUT_OF_PLACE[overload] = draw


if hasattr(aten, "_philox_normal_"):
    _define("key_split", "_philox_key_split")
    _define("key_fold_in", "_philox_key_fold_in")
    _define_draw("key_normal", "_philox_normal_", "mean", "std", (0.0, 1.0))
    _define_draw("key_uniform", "_philox_uniform_", "low", "high", (0.0, 1.0))
