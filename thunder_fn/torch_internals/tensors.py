"""Questions about tensors that PyTorch answers by private names."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef

from thunder_fn.torch_internals.modes import no_torch_function, outside_torch_func

is_functorch_wrapped: Callable[[torch.Tensor], bool]
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Test whether the tensor is one of torch.func's wrappers."""


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the wrappers of torch.func."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


alive: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead
"""The tensor, or what the wrapper of a torch.func transform holds that has ended."""


def has_type(tensor: torch.Tensor) -> bool:
    """Test whether the tensor is described by its dtype, shape and device."""
    return tensor.layout is torch.strided and tensor.dtype not in _QUANTIZED


_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def is_plain(tensor: torch.Tensor) -> bool:
    """Test for a tensor of the common kind, for a quick look."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


PROPERTIES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        name: getattr(torch.Tensor, name)
        for name in ("storage_offset", "is_pinned", "is_shared", "is_inference", "_is_view")
    },
    **{
        name: getattr(torch.Tensor, name).__get__
        for name in ("is_leaf", "output_nr", "retains_grad")
    },
    "grad_fn": lambda tensor: None if tensor.grad_fn is None else tensor.grad_fn.name(),
    "grad_dtype": lambda tensor: getattr(tensor, "grad_dtype", None),
    "_backward_hooks": lambda tensor: not tensor._backward_hooks,
    "_post_accumulate_grad_hooks": lambda tensor: not tensor._post_accumulate_grad_hooks,
}
"""Properties that no type says, and what a program may depend on of each."""

GRADS: tuple[Any, ...] = torch.Tensor.grad, torch.Tensor._grad
"""The properties by which one asks for a gradient, and below for a node of autograd's graph."""
GRAD_FNS: tuple[Any, ...] = torch.Tensor.grad_fn, torch.Tensor._grad_fn


OF_IMPLEMENTATION: tuple[Any, ...] = (
    *(getattr(torch.Tensor, name).__get__ for name in ("_version", "_cdata")),
    *(
        getattr(torch.Tensor, name)
        for name in ("const_data_ptr", "_typed_storage")
        if hasattr(torch.Tensor, name)
    ),
)
"""Properties of a tensor's memory: its place, and the number of writes to it."""


def bits_of(tensor: torch.Tensor) -> tuple[str, ...]:
    """The dispatcher's keys of a tensor that are no part of its type."""
    asked = (
        ("conj", tensor.is_conj()),
        ("neg", tensor.is_neg()),
        ("inference", tensor.is_inference()),
    )
    return tuple(name for name, is_so in (*asked, ("zero", tensor._is_zerotensor())) if is_so)


def bits_in_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The ops that make the tensor of what lies in its memory, or the other way around, by
    setting bits.
    """
    aten = torch.ops.aten
    bits = (aten._neg_view.default, tensor.is_neg()), (aten._conj.default, tensor.is_conj())
    return tuple(view for view, is_set in bits if is_set)


def memory_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View memory as elements of another dtype: as pairs of real numbers, or smaller ones.

    Elements that are smaller than those of the dtype stay what they are.
    """
    if tensor.is_complex() and not dtype.is_complex and tensor.itemsize == 2 * dtype.itemsize:
        return torch.view_as_real(tensor)
    if tensor.dtype == dtype or tensor.itemsize < dtype.itemsize:
        return tensor
    if tensor.itemsize > dtype.itemsize:
        tensor = tensor.as_strided((0,), (1,))
    return tensor.view(dtype)


def with_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor with the memory and the history of another, and no view of it."""
    return torch.ops.aten._unsafe_view.default(tensor, tensor.shape)


def bits_between(tensor: torch.Tensor, other: torch.Tensor) -> tuple[Any, ...]:
    """The ops that give a tensor the bits of another."""
    with no_torch_function():
        ours, others = bits_in_memory(tensor), bits_in_memory(other)
    return *(view for view in ours if view not in others), *(
        view for view in others if view not in ours
    )


weak_tensor: Callable[[torch.Tensor], Callable[[], torch.Tensor | None]] = TensorWeakRef
"""A reference to a tensor that does not keep it alive. PyTorch's, since Python's own ends when
C++ alone holds the tensor.
"""


class _Result(torch.autograd.Function):
    """An autograd function that makes a tensor the result of a computation that nobody follows."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.mark_dirty(*tensors)
        return tensors

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[None, ...]:  # type: ignore[override]
        return None, *(None for _ in cotangents)


