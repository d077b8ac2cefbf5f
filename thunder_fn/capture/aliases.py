"""Results that lie in the memory of an argument or of a tensor from outside, and their places in
it.

A trace has values and no memory. Most results that are views of an input in eager mode are views
in the trace too. Others are not: views with a conjugate or negative bit, `as_strided`, and views of
what the function writes to. For each result an `Alias` says how to take it of the real tensor.
Results that have elements in common with one another are a `Joint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.capture.overlaps import number, overlaps, share_elements
from thunder_fn.capture.recorder import Recorder
from thunder_fn.capture.supported import is_wrapped
from thunder_fn.ir.symbols import bind, binders, compute, symbols_in
from thunder_fn.ir.trace import Expr, Var, as_dim


@dataclass(frozen=True, slots=True)
class Alias:
    """A result, by position, that shows memory of an input of the trace, by index, or of a
    closed-over tensor.

    It has sizes, strides, and an offset from the beginning of that tensor. The unit of the offset
    is an element of the result; a real number, if one of them is complex and the other is not.
    `bits` are the ops that make the result of what lies in memory. `is_written`: the function
    writes to the source. `is_apart`: the two meet over a `detach` or the like, so that autograd
    gives each a history of its own.
    """

    result: int
    source: int | torch.Tensor
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    bits: tuple[Any, ...] = ()
    is_written: bool = True
    is_apart: bool = False

    @property
    def is_symbolic(self) -> bool:
        """Test whether some of the numbers are expressions."""
        return any(isinstance(one, Expr) for one in (*self.size, *self.stride, self.offset))

    def of(self, source: torch.Tensor) -> torch.Tensor:
        """Take the result as a view of the source."""
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

    def with_numbers(self, number: Callable[[Any], Any]) -> Self:
        """Return the alias with other numbers, each of which is computed from the one it had."""
        return dataclasses.replace(
            self,
            size=tuple(map(number, self.size)),
            stride=tuple(map(number, self.stride)),
            offset=number(self.offset),
        )


@dataclass(frozen=True, slots=True)
class Joint:
    """Results, by position, that have elements in common in a memory which is no input's.

    `views` are the results as views of a memory with so many elements of a dtype; without them it
    is not known where they lie. `whole` is the place among them of one that fills this memory.
    """

    results: tuple[int, ...]
    views: tuple[Alias, ...] = ()
    count: Any = 0
    dtype: torch.dtype = torch.uint8
    whole: int | None = None

    @property
    def is_symbolic(self) -> bool:
        """Test whether some of the numbers are expressions."""
        return isinstance(self.count, Expr) or any(view.is_symbolic for view in self.views)

    def once(self, first: Sequence[int]) -> Joint:
        """Return the joint without results that are another one, given for each the first that it
        is.
        """
        kept = [place for place, one in enumerate(first) if place == one]
        return dataclasses.replace(
            self,
            results=tuple(self.results[place] for place in kept),
            views=tuple(self.views[place] for place in kept),
            whole=None if self.whole is None else kept.index(first[self.whole]),
        )

    def batched(self, size: Any) -> Joint:
        """Return the joint of so many examples, one behind the other."""
        count = self.count + self.count % 2  # complex numbers may lie among real ones
        bytes_of = count * self.dtype.itemsize
        views = (
            dataclasses.replace(
                view,
                size=(size, *view.size),
                stride=(bytes_of // view.dtype.itemsize, *view.stride),
            )
            for view in self.views
        )
        return dataclasses.replace(self, views=tuple(views), count=size * count)

    def with_numbers(self, number: Callable[[Any], Any]) -> Self:
        """Return the joint with other numbers, each of which is computed from the one it had."""
        views = tuple(view.with_numbers(number) for view in self.views)
        return dataclasses.replace(self, views=views, count=number(self.count))

    def of(self, *values: torch.Tensor, followed: Sequence[bool] = ()) -> tuple[torch.Tensor, ...]:
        """Return the values of the results in one memory.

        Args:
            values: one for each result.
            followed: the results whose history is that of this memory. Others keep their own.
        """
        follows = followed if any(followed) else (False,) * len(values)
        whole = None if self.whole is None else values[self.whole]
        if whole is None or whole.stride() != self.views[self.whole or 0].stride:
            memory = torch.empty(self.count, dtype=self.dtype, device=values[0].device)
            if any(follows) and any(overlaps(view.of(memory)) for view in self.views):
                follows = (False,) * len(values)  # a derivative would count elements twice
            self._fill(memory, values, follows)
        else:
            memory = whole if follows[self.whole or 0] else whole.detach()
        taken = (
            view.of(memory) if flag else with_memory(value, view.of(memory.detach()))
            for view, value, flag in zip(self.views, values, follows, strict=True)
        )
        pairs = zip(values, taken, strict=True)
        return tuple(one if one is whole else new for one, new in pairs)

    def _fill(
        self, memory: torch.Tensor, values: Sequence[torch.Tensor], follows: Sequence[bool]
    ) -> None:
        """Copy the values into a new memory, which has the history of those that are followed."""
        known = zip(self.views, values, follows, strict=True)
        for view, value, flag in sorted(known, key=lambda one: one[2]):
            with torch.set_grad_enabled(flag):
                _fill(view.of(memory), value)


Known = TypeVar("Known", bound=Alias | Joint)


def _fill(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a view of a memory, each element of an expanded one once."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    target.copy_(value)


def at_call(one: Known, variables: Sequence[Var], *values: Any) -> Known:
    """Return an alias or joint with numbers for expressions over the symbols that the variables
    bind.
    """
    known = bind(variables, values)
    return one.with_numbers(lambda it: compute(it, known) if isinstance(it, Expr) else it)


def with_memory(value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the history of one value and the memory of another that equals it.

    A backward that reads the value goes on reading the memory that it had.
    """
    if not value.requires_grad:
        return memory
    value = value if value.is_leaf else internals.with_history(value)
    value.data = memory
    return value


