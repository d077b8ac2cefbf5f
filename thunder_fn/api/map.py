"""map: a function on each slice, one after the other or some at a time.

Source: jax.lax.map; the higher-order op `map` of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.api.batching import vmap
from thunder_fn.capture import pytree
from thunder_fn.capture.replaced.lookasides import divert
from thunder_fn.errors import TraceTypeError, spelled
from thunder_fn.structured.loop_functions import map as one_by_one, mapped_function, number_of_steps
from thunder_fn.structured.shared.bodies import is_kept_open


@spelled(
    chunk_size="batch_size",
    axis="dim",
    in_dims="One `dim` serves all of xs: move the others by `x.movedim`.",
    in_axes="One `dim` serves all of xs: move the others by `x.movedim`.",
)
@internals.with_twin(internals.dynamo_map)
def map(
    f: Callable[..., Any], xs: Any, *args: Any, dim: int = 0, batch_size: int | None = None
) -> Any:
    """Apply f to each slice of xs along dim, one after the other; the results are stacked along
    dim.

    Law: equals ``vmap(f)`` on functions that both can do; uses the memory of one slice, or of
        `batch_size`, at a time.

    Args:
        f: takes a slice of xs and then args.
        xs: a pytree of tensors with equal sizes in dim.
        batch_size: the number of slices at a time, by `vmap`; the last batch may be smaller.

    Raises:
        TraceTypeError: sizes differ, batch_size is no positive int, or a result is no tensor.

    Example:
        >>> map(lambda x: x.sum(), torch.ones(3, 2), batch_size=2)
        tensor([2., 2., 2.])
    """
    if batch_size is not None and (
        not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1
    ):
        raise TraceTypeError(f"map: batch_size is a positive int, given {batch_size!r}")
    if batch_size is None or not pytree.flatten(xs)[0]:
        return one_by_one(f, xs, *args, dim=dim)
    size, dim = number_of_steps(xs, dim, op="map")
    if is_kept_open(size):
        return one_by_one(f, xs, *args, dim=dim)
    whole = size // batch_size * batch_size
    batched = vmap(mapped_function(f, args), randomness="different")
    parts = [
        one_by_one(
            batched, pytree.tree_map(lambda x: x.movedim(dim, 0)[block].unflatten(0, shape), xs)
        )
        for block, shape in (
            (slice(whole), (whole // batch_size, batch_size)),
            (slice(whole, size), (1, size - whole)),
        )
        if shape[0] * shape[1] or not size
    ]
    columns = zip(*(pytree.flatten(part)[0] for part in parts), strict=True)
    stacks = [torch.cat([part.flatten(0, 1) for part in column]) for column in columns]
    placed = [stack.movedim(0, dim if dim < stack.ndim else 0) for stack in stacks]
    return pytree.unflatten(pytree.flatten(parts[0])[1], placed)


divert("map", map)