def become_results(tensors: Iterable[torch.Tensor]) -> None:
    """Make the floating and complex tensors among these require grad and be no leaves: they may
    be changed in place. That counts as no write to them.
    """
    with torch.enable_grad(), outside_torch_func(), _disable_current_modes():
        chosen = [x for x in tensors if not x.requires_grad and is_inexact(x)]
        if chosen:
            before = tuple(x._version for x in chosen)
            _Result.apply(torch.empty(0, requires_grad=True), *chosen)
            torch._C._autograd._unsafe_set_version_counter(tuple(chosen), before)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Test for a tensor of floats or of complex numbers, which may have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_write_to_leaf(error: BaseException | None) -> bool:
    """Tell whether autograd refuses a write to a leaf that requires grad, or to a view of one."""
    return isinstance(
        error, RuntimeError
    ) and "leaf Variable that requires grad is being used in an in-place" in str(error)


def nodes_behind(roots: Iterable[Any]) -> set[Any]:
    """The nodes of autograd's graph that a backward from these reaches: themselves where
    something else leads to them.
    """
    pending, seen = [node for node in roots if node is not None], set[Any]()
    while pending:
        following = {edge for edge, _ in pending.pop().next_functions if edge is not None} - seen
        seen |= following
        pending += following
    return seen


def node_of(tensor: torch.Tensor) -> Any:
    """The node of autograd's graph that computed the tensor; None for a leaf."""
    with no_torch_function():
        return tensor.grad_fn


def is_leaf(tensor: torch.Tensor) -> bool | None:
    """Test for a leaf of autograd's graph; None for a view of which PyTorch refuses to tell, since
    it was taken without gradients and its base was changed with them.
    """
    with no_torch_function(), contextlib.suppress(RuntimeError):
        return tensor.is_leaf
    return None


def has_hooks(tensor: torch.Tensor) -> bool:
    """Test whether autograd calls a function of the user's for the gradient of a leaf."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf to whose `.grad` the node adds; None for other nodes."""
    return getattr(node, "variable", None)


def is_released(node: Any) -> bool:
    """Test whether a backward has freed the tensors that a node of autograd's graph saved."""
    names = [name for name in dir(node) if name.startswith("_raw_saved_")]
    try:
        for name in names:
            found = getattr(node, name)
            saved = found if isinstance(found, tuple) else (found,)
            if any(one.data is None and one.unpack_hook is None for one in saved):
                getattr(node, name.removeprefix("_raw"))  # None, if nothing was saved
    except RuntimeError as error:
        return "already been freed" in str(error)
    return False


def is_result_from_outside(node: Any) -> bool:
    """Test for a node of autograd's graph where the history of a tensor from `become_results`
    begins.
    """
    return isinstance(node, _Result._backward_cls)  # type: ignore[attr-defined]


