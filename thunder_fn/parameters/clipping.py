"""Norms of gradients that lie on many ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from thunder_fn.api.calling import apply
from thunder_fn.distributed.collectives import collectives
from thunder_fn.distributed.groups import Group
from thunder_fn.errors import RewriteError, kind_of
from thunder_fn.interpreters.fsdp import Fsdp
from thunder_fn.interpreters.rewriting.prepared import Layout, Prepared
from thunder_fn.interpreters.rewriting.tracing import traced
from thunder_fn.interpreters.tensor_parallel.step import TensorParallel
from thunder_fn.ir.trace import TensorType, Trace


def global_norm(gradients: Prepared, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as of one vector, each counted once however many ranks have it.

    Law: on every rank it is the norm of the gradients of one rank that sees all batches.

    Args:
        gradients: of prepared parameters, as `grad` gives them.
        norm_type: 2, another positive number, or infinity.

    Raises:
        RewriteError: `gradients` are not those of prepared parameters, or the type of norm is not
            positive.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.lora(lambda params: params["w"].square().sum(), rank=2)
        >>> params = q.prepare({"w": torch.tensor([3.0, 4.0])})
        >>> global_norm(tfn.grad(q)(params))
        tensor(10.)
    """
    if not isinstance(gradients, Prepared):
        raise RewriteError(
            "global_norm: expected the gradients of prepared parameters, given"
            f" {kind_of(gradients)}",
            fix="`torch.nn.utils.get_total_norm` takes other gradients.",
        )
    if not norm_type > 0:
        raise RewriteError(f"global_norm: the type of norm is positive, given {norm_type!r}")
    return norm_over_ranks(gradients.layout, gradients, norm_type)


def clip_by_global_norm(
    gradients: Prepared, max_norm: float, norm_type: float = 2.0
) -> tuple[Prepared, torch.Tensor]:
    """The gradients scaled down, where their global norm is greater, to that norm; and the norm
    before.

    Law: as `torch.nn.utils.clip_grad_norm_` of one rank that sees all batches.

    Errors as in `global_norm`.

    Example:
        >>> import torch, thunder_fn as tfn
        >>> q = tfn.lora(lambda params: params["w"].square().sum(), rank=2)
        >>> params = q.prepare({"w": torch.tensor([3.0, 4.0])})
        >>> clipped, norm = tfn.parameters.clip_by_global_norm(tfn.grad(q)(params), max_norm=1.0)
        >>> norm, clipped["w"]
        (tensor(10.), tensor([0.6000, 0.8000]))
    """
    norm = global_norm(gradients, norm_type)
    scale = clip_factor(norm, max_norm)
    clipped = {name: g * scale.to(g.dtype) for name, g in gradients.items() if _counts(g)}
    return gradients.replaced(clipped), norm


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor of gradients."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def norm_over_ranks(layout: Layout, gradients: Mapping[str, Any], norm_type: float) -> torch.Tensor:
    """The norm of the gradients of parameters that lie as a layout says."""
    known = {name: g.detach() for name, g in gradients.items() if _counts(g)}
    total = _power([g for name, g in known.items() if name not in _split_names(layout)], norm_type)
    for step in layout.steps:
        if isinstance(step, TensorParallel):  # others lie whole on all ranks of the group
            own = _power(
                [g for name, g in known.items() if name in _split_names(layout)], norm_type
            )
            own = _over(step.group, own, norm_type)
            total = torch.maximum(total, own) if norm_type == math.inf else total + own
    for step in layout.steps:
        if isinstance(step, Fsdp):
            total = _over(step.group, total, norm_type)
    return total if norm_type == math.inf else total ** (1 / norm_type)


def _counts(gradient: Any) -> bool:
    return isinstance(gradient, torch.Tensor) and (
        gradient.is_floating_point() or gradient.is_complex()
    )


def _split_names(layout: Layout) -> frozenset[str]:
    """The parameters of which ranks of tensor parallelism have different shares."""
    steps = [step for step in layout.steps if isinstance(step, TensorParallel)]
    named = list(zip(layout.names, layout.types, strict=True))
    return frozenset(
        name
        for step in steps
        for name, type in named
        if step.style(name, type) not in (None, "sequence")
    )


def _power(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The sum of powers, or the greatest, in float32 at least."""
    sizes = [g.abs() for g in gradients]
    wide = [size if size.dtype == torch.float64 else size.float() for size in sizes]
    if norm_type == math.inf:
        each = [size.amax() for size in wide if size.numel()]
        return torch.stack(each).amax() if each else torch.zeros(())
    each = [size.pow(norm_type).sum() for size in wide]
    return torch.stack(each).sum() if each else torch.zeros(())


def _over(group: Group, value: torch.Tensor, norm_type: float) -> torch.Tensor:
    trace = _reduction(group, "max" if norm_type == math.inf else "sum", value.dtype, value.device)
    (found,) = apply("norm_over_ranks", trace, [value], trace)
    return found


@cache
def _reduction(group: Group, reduction: str, dtype: torch.dtype, device: torch.device) -> Trace:
    def over_ranks(value: torch.Tensor) -> torch.Tensor:
        return collectives.wait_tensor(
            collectives.all_reduce(value.reshape(1), reduction, group.name)
        ).reshape(())

    return traced(over_ranks, TensorType(dtype, (), device))
