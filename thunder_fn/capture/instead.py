"""What stands for functions of PyTorch that write to memory of their own or read values, which tracers do not have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_fn import torch_internals as internals
from thunder_fn.capture.lookasides import divert
from thunder_fn.capture.number_arithmetic import Sym
from thunder_fn.capture.recorder import Recorder, current
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.errors import UnsupportedCall, located
from thunder_fn.packed import CELLS, is_packed, pack_padded_sequence, packed_rnn, pad_packed_sequence


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


def dropout(x: Tensor, p: Any, train: bool) -> Tensor:
    """PyTorch's; where it drops nothing it is its argument, of which PyTorch's rule for symbolic sizes makes a copy."""
    return torch.dropout(x, p, train) if train and p != 0 else x


def one_hot(x: Tensor, num_classes: Any = -1) -> Tensor:
    """By a scatter, which refuses classes that there are not; PyTorch's own looks at values, or gives them rows of zeros."""
    if (isinstance(num_classes, int) and num_classes <= 0) or x.dtype != torch.int64:
        return torch.nn.functional.one_hot(x, num_classes)
    zeros = torch.zeros((*x.shape, num_classes), dtype=torch.int64, device=x.device)
    return zeros.scatter(-1, x.unsqueeze(-1), 1)


def tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False, **options: Any
) -> Tensor:
    """`torch.tensor`; where some of the numbers are symbols or in tensors, of one equation for each."""
    shape, numbers = _nested(data)
    if not _are_traced(data, numbers):
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad, **options)
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, map(_dtype_of, numbers))
    place = torch.get_default_device() if device is None else device
    with torch.no_grad():
        parts = [
            number.to(dtype=dtype, device=place)
            if isinstance(number, Tensor)
            else torch.full((), number, dtype=dtype, device=device)
            for number in numbers
        ]
        made = torch.stack(parts).reshape(shape)
    return made.requires_grad_(requires_grad)


def as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    """`torch.as_tensor`, which makes a tensor of numbers."""
    made = tensor if _are_traced(data, _nested(data)[1]) else torch.as_tensor
    return made(data, dtype=dtype, device=device)


def _are_traced(data: Any, numbers: list[Any]) -> bool:
    """A few numbers, some of which a trace does not know."""
    is_traced = any(isinstance(number, (Tensor, *Sym)) for number in numbers)
    return is_traced and len(numbers) <= MAX_LISTED and not isinstance(data, Tensor)


def _dtype_of(number: Any) -> torch.dtype:
    if isinstance(number, Tensor):
        return number.dtype
    if isinstance(number, (bool, torch.SymBool)):
        return torch.bool
    return torch.get_default_dtype() if isinstance(number, (float, torch.SymFloat)) else torch.int64


def _nested(data: Any) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the numbers of nested lists; no numbers where they are not nested evenly, or are no numbers."""
    if isinstance(data, (bool, int, float, *Sym)):
        return (), [data]
    if isinstance(data, Tensor):
        return tuple(data.shape), [data] if data.dim() == 0 else []
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


def _recurrent(cell: str) -> Callable[..., Any]:
    original = CELLS[cell]

    def instead(*args: Any) -> Any:
        """Of packed sequences, as ops that read their lengths when they run. Autocast casts inside of PyTorch's only."""
        recorder = current()
        if is_packed(cell, args):
            is_cast = torch.is_autocast_enabled(args[0].device.type)
            return original(*args) if is_cast else packed_rnn(cell, *args)
        if recorder is not None and recorder.symbolic and len(args) > 2:
            return _shaped(args[1], *_layer_by_layer(original, *args))
        return original(*args)

    return instead


def _layer_by_layer(
    original: Callable[..., Any],
    x: Tensor,
    state: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """What a recurrent function gives. PyTorch composes it by Python code for symbolic sizes, which forgets to drop."""
    if num_layers == 1 or not train or dropout == 0:
        return original(x, state, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    states, count, width = tuple(state), len(weights) // num_layers, 2 if bidirectional else 1
    if isinstance(state, Tensor):
        states = (state,)
    x, finals = x.transpose(0, 1) if batch_first else x, list[tuple[Tensor, ...]]()
    for layer in range(num_layers):
        first = tuple(one[layer * width : (layer + 1) * width] for one in states)
        given = first[0] if isinstance(state, Tensor) else first
        own = weights[layer * count : (layer + 1) * count]
        x, *last = original(x, given, own, has_biases, 1, 0.0, train, bidirectional, False)
        finals.append(tuple(last))
        if layer < num_layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return (x.transpose(0, 1) if batch_first else x, *map(torch.cat, zip(*finals, strict=True)))


def _shaped(state: Any, x: Tensor, *finals: Tensor) -> tuple[Tensor, ...]:
    """The final states have the dims of the first: those of an LSTM come with one more out of PyTorch 2.11's Python code."""
    ndim = (state if isinstance(state, Tensor) else state[0]).ndim
    return (x, *(final if final.ndim == ndim else final.squeeze(1) for final in finals))


def _becoming(change: Callable[..., Any], view: Callable[..., Tensor]) -> Callable[..., Any]:
    def instead(x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
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


def _is_definite(constraint: Any, value: Tensor) -> Tensor:
    """The arguments of distributions are not validated."""
    return torch.ones(value.shape[:-2], dtype=torch.bool, device=value.device)


divert("positive definite", _is_definite)
divert("positive semidefinite", _is_definite)

REWRITTEN: dict[Any, Callable[..., Any]] = {
    torch.dropout: dropout,
    torch.nn.functional.one_hot: one_hot,
    **VIEWS_IN_PLACE,
    **dict.fromkeys((torch.as_strided, Tensor.as_strided), as_strided),
    Tensor.__deepcopy__: deepcopy,
    Tensor.register_hook: register_hook,
    Tensor.tolist: tolist,
    torch.as_tensor: as_tensor,
    torch.ctc_loss: ctc_loss,
    internals.PACK_PADDED_SEQUENCE: pack_padded_sequence,
    internals.PAD_PACKED_SEQUENCE: pad_packed_sequence,
    **{original: _recurrent(cell) for cell, original in CELLS.items()},
    torch.tensor: tensor,
}
