"""PyTorch's own control flow, which Dynamo puts into a graph, with the arguments of ours.

Dynamo reads these functions. They take the place of ours in `torch.compile(fullgraph=True)`.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as tree

from thunder_fn.torch_internals.modes import inside_derivative_or_vmap
from thunder_fn.torch_internals.patches import constant_of_dynamo

_NESTED = (
    "PyTorch has no {} inside of a transform; leave `fullgraph=True` out, or use `thunder_fn.jit`"
)


@constant_of_dynamo
def is_in_torch_func() -> bool:
    """Test, at a call by Dynamo, for a derivative or vmap of torch.func around the code that it
    reads.
    """
    return inside_derivative_or_vmap()


def dynamo_cond(
    pred: Any, true_fn: Any, false_fn: Any, operands: Any = (), *, batched: str = "select"
) -> Any:
    """Call `torch.cond`."""
    if is_in_torch_func():
        raise NotImplementedError(_NESTED.format("cond"))
    return torch.cond(pred, true_fn, false_fn, tuple(operands))


def dynamo_while_loop(
    cond_fn: Any, body_fn: Any, carried_inputs: Any, *, max_steps: int | None = None
) -> Any:
    """Call PyTorch's `while_loop`, which has no `max_steps`."""
    from torch._higher_order_ops.while_loop import while_loop

    if max_steps is not None:
        raise NotImplementedError("while_loop: max_steps in torch.compile(fullgraph=True)")
    if is_in_torch_func():
        raise NotImplementedError(_NESTED.format("while_loop"))
    return while_loop(cond_fn, body_fn, tuple(carried_inputs))


def dynamo_scan(
    combine_fn: Any,
    init: Any,
    xs: Any = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    **options: Any,
) -> Any:
    """Call PyTorch's `scan`, which takes no number of steps in the place of xs, and stacks along
    dim 0 before 2.13.
    """
    from torch._higher_order_ops.scan import scan

    if xs is None:
        raise NotImplementedError("scan: length in torch.compile(fullgraph=True)")
    if is_in_torch_func():
        raise NotImplementedError(_NESTED.format("scan"))
    dim %= tree.tree_leaves(xs)[0].ndim
    moved = tree.tree_map(lambda x: x.movedim(dim, 0), xs)
    carry, ys = scan(combine_fn, init, moved, reverse=reverse)
    if dim == 0:
        return carry, ys
    return carry, tree.tree_map(lambda y: y.movedim(0, dim) if dim < y.ndim else y, ys)


def dynamo_fori_loop(
    lo: Any, hi: Any, body: Callable[..., Any], init: Any, *, unroll: Any = 1
) -> Any:
    """Run the steps one after the other."""
    for i in range(lo, hi):
        init = body(torch.tensor(i), init)
    return init


def dynamo_associative_scan(
    combine_fn: Any, xs: Any, dim: int = 0, reverse: bool = False, combine_mode: str = "generic"
) -> Any:
    """Call PyTorch's `associative_scan`."""
    from torch._higher_order_ops.associative_scan import associative_scan

    if is_in_torch_func():
        raise NotImplementedError(_NESTED.format("associative_scan"))
    return associative_scan(combine_fn, xs, dim, reverse, combine_mode)


def dynamo_map(f: Any, xs: Any, *args: Any, dim: int = 0, batch_size: int | None = None) -> Any:
    """Call PyTorch's `map`, which goes along the first dim."""
    from torch._higher_order_ops.map import map

    if dim != 0:
        raise NotImplementedError("map: another dim than 0 in torch.compile(fullgraph=True)")
    if is_in_torch_func():
        raise NotImplementedError(_NESTED.format("map"))
    return map(f, xs, *args)


def dynamo_checkpoint(f: Any, policy: Any = None) -> Callable[..., Any]:
    """Wrap a function in `torch.utils.checkpoint`, which keeps nothing."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        if is_in_torch_func():  # which has no saved tensors hooks
            return f(*args, **kwargs)
        return checkpoint(f, *args, use_reentrant=False, **kwargs)

    return recomputed
