"""Programs with compiled regions: which layouts regions are called with, and when compiled code takes over.

A region is compiled for the strides of its inputs. Those follow from the strides of the program's inputs, so one run of
the program, on tensors without values, finds them for all regions, which are then compiled together. Compiled regions
give results in the layout that eager gives, so what was found stays true. Where only values decide on a layout, as
after a choice or a loop, or code that is not PyTorch's, regions look at the layouts of each call (`ByLayout`).

Until its regions are compiled a program runs on the torch executor.
"""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch

from thunder_fn import torch_internals as internals, torch_internals_inductor as inductor_internals
from thunder_fn.errors import RegionWarning, located
from thunder_fn.executors.compiled.codegen import Job, Strides, closed_region
from thunder_fn.executors.compiled.compiling import Failed, Function, compile_jobs, find
from thunder_fn.executors.compiled.dry_run import dry_function
from thunder_fn.executors.compiled.layouts import Variants, layout_of, matcher, strides_for
from thunder_fn.executors.compiled.loop_plan import is_loop, loop_on_fakes
from thunder_fn.executors.compiled.parts import Part, join, parts_of
from thunder_fn.executors.compiled.worker import WORKER
from thunder_fn.executors.reuse import find_aliases
from thunder_fn.executors.taking import take
from thunder_fn.executors.torch_executor import lower
from thunder_fn.interpreters.evaluate import evaluate
from thunder_fn.symbols import is_symbolic
from thunder_fn.trace import Trace, Var

Layout = tuple[Strides | None, ...]
Calls = dict["Region", dict[tuple[Strides, ...], tuple[Any, ...]]]
"""For each region that was called, the layouts it was called with, and what it gave then."""

Jobs = dict["Region", dict[tuple[Strides, ...], dict[Part, Job]]]

MAX_LAYOUTS = 8
"""A program is compiled for so many layouts of its inputs; calls with others run on the torch executor."""

_recording: ContextVar[Calls | None] = ContextVar("thunder_fn_region_calls", default=None)


@contextmanager
def recording(calls: Calls) -> Generator[None]:
    """Inside, the layouts that regions are called with are noted."""
    token = _recording.set(calls)
    try:
        yield
    finally:
        _recording.reset(token)


class Region:
    """A region as the program calls it until it is compiled: on the torch executor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.closed, self.constants = closed_region(trace)
        self.is_symbolic = is_symbolic(trace)
        whole = Part(self.closed, tuple(range(len(self.closed.inputs))), tuple(var.index for var in _vars(self.closed)))
        self.parts = (whole,) if self.is_symbolic else parts_of(self.closed)

    @cached_property
    def on_torch(self) -> Callable[..., tuple[Any, ...]]:
        """The region as the torch executor runs it, equal parts lowered once."""
        if len(self.parts) == 1:
            return lower(self.trace, below_autograd=True).run
        known = {trace: lower(trace, below_autograd=True).run for trace in {part.trace for part in self.parts}}
        return self._joined({part: known[part.trace] for part in self.parts})

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        calls = _recording.get()
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
        """What the compiled region allocates and gives, on tensors without values."""
        functions: dict[Part, Function] = {
            part: dry_function(job) for part, job in self.jobs(self.layout_of(inputs)).items()
        }
        return self._joined(functions)(*inputs)

    def layout_of(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """The strides of the inputs, or how sizes explain them."""
        return layout_of(inputs) if self.is_symbolic else tuple(tensor.stride() for tensor in inputs)

    def jobs(self, layout: tuple[Any, ...]) -> dict[Part, Job]:
        """What there is to compile for inputs of this layout."""
        strides = strides_for(self.trace, layout) if self.is_symbolic else layout
        given = dict(enumerate((*strides, *(tensor.stride() for tensor in self.constants))))
        threads = torch.get_num_threads()  # what a part gets from another has no dims, and so no strides
        return {part: Job(part.trace, tuple(given.get(i, ()) for i in part.inputs), threads) for part in self.parts}

    def variants(self, functions: dict[tuple[Any, ...], dict[Part, Function]], *, tiered: bool) -> Variants:
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
        reason = next((result.reason for result in found.values() if isinstance(result, Failed)), None)
        if reason is not None:
            _warn("a program", [self], reason)
            return None
        return self._joined({part: found[job] for part, job in jobs.items()})  # type: ignore[misc]

    def bound(self, functions: dict[tuple[Strides, ...], dict[Part, Function]]) -> Function:
        """The compiled region: by the strides of its inputs where it is called with several."""
        whole = {strides: self._joined(found) for strides, found in functions.items()}
        if len(whole) == 1:
            return next(iter(whole.values()))
        return lambda *inputs: whole[tuple(tensor.stride() for tensor in inputs)](*inputs)

    def by_layout(self, functions: dict[tuple[Strides, ...], dict[Part, Function]], *, tiered: bool) -> ByLayout:
        """The region where only a call knows the strides of its inputs."""
        known = {strides: self._joined(found) for strides, found in functions.items()}
        return ByLayout(known, self.on_torch, (lambda strides: None) if tiered else self._compiled)

    @cached_property
    def on_its_own(self) -> Callable[..., tuple[Any, ...]]:
        """The region compiled by itself, as `verify` asks for it; on the torch executor where it has symbols."""
        return self.on_torch if self.is_symbolic or is_loop(self.trace) else self.by_layout({}, tiered=False)

    def _joined(self, functions: dict[Part, Function]) -> Function:
        function, constants = join(self.closed, self.parts, functions), self.constants
        count = len(self.trace.inputs)  # behind the inputs and the constants are symbols
        return (lambda *given: function(*given[:count], *constants, *given[count:])) if constants else function

    def has_private_outputs(self) -> bool:
        """An output may lie in a constant's memory, where nobody may write to it."""
        first = len(self.trace.inputs)
        own = {first + position for position in range(len(self.trace.constants))}
        buffers = find_aliases(self.trace).buffers
        return any(isinstance(atom, Var) and buffers[atom.index] & own for atom in self.trace.outputs)


