"""`x[i]` with a scalar tensor i, as the counter of a loop is.

Eager PyTorch reads the number and takes a slice. A tracer has no number to read; indexing with a tensor of one element
gives the same values.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def getitem(x: Tensor, index: Any) -> Tensor:
    """`x[index]`."""
    index = _with_numbers(index)
    placed = _in_front(x, index)
    if placed is None:
        return Tensor.__getitem__(x, index)
    view, scalars = placed
    return torch.ops.aten.index.Tensor(view, scalars).squeeze(0)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    index = _with_numbers(index)
    placed = _in_front(x, index)
    if placed is None:
        Tensor.__setitem__(x, index, value)
        return
    view, scalars = placed
    new = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    torch.ops.aten.index_put_.default(view, scalars, new)


def _with_numbers(index: Any) -> Any:
    """The index with numbers for tensors in slices, which eager PyTorch reads."""
    parts = index if isinstance(index, tuple) else (index,)
    new = tuple(_slice_of_numbers(part) if isinstance(part, slice) else part for part in parts)
    return new if isinstance(index, tuple) else new[0]


def _slice_of_numbers(part: slice) -> slice:
    bounds: tuple[Any, ...] = (part.start, part.stop, part.step)
    return slice(*(bound.item() if isinstance(bound, Tensor) else bound for bound in bounds))


def _in_front(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor]] | None:
    """A view whose first dims are those that scalar tensors index, and these with one dim.

    None where there are none, or lists and tensors of several elements beside them.
    """
    parts = index if isinstance(index, tuple) else (index,)
    scalars = [part.reshape(1) for part in parts if _is_scalar(part)]
    if not scalars or not all(_is_scalar(part) or _is_basic(part) for part in parts):
        return None
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    dims: list[int] = []
    place = 0
    for part in parts:
        if _is_scalar(part):
            dims.append(place)
        if part is Ellipsis:
            place += x.dim() - taken
        elif not isinstance(part, int):
            place += 1
    whole = tuple(slice(None) if _is_scalar(part) else part for part in parts)
    return Tensor.__getitem__(x, whole).movedim(dims, list(range(len(dims)))), scalars


def _is_scalar(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _is_basic(part: Any) -> bool:
    is_number = isinstance(part, int) and not isinstance(part, bool)
    return part is None or part is Ellipsis or is_number or isinstance(part, slice)
