"""Regions of programs with symbols: compiled once for all sizes, for inputs of each layout that
they meet.

    def region(v0, v1, s2):
        s0 = v0.shape[0]
        if v0.stride() == (16, 1) and v1.stride() == (1,):
            result = variant0(v0, v1, s2, s0)
            if result is not None: return result
        return otherwise(v0, v1, s2)

The layout of an input is its strides as expressions of its sizes. Compiled code gives None for
sizes that Inductor decided otherwise for; those run on the torch executor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from thunder_fn import torch_internals as internals
from thunder_fn.executors.torchinductor.codegen import Job
from thunder_fn.extend.regions import stride_pattern, strides_of
from thunder_fn.ir.symbols import binders, hint_of, size_symbol
from thunder_fn.ir.text import program_text, run_text
from thunder_fn.ir.trace import Dim, Expr, TensorType, Trace

Function = Callable[..., Any]
Layout: TypeAlias = tuple[tuple[int | None, ...], ...]
"""The explanation of each input's strides, see `stride_pattern`; nothing for a number."""

MAX_VARIANTS = 8
"""The most layouts that a region is compiled for; others run on the torch executor."""

_STRIDE = 1_000_000
"""The numbers of symbols that stand for strides which sizes do not explain."""


def layout_of(inputs: Sequence[Any]) -> Layout:
    """The layout of these inputs."""
    return tuple(
        stride_pattern(value.shape, value.stride()) if isinstance(value, torch.Tensor) else ()
        for value in inputs
    )


def strides_for(region: Trace, layout: Layout) -> tuple[tuple[Dim, ...], ...]:
    """The strides of the inputs as expressions; those that sizes do not explain are symbols of
    their own.
    """
    return tuple(
        (
            strides_of(pattern, type.shape, lambda dim: _stride_symbol(position, dim, type))
            if isinstance(type, TensorType)
            else ()
        )
        for position, (type, pattern) in enumerate(zip(region.input_types, layout, strict=True))
    )


def _stride_symbol(position: int, dim: int, type: TensorType) -> Expr:
    hint = 2 * (len(type.shape) - dim)  # as of a slice of a larger tensor in the usual order
    for size in type.shape:
        hint *= max(hint_of(size), 1)
    return Expr(size_symbol(_STRIDE + 100 * position + dim, hint))


class Variants:
    """A region of a program with symbols, compiled for the layouts that it has met."""

    def __init__(
        self,
        region: Trace,
        functions: Mapping[Layout, Function],
        jobs: Callable[[Layout], Job],
        on_torch: Function,
        more: Callable[[Layout], Function | None],
    ) -> None:
        self.region = region
        self.functions = functions
        self.jobs = jobs
        self.on_torch = on_torch
        self.more = more
        self.lock = threading.Lock()
        self.run = self.written()

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.run(*inputs)

    def written(self) -> Function:
        """The function that chooses by layout."""
        names = [str(var) for var in self.region.inputs]
        lines = [f"def region({', '.join(names)}):"]
        context: dict[str, Any] = {"otherwise": self.otherwise}
        known = {
            symbol: f"{var}.shape[{dim}]" if dim is not None else str(var)
            for symbol, (var, dim) in binders(self.region.inputs).items()
        }
        lines += [f"    {symbol} = {text}" for symbol, text in known.items()]
        for number, (layout, function) in enumerate(self.functions.items()):
            context[f"variant{number}"] = function
            job, checks = self.jobs(layout), list[str]()
            for name, var, strides in zip(names, self.region.inputs, job.strides, strict=False):
                if isinstance(var.type, TensorType):
                    lines += [
                        f"    {stride} = {name}.stride({dim})"
                        for dim, stride in enumerate(strides)
                        if is_unexplained(stride)
                    ]
                    checks.append(
                        f"{name}.stride() == ({''.join(f'{stride}, ' for stride in strides)})"
                    )
            given = ", ".join([*names, *map(str, job.extra_symbols)])
            lines += [
                f"    if {' and '.join(checks) or True}:",
                f"        result = variant{number}({given})",
            ]
            lines.append("        if result is not None: return result")
        lines.append(f"    return otherwise({', '.join(names)})")
        run_text(program_text(lines), "inductor region", context)
        return context["region"]

    def otherwise(self, *inputs: Any) -> tuple[Any, ...]:
        """A call with another layout: compile for it, or run it on the torch executor."""
        layout = layout_of(inputs)
        with self.lock:
            is_new = layout not in self.functions and len(self.functions) < MAX_VARIANTS
            if is_new:
                function = self.more(layout)
                self.functions = {**self.functions, layout: function or self._none}
                self.run = self.written()
        return self.run(*inputs) if is_new else self.on_torch(*inputs)

    def _none(self, *inputs: Any) -> None:
        """Stand for a variant that could not be compiled."""


def is_unexplained(stride: Dim) -> bool:
    """Test for a stride that is a symbol of its own."""
    return isinstance(stride, Expr) and stride.value.is_Symbol and int(str(stride)[1:]) >= _STRIDE


def matcher(inputs: tuple[Any, ...]) -> Callable[..., bool]:
    """A check that inputs have the layout of these."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    guard = internals.tensor_guard(tensors)
    if len(tensors) == len(inputs):
        return guard
    return lambda *given: guard(*(value for value in given if isinstance(value, torch.Tensor)))
