"""Regions of programs with symbols: one definition for all sizes, for inputs of each layout that
they meet.

A definition of such a region has inputs of any size (-1). Sizes inside it are those of its inputs,
and expressions of them, such as `2*s0 + 1`, are scalar inputs. Decisions made while the definition
was written, about sizes and by the ops that eager would run, are checked at each call. A call for
which they do not hold runs on the torch executor. So does one with a size of 1, which nvFuser would
take for a dim to broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.nvfuser.definitions import Definition, Definitions, Region, define
from thunder_fn.executors.nvfuser.writer import Library
from thunder_fn.executors.torchinductor.codegen import Job, calls, fakes_of_job
from thunder_fn.executors.torchinductor.layouts import Layout, Variants, is_unexplained, strides_for
from thunder_fn.ir.symbols import hint_of
from thunder_fn.ir.trace import Dim, Expr, NumberType, TensorType, Trace, as_dim
from thunder_fn.torch_internals import Numbers, inductor as inductor_internals


@dataclass(frozen=True, slots=True)
class Sized:
    """A definition for all sizes for which it holds.

    Attributes:
        values: of the symbols, given what the region is called with.
        holds: whether a definition is for symbols of these values.
        scalars: what it takes behind its tensors for these values.
        strides: of its outputs for these values.
        described: the inputs whose strides sizes do not explain, and what nvFuser was told of them.
    """

    definition: Definition
    values: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
    holds: Callable[..., bool]
    scalars: Callable[..., tuple[Any, ...]]
    strides: Callable[..., tuple[Any, ...]]
    described: tuple[tuple[int, Any], ...]
    describe: Callable[..., Any]

    def __call__(self, inputs: Sequence[Any], extra: Sequence[Any]) -> list[torch.Tensor] | None:
        values = self.values(inputs, extra)
        if not self.holds(*values):
            return None
        for position, known in self.described:
            if self.describe(inputs[position].shape, inputs[position].stride()) != known:
                return None
        return self.definition.run(inputs, self.scalars(*values), self.strides(*values))


def define_for_all_sizes(library: Library, job: Job, device: str) -> Sized:
    """Write a region whose sizes are symbols, for inputs of these strides."""
    eager, numbers = _on_fakes(job)
    definition = define(library, job.region, job.strides, device, eager, numbers)
    names = ", ".join(map(str, job.symbols))
    conditions = [f"{size} > 1" for size in dict.fromkeys(_sizes(job.region))]
    conditions += [
        f"({item})"
        for item in dict.fromkeys(
            (*map(str, numbers.constraints), *map(str, job.region.constraints))
        )
    ]
    shapes = [
        var.type.shape if isinstance(var.type, TensorType) else () for var in job.region.inputs
    ]
    unexplained = [
        position for position in definition.used if any(map(is_unexplained, job.strides[position]))
    ]
    return Sized(
        definition,
        _values(job),
        _function(names, " and ".join(conditions) or "True"),
        _function(names, _tuple_text(definition.scalars)),
        _function(names, _tuple_text(map(_tuple_text, definition.strides))),
        tuple(
            (
                position,
                library.compute_tensor_descriptor(
                    hint_of(shapes[position]), hint_of(job.strides[position])
                ),
            )
            for position in unexplained
        ),
        library.compute_tensor_descriptor,
    )


def _on_fakes(job: Job) -> tuple[list[tuple[Dim, ...]], Numbers]:
    """The strides that eager gives the outputs, and the decisions on the way."""
    fakes, numbers = fakes_of_job(job)
    with inductor_internals.running(fakes, numbers):
        outputs = calls(job)(*fakes)
        return [tuple(map(as_dim, output.stride())) for output in outputs], numbers


def _sizes(region: Trace) -> Iterator[Expr]:
    """The sizes of everything in the region that are symbols."""
    for var in (
        *region.inputs,
        *(var for equation in region.equations for var in equation.outputs),
    ):
        if isinstance(var.type, TensorType):
            yield from (size for size in var.type.shape if isinstance(size, Expr))


def _values(job: Job) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]:
    """The values of the job's symbols, in order, given its inputs and its extra symbols."""
    places = {
        var.type.value.value: f"inputs[{position}]"
        for position, var in enumerate(job.region.inputs)
        if isinstance(var.type, NumberType) and isinstance(var.type.value, Expr)
    }
    places.update(
        (symbol, f"extra[{position}]") for position, symbol in enumerate(job.extra_symbols)
    )
    return _function("inputs, extra", _tuple_text(places[symbol] for symbol in job.symbols))


def _tuple_text(items: Any) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def _function(names: str, text: str) -> Callable[..., Any]:
    return eval(f"lambda {names}: {text}", {"math": math})


class SizedRegion(Region):
    """A region with symbols as a program calls it: defined once for each layout of its inputs."""

    def __init__(
        self, library: Library, definitions: Definitions, trace: Trace, device: str
    ) -> None:
        super().__init__(library, definitions, trace, device)
        self.variants = Variants(trace, {}, self.job, self.on_torch, self.defined)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.on_torch(*inputs) if internals.inside_torch_func() else self.variants(*inputs)

    def job(self, layout: Layout) -> Job:
        """The kernel, for inputs of this layout."""
        strides = (
            *strides_for(self.trace, layout),
            *(constant.stride() for constant in self.constants),
        )
        return Job(self.kernel, strides, torch.get_num_threads())

    def defined(self, layout: Layout) -> Callable[..., tuple[Any, ...] | None]:
        """A function of the region's inputs and of the symbols that are no inputs; None where it
        is for other sizes.
        """
        job, count = self.job(layout), len(self.trace.inputs)
        kept = self.definitions.find(
            self.kernel, job.strides, lambda: define_for_all_sizes(self.library, job, self.device)
        )

        def run(*given: Any) -> tuple[Any, ...] | None:
            inputs = (*given[:count], *self.constants)
            results = kept(self.warn, inputs, given[count:])
            return None if results is None else self.views(*inputs, *results)

        return run