def aliases_of(
    recorder: Recorder,
    results: Sequence[Any],
    tracers: Sequence[torch.Tensor],
    written: Sequence[int | torch.Tensor],
) -> Iterator[Alias]:
    """Find results that show memory of arguments and of tensors from outside.

    An expanded tensor has several elements at one place in memory. There autograd gives each
    element of a view by its place the mean of the gradients. So the result has this memory, and the
    history of its value.
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
            linked, memory = recorder.history.linked, internals.memory_id(leaf)
            found = [
                _of_written(recorder, place, leaf, target, tracer)
                for target, tracer in targets
                if leaf is not tracer and internals.memory_id(tracer) in linked(memory)
            ]
            value = internals.inner_fake(leaf)
            source, tracer = memories.get(internals.storage_id(value), (0, leaf))
            if not found and tracer is not leaf:
                alias = _in_memory(place, value, source, internals.inner_fake(tracer))
                is_apart = leaf.requires_grad and overlaps(tracer)
                found.append(alias and dataclasses.replace(alias, is_apart=is_apart))
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
    if views is None:
        return None
    whole, *_, value = internals.laid_out_as(views, given)
    alias = _in_memory(place, value, target, whole, is_written=True)
    return alias and dataclasses.replace(alias, is_apart=len(views) > 1 or overlaps(given))


def _in_memory(
    place: int,
    value: torch.Tensor,
    source: int | torch.Tensor,
    whole: torch.Tensor,
    begin: Any = None,
    *,
    is_written: bool = False,
) -> Alias | None:
    """Find the alias of a result that lies in the memory of a source, if both are laid out as in
    eager mode. `begin` is the first element of the source, where `whole` has another one.
    """
    offset = _offset(value, whole, whole.storage_offset() if begin is None else begin)
    if offset is None:
        return None
    size, stride = tuple(map(as_dim, value.shape)), tuple(map(as_dim, value.stride()))
    bits = internals.bits_in_memory(value)
    return Alias(place, source, size, stride, offset, value.dtype, bits, is_written)


def joints_of(recorder: Recorder, results: Sequence[Any], apart: Iterable[int]) -> Iterator[Joint]:
    """Find results that have elements in common with one another, but for those `apart`, which lie
    in memory of arguments and of tensors from outside. Inside another capture, each result is a
    tensor of its own, and only which ones they are is found.
    """
    bound = binders(recorder.inputs).keys()
    found, left = dict[int, list[tuple[int, torch.Tensor]]](), set(apart)
    for place, leaf in enumerate(results):
        if isinstance(leaf, internals.Tracer) and place not in left and not is_wrapped(leaf):
            with internals.no_torch_function():
                value = internals.inner_fake(leaf)
                if recorder.outer is None and not _is_bound(value, bound):
                    continue
                found.setdefault(internals.storage_id(value), []).append((place, value))
    for group in found.values():
        with internals.no_torch_function():
            clusters = _clusters(group) if len(group) > 1 else ()
            for cluster in clusters:
                if recorder.outer is not None:
                    yield Joint(tuple(place for place, _ in cluster))
                else:
                    yield _joint(cluster)


def _is_bound(value: torch.Tensor, bound: Set[Any]) -> bool:
    """Test whether the layout is known from the inputs: no size was found in data."""
    numbers = *value.shape, *value.stride(), value.storage_offset()
    return set(symbols_in(tuple(map(as_dim, numbers)))) <= bound


def _clusters(
    group: Sequence[tuple[int, torch.Tensor]],
) -> list[list[tuple[int, torch.Tensor]]]:
    """The parts of a group of tensors in one memory that hang together by common elements, as the
    sizes of this call say. That parts lie one behind the other becomes a decision of the trace.
    """
    ranges = {place: internals.byte_range(value) for place, value in group}
    spans = {place: tuple(map(number, pair)) for place, pair in ranges.items()}
    ordered = sorted(group, key=lambda one: spans[one[0]])
    clusters, last = list[list[tuple[int, torch.Tensor]]](), ordered[0][0]
    for place, value in ordered:
        apart, near = list[list[tuple[int, torch.Tensor]]](), [(place, value)]
        for cluster in clusters:
            if any(
                spans[place][0] < spans[other][1] and share_elements(value, one)
                for other, one in cluster
            ):
                near += cluster
            else:
                apart.append(cluster)
        clusters = [*apart, near]
        if spans[last][1] <= spans[place][0]:
            bool(ranges[last][1] <= ranges[place][0])
        last = max(last, place, key=lambda one: spans[one][1])
    return [sorted(cluster, key=lambda one: one[0]) for cluster in clusters if len(cluster) > 1]


def _joint(cluster: Sequence[tuple[int, torch.Tensor]]) -> Joint:
    """The joint of results that hang together. To compare symbols is a decision of the trace."""
    values = [value for _, value in cluster]
    ranges = [internals.byte_range(value) for value in values]
    start, end = min(first for first, _ in ranges), max(last for _, last in ranges)
    fills = (
        not internals.bits_in_memory(value)
        and bool(value.numel() * value.itemsize == end - start)
        and bool(first == start)
        and bool(last == end)
        for value, (first, last) in zip(values, ranges, strict=True)
    )
    widest = max(values, key=lambda one: (one.itemsize, one.is_complex()))
    whole = next((i for i, one in enumerate(fills) if one and _fit(values, values[i])), None)
    of = widest if whole is None else values[whole]
    begin = start // of.itemsize
    views = (_in_memory(place, value, 0, of, begin, is_written=False) for place, value in cluster)
    return Joint(
        tuple(place for place, _ in cluster),
        tuple(filter(None, views)),
        as_dim(-((begin * of.itemsize - end) // of.itemsize)),
        of.dtype,
        whole,
    )


def _fit(values: Sequence[torch.Tensor], source: torch.Tensor) -> bool:
    """Test whether the elements of all of these lie in a source without a part of one."""
    return all(_offset(value, source, 0) is not None for value in values)


def _offset(result: torch.Tensor, source: torch.Tensor, begin: Any) -> Any:
    """The offset of a result in its source, in the unit of `Alias`; None if their elements do not
    fit. The source begins at that element.
    """
    is_pair = result.is_complex() and not source.is_complex() and source.itemsize < result.itemsize
    unit = result.itemsize // 2 if is_pair else result.itemsize
    if any(one.itemsize % unit for one in (result, source)):
        return None
    first = begin * (source.itemsize // unit)
    return as_dim(result.storage_offset() * (result.itemsize // unit) - first)
