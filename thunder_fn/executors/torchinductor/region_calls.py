"""A region as programs call it: on the torch executor until it is compiled, then compiled for
the layouts that it meets.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import torch

from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.torchinductor import store
from thunder_fn.executors.torchinductor.codegen import Job, Strides, closed_region
from thunder_fn.executors.torchinductor.compiling import Failed, Function, compile_jobs
from thunder_fn.executors.torchinductor.layouts import Variants, layout_of, strides_for
from thunder_fn.executors.torchinductor.loop_plan import is_loop, loop_on_fakes
from thunder_fn.executors.torchinductor.loops import generate
from thunder_fn.executors.torchinductor.parts import Part, join, parts_of
from thunder_fn.extend.regions import evaluate, find_aliases, is_dense_layout, lower, take
from thunder_fn.ir.scoped import setting
from thunder_fn.ir.symbols import is_symbolic
from thunder_fn.ir.trace import TensorType, Trace, Var, static_shape
from thunder_fn.torch_internals import inductor as inductor_internals

Calls = dict["Region", dict[tuple[Strides, ...], tuple[Any, ...]]]
"""The layouts with which each region was called, and its results then."""

MAX_LAYOUTS = 8
"""The most layouts of its inputs that a program or region is compiled for. Calls with others run
on the torch executor.
"""

RECORDING: ContextVar[Calls | None] = ContextVar("thunder_fn_region_calls", default=None)


def recording(calls: Calls) -> AbstractContextManager[None]:
    """Note the layouts that regions are called with inside."""
    return setting(RECORDING, calls)


class Region:
    """A region as the program calls it until it is compiled: on the torch executor.

    Compiled, it may write its results over the inputs that are `donated`, by place.
    """

    donated: tuple[int, ...] = ()
    base: Region | None = None
    """The region without inputs to write over."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.known: WeakValueDictionary[tuple[int, ...], Region] = WeakValueDictionary()
        self.closed, self.constants = closed_region(trace)
        self.is_symbolic = is_symbolic(trace)
        whole = Part(
            self.closed,
            tuple(range(len(self.closed.inputs))),
            tuple(var.index for var in _vars(self.closed)),
        )
        self.parts = (whole,) if self.is_symbolic else parts_of(self.closed)

    def donating(self, places: tuple[int, ...]) -> Region:
        """The region where nobody reads these inputs afterwards, nor anything that shares memory
        with them.
        """
        region = self.known.get(places)
        if region is None:
            region = self.known[places] = copy.copy(self)
            region.donated, region.base = places, self
        return region

    @cached_property
    def on_torch(self) -> Callable[..., tuple[Any, ...]]:
        """The region as the torch executor runs it, equal parts lowered once."""
        if self.base is not None:
            return self.base.on_torch
        if len(self.parts) == 1:
            return lower(self.trace, below_autograd=True).run
        known = {
            trace: lower(trace, below_autograd=True).run
            for trace in {part.trace for part in self.parts}
        }
        return self._joined({part: known[part.trace] for part in self.parts})

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        calls = RECORDING.get()
        if calls is None:
            return self.on_torch(*inputs)
        known, layout = calls.setdefault(self, {}), self.layout_of(inputs)
        if not inductor_internals.are_fake(inputs):
            known[layout] = ()
            return self.on_torch(*inputs)
        if layout not in known:  # tensors without values are all alike
            known[layout] = self.on_fakes(inputs)
        return known[layout]

    def on_fakes(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The region on tensors without values."""
        if is_loop(self.trace):
            return loop_on_fakes(self.trace, inputs)
        if len(self.parts) == 1:
            return evaluate(self.trace, inputs)
        known: dict[Any, tuple[Any, ...]] = {}

        def once(part: Part, *given: torch.Tensor) -> tuple[Any, ...]:
            key = part.trace, tuple(tensor.stride() for tensor in given)
            if key not in known:
                known[key] = evaluate(part.trace, given)
            return known[key]

        return self._joined({part: partial(once, part) for part in self.parts})(*inputs)

    def dry_run(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """Run the compiled region on tensors without values: its results, and its allocations."""
        functions: dict[Part, Function] = {
            part: dry_function(job) for part, job in self.jobs(self.layout_of(inputs)).items()
        }
        return self._joined(functions)(*inputs)

    def layout_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The strides of the inputs, or how sizes explain them."""
        return (
            layout_of(inputs) if self.is_symbolic else tuple(tensor.stride() for tensor in inputs)
        )

    def jobs(self, layout: tuple[Any, ...]) -> dict[Part, Job]:
        """The jobs to compile for inputs of this layout."""
        strides = strides_for(self.trace, layout) if self.is_symbolic else layout
        given: dict[int, Any] = dict(
            enumerate((*strides, *(tensor.stride() for tensor in self.constants)))
        )
        threads = torch.get_num_threads()

        def job(part: Part) -> Job:
            # values between parts have no dims
            strides = tuple(given.get(i, ()) for i in part.inputs)
            return Job(part.trace, strides, threads, self.donated_in(part, strides))

        return {part: job(part) for part in self.parts}

    @cached_property
    def last_readers(self) -> dict[int, Part]:
        """The part that reads an input last."""
        return {index: part for part in self.parts for index in part.inputs}

    def donated_in(self, part: Part, strides: Sequence[Strides]) -> tuple[int, ...]:
        """The inputs of a part, by place, that it may write to."""
        if self.is_symbolic:
            return ()
        return tuple(
            place
            for place, (index, var) in enumerate(zip(part.inputs, part.trace.inputs, strict=True))
            if index in self.donated
            and self.last_readers[index] is part
            and isinstance(var.type, TensorType)
            and is_dense_layout(static_shape(var.type), strides[place])
        )

    def variants(
        self, functions: dict[tuple[Any, ...], dict[Part, Function]], *, tiered: bool
    ) -> Variants:
        """The region of a program with symbols, which chooses by the layouts of its inputs."""
        known = {layout: self._joined(found) for layout, found in functions.items()}
        more = (lambda layout: None) if tiered else self._compiled
        return Variants(self.trace, known, self._job, self.on_torch, more)

    def _job(self, layout: tuple[Any, ...]) -> Job:
        return next(iter(self.jobs(layout).values()))

    def _compiled(self, layout: tuple[Any, ...]) -> Function | None:
        """The region, compiled for one more layout."""
        jobs = self.jobs(layout)
        found = compile_jobs(jobs.values())
        reason = next(
            (result.reason for result in found.values() if isinstance(result, Failed)), None
        )
        if reason is not None:
            warn_of_failure("a program", [self], reason)
            return None
        return self._joined({part: found[job] for part, job in jobs.items()})  # type: ignore[misc]

    def bound(self, functions: dict[tuple[Strides, ...], dict[Part, Function]]) -> Function:
        """The compiled region: by the strides of its inputs where it is called with several."""
        whole = {strides: self._joined(found) for strides, found in functions.items()}
        if len(whole) == 1:
            return next(iter(whole.values()))
        return lambda *inputs: whole[tuple(tensor.stride() for tensor in inputs)](*inputs)

    def by_layout(
        self, functions: dict[tuple[Strides, ...], dict[Part, Function]], *, tiered: bool
    ) -> ByLayout:
        """The region where only a call knows the strides of its inputs."""
        known = {strides: self._joined(found) for strides, found in functions.items()}
        return ByLayout(known, self.on_torch, (lambda strides: None) if tiered else self._compiled)

    @cached_property
    def on_its_own(self) -> Callable[..., tuple[Any, ...]]:
        """The region compiled by itself, as `verify` asks for it; on the torch executor where it
        has symbols.
        """
        return (
            self.on_torch
            if self.is_symbolic or is_loop(self.trace)
            else self.by_layout({}, tiered=False)
        )

    def _joined(self, functions: dict[Part, Function]) -> Function:
        function, constants = join(self.closed, self.parts, functions), self.constants
        count = len(self.trace.inputs)  # behind the inputs and the constants are symbols
        return (
            (lambda *given: function(*given[:count], *constants, *given[count:]))
            if constants
            else function
        )

    def has_private_outputs(self) -> bool:
        """Test whether an output may lie in a constant's memory, where nobody may write to it."""
        first = len(self.trace.inputs)
        own = {first + position for position in range(len(self.trace.constants))}
        private = find_aliases(self.trace).among(own)
        return any(isinstance(atom, Var) and atom.index in private for atom in self.trace.outputs)


class ByLayout:
    """A region that is compiled for each layout that it is called with; from the ninth on it
    runs on the torch executor.
    """

    def __init__(
        self,
        known: dict[tuple[Strides, ...], Function],
        on_torch: Function,
        more: Callable[[Any], Function | None],
    ) -> None:
        self.known, self.on_torch, self.more, self.lock = known, on_torch, more, threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        return self._function(inputs)(*inputs)

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """Run on inputs that only the box holds."""
        return take(self._function(box), box)

    def _function(self, inputs: Sequence[torch.Tensor]) -> Function:
        strides = tuple([tensor.stride() for tensor in inputs])
        return self.known.get(strides) or self._compile(strides)

    def _compile(self, strides: tuple[Strides, ...]) -> Function:
        with self.lock:
            if strides not in self.known and len(self.known) < MAX_LAYOUTS:
                self.known[strides] = self.more(strides) or self.on_torch
            return self.known.get(strides, self.on_torch)


def _vars(trace: Trace) -> tuple[Var, ...]:
    return tuple(atom for atom in trace.outputs if isinstance(atom, Var))


def warn_of_failure(program: str, regions: Sequence[Region], reason: str) -> None:
    """Say once that these regions are not compiled, and why."""
    first = regions[0].trace
    source = next(
        (equation.source for equation in first.equations if equation.source is not None), None
    )
    names = ", ".join(dict.fromkeys(region.trace.name for region in regions))
    what = (
        f"inductor: {names} of {program} could not be compiled and runs on the torch executor:"
        f" {reason}"
    )
    fix = (
        "Install a C++ compiler and name it in the environment variable CXX, or leave the inductor"
        " executor out."
    )
    if "compiler" not in reason:
        fix = (
            "The results are right, but slower. Leave the inductor executor out to run without this"
            " warning."
        )
    warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=2)


# ---- on tensors without values ----


@lru_cache(maxsize=256)
def dry_function(job: Job) -> Callable[..., Any]:
    """The function of a job, as it was compiled or would be, without kernels. Nothing is compiled.

    Raises:
        Exception: whatever Inductor raises.
    """
    code = store.code_of(job) or generate(job)
    nothing = dict.fromkeys((name for name, _ in code.kernels), _nothing)
    function = store.function_of(code.text, nothing, dict(code.constants))
    context = function.__globals__
    context.update({name: ours for name, ours in _ALLOCATORS.items() if name in context})
    return function


def _nothing(*_: Any) -> None:
    """Stand in for a kernel, and do nothing."""


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


def _reinterpreted(
    tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, shape, strides, int(tensor.storage_offset()) + offset)


_ALLOCATORS: Mapping[str, Callable[..., Any]] = {
    "empty_strided_cpu": _empty,
    "empty_strided_cpu_pinned": _empty,
    "reinterpret_tensor": _reinterpreted,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "gemm_address": _nothing,
}
"""Functions of C++ that Inductor's code calls past everything that knows tensors without values."""
