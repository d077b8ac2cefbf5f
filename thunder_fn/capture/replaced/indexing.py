"""`x[i]` with a scalar tensor i, as the counter of a loop is, or with a number that is a symbol.

Eager PyTorch reads the number of a tensor and takes a slice. A constant has one; any other tracer
has no number to read, and indexing with a tensor of one element gives the same values. So does it
with a number that data says. Any other symbol selects after the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thunder_fn.capture import pytree
from thunder_fn.capture.numbers.arithmetic import is_found_in_data
from thunder_fn.capture.numbers.scalars import number_of_constant
from thunder_fn.capture.recorder import current
from thunder_fn.capture.replaced.stand_ins import tensor

Tensor = torch.Tensor
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def getitem(x: Tensor, index: Any) -> Tensor:
    """Index a tensor: `x[index]`."""
    given, index = index, _with_numbers(index)
    placed = _in_front(x, index)
    if placed is None:
        selected = _selected(x, index)
        return Tensor.__getitem__(x, index) if selected is None else selected
    view, scalars = placed
    take = lambda: torch.ops.aten.index.Tensor(view, scalars).squeeze(0)
    put = lambda copy: torch.ops.aten.index_put_.default(view, scalars, copy.unsqueeze(0))
    recorder = current()
    return take() if recorder is None else recorder.selections.add(view, take, put, given)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`."""
    index = _with_numbers(index)
    placed = _in_front(x, index)
    if placed is None:
        selected = _selected(x, index)
        if selected is None:
            Tensor.__setitem__(x, index, value)
        else:
            Tensor.__setitem__(selected, Ellipsis, value)
        return
    view, scalars = placed
    new = (
        value.to(x.dtype)
        if isinstance(value, Tensor)
        else torch.full((), value, dtype=x.dtype, device=x.device)
    )
    torch.ops.aten.index_put_.default(view, scalars, new)


def _selected(x: Tensor, index: Any) -> Tensor | None:
    """The view where some of the index are symbols; None where there are none, or tensors and
    lists beside them.
    """
    parts = pytree.as_tuple(index)
    if not any(isinstance(part, torch.SymInt) for part in parts) or not all(map(_is_basic, parts)):
        return None
    places = list(_places(x, parts))
    whole = tuple(slice(None) if isinstance(part, torch.SymInt) else part for part in parts)
    view = Tensor.__getitem__(x, whole)
    for part, place in reversed(places):
        if isinstance(part, torch.SymInt):
            view = view.select(place, part)  # type: ignore[arg-type]
    return view


def _with_numbers(index: Any) -> Any:
    """The index with numbers for tensors in slices, which eager PyTorch reads."""
    parts = pytree.as_tuple(index)
    new = tuple(
        _slice_of_numbers(part) if isinstance(part, slice) else _scalar_of_data(part)
        for part in parts
    )
    return new if isinstance(index, tuple) else new[0]


def _slice_of_numbers(part: slice) -> slice:
    bounds: tuple[Any, ...] = (part.start, part.stop, part.step)
    return slice(*(bound.item() if isinstance(bound, Tensor) else bound for bound in bounds))


def _scalar_of_data(part: Any) -> Any:
    """A number that data says as a scalar tensor, and a constant as its number; a mask of bytes,
    which fake tensors do not index by, as one of bools.
    """
    if isinstance(part, Tensor) and part.dtype == torch.uint8:
        return part.bool()
    if _is_scalar(part):
        return number_of_constant(part)
    return tensor(part) if isinstance(part, torch.SymInt) and is_found_in_data(part) else part


def _in_front(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor]] | None:
    """A view whose first dims are those that scalar tensors index, and these with one dim.

    None where there are none, or lists and tensors of several elements beside them.
    """
    parts = pytree.as_tuple(index)
    if any(map(_is_scalar, parts)):
        parts = tuple(tensor(part) if isinstance(part, torch.SymInt) else part for part in parts)
    scalars = [part.reshape(1) for part in parts if _is_scalar(part)]
    if not scalars or not all(_is_scalar(part) or _is_basic(part) for part in parts):
        return None
    dims = [place for part, place in _places(x, parts) if _is_scalar(part)]
    whole = tuple(slice(None) if _is_scalar(part) else part for part in parts)
    return Tensor.__getitem__(x, whole).movedim(dims, list(range(len(dims)))), scalars


def _places(x: Tensor, parts: tuple[Any, ...]) -> Iterator[tuple[Any, int]]:
    """Each part of an index with the dim of the result that it gives, if it is no number."""
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    place = 0
    for part in parts:
        yield part, place
        if part is Ellipsis:
            place += x.dim() - taken
        elif not isinstance(part, int):
            place += 1


def _is_scalar(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dim() == 0 and part.dtype in _INTEGERS


def _is_basic(part: Any) -> bool:
    is_number = isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool)
    return part is None or part is Ellipsis or is_number or isinstance(part, slice)
