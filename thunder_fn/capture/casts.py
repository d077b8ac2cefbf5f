"""Refuse writes of results that eager PyTorch does not cast to the tensor's dtype.

Functionalization computes the result and casts it, whatever the dtypes. Eager PyTorch casts floats
to no ints and complex numbers to no real ones, and for an `out=` many ops compute in its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from thunder_fn import torch_internals as internals
from thunder_fn.errors import UnsupportedCall
from thunder_fn.ir import facts
from thunder_fn.ir.trace import Source

_OF_NUMBERS = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float32,
    complex: torch.complex64,
    torch.SymBool: torch.bool,
    torch.SymInt: torch.int64,
    torch.SymFloat: torch.float32,
}


def check_casts(
    func: Any, changed: Sequence[torch.Tensor], args: Any, kwargs: Any, source: Source | None
) -> None:
    """Reject an op that changes tensors in place if its results are of other dtypes.

    Raises:
        RuntimeError: PyTorch does not cast such a result.
        UnsupportedCall: the op may compute in the dtype of its `out=`.
    """
    outs = {arg.name for arg in func._schema.arguments if arg.is_out}
    rest = {key: value for key, value in kwargs.items() if key not in outs}
    given = torch_pytree.tree_leaves((args, rest))
    target = changed[0].dtype
    is_safe = _can_cast(torch.float32, target) and all(_fits(one, target) for one in given)
    is_factory = not any(isinstance(one, torch.Tensor) for one in given)
    if is_factory or (is_safe and not outs):
        return
    for found, tensor in zip(_results(func, args, rest), changed, strict=False):
        if found == tensor.dtype:
            continue
        if outs and not _is_cast_after(func):
            what = f"`out=` of `{_name(func)}` is of {tensor.dtype}, and the result of {found}"
            fix = "Use the result instead of `out=`, with `dtype=` where there is one."
            raise UnsupportedCall(what, source=source, fix=fix)
        if not _can_cast(found, tensor.dtype):
            raise RuntimeError(
                f"result type {found} can't be cast to the desired output type {tensor.dtype}"
            )


@functools.cache
def _can_cast(of: torch.dtype, to: torch.dtype) -> bool:
    with internals.only_memory():  # PyTorch asks modes for it, as for any op
        return torch.can_cast(of, to)


def _fits(arg: Any, dtype: torch.dtype) -> bool:
    """Test whether an argument makes no result that cannot be cast to a dtype."""
    own = arg.dtype if isinstance(arg, torch.Tensor) else _OF_NUMBERS.get(type(arg), dtype)
    return _can_cast(own, dtype)


def _results(func: Any, args: Any, kwargs: Any) -> Iterator[torch.dtype]:
    """The dtypes that the op which writes to no operand gives."""
    packet = getattr(torch.ops.aten, _name(func).removesuffix("_"), None)
    numbers = {torch.SymBool: True, torch.SymInt: 1, torch.SymFloat: 1.0}
    args = torch_pytree.tree_map(lambda one: numbers.get(type(one), one), args)
    found = None if packet is None else internals.on_meta(packet, args, kwargs)
    for one in found if isinstance(found, (list, tuple)) else (found,):
        if isinstance(one, torch.Tensor):
            yield one.dtype


def _is_cast_after(func: Any) -> bool:
    """Test for an op that computes as without `out=`, and then casts."""
    return torch.Tag.pointwise in func.tags or f"aten.{_name(func)}" in facts.CASTS_TO_OUT


def _name(func: Any) -> str:
    return func._schema.name.rpartition("::")[2]
