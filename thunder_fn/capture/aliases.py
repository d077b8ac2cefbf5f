"""Results that lie in the memory of an argument or of a tensor from outside, and their places in
it.

A trace has values and no memory. Most results that are views of an input in eager mode are views
in the trace too. Others are not: views with a conjugate or negative bit, `as_strided`, and views of
what the function writes to. For each result an `Alias` says how to take it of the real tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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
    writes to the source. `is_of_result`: the source is another result, by position, and has the
    same layout.
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

    @property
    def is_symbolic(self) -> bool:
        """Test whether some of the numbers are expressions."""
        return any(isinstance(number, Expr) for number in (*self.size, *self.stride, self.offset))

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """The result, as a view of the source."""
        if self.is_of_result:
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

    def among(self, variables: Sequence[Var], source: torch.Tensor, *values: Any) -> torch.Tensor:
        """The same with expressions over symbols, which the variables bind that have these
        values.
        """
        known = bind(variables, values)
        number: Callable[[Any], Any] = lambda item: (
            compute(item, known) if isinstance(item, Expr) else item
        )
        size, stride = tuple(map(number, self.size)), tuple(map(number, self.stride))
        return dataclasses.replace(self, size=size, stride=stride, offset=number(self.offset)).of(
            source
        )


def aliases_of(
    recorder: Recorder,
    results: Sequence[Any],
    tracers: Sequence[torch.Tensor],
    written: Sequence[int | torch.Tensor],
) -> Iterator[Alias]:
    """Find results that show memory of arguments and of tensors from outside.

    Of what the function writes to, they are found where that is contiguous. Elsewhere a write may
    leave values in another layout in the trace than in memory. Of an expanded tensor autograd gives
    each element of a view by its place in memory the mean of the gradients there, so that no view
    is taken.
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
                found.append(_of_unchanged(place, value, source, internals.inner_fake(tracer)))
            if not found:
                found.append(_of_result(place, value, results))
        for alias in found:
            if alias is not None:
                symbols = set(symbols_in((*alias.size, *alias.stride, alias.offset)))
                if symbols <= bound:
                    yield alias


def _of_written(
    recorder: Recorder,
    place: int,
    leaf: torch.Tensor,
    target: int | torch.Tensor,
    tracer: torch.Tensor,
) -> Alias | None:
    """A result in the memory of a written tensor."""
    whole = internals.inner_fake(tracer)
    bits = internals.bits_in_memory(leaf) or internals.bits_in_memory(tracer)
    if bits or not tracer.is_contiguous() or not whole.is_contiguous():
        return None
    values = recorder.history.way_to(leaf, tracer)
    # of the values, since a write leaves a value without the offset that the argument has
    offset = None if values is None else _offset(*values)
    if offset is None:
        return None
    size, stride = tuple(map(as_dim, leaf.shape)), tuple(map(as_dim, leaf.stride()))
    return Alias(place, target, size, stride, offset, leaf.dtype)


def _of_unchanged(
    place: int, value: torch.Tensor, source: int | torch.Tensor, whole: torch.Tensor
) -> Alias | None:
    """A result in the memory of a tensor that nothing is written to: both as fake tensors lie as
    in eager mode.
    """
    offset = _offset((value, whole))
    if offset is None:
        return None
    size, stride = tuple(map(as_dim, value.shape)), tuple(map(as_dim, value.stride()))
    bits = internals.bits_in_memory(value)
    return Alias(place, source, size, stride, offset, value.dtype, bits, is_written=False)


def _of_result(place: int, value: torch.Tensor, results: Sequence[Any]) -> Alias | None:
    """A result that is another one with a conjugate or negative bit."""
    bits = internals.bits_in_memory(value)
    for other, leaf in enumerate(results):
        if bits and isinstance(leaf, internals.Tracer):
            whole = internals.inner_fake(leaf)
            if not internals.bits_in_memory(whole) and _lies(whole) == _lies(value):
                kind = value.dtype, bits
                return Alias(place, other, (), (), 0, *kind, is_written=False, is_of_result=True)
    return None


def _lies(value: torch.Tensor) -> tuple[Any, ...]:
    """The place of a value in memory."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return internals.storage_id(value), value.dtype, *map(as_dim, numbers)


def _offset(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """The offset of a result in its source, in the unit that `Alias` has. A result lies in the
    second of the first pair; that lies where the first of the next pair is.

    Returns:
        None where their elements do not fit.
    """
    result, source = pairs[0][0], pairs[-1][1]
    is_pair = result.is_complex() and not source.is_complex()
    unit = result.itemsize // 2 if is_pair else result.itemsize
    if any(one.itemsize % unit for pair in pairs for one in pair):
        return None
    first: Callable[[torch.Tensor], Any] = lambda one: one.storage_offset() * (one.itemsize // unit)
    return as_dim(sum(first(here) - first(there) for here, there in pairs))


def _memory(tracer: torch.Tensor) -> int:
    return internals.storage_id(internals.memory_in(tracer))
