"""Functionalization of one op, as FunctionalTensorMode does it.

What depends on the op alone is asked once. The dispatcher is left out where its kernel does no more
than unwrap.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from thunder_fn.torch_internals.known_results import layout_of
from thunder_fn.torch_internals.modes import FAKE, get_dispatch_mode
from thunder_fn.torch_internals.traits import Traits

_KEYS = torch._C.DispatchKey
_FUNCTIONALIZE = torch._C.DispatchKeySet(_KEYS.Functionalize)


def functionalized(cls: type, op: Any, args: Any, kwargs: Any, traits: Traits) -> Any:
    """A simple op on functional tensors of a class, its results wrapped again."""
    result = _on_fakes(op, args, kwargs) if traits.is_pure else NotImplemented
    if result is not NotImplemented:
        return _mapped(lambda value: wrapped(cls, torch._to_functional_tensor(value)), result)
    result = _by_kernel(op, args, kwargs)
    is_functional = torch._is_functional_tensor
    made = _mapped(lambda value: wrapped(cls, value) if is_functional(value) else value, result)
    is_view = (
        traits.has_aliases and bool(args) and not isinstance(args[0], (int, float, complex))
    )  # PyTorch takes conj of a number
    return return_and_correct_aliasing(op, args, kwargs, made) if is_view else made


class _NotPlain(Exception):
    """An argument is a tensor that has symbols or bits, or that is not functional."""


def _on_fakes(op: Any, args: Any, kwargs: Any) -> Any:
    """A pure op on the fake tensors in its arguments, as PyTorch's kernel calls it, without the way
    there through the dispatcher; NotImplemented where that would do more on its way.
    """
    fake_mode = get_dispatch_mode(FAKE)
    try:
        inner = tuple([_held(value, fake_mode) for value in args])
        named = {key: _held(value, fake_mode) for key, value in kwargs.items()}
    except _NotPlain:
        return NotImplemented
    if fake_mode is None:
        return NotImplemented
    torch._C._unset_dispatch_mode(FAKE)
    try:
        return fake_mode.__torch_dispatch__(op, (FakeTensor,), inner, named)
    finally:
        torch._C._set_dispatch_mode(fake_mode)


def _held(value: Any, mode: Any) -> Any:
    if isinstance(value, FunctionalTensor):
        fake = fake_in(value)
        if layout_of(fake) is None or fake.fake_mode is not mode:
            raise _NotPlain
        return fake
    if isinstance(value, torch.Tensor):
        raise _NotPlain
    return [_held(item, mode) for item in value] if type(value) in (list, tuple) else value


def fake_in(tensor: Any) -> Any:
    """The up-to-date tensor inside a functional one; replays pending view updates."""
    if torch._functionalize_has_data_mutation(tensor.elem):
        torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


def _by_kernel(op: Any, args: Any, kwargs: Any) -> Any:
    """PyTorch's kernel on what the functional tensors wrap."""
    inner, named = _unwrapped(args), {key: _unwrapped_one(value) for key, value in kwargs.items()}
    included = torch._C._dispatch_tls_local_include_set() | _FUNCTIONALIZE
    excluded = torch._C._dispatch_tls_local_exclude_set().remove(_KEYS.Functionalize)
    with torch._C._ForceDispatchKeyGuard(
        included, excluded - FunctionalTensor._extra_dispatch_keys
    ):
        before = torch._functionalize_enable_reapply_views(True)
        try:
            return op._op_dk(_KEYS.Functionalize, *inner, **named)
        finally:
            torch._disable_functionalization()
            torch._functionalize_enable_reapply_views(before)


def _unwrapped(values: Any) -> tuple[Any, ...]:
    return tuple([_unwrapped_one(value) for value in values])


def _unwrapped_one(value: Any) -> Any:
    if isinstance(value, FunctionalTensor):
        return value.elem
    return [_unwrapped_one(item) for item in value] if type(value) in (list, tuple) else value


def _mapped(wrap: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The results of an op, each tensor among them wrapped."""
    if isinstance(value, torch.Tensor):
        return wrap(value)
    if isinstance(value, (list, tuple)):
        found = [_mapped(wrap, item) for item in value]
        return found if isinstance(value, list) else tuple(found)  # of a named tuple, too
    return value


def wrapped(cls: type, elem: torch.Tensor) -> Any:
    """A functional tensor of a class, as `FunctionalTensor.__new__` makes it outside of inference
    mode.
    """
    keys = FunctionalTensor._extra_dispatch_keys & torch._C._dispatch_keys(elem)
    sizes = elem.shape, elem.stride(), elem.storage_offset()
    kind = elem.dtype, elem.layout, elem.device
    made = torch.Tensor._make_wrapper_subclass(
        cls, *sizes, None, *kind, False, elem.requires_grad, None, False, False, keys
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.elem = elem
    return made
