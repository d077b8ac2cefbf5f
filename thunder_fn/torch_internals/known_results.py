"""Remembered results of ops on fake tensors: a fake tensor is no more than its dtype, sizes,
strides and device.

PyTorch remembers it too (`FakeTensorMode.cache`), but looks at each tensor anew to ask, which took
a third of a capture's time. Here a tensor is looked at once, and has a `Layout` from then on.
"""

# Private names are what this package is about, and PyTorch's stubs leave many of them out.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_fn.torch_internals.modes import only_memory
from thunder_fn.torch_internals.traits import traits_of

MAXSIZE = 2**16
"""The number of results that are remembered at a time."""

_ATTRIBUTE = "_thunder_fn_layout"
_NUMBERS = (int, float, bool, complex)
_PLAIN = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All that there is to a fake tensor. The same object for the same layout, so that it is
    compared by identity.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Result:
    """One tensor that an op gives: its layout, and which one of the op's tensors it is a view
    of, if it is one.
    """

    layout: Layout
    viewed: int | None


@dataclass(frozen=True, slots=True)
class Question:
    """A question to an op: a key, and the tensors in it."""

    key: Any
    tensors: list[FakeTensor]


class _Unknown(Exception):
    """An argument says more than types and numbers do."""


_layouts: dict[Any, Layout] = {}
_results: dict[Any, tuple[type | None, tuple[_Result, ...]]] = {}


def remembered() -> list[Any]:
    """The results that are remembered now."""
    return list(_results)


def forget() -> None:
    """Remember nothing any more."""
    _results.clear()
    _layouts.clear()


def question(op: Any, args: Any, kwargs: Any) -> Question | None:
    """The question to an op; None if there is no tensor, or if it has symbols or tensors whose
    values are known.
    """
    if not isinstance(op, OpOverload) or op.namespace != "aten" or traits_of(op).written:
        return None
    tensors: list[FakeTensor] = []
    try:
        named = _key(tuple(kwargs.items()), tensors) if kwargs else ()
        key = op, torch.get_default_dtype(), _key(args, tensors), named
    except _Unknown:
        return None
    return Question(key, tensors) if tensors else None


def _key(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            tensors.append(value)
            found.append(_layout_of(value))
        elif kind is Layout:
            found.append(value)
        elif kind is list or kind is tuple:
            found.append(_key(value, tensors))
        elif kind in _PLAIN:
            found.append((kind, value) if kind in _NUMBERS else value)
        else:
            raise _Unknown
    return tuple(found)


def _layout_of(fake: FakeTensor) -> Layout:
    known = fake.__dict__.get(_ATTRIBUTE)
    if known is not None:
        return known
    if fake.constant is not None or fake.requires_grad or fake.layout is not torch.strided:
        raise _Unknown
    if fake.is_conj() or fake.is_neg() or fake._is_zerotensor() or fake._has_symbolic_sizes_strides:
        raise _Unknown
    shape, offset = tuple(fake.shape), int(fake.storage_offset())
    found = the_layout(fake.dtype, shape, fake.stride(), offset, fake.fake_device)
    setattr(fake, _ATTRIBUTE, found)
    return found


def the_layout(*parts: Any) -> Layout:
    """The layout of this dtype, shape, strides, offset and device."""
    return _layouts.setdefault(parts, Layout(*parts))


def layout_of(fake: torch.Tensor) -> Layout | None:
    """The layout of a fake tensor; None if it has symbols, bits or a known value."""
    try:
        return _layout_of(fake) if type(fake) is FakeTensor else None
    except _Unknown:
        return None


def layouts_of_results(op: Any, args: Any, kwargs: Any) -> tuple[Layout, ...] | None:
    """The layouts of an op's results, from memory: its arguments have layouts for tensors.

    None if they are not known.
    """
    try:
        named = _key(tuple(kwargs.items()), []) if kwargs else ()
        known = _results.get((op, torch.get_default_dtype(), _key(args, []), named))
    except _Unknown:
        return None
    return None if known is None else tuple(result.layout for result in known[1])


def fake_of_layout(mode: FakeTensorMode, layout: Layout) -> FakeTensor:
    """A new fake tensor of a layout."""
    with only_memory():
        return _made(mode, _Result(layout, None), [])


def answer(mode: FakeTensorMode, asked: Question) -> Any:
    """New tensors of the op's known results; None if they are not known."""
    known = _results.get(asked.key)
    if known is None:
        return None
    kind, results = known
    made = [_made(mode, result, asked.tensors) for result in results]
    return made[0] if kind is None else kind(made)


def _made(mode: FakeTensorMode, result: _Result, tensors: list[FakeTensor]) -> FakeTensor:
    layout = result.layout
    elem = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    if result.viewed is None and layout.offset:
        size = layout.offset + elem.untyped_storage().nbytes() // elem.itemsize
        elem = torch.empty(size, dtype=layout.dtype, device="meta")
        elem = elem.as_strided(layout.shape, layout.stride, layout.offset)
    if result.viewed is not None:
        elem.set_(
            tensors[result.viewed].untyped_storage(), layout.offset, layout.shape, layout.stride
        )
    made = fake_around(mode, elem, layout.device)
    setattr(made, _ATTRIBUTE, layout)
    return made


_attributes: dict[torch.device, dict[str, Any]] = {}


def fake_around(mode: FakeTensorMode, elem: torch.Tensor, device: torch.device) -> FakeTensor:
    """`FakeTensor(mode, elem, device)`, with the attributes of the first one of the device: making
    them anew takes most of its time.
    """
    known = _attributes.get(device)
    if known is None:
        made = FakeTensor(mode, elem, device)
        _attributes[device] = {**vars(made), "fake_mode": None}
        return made
    made = torch.Tensor._make_subclass(
        FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(known, fake_mode=mode)
    return made


def remember(asked: Question, given: Any) -> None:
    """Remember the results of an op, if they are tensors, each new or a view of an argument."""
    kind = type(given) if type(given) in (list, tuple) else None
    values = [given] if kind is None else list(given)
    if not values or not all(type(value) is FakeTensor for value in values):
        return
    try:
        layouts = [_layout_of(value) for value in values]
    except _Unknown:
        return
    storages = [tensor.untyped_storage()._cdata for tensor in asked.tensors]
    made_in = [value.untyped_storage()._cdata for value in values]
    new = [storage for storage in made_in if storage not in storages]
    if len(set(new)) < len(new) or any(
        value is tensor for value in values for tensor in asked.tensors
    ):
        return
    viewed = [storages.index(storage) if storage in storages else None for storage in made_in]
    if any(layout.offset for layout, source in zip(layouts, viewed, strict=True) if source is None):
        return
    if len(_results) >= MAXSIZE:
        forget()
    _results[asked.key] = kind, tuple(map(_Result, layouts, viewed))