class ByLayout:
    """A region that is compiled for each layout that it is called with; from the ninth on it runs on the torch executor."""

    def __init__(
        self, known: dict[tuple[Strides, ...], Function], on_torch: Function, more: Callable[[Any], Function | None]
    ) -> None:
        self.known, self.on_torch, self.more, self.lock = known, on_torch, more, threading.Lock()

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        return self._function(inputs)(*inputs)

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """The same for inputs that only the box holds."""
        return take(self._function(box), box)

    def _function(self, inputs: Sequence[torch.Tensor]) -> Function:
        strides = tuple([tensor.stride() for tensor in inputs])
        return self.known.get(strides) or self._compile(strides)

    def _compile(self, strides: tuple[Strides, ...]) -> Function:
        with self.lock:
            if strides not in self.known and len(self.known) < MAX_LAYOUTS:
                self.known[strides] = self.more(strides) or self.on_torch
            return self.known.get(strides, self.on_torch)


class Staged:
    """A program whose regions are compiled when it is first called with inputs of some layout.

    Law: it computes what the program does, at all times; which of its regions are compiled changes rounding only.

    `settled` says that the layouts that one run finds are those of all runs on inputs of its layout.
    """

    def __init__(self, run: types.FunctionType, *, tiered: bool, settled: bool) -> None:
        self.run, self.tiered, self.settled = run, tiered, settled
        self.is_symbolic = any(region.is_symbolic for region in regions_of(run))
        self.lock = threading.Lock()
        self.ready: dict[tuple[Layout, int], Callable[..., tuple[Any, ...]]] = {}
        self.matches: Callable[..., bool] = _never
        self.fast: Callable[..., tuple[Any, ...]] = run

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.matches(*inputs):
            return self.fast(*inputs)
        return self._call_slowly(inputs)

    def take(self, box: list[Any]) -> tuple[Any, ...]:
        """The same for values that only the box holds."""
        if self.matches(*box):
            return take(self.fast, box)
        inputs = tuple(box)
        box.clear()
        return self._call_slowly(inputs)

    def _call_slowly(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if internals.inside_torch_func() or _recording.get() is not None:
            return self.run(*inputs)
        key = () if self.is_symbolic else _layout(inputs), torch.get_num_threads()
        with self.lock:
            known = self.ready.get(key)
            if known is None and len(self.ready) < MAX_LAYOUTS:
                return self._first_call(key, inputs)
            if known is not None:
                self.fast, self.matches = known, _always if self.is_symbolic else matcher(inputs)
        return (known or self.run)(*inputs)

    def _first_call(self, key: tuple[Layout, int], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Find what there is to compile, and compile it: before the call is answered, or meanwhile."""
        calls: Calls = {}
        outputs = None
        if self.tiered or not _run_on_fakes(self.run, inputs, calls):
            self.settled &= self.tiered
            calls.clear()
            with recording(calls):
                outputs = self.run(*inputs)
        jobs = _jobs(calls)
        wanted = [job for found in jobs.values() for job in _all_jobs(found)]
        if self.tiered and len(find(wanted)) < len(set(wanted)):
            self.ready[key] = self.run
            WORKER.submit(wanted).add_done_callback(lambda future: self._swap(key, jobs, future.result()))
        else:
            self.ready[key] = self._bound(jobs, compile_jobs(wanted))
        return self.ready[key](*inputs) if outputs is None else outputs

    def _swap(
        self,
        key: tuple[Layout, int],
        jobs: Jobs,
        results: dict[Job, Function | Failed],
    ) -> None:
        """From here on calls run compiled code."""
        new = self._bound(jobs, results)
        with self.lock:
            self.ready[key] = new
            self.matches = _never

    def _bound(self, jobs: Jobs, results: dict[Job, Function | Failed]) -> Callable[..., tuple[Any, ...]]:
        """The program with compiled regions in place of those that could be compiled."""
        functions: dict[Region, Function] = {}
        failed: dict[str, list[Region]] = {}
        for region, found in jobs.items():
            reasons = [result.reason for job in _all_jobs(found) if isinstance(result := results[job], Failed)]
            if reasons:
                failed.setdefault(reasons[0], []).append(region)
            else:
                compiled = {
                    strides: {part: results[job] for part, job in parts.items()} for strides, parts in found.items()
                }
                if self.is_symbolic:
                    functions[region] = region.variants(compiled, tiered=self.tiered)  # type: ignore[arg-type]
                elif self.settled:
                    functions[region] = region.bound(compiled)  # type: ignore[arg-type]
                else:
                    functions[region] = region.by_layout(compiled, tiered=self.tiered)  # type: ignore[arg-type]
        for reason, regions in failed.items():
            _warn(self.run.__name__, regions, reason)
        return rebound(self.run, functions)


def regions_of(run: types.FunctionType) -> list[Region]:
    """The regions that a program, or a function that it calls, has."""
    found: list[Region] = []
    known = set[int]()

    def visit(function: types.FunctionType) -> None:
        known.add(id(function))
        for value in function.__globals__.values():
            if isinstance(value, Region):
                found.append(value)
            elif _is_ours(value) and id(value) not in known:
                visit(value)

    visit(run)
    return found


def _is_ours(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith("<thunder_fn")


def has_regions(run: types.FunctionType) -> bool:
    """The text of a program, or of a function that it calls, calls regions."""
    return rebound(run, {}) is not run


def rebound(run: types.FunctionType, functions: Mapping[Region, Function]) -> types.FunctionType:
    """A program's function, and those that it calls, with other functions for regions."""
    known: dict[int, types.FunctionType] = {}

    def visit(function: types.FunctionType) -> types.FunctionType:
        if id(function) in known:
            return known[id(function)]
        known[id(function)] = function
        context = {name: replaced(value) for name, value in function.__globals__.items()}
        if all(
            context[name] is value and not isinstance(value, Region) for name, value in function.__globals__.items()
        ):
            return function
        known[id(function)] = types.FunctionType(function.__code__, context, function.__name__)
        return known[id(function)]

    def replaced(value: Any) -> Any:
        if isinstance(value, Region):
            return functions.get(value, value)
        return visit(value) if _is_ours(value) else value

    return visit(run)


def jobs_of(program: Staged, inputs: Sequence[Any]) -> list[Job]:
    """What there is to compile for inputs like these; nothing if that takes values to know."""
    calls: Calls = {}
    found = _run_on_fakes(program.run, inputs, calls)
    return [job for jobs in _jobs(calls).values() for job in _all_jobs(jobs)] if found else []


def _jobs(calls: Calls) -> Jobs:
    return {region: {strides: region.jobs(strides) for strides in found} for region, found in calls.items()}


def _all_jobs(found: dict[tuple[Strides, ...], dict[Part, Job]]) -> list[Job]:
    return [job for parts in found.values() for job in parts.values()]


def _never(*inputs: Any) -> bool:
    return False


def _always(*inputs: Any) -> bool:
    return True


def _vars(trace: Trace) -> tuple[Var, ...]:
    return tuple(atom for atom in trace.outputs if isinstance(atom, Var))


def _layout(inputs: Sequence[Any]) -> Layout:
    return tuple(value.stride() if isinstance(value, torch.Tensor) else None for value in inputs)


def _run_on_fakes(run: Callable[..., Any], inputs: Sequence[Any], calls: Calls) -> bool:
    """Run a program on tensors without values. False where it needs values, or something in it does not know fakes."""
    try:
        with inductor_internals.fakes_of(inputs) as fakes, recording(calls):
            run(*fakes)
    except Exception:  # noqa: BLE001  then the program is run on the values
        return False
    return True


def _warn(program: str, regions: Sequence[Region], reason: str) -> None:
    first = regions[0].trace
    source = next((equation.source for equation in first.equations if equation.source is not None), None)
    names = ", ".join(dict.fromkeys(region.trace.name for region in regions))
    what = f"inductor: {names} of {program} could not be compiled and runs on the torch executor: {reason}"
    fix = "Install a C++ compiler and name it in the environment variable CXX, or leave the inductor executor out."
    if "compiler" not in reason:
        fix = "The results are right, but slower. Leave the inductor executor out to run without this warning."
    warnings.warn(located(what, source=source, fix=fix), RegionWarning, stacklevel=2)
