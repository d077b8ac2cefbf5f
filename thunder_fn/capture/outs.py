"""Calls with `out=`: what eager PyTorch resizes, keeps or refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.recorder import Recorder
from thunder_fn.errors import UnsupportedCall

Tensor = torch.Tensor

_FILLS: frozenset[Any] = frozenset((torch.arange, torch.linspace, torch.logspace, torch.range))
"""Functions that keep the shape of an `out=` with as many elements as they make."""
_PRODUCTS: frozenset[Any] = frozenset((torch.matmul, torch.linalg.matmul))


def write(recorder: Recorder, call: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function with `out=`, and give each `out=` the shape of the value in it."""
    outs, rest = _outs(kwargs["out"]), {key: kwargs[key] for key in kwargs if key != "out"}
    if func in _FILLS and _is_filled(call, func, args, rest, outs[0]):
        return outs[0]
    _check(recorder, func, args, rest, outs)
    if _loses_writes(func, args, outs[0]):
        result = call(torch.mul, (call(func, args, rest), 1), {"out": outs[0]})
    else:
        result = call(func, args, kwargs)
    for out in outs:
        _resize(recorder, out)
    return result


def _outs(value: Any) -> Sequence[Any]:
    """The tensors of an `out=`, which are one or several."""
    return value if isinstance(value, (tuple, list)) else (value,)


def _is_filled(call: Callable[..., Any], func: Any, args: Any, rest: Any, out: Tensor) -> bool:
    """Fill an `out=` that has as many elements as its function makes, in whatever shape."""
    if out.requires_grad or rest.get("dtype", out.dtype) != out.dtype:
        return False
    made = call(func, args, {**rest, "dtype": out.dtype, "device": out.device})
    if made.numel() != out.numel():
        return False
    out.copy_(made.reshape(out.shape))
    return True


def _loses_writes(func: Any, args: Any, out: Tensor) -> bool:
    """Test for a function that writes to `out=` through views which functionalization does not
    know: `kron`, and the product of a vector and a matrix.
    """
    if func is torch.kron:
        return True
    if func not in _PRODUCTS or len(args) != 2:
        return False
    return [one.dim() for one in args] == [1, 2] and args[0].dtype == out.dtype


def _check(recorder: Recorder, func: Any, args: Any, rest: Any, outs: Sequence[Any]) -> None:
    """Refuse to resize a view, or a tensor that was resized before: PyTorch resizes it in eager
    mode, beyond its base or with other strides in it. `normal` resizes nothing.
    """
    is_kept = func is torch.normal
    if not (is_kept or any(map(_is_view, outs))):
        return
    found = internals.on_meta(func, args, rest)
    for one, out in zip(_outs(found), outs, strict=False):
        if not isinstance(one, Tensor) or not (is_kept or _is_view(out)):
            continue
        if one.dim() != out.dim() or any(a != b for a, b in zip(one.shape, out.shape, strict=True)):
            what = f"`out=` is a view of the shape {tuple(out.shape)}, or was resized to it;"
            if is_kept:
                what = f"`out=` has the shape {tuple(out.shape)}, to which `normal` draws;"
            what, fix = f"{what} the result has {tuple(one.shape)}", "Use the result instead."
            raise UnsupportedCall(what, source=recorder.source, fix=fix)


def _is_view(out: Tensor) -> bool:
    if out.is_conj() or out.is_neg():
        return True
    if not isinstance(out, internals.Tracer):
        return False
    return internals.base_of(out) is not None or not internals.is_whole(internals.memory_in(out))


def _resize(recorder: Recorder, out: Any) -> None:
    """Give a tensor the shape that an op has given the value in it.

    Raises:
        UnsupportedCall: others show its memory, which eager PyTorch resizes under them; or it has
            a history, which is of the old shape, so that a gradient fails or is a sum.
    """
    if not isinstance(out, internals.Tracer):
        return
    with internals.no_torch_function():
        inner = internals.inner_fake(out)
        if inner.dim() == out.dim() and all(
            a is b or a == b for a, b in zip(inner.shape, out.shape, strict=True)
        ):
            return
    var = recorder.var_of(out)
    new = None if var is None else recorder.tracer_of(var)
    if new is None:
        return
    memory = internals.memory_in(out)
    is_alive, linked = internals.memory_watch(memory), recorder.history.others(memory)
    is_followed = out.requires_grad
    internals.become(out, new)
    del new, memory
    if is_alive():
        gc.collect()  # what PyTorch asks for the first time may leave tensors in cycles
    if is_followed or linked or is_alive():
        why = (
            "its history is of the old shape" if is_followed else "another tensor shows its memory"
        )
        what = f"`out=` is resized, and {why}"
        fix = "Use the result instead of `out=`, or give it the shape of the result."
        raise UnsupportedCall(what, source=recorder.source, fix=fix)