def storage_id(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory share."""
    with torch._C.DisableTorchFunction():
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # a wrapper of torch.func
            return innermost(tensor).untyped_storage()._cdata


def shares_memory(
    a: torch.Tensor, b: torch.Tensor, memory: Callable[[torch.Tensor], int] = storage_id
) -> bool:
    """Test whether two tensors have a storage in common, and ranges in it that overlap. Ranges
    whose numbers are symbols do. `memory` gives the id of a tensor's storage.
    """
    with no_torch_function():
        if memory(a) != memory(b) or 0 in (*a.shape, *b.shape):
            return False
        one, other = span(a), span(b)
        return one is None or other is None or (one[0] < other[1] and other[0] < one[1])


def memory_watch(tensor: torch.Tensor) -> Callable[[], bool]:
    """A question: does any tensor still have the memory of this one? It does not keep the memory
    alive.
    """
    with torch._C.DisableTorchFunction():
        reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


def last_offset(sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """The offset of the last element of a tensor in this layout, from its first."""
    return sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def extent(sizes: Sequence[Any], strides: Sequence[Any]) -> Any:
    """The number of elements from the first to the last one, both included, in this layout."""
    return 0 if 0 in sizes else 1 + last_offset(sizes, strides)


def span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first byte of a tensor in the storage, and the one after the last; None if some of its
    numbers are symbols.
    """
    numbers: list[Any] = [*tensor.shape, *tensor.stride(), tensor.storage_offset()]
    return byte_range(tensor) if all(type(number) is int for number in numbers) else None


def byte_range(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The first byte of a tensor in the storage, and the one after the last, maybe symbols."""
    first: Any = tensor.storage_offset()
    end = first + 1 + last_offset(tensor.shape, tensor.stride())
    return first * tensor.itemsize, end * tensor.itemsize


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Test for a parameter of a lazy module that has not been called yet."""
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def is_batched(value: Any) -> bool:
    """Test for a tensor of a vmap: torch.func's, or the older one behind
    `torch.autograd.grad(is_grads_batched=True)`.
    """
    return is_legacy_batched(value) or (
        isinstance(value, torch.Tensor) and is_functorch_wrapped(value)
    )


def is_legacy_batched(value: Any) -> bool:
    """Test for a tensor of the vmap behind `torch.autograd.grad(is_grads_batched=True)`, which runs
    below autograd: what requires grad is inside of it.
    """
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data whose `_version` is that of `tensor` for ever: a detached alias that
    let go of the memory.
    """
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def any_followed(tensors: Iterable[torch.Tensor]) -> bool:
    """Test whether a derivative of a computation with the tensors may be taken."""
    return torch.is_grad_enabled() and any(map(is_followed, tensors))


def is_followed(tensor: torch.Tensor) -> bool:
    """Test whether autograd, or a transform of torch.func at some level, records computations with
    the tensor.

    In forward mode each tensor of a level counts: whether it has a tangent at a level further out
    cannot be asked.
    """
    if forward_ad._current_level >= 0:
        is_wrapped = is_functorch_wrapped(tensor)
        if is_wrapped or torch._VF._unpack_dual(tensor, level=0)[1] is not None:
            return True
    while not tensor.requires_grad:
        if not is_functorch_wrapped(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def is_kept_by_autograd(tensor: torch.Tensor) -> bool:
    """Test whether something besides Python holds the very tensor, as a graph does that saved
    it.
    """
    return tensor._use_count() != 1


def is_exclusive(tensor: torch.Tensor) -> bool:
    """Test whether no other tensor, array or view shares the tensor's memory, as far as PyTorch
    knows.
    """
    storage = tensor.untyped_storage()
    # its own, and `storage` here
    return torch._C._storage_Use_Count(storage._cdata) == 2 and storage.resizable()


def uses_of(storage: torch.UntypedStorage) -> int:
    """The number of tensors and of others that hold a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def copies_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copies of tensors of one device, by few launches."""
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    made = [torch.empty_like(tensor) for tensor in tensors]
    kinds = dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]]()
    for to, source in zip(made, tensors, strict=True):
        for many, one in zip(kinds.setdefault(to.dtype, ([], [])), (to, source), strict=True):
            many.append(one)
    for to, source in kinds.values():
        torch._foreach_copy_(to, source)
    return made


def mark_non_differentiable(ctx: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Mark results of a node so, under torch.func too. Its batching rule hands over what stands
    for one example of a result, and autograd would look for that among the results.
    """
    from torch._functorch.autograd_function import CtxCustomSave

    marked = tuple(tensors)
    while isinstance(ctx, CtxCustomSave):
        level: int = ctx._pt_current_level
        is_batched = torch._C._functorch.is_batchedtensor
        marked = tuple(
            torch._C._functorch._unwrap_batched(x, level)[0] if is_batched(x) else x for x in marked
        )
        ctx = ctx._pt_inner_ctx
    ctx.mark_non_differentiable(*marked)
