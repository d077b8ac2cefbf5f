"""Results that lie in the memory of an argument or of a tensor from outside, and their places in
it.

A trace has values and no memory. Most results that are views of an input in eager mode are views
in the trace too. Others are not: views with a conjugate or negative bit, `as_strided`, and views of
what the function writes to. For each result an `Alias` says how to take it of the real tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.overlaps import overlaps
from thunder_fn.capture.recorder import Recorder
from thunder_fn.ir.symbols import bind, binders, compute, symbols_in
from thunder_fn.ir.trace import Expr, Var, as_dim


@dataclass(frozen=True, slots=True)
class Alias:
    """A result, by position, that shows memory of an input of the trace, by index, or of a
    closed-over tensor.

    It has sizes, strides, and an offset from the beginning of that tensor. The unit of the offset
    is an element of the result; a real number, if one of them is complex and the other is not.
    `bits` are the ops that make the result of what lies in memory. `is_written`: the function
    writes to the source. `is_of_result`: the source is another result, by position, with the
    strides `within`; or with the same layout, if that is None. `is_apart`: the two meet over a
    `detach` or the like, so that autograd gives each a history of its own.
    """

    result: int
    source: int | torch.Tensor
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    bits: tuple[Any, ...] = ()
    is_written: bool = True
    is_of_result: bool = False
    within: tuple[Any, ...] | None = None
    is_apart: bool = False

    @property
    def is_symbolic(self) -> bool:
        """Test whether some of the numbers are expressions."""
        numbers = *self.size, *self.stride, self.offset, *(self.within or ())
        return any(isinstance(number, Expr) for number in numbers)

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Take the result as a view of the source."""
        if self.is_of_result and self.within is None:
            return functools.reduce(lambda value, view: view(value), self.bits, source)
        for view in internals.bits_in_memory(source):
            source = view(source)
        memory = internals.memory_as(source, self.dtype)
        first = memory.storage_offset() + self.offset
        if self.dtype.is_complex and not memory.is_complex():
            size, stride = (*self.size, 2), (*(2 * step for step in self.stride), 1)
            found = torch.view_as_complex(memory.as_strided(size, stride, first))
        else:
            found = memory.as_strided(self.size, self.stride, first)
        for view in self.bits:
            found = view(found)
        return found

    def in_place_of(self, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Take the result as a view of the source, with the history of its value."""
        if not self.is_apart:
            return self.of(source)
        return with_memory(value, self.of(source.detach()))

    def of_result(self, source: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Take the result as a view of the source, or return its value if an executor has laid the
        source out in its own way.
        """
        return self.of(source) if self.within in (None, source.stride()) else value

    def among(self, variables: Sequence[Var], *values: Any) -> Alias:
        """Return the alias with numbers in place of expressions over the symbols that the variables
        bind.
        """
        known = bind(variables, values)
        numbers: Callable[[Sequence[Any]], tuple[Any, ...]] = lambda items: tuple(
            compute(item, known) if isinstance(item, Expr) else item for item in items
        )
        return dataclasses.replace(
            self,
            size=numbers(self.size),
            stride=numbers(self.stride),
            offset=numbers([self.offset])[0],
            within=self.within and numbers(self.within),
        )


def with_memory(value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the history of one value and the memory of another that equals it."""
    if not value.requires_grad:
        return memory
    value.data = memory
    return value


def aliases_of(
    recorder: Recorder,
    results: Sequence[Any],
    tracers: Sequence[torch.Tensor],
    written: Sequence[int | torch.Tensor],
) -> Iterator[Alias]:
    """Find results that show memory of arguments and of tensors from outside.

    Of an expanded tensor autograd gives each element of a view by its place in memory the mean of
    the gradients there, so that no view is taken.
    """
    if recorder.outer is not None:
        return
    bound = binders(recorder.inputs).keys()
    targets = [
        (target, tracers[target] if isinstance(target, int) else recorder.lift(target))
        for target in written
    ]
    changed = {id(tracer) for _, tracer in targets}
    memories = {
        internals.storage_id(internals.inner_fake(tracer)): (source, tracer)
        for source, tracer in reversed(recorder.sources(tracers))
        if id(tracer) not in changed
    }
    with internals.no_torch_function():
        largest = _largest_views(results, bound)
    for place, leaf in enumerate(results):
        if not isinstance(leaf, internals.Tracer):
            continue
        with internals.no_torch_function():
            found = [
                _of_written(recorder, place, leaf, target, tracer)
                for target, tracer in targets
                if leaf is not tracer and _memory(tracer) in recorder.history.linked(_memory(leaf))
            ]
            value = internals.inner_fake(leaf)
            source, tracer = memories.get(internals.storage_id(value), (0, leaf))
            if not found and tracer is not leaf and not (leaf.requires_grad and overlaps(tracer)):
                found.append(_in_memory(place, value, source, internals.inner_fake(tracer)))
            if not found:
                found.append(_of_result(place, value, largest, bound))
        for alias in filter(None, found):
            if set(symbols_in((*alias.size, *alias.stride, alias.offset))) <= bound:
                yield alias


def _of_written(
    recorder: Recorder,
    place: int,
    leaf: torch.Tensor,
    target: int | torch.Tensor,
    tracer: torch.Tensor,
) -> Alias | None:
    """Find the alias of a result that lies in the memory of a tensor that is written to."""
    if isinstance(target, int):
        var = recorder.inputs[target]
    else:
        var = next(var for tensor, _, var in recorder.lifted() if tensor is target)
    given = next(fake for fake, known in recorder.fakes() if known == var)
    views = recorder.history.views_to(leaf, tracer)
    if views is None or overlaps(given):
        return None
    whole, *_, value = internals.laid_out_as(views, given)
    alias = _in_memory(place, value, target, whole, is_written=True)
    return alias and dataclasses.replace(alias, is_apart=len(views) > 1)


def _in_memory(
    place: int,
    value: torch.Tensor,
    source: int | torch.Tensor,
    whole: torch.Tensor,
    *,
    is_written: bool = False,
) -> Alias | None:
    """Find the alias of a result that lies in the memory of a source, if both are laid out as in
    eager mode.
    """
    offset = _offset(value, whole)
    if offset is None:
        return None
    size, stride = tuple(map(as_dim, value.shape)), tuple(map(as_dim, value.stride()))
    bits = internals.bits_in_memory(value)
    return Alias(place, source, size, stride, offset, value.dtype, bits, is_written)


def _largest_views(results: Sequence[Any], bound: Set[Any]) -> dict[int, tuple[int, torch.Tensor]]:
    """For each memory, by its id, the result that shows most of it, with its position."""
    found = dict[int, tuple[int, torch.Tensor]]()
    for place, leaf in enumerate(results):
        if not isinstance(leaf, internals.Tracer):
            continue
        value = internals.inner_fake(leaf)
        memory = internals.storage_id(value)
        if memory not in found or _extent(value, bound) > _extent(found[memory][1], bound):
            found[memory] = place, value
    return found


def _extent(value: torch.Tensor, bound: Set[Any]) -> tuple[Any, bool]:
    """Return the number of bytes that a tensor fills without a gap (0 if unknown), and whether it
    has no conjugate or negative bit.
    """
    span = _span(value, bound)
    is_full = span is not None and bool(value.numel() * value.itemsize == span[1] - span[0])
    size = span[1] - span[0] if span is not None and is_full else 0
    return size, not internals.bits_in_memory(value)


def _span(value: torch.Tensor, bound: Set[Any]) -> tuple[Any, Any] | None:
    """Return the bytes of a tensor in its memory, None if a size was found in data. To compare
    symbols is a decision, of which the trace has a constraint.
    """
    numbers = *value.shape, *value.stride(), value.storage_offset()
    is_known = set(symbols_in(tuple(map(as_dim, numbers)))) <= bound
    return internals.byte_range(value) if is_known else None


def _of_result(
    place: int,
    value: torch.Tensor,
    largest: dict[int, tuple[int, torch.Tensor]],
    bound: Set[Any],
) -> Alias | None:
    """Find the alias of a result that lies in the memory of another result."""
    other, whole = largest[internals.storage_id(value)]
    if other == place or internals.bits_in_memory(whole):  # the program's value has no bits
        return None
    if _layout_in_memory(whole) == _layout_in_memory(value):
        bits = internals.bits_in_memory(value)
        alias = Alias(place, other, (), (), 0, value.dtype, bits, is_written=False)
        return dataclasses.replace(alias, is_of_result=True) if bits else None
    spans = _span(whole, bound), _span(value, bound)
    if spans[0] is None or spans[1] is None or not _extent(whole, bound)[0]:
        return None
    is_inside = spans[0][0] <= spans[1][0] and spans[1][1] <= spans[0][1]
    alias = _in_memory(place, value, other, whole) if is_inside else None
    within = tuple(map(as_dim, whole.stride()))
    return alias and dataclasses.replace(alias, is_of_result=True, within=within)


def _layout_in_memory(value: torch.Tensor) -> tuple[Any, ...]:
    """The memory, dtype, sizes, strides and offset of a value."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return internals.storage_id(value), value.dtype, *map(as_dim, numbers)


def _offset(result: torch.Tensor, source: torch.Tensor) -> Any:
    """The offset of a result in its source, in the unit of `Alias`; None if their elements do not
    fit.
    """
    is_pair = result.is_complex() and not source.is_complex()
    unit = result.itemsize // 2 if is_pair else result.itemsize
    if any(one.itemsize % unit for one in (result, source)):
        return None
    first: Callable[[torch.Tensor], Any] = lambda one: one.storage_offset() * (one.itemsize // unit)
    return as_dim(first(result) - first(source))


def _memory(tracer: torch.Tensor) -> int:
    return internals.storage_id(internals.memory_in(tracer))
