"""C++ guards, and the global state that they look at."""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards, dict_version

from thunder_fn.torch_internals.modes import (
    default_device,
    dispatch_modes,
    function_modes,
    isolated,
)
from thunder_fn.torch_internals.settings import settings, settings_kept


def tensor_guard(
    tensors: Sequence[torch.Tensor], layouts: Sequence[Any] = ()
) -> Callable[..., bool]:
    """A C++ check that tensors are like these in class, dtype, sizes, strides, device and
    requires_grad.

    It holds no reference to them. It is False where one tensor is passed twice. If a layout is
    given, with a `shape` that has symbols in it, these sizes are free, and so are the tensor's
    strides.
    """
    if not any(layouts):
        return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    sizes: Any = [
        [
            size if isinstance(size, int) else None
            for size in (tensor.shape if layout is None else layout.shape)
        ]
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    strides: Any = [
        list(tensor.stride()) if layout is None else [None] * tensor.dim()
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


_OBJECTS_HAVE_VERSIONS = sys.version_info[:3] != (3, 13, 0)
"""Python 3.13.0 writes attributes into the object itself, and the version of its `__dict__`
stays (cpython#125608).
"""


def dict_guard(
    dicts: Sequence[dict[Any, Any]], of_objects: Sequence[dict[Any, Any]] = ()
) -> Callable[[], bool]:
    """A check that nobody has changed any of these dicts. To assign the value that is there already
    is no change.

    Args:
        dicts: dicts that are no object's `__dict__`.
        of_objects: those that are.
    """
    if _OBJECTS_HAVE_VERSIONS:
        dicts, of_objects = (*dicts, *of_objects), ()
    filled, empty = [value for value in dicts if value], [value for value in dicts if not value]
    versions = [*map(dict_version, filled)]
    if not of_objects:
        return lambda: not any(empty) and [*map(dict_version, filled)] == versions
    held = [(value, [*value], [*value.values()]) for value in of_objects]
    same = operator.is_

    def match() -> bool:
        if any(empty) or [*map(dict_version, filled)] != versions:
            return False
        return all(
            [*value] == names and all(map(same, value.values(), values))
            for value, names, values in held
        )

    return match


def global_state_guard() -> Callable[[], bool]:
    """A C++ check that grad mode, autocast, default dtype, determinism and thread count are as
    they are now.
    """
    return GlobalStateGuard().check


def attention_kernels() -> tuple[Any, ...]:
    """The kernels that `scaled_dot_product_attention` may use, as `sdpa_kernel` says, in the order
    in which it asks them.
    """
    _put_in_order()
    return _attention_kernels()


@functools.cache
def _put_in_order() -> None:
    """Let PyTorch put the kernels of attention in the order of this GPU, now or when CUDA starts.

    It does so at the first call of one in a process: a traced function would seem to change it.
    """
    if torch.backends.cuda.is_built():
        torch.cuda._lazy_call(_choose_a_kernel)


def _choose_a_kernel() -> None:
    with isolated():
        query = torch.empty(0, 1, 8, 8, device="cuda")
        torch._fused_sdp_choice(query, query, query)


def _attention_kernels() -> tuple[Any, ...]:
    of = torch._C
    enabled = (
        of._get_flash_sdp_enabled(),
        of._get_mem_efficient_sdp_enabled(),
        of._get_math_sdp_enabled(),
    )
    return (*enabled, of._get_cudnn_sdp_enabled(), *of._get_sdp_priority_order())


_KERNELS = _attention_kernels()


def global_state() -> tuple[str, tuple[Any, ...]]:
    """The state that changes the meaning of a PyTorch program: flags as text (all that the guard
    checks but threads), and modes.
    """
    text = _text(str(GlobalStateGuard().__getstate__()))
    if (kernels := attention_kernels()) != _KERNELS:
        text = f"{text}, attention_kernels={kernels}"
    return text, kinds_of_modes()


def kinds_of_modes() -> tuple[Any, ...]:
    """The active torch function modes: their classes, and their devices or identities."""
    return tuple((type(mode), str(getattr(mode, "device", id(mode)))) for mode in function_modes())


def flags() -> Mapping[str, Any]:
    """The flags that change the meaning of a PyTorch program, by name: all that the guard checks
    but threads.
    """
    return _flags(str(GlobalStateGuard().__getstate__()))


def flags_kept() -> Callable[[], None]:
    """Make a function that sets the grad mode, default dtype, determinism and autocast as they are
    now.
    """
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    mode = torch.get_deterministic_debug_mode()
    forward, caching = torch._C._is_fwd_grad_enabled(), torch.is_autocast_cache_enabled()
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]

    def put_back() -> None:
        torch._C._set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward)
        torch.set_default_dtype(dtype)
        torch.set_deterministic_debug_mode(mode)
        torch.set_autocast_cache_enabled(caching)
        for kind, enabled, lower in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, lower)

    return put_back


def state() -> Mapping[str, Any]:
    """The flags, kernels and modes that change the meaning of a PyTorch program, by name."""
    modes = {"torch function modes": kinds_of_modes(), "torch dispatch modes": dispatch_modes()}
    _put_in_order()
    return {**settings(), **flags(), **modes}


def state_kept() -> Callable[[], None]:
    """Make a function that sets flags and the default device as they are now, and closes scopes
    that are open by then.

    A graph of Dynamo opens scopes by calls, such as `_grad_increment_nesting()`, and closes them by
    others, which an error keeps it from.
    """
    _put_in_order()
    put_flags_back, put_settings_back = flags_kept(), settings_kept()
    depth, is_dual, nesting = _depth(), _has_dual_level(), _autocast_nesting()
    device, modes = default_device(), dispatch_modes()

    def put_back() -> None:
        if default_device() != device:
            torch.set_default_device(device)
        for _ in dispatch_modes()[len(modes) :]:
            torch._C._pop_torch_dispatch_stack(None)
        if _depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if _has_dual_level() and not is_dual:
            torch._C._exit_dual_level(level=0)
        for _ in range(_autocast_nesting() - nesting):
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        put_flags_back()
        put_settings_back()

    return put_back


def _depth() -> int:
    return torch._C._functorch.get_dynamic_layer_stack_depth()


def _has_dual_level() -> bool:
    """Test for a level of forward mode, of which PyTorch has one at a time."""
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:
        return True
    return False


def _autocast_nesting() -> int:
    """The number of autocast regions around what runs now."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@functools.lru_cache(maxsize=256)
def _flags(state: str) -> Mapping[str, Any]:
    known = json.loads(state)
    autocast = known.pop("autocast_state")
    found = {name: value for name, value in sorted(known.items()) if name != "num_threads"}
    return found | ({"autocast": autocast} if any(autocast["enabled"]) else {})


@functools.lru_cache(maxsize=256)
def _text(state: str) -> str:
    return ", ".join(f"{name}={value}" for name, value in _flags(state).items())
