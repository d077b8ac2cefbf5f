"""What stands for functions of PyTorch that write to memory of their own or read values, which tracers do not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_fn import torch_internals as internals
from thunder_fn.capture.number_arithmetic import Sym
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import UnsupportedCall, located


def deepcopy(x: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy with the same `requires_grad`, as eager's."""
    if not x.is_leaf:
        raise RuntimeError("only graph leaves support deepcopy; call `.detach().clone()` instead")
    if id(x) not in memo:
        memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
    return memo[id(x)]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """PyTorch's, which writes lengths that are numbers into memory of its own. Reduction: 0 none, 1 mean, 2 sum."""
    if isinstance(input_lengths, Tensor) or isinstance(target_lengths, Tensor):
        return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    batch = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    labels = targets.to(batch.device, torch.int64)
    loss, _ = torch.ops.aten._ctc_loss(batch, labels, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        loss = torch.where(loss == float("inf"), 0.0, loss)
    if reduction == 1:
        lengths = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device)
        return (loss / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss if log_probs.dim() == 3 else loss.squeeze(0)


def tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False, **options: Any
) -> Tensor:
    """`torch.tensor`; where some of the numbers are symbols, of one equation for each."""
    shape, numbers = _nested(data)
    if not any(isinstance(number, Sym) for number in numbers) or len(numbers) > MAX_LISTED:
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **options)
    if dtype is None:
        is_float = any(isinstance(number, (float, torch.SymFloat)) for number in numbers)
        dtype = torch.get_default_dtype() if is_float else torch.int64
    made = torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers]).reshape(shape)
    return made.requires_grad_(requires_grad)


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which makes a tensor of numbers."""
    _, numbers = _nested(data)
    made = tensor if any(isinstance(number, Sym) for number in numbers) else torch.as_tensor
    return made(data, dtype=dtype, device=device)


def _nested(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the numbers of nested lists; no numbers where they are not nested evenly, or are no numbers."""
    if isinstance(data, (bool, int, float, *Sym)):
        return (), [data]
    if not isinstance(data, (list, tuple)) or not data:
        return (), []
    parts = [_nested(item) for item in data]
    shape, numbers = parts[0][0], [number for _, found in parts for number in found]
    is_even = all(inner == shape and found for inner, found in parts)
    return ((len(data), *shape), numbers) if is_even else ((), [])


MAX_LISTED = 64
"""Of how many elements `tolist` makes symbols."""


def can_be_listed(x: Tensor) -> bool:
    """A tensor of a few numbers, each of which can be a symbol."""
    sizes = [size if type(size) is int else math.inf for size in x.shape]
    return math.prod(sizes) <= MAX_LISTED and not x.dtype.is_complex and x.dtype != torch.bool


HAS_NUMBERS: dict[Any, Callable[[Tensor], bool]] = {
    Tensor.tolist: can_be_listed,
    Tensor.item: lambda x: not x.is_complex(),  # no symbol is a complex number
}
"""Whether the numbers in a tensor can be symbols, for the methods that ask for them."""


def tolist(x: Tensor) -> Any:
    """The numbers, each found in data."""
    return list(map(tolist, x.unbind(0))) if x.dim() else x.item()


def as_strided(x: Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> Tensor:
    """Of a view, taken of the tensor that has the memory: such a view of a view could not be changed."""
    recorder, base = current(), None if is_wrapped(x) else internals.base_of(x)
    if (
        recorder is None
        or base is None
        or not internals.have_one_memory(x, base)
        or _have_other_histories(recorder, x, base)
    ):
        return torch.as_strided(x, size, stride, storage_offset)
    return torch.as_strided(base, size, stride, x.storage_offset() if storage_offset is None else storage_offset)


def _have_other_histories(recorder: Recorder, view: Tensor, base: Tensor) -> bool:
    """Autograd follows one of two tracers and not the other."""
    first, second = recorder.var_of(view), recorder.var_of(base)
    if first is None or second is None or view.requires_grad != base.requires_grad:
        return True
    return recorder.history.is_stopped(first) != recorder.history.is_stopped(second)


def register_hook(x: Tensor, hook: Callable[[Tensor], Any]) -> Any:
    """For a backward inside the traced function. One that comes later runs a program, and that has no hooks.

    Raises:
        UnsupportedCall: the tensor's gradient would be asked for outside the traced function.
    """
    recorder = current()
    if recorder is not None and not is_wrapped(x) and _is_differentiated_outside(recorder, x):
        raise UnsupportedCall(
            located(
                "`register_hook` on a tensor whose gradient is computed after the traced function has ended",
                source=recorder.source,
                fix="Say what happens to the gradient with `custom_vjp` of the identity, or a `torch.autograd.Function`.",
            )
        )
    return Tensor.register_hook(x, hook)


def _is_differentiated_outside(recorder: Recorder, x: Tensor) -> bool:
    """Autograd goes from the tensor on to one that the traced function got from outside."""
    given = {var.index for var in recorder.inputs} | {constant.var.index for constant in recorder.constants}
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(x).node]
    seen = set(pending)
    while pending:
        node = pending.pop()
        var = recorder.var_of(node.variable) if hasattr(node, "variable") else None
        if internals.is_result_from_outside(node) or (var is not None and var.index in given):
            return True
        following = {edge for edge, _ in node.next_functions if edge is not None} - seen
        seen |= following
        pending += following
    return False


def _becoming(change: Callable[..., Any], view: Callable[..., Tensor]) -> Callable[..., Any]:
    def instead(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_wrapped(x) or (x.requires_grad and (x.is_leaf or not torch.is_grad_enabled())):
            return change(x, *args, **kwargs)
        with torch.enable_grad():
            internals.become(x, view(x, *args, **kwargs))
        return x

    return instead


_VIEWS = ("t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze", "as_strided")
VIEWS_IN_PLACE: dict[Any, Callable[..., Any]] = {
    change: _becoming(change, as_strided if name == "as_strided" else getattr(Tensor, name))
    for name in _VIEWS
    for change in (
        getattr(Tensor, f"{name}_"),
        getattr(torch, f"{name}_", None),
        getattr(torch.ops.aten, f"{name}_"),
        *(
            getattr(packet, overload)
            for packet in [getattr(torch.ops.aten, f"{name}_")]
            for overload in packet.overloads()
        ),
    )
    if change is not None
}
"""`x.transpose_(0, 1)` and its like: x becomes a view of the tensor that it was, of which others may be views too.

A plain tensor's views are told by strides. Those of a tracer are made again by their ops, which want it as it was.
"""


REWRITTEN: dict[Any, Callable[..., Any]] = {
    **VIEWS_IN_PLACE,
    **dict.fromkeys((torch.as_strided, Tensor.as_strided), as_strided),
    Tensor.__deepcopy__: deepcopy,
    Tensor.register_hook: register_hook,
    Tensor.tolist: tolist,
    torch.as_tensor: as_tensor,
    torch.ctc_loss: ctc_loss,
    torch.tensor: tensor,
}
